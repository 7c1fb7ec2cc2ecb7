"""The rooms that wait for a pair, in the order in which they get one. Pure.

`request_rank` has the order. A room requeued after a failed attempt keeps its rank.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from ...cluster.protocol.request_rank import rank
from .request_state import Entry


class WaitingList:
    """Sorted by rank, then by the order of first joining."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Entry]] = []
        self._num_joined = 0

    def __repr__(self) -> str:
        return f"WaitingList({len(self)})"

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Iterates over a copy: entries may leave and join meanwhile."""
        return iter([entry for _, _, entry in self._entries])

    def join(self, entry: Entry) -> None:
        """Adds an entry that is not in the list."""
        assert not entry.is_waiting, entry
        entry.is_waiting = True
        if not entry.number:
            self._num_joined += 1
            entry.number = self._num_joined
        insort(self._entries, (rank_of(entry), entry.number, entry))

    def leave(self, entry: Entry) -> None:
        """Removes an entry. Idempotent."""
        if entry.is_waiting:
            entry.is_waiting = False
            del self._entries[bisect_left(self._entries, (rank_of(entry), entry.number))]

    def last(self) -> Entry | None:
        """The entry that would be placed last, among those without output that no worker has retracted."""
        entries = (entry for _, _, entry in reversed(self._entries))
        return next((one for one in entries if not (one.room.num_output or one.room.num_retractions)), None)


def rank_of(entry: Entry) -> float:
    """The rank of a waiting entry."""
    return rank(entry.request.arrived, entry.request.priority)
