"""The metrics of workers, from their heartbeats, on the router and on the workers themselves.

One place exports the series of a worker, so that sums over all scraped processes are right: the worker with a
--metrics-port of its own, else the router (`shown_workers`).
"""

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from ..config.router_groups import SHOW_ALL, SHOW_NONE, WORKER_METRICS
from ..protocol.messages import WorkerStats, clients_rooms
from . import metric_names as names
from .families import Families, rendered
from .metric_names import MetricName

# prefixes of counters in heartbeats
REPLAYS, PADDING, FALLBACKS = ("graph_replays_", "graph_pad_rows_", "graph_fallback_")
# counters in heartbeats that have a metric of their own
AFTER_READY = {
    "compilations_after_ready": names.WORKER_COMPILATIONS,
    "captures_after_ready": names.WORKER_CAPTURES,
    "allocations_after_ready": names.WORKER_ALLOCATIONS,
}


TIER_HITS = {"host_hit_tokens": "host", "disk_hit_tokens": "disk"}
TIER_MOVED = {
    "host_saved_bytes": ("host", "in"),
    "host_loaded_bytes": ("host", "out"),
    "disk_written_bytes": ("disk", "in"),
    "disk_read_bytes": ("disk", "out"),
}


class WorkerFacts(Struct, frozen=True, kw_only=True):
    """The labels of baton_worker_info, fixed for the life of a worker."""

    host: str = ""
    device: str = ""
    card: str = ""
    """The id and name of the GPU; "" without one."""
    fingerprint: str = ""
    """The digest of model and layout that a pair must share."""


class WorkerRecord(Struct, frozen=True, kw_only=True):
    """One worker at the moment of a scrape."""

    role: str
    """"prefill" or "decode"."""
    instance: str
    """The worker's instance id."""
    stats: WorkerStats
    """Its last heartbeat."""
    facts: WorkerFacts | None = None
    """None before the engine is loaded."""
    metrics_port: int = 0
    """The port of its own /metrics; 0: none."""


def shown_workers(workers: Iterable[WorkerRecord], choice: str) -> list[WorkerRecord]:
    """The workers whose series a router exports; `choice` is one of WORKER_METRICS."""
    assert choice in WORKER_METRICS, choice
    if choice == SHOW_NONE:
        return []
    return [worker for worker in workers if choice == SHOW_ALL or not worker.metrics_port]


def render_worker(model: str, worker: WorkerRecord) -> bytes:
    """The body of a worker's own /metrics."""
    return rendered(worker.role, worker_families(model, [worker]))


def worker_families(model: str, workers: Iterable[WorkerRecord]) -> Families:
    """Heartbeats as labelled gauges and counters. A worker without drafts has no accept length."""
    families = Families(model, names.WORKER_NAMES)
    for worker in workers:
        _add_worker(families, worker)
    return families


def _add_worker(families: Families, worker: WorkerRecord) -> None:
    who, stats, facts = (worker.role, worker.instance), worker.stats, worker.facts
    families.add(names.WORKER_UP, (*who, stats.state), 1)
    if facts is not None:
        families.add(names.WORKER_INFO, (*who, facts.host, facts.device, facts.card, facts.fingerprint), 1)
    running, queued, transferring = clients_rooms(stats)
    canaries = msgspec.structs.asdict(stats.canaries)
    kinds: dict[MetricName, Mapping[str, float]] = {
        names.WORKER_PAGES: {
            "total": stats.pages_total,
            "free": stats.pages_free,
            "cached": stats.pages_cached,
            "promised": stats.pages_promised,
        },
        names.WORKER_REQUESTS: {
            "running": running,
            "queued": queued,
            "transferring": transferring,
            "canaries": sum(canaries.values()),
        },
        names.WORKER_GRAPHS: msgspec.structs.asdict(stats.graphs),
    }
    if stats.window_pages_total:
        kinds[names.WORKER_PAGES] = {
            **kinds[names.WORKER_PAGES],
            "window_total": stats.window_pages_total,
            "window_free": stats.window_pages_free,
        }
    for name, values in kinds.items():
        for kind, value in sorted(values.items()):
            families.add(name, (*who, kind), value)
    for tier in stats.tiers:
        families.add(names.WORKER_TIER_BYTES, (*who, tier.name, "used"), tier.used)
        families.add(names.WORKER_TIER_BYTES, (*who, tier.name, "total"), tier.total)
    if stats.accept_length is not None:
        families.add(names.WORKER_ACCEPT_LENGTH, who, stats.accept_length)
    if stats.spec_steps is not None:
        families.add(names.WORKER_SPEC_STEPS, who, stats.spec_steps)
    graph_kinds = {counter.removeprefix(REPLAYS) for counter in stats.counters if counter.startswith(REPLAYS)}
    for counter, total in sorted(stats.counters.items()):
        name, labels = _metric_of(counter, graph_kinds)
        families.add(name, (*who, *labels), total)


def _metric_of(counter: str, graph_kinds: set[str]) -> tuple[MetricName, tuple[str, ...]]:
    """The metric of a worker's counter, with its last labels. A fallback's name has a kind and a reason."""
    if counter in AFTER_READY:
        return AFTER_READY[counter], ()
    if counter in TIER_HITS:
        return names.WORKER_TIER_HITS, (TIER_HITS[counter],)
    if counter in TIER_MOVED:
        return names.WORKER_TIER_MOVED, TIER_MOVED[counter]
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
