"""The processes of a simulated cluster: production's classes with turns for threads and lines for sockets.

router   Dispatcher with its rooms, registry, retries and policies; a tick ten times a second
worker   scheduler thread: WorkerLoop around PrefillWorker or DecodeWorker, with a toy engine
         link thread: LinkWork around the control link's queues and the transport's sender or receiver
"""

from collections import deque
from random import Random

from baton.cluster.errors import DamagedMessage, PeerLost, RemoteProtocolError
from baton.cluster.net.control_link import LinkQueues
from baton.cluster.process.process import EXIT_OK, Shutdown
from baton.cluster.process.running_clock import PauseMeter, RunningClock
from baton.cluster.protocol.codec import control_up_decoder
from baton.decode.local_prefill import LocalPrefill
from baton.decode.worker import DecodeWorker
from baton.kvtransfer.transport import Dropped
from baton.kvtransfer.transports.endpoint import Delivered
from baton.kvtransfer.transports.receiver_endpoint import ReceiverEndpoint
from baton.kvtransfer.transports.sender_endpoint import SenderEndpoint
from baton.prefill.worker import PrefillWorker
from baton.router.app import PAUSE_S
from baton.router.rooms.effects import Timeouts
from baton.router.scheduling.dispatcher import Dispatcher
from baton.router.scheduling.output_estimates import OutputEstimates
from baton.router.scheduling.placement import PairingPolicy
from baton.router.workers.registry import Registry
from baton.tests.sim.cluster_net import INFINITY, Died, Process
from baton.tests.sim.cluster_pulls import OFF, SimTwoWay, news_of
from baton.tests.sim.cluster_tiers import TierChecks, tiers_of
from baton.tests.sim.cluster_toy import MAX_CONTEXT, STEPS, VOCAB, ToyAheadDecoder, ToyDecoder, toy_engine
from baton.tests.sim.draws import hex_id
from baton.worker.hand_off import prefix_layout
from baton.worker.identity import hello_of, layout_of, planes_of
from baton.worker.link import LinkWork, incoming, outgoing
from baton.worker.main_loop import WorkerLoop
from baton.worker.retractions import Reason
from baton.worker.room_owners import FromRouter, RoomOwners
from msgspec.structs import replace

CONTROL = "control"
TICK_S = 0.1
IDLE_TURN_S = 0.2  # how long either thread sleeps at most while rooms are here
LAZY_TURN_S = 0.5  # and while none are


class QuietMetrics:
    """Histograms cost more than all the rest of a simulated request."""

    def tokens_arrived(self, kind, seconds, count):
        pass

    def request_ended(self, record):
        pass


