"""The number of pages that fit a memory budget, with all memory per page id and beside the pages.

A model with windows has window pages, too: fewer than pages, since a long request holds a bounded number of
them (`window_layout`). The memory is divided so that requests of WINDOW_CONTEXT tokens, or of two windows,
use up both kinds together. Where a page itself costs nothing, there are enough for the longest request
instead.
"""

from dataclasses import dataclass, replace

from .window_sizes import most_pages

STAGING_SHARE = 4  # features in flight take at most 1/STAGING_SHARE of a decode engine's KV pool
WINDOW_CONTEXT = 4096
WINDOW_SLACK = 64  # tokens beside its window for which a running request holds window pages, about


@dataclass(frozen=True, kw_only=True)
class WindowBudget:
    """Window pages. `kv_bytes`: of a window page, of `page_size` tokens. `window` and `max_context` in
    tokens: the longest window, and the longest request, 0 if unknown. `given`: their number without page 0,
    0: to be chosen.
    """

    kv_bytes: int
    window: int
    max_context: int
    page_size: int = 1
    given: int = 0

    @property
    def least(self) -> int:
        """The fewest window pages to serve with, page 0 included: of a running request and a small chunk."""
        return 1 + 2 * most_pages(self.window + WINDOW_SLACK + 2 * self.page_size, self.page_size)

    def pages_each(self, own_bytes: int) -> float:
        """Pages for each window page, if a page itself takes `own_bytes`."""
        design = max(WINDOW_CONTEXT, 2 * self.window)
        if own_bytes == 0:
            design = self.max_context or design
        elif self.max_context:
            design = min(design, self.max_context)
        return max(1.0, design / (self.window + WINDOW_SLACK))


@dataclass(frozen=True, kw_only=True)
class PageBudget:
    """Bytes per page id.

    `kv_bytes`: the target's KV, but for layers with window pages. `draft_bytes`: the draft's KV, on a decode
    engine that drafts. `feature_bytes`: the feature plane, on a prefill engine. `has_staging`: features in
    flight land beside the pages. `windows`: the window pages of a model that has them.
    """

    kv_bytes: int
    draft_bytes: int = 0
    feature_bytes: int = 0
    has_staging: bool = False
    windows: WindowBudget | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all pools and planes that share its id."""
        return self.kv_bytes + self.draft_bytes + self.feature_bytes

    def times(self, page_size: int) -> "PageBudget":
        """The budget of pages of `page_size` tokens, if this one is that of a token."""
        windows = self.windows
        if windows is not None:
            windows = replace(windows, kv_bytes=windows.kv_bytes * page_size, page_size=page_size)
        return PageBudget(
            kv_bytes=self.kv_bytes * page_size,
            draft_bytes=self.draft_bytes * page_size,
            feature_bytes=self.feature_bytes * page_size,
            has_staging=self.has_staging,
            windows=windows,
        )

    def num_pages(self, memory: int) -> int:
        """Pages, page 0 included, whose `total` fits into `memory` bytes."""
        pages = memory * STAGING_SHARE // (STAGING_SHARE + 1) if self.has_staging else memory
        if self.windows is None:
            return pages // self.page_bytes
        each = self.page_bytes + self.windows.kv_bytes / self.windows.pages_each(self.page_bytes)
        low, high = 0, int(pages / each) + 1  # bisection: the fewest window pages are no share
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._kv_and_drafts(middle) <= pages else (low, middle)
        return low

    def num_window_pages(self, num_pages: int) -> int:
        """Window pages beside `num_pages` pages, both with page 0; 0 without windows."""
        if self.windows is None:
            return 0
        if self.windows.given:
            return 1 + self.windows.given
        share = 1 + int(-(-(num_pages - 1) // self.windows.pages_each(self.page_bytes)))
        return min(num_pages, max(share, self.windows.least))

    def total(self, num_pages: int) -> int:
        """Bytes of `num_pages` pages and of the largest amount of features in flight beside them."""
        return self._kv_and_drafts(num_pages) + self.staging(num_pages)

    def staging(self, num_pages: int) -> int:
        """Bytes of the largest amount of features in flight beside `num_pages` pages."""
        if not self.has_staging:
            return 0
        return (num_pages * self.kv_bytes + self._window_bytes(num_pages)) // STAGING_SHARE

    def _kv_and_drafts(self, num_pages: int) -> int:
        return num_pages * self.page_bytes + self._window_bytes(num_pages)

    def _window_bytes(self, num_pages: int) -> int:
        return 0 if self.windows is None else self.num_window_pages(num_pages) * self.windows.kv_bytes
