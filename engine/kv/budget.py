"""The number of pages that fit a memory budget, with all memory per page id and beside the pages."""

from dataclasses import dataclass

STAGING_SHARE = 4  # features in flight take at most 1/STAGING_SHARE of a decode engine's KV pool


@dataclass(frozen=True, kw_only=True)
class PageBudget:
    """Bytes per page id.

    `kv_bytes`: the target's KV. `draft_bytes`: the draft's KV, on a decode engine that drafts.
    `feature_bytes`: the feature plane, on a prefill engine. `has_staging`: features in flight land beside the
    pages.
    """

    kv_bytes: int
    draft_bytes: int = 0
    feature_bytes: int = 0
    has_staging: bool = False

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all pools and planes that share its id."""
        return self.kv_bytes + self.draft_bytes + self.feature_bytes

    def times(self, page_size: int) -> "PageBudget":
        """The budget of pages of `page_size` tokens, if this one is that of a token."""
        return PageBudget(
            kv_bytes=self.kv_bytes * page_size,
            draft_bytes=self.draft_bytes * page_size,
            feature_bytes=self.feature_bytes * page_size,
            has_staging=self.has_staging,
        )

    def num_pages(self, memory: int) -> int:
        """Pages, page 0 included, whose `total` fits into `memory` bytes."""
        pages = memory * STAGING_SHARE // (STAGING_SHARE + 1) if self.has_staging else memory
        return pages // self.page_bytes

    def total(self, num_pages: int) -> int:
        """Bytes of `num_pages` pages and of the largest amount of features in flight beside them."""
        return num_pages * self.page_bytes + self.staging(num_pages)

    def staging(self, num_pages: int) -> int:
        """Bytes of the largest amount of features in flight beside `num_pages` pages."""
        return num_pages * self.kv_bytes // STAGING_SHARE if self.has_staging else 0
