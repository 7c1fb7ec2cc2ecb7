"""Counters of the router, and the text of /metrics: these counters and the workers' heartbeats, in Prometheus
format.

`metric_names` and docs/metrics.md list the names.

A client's request counts once, when its last choice has ended, with the outcome of the first failed choice.
Tokens and bytes are summed over its choices, each of which runs through the workers.
"""

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import msgspec
from msgspec import Struct
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..protocol.messages import WorkerStats
from . import metric_names as names
from .histogram import Histogram
from .metric_names import COUNTER, MetricName

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = ("ok", "rejected", "cancelled", "failed", "timeout")
# prefixes of counters in heartbeats
REPLAYS, PADDING, FALLBACKS = ("graph_replays_", "graph_pad_rows_", "graph_fallback_")
# counters in heartbeats that have a metric of their own
AFTER_READY = {
    "compilations_after_ready": names.WORKER_COMPILATIONS,
    "captures_after_ready": names.WORKER_CAPTURES,
    "allocations_after_ready": names.WORKER_ALLOCATIONS,
}
Families = dict[str, CounterMetricFamily | GaugeMetricFamily]


class Handoff(Struct, frozen=True, kw_only=True):
    """The bytes and times of one choice's hand-off."""

    num_bytes: int
    """Bytes of KV and features."""
    seconds: float
    """Seconds from the first announcement to the last block."""


class PromptWork(Struct, frozen=True, kw_only=True):
    """A prefill worker's work for one choice."""

    queue_s: float
    """Seconds in the queue, until the first forward."""
    compute_s: float
    """Seconds from the first forward to token 1."""


class RequestRecord(Struct, frozen=True, kw_only=True):
    """The figures of one ended request."""

    outcome: str
    """One of OUTCOMES."""
    e2e_s: float
    """Seconds from the read request to its end."""
    ttft_s: float | None = None
    """Seconds to the first token; None when there was none."""
    queued_s: float = 0.0
    """Seconds with none of its choices at a worker."""
    prompt_tokens: int = 0
    """Tokens of the prompt, counted once per choice."""
    cached_tokens: int = 0
    """Prompt tokens that prefill found in its prefix cache."""
    output_tokens: int = 0
    """Tokens sent to the client."""
    drafted_tokens: int = 0
    """Tokens that the drafter proposed."""
    accepted_tokens: int = 0
    """Proposed tokens that the target accepted."""
    prompts: tuple[PromptWork, ...] = ()
    """The prefill work of choices that have a report of it."""
    handoffs: tuple[Handoff, ...] = ()
    """The hand-offs of choices with pulled blocks."""


@dataclass(frozen=True, kw_only=True)
class RouterRecord:
    """The router's condition at the moment of a scrape."""

    queued: int
    """Requests waiting for a free worker."""
    running: int
    """Requests at the workers."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Totals of rare events by name."""
    responses: Mapping[int, int] = field(default_factory=dict)
    """Answers over HTTP by status."""
    is_ready: bool = False
    """Whether /ready answers 200."""
    canaries: Mapping[str, int] = field(default_factory=dict)
    """Totals by outcome."""
    failing_pairs: tuple[tuple[str, str, str, int], ...] = ()
    """Tuples of prefill's and decode's instance, kind of the last failure, consecutive failed probes."""


@dataclass(frozen=True, kw_only=True)
class WorkerRecord:
    """One registered worker at the moment of a scrape."""

    role: str
    """"prefill" or "decode"."""
    instance: str
    """The worker's instance id."""
    stats: WorkerStats
    """Its last heartbeat."""


class RouterMetrics:
    """The router's counters and histograms; one object per router process, used by one thread."""

    def __init__(self) -> None:
        self._requests = dict.fromkeys(OUTCOMES, 0)  # a rate needs the value 0 before the first event
        self._totals = dict.fromkeys(names.COUNTED, 0)
        self._tallies = {name: Histogram(name) for name in names.OBSERVED}
        self._gaps = self._tallies[names.GAP]

    def __repr__(self) -> str:
        return f"RouterMetrics({sum(self._requests.values())} requests)"

    def request_ended(self, record: RequestRecord) -> None:
        """Counts a request once, at its end."""
        assert record.outcome in OUTCOMES, record.outcome
        self._requests[record.outcome] += 1
        totals, tallies = self._totals, self._tallies
        totals[names.PROMPT_TOKENS] += record.prompt_tokens
        totals[names.CACHED_TOKENS] += record.cached_tokens
        totals[names.DRAFTED_TOKENS] += record.drafted_tokens
        totals[names.ACCEPTED_TOKENS] += record.accepted_tokens
        totals[names.OUTPUT_TOKENS] += record.output_tokens
        tallies[names.REQUEST_SECONDS].observe(record.e2e_s)
        tallies[names.QUEUE_WAIT].observe(record.queued_s)
        if record.ttft_s is not None:
            tallies[names.TTFT].observe(record.ttft_s)
        for prompt in record.prompts:
            tallies[names.PREFILL_QUEUE].observe(prompt.queue_s)
            tallies[names.PREFILL].observe(prompt.compute_s)
        for handoff in record.handoffs:
            totals[names.HANDOFF_BYTES] += handoff.num_bytes
            tallies[names.HANDOFF_SECONDS].observe(handoff.seconds)
            if handoff.seconds > 0:
                tallies[names.HANDOFF_RATE].observe(handoff.num_bytes / handoff.seconds)

    def tokens_arrived(self, gap_s: float, num_tokens: int) -> None:
        """Observes the `num_tokens` of one message, `gap_s` seconds after the previous message."""
        assert num_tokens > 0
        self._gaps.observe(gap_s / num_tokens)

    def render(self, router: RouterRecord, workers: Iterable[WorkerRecord]) -> bytes:
        """The body of /metrics."""
        scrape = _process_registry("router")
        scrape.register(_Scrape([*self._families(), *router_families(router), *worker_families(workers)]))
        return generate_latest(scrape)

    def _families(self) -> Iterator[Metric]:
        families = _families(names.REQUESTS, *names.COUNTED)
        for outcome, total in self._requests.items():
            _add(families, names.REQUESTS, (outcome,), total)
        for name, total in self._totals.items():
            _add(families, name, (), total)
        return chain(families.values(), (tally.family() for tally in self._tallies.values()))


