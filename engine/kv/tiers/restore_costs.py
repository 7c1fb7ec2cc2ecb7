"""Decides whether pages of a tier come back, or their tokens are computed: whatever is sooner. Pure.

    bring back   the pages that are queued before, and these, each at the measured time of a page
    compute      the tokens, at the worker's measured times of its forwards

The time of a page is a mean that follows changes: what was measured HALF_LIFE_S ago weighs half. Up to
SIDE_BY_SIDE pages take about as long as one, and count as so many. While a time is not known, pages are
brought back. So that no measurement turns a tier off for ever, one restore of each tier is begun every
TRY_AGAIN_S though it seems to be later. What was measured before weighs next to nothing then, and what the
restore measures takes its place.
"""

from collections.abc import Callable
from enum import Enum

HALF_LIFE_S = 10.0
TRY_AGAIN_S = 60.0
SIDE_BY_SIDE = 8

ComputeTime = Callable[[int], float]
"""Seconds until so many tokens of a prompt would be computed here, with all that is computed before them."""


class Slowest(Enum):
    """The slowest tier of which a restore has pages."""

    HOST = "host"
    DISK = "disk"


class PageTime:
    """The seconds of a page that is copied by jobs of one kind."""

    def __init__(self) -> None:
        self._pages = self._seconds = 0.0  # sums of weighted samples
        self._seen_at = 0.0  # of the newest
        self._ended = 0.0  # of the newest job

    def __repr__(self) -> str:
        return f"<PageTime {1000 * self.of(1):.3g} ms>"

    def ended(self, num_pages: int, since: float, ended: float) -> None:
        """Learns from a job that was wanted at `since` and ended at `ended` (monotonic seconds): it took the
        time since the job before it had ended, if that was later than `since`.
        """
        seconds = max(0.0, ended - max(since, self._ended))
        weight = 0.5 ** (max(0.0, ended - self._seen_at) / HALF_LIFE_S)
        self._ended = self._seen_at = max(ended, self._seen_at)
        self._pages = weight * self._pages + max(num_pages, SIDE_BY_SIDE)
        self._seconds = weight * self._seconds + seconds

    def of(self, num_pages: int) -> float:
        """Expected seconds of so many pages; 0 while nothing was measured."""
        if not self._pages or not num_pages:
            return 0.0
        return max(num_pages, SIDE_BY_SIDE) * self._seconds / self._pages


class RestoreCosts:
    """The measured times of both tiers: `load` of pages from host memory, `fetch` of pages from the disk."""

    def __init__(self) -> None:
        self.load, self.fetch = PageTime(), PageTime()
        self._tried_at = dict.fromkeys(Slowest, float("-inf"))

    def __repr__(self) -> str:
        return f"<RestoreCosts load {self.load!r}, fetch {self.fetch!r}>"

    def is_sooner(self, *, num_fetched: int, num_loaded: int, compute_s: float, now: float) -> bool:
        """Whether pages are to be brought back at `now`, rather than computed in `compute_s` seconds.

        They are there after `num_fetched` copies from the disk and `num_loaded` from host memory, with those
        queued before.
        """
        if self.fetch.of(num_fetched) + self.load.of(num_loaded) <= compute_s:
            return True
        tier = Slowest.DISK if num_fetched else Slowest.HOST
        is_due = now - self._tried_at[tier] >= TRY_AGAIN_S
        if is_due:
            self._tried_at[tier] = now
        return is_due