class RouterProcess(Process):
    """One start of the router."""

    def __init__(self, world, name, instance):
        super().__init__("R", name, instance, world.timeline)
        self.world = world
        self._due = []  # what is to be done at the end of a turn
        self.dispatcher = Dispatcher(
            Registry(instance, world.settings.worker_timeout_s),
            self.transmit,
            self.clock,
            QuietMetrics(),
            max_queue=world.settings.max_queue,
            queue_timeout_s=world.settings.queue_timeout_s,
            request_timeout_s=world.settings.request_timeout_s,
            stall_s=world.settings.stall_s,
            timeouts=Timeouts(reserve_s=2.0, first_token_s=4.0, token_s=3.0, gone_s=30.0, pair_s=2.0),
            policy=PairingPolicy(
                prefill=world.settings.prefill_policy,
                decode=world.settings.decode_policy,
                local_prefill_max=world.settings.local_prefill_max,
                local_prefill_queued_max=world.settings.local_prefill_queued_max,
                prefix_pulls=world.settings.pulls,
                coin=Random(world.rng.getrandbits(64)),
            ),
            soon=self._due.append,
            mint=lambda: hex_id(world.rng),
            estimates=(OutputEstimates if world.settings.learns else FixedEstimates)(
                world.settings.first_guess
            ),
        )
        self.num_malformed = 0
        self._pauses = PauseMeter(PAUSE_S)
        self._decoder = control_up_decoder()
        world.network.listening[CONTROL] = self
        world.timeline.at(world.timeline.now + TICK_S, self._tick)

    def transmit(self, identity, frame):
        line = self.world.network.line(int.from_bytes(identity, "big"))
        if line is None or line.server is not self:
            raise PeerLost("the peer is not connected")
        return self.world.network.send(line, False, (frame,)) is not None

    def deliver(self, line, is_up, frames):
        identity = line.number.to_bytes(4, "big")
        self._look_for_pause()
        try:
            messages, num_unknown = self._decoder.messages(frames[0])
            self.num_malformed += num_unknown
        except RemoteProtocolError as error:
            self.num_malformed += 1
            if isinstance(error, DamagedMessage):
                self.run(lambda: self.dispatcher.on_damaged(identity))
            return
        self.run(lambda: [self._hear(identity, message) for message in messages])

    def _hear(self, identity, message):
        self.world.checker.heard(self, message)
        self.dispatcher.on_message(identity, message)

    def line_broke(self, line):
        self.world.timeline.at(self.world.timeline.now + 0.001, self._probe)

    def _probe(self):
        if self.is_alive and self.stalled_until <= self.world.timeline.now:
            self.run(self.dispatcher.probe)

    def run(self, action):
        """A turn of the router's only thread; then its clients read. None when it died in the middle."""
        try:
            result = action()
            while self._due:
                self._due.pop()()
        except Died:
            return None
        self.world.clients_read()
        return result

    def _look_for_pause(self):
        if seconds := self._pauses.turn(self.clock()):
            self.run(lambda: self.dispatcher.paused(seconds))

    def _tick(self):
        now = self.world.timeline.now
        if not self.is_alive:
            return
        if self.stalled_until <= now:
            self._look_for_pause()
            self.run(self.dispatcher.tick)
        self.world.timeline.at(max(now, self.stalled_until) + TICK_S, self._tick)


class SimControl(LinkQueues):
    """The control link over a line."""

    def __init__(self, process, hello, now):
        super().__init__(hello, now)
        self.process = process
        self.arrived = deque()
        self.is_broken = False

    def tick(self, now):
        if self.is_broken:
            self.is_broken = False
            self._machine.broke()
        return super().tick(now)

    def _transmit(self, frame):
        network = self.process.world.network
        line = network.dial(self.process, CONTROL, "control")
        return line is not None and network.send(line, True, (frame,)) is not None

    def _next_message(self):
        return self.arrived.popleft() if self.arrived else None


class SimSender(SenderEndpoint):
    """Prefill's end of a transport over lines; a peer is the number of its line."""

    def __init__(self, process, layout, planes, lease_s, endpoint):
        super().__init__(
            process.instance,
            layout,
            planes,
            lease_s=lease_s,
            stall_s=process.settings.stall_s,
            clock=process.link_clock,
        )
        self.process = process
        self.arrived = deque()
        process.world.network.listening[endpoint] = process

    def poll(self, timeout):
        while self.arrived:
            line, frames = self.arrived.popleft()
            if line != "broken":
                self._receive_frames(f"{line.number:08x}", [memoryview(frame) for frame in frames])
        self._work()
        return self._take_events()

    def close(self):
        self._perform(self.session.close(self._clock()))

    def _transmit(self, peer, header, payload):
        network = self.process.world.network
        line = network.line(int(peer, 16))
        if line is None:
            raise PeerLost("the peer is not connected")
        frames = (header,) if payload is None else (header, payload.data)
        delivery = network.send(line, False, frames)
        return Delivered() if delivery is not None and payload is None else delivery


