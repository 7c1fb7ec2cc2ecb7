"""The workers that the router knows, and the ledger of the attempts that it has placed on them. Pure: no
clock, no socket.

A worker is one process start, named by its instance. It registers with Hello and serves from its first
heartbeat on. The scheduler loop sends heartbeats and the link thread sends Hello, so a worker with a hung
loop is not trusted because of its live link. A worker is overdue after `worker_timeout_s` without a
heartbeat, or after `UNREACHABLE_S` without a connection: the connection of a dead process closes at once.
`stalls` decides whether an overdue worker is lost.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct

from ...cluster.process.log import fields
from ...cluster.protocol.messages import (
    CHANGING_ROLE,
    PROTOCOL_MAJOR,
    ControlUp,
    Failed,
    Hello,
    Refused,
    Rejected,
    Welcome,
    WorkerStats,
)
from ..rooms.attempt import RETRACTED
from .breaker import Breaker
from .prefix_view import PrefixView

logger = logging.getLogger(__name__)

HEARTBEATS_PER_TIMEOUT = 6  # so that a few late ones do no harm
HEARTBEAT_RANGE_MS = (100, 1000)
LONGEST_EXCUSE_S = 5.0
UNREACHABLE_S = 0.75  # a worker that reconnects says Hello within this time
# After a pause of this router its workers have given it up. They greet at intervals of at most 1 s, once they
# are connected.
REDIAL_S = 2.5

T = TypeVar("T")


class Load(Struct, frozen=True, gc=False):
    """The size of one attempt on a worker, the class of its request, and whether its tokens have begun.

    `tokens`: prompt tokens to compute. `prompts`: 1 for a whole prompt, 0 for the rest of a shared one.
    """

    pages: int
    tokens: int
    priority: int = 0
    has_begun: bool = False
    prompts: int = 0


class Backlog(NamedTuple):
    """Prompts that a worker has to compute for the placed attempts, or is computing, and their tokens, with
    those behind shared prompts.
    """

    prompts: int
    tokens: int


class Ledger:
    """The attempts (room, epoch) placed on one worker, with their sums."""

    __slots__ = ("_classes", "_loads", "num_begun", "num_prompts", "pages", "tokens")

    def __init__(self) -> None:
        self._loads: dict[tuple[str, int], Load] = {}
        self._classes: Counter[int] = Counter()
        self.pages = self.tokens = self.num_begun = self.num_prompts = 0

    def __repr__(self) -> str:
        return f"Ledger({len(self)} attempts, pages={self.pages}, tokens={self.tokens})"

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._loads)

    def __setitem__(self, attempt: tuple[str, int], load: Load) -> None:
        self.drop(attempt)
        self._loads[attempt] = load
        self._classes[load.priority] += 1
        self.pages += load.pages
        self.tokens += load.tokens
        self.num_prompts += load.prompts
        self.num_begun += load.has_begun

    def drop(self, attempt: tuple[str, int]) -> None:
        """Removes an attempt. Idempotent."""
        load = self._loads.pop(attempt, None)
        if load is not None:
            self.pages -= load.pages
            self.tokens -= load.tokens
            self.num_prompts -= load.prompts
            self.num_begun -= load.has_begun
            self._classes[load.priority] -= 1
            if not self._classes[load.priority]:
                del self._classes[load.priority]

    def begun(self, attempt: tuple[str, int]) -> None:
        """The tokens of an attempt have begun: its prompt is computed. Idempotent."""
        load = self._loads.get(attempt)
        if load is not None and not load.has_begun:
            self[attempt] = Load(pages=load.pages, tokens=0, priority=load.priority, has_begun=True)

    def less_urgent(self, priority: int) -> list[tuple[str, int]]:
        """The attempts of classes below `priority`."""
        if not any(each > priority for each in self._classes):
            return []
        return [attempt for attempt, load in self._loads.items() if load.priority > priority]

    def pages_of(self, attempt: tuple[str, int]) -> int:
        """Pages of an attempt; 0 for an unknown one."""
        load = self._loads.get(attempt)
        return load.pages if load is not None else 0

    def clear(self) -> None:
        self._loads.clear()
        self._classes.clear()
        self.pages = self.tokens = self.num_begun = self.num_prompts = 0


@dataclass(eq=False)
class Worker:
    """One registered worker with its ledger of placed attempts."""

    hello: Hello
    identity: bytes
    last_seen: float
    stats: WorkerStats | None = None
    is_draining: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    unreachable_since: float | None = None
    # time of its last heartbeat while it is silent and requests wait for it: its connection stands
    stalled_since: float | None = None
    # packed messages that its connection has not accepted yet
    outbox: deque[bytes] = field(default_factory=deque)
    breaker: Breaker = field(default_factory=Breaker)
    prefixes: PrefixView = field(init=False)  # that it holds
    has_hole: bool = (
        False  # one of its messages was lost: it must drop its rooms, since any of them may be concerned
    )
    takes_prompts: bool = False  # a decode worker that may be given prompts without a prefill worker
    is_aggregated: bool = False  # it may be given them also while prefill workers serve
    foreign_pages: int = 0  # pages in use beyond the ledger, as of the last heartbeat
    foreign_rooms: int = 0  # rooms of other routers, as of the last heartbeat

    def __post_init__(self) -> None:
        self.prefixes = PrefixView(self.hello.page_size, tells=self.hello.tells_prefixes)

    def __repr__(self) -> str:
        pages = f"{self.free_pages}/{self.hello.pages_total}"
        return (
            f"Worker({self.hello.role} {self.instance[:8]} {self.state} rooms={self.num_rooms} pages={pages})"
        )

    @property
    def instance(self) -> str:
        return self.hello.instance

    @property
    def role(self) -> str:
        return self.hello.role

    @property
    def state(self) -> str:
        if self.stalled_since is not None:
            return "stalled"
        if self.is_draining:
            is_returning = self.stats is not None and self.stats.state == CHANGING_ROLE
            return CHANGING_ROLE if is_returning else "draining"
        return self.stats.state if self.stats is not None else "starting"

    @property
    def weights_hash(self) -> str:
        """The sha256 of every byte of its weights, from its last heartbeat; "" while unknown."""
        return self.stats.weights_hash if self.stats is not None else ""

    @property
    def is_serving(self) -> bool:
        return self.state == "serving"

    @property
    def would_serve(self) -> bool:
        """Whether it serves, or would if it were not stalled."""
        is_well = not self.is_draining and self.stats is not None and self.stats.state == "serving"
        return is_well if self.stalled_since is not None else self.is_serving

    @property
    def num_rooms(self) -> int:
        return len(self.ledger)

    @property
    def num_taken(self) -> int:
        """Places in use, by rooms of this router and of others."""
        return self.num_rooms + self.foreign_rooms

    @property
    def num_running(self) -> int:
        """Rooms whose tokens have begun, with all rooms of other routers, of which this is not known."""
        return self.ledger.num_begun + self.foreign_rooms

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that the worker has to compute for the placed attempts, or is computing."""
        return self.ledger.tokens

    @property
    def backlog(self) -> Backlog:
        """What `num_tokens` counts, with the number of prompts."""
        return Backlog(prompts=self.ledger.num_prompts, tokens=self.ledger.tokens)

    @property
    def placed_pages(self) -> int:
        return self.ledger.pages

    @property
    def spare_pages(self) -> int:
        """Free pages; below 0 by those for which others make way."""
        return self.hello.pages_total - self.placed_pages - self.foreign_pages

    @property
    def free_pages(self) -> int:
        return max(0, self.spare_pages)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a request of `num_tokens` needs here, including space for unverified draft tokens."""
        return -(-(num_tokens + self.hello.spec_tokens) // self.hello.page_size)

    def forget_rooms(self) -> None:
        """Clears the ledger after the worker has dropped all its rooms."""
        self.ledger.clear()
        self.breaker.probe = None
        self.outbox.clear()
        self.foreign_pages = self.foreign_rooms = 0
        self.has_hole = False

    def hear(self, message: ControlUp) -> None:
        """Handles a message about a room.

        A refusal shows that the worker's load exceeds the ledger, since it serves another router too. A
        retraction shows that answers get longer than booked, unless a more urgent request was the reason. The
        worker then gets nothing more before its next heartbeat.
        """
        is_full = isinstance(message, Failed) and message.kind == RETRACTED and not message.is_preempted
        if is_full or isinstance(message, Refused):
            self.foreign_pages = self.hello.pages_total

    def take_heartbeat(self, stats: WorkerStats, now: float) -> None:
        self.stats = stats
        self.last_seen = now
        self.prefixes.beat(stats.prefix_news, now)
        taken = stats.pages_total - stats.pages_free + stats.pages_promised
        self.foreign_pages = max(0, taken - self.placed_pages)
        self.foreign_rooms = max(0, stats.running + stats.queued + stats.transferring - self.num_rooms)


class Registry:
    """All registered workers, by instance."""

    def __init__(self, router: str, worker_timeout_s: float, *, local_prefill: bool = True) -> None:
        self.router = router
        self._local_prefill = local_prefill
        self._timeout_s = worker_timeout_s
        self._workers: dict[str, Worker] = {}
        self._memo: dict[str, Any] = {}
        self._excused_at = 0.0
        self._excuse_left_s = LONGEST_EXCUSE_S
        self._returned_at = 0.0  # until then a worker may be on its way back

    def __repr__(self) -> str:
        num_prefill = sum(worker.role == "prefill" for worker in self)
        return f"Registry(prefill={num_prefill}, decode={len(self._workers) - num_prefill})"

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def heartbeat_ms(self) -> int:
        """The heartbeat interval for workers, in milliseconds."""
        low, high = HEARTBEAT_RANGE_MS
        return min(high, max(low, round(self._timeout_s * 1000 / HEARTBEATS_PER_TIMEOUT)))

    def memo(self, name: str, make: Callable[[], T]) -> T:
        """The cached result of `make` under `name`.

        The cache is cleared when a worker joins, leaves or changes its state.
        """
        try:
            found: T = self._memo[name]
        except KeyError:
            found = self._memo[name] = make()
        return found

    def drain(self, worker: Worker) -> None:
        """Marks a worker as draining: it gets no new rooms."""
        worker.is_draining = True
        self._memo.clear()

    def get(self, instance: str) -> Worker | None:
        return self._workers.get(instance)

    def groups_of(self, instances: Iterable[str]) -> set[str]:
        """`instances`, with all workers that end together with one of them."""
        found = set(instances)
        groups = {worker.hello.group for worker in self if worker.hello.group and worker.instance in found}
        return found | {worker.instance for worker in self if groups and worker.hello.group in groups}

    def hello(self, identity: bytes, message: Hello, now: float) -> Welcome | Rejected:
        """Registers a worker, or notes its new connection."""
        reason = _reason_to_reject(message)
        if reason:
            return Rejected(instance=message.instance, reason=reason)
        self._memo.clear()
        known = self._workers.get(message.instance)
        if known is None:
            is_aggregated = message.role == "decode" and message.aggregated
            takes_prompts = message.role == "decode" and message.local_prefill and self._local_prefill
            self._workers[message.instance] = Worker(
                message,
                identity,
                now,
                takes_prompts=takes_prompts or is_aggregated,
                is_aggregated=is_aggregated,
            )
        else:  # a query whether it is still registered, or a new connection
            known.hello, known.identity, known.unreachable_since = message, identity, None
        return self.welcome(message.instance)

    def welcome(self, instance: str) -> Welcome:
        """The answer to a registered worker's Hello."""
        return Welcome(
            instance=instance,
            router=self.router,
            generation=self._workers[instance].hello.generation,
            heartbeat_ms=self.heartbeat_ms,
            takes_batches=True,
            takes_prefixes=True,
        )

    def heartbeat(self, identity: bytes, instance: str, stats: WorkerStats, now: float) -> bool:
        """Notes a heartbeat; False for a worker that is not registered."""
        worker = self._workers.get(instance)
        if worker is None:
            return False
        worker.identity, worker.unreachable_since = identity, None
        if worker.stalled_since is not None:
            self._end_stall(worker, now)
        is_news = worker.weights_hash != stats.weights_hash
        if is_news or worker.stats is None or worker.stats.state != stats.state:
            self._memo.clear()
        worker.take_heartbeat(stats, now)
        if is_news:
            self._warn_of_other_weights(worker)
        return True

    def stall(self, worker: Worker) -> None:
        """Marks a worker as stalled: it gets nothing until its next heartbeat, which ends the stall."""
        worker.stalled_since = worker.last_seen
        self._memo.clear()

    def _end_stall(self, worker: Worker, now: float) -> None:
        silent_s = round(now - worker.last_seen, 1)
        worker.stalled_since = None
        self._memo.clear()
        logger.warning(
            "a stalled worker goes on",
            extra=fields(role=worker.role, instance=worker.instance, silent_s=silent_s),
        )

    @property
    def stalled(self) -> list[Worker]:
        """The stalled workers."""
        return self.memo("stalled", lambda: [worker for worker in self if worker.stalled_since is not None])

    def _warn_of_other_weights(self, worker: Worker) -> None:
        """Logs each worker with the same fingerprint and other weights, with which this one no longer
        pairs."""
        for other in self:
            if other.hello.fingerprint == worker.hello.fingerprint and are_other_weights(worker, other):
                logger.warning(
                    "workers of one fingerprint have other weights: they do not pair; "
                    "serve the same files on both",
                    extra=fields(
                        worker=f"{worker.role} {worker.instance[:8]} on {worker.hello.host}",
                        other=f"{other.role} {other.instance[:8]} on {other.hello.host}",
                        weights_hash=worker.weights_hash[:16],
                        other_hash=other.weights_hash[:16],
                    ),
                )

    def overdue(self, now: float) -> list[Worker]:
        """Workers without a heartbeat or a connection for too long."""
        return [worker for worker in self if self._is_overdue(worker, now)]

    def excuse(self, now: float, *, is_behind: bool) -> None:
        """Called at every tick. While the router `is_behind` in reading, silence since the last call is its
        own fault.

        Workers are excused for at most `LONGEST_EXCUSE_S` at a time, so a flood cannot hide dead workers for
        longer.
        """
        elapsed, self._excused_at = now - self._excused_at, now
        if not is_behind:
            self._excuse_left_s = LONGEST_EXCUSE_S
            return
        seconds = min(elapsed, self._excuse_left_s)
        self._excuse_left_s -= seconds
        for worker in self:
            worker.last_seen = min(now, worker.last_seen + seconds)

    def excuse_pause(self, seconds: float, now: float) -> None:
        """This router did not run for so long, so nobody was silent, nor without a connection.

        Workers have `REDIAL_S` to come back.
        """
        self._excused_at = now
        self._returned_at = now + REDIAL_S
        for worker in self:
            worker.last_seen += seconds
            if worker.unreachable_since is not None:
                worker.unreachable_since += seconds

    def _is_overdue(self, worker: Worker, now: float) -> bool:
        if now <= self._returned_at:
            return False
        since = worker.unreachable_since
        return now - worker.last_seen > self._timeout_s or (since is not None and now - since > UNREACHABLE_S)

    def is_silent(self, worker: Worker, now: float) -> bool:
        """Whether the worker is overdue though its connection stands."""
        return worker.unreachable_since is None and now - worker.last_seen > self._timeout_s

    def remove(self, instance: str) -> None:
        self._memo.clear()
        self._workers.pop(instance, None)

    def reserve(self, instance: str, room: str, epoch: int, load: Load) -> None:
        worker = self._workers[instance]
        worker.ledger[room, epoch] = load
        worker.breaker.placed(room, epoch)

    def begun(self, instance: str, room: str, epoch: int) -> None:
        """Notes that the attempt's prompt is computed; it keeps its pages and its place."""
        worker = self._workers.get(instance)
        if worker is not None:
            worker.ledger.begun((room, epoch))

    def release(self, instance: str, room: str, epoch: int) -> None:
        """Removes an attempt from the ledger. Idempotent; the worker may be gone."""
        worker = self._workers.get(instance)
        if worker is not None:
            worker.ledger.drop((room, epoch))
            worker.breaker.left(room, epoch)

    def judge(self, instance: str, room: str, epoch: int, is_good: bool, now: float) -> bool:
        """Notes a worker's outcome in an attempt; True when its breaker opens."""
        worker = self._workers.get(instance)
        return worker is not None and worker.breaker.judge(room, epoch, is_good, now)

    def doubtful(self, now: float) -> set[str]:
        """Workers that get an attempt only when no other can: those with an open breaker, and those
        unreachable now."""
        return {
            worker.instance
            for worker in self
            if worker.breaker.is_avoided(now) or worker.unreachable_since is not None
        }


def are_other_weights(one: Worker, other: Worker) -> bool:
    """Whether the hashes of both workers' weights are known, and differ."""
    return bool(one.weights_hash and other.weights_hash) and one.weights_hash != other.weights_hash


def _reason_to_reject(message: Hello) -> str:
    if message.protocol != PROTOCOL_MAJOR:
        return f"protocol {message.protocol} is not {PROTOCOL_MAJOR}: run the same release on every host"
    if message.role == "prefill" and not message.kv_endpoint:
        return "a prefill worker must name its KV endpoint"
    if message.pages_total == 0:
        return "the worker has no pages: give it more KV memory"
    return ""
