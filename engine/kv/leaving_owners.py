"""How many pages come back when some owners of pages leave. Pure.

Requests share pages, and the prefix cache owns some, too. A page comes back with its last owner; a cached one
when no request owns it or a cached page behind it, since it may then be evicted. A window page comes back
with its last holder.
"""

from collections.abc import Iterable

from .prefix_cache import ROOT, PrefixCache


class LeavingOwners:
    """Counts the pages that would be available in addition. Nothing leaves in fact."""

    def __init__(self, cache: PrefixCache) -> None:
        self.num_back = 0
        self.num_windows_back = 0
        self._cache = cache
        self._owners: dict[int, int] = {}  # of the pages that owners leave: those that stay
        self._holders: dict[int, int] = {}  # of their window pages: those that stay
        self._busy: dict[int, int] = {}  # of cached pages: the reasons that stay

    def __repr__(self) -> str:
        return f"<LeavingOwners {self.num_back} pages come back>"

    def leave(self, pages: Iterable[int]) -> None:
        """One owner of each of `pages` leaves, in addition to those that have left before."""
        cache, refs = self._cache, self._cache.allocator.refs
        for page in pages:
            owners = self._owners[page] = self._owners.get(page, refs(page)) - 1
            if not cache.is_cached(page):
                self.num_back += owners == 0
            elif owners == 1:
                self._free(page)

    def leave_windows(self, pages: Iterable[int]) -> None:
        """One holder of the window page of each of `pages` leaves. With the last one it is available."""
        windows = self._cache.windows
        if windows is None:
            return
        for page in pages:
            holders = self._holders[page] = self._holders.get(page, windows.num_holders(page)) - 1
            self.num_windows_back += holders == 0

    def _free(self, page: int) -> None:
        """A cached page has a reason less to be busy, and so have those in front of it that turn idle."""
        node = page
        while node != ROOT:
            busy = self._busy[node] = self._busy.get(node, self._cache.num_busy(node)) - 1
            if busy:
                return
            self.num_back += 1
            node = self._cache.parent_of(node)
