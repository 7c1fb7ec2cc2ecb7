"""What operators see: /status, /metrics, /v1/models."""

import os
import time
from collections.abc import Mapping

from msgspec import Struct

from ..cluster.messages import GraphCounts, WorkerStats
from ..cluster.metrics import RouterRecord, WorkerRecord
from .scheduling.dispatcher import Dispatcher
from .workers.eligibility import is_ready
from .workers.pair_health import PairStatus
from .workers.registry import Registry, Worker


class RouterStatus(Struct, frozen=True, kw_only=True):
    """The router itself."""

    instance: str
    pid: int
    model: str
    state: str
    is_ready: bool
    why_not_ready: str
    queued: int
    running: int
    open_rooms: int
    uptime_s: float
    clock: float  # this host's, seconds since the epoch
    events: dict[str, int]


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """One worker, from its Hello, its last heartbeat and the router's ledger."""

    role: str
    instance: str
    pid: int
    host: str
    state: str
    model: str
    device: str
    transport: str
    fingerprint: str
    pages_free: int
    pages_total: int
    pages_cached: int
    page_size: int
    max_context: int
    max_running: int
    running: int
    queued: int
    transferring: int
    placed: int
    graphs: GraphCounts
    accept_length: float | None
    spec_steps: int | None
    heartbeat_age_s: float
    counters: dict[str, float]


class Status(Struct, frozen=True):
    """The body of /status."""

    router: RouterStatus
    workers: list[WorkerStatus]
    pairs: list[PairStatus]  # empty with --canary-s 0


class ModelCard(Struct, frozen=True, kw_only=True):
    """One model of /v1/models."""

    id: str
    created: int
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "baton"


class ModelList(Struct, frozen=True):
    """The body of /v1/models."""

    data: list[ModelCard]
    object: str = "list"


def status_of(dispatcher: Dispatcher, model: str, uptime_s: float, now: float) -> Status:
    """The whole picture at `now` (monotonic seconds)."""
    registry = dispatcher.registry
    router = RouterStatus(
        instance=registry.router,
        pid=os.getpid(),
        model=model,
        state="draining" if dispatcher.is_draining else "serving",
        is_ready=dispatcher.is_ready,
        why_not_ready=why_not_ready(dispatcher, now),
        queued=dispatcher.num_queued,
        running=dispatcher.num_running,
        open_rooms=dispatcher.num_open,
        uptime_s=round(uptime_s, 1),
        clock=round(time.time(), 3),
        events=dispatcher.event_totals,
    )
    workers = [_worker_status(worker, now) for worker in registry]
    return Status(router, workers, dispatcher.health_probes.pair_health.status(now))


def why_not_ready(dispatcher: Dispatcher, now: float) -> str:
    """One line for /ready; empty when a pair can serve, and has shown it."""
    if dispatcher.is_draining:
        return "the router is shutting down"
    registry = dispatcher.registry
    if is_ready(registry):
        return "" if dispatcher.is_ready else dispatcher.health_probes.pair_health.why_not(now)
    counts = {role: _num_serving(registry, role) for role in ("prefill", "decode")}
    missing = [role for role, count in counts.items() if count == 0]
    if missing:
        return f"no {' and no '.join(missing)} worker is ready"
    return "no prefill and decode worker have equal fingerprints: start them with the same model, dtype and page size"


def metrics_of(dispatcher: Dispatcher, responses: Mapping[int, int] | None = None) -> bytes:
    """The body of /metrics; `responses` are the answers by status."""
    router = RouterRecord(
        queued=dispatcher.num_queued,
        running=dispatcher.num_running,
        events=dispatcher.event_totals,
        responses=responses or {},
        is_ready=dispatcher.is_ready,
        canaries=dispatcher.health_probes.outcomes,
        failing_pairs=tuple(dispatcher.health_probes.pair_health.failures()),
    )
    workers = [
        WorkerRecord(role=worker.role, instance=worker.instance, stats=worker.stats)
        for worker in dispatcher.registry
        if worker.stats is not None
    ]
    return dispatcher.metrics.render(router, workers)


def _num_serving(registry: Registry, role: str) -> int:
    return sum(worker.role == role and worker.is_serving for worker in registry)


def _worker_status(worker: Worker, now: float) -> WorkerStatus:
    hello = worker.hello
    stats = worker.stats or WorkerStats(
        state="starting", pages_total=hello.pages_total, pages_free=hello.pages_total
    )
    return WorkerStatus(
        role=hello.role,
        instance=hello.instance,
        pid=hello.pid,
        host=hello.host,
        state=worker.state,
        model=hello.model,
        device=hello.device,
        transport=hello.transport,
        fingerprint=hello.fingerprint,
        pages_free=stats.pages_free,
        pages_total=stats.pages_total,
        pages_cached=stats.pages_cached,
        page_size=hello.page_size,
        max_context=hello.max_context,
        max_running=hello.max_running,
        running=stats.running,
        queued=stats.queued,
        transferring=stats.transferring,
        placed=worker.num_rooms,
        graphs=stats.graphs,
        accept_length=stats.accept_length,
        spec_steps=stats.spec_steps,
        heartbeat_age_s=round(now - worker.last_seen, 3),
        counters=stats.counters,
    )
