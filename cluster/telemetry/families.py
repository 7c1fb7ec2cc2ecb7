"""The Prometheus families of one scrape, and the metrics that every process has."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ..process.release import release
from . import metric_names as names
from .histogram import Histogram
from .metric_names import COUNTER, GAUGE, HISTOGRAM, MetricName

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KINDS: dict[str, type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]] = {
    COUNTER: CounterMetricFamily,
    GAUGE: GaugeMetricFamily,
    HISTOGRAM: HistogramMetricFamily,
}


class Families:
    """The families of a process that serves the model `model`, in the order of their first mention."""

    def __init__(self, model: str, shown: Iterable[MetricName]) -> None:
        self._model = model
        self._families: dict[MetricName, Metric] = {name: _family(name) for name in shown}

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())

    def add(self, name: MetricName, labels: tuple[str, ...], value: float) -> None:
        """Adds a series of a counter or gauge; `labels` without the model."""
        family = self._families[name]
        assert isinstance(family, (CounterMetricFamily, GaugeMetricFamily)), name.name
        family.add_metric((self._model, *labels), value)

    def add_histogram(self, name: MetricName, labels: tuple[str, ...], histogram: Histogram) -> None:
        """Adds the series of a histogram; `labels` without the model."""
        family = self._families[name]
        assert isinstance(family, HistogramMetricFamily), name.name
        histogram.add_to(family, (self._model, *labels))


def rendered(role: str, *families: Iterable[Metric]) -> bytes:
    """The body of /metrics of a process: these families, and those that every process has."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(_build_families(role)))
    ProcessCollector(registry=registry)
    for some in families:
        registry.register(_Scrape(some))
    return generate_latest(registry)


class _Scrape(Collector):
    """A collector of metrics that are computed at a scrape."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _family(name: MetricName) -> Metric:
    return KINDS[name.kind](name.name, name.text, labels=name.labels)


def _build_families(role: str) -> Iterator[Metric]:
    """The release of this process, under its name and its former name."""
    for name in names.OF_BUILD:
        build = GaugeMetricFamily(name.name, name.text, labels=name.labels)
        build.add_metric((release(), role), 1)
        yield build