class SimReceiver(ReceiverEndpoint):
    """Decode's end of a transport over lines; a peer is an address."""

    def __init__(self, process, layout, planes, lease_s, window):
        super().__init__(
            process.instance, layout, planes, lease_s=lease_s, window=window, clock=process.link_clock
        )
        self.process = process
        self.arrived = deque()

    def poll(self, timeout):
        while self.arrived:
            line, frames = self.arrived.popleft()
            if line == "broken":
                self._perform(self.session.link_lost(frames, self._clock()))
            else:
                self._receive_frames(line.address, [memoryview(frame) for frame in frames])
        self._work()
        return self._take_events()

    def close(self):
        self._perform(self.session.close(self._clock()))

    def _close_link(self, peer):
        super()._close_link(peer)
        self.process.world.network.hang_up(self.process, peer)

    def _transmit(self, peer, header, payload):
        network = self.process.world.network
        line = network.dial(self.process, peer, "kv")
        return Delivered() if line is not None and network.send(line, True, (header,)) is not None else None


class SimLink:
    """The scheduler's end of a link: what it posts wakes the link thread."""

    def __init__(self, process):
        self.process = process
        self.commands = deque()
        self.inbox = deque()
        self.owners = RoomOwners()
        self.heartbeat_s = 0.25
        self.transport_counters = {}

    def hand_over(self) -> None:
        pass

    def post(self, command):
        self.commands += outgoing(self.owners, command)
        self.process.wake_link(0.0002)

    def receive(self, timeout):
        events = []
        while self.inbox:
            event = self.inbox.popleft()
            name = type(said(event)).__name__
            self.process.world.timeline.note(self.process.name, "takes", name)
            death = self.process.world.on_transition(self.process, "event", name)
            if death or self.process.world.is_killed_by(said(event)):
                self.process.world.kill(self.process)
                raise Died
            events += incoming(self.owners, event)
        return events

    def retain(self, rooms):
        self.owners.retain(rooms)

    def close(self):
        """The process performs what was posted; see `WorkerProcess.leave`."""


def said(event):
    """What an event is about: the message, if it came from a router."""
    return event.message if isinstance(event, FromRouter) else event


class FixedEstimates(OutputEstimates):
    """The router never learns how long answers get."""

    def ended(self, key, num_tokens):
        """Nothing is learned."""

    def retracted(self):
        """Nothing is learned."""


class WatchedDecode(DecodeWorker):
    """The checker looks at each room whose pages are taken back."""

    def _retract(self, room, reason=Reason.FULL_POOL):
        self.checker.retracted(room, reason)
        super()._retract(room, reason)


class WatchedPrefill(PrefillWorker):
    """The checker looks at each room whose pages are taken back."""

    def _retract(self, room, reason):
        self.checker.prompt_retracted(room)
        super()._retract(room, reason)


class LateLocalPrefill(LocalPrefill):
    """Its forwards run as late as a device could run them: when they are read. On a CPU they run at once."""

    def _read(self, launched):
        if self.engine.launches_ahead:
            self.engine.runner.finish(launched.output)
        return super()._read(launched)


