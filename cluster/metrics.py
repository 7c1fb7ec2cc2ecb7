"""What the router counts, and how /metrics shows it and its workers' heartbeats, in Prometheus text format.

    name                                   type       labels                   meaning
    baton_requests_total                   counter    outcome                  requests that ended, with all their choices
    baton_prompt_tokens_total              counter                             prompt tokens, once for every choice
    baton_cached_prompt_tokens_total       counter                             of these, found in a prefix cache
    baton_output_tokens_total              counter                             tokens sent to clients
    baton_drafted_tokens_total             counter                             tokens proposed by the drafter
    baton_accepted_tokens_total            counter                             of these, accepted by the target
    baton_handoff_bytes_total              counter                             KV and feature bytes pulled
    baton_time_to_first_token_seconds      histogram                           request read to first token
    baton_inter_token_seconds              histogram                           mean gap of the tokens of one message
    baton_request_seconds                  histogram                           request read to last token
    baton_queued_requests                  gauge                               waiting for a free worker
    baton_running_requests                 gauge                               at the workers
    baton_router_events_total              counter    event                    rarer things, e.g. stale messages
    baton_worker_up                        gauge      role instance state      1 per registered worker
    baton_worker_pages                     gauge      role instance kind       KV pages: total, free, cached
    baton_worker_requests                  gauge      role instance kind       running, queued, transferring
    baton_worker_graphs                    gauge      role instance kind       captured graphs
    baton_worker_accept_length             gauge      role instance            tokens committed per verify
    baton_worker_spec_steps                gauge      role instance            draft steps of the newest verify
    baton_worker_events_total              counter    role instance event      the worker's own counters

A request is what a client sent: one with n = 8 choices counts once, when the last choice has ended, with the outcome of the
first choice that did not end well. Tokens and bytes are summed over its choices, each of which runs through the workers.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .messages import WorkerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = ("ok", "rejected", "cancelled", "failed", "timeout")
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
WORKER = ("role", "instance")


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One request that ended."""

    outcome: str
    """One of OUTCOMES."""
    e2e_s: float
    """Seconds from the request read to its end."""
    ttft_s: float | None = None
    """Seconds to the first token; None when there was none."""
    prompt_tokens: int = 0
    """Tokens of the prompt, once for every choice."""
    cached_tokens: int = 0
    """Prompt tokens that prefill found in its prefix cache."""
    output_tokens: int = 0
    """Tokens sent to the client."""
    drafted_tokens: int = 0
    """Tokens that the drafter proposed."""
    accepted_tokens: int = 0
    """Proposed tokens that the target accepted."""
    handoff_bytes: int = 0
    """KV and feature bytes that decode pulled."""


