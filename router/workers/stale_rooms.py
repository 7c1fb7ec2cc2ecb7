"""Rooms that are over while a worker may still work on them.

The worker gets one Cancel when it mentions them or returns.
"""

from collections import deque
from collections.abc import Sequence

from ...cluster.protocol.messages import Cancel, FirstToken, Reserved, TokenItem
from ..rooms.attempt import RoomEvent

NUM_ORPHANS = 1024  # rooms remembered as cancelled on a worker that still talks about them
MAX_WORKERS = 256  # remembered workers; the oldest is forgotten, and its own lease frees its rooms


class StaleRooms:
    """Stale rooms by instance and generation. A worker of a newer generation has dropped them itself."""

    def __init__(self) -> None:
        self._rooms: dict[str, tuple[int, tuple[tuple[str, int], ...]]] = {}

    def __repr__(self) -> str:
        return f"StaleRooms({len(self._rooms)} workers)"

    def keep(self, instance: str, generation: int, rooms: Sequence[tuple[str, int]]) -> None:
        """Remembers the rooms of a worker that was given up, each with its newest epoch."""
        if rooms:
            self._rooms[instance] = generation, tuple(rooms)
        while len(self._rooms) > MAX_WORKERS:
            self._rooms.pop(next(iter(self._rooms)))

    def take(self, instance: str, generation: int) -> tuple[tuple[str, int], ...]:
        """The rooms that a worker returning as `generation` must drop; empty when called again."""
        kept, rooms = self._rooms.pop(instance, (generation, ()))
        return rooms if kept == generation else ()


class Orphans:
    """Rooms that a worker mentioned although they are over."""

    def __init__(self) -> None:
        self._told: deque[tuple[str, str]] = deque(maxlen=NUM_ORPHANS)

    def __repr__(self) -> str:
        return f"Orphans({len(self._told)} told)"

    def answer(self, room: str, instance: str, event: RoomEvent) -> Cancel | None:
        """A Cancel for a worker that works on a room that is over, once per room: an earlier Cancel may be
        lost."""
        if not isinstance(event, (Reserved, FirstToken, TokenItem)) or (room, instance) in self._told:
            return None
        self._told.append((room, instance))
        return Cancel(room=room, epoch=event.epoch, instance=instance)