class WorkerProcess(Process):
    """One start of a prefill or decode worker."""

    def __init__(self, world, name, instance):
        super().__init__(name[0], name, instance, world.timeline)
        self.world, self.settings = world, world.settings
        self.rng = Random(world.rng.getrandbits(64))
        self.endpoint = f"sim://{name}"
        self.link_clock = RunningClock(self.clock)
        self.hung_until = 0.0  # the scheduler thread alone stands still
        is_prefill = self.role == "P"
        settings = self.settings
        weights = 18 if name == world.options.odd else 17
        has_features = settings.has_features
        self.engine = toy_engine(
            settings.prefill_pages if is_prefill else settings.decode_pages,
            settings.head_dim,
            is_caching=settings.is_caching,
            lookahead=0 if is_prefill else settings.lookahead,
            weights=weights,
            is_late=settings.is_overlapped and not is_prefill,
            offers=has_features and is_prefill,
            reads=has_features and not is_prefill,
        )
        pool = self.engine.pool
        layout = layout_of(
            pool,
            model_fingerprint=f"toy {weights}",
            feature_ids=self.engine.feature_ids,
            feature_width=self.engine.feature_width,
        )
        layout = replace(layout, block_bytes=settings.block_bytes)
        self.transport = self._transport(layout)
        self.control = SimControl(self, self._hello(layout, pool), self.link_clock())
        self.link = SimLink(self)
        self.work = LinkWork({0: self.control}, self.transport, self._told)
        self.worker = self._worker()
        self.tier_checks = None
        if settings.host_slots:
            self.worker.tiers = tiers_of(self)
            self.tier_checks = TierChecks(self)
        news = self.worker.news = news_of(self) if settings.pulls != OFF else None
        self.shutdown = Shutdown()
        self.loop = WorkerLoop(
            self.worker, self.link, self.shutdown, drain_timeout_s=4.0, clock=self.clock,
            news=news,
        )  # fmt: skip
        self._link_at = self._turn_at = INFINITY
        self.wake_link(0.0)
        self.wake(0.001)

    @property
    def prefix_endpoint(self):
        """Where it offers prefixes; "" where it offers none."""
        return f"{self.endpoint}/prefixes" if self.role == "D" and self.settings.pulls != OFF else ""

    def _transport(self, layout):
        settings, pool, is_prefill = self.settings, self.engine.pool, self.role == "P"
        planes = planes_of(pool, self.engine.features)
        if is_prefill:
            main = SimSender(self, layout, planes, settings.lease_s, self.endpoint)
        else:
            main = SimReceiver(self, layout, planes, settings.lease_s, settings.window)
        if settings.pulls == OFF:
            return main
        layout = replace(prefix_layout(layout), block_bytes=settings.block_bytes)
        planes = planes_of(pool, None)
        if is_prefill:
            other = SimReceiver(self, layout, planes, settings.lease_s, settings.window)
            return SimTwoWay(sender=main, receiver=other, main=main)
        other = SimSender(self, layout, planes, settings.lease_s, self.prefix_endpoint)
        return SimTwoWay(sender=other, receiver=main, main=main)

    def _hello(self, layout, pool):
        is_prefill = self.role == "P"
        hello = hello_of(
            layout, pool, role="prefill" if is_prefill else "decode", instance=self.instance, model="toy",
            max_context=MAX_CONTEXT, max_running=0 if is_prefill else self.settings.max_running,
            vocab_size=VOCAB,
            kv_endpoint=self.endpoint if is_prefill else "",
            spec_tokens=0 if is_prefill else STEPS.spare_slots,
            local_prefill=self.settings.has_local_prefill and not is_prefill,
            aggregated=bool(self.settings.aggregated) and not is_prefill,
            grows=self.settings.grows and not is_prefill, ahead_tokens=self.settings.ahead_tokens,
            shares_prompts=not is_prefill, preempts=self.settings.grows and not is_prefill,
            tells_prefixes=self.settings.pulls != OFF,
            pulls_prefixes=self.settings.pulls != OFF and is_prefill,
            prefix_endpoint=self.prefix_endpoint,
        )  # fmt: skip
        return replace(hello, pid=1, host="sim")

    def _worker(self):
        settings = self.settings
        if self.role == "P":
            worker = WatchedPrefill(
                self.engine, self.link, instance=self.instance, chunk_size=settings.chunk_size, max_batch=4,
                max_queue=settings.prefill_queue, clock=self.clock, slo_ttft_s=settings.slo_ttft_s,
            )  # fmt: skip
            worker.checker = self.world.checker
            return worker
        decoder = ToyAheadDecoder if settings.is_overlapped else ToyDecoder
        worker = WatchedDecode(
            self.engine, self.link, instance=self.instance, max_running=settings.max_running,
            decoder=decoder(self.engine.runner.memory), clock=self.clock, grows=settings.grows,
            slo_ttft_s=settings.slo_ttft_s,
            offers_prefixes=bool(self.prefix_endpoint),
        )  # fmt: skip
        worker.growth.ahead_tokens, worker.checker = settings.ahead_tokens, self.world.checker
        budget = (settings.chunk_size if settings.aggregated else 0) or MAX_CONTEXT
        worker.local = LateLocalPrefill(
            self.engine, worker.decoder, budget, self.clock, self.link.post, self.instance,
            slo_ttft_s=settings.slo_ttft_s,
        )  # fmt: skip
        worker.local.budget_alone = budget
        return worker

    # --- the network ----------------------------------------------------------------------------------------

    def deliver(self, line, is_up, frames):
        if line.kind == "control":
            self.control.arrived.append(frames)
        else:
            self.transport.arrived.append((line, frames))
        self._link_turn()

    def line_broke(self, line):
        if line.kind == "control":
            self.control.is_broken = True
        elif line.client is self:
            self.transport.arrived.append(("broken", line.address))
        else:
            return
        self.wake_link(0.001)

    # --- the two threads ------------------------------------------------------------------------------------

    def wake_link(self, delay):
        when = self.timeline.now + delay
        if when < self._link_at:
            self._link_at = when
            self.timeline.at(when, self._run_link, when)

    def wake(self, delay):
        when = self.timeline.now + delay
        if when < self._turn_at:
            self._turn_at = when
            self.timeline.at(when, self._run_turn, when)

    def _told(self, event):
        self.link.inbox.append(event)
        if isinstance(event, Dropped) and "have no features here" in event.reason:
            self.world.reached["asked for features that are not there"] += 1
        if self.world.options.leave_at == f"{self.role} event {type(said(event)).__name__}":
            self.world.timeline.at(self.timeline.now, self.world.leave, said(event).room)
        self.wake(0.0002 + 0.001 * self.rng.random())

    def _run_link(self, when):
        if not self.is_alive or when != self._link_at:
            return
        if self.stalled_until > when:
            self._link_at = INFINITY
            self.wake_link(self.stalled_until - when)
            return
        self._link_turn()

    def _link_turn(self):
        self._link_at = INFINITY
        try:
            while self.link.commands:
                self.work.perform(self.link.commands.popleft())
            self.work.turn_routers(self.link_clock())
            self.work.turn_transport()
        except Died:
            return
        self.link.heartbeat_s = self.control.heartbeat_s
        now = self.link_clock()
        deadlines = (self.control.next_deadline, self.transport.next_deadline(now))
        deadline = min(at for at in deadlines if at is not None)
        lazy = IDLE_TURN_S if self.worker.num_rooms or not self.control.connected else LAZY_TURN_S
        self.wake_link(min(lazy, max(0.002, deadline - now)))

    def _run_turn(self, when):
        if not self.is_alive or when != self._turn_at:
            return
        self._turn_at = INFINITY
        standstill = max(self.stalled_until, self.hung_until)
        if standstill > when:
            self.wake(standstill - when)
            return
        try:
            if self.loop.is_over():
                self.leave()
                return
            assert self.loop.turn() == EXIT_OK
        except Died:
            return
        self.world.checker.after_turn(self)
        if self.loop._is_busy:
            self.wake(self.settings.step_s * (0.5 + self.rng.random()))
            return
        lazy = 0.05 if self.worker.num_rooms else self.settings.worker_timeout_s
        self.wake(max(0.001, min(lazy, self.loop._next_beat - self.clock())))

    def leave(self):
        """The drain is over: the process ends by itself, and its last words get out."""
        try:
            while self.link.commands:
                self.work.perform(self.link.commands.popleft())
            self.transport.close()
            self.control.flush()
        except Died:
            return
        self.world.kill(self, is_orderly=True)
