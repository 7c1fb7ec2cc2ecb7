"""A cheap histogram: plain numbers, converted to a Prometheus family only when scraped.

The Prometheus client takes a lock per observation and scans all bounds of a histogram. A router makes some
twenty observations per request, all on one thread, and needs neither.
"""

from bisect import bisect_left
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from .metric_names import MetricName


class Histogram:
    """A histogram. Used by one thread."""

    __slots__ = ("_bounds", "_counts", "_name", "_sum")

    def __init__(self, name: MetricName) -> None:
        self._name = name
        self._bounds = name.buckets
        # per bound: the number of values above the previous bound and at most this one
        self._counts = [0] * (len(name.buckets) + 1)
        self._sum = 0.0

    def __repr__(self) -> str:
        return f"Histogram({self._name.name}, {sum(self._counts)} values)"

    def observe(self, value: float) -> None:
        """Adds a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: tuple[str, ...]) -> None:
        """Adds its series to the Prometheus family of its name. Each bucket counts all values up to its
        bound."""
        limits = (*self._bounds, float("inf"))
        bounds = [floatToGoString(bound) for bound in limits]  # type: ignore[no-untyped-call]
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
