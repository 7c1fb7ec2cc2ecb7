"""Decides whether pages of a tier come back, or their tokens are computed: whatever is sooner. Pure.

    bring back   the pages that are queued before, and these, each at the measured time of a page
    compute      the tokens, at the worker's measured times of its forwards

Up to SIDE_BY_SIDE pages take about as long as one, and count as so many. While a time is not known, pages are
brought back. What was measured HALF_LIFE_S ago weighs half. So that no measurement turns a tier off for ever,
one restore of each tier is begun every TRY_AGAIN_S though it seems to be later: what it measures takes the
place of all before.
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


class JobTimes:
    """The times that jobs of one kind took, which may be wanted together."""

    def __init__(self) -> None:
        self._ended = 0.0

    def took(self, since: float, ended: float) -> tuple[float, float]:
        """(seconds of a job that was wanted at `since`, share of what was measured until the job before).

        `ended`: monotonic seconds. A job takes the time since the one before it had ended, if that was later
        than `since`.
        """
        seconds = max(0.0, ended - max(since, self._ended))
        share = 0.5 ** (max(0.0, ended - self._ended) / HALF_LIFE_S)
        self._ended = max(ended, self._ended)
        return seconds, share


class FetchTime:
    """The mean seconds of a page that is read from the disk."""

    def __init__(self) -> None:
        self._jobs = JobTimes()
        self._pages = self._seconds = 0.0  # sums of weighted samples

    def __repr__(self) -> str:
        return f"<FetchTime {1000 * self.of(SIDE_BY_SIDE):.3g} ms for {SIDE_BY_SIDE} pages>"

    def ended(self, num_pages: int, since: float, ended: float) -> None:
        """Learns from a job, as `JobTimes.took`."""
        seconds, share = self._jobs.took(since, ended)
        self._pages = share * self._pages + max(num_pages, SIDE_BY_SIDE)
        self._seconds = share * self._seconds + seconds

    def of(self, num_pages: int) -> float:
        """Expected seconds of so many pages; 0 while nothing was measured."""
        if not self._pages or not num_pages:
            return 0.0
        return max(num_pages, SIDE_BY_SIDE) * self._seconds / self._pages


class LoadTime:
    """The seconds of a page that is copied from host memory, by the fastest job of late.

    Other jobs have waited for the forward that runs, as computing the tokens would. An older job counts twice
    as long after HALF_LIFE_S.
    """

    def __init__(self) -> None:
        self._jobs = JobTimes()
        self._page_s = 0.0  # of the fastest job

    def __repr__(self) -> str:
        return f"<LoadTime {1000 * self.of(SIDE_BY_SIDE):.3g} ms for {SIDE_BY_SIDE} pages>"

    def ended(self, num_pages: int, since: float, ended: float) -> None:
        """Learns from a job, as `JobTimes.took`."""
        seconds, share = self._jobs.took(since, ended)
        page_s = seconds / max(num_pages, SIDE_BY_SIDE)
        is_fastest = not self._page_s or page_s * share < self._page_s
        self._page_s = page_s if is_fastest else self._page_s / share

    def of(self, num_pages: int) -> float:
        """Expected seconds of so many pages; 0 while nothing was measured."""
        return max(num_pages, SIDE_BY_SIDE) * self._page_s if num_pages else 0.0


class RestoreCosts:
    """The measured times of both tiers: `load` of pages from host memory, `fetch` of pages from the disk."""

    def __init__(self) -> None:
        self.load, self.fetch = LoadTime(), FetchTime()
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
