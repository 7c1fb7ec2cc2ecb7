"""The window pages of requests: taken for the rows that are written next, given up behind their windows.

    tail        the pages of a prompt that rows behind it may read. Taken when the request is admitted, since
                they are handed over, and shared with further choices of the request
    before it   taken for each part of a prompt, and given up behind the part
    output      taken with the pages of each step, and given up as the window moves on

So a request holds a bounded number of window pages, whatever its length. Without windows all of this is off.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

from .kv.prefix_cache import PrefixCache
from .kv.window_pages import WindowPages
from .kv.window_sizes import chunk_of, most_pages
from .request import Request

MAX_MARGIN = 16  # last rows of a prompt that a reader may compute again


class RequestWindows:
    """The window pages that requests of an engine hold. `margin`: last rows of a prompt that may be computed
    again, by a request that shares the prompt.
    """

    def __init__(self, cache: PrefixCache, *, margin: int) -> None:
        self._cache = cache
        self._pages: WindowPages | None = cache.windows
        self.margin = margin

    def __repr__(self) -> str:
        return f"<RequestWindows {self._pages!r}, margin {self.margin}>"

    @property
    def is_on(self) -> bool:
        """Whether the engine has window pages."""
        return self._pages is not None

    @property
    def pages(self) -> WindowPages:
        """The window pages of the engine, which must have them."""
        assert self._pages is not None, "this model has no windows, or keeps all of its pages"
        return self._pages

    # --- sizes ----------------------------------------------------------------------------------------------

    def tail_of(self, num_prompt: int) -> int:
        """The first page of the tail of a prompt of `num_prompt` tokens; 0 without windows."""
        return 0 if self._pages is None else self._pages.first_page(max(0, num_prompt - self.margin))

    def most_held(self, num_rows: int) -> int:
        """The most window pages that are needed at once to write `num_rows` neighbouring rows."""
        return most_pages(self.pages.window - 1 + num_rows, self.pages.page_size)

    def chunk_of(self, chunk: int, *, share: int, lag: int = 1) -> int:
        """As `window_layout.chunk_of`, of this engine; `chunk` without windows."""
        pages = self._pages
        if pages is None:
            return chunk
        return chunk_of(
            chunk,
            num_window_pages=pages.num_total,
            window=pages.window,
            page_size=pages.page_size,
            share=share,
            lag=lag,
        )

    def peak(self, num_prompt: int, num_pages: int, chunk: int) -> int:
        """The most window pages of a request with `num_pages` pages, whose prompt is computed in parts of
        `chunk` tokens at most; 0 without windows.
        """
        if self._pages is None:
            return 0
        tail = self.tail_of(num_prompt)
        return num_pages - tail + min(tail, self.most_held(chunk))

    def lacking(self, request: Request, chunk: int) -> int:
        """The most further window pages that the parts of the prompt before its tail need at once."""
        if self._pages is None:
            return 0
        tail, first = self.tail_of(request.num_prompt), request.num_computed // self._pages.page_size
        if first >= tail:
            return 0
        before = request.windows[: bisect_left(request.windows, tail)]
        own = sum(not self._pages.is_shared(request.pages[number]) for number in before)
        return max(0, min(tail - first, self.most_held(chunk) - own))

    def tail_pages(self, request: Request) -> list[int]:
        """The window pages of the prompt's tail, to be handed over; empty without windows."""
        if self._pages is None:
            return []
        return [self._pages.of(page) for page in request.pages[self.tail_of(request.num_prompt) :]]

    # --- a request's life -----------------------------------------------------------------------------------

    def held_of_hit(self, num_prompt: int, *, is_computed: bool) -> "HeldFrom":
        """The rule by which a hit of the prefix cache needs window pages; see `PrefixCache.match`.

        `is_computed`: the rest of the prompt is computed here. Otherwise it comes with its window pages.
        """
        return HeldFrom(self, num_prompt, is_computed)

    def take(self, request: Request, row: int) -> None:
        """Takes the window pages of all rows from position `row` on. Raises PoolExhausted."""
        if self._pages is not None:
            self._take(request, range(self._pages.first_page(row), len(request.pages)))

    def take_tail(self, request: Request, first: int, end: int) -> None:
        """Takes the window pages of the prompt's tail, and of what is behind it, among the pages [first,
        end).

        Raises PoolExhausted; the request then holds no more than before.
        """
        if self._pages is not None:
            self._take(request, range(max(self.tail_of(request.num_prompt), first), end))

    def hold_tail(self, request: Request, end: int) -> None:
        """Holds the window pages of the tail among the pages before `end`, which another request has."""
        if self._pages is not None:
            numbers = range(self.tail_of(request.num_prompt), end)
            self._pages.hold([request.pages[number] for number in numbers])
            request.windows = [*numbers]

    def replace(self, request: Request, count: int, first: int) -> None:
        """The first `count` pages of the request make way for those of a hit, which has held the window pages
        from page `first` on.
        """
        if self._pages is None:
            return
        kept = bisect_left(request.windows, count)
        self._pages.drop([request.pages[number] for number in request.windows[:kept]])
        request.windows[:kept] = range(first, count)

    def follow(self, request: Request, pages: Sequence[int]) -> None:
        """The first pages of the request make way for `pages` of another one, of the same text."""
        if self._pages is None:
            return
        numbers = request.windows[: bisect_left(request.windows, len(pages))]
        self._pages.hold([pages[number] for number in numbers])
        self._pages.drop([request.pages[number] for number in numbers])

    def drop_hit(self, pages: Sequence[int]) -> None:
        """Gives up the window pages of `pages`, which a hit has held."""
        if self._pages is not None:
            self._pages.drop(pages)

    def extend(self, request: Request, end: int) -> None:
        """Takes the window pages of all pages before `end` behind those held. Raises PoolExhausted; it then
        holds no more than before.
        """
        if self._pages is not None:
            held = request.windows
            first = held[-1] + 1 if held else self._pages.first_page(request.num_computed)
            self._take(request, range(first, end))

    def cover(self, request: Request, start: int, end: int) -> None:
        """Takes the window pages that prompt rows [start, end) are written to. Raises PoolExhausted."""
        if self._pages is None:
            return
        size, held = self._pages.page_size, set(request.windows)
        missing = [page for page in range(start // size, (end - 1) // size + 1) if page not in held]
        self._take(request, missing)

    def retire(self, request: Request) -> None:
        """Gives up the window pages that no row behind the computed ones reads."""
        if self._pages is not None:
            self._drop_before(request, self._pages.first_page(request.num_computed))

    def retire_prompt(self, request: Request, row: int) -> None:
        """Gives up the window pages that no prompt row from position `row` on reads, but for the tail."""
        if self._pages is not None:
            first = self._pages.first_page(row)
            self._drop_before(request, min(first, self.tail_of(request.num_prompt)))

    def _drop_before(self, request: Request, first: int) -> None:
        assert self._pages is not None
        count = bisect_left(request.windows, first)
        self._pages.drop([request.pages[page] for page in request.windows[:count]])
        del request.windows[:count]

    def release(self, request: Request) -> None:
        """Gives up all window pages of the request, which still has its pages."""
        if self._pages is not None and request.windows:
            self._pages.drop([request.pages[page] for page in request.windows])
            request.windows = []

    def has_tail(self, request: Request, end: int) -> bool:
        """Whether the pages of the prompt's tail, before page `end`, have window pages."""
        if self._pages is None:
            return True
        return all(self._pages.of(page) for page in request.pages[self.tail_of(request.num_prompt) : end])

    def _take(self, request: Request, numbers: Sequence[int]) -> None:
        self.pages.take([request.pages[number] for number in numbers])
        for number in numbers:
            insort(request.windows, number)


class HeldFrom:
    """Of a hit of so many pages, the first one whose window page is needed."""

    def __init__(self, windows: RequestWindows, num_prompt: int, is_computed: bool) -> None:
        self._windows = windows
        self._last_row = max(0, num_prompt - windows.margin)
        self._is_computed = is_computed

    def __call__(self, num_pages: int) -> int:
        if not self._windows.is_on:
            return num_pages
        pages = self._windows.pages
        row = min(num_pages * pages.page_size, self._last_row) if self._is_computed else self._last_row
        return pages.first_page(row)
