"""The bodies of /status, /metrics and /v1/models."""

import os
import time
from collections.abc import Mapping
from itertools import islice

from msgspec import Struct

from ...cluster.config.router_groups import SHOW_PORTLESS
from ...cluster.net.transport_names import path_rates
from ...cluster.protocol.messages import (
    CHANGING_ROLE,
    Choice,
    DraftHead,
    DraftWidths,
    GraphCounts,
    Hello,
    Recording,
    ResourceUsage,
    TierStats,
    WorkerStats,
    clients_rooms,
)
from ...cluster.telemetry.metrics import ClassLoad, RouterRecord
from ...cluster.telemetry.worker_metrics import WorkerFacts, WorkerRecord, shown_workers
from ..scheduling.dispatcher import Dispatcher
from ..workers.eligibility import is_ready, why_not_pair
from ..workers.lone_decode import lacks_prefill
from ..workers.pair_health import PairStatus
from ..workers.registry import Registry, Worker
from ..workers.role_changes import RoleMove

MAX_UNPAIRED = 64
WORKER_STATES = ("starting", "serving", "draining", CHANGING_ROLE, "stalled")


class StalledWorker(Struct, frozen=True, kw_only=True):
    """A worker that requests wait for: it is silent, its connection stands, and no other can serve them."""

    role: str
    instance: str
    host: str
    since: float  # its last heartbeat, seconds since the epoch
    silent_s: float
    lost_in_s: float  # then it counts as lost, unless it goes on
    reason: str


class RouterStatus(Struct, frozen=True, kw_only=True):
    """The state of the router."""

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
    clock: float  # this host's clock, seconds since the epoch
    events: dict[str, int]
    stalled: list[StalledWorker] = []
    role_changes: list[RoleMove] = []  # the newest, oldest first
    classes: list[ClassLoad] = []
    """The requests by class, the most urgent first."""
    limit_parts: int = 1
    """Routers among which the limits of API keys are divided; each counts for itself."""


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """The state of one worker, from its Hello, its last heartbeat and the router's ledger."""

    role: str
    instance: str
    pid: int
    host: str
    state: str
    model: str
    device: str
    card: str  # the GPU of `device`: its id in CUDA_VISIBLE_DEVICES and its name; "": none
    transport: str  # the transports that it may use
    paths: dict[str, float]  # GB/s of complete hand-offs to a decode worker, by the transport they took
    fingerprint: str
    weights_hash: str  # sha256 of every byte of the weights; "": not known yet
    phase: str  # phase of the engine's lifecycle
    feature_ids: list[int]  # layers whose features prefill offers, or decode's head reads
    feature_width: int  # feature elements per token over all layers
    draft_widths: DraftWidths | None  # None: no drafter
    pages_free: int
    pages_total: int
    pages_cached: int
    pages_promised: int  # that its requests count on beyond those that they hold
    tiers: list[TierStats]  # of its KV cache below the pool, in bytes
    page_size: int
    max_context: int
    max_running: int
    aggregated: bool  # a decode worker that computes prompts of any length itself
    group: str  # workers of one group step and end together; "": it is alone
    chosen: dict[str, Choice]  # sizes of the worker by setting, each with its reason
    running: int  # these three without the routers' canaries
    queued: int
    transferring: int
    canaries: int  # the canaries of all routers on it
    placed: int
    usage: ResourceUsage | None  # None: the worker has not measured it
    graphs: GraphCounts
    accept_length: float | None
    spec_steps: int | None
    draft: DraftHead | None  # the weights that decode drafts with; None: it has none
    recording: Recording | None  # None: the worker records nothing
    heartbeat_age_s: float
    counters: dict[str, float]


class Unpaired(Struct, frozen=True, kw_only=True):
    """A serving prefill and decode worker that do not pair, with the reason."""

    prefill: str
    decode: str
    reason: str


class Status(Struct, frozen=True):
    """The body of /status."""

    router: RouterStatus
    workers: list[WorkerStatus]
    pairs: list[PairStatus]  # empty with --canary-s 0
    unpaired: list[Unpaired]  # at most MAX_UNPAIRED


class VersionReply(Struct, frozen=True, kw_only=True):
    """The body of /version."""

    version: str
    """Of the package, as `baton version` prints it."""
    protocol: int
    """Major version of the protocol between router and workers."""
    name: str = "baton"


class ModelCard(Struct, frozen=True, kw_only=True):
    """One model of /v1/models, with the fields of OpenAI's and of Anthropic's API."""

    id: str
    created: int  # Unix seconds
    max_model_len: int | None
    display_name: str
    created_at: str  # the same time by RFC 3339
    object: str = "model"
    owned_by: str = "baton"
    type: str = "model"


class ModelList(Struct, frozen=True):
    """The body of /v1/models."""

    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool = False
    object: str = "list"


def status_of(
    dispatcher: Dispatcher, model: str, uptime_s: float, now: float, *, limit_parts: int = 1
) -> Status:
    """The status of the router and its workers at `now` (monotonic seconds)."""
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
        stalled=[_stalled(dispatcher, worker, now) for worker in registry.stalled],
        role_changes=dispatcher.role_changes.status(now),
        classes=list(dispatcher.classes()),
        limit_parts=limit_parts,
    )
    workers = [_worker_status(worker, now) for worker in registry]
    return Status(router, workers, dispatcher.health_probes.pair_health.status(now), unpaired_of(registry))


