"""The owners of window pages: which page has one, who holds it, and which may be taken back.

    held    some request may still read the windowed KV of the page
    idle    nobody does, and the page is in the prefix cache: a prompt that ends near it could use it. The one
            that turned idle first is taken back first. The page stays cached without it
    none    a page that no row in any window can need, or whose window page was taken back

A hit of n tokens in the prefix cache needs the pages of all of them, but window pages only where the window
of the next row reaches. So the cache may hold a long prefix with few window pages.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from .pool import PageAllocator, PoolExhausted
from .window_sizes import first_read_page


class WindowPages:
    """The window pages of `num_pages` pages; `window` in tokens, the row itself included.

    `take_changes` has what the device's table must be told. Misuse asserts.
    """

    def __init__(self, allocator: PageAllocator, num_pages: int, *, window: int, page_size: int) -> None:
        self.allocator = allocator
        self.window = window
        self.page_size = page_size
        self.num_extra = 0  # holders beyond the first of each window page
        self._parts = [0] * num_pages
        self._holders = [0] * num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._times_left = [0] * num_pages  # that a page has left the prefix cache
        # held pages of a text that is cached in another page: that page, and its `_times_left`
        self._heirs: dict[int, tuple[int, int]] = {}
        self._changed: dict[int, int] = {}
        self._is_cached: Callable[[int], bool] = lambda page: False

    def bind(self, is_cached: Callable[[int], bool]) -> None:
        """`is_cached` tells whether the prefix cache has a page."""
        self._is_cached = is_cached

    @property
    def num_available(self) -> int:
        """Window pages that `take` can give."""
        return self.allocator.num_free + len(self._idle)

    @property
    def num_total(self) -> int:
        """Window pages that requests can hold."""
        return self.allocator.num_total

    def first_page(self, row: int) -> int:
        """The number, in its text, of the first page of which rows from position `row` on read the window."""
        return first_read_page(row, self.window, self.page_size)

    def of(self, page: int) -> int:
        """The window page of `page`; 0 without one."""
        return self._parts[page]

    def num_holders(self, page: int) -> int:
        """Requests that hold the window page of `page`."""
        return self._holders[page]

    def is_shared(self, page: int) -> bool:
        """Whether several requests hold the window page of `page`."""
        return self._holders[page] > 1

    def take(self, pages: Sequence[int]) -> None:
        """Gives new window pages to `pages`, which have none, with one holder each; all or none.

        Raises PoolExhausted.
        """
        if len(pages) > self.num_available:
            raise PoolExhausted(
                f"{len(pages)} window pages asked for, {self.allocator.num_free} free and {len(self._idle)} "
                f"idle of {self.num_total}"
            )
        num_lacking = len(pages) - self.allocator.num_free
        self._free([self._idle.popitem(last=False)[0] for _ in range(num_lacking)])
        for page, part in zip(pages, self.allocator.alloc(len(pages)), strict=True):
            assert page, "the sink has no window page"
            assert not self._parts[page], f"page {page} has window page {self._parts[page]}"
            self._holders[page] = 1
            self._set(page, part)

    def hold(self, pages: Iterable[int]) -> None:
        """Adds a holder to the window page of each of `pages`."""
        for page in pages:
            assert self._parts[page], f"page {page} has no window page"
            self._holders[page] += 1
            if self._holders[page] == 1:
                del self._idle[page]
            else:
                self.num_extra += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Removes a holder from the window page of each of `pages`. The last one to be dropped is kept
        longest.
        """
        unneeded: list[int] = []
        for page in pages:
            assert self._holders[page] > 0, f"the window page of page {page} was dropped more often than held"
            self._holders[page] -= 1
            if self._holders[page]:
                self.num_extra -= 1
                continue
            heir = self._heirs.pop(page, None)
            if self._is_cached(page):
                self._idle[page] = None
            elif heir is None or not self._inherit(page, *heir):
                unneeded.append(page)
        self._free(unneeded)

    def bequeath(self, page: int, heir: int) -> None:
        """The prefix cache has the text of `page` in page `heir`. If that is still so when the window page of
        `page` is dropped, and `heir` has none, it gets it.
        """
        if self._parts[page] and not self._is_cached(page):
            self._heirs[page] = heir, self._times_left[heir]

    def left(self, page: int) -> None:
        """The page has left the prefix cache."""
        self._times_left[page] += 1
        if self._parts[page] and not self._holders[page]:
            del self._idle[page]
            self._free([page])

    def take_changes(self) -> dict[int, int]:
        """The pages whose window page has changed since the last call, with the present one."""
        changed, self._changed = self._changed, {}
        return changed

    def check_integrity(self, refs: Callable[[int], int]) -> None:
        """Assert that holders, idle pages and the allocator agree. `refs`: the owners of a page."""
        self.allocator.check_integrity()
        parts = [part for part in self._parts if part]
        assert len(set(parts)) == len(parts), "a window page has two pages"
        assert sum(self.allocator.refs(part) for part in parts) == self.allocator.num_used
        assert self.num_extra == sum(max(0, count - 1) for count in self._holders)
        for page, (part, holders) in enumerate(zip(self._parts, self._holders, strict=True)):
            assert (page in self._idle) == (bool(part) and not holders), page
            assert part or not holders, f"page {page} has holders of no window page"
            assert holders <= refs(page), f"page {page}: {holders} hold its window, {refs(page)} the page"
            assert not part or holders or self._is_cached(page), f"page {page} needs no window page"

    def _inherit(self, page: int, heir: int, times_left: int) -> bool:
        """Gives the window page of `page` to `heir`, if that lacks one and has not left the cache since."""
        if self._times_left[heir] != times_left or self._parts[heir]:
            return False
        self._set(heir, self._parts[page])
        self._set(page, 0)
        self._idle[heir] = None
        return True

    def _free(self, pages: Sequence[int]) -> None:
        """Gives the window pages of `pages` back at once: each release is an event of the device."""
        if pages:
            self.allocator.release([self._parts[page] for page in pages])
            for page in pages:
                self._set(page, 0)

    def _set(self, page: int, part: int) -> None:
        self._parts[page] = part
        self._changed[page] = part

    def __repr__(self) -> str:
        return (
            f"<WindowPages {self.allocator.num_free} free of {self.num_total}, {len(self._idle)} idle, "
            f"{self.window} tokens>"
        )
