"""The pages of one tier: which key lies in which slot, who reads it, and which one goes first. Pure.

    filling   a copy into the slot is under way; nobody reads it, and it is not evicted
    ready     the slot has the content that the digest tells of
    held      ready, and a copy out of the slot is under way; it is not evicted

The order of eviction weighs recency against the cost to compute a page again. A page that is stored or hit
gets the priority clock + cost, where the clock is the priority of the page evicted last. Pages of equal cost
thus leave in the order of their last use, and a page of twice the cost stays for as many evictions longer as
the difference says. A page deep in a prompt costs more, because its rows attend to all rows before them. A
page without those before it is useless, so a page has at least the priority of every page behind it, and
of equal ones the deepest leaves first: a prompt is evicted from its end.

Reference: Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms" (GreedyDual-Size), USITS 1997.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

HEAP_SLACK = 64


class TierJournal(Protocol):
    """An observer of the content of tiers."""

    def stored(self, key: bytes) -> None:
        """A page is ready in its slot."""

    def removed(self, key: bytes) -> None:
        """It is gone."""


@dataclass(kw_only=True, eq=False)
class StoredPage:
    """A page of a tier. `depth`: tokens in front of it. `digest` is defined once `is_ready`.

    `may_leave`: it may be evicted while nobody holds it. `is_bad`: its content is wrong, and it goes with its
    last holder.
    """

    key: bytes
    parent: bytes
    slot: int
    depth: int
    priority: float
    digest: int = 0
    is_ready: bool = False
    is_bad: bool = False
    may_leave: bool = True
    num_holds: int = 0
    stamp: int = 0  # of its newest entry in the heap


class SlotTable:
    """A tier of `num_slots` slots. `linear_depth`: tokens in front of a page at which it costs twice as much
    to compute as the first page of a prompt.
    """

    def __init__(self, num_slots: int, linear_depth: float) -> None:
        self.num_slots = num_slots
        self.num_evicted = 0
        self._journal: TierJournal | None = None
        self._linear_depth = linear_depth
        self._pages: dict[bytes, StoredPage] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._heap: list[tuple[float, int, int, bytes]] = []
        self._floors: dict[bytes, float] = {}  # least priorities of pages that are not here, by those behind
        self._clock = 0.0
        self._num_stamps = 0

    def __repr__(self) -> str:
        return f"<SlotTable {len(self._pages)} pages of {self.num_slots}>"

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[StoredPage]:
        return iter(self._pages.values())

    def __contains__(self, key: bytes) -> bool:
        """Whether the key has a slot, filling ones included."""
        return key in self._pages

    def get(self, key: bytes) -> StoredPage | None:
        """The ready page of this key."""
        page = self._pages.get(key)
        return page if page is not None and page.is_ready and not page.is_bad else None

    def filling(self, key: bytes) -> StoredPage | None:
        """The page of this key whose copy is under way."""
        page = self._pages.get(key)
        return None if page is None or page.is_ready else page

    def reserve(self, key: bytes, parent: bytes, depth: int) -> StoredPage | None:
        """A filling slot for `key`, which has none; evicts a page if no slot is free. None: none may leave.

        `depth` in tokens.
        """
        assert key not in self._pages, key.hex()
        if not self._free and not self._evict():
            return None
        page = StoredPage(key=key, parent=parent, slot=self._free.pop(), depth=depth, priority=0.0)
        self._pages[key] = page
        return page

    def adopt(self, pages: Iterable[StoredPage]) -> None:
        """Take in pages with digests that lie in their slots already, as found when the tier is opened."""
        assert not self._pages, self
        taken = {page.slot: page for page in pages}
        self._free = [slot for slot in self._free if slot not in taken]
        for page in taken.values():
            self._pages[page.key] = page
        for page in taken.values():
            self.commit(page, page.digest)

    def keep_journal(self, journal: TierJournal | None) -> None:
        """Tell `journal` of the pages that are here now, and of all that come and go."""
        self._journal = journal
        if journal is not None:
            for page in self._pages.values():
                if page.is_ready:
                    journal.stored(page.key)

    def end_journal(self) -> None:
        """Nothing of this tier is of use any more: the journal hears that all is gone."""
        journal, self._journal = self._journal, None
        if journal is not None:
            for page in self._pages.values():
                if page.is_ready:
                    journal.removed(page.key)

    def commit(self, page: StoredPage, digest: int, *, may_leave: bool = True) -> None:
        """The copy into the slot is done."""
        assert self._pages.get(page.key) is page, page
        assert not page.is_ready, page
        page.is_ready, page.digest, page.may_leave = True, digest, may_leave
        page.priority = max(self._clock + self._cost(page.depth), self._floors.pop(page.key, 0.0))
        self._push(page)
        self._raise_before(page)
        if self._journal is not None:
            self._journal.stored(page.key)

    def remove(self, page: StoredPage) -> None:
        """Forget a page that nobody holds: its copy failed, or its content is wrong."""
        assert not page.num_holds, page
        del self._pages[page.key]
        self._free.append(page.slot)
        if page.is_ready:  # pages behind it may still be here, and come before it if it returns
            self._keep_floor(page.key, page.priority)
            if self._journal is not None:
                self._journal.removed(page.key)

    def hit(self, page: StoredPage) -> None:
        """A request uses `page`, the last of its prefix here, and so all before it."""
        page.priority = max(page.priority, self._clock + self._cost(page.depth))
        self._push(page)
        self._raise_before(page)

    def hold(self, page: StoredPage) -> None:
        """Keep a ready page while a copy reads it."""
        assert page.is_ready, page
        page.num_holds += 1

    def let_go(self, page: StoredPage) -> None:
        """The opposite of `hold`."""
        assert page.num_holds > 0, page
        page.num_holds -= 1
        if page.is_bad and not page.num_holds:
            self.remove(page)
        else:
            self._push(page)

    def discard(self, page: StoredPage) -> None:
        """The content of a ready page is wrong: nobody gets it from now on."""
        page.is_bad = True
        if not page.num_holds:
            self.remove(page)

    def release(self, page: StoredPage) -> None:
        """From now on the page may be evicted."""
        page.may_leave = True
        self._push(page)

    def clear(self) -> None:
        """Forget every page that is ready and not held; the others are forgotten by their copies' ends."""
        for page in [page for page in self._pages.values() if page.is_ready and not page.num_holds]:
            self.remove(page)
        self._floors.clear()

    def check_integrity(self) -> None:
        """Assert that each slot is free or has one page, and that all that may leave can be found."""
        slots = [page.slot for page in self._pages.values()] + self._free
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or used twice"
        newest = {(key, stamp) for _, _, stamp, key in self._heap}
        for key, page in self._pages.items():
            assert page.key == key, page
            assert page.num_holds >= 0, page
            assert page.is_ready or not page.num_holds, page
            if self._may_evict(page):
                assert (key, page.stamp) in newest, f"{page} cannot be evicted"
            parent = self._pages.get(page.parent)
            if page.is_ready and parent is not None and parent.is_ready:
                assert parent.priority >= page.priority, "a page goes before one behind it"

    def _cost(self, depth: int) -> float:
        return 1.0 + depth / self._linear_depth

    def _may_evict(self, page: StoredPage) -> bool:
        return page.is_ready and page.may_leave and not page.num_holds and not page.is_bad

    def _evict(self) -> bool:
        while self._heap:
            priority, _, stamp, key = heapq.heappop(self._heap)
            page = self._pages.get(key)
            if page is None or page.stamp != stamp or not self._may_evict(page):
                continue
            self._clock = max(self._clock, priority)
            self.num_evicted += 1
            self.remove(page)
            return True
        return False

    def _push(self, page: StoredPage) -> None:
        if not self._may_evict(page):
            return
        self._num_stamps += 1
        page.stamp = self._num_stamps
        heapq.heappush(self._heap, (page.priority, -page.depth, page.stamp, page.key))
        if len(self._heap) > 4 * len(self._pages) + HEAP_SLACK:
            self._heap = [entry for entry in self._heap if self._is_newest(entry)]
            heapq.heapify(self._heap)

    def _is_newest(self, entry: tuple[float, int, int, bytes]) -> bool:
        page = self._pages.get(entry[3])
        return page is not None and page.stamp == entry[2]

    def _raise_before(self, page: StoredPage) -> None:
        """Gives the pages in front of `page` at least its priority."""
        priority, key = page.priority, page.parent
        before = self._pages.get(key)
        while before is not None and before.is_ready:
            if before.priority >= priority:
                return
            before.priority = priority
            self._push(before)
            key = before.parent
            before = self._pages.get(key)
        self._keep_floor(key, priority)

    def _keep_floor(self, key: bytes, priority: float) -> None:
        self._floors[key] = max(priority, self._floors.get(key, 0.0))
        if len(self._floors) > 4 * len(self._pages) + HEAP_SLACK:
            parents = {each.parent for each in self._pages.values()}
            self._floors = {each: floor for each, floor in self._floors.items() if each in parents}
