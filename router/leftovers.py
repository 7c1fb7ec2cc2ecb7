"""Rooms that a worker which was given up may still hold: it is told when it comes back."""

from collections.abc import Sequence

MAX_WORKERS = 256  # remembered; the oldest is forgotten, and the lease on its side frees what it holds


class Leftovers:
    """By instance, and for one generation of it: a worker that gave the router up too has dropped them itself."""

    def __init__(self) -> None:
        self._rooms: dict[str, tuple[int, tuple[str, ...]]] = {}

    def __repr__(self) -> str:
        return f"Leftovers({len(self._rooms)} workers)"

    def keep(self, instance: str, generation: int, rooms: Sequence[str]) -> None:
        """Remembers the rooms of a worker that was given up."""
        if rooms:
            self._rooms[instance] = generation, tuple(rooms)
        while len(self._rooms) > MAX_WORKERS:
            self._rooms.pop(next(iter(self._rooms)))

    def take(self, instance: str, generation: int) -> tuple[str, ...]:
        """What a worker that comes back as `generation` must be told to drop; once."""
        kept, rooms = self._rooms.pop(instance, (generation, ()))
        return rooms if kept == generation else ()
