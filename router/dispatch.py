"""The router's middle: a waiting queue, the rooms in flight, and the roads between clients, policy and workers.

No socket and no clock of its own: `transmit` hands a frame to a worker's connection, `clock` tells monotonic seconds,
and `tick` is called several times a second.
"""

import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..cluster.log import fields
from ..cluster.messages import (
    Cancel,
    ControlUp,
    FirstToken,
    Goodbye,
    Heartbeat,
    Hello,
    Reserved,
    Sampling,
    TokenItem,
    Tokens,
)
from ..cluster.metrics import RequestRecord, RouterMetrics
from .admission import check_fits, no_workers
from .errors import overloaded, unavailable
from .inbox import Inbox
from .policy import Limits, Need, choose, is_ready, limits
from .postbox import Postbox, Transmit
from .registry import Load, Registry, Worker
from .room_effects import Broken, Closed, Deliver, Effect, Ended, Freed, Requeued, Send, Timeouts
from .rooms import Phase, Room, RoomEvent
from .timeline import Timeline, timeline_of

logger = logging.getLogger(__name__)

CLIENT_STALL_S = 30.0  # a client that does not read for so long is cut off
NUM_ORPHANS = 1024  # rooms remembered as cancelled on a worker that still talks about them


@dataclass(frozen=True, kw_only=True)
class Job:
    """One choice that a client wants."""

    prompt_ids: list[int]
    sampling: Sampling
    arrived: float  # monotonic seconds
    tokenize_s: float

    @property
    def need(self) -> Need:
        return Need(len(self.prompt_ids), self.sampling.max_new_tokens)


@dataclass(eq=False)
class Entry:
    """A room with what the router keeps beside it."""

    room: Room
    job: Job
    inbox: Inbox
    index: int  # of the choice within the client's request
    queued_at: float
    queued_s: float = 0.0  # over all waits
    not_before: float = 0.0
    last_arrival: float = 0.0

    def timeline(self, now: float) -> Timeline:
        waiting = now - self.queued_at if self.room.phase is Phase.QUEUED else 0.0
        return timeline_of(
            self.room,
            arrived=self.job.arrived,
            tokenize_s=self.job.tokenize_s,
            queued_s=self.queued_s + waiting,
            now=now,
        )


