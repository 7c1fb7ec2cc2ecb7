"""The rooms of a prefill server: who waits, who is being computed, whose pages wait for their reader."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from ..engine.request import Request


class RoomState(Enum):
    """Where a room stands; it leaves by exactly one road, `PrefillQueues.remove`."""

    QUEUED = "queued"  # no pages yet; owner: the scheduler
    RUNNING = "running"  # pages held, the prompt is being computed chunk by chunk; owner: the scheduler
    HANDED = "handed"  # computed; the pages are pinned for the reader; owner: the transport and its lease
    CLOSING = "closing"  # given up; the pages are pinned until the transport says that nothing reads them


@dataclass(kw_only=True)
class Room:
    """One room on prefill. Times are monotonic seconds."""

    request: Request
    arrived: float
    deadline: float | None
    state: RoomState = RoomState.QUEUED
    started: float = 0.0
    cached_tokens: int = 0
    chunks: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.request.room, self.request.epoch


class PrefillQueues:
    """All rooms by id, in order of arrival."""

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self._rooms: dict[str, Room] = {}

    def __repr__(self) -> str:
        counts = ", ".join(f"{state.value} {self.count(state)}" for state in RoomState)
        return f"<PrefillQueues {counts}>"

    def __iter__(self) -> Iterator[Room]:
        return iter(list(self._rooms.values()))

    def __len__(self) -> int:
        return len(self._rooms)

    @property
    def is_full(self) -> bool:
        return self.count(RoomState.QUEUED) >= self.max_queue

    def count(self, state: RoomState) -> int:
        return sum(room.state is state for room in self._rooms.values())

    def of(self, state: RoomState) -> list[Room]:
        return [room for room in self._rooms.values() if room.state is state]

    def get(self, room: str, epoch: int | None = None) -> Room | None:
        """The room, unless it is unknown or another attempt."""
        found = self._rooms.get(room)
        return found if found is not None and epoch in (None, found.request.epoch) else None

    def add(self, room: Room) -> None:
        assert room.request.room not in self._rooms, f"{room.request.room} is here already"
        self._rooms[room.request.room] = room

    def remove(self, room: Room) -> None:
        del self._rooms[room.request.room]