def render_worker(worker: WorkerRecord) -> bytes:
    """The body of a worker's own /metrics: the worker's metrics in the router, and those of its process."""
    scrape = _process_registry(worker.role)
    scrape.register(_Scrape(worker_families([worker])))
    return generate_latest(scrape)


class _Scrape(Collector):
    """A collector of metrics that are computed at a scrape."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _process_registry(role: str) -> CollectorRegistry:
    """The metrics of any process: its release, and the `process_` metrics of the Prometheus client."""
    registry = CollectorRegistry(auto_describe=False)
    build = _family(names.BUILD)
    build.add_metric([_version(), role], 1)
    registry.register(_Scrape([build]))
    ProcessCollector(registry=registry)
    return registry


def _version() -> str:
    try:
        return importlib.metadata.version("baton")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def router_families(router: RouterRecord) -> list[Metric]:
    """The router's condition. Events with a metric of their own are left out."""
    shown = (
        names.QUEUED,
        names.RUNNING,
        names.RESPONSES,
        *names.OF_EVENT.values(),
        names.ROUTER_EVENTS,
        *names.OF_CANARIES,
    )
    families = _families(*shown)
    _add(families, names.READY, (), router.is_ready)
    for outcome, total in sorted(router.canaries.items()):
        _add(families, names.CANARIES, (outcome,), total)
    for prefill, decode, kind, num_failures in router.failing_pairs:
        _add(families, names.FAILING_PAIRS, (prefill, decode, kind), num_failures)
    _add(families, names.QUEUED, (), router.queued)
    _add(families, names.RUNNING, (), router.running)
    for status, total in sorted(router.responses.items()):
        _add(families, names.RESPONSES, (str(status),), total)
    for event, name in names.OF_EVENT.items():
        _add(families, name, (), router.events.get(event, 0))
    for event, total in sorted(router.events.items()):
        if event not in names.OF_EVENT:
            _add(families, names.ROUTER_EVENTS, (event,), total)
    return list(families.values())


def worker_families(workers: Iterable[WorkerRecord]) -> list[Metric]:
    """Heartbeats as labelled gauges and counters. A worker without drafts has no accept length."""
    families = _families(*names.WORKER_NAMES)
    for worker in workers:
        _add_worker(families, (worker.role, worker.instance), worker.stats)
    return list(families.values())


def _add_worker(families: Families, who: tuple[str, str], stats: WorkerStats) -> None:
    _add(families, names.WORKER_UP, (*who, stats.state), 1)
    kinds: dict[MetricName, Mapping[str, float]] = {
        names.WORKER_PAGES: {
            "total": stats.pages_total,
            "free": stats.pages_free,
            "cached": stats.pages_cached,
        },
        names.WORKER_REQUESTS: {
            "running": stats.running,
            "queued": stats.queued,
            "transferring": stats.transferring,
        },
        names.WORKER_GRAPHS: msgspec.structs.asdict(stats.graphs),
    }
    for name, values in kinds.items():
        for kind, value in sorted(values.items()):
            _add(families, name, (*who, kind), value)
    if stats.accept_length is not None:
        _add(families, names.WORKER_ACCEPT_LENGTH, who, stats.accept_length)
    if stats.spec_steps is not None:
        _add(families, names.WORKER_SPEC_STEPS, who, stats.spec_steps)
    graph_kinds = {counter.removeprefix(REPLAYS) for counter in stats.counters if counter.startswith(REPLAYS)}
    for counter, total in sorted(stats.counters.items()):
        name, labels = _metric_of(counter, graph_kinds)
        _add(families, name, (*who, *labels), total)


def _metric_of(counter: str, graph_kinds: set[str]) -> tuple[MetricName, tuple[str, ...]]:
    """The metric of a worker's counter, with its last labels. A fallback's name has a kind and a reason."""
    if counter in AFTER_READY:
        return AFTER_READY[counter], ()
    if counter.startswith(REPLAYS):
        return names.WORKER_GRAPH_REPLAYS, (counter.removeprefix(REPLAYS),)
    if counter.startswith(PADDING):
        return names.WORKER_GRAPH_PADDING, (counter.removeprefix(PADDING),)
    if counter.startswith(FALLBACKS):
        rest = counter.removeprefix(FALLBACKS)
        kind = max((kind for kind in graph_kinds if rest.startswith(f"{kind}_")), key=len, default="")
        if kind:
            return names.WORKER_GRAPH_FALLBACKS, (kind, rest[len(kind) + 1 :])
    return names.WORKER_EVENTS, (counter,)


def _families(*shown: MetricName) -> Families:
    return {name.name: _family(name) for name in shown}


def _family(name: MetricName) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if name.kind == COUNTER else GaugeMetricFamily
    return kind(name.name, name.text, labels=name.labels)


def _add(families: Families, name: MetricName, labels: tuple[str, ...], value: float) -> None:
    families[name.name].add_metric(labels, value)
