"""The load of the last 15 minutes, for the charts of the router's page and of `baton top`.

The memory is bounded. Each series is a ring of `POINTS` numbers of 4 bytes: 1.8 kB. The router has 9 series
and each worker 8, so one pair takes 45 kB, and MAX_WORKERS workers 0.94 MB. Workers that left stay until
their last point is too old, or until a new worker needs the place. Numbers are whole, in the units of their
names; -1 stands for a number that is not known.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from ...cluster.protocol.messages import WorkerStats, clients_rooms
from ..workers.registry import Worker
from .flow import FlowTotals

EVERY_S = 2.0
SPAN_S = 900.0
POINTS = round(SPAN_S / EVERY_S)
MAX_WORKERS = 64
UNKNOWN = -1
MOST = 2**31 - 1

ROUTER_SERIES = (
    "running",
    "queued",
    "output_tokens_per_s",
    "prompt_tokens_per_s",
    "ended",
    "failed",
    "ttft_p50_us",
    "ttft_p95_us",
    "gap_p50_us",
)
WORKER_SERIES = (
    "pages_permille",
    "requests",
    "tokens_per_s",
    "handoff_kib_per_s",
    "accept_length_percent",
    "cpu_permille",
    "gpu_permille",
    "gpu_memory_permille",
)
HAND_OFF, TOKENS = {"prefill": "bytes", "decode": "handoff_bytes"}, {"prefill": "prompt_tokens"}


class WorkerHistory(Struct, frozen=True, kw_only=True):
    """The series of one worker; the last number is the newest."""

    instance: str
    role: str
    series: dict[str, list[int | None]]


class HistoryView(Struct, frozen=True, kw_only=True):
    """The body of /history: points `first` to `last`, one every `every_s` seconds. Null: not known."""

    first: int
    last: int
    every_s: float
    points_kept: int
    age_s: float
    """Seconds since the last point."""
    num_bytes: int
    """Memory of all series."""
    router: dict[str, list[int | None]]
    workers: list[WorkerHistory]


class Ring:
    """The last POINTS numbers, by the number of their point."""

    def __init__(self) -> None:
        self._values = array("i", [UNKNOWN]) * POINTS

    @property
    def num_bytes(self) -> int:
        return self._values.itemsize * len(self._values)

    def put(self, point: int, value: float | None) -> None:
        self._values[point % POINTS] = UNKNOWN if value is None else min(MOST, max(0, round(value)))

    def between(self, first: int, last: int) -> list[int | None]:
        """The numbers of points `first` to `last`, both included; at most POINTS of them."""
        values, size = self._values, last - first + 1
        start = first % POINTS
        part = values[start : start + size] + values[: max(0, start + size - POINTS)]
        return [None if value < 0 else value for value in part]


@dataclass(eq=False)
class _WorkerRings:
    """The series of one worker, with the totals of its last heartbeat that was looked at."""

    role: str
    rings: dict[str, Ring] = field(default_factory=lambda: {name: Ring() for name in WORKER_SERIES})
    last_seen: int = 0  # the newest point at which it was registered
    stats: WorkerStats | None = None
    at: float = 0.0  # monotonic seconds of `stats`
    rates: tuple[float, float] | None = None  # tokens and bytes per second

    def hear(self, stats: WorkerStats, at: float, now: float) -> None:
        """Takes the newest heartbeat, which came `at`. The rates of a silent worker become unknown."""
        if stats is not self.stats:
            self.rates = _rates(self, stats, at)
            self.stats, self.at = stats, at
        elif now - self.at > 3 * EVERY_S:
            self.rates = None


class LoadHistory:
    """Filled by `sample`, which the router's timer calls. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._router = {name: Ring() for name in ROUTER_SERIES}
        self._workers: dict[str, _WorkerRings] = {}
        self._last = int(clock() / EVERY_S)
        self._first = self._last + 1  # the first point ever

    def __repr__(self) -> str:
        return f"LoadHistory({len(self._workers)} workers, {self.num_bytes} bytes)"

    @property
    def num_bytes(self) -> int:
        """Memory of all numbers."""
        rings = [*self._router.values(), *(r for w in self._workers.values() for r in w.rings.values())]
        return sum(ring.num_bytes for ring in rings)

    @property
    def is_due(self) -> bool:
        """Whether the time of the next point has come."""
        return int(self._clock() / EVERY_S) > self._last

    def sample(self, *, running: int, queued: int, flow: FlowTotals, workers: Iterable[Worker]) -> None:
        """Adds the point of now. Points that were missed, as while the process was stopped, are unknown."""
        now = self._clock()
        point, missed = int(now / EVERY_S), range(self._last + 1, int(now / EVERY_S))
        elapsed = max(1, point - self._last) * EVERY_S
        for late in missed[-POINTS:]:
            self._skip(late)
        self._last = point
        _put(self._router, point, _router_values(running, queued, flow, elapsed))
        here = {worker.instance: worker for worker in workers if worker.stats is not None}
        self._admit([worker for name, worker in here.items() if name not in self._workers], point)
        for instance, rings in self._workers.items():
            _put(rings.rings, point, _worker_values(rings, here.get(instance), point, now))

    def view(self, since: int | None = None) -> HistoryView:
        """The points after point `since`; all that are kept without one."""
        first = max(self._first, self._last - POINTS + 1, since + 1 if since is not None else 0)
        first = min(first, self._last + 1)
        workers = [
            WorkerHistory(
                instance=instance,
                role=rings.role,
                series={name: ring.between(first, self._last) for name, ring in rings.rings.items()},
            )
            for instance, rings in self._workers.items()
        ]
        return HistoryView(
            first=first,
            last=self._last,
            every_s=EVERY_S,
            points_kept=POINTS,
            age_s=round(self._clock() - self._last * EVERY_S, 3),
            num_bytes=self.num_bytes,
            router={name: ring.between(first, self._last) for name, ring in self._router.items()},
            workers=workers,
        )

    def _skip(self, point: int) -> None:
        for ring in self._router.values():
            ring.put(point, None)
        for worker in self._workers.values():
            for ring in worker.rings.values():
                ring.put(point, None)

    def _admit(self, new: Sequence[Worker], point: int) -> None:
        """Adds new workers. Forgets those that left SPAN_S ago, or earlier where new ones need the place."""
        for instance in [name for name, w in self._workers.items() if point - w.last_seen >= POINTS]:
            del self._workers[instance]
        left = sorted((w.last_seen, name) for name, w in self._workers.items() if w.last_seen < point - 1)
        for _, instance in left[: max(0, len(self._workers) + len(new) - MAX_WORKERS)]:
            del self._workers[instance]
        for worker in new[: MAX_WORKERS - len(self._workers)]:
            self._workers[worker.instance] = _WorkerRings(worker.role, last_seen=point)