def unpaired_of(registry: Registry) -> list[Unpaired]:
    """The serving pairs that do not fit together."""
    serving = [worker for worker in registry if worker.is_serving]
    reasons = (
        Unpaired(prefill=prefill.instance, decode=decode.instance, reason=reason)
        for decode in serving
        if decode.role == "decode"
        for prefill in serving
        if prefill.role == "prefill" and (reason := why_not_pair(prefill, decode))
    )
    return list(islice(reasons, MAX_UNPAIRED))


def why_not_ready(dispatcher: Dispatcher, now: float) -> str:
    """The reason why the router is not ready, in one line; empty when a pair can serve and has passed its
    probe."""
    if dispatcher.is_draining:
        return "the router is shutting down"
    registry = dispatcher.registry
    if is_ready(registry):
        return "" if dispatcher.is_ready else dispatcher.health_probes.pair_health.why_not(now)
    if why := dispatcher.stalls.why(now):
        return f"{why}; requests wait for it"
    missing = [role for role, count in serving_of(registry).items() if count == 0]
    if missing:
        return f"no {' and no '.join(missing)} worker is ready"
    by_layout = [one.reason for one in unpaired_of(registry) if not one.reason.startswith("fingerprints")]
    if by_layout:
        return f"no prefill and decode worker pair: {by_layout[0]}"
    return (
        "no prefill and decode worker have equal fingerprints: start them with the same model, "
        "dtype, page size and --window-kv"
    )


def metrics_of(
    dispatcher: Dispatcher, responses: Mapping[int, int] | None = None, worker_metrics: str = SHOW_PORTLESS
) -> bytes:
    """The body of /metrics. `responses` are the answers by status, `worker_metrics` is one of
    WORKER_METRICS."""
    router = RouterRecord(
        queued=dispatcher.num_queued,
        running=dispatcher.num_running,
        events=dispatcher.event_totals,
        responses=responses or {},
        registered=registered_of(dispatcher.registry),
        is_ready=dispatcher.is_ready,
        lacks_prefill=lacks_prefill(dispatcher.registry),
        canaries=dispatcher.health_probes.outcomes,
        failing_pairs=tuple(dispatcher.health_probes.pair_health.failures()),
        classes=dispatcher.classes(),
    )
    workers = [
        WorkerRecord(
            role=worker.role,
            instance=worker.instance,
            stats=worker.stats,
            facts=_facts_of(worker.hello),
            metrics_port=worker.hello.metrics_port,
        )
        for worker in dispatcher.registry
        if worker.stats is not None
    ]
    return dispatcher.metrics.render(router, shown_workers(workers, worker_metrics))


def registered_of(registry: Registry) -> dict[tuple[str, str], int]:
    """The number of registered workers by role and state."""
    found = {(role, state): 0 for role in ("prefill", "decode") for state in WORKER_STATES}
    for worker in registry:
        found[worker.role, worker.state] = found.get((worker.role, worker.state), 0) + 1
    return found


def _facts_of(hello: Hello) -> WorkerFacts:
    return WorkerFacts(host=hello.host, device=hello.device, card=hello.card, fingerprint=hello.fingerprint)


def serving_of(registry: Registry) -> dict[str, int]:
    """The number of serving workers by role."""
    return {role: _num_serving(registry, role) for role in ("prefill", "decode")}


def _num_serving(registry: Registry, role: str) -> int:
    return sum(worker.role == role and worker.is_serving for worker in registry)


def _stalled(dispatcher: Dispatcher, worker: Worker, now: float) -> StalledWorker:
    silent_s = now - worker.last_seen
    return StalledWorker(
        role=worker.role,
        instance=worker.instance,
        host=worker.hello.host,
        since=round(time.time() - silent_s, 3),
        silent_s=round(silent_s, 1),
        lost_in_s=round(dispatcher.stalls.ends_in(worker, now), 1),
        reason="no heartbeat comes though its connection stands: it is stopped, hangs or is cut off",
    )


def _worker_status(worker: Worker, now: float) -> WorkerStatus:
    hello = worker.hello
    stats = worker.stats or WorkerStats(
        state="starting", pages_total=hello.pages_total, pages_free=hello.pages_total
    )
    running, queued, transferring = clients_rooms(stats)
    return WorkerStatus(
        role=hello.role,
        instance=hello.instance,
        pid=hello.pid,
        host=hello.host,
        state=worker.state,
        model=hello.model,
        device=hello.device,
        card=hello.card,
        transport=hello.transport,
        paths=path_rates(stats.counters),
        fingerprint=hello.fingerprint,
        weights_hash=stats.weights_hash,
        phase=stats.phase,
        feature_ids=list(hello.feature_ids),
        feature_width=hello.feature_width,
        draft_widths=hello.draft_widths,
        pages_free=stats.pages_free,
        pages_total=stats.pages_total,
        pages_cached=stats.pages_cached,
        pages_promised=stats.pages_promised,
        tiers=stats.tiers,
        page_size=hello.page_size,
        max_context=hello.max_context,
        max_running=hello.max_running,
        aggregated=worker.is_aggregated,
        group=hello.group,
        chosen=hello.chosen,
        running=running,
        queued=queued,
        transferring=transferring,
        canaries=stats.canaries.running + stats.canaries.queued + stats.canaries.transferring,
        placed=worker.num_rooms,
        usage=stats.usage,
        graphs=stats.graphs,
        accept_length=stats.accept_length,
        spec_steps=stats.spec_steps,
        draft=stats.draft,
        recording=stats.recording,
        heartbeat_age_s=round(now - worker.last_seen, 3),
        counters=stats.counters,
    )
