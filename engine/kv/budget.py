"""How many pages a memory budget buys: everything that lies under a page id, and what is set aside beside the pages."""

from dataclasses import dataclass

STAGING_SHARE = 4  # features in flight to a decode engine take at most one part in so many of its KV pool


@dataclass(frozen=True, kw_only=True)
class PageBudget:
    """Bytes of one page id. `kv_bytes`: the target's KV. `draft_bytes`: the draft's KV, of a decode engine that drafts.
    `feature_bytes`: the feature plane, of a prefill engine. `has_staging`: features in flight land beside the pages.
    """

    kv_bytes: int
    draft_bytes: int = 0
    feature_bytes: int = 0
    has_staging: bool = False

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all pools and planes that share its id."""
        return self.kv_bytes + self.draft_bytes + self.feature_bytes

    def num_pages(self, memory: int) -> int:
        """Pages that `memory` bytes buy, page 0 included, so that `total` of them stays within `memory`."""
        pages = memory * STAGING_SHARE // (STAGING_SHARE + 1) if self.has_staging else memory
        return pages // self.page_bytes

    def total(self, num_pages: int) -> int:
        """Bytes that `num_pages` pages take, with the most that features in flight may take beside them."""
        staging = num_pages * self.kv_bytes // STAGING_SHARE if self.has_staging else 0
        return num_pages * self.page_bytes + staging