def _put(rings: Mapping[str, Ring], point: int, values: Sequence[float | None]) -> None:
    for ring, value in zip(rings.values(), values, strict=True):
        ring.put(point, value)


def _router_values(running: int, queued: int, flow: FlowTotals, elapsed: float) -> Sequence[float | None]:
    """The numbers of ROUTER_SERIES, `elapsed` seconds after the point before."""
    ended = sum(flow.ended.values())
    return (
        running,
        queued,
        flow.output_tokens / elapsed,
        flow.prompt_tokens / elapsed,
        ended,
        ended - flow.ended.get("ok", 0) - flow.ended.get("cancelled", 0),
        _micros(flow.ttfts, 0.5),
        _micros(flow.ttfts, 0.95),
        _micros(flow.gaps, 0.5),
    )


def _worker_values(
    rings: _WorkerRings, worker: Worker | None, point: int, now: float
) -> Sequence[float | None]:
    """The numbers of WORKER_SERIES; unknown ones for a worker that is not there."""
    if worker is None or worker.stats is None:
        return [None] * len(WORKER_SERIES)
    stats, usage = worker.stats, worker.stats.usage
    rings.hear(stats, worker.last_seen, now)
    rings.last_seen = point
    tokens, moved = rings.rates or (None, None)
    total, accept = stats.pages_total, stats.accept_length
    gpu_memory = usage.gpu_memory_bytes / usage.gpu_memory_total if usage and usage.gpu_memory_total else None
    return (
        1000 * (total - stats.pages_free) / total if total else None,
        sum(clients_rooms(stats)),
        tokens,
        None if moved is None else moved / 1024,
        None if accept is None else 100 * accept,
        None if usage is None else 1000 * usage.cpu_cores / max(1, usage.num_cores),
        None if usage is None or usage.gpu_busy is None else 1000 * usage.gpu_busy,
        None if gpu_memory is None else 1000 * gpu_memory,
    )


def _rates(rings: _WorkerRings, stats: WorkerStats, at: float) -> tuple[float, float] | None:
    """Tokens and bytes per second since the heartbeat before; None without one."""
    if rings.stats is None or at <= rings.at:
        return None
    before, seconds = rings.stats.counters, at - rings.at
    names = TOKENS.get(rings.role, "tokens"), HAND_OFF[rings.role]
    tokens, moved = (max(0.0, stats.counters.get(n, 0.0) - before.get(n, 0.0)) / seconds for n in names)
    return tokens, moved


def _micros(seconds: list[float], share: float) -> float | None:
    """The quantile of these times in microseconds; None without any."""
    if not seconds:
        return None
    ranked = sorted(seconds)
    return 1e6 * ranked[min(len(ranked) - 1, int(share * len(ranked)))]
