"""The rooms that wait for a pair, in the order in which they get one. Pure.

A room's rank is the time of its arrival, later by `PRIORITY_S` for each step down in priority: one that is more urgent
goes before what came shortly before it, and nothing waits behind urgent requests for ever. A room that comes back after
a failed attempt has its old rank.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from .request_state import Entry

PRIORITY_S = 10.0  # of waiting that a step in priority is worth


class WaitingList:
    """Sorted by rank, then by the order in which rooms first joined."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Entry]] = []
        self._num_joined = 0

    def __repr__(self) -> str:
        return f"WaitingList({len(self)})"

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """A copy: entries may leave and join meanwhile."""
        return iter([entry for _, _, entry in self._entries])

    def join(self, entry: Entry) -> None:
        """Takes an entry that is not in the list."""
        assert not entry.is_waiting, entry
        entry.is_waiting = True
        if not entry.number:
            self._num_joined += 1
            entry.number = self._num_joined
        insort(self._entries, (rank_of(entry), entry.number, entry))

    def leave(self, entry: Entry) -> None:
        """Idempotent."""
        if entry.is_waiting:
            entry.is_waiting = False
            del self._entries[bisect_left(self._entries, (rank_of(entry), entry.number))]

    def last(self) -> Entry | None:
        """Who would get a pair last, of those that have no output yet."""
        return next((entry for _, _, entry in reversed(self._entries) if not entry.room.num_output), None)


def rank(arrived: float, priority: int) -> float:
    """Lower goes first."""
    return arrived + PRIORITY_S * priority


def rank_of(entry: Entry) -> float:
    """Of a room that waits."""
    return rank(entry.request.arrived, entry.request.priority)
