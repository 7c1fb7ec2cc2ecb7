"""The table of a worker's rooms. Both roles use it, so one place distinguishes the attempts of a room."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

MAX_CLOSED = 4096  # rooms that are remembered after their end


class TableEntry(Protocol):
    """A room as the table sees it."""

    @property
    def state(self) -> object:
        """A member of the role's enumeration of states."""

    @property
    def key(self) -> tuple[str, int]:
        """(room, epoch)"""


R = TypeVar("R", bound=TableEntry)


class RoomTable(Generic[R]):
    """All attempts in order of arrival.

    An attempt that was given up stays until its pages are free; the table may hold a newer attempt of the
    same room beside it.
    """

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, int], R] = {}
        self._closed: OrderedDict[str, int] = OrderedDict()  # room -> newest epoch that ended or was refused
        self.on_left: Callable[[R], None] = lambda room: None  # called with every attempt that leaves

    def __repr__(self) -> str:
        counts: dict[object, int] = {}
        for room in self._rooms.values():
            counts[room.state] = counts.get(room.state, 0) + 1
        return (
            f"<{type(self).__name__} {', '.join(f'{state} {n}' for state, n in counts.items()) or 'empty'}>"
        )

    def __iter__(self) -> Iterator[R]:
        return iter(list(self._rooms.values()))

    def __len__(self) -> int:
        return len(self._rooms)

    def names(self) -> set[str]:
        """The ids of all rooms in the table."""
        return {name for name, _ in self._rooms}

    def count(self, state: object) -> int:
        """Number of attempts in `state`."""
        return sum(room.state is state for room in self._rooms.values())

    def of(self, state: object) -> list[R]:
        """The attempts in `state`, oldest first."""
        return [room for room in self._rooms.values() if room.state is state]

    def get(self, room: str, epoch: int) -> R | None:
        """This attempt of the room; None when the table does not hold it."""
        return self._rooms.get((room, epoch))

    def attempts(self, room: str) -> list[R]:
        """Every attempt of the room in the table, oldest first."""
        return [found for (name, _), found in self._rooms.items() if name == room]

    def add(self, room: R) -> None:
        """Add a new attempt."""
        assert room.key not in self._rooms, f"{room.key} is here already"
        self._rooms[room.key] = room

    def remove(self, room: R) -> None:
        """Remove an attempt for good and call `on_left`."""
        del self._rooms[room.key]
        self._remember(*room.key)
        self.on_left(room)

    def cancel(self, room: str, epoch: int) -> list[R]:
        """The attempts up to `epoch` in the table, oldest first.

        A later order for one of these epochs is ignored.
        """
        self._remember(room, epoch)
        return self.up_to(room, epoch)

    def turned_away(self, room: str, epoch: int) -> None:
        """Remember an attempt that was refused, so that a repeated order for it is ignored."""
        self._remember(room, epoch)

    def up_to(self, room: str, epoch: int) -> list[R]:
        """The attempts of the room up to `epoch` in the table, oldest first."""
        return [found for found in self.attempts(room) if found.key[1] <= epoch]

    def _remember(self, room: str, epoch: int) -> None:
        self._closed[room] = max(epoch, self._closed.pop(room, epoch))
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)

    def is_known(self, room: str, epoch: int) -> bool:
        """Whether this attempt or a newer one is or was in the table.

        The last MAX_CLOSED rooms are remembered.
        """
        is_here = any(name == room and other >= epoch for name, other in self._rooms)
        return is_here or self._closed.get(room, -1) >= epoch