class Dispatcher:
    """All requests between the HTTP side and the workers."""

    def __init__(
        self,
        registry: Registry,
        transmit: Transmit,
        clock: Callable[[], float],
        metrics: RouterMetrics,
        *,
        max_queue: int,
        queue_timeout_s: float,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.registry = registry
        self.metrics = metrics
        self.events: Counter[str] = Counter()
        self.is_draining = False
        self._postbox = Postbox(transmit)
        self._clock = clock
        self._max_queue = max_queue
        self._queue_timeout_s = queue_timeout_s
        self._timeouts = timeouts or Timeouts()
        self._entries: dict[str, Entry] = {}
        self._queue: deque[Entry] = deque()
        self._orphans: deque[tuple[str, str]] = deque(maxlen=NUM_ORPHANS)

    def __repr__(self) -> str:
        state = "draining" if self.is_draining else "open"
        return f"Dispatcher({state}, queued={self.num_queued}, running={self.num_running}, {self.registry})"

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return sum(entry.room.phase in (Phase.PREFILLING, Phase.STREAMING) for entry in self._entries.values())

    @property
    def num_live(self) -> int:
        """Rooms whose clients still wait."""
        return sum(entry.room.is_live for entry in self._entries.values())

    @property
    def num_open(self) -> int:
        """Rooms of which something may be left anywhere."""
        return len(self._entries)

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and is_ready(self.registry)

    def limits(self) -> Limits | None:
        """What the live pairs can serve at most; None without any."""
        return limits(self.registry)

    # --- the client's side --------------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job], inbox: Inbox) -> list[Entry]:
        """Takes all jobs of one client request; their events come through `inbox`. Raises ApiError and takes none."""
        if self.is_draining:
            raise unavailable("This server is shutting down; try another.")
        for job in jobs:
            self._check_fits(job.need)
        now = self._clock()
        entries = [self._enqueue(job, inbox, index, now) for index, job in enumerate(jobs)]
        self._admit(now)
        if self.num_queued > self._max_queue and any(entry.room.phase is Phase.QUEUED for entry in entries):
            for entry in entries:
                self.cancel(entry)
            self._count(entries[0], "rejected", now)
            raise overloaded(f"The queue is full: {self._max_queue} requests wait for a worker. Try again later.")
        return entries

    def cancel(self, entry: Entry) -> None:
        """The client left or has enough. Idempotent."""
        now = self._clock()
        self._perform(entry, entry.room.cancel(now), now)

    def client_left(self, entry: Entry) -> None:
        """Cancels and counts it as the client's doing."""
        if entry.room.is_live:
            self._count(entry, "cancelled", self._clock())
        self.cancel(entry)

    def stopped(self, entry: Entry) -> None:
        """The router itself found the end, in a stop string."""
        if entry.room.is_live:
            self._count(entry, "ok", self._clock())
        self.cancel(entry)

    def fail_all(self, kind: str, message: str) -> None:
        """Ends every request that still runs."""
        now = self._clock()
        for entry in list(self._entries.values()):
            self._perform(entry, entry.room.give_up(kind, message, now), now)

    def _check_fits(self, need: Need) -> None:
        live = self.limits()
        if live is None:
            raise no_workers()
        check_fits(need, self.registry, live)

    def _enqueue(self, job: Job, inbox: Inbox, index: int, now: float) -> Entry:
        room = Room(secrets.token_hex(16), job.prompt_ids, job.sampling, now, self._timeouts)
        entry = Entry(room, job, inbox, index, queued_at=now)
        self._entries[room.room] = entry
        self._queue.append(entry)
        return entry

    # --- the workers' side --------------------------------------------------------------------------------------------

    def on_message(self, identity: bytes, message: ControlUp) -> None:
        """One message from a worker's connection."""
        now = self._clock()
        if isinstance(message, Hello):
            return self._on_hello(identity, message, now)
        worker = self.registry.get(message.instance)
        if worker is None:  # it will say Hello when it hears nothing from us
            self.events["unknown_worker"] += 1
        elif isinstance(message, Heartbeat):
            self._on_heartbeat(identity, worker, message, now)
        elif isinstance(message, Goodbye):
            worker.is_draining = True
            logger.info("worker drains", extra=fields(role=worker.role, instance=worker.instance))
            self._fail_queue_without_workers(now)
        elif isinstance(message, Tokens):
            for item in message.items:
                self._on_room_event(worker, item.room, item, now)
        else:
            self._on_room_event(worker, message.room, message, now)

    def _on_hello(self, identity: bytes, message: Hello, now: float) -> None:
        is_new = self.registry.get(message.instance) is None
        answer = self.registry.hello(identity, message, now)
        worker = self.registry.get(message.instance)
        if worker is None:
            reason = getattr(answer, "reason", "")
            logger.warning("worker rejected", extra=fields(role=message.role, instance=message.instance, reason=reason))
            self._postbox.answer(identity, answer)
            return
        if is_new:
            logger.info("worker registered", extra=fields(role=worker.role, instance=worker.instance, pid=message.pid))
        self._postbox.post(worker, answer, now)
        self._postbox.flush(worker, now)

    def _on_heartbeat(self, identity: bytes, worker: Worker, message: Heartbeat, now: float) -> None:
        self.registry.heartbeat(identity, worker.instance, message.stats, now)
        self._postbox.flush(worker, now)
        self._admit(now)
        if not worker.is_serving:
            self._fail_queue_without_workers(now)

    def _on_room_event(self, worker: Worker, room: str, event: RoomEvent, now: float) -> None:
        entry = self._entries.get(room)
        if entry is None:
            self._on_orphan(worker, room, event, now)
            return
        stale = entry.room.num_stale
        self._perform(entry, entry.room.on(event, worker.instance, now), now)
        self.events["stale_message"] += entry.room.num_stale - stale

    def _on_orphan(self, worker: Worker, room: str, event: RoomEvent, now: float) -> None:
        """A worker works for a room that is over, since a Cancel was lost or the worker was given up too early."""
        self.events["orphan_message"] += 1
        is_active = isinstance(event, (Reserved, FirstToken, TokenItem))
        if is_active and (room, worker.instance) not in self._orphans:
            self._orphans.append((room, worker.instance))
            self._postbox.post(worker, Cancel(room=room, instance=worker.instance), now)

    def lose_worker(self, worker: Worker, reason: str) -> None:
        """Forgets a worker and settles its rooms."""
        now = self._clock()
        logger.warning("worker lost", extra=fields(role=worker.role, instance=worker.instance, reason=reason))
        self.events["worker_lost"] += 1
        entries = [entry for entry in self._entries.values() if worker.instance in entry.room.instances]
        for entry in entries:  # if it is only slow, it shall not go on working for nobody
            self._postbox.post(worker, Cancel(room=entry.room.room, instance=worker.instance), now)
        self.registry.remove(worker.instance)
        for entry in entries:
            self._perform(entry, entry.room.worker_lost(worker.instance, now), now)
        self._fail_queue_without_workers(now)

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Timers: silent workers, rooms without progress, waits that took too long, clients that do not read."""
        now = self._clock()
        for worker in self.registry.overdue(now):
            self.lose_worker(worker, "silent" if worker.unreachable_since is None else "unreachable")
        for worker in self.registry:
            self._postbox.flush(worker, now)
        for entry in list(self._entries.values()):
            self._tick_entry(entry, now)
        self._admit(now)

    def _tick_entry(self, entry: Entry, now: float) -> None:
        waited = entry.queued_s + now - entry.queued_at
        if entry.room.phase is Phase.QUEUED and waited > self._queue_timeout_s:
            message = f"No worker had room within {self._queue_timeout_s:g} s. Try again later."
            self._perform(entry, entry.room.give_up("QueueTimeout", message, now), now)
            return
        self._perform(entry, entry.room.tick(now), now)
        if entry.inbox.unread_for(now) > CLIENT_STALL_S:
            self.events["client_stalled"] += 1
            self.client_left(entry)
            entry.inbox.cut()

    def _fail_queue_without_workers(self, now: float) -> None:
        if self._queue and not is_ready(self.registry):
            for entry in list(self._queue):
                self._perform(entry, entry.room.give_up("NoWorkers", str(no_workers()), now), now)

    # --- effects ------------------------------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        """Places waiting rooms, oldest first, until one finds no pair: nobody overtakes it for ever."""
        if not self._queue:
            return
        waiting = list(self._queue)
        self._queue.clear()
        is_blocked = False
        for entry in waiting:
            if entry.room.phase is not Phase.QUEUED:
                continue
            if is_blocked or entry.not_before > now or not self._place(entry, now):
                is_blocked = is_blocked or entry.not_before <= now
                self._queue.append(entry)

    def _place(self, entry: Entry, now: float) -> bool:
        pair = choose(self.registry, entry.job.need, entry.room.failed_on)
        if pair is None:
            return False
        decode = self.registry.get(pair.decode)
        assert decode is not None
        effects = entry.room.place(pair, now)
        entry.queued_s += now - entry.queued_at
        name, epoch = entry.room.room, entry.room.epoch
        pages = decode.pages_for(entry.job.need.total)
        self.registry.reserve(pair.decode, name, epoch, Load(pages=pages, tokens=entry.job.need.total))
        self.registry.reserve(pair.prefill, name, epoch, Load(pages=0, tokens=entry.job.need.prompt))
        logger.debug("placed", extra=fields(room=name, epoch=epoch, prefill=pair.prefill, decode=pair.decode))
        self._perform(entry, effects, now)
        return True

    def _perform(self, entry: Entry, effects: Sequence[Effect], now: float) -> None:
        is_admission_due = False
        for effect in effects:
            if isinstance(effect, Deliver):
                self._deliver(entry, effect, now)
            elif isinstance(effect, Send):
                worker = self.registry.get(effect.instance)
                if worker is not None:
                    self._postbox.post(worker, effect.message, now)
            elif isinstance(effect, Freed):
                self.registry.release(effect.instance, entry.room.room, effect.epoch)
                is_admission_due = True
            else:
                is_admission_due |= self._perform_rare(entry, effect, now)
        if is_admission_due:
            self._admit(now)

    def _perform_rare(self, entry: Entry, effect: Ended | Broken | Requeued | Closed, now: float) -> bool:
        room = entry.room
        if isinstance(effect, Ended):
            self._count(entry, "ok", now)
            entry.inbox.put(entry.index, effect)
        elif isinstance(effect, Broken):
            logger.warning("failed", extra=fields(room=room.room, kind=effect.kind, reason=effect.message))
            self._count(entry, _OUTCOMES.get(effect.kind, "failed"), now)
            entry.inbox.put(entry.index, effect)
        elif isinstance(effect, Requeued):
            entry.queued_at, entry.not_before = now, effect.not_before
            self.events["requeued"] += 1
            self._queue.appendleft(entry)
            return True
        else:
            self._entries.pop(room.room, None)
        if room.phase is not Phase.QUEUED and entry in self._queue:
            self._queue.remove(entry)
        return False

    def _deliver(self, entry: Entry, effect: Deliver, now: float) -> None:
        if entry.last_arrival:
            self.metrics.tokens_arrived(now - entry.last_arrival, len(effect.ids))
        entry.last_arrival = now
        entry.inbox.put(entry.index, effect)

    def _count(self, entry: Entry, outcome: str, now: float) -> None:
        room, arrived = entry.room, entry.job.arrived
        decode, prefill, first = room.decode_timeline, room.prefill_timeline, room.stamps.first_token
        self.metrics.request_ended(
            RequestRecord(
                outcome=outcome,
                e2e_s=now - arrived,
                ttft_s=None if first is None else first - arrived,
                prompt_tokens=room.num_prompt,
                cached_tokens=prefill.cached_tokens if prefill else 0,
                output_tokens=room.num_output,
                drafted_tokens=decode.drafted_tokens if decode else 0,
                accepted_tokens=decode.accepted_tokens if decode else 0,
                handoff_bytes=decode.handoff_bytes if decode else 0,
            )
        )


_OUTCOMES = {"QueueTimeout": "rejected", "NoWorkers": "rejected", "Refused": "rejected", "Timeout": "timeout"}
