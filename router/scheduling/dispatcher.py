"""The centre of the router: accepts requests, places their rooms on workers, and passes messages between both
sides.

It has no socket and no clock of its own. `transmit` hands a frame to a worker's connection, `clock` gives
monotonic seconds, and `tick` is called several times a second.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from ...cluster.process.log import fields
from ...cluster.protocol.messages import (
    ChangeRole,
    ControlUp,
    Goodbye,
    Heartbeat,
    HeldPrefixes,
    Hello,
    RouterGoodbye,
    SwapDraft,
    TellPrefixes,
    TokenItem,
    Tokens,
)
from ...cluster.telemetry.metrics import FULL_POOL, PREEMPTED, PRIORITIES, ClassLoad, RouterMetrics
from ..errors import no_such_worker, role_stays, unavailable
from ..rooms.attempt import PEER_LOST, RoomEvent
from ..rooms.effects import (
    PULL,
    Closed,
    Deliver,
    Effect,
    Ended,
    Failure,
    Freed,
    Outcome,
    Pair,
    Requeued,
    SendOrder,
    Settled,
    Timeouts,
)
from ..rooms.quarantine import QUARANTINED
from ..rooms.retries import RetryBudget
from ..rooms.room import Room, RoomPhase
from ..workers.eligibility import Limits, can_ever, known_limits, known_pairs
from ..workers.health_probe import HealthProbes
from ..workers.lone_decode import LoneDecode
from ..workers.outbox import Outbox, Soon, Transmit
from ..workers.registration import Registration
from ..workers.registry import Registry, Worker
from ..workers.role_changes import RoleChanges
from ..workers.stalls import Stalls
from .admission_queue import OVERLOADED, AdmissionQueue
from .flow import Flow
from .history import History
from .inbox import Inbox
from .load_history import LoadHistory
from .output_estimates import OutputEstimates
from .placement import PairingPolicy, Placer
from .preemption import space_for
from .request_limits import MAX_PROMPT_TOKENS, no_pair_for
from .request_state import (
    OUTCOMES,
    ClientRequest,
    Entry,
    Job,
    Tag,
    addressed,
    embeds_before,
    new_request,
    reserved_workers,
)
from .role_moves import DRAIN_S, RoleMoves
from .role_scaler import Move, RoleScaler
from .sharing import sharing_pair
from .waiting_list import WaitingList

logger = logging.getLogger(__name__)

CLIENT_STALL_S = 30.0  # longest time for which a client may leave its events unread
SETTLE_S = 0.5  # after a pause nothing is placed, since messages of the workers wait to be read


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
        request_timeout_s: float = 0.0,
        stall_s: float = 0.0,
        canary_s: float = 0.0,
        drops: Callable[[], Mapping[str, int]] = dict,
        timeouts: Timeouts | None = None,
        policy: PairingPolicy | None = None,
        soon: Soon | None = None,
        mint: Callable[[], str] = lambda: os.urandom(16).hex(),
        estimates: OutputEstimates | None = None,
        scaler: RoleScaler | None = None,
    ) -> None:
        self.registry = registry
        self.metrics = metrics
        self.events: Counter[str] = Counter(stale_message=0)
        self.retractions: Counter[tuple[str, str]] = Counter()  # by class and reason
        self.is_draining = False
        self._has_left = False  # workers were told that this router ends
        self._outbox = Outbox(transmit, clock, soon)
        self._clock = clock
        self._queue_timeout_s = queue_timeout_s
        self._request_timeout_s = request_timeout_s  # 0: no limit
        self._drops = drops
        self._timeouts = timeouts or Timeouts()
        self._mint = mint
        self._entries: dict[str, Entry] = {}
        self._on_probation: dict[str, Entry] = {}  # placed rooms with a record of deaths
        self._explained: set[str] = set()  # groups of workers whose death counted against a room alone there
        self._waiting = WaitingList()
        self.stalls = Stalls(registry, stall_s, self.events)
        self.admission = AdmissionQueue(registry, self._waiting, max_queue, self.stalls)
        self.health_probes = HealthProbes(registry, self._outbox, mint, canary_s)
        self._placer = Placer(registry, policy, self.health_probes.pair_health, mint=mint, clock=clock)
        self._lone_decode = LoneDecode()
        self._registration = Registration(registry, self._outbox, self.events)
        self.role_changes = RoleChanges(registry)
        self.role_moves = RoleMoves(registry, self._waiting, self._entries, scaler)
        self._retries = RetryBudget()
        self._estimates = estimates or OutputEstimates()
        self.history = History(clock)
        self.flow, self.load_history = Flow(), LoadHistory(clock)
        self._ticked_at = clock()
        self._settled_at = 0.0

    def __repr__(self) -> str:
        state = "draining" if self.is_draining else "open"
        return f"Dispatcher({state}, queued={self.num_queued}, running={self.num_running}, {self.registry})"

    @property
    def num_queued(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return sum(entry.room.is_at_workers for entry in self._entries.values())

    @property
    def num_live(self) -> int:
        """The number of rooms whose clients still wait."""
        return sum(entry.room.is_live for entry in self._entries.values())

    @property
    def num_open(self) -> int:
        """The number of rooms that a worker may still hold in part."""
        return len(self._entries)

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and self.health_probes.is_ready(self._clock())

    @property
    def event_totals(self) -> dict[str, int]:
        """Counts of rare events by name, with the messages that the control socket dropped."""
        return {**self._drops(), **self.events}

    def classes(self) -> tuple[ClassLoad, ...]:
        """The requests of each class, the most urgent class first."""
        now = self._clock()
        queued, running, since = Counter[str](), Counter[str](), dict[str, float]()
        for entry in self._entries.values():
            name = entry.request.kind.priority
            running[name] += entry.room.is_at_workers
            if entry.room.phase is RoomPhase.QUEUED:
                queued[name] += 1
                since[name] = min(entry.request.arrived, since.get(name, now))
        return tuple(
            ClassLoad(
                priority=name,
                queued=queued[name],
                running=running[name],
                oldest_wait_s=round(now - since.get(name, now), 3),
                retracted={
                    reason: count for (kind, reason), count in self.retractions.items() if kind == name
                },
            )
            for name in PRIORITIES
        )

    def limits(self) -> Limits | None:
        """The largest request that a pair can serve, now or when a stalled worker goes on; None without."""
        return known_limits(self.registry)

    # --- the client's side ----------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job], inbox: Inbox, tag: Tag | None = None) -> list[Entry]:
        """Accepts all jobs of one client request, or none and raises ApiError.

        Their events arrive in `inbox`.
        """
        if self.is_draining:
            raise unavailable("This server is shutting down; try another.")
        now = self._clock()
        self.admission.check(jobs, now)
        request = new_request(jobs, now, tag)
        entries = request.entries = [self._enqueue(job, request, inbox, i, now) for i, job in enumerate(jobs)]
        self.history.begun(request)
        self._admit(now)
        self._turn_away(request, now)
        self._retries.came(len(jobs), now)
        return entries

    def _turn_away(self, request: ClientRequest, now: float) -> None:
        """Keeps the queue within its bound.

        Raises ApiError when `request` itself is the one to be turned away.
        """
        while (last := self.admission.surplus(request)) is not None:
            full = self.admission.full(now)
            if last.request is not request:
                self._perform(last, last.room.give_up(OVERLOADED, str(full), now, full.retry_after_s), now)
                continue
            for entry in request.entries:
                self._count(entry, "rejected", now)
                self.cancel(entry)
            raise full

    def cancel(self, entry: Entry) -> None:
        """Cancels a room whose client has left or needs no more output. Idempotent."""
        now = self._clock()
        self._perform(entry, entry.room.cancel(now), now)

    def client_left(self, entry: Entry) -> None:
        """Cancels a room that still runs and counts it as cancelled by the client."""
        if entry.room.is_live:
            self._count(entry, "cancelled", self._clock())
            self.cancel(entry)

    def stopped(self, entry: Entry) -> None:
        """Stops a room at a stop string.

        `Settled` arrives in the inbox, unless the room is settled already.
        """
        now = self._clock()
        self._perform(entry, entry.room.stop(now), now)

    def fail_all(self, kind: str, message: str) -> None:
        """Ends every request that still runs."""
        now = self._clock()
        for entry in list(self._entries.values()):
            self._perform(entry, entry.room.give_up(kind, message, now), now)

    def leave(self) -> None:
        """Tells every worker that this router ends, and that no order of it follows.

        The link of a worker that closes before it has read this would look broken: see `is_heard_of_leaving`.
        """
        now = self._clock()
        self._has_left = True
        for worker in self.registry:
            if worker.hello.takes_goodbye:
                self._outbox.post(worker, RouterGoodbye(instance=worker.instance), now)

    @property
    def is_heard_of_leaving(self) -> bool:
        """Whether all workers know that this router ends."""
        return not any(worker.hello.takes_goodbye for worker in self.registry)

    def _enqueue(self, job: Job, request: ClientRequest, inbox: Inbox, index: int, now: float) -> Entry:
        limits = [seconds for seconds in (self._request_timeout_s, job.timeout_s) if seconds]
        deadline = job.arrived + min(limits) if limits else None
        room = Room(self._mint(), job.prompt_ids, job.sampling, now, self._timeouts, deadline=deadline)
        entry = Entry(room, job, request, inbox, index, queued_at=now)
        entry.expected_output = self._expected_output(job)
        self._entries[room.room] = entry
        self._waiting.join(entry)
        return entry

    def _expected_output(self, job: Job) -> int:
        """Output tokens to count on, or 0 for all: where no order could have prompt and output as its prompt,
        or no prefill worker compute them, as the continuation of a retracted request needs."""
        live = self.limits()
        if live is None or job.need.total > min(live.prefill_tokens, MAX_PROMPT_TOKENS):
            return 0
        return min(job.need.max_new, self._estimates.expected(job.answers_like))

    def swap_draft(self, order: SwapDraft) -> bool:
        """Sends an order about a worker's draft weights. False: no such worker reports draft weights."""
        worker = self.registry.get(order.instance)
        if worker is None or worker.stats is None or worker.stats.draft is None:
            return False
        logger.info(
            "draft order", extra=fields(instance=order.instance, action=order.action, path=order.path)
        )
        self._outbox.post(worker, order, self._clock())
        return True

    def change_role(self, order: ChangeRole) -> None:
        """Sends an order to change a worker's role. Raises ApiError for one that cannot change it now."""
        worker = self.registry.get(order.instance)
        if worker is None:
            raise no_such_worker(order.instance)
        if reason := self.role_changes.why_not(worker, order.role):
            raise role_stays(order.instance, reason)
        now = self._clock()
        self.role_changes.begin(worker, order.role, now)
        logger.info(
            "role change ordered", extra=fields(role=worker.role, instance=order.instance, to=order.role)
        )
        self._outbox.post(worker, order, now)

    def _move(self, move: Move) -> None:
        """Orders a move of the scaler of roles, where the worker can change its role."""
        worker = self.registry.get(move.instance)
        if worker is not None and not self.role_changes.why_not(worker, move.role):
            self.events["role_moved"] += 1
            drain_ms = round(DRAIN_S * 1000)
            self.change_role(
                ChangeRole(instance=move.instance, order=self._mint(), role=move.role, drain_ms=drain_ms)
            )

    # --- the workers' side ----------------------------------------------------------------------------------

    def on_message(self, identity: bytes, message: ControlUp) -> None:
        """Handles one message from a worker's connection."""
        now = self._clock()
        if isinstance(message, Hello):
            return self._on_hello(identity, message, now)
        worker = self.registry.get(message.instance)
        if worker is None:  # the worker sends Hello when the router is silent
            self.events["unknown_worker"] += 1
        elif isinstance(message, Tokens):
            for item in message.items:
                self._on_room_event(worker, item.room, item, now)
        elif isinstance(message, Heartbeat):
            self._on_heartbeat(identity, worker, message, now)
        elif isinstance(message, HeldPrefixes):
            worker.prefixes.hear(message)
            self._ask_for_prefixes(worker, now)
        elif isinstance(message, Goodbye):
            self.registry.drain(worker)
            logger.info("worker drains", extra=fields(role=worker.role, instance=worker.instance))
            self._check_queue(now)
        else:
            worker.hear(message)
            self._on_room_event(worker, message.room, message, now)

    def _on_hello(self, identity: bytes, message: Hello, now: float) -> None:
        if self._has_left:
            known = self.registry.get(message.instance)
            if known is not None and message.generation > known.hello.generation:
                self.registry.remove(message.instance)
            return
        greeted = self._registration.hello(identity, message, now)
        if greeted is None:
            return
        worker = greeted.worker
        if greeted.has_dropped_all:
            self._settle_rooms_of(worker, now, is_dead=False)
            self._outbox.flush(worker, now)
            return
        self.health_probes.missed(worker.instance, now)
        for entry in self._rooms_of(worker):
            self._perform(entry, entry.room.resend_orders(worker.instance, now), now)

    def _on_heartbeat(self, identity: bytes, worker: Worker, message: Heartbeat, now: float) -> None:
        self.registry.heartbeat(identity, worker.instance, message.stats, now)
        self._ask_for_prefixes(worker, now)
        self._outbox.flush(worker, now)
        self._admit(now)
        if not worker.is_serving:
            self._check_queue(now)

    def _ask_for_prefixes(self, worker: Worker, now: float) -> None:
        """Asks the worker to tell all its prefixes anew, where something of that was missed."""
        if worker.prefixes.must_ask(now):
            self.events["prefix_news_lost"] += 1
            self._outbox.post(worker, TellPrefixes(instance=worker.instance), now)

    def _on_room_event(self, worker: Worker, room: str, event: RoomEvent, now: float) -> None:
        if (entry := self._entries.get(room)) is None:
            if not self.health_probes.on(worker, room, event, now):
                self._registration.orphan(worker, room, event, now)
            return
        stale = entry.room.num_stale
        if not isinstance(event, TokenItem):  # these two ignore tokens
            self._placer.heard(entry, worker, event, now)
            self.role_moves.heard(worker, event, now)
            entry.trace.heard(event, now)
        self._perform(entry, entry.room.on(event, worker.instance, now), now)
        if entry.room.num_stale != stale:
            self.events["stale_message"] += entry.room.num_stale - stale

    def lose(self, workers: Sequence[Worker]) -> None:
        """Forgets lost workers, then settles their rooms, so that no room moves from one lost worker to
        another."""
        now = self._clock()
        lost = [(worker, worker.unreachable_since) for worker in workers]
        for worker in workers:
            rooms = [entry.room for entry in self._rooms_of(worker)]
            is_needed = any(room.needs(worker.instance) for room in rooms)
            self._registration.deregister(
                worker, [(room.room, room.epoch) for room in rooms], now, is_needed=is_needed
            )
        for worker, since in lost:
            self._settle_rooms_of(worker, now, is_dead=not worker.is_draining, unreachable_since=since)
        self._check_queue(now)

    def on_damaged(self, identity: bytes) -> None:
        """Handles the loss of a message of this connection."""
        self._registration.damaged(identity, self._clock())

    def probe(self) -> None:
        """Finds the lost worker after some worker's connection has ended."""
        self._registration.probe(self._clock())

    def _rooms_of(self, worker: Worker) -> list[Entry]:
        return [entry for entry in self._entries.values() if worker.instance in entry.room.instances]

    def _settle_rooms_of(
        self, worker: Worker, now: float, *, is_dead: bool, unreachable_since: float | None = None
    ) -> None:
        """Reports a worker's loss to its rooms.

        The death counts only against the room that is alone there, if any: on this worker, or on one that
        dies with it.
        """
        self.health_probes.lost(worker.instance, now)
        group = worker.hello.group
        members = {other.instance for other in self.registry if group and other.hello.group == group}
        members.add(worker.instance)
        alone = [entry for entry in self._entries.values() if not members.isdisjoint(entry.room.alone_on)]
        if group and is_dead:
            self._explained &= {other.hello.group for other in self.registry} | {group}
            if alone:
                self._explained.add(group)
            elif group in self._explained:
                is_dead = False
        for entry in self._rooms_of(worker):
            lost = entry.room.worker_lost(
                worker.instance,
                now,
                is_dead=is_dead and (not alone or entry in alone),
                unreachable_since=unreachable_since,
            )
            self._perform(entry, lost, now)

    # --- time -----------------------------------------------------------------------------------------------

    def tick(self, *, is_behind: bool = False) -> None:
        """Runs the timers of workers, rooms, waits and clients that do not read.

        `is_behind`: messages of workers may be unread, so their silence does not count.
        """
        now = self._clock()
        elapsed, self._ticked_at = now - self._ticked_at, now
        if self.registry.stalled:
            self._excuse({worker.instance for worker in self.registry.stalled}, elapsed)
        self.registry.excuse(now, is_behind=is_behind)
        if lost := self.stalls.lost(now):
            self.lose(lost)
        if not self.is_draining:
            self._lone_decode.look(self.registry, now)
        for worker in self.registry:
            self._outbox.flush(worker, now)
        self.role_changes.turn(now)
        if (move := self.role_moves.due(now, is_busy=self.role_changes.is_busy)) is not None:
            self._move(move)
        may_ask = not self._waiting and not self.is_draining and now >= self._settled_at
        self.health_probes.tick(now, may_ask=may_ask)
        for entry in list(self._entries.values()):
            if now >= entry.quiet_until:
                self._tick_entry(entry, now)
                entry.quiet_until = entry.room.quiet_until
            if entry.inbox.unread_since is not None and entry.inbox.has_stalled(now, CLIENT_STALL_S):
                self.events["client_stalled"] += 1
                self.client_left(entry)
                entry.inbox.cut()
        self._admit(now)

    def note_load(self) -> None:
        """Adds a due point to the history of the load."""
        if self.load_history.is_due:
            flow, running, queued = self.flow.take(), self.num_running, self.num_queued
            self.load_history.sample(running=running, queued=queued, flow=flow, workers=self.registry)

    def paused(self, seconds: float) -> None:
        """This router did not run for so long. Call it before the first message or tick after the pause.

        Deadlines of requests count that time. Nothing else does: no worker was silent, nobody waited.
        """
        now = self._ticked_at = self._clock()
        logger.warning(
            "this process did not run", extra=fields(seconds=round(seconds, 1), rooms=len(self._entries))
        )
        self.events["paused"] += 1
        self._settled_at = now + SETTLE_S
        self.registry.excuse_pause(seconds, now)
        self.health_probes.excuse(seconds)
        self._excuse(None, seconds)

    def _excuse(self, instances: Collection[str] | None, seconds: float) -> None:
        """These workers stood still for so long, or the router itself (None): no room there is late, and the
        queue waited for them."""
        requests: set[int] = set()
        for entry in self._entries.values():
            room, request = entry.room, entry.request
            if instances is None:
                entry.inbox.excuse(seconds)
                entry.pairless_since = None
            if room.phase is RoomPhase.QUEUED:
                if id(request) not in requests:
                    requests.add(id(request))
                    request.excused_s += seconds
            elif instances is None or not room.instances.isdisjoint(instances):
                room.excuse(seconds)

    def _tick_entry(self, entry: Entry, now: float) -> None:
        waited = entry.request.waited(now) - entry.request.excused_s
        is_new = not entry.room.num_retractions  # one whose pages were taken back waits for its turn
        if entry.room.phase is RoomPhase.QUEUED and is_new and waited > self._queue_timeout_s:
            message = f"No worker had room within {self._queue_timeout_s:g} s. Try again later."
            gone = entry.room.give_up("QueueTimeout", message, now, self.admission.retry_after_s(now))
            return self._perform(entry, gone, now)
        if entry.room.num_output:
            self._check_pairs(entry, now)
        self._perform(entry, entry.room.tick(now), now)

    def _check_queue(self, now: float) -> None:
        for entry in self._waiting:
            self._check_pairs(entry, now)

    def _check_pairs(self, entry: Entry, now: float) -> None:
        """Ends a wait that no worker can end, nor would if a stalled one went on.

        A stream that has begun waits `pair_s`, since workers are restarted.
        """
        live = known_pairs(self.registry)
        if entry.room.phase is not RoomPhase.QUEUED or can_ever(live, entry.need):
            entry.pairless_since = None
            return
        since = entry.pairless_since = now if entry.pairless_since is None else entry.pairless_since
        if not entry.room.num_output:
            self._perform(
                entry, entry.room.give_up("NoWorkers", str(no_pair_for(entry.need, live)), now), now
            )
        elif now - since >= self._timeouts.pair_s:
            self._perform(entry, entry.room.give_up("PeerLost", "no pair is left to go on with", now), now)

    # --- effects --------------------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        """Places waiting rooms by rank until one finds all its pairs full, so that no room is overtaken
        forever. In its turn a room may take the place of less urgent ones."""
        if now < self._settled_at:
            return
        for entry in self._waiting:
            if entry.room.phase is not RoomPhase.QUEUED or entry.not_before > now:
                continue
            reserved: set[str] = set()
            if self._on_probation:
                reserved = reserved_workers(self._on_probation.values(), entry.room)
                reserved = self.registry.groups_of(reserved)
            doubtful = self.registry.doubtful(now)
            pair = sharing_pair(self.registry, entry, doubtful)
            pair = pair or self._placer.pair_for(entry, doubtful, reserved)
            if pair is None and entry.pairless_since is None:
                space = space_for(entry, self.registry, self._entries)
                pair = self._placer.pair_for(entry, doubtful, reserved, space) if space else None
                if pair is None:
                    return
            if (
                pair is not None
                and reserved.isdisjoint(pair.instances)
                and not self._must_wait(entry, pair, now)
            ):
                self._place(entry, pair, now)

    def _must_wait(self, entry: Entry, pair: Pair, now: float) -> bool:
        """Whether to wait for a better pair.

        True while it is unknown whether this pair lives, and, for a request that must be alone, while another
        room is there.
        """
        deaths, timeouts = entry.room.deaths, self._timeouts
        if not deaths:
            return False
        waited = now - max(entry.queued_at, entry.not_before)
        if waited < timeouts.suspect_s and deaths.has_suspect(pair.instances):
            return True
        if not deaths.must_be_alone or waited >= timeouts.alone_s:
            return False
        workers = [self.registry.get(instance) for instance in self.registry.groups_of(pair.instances)]
        return any(worker is not None and worker.num_taken > 0 for worker in workers)

    def _place(self, entry: Entry, pair: Pair, now: float) -> None:
        self._waiting.leave(entry)
        effects = entry.room.place(pair, now)
        if entry.room.deaths:
            self._on_probation[entry.room.room] = entry
        entry.queued_s += now - entry.queued_at
        entry.placed_output, entry.granted = entry.room.num_output, entry.claim[1]
        self._placer.book(entry, pair)
        self.admission.placement_rate.note(now)
        self.events["shared_prompt" if pair.shares else "local_prefill"] += pair.is_local
        if pair.prefix:
            self.events["prefix_pull" if pair.prefix == PULL else "prefix_compute"] += 1
        if logger.isEnabledFor(logging.DEBUG):
            names = fields(
                room=entry.room.room, epoch=entry.room.epoch, prefill=pair.prefill, decode=pair.decode
            )
            logger.debug("placed", extra=names)
        self._perform(entry, effects, now)

    def _perform(self, entry: Entry, effects: Sequence[Effect], now: float) -> None:
        is_admission_due = False
        entry.request.note_phase(entry, now)
        for effect in effects:
            if isinstance(effect, Deliver):
                entry.trace.delivered(len(effect.ids), now)
                self._deliver(entry, effect, now)
                if self._on_probation and not entry.room.is_on_probation:
                    is_admission_due |= self._on_probation.pop(entry.room.room, None) is not None
                continue
            entry.quiet_until = 0.0
            if isinstance(effect, Freed):
                self.registry.release(effect.instance, entry.room.room, effect.epoch)
                is_admission_due = True
            elif isinstance(effect, Outcome):
                self._registration.judge(entry.room.room, effect, now)
            elif isinstance(effect, SendOrder):
                entry.trace.sent(effect.message, now)
                if (worker := self.registry.get(effect.instance)) is not None:
                    for part in embeds_before(effect.message, entry, worker):
                        self._outbox.post(worker, part, now)
                    self._outbox.post(worker, addressed(effect.message, entry, now), now)
            else:
                entry.trace.did(effect, now)
                is_admission_due |= self._perform_rare(entry, effect, now)
        if is_admission_due:
            self._admit(now)

    def _perform_rare(
        self, entry: Entry, effect: Ended | Settled | Failure | Requeued | Closed, now: float
    ) -> bool:
        room = entry.room
        self._on_probation.pop(room.room, None)
        if isinstance(effect, (Ended, Settled)):
            self._placer.ended(entry)
            self._estimates.ended(entry.job.answers_like, room.num_output)
            self._count(entry, "ok", now)
            entry.inbox.put(entry.index, effect)
        elif isinstance(effect, Failure):
            level = logging.DEBUG if entry.request.is_warned else logging.WARNING
            entry.request.is_warned = True
            named = {"room": room.room, "request": entry.request.tag.request_id}
            logger.log(level, "failed", extra=fields(**named, kind=effect.kind, reason=effect.message))
            self.events["quarantined"] += effect.kind == QUARANTINED
            self._count(entry, OUTCOMES.get(effect.kind, "failed"), now)
            entry.inbox.put(entry.index, effect)
        elif isinstance(effect, Requeued):
            failure = effect.failure
            if failure is not None and not self._may_retry(entry, failure, now):
                self.events["retry_denied"] += 1
                self._perform(entry, room.give_up(failure.kind, failure.message, now), now)
                return True
            if effect.is_retracted:
                self._count_retraction(entry, is_preempted=effect.is_preempted)
            elif effect.is_unshared:
                self.events["unshared"] += 1
            else:
                self.events["requeued"] += 1
                self.events["resumed"] += room.num_output > 0
            entry.expected_output = self._expected_output(entry.job) if entry.expected_output else 0
            entry.requeue(now, effect.not_before)
            self._waiting.join(entry)
            return True
        elif self._entries.pop(room.room, None) is not None:
            self.history.closed(entry)
        if room.phase is not RoomPhase.QUEUED:
            self._waiting.leave(entry)
        return False

    def _count_retraction(self, entry: Entry, *, is_preempted: bool) -> None:
        self.events["retracted"] += 1
        self.events["preempted"] += is_preempted
        reason = PREEMPTED if is_preempted else FULL_POOL
        self.retractions[entry.request.kind.priority, reason] += 1
        if not is_preempted:
            self._estimates.retracted()

    def _may_retry(self, entry: Entry, failure: Failure, now: float) -> bool:
        """Whether the budget allows another attempt.

        A worker's death ends all its rooms at once, so retries after a death draw on the budget and are never
        denied.
        """
        is_paid = self._retries.take(self.num_live, now) or failure.kind == PEER_LOST
        return is_paid and entry.need.prompt <= MAX_PROMPT_TOKENS

    def _deliver(self, entry: Entry, effect: Deliver, now: float) -> None:
        if entry.begun_epoch != entry.room.epoch:
            entry.begun_epoch = entry.room.epoch
            self._placer.begun(entry)
        self.flow.tokens(len(effect.ids))
        if entry.last_arrival:
            self.metrics.tokens_arrived(entry.request.kind, now - entry.last_arrival, len(effect.ids))
            self.flow.gap((now - entry.last_arrival) / len(effect.ids))
            if entry.shown_epoch != entry.room.epoch:
                self._placer.watch(entry, now)
        else:
            self.flow.first_token(now - entry.job.arrived, entry.room.num_prompt)
        entry.last_arrival = now
        entry.inbox.put(entry.index, effect)

    def _count(self, entry: Entry, outcome: str, now: float) -> None:
        if entry.request.end(entry.index, outcome, now):
            self.admission.leave(entry.request)
            self.metrics.request_ended(entry.request.record(now))
            self.flow.ended(entry.request.outcome or outcome)