@dataclass(frozen=True, kw_only=True)
class RouterRecord:
    """The router's condition at the moment of a scrape."""

    queued: int
    """Requests waiting for a free worker."""
    running: int
    """Requests at the workers."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Totals of rarer things by name."""


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
    """The router's counters and histograms; one object per router process, no global registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests that ended.", ("outcome",))
        self._prompt = self._counter("prompt_tokens", "Prompt tokens, once for every choice.")
        self._cached = self._counter("cached_prompt_tokens", "Prompt tokens found in a prefix cache.")
        self._output = self._counter("output_tokens", "Tokens sent to clients.")
        self._drafted = self._counter("drafted_tokens", "Tokens proposed by the drafter.")
        self._accepted = self._counter("accepted_tokens", "Proposed tokens accepted by the target.")
        self._bytes = self._counter("handoff_bytes", "KV and feature bytes pulled.")
        self._ttft = self._histogram("time_to_first_token_seconds", "Request read to first token.", TTFT_BUCKETS)
        self._gap = self._histogram("inter_token_seconds", "Mean gap of the tokens of one message.", GAP_BUCKETS)
        self._e2e = self._histogram("request_seconds", "Request read to last token.", REQUEST_BUCKETS)
        for outcome in OUTCOMES:
            self._requests.labels(outcome)  # a rate needs the zero before the first event

    def request_ended(self, record: RequestRecord) -> None:
        """Count a request once, at its end."""
        assert record.outcome in OUTCOMES, record.outcome
        self._requests.labels(record.outcome).inc()
        self._prompt.inc(record.prompt_tokens)
        self._cached.inc(record.cached_tokens)
        self._drafted.inc(record.drafted_tokens)
        self._accepted.inc(record.accepted_tokens)
        self._bytes.inc(record.handoff_bytes)
        self._output.inc(record.output_tokens)
        self._e2e.observe(record.e2e_s)
        if record.ttft_s is not None:
            self._ttft.observe(record.ttft_s)

    def tokens_arrived(self, gap_s: float, num_tokens: int) -> None:
        """Observe the `num_tokens` of one message that came `gap_s` seconds after the message before."""
        assert num_tokens > 0
        self._gap.observe(gap_s / num_tokens)

    def render(self, router: RouterRecord, workers: Iterable[WorkerRecord]) -> bytes:
        """The body of /metrics."""
        scrape = CollectorRegistry(auto_describe=False)
        scrape.register(_Scrape(router, tuple(workers)))
        return generate_latest(self.registry) + generate_latest(scrape)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"baton_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"baton_{name}", text, buckets=buckets, registry=self.registry)


class _Scrape(Collector):
    """What is known only at the moment of a scrape."""

    def __init__(self, router: RouterRecord, workers: tuple[WorkerRecord, ...]) -> None:
        self._router, self._workers = router, workers

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("baton_queued_requests", "Waiting for a free worker.", self._router.queued)
        yield GaugeMetricFamily("baton_running_requests", "At the workers.", self._router.running)
        events = CounterMetricFamily("baton_router_events", "Rarer things.", labels=["event"])
        for name, total in sorted(self._router.events.items()):
            events.add_metric([name], total)
        yield events
        yield from worker_families(self._workers)


def worker_families(workers: Iterable[WorkerRecord]) -> list[Metric]:
    """Heartbeats as labelled gauges and counters; a worker without drafts has no accept length."""
    up = GaugeMetricFamily("baton_worker_up", "Registered workers.", labels=[*WORKER, "state"])
    pages = GaugeMetricFamily("baton_worker_pages", "KV pages.", labels=[*WORKER, "kind"])
    requests = GaugeMetricFamily("baton_worker_requests", "Requests at a worker.", labels=[*WORKER, "kind"])
    graphs = GaugeMetricFamily("baton_worker_graphs", "Captured graphs.", labels=[*WORKER, "kind"])
    accept = GaugeMetricFamily("baton_worker_accept_length", "Tokens committed per verify.", labels=WORKER)
    steps = GaugeMetricFamily("baton_worker_spec_steps", "Draft steps of the newest verify.", labels=WORKER)
    events = CounterMetricFamily("baton_worker_events", "A worker's own counters.", labels=[*WORKER, "event"])
    for worker in workers:
        who, stats = [worker.role, worker.instance], worker.stats
        up.add_metric([*who, stats.state], 1)
        _add(pages, who, {"total": stats.pages_total, "free": stats.pages_free, "cached": stats.pages_cached})
        counts = {"running": stats.running, "queued": stats.queued, "transferring": stats.transferring}
        _add(requests, who, counts)
        _add(graphs, who, msgspec.structs.asdict(stats.graphs))
        if stats.accept_length is not None:
            accept.add_metric(who, stats.accept_length)
        if stats.spec_steps is not None:
            steps.add_metric(who, stats.spec_steps)
        _add(events, who, stats.counters)
    return [up, pages, requests, graphs, accept, steps, events]


def _add(family: GaugeMetricFamily | CounterMetricFamily, who: list[str], values: Mapping[str, float]) -> None:
    for kind, value in sorted(values.items()):
        family.add_metric([*who, kind], value)
