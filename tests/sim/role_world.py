"""Production's router with its scaler of roles over workers that are costs, in virtual time.

    prefill   computes prompts one after the other, at PROMPT_RATE tokens a second
    decode    all requests of the batch get a token in each step, which takes STEP_S and SEAT_S for each of
              them; a room holds its place from Reserve on, as in production
    a change  a worker that is ordered to change its role drains, gives back what is left, and serves again
              in the other role RESTART_S later, as another process

Clients are a closed loop: each asks again when its answer is there.
"""

import heapq
import itertools
from random import Random

from baton.cluster.protocol.codec import control_down_decoder
from baton.cluster.protocol.messages import (
    Cancel,
    ChangeRole,
    Failed,
    Finished,
    FirstToken,
    Gone,
    Heartbeat,
    Hello,
    Prefill,
    PrefillTimeline,
    Reserve,
    Reserved,
    Sampling,
    TokenItem,
    Tokens,
    WorkerStats,
)
from baton.router.rooms.effects import Deliver, Ended, Failure, Timeouts
from baton.router.scheduling.dispatcher import Dispatcher
from baton.router.scheduling.inbox import Inbox
from baton.router.scheduling.request_state import Job
from baton.router.workers.registry import Registry
from baton.tests.sim.cluster_clients import read_inbox
from baton.tests.sim.cluster_nodes import QuietMetrics
from baton.tests.sim.draws import hex_id

PROMPT_RATE = 20_000.0  # tokens a second: a model of 8B on an H200
STEP_S, SEAT_S = 0.008, 0.0002
HANDOFF_S = 0.01
PLACES, PAGE, CONTEXT = 48, 64, 8192
RESTART_S = 8.0  # weights come from the page cache
TURN_S = 0.2  # of the workers
TICK_S = 0.25
BEAT_S = 0.5


class Worker:
    """One process of one role."""

    def __init__(self, world, name, role):
        self.world, self.name, self.role = world, name, role
        self.instance, self.identity = hex_id(world.rng), hex_id(world.rng).encode()
        self.is_alive = True
        self.leaves_at = None  # it drains until then
        self.target = ""
        self.prompts = []  # [order, arrived], waiting; the first one is being computed
        self.done_at = 0.0  # of the first prompt
        self.rooms = {}  # (room, epoch) -> Room
        self.debt = 0.0  # seconds of decode that were not used yet
        world.workers[self.identity] = self
        self.tell(
            Hello(
                role=role, instance=self.instance, protocol=1, fingerprint="f" * 64, model="m",
                kv_endpoint="tcp://p" if role == "prefill" else "", pages_total=100_000, page_size=PAGE,
                max_context=CONTEXT, max_running=0 if role == "prefill" else PLACES, changes_role=True,
            )
        )  # fmt: skip
        self.beat()

    def tell(self, message):
        if self.is_alive:
            self.world.dispatcher.on_message(self.identity, message)

    def beat(self):
        running = sum(room.is_running for room in self.rooms.values())
        state = "changing role" if self.leaves_at is not None else "serving"
        self.tell(
            Heartbeat(
                instance=self.instance,
                stats=WorkerStats(
                    state=state, pages_total=100_000, pages_free=100_000, running=running,
                    queued=len(self.prompts), transferring=len(self.rooms) - running,
                ),
            )
        )  # fmt: skip

    def take(self, message):
        match message:
            case Reserve():
                self.rooms[message.room, message.epoch] = DecodeRoom(message)
                self.tell(Reserved(room=message.room, epoch=message.epoch, instance=self.instance))
            case Prefill():
                self.prompts.append((message, self.world.now))
                if len(self.prompts) == 1:
                    self._begin()
            case Cancel():
                self.rooms.pop((message.room, message.epoch), None)
                is_first = bool(self.prompts) and self.prompts[0][0].room == message.room
                self.prompts = [each for each in self.prompts if each[0].room != message.room]
                if is_first and self.prompts:
                    self._begin()
                self.tell(Gone(room=message.room, epoch=message.epoch, instance=self.instance))
            case ChangeRole():
                self.target, self.leaves_at = message.role, self.world.now + message.drain_ms / 1000
                self.beat()

    def _begin(self):
        self.began, self.done_at = (
            self.world.now,
            self.world.now + len(self.prompts[0][0].prompt_ids) / PROMPT_RATE,
        )
        self.world.at(self.done_at, self.computed, self.prompts[0][0])

    def computed(self, order):
        """The first prompt has its first token, if it is still that one."""
        if not (self.is_alive and self.prompts and self.prompts[0][0] is order):
            return
        _, arrived = self.prompts.pop(0)
        timeline = PrefillTimeline(
            queue_ms=1000 * (self.began - arrived), prefill_ms=1000 * (self.world.now - self.began),
            prompt_tokens=len(order.prompt_ids),
        )  # fmt: skip
        self.tell(
            FirstToken(room=order.room, epoch=order.epoch, instance=self.instance, token=5, timeline=timeline)
        )
        self.world.at(self.world.now + HANDOFF_S, self.world.handed, order.room, order.epoch)
        if self.prompts:
            self._begin()

    def turn(self):
        """Tokens of the steps since the last turn."""
        running = [room for room in self.rooms.values() if room.is_running]
        if running:
            step_s = STEP_S + SEAT_S * len(running)
            steps, self.debt = divmod(self.debt + TURN_S, step_s)
            self._give(running, int(steps))
        else:
            self.debt = 0.0
        is_empty = not (self.rooms or self.prompts)
        if self.leaves_at is not None and (is_empty or self.world.now >= self.leaves_at):
            self.leave()

    def _give(self, running, steps):
        items, ended = [], []
        for room in running:
            count = min(steps, room.left)
            if not count:
                continue
            one = {"room": room.order.room, "epoch": room.order.epoch}
            items.append(TokenItem(seq=room.sent, ids=[5] * count, **one))
            room.sent, room.left = room.sent + count, room.left - count
            if not room.left:
                ended.append(
                    Finished(instance=self.instance, reason="length", output_tokens=room.sent, **one)
                )
                del self.rooms[room.order.room, room.order.epoch]
        if items:
            self.tell(Tokens(instance=self.instance, items=items))
        for message in ended:
            self.tell(message)

    def leave(self):
        """The drain is over: the rest goes on elsewhere, and the process starts in the other role."""
        orders = [room.order for room in self.rooms.values()] + [order for order, _ in self.prompts]
        for order in orders:
            one = {"room": order.room, "epoch": order.epoch, "instance": self.instance}
            self.tell(Failed(kind="Draining", message="it leaves", retryable=True, **one))
        self.is_alive = False
        self.world.num_moved += 1
        del self.world.workers[self.identity]
        gone = self.world.dispatcher.registry.get(self.instance)
        if gone is not None:
            gone.is_draining = True
            self.world.dispatcher.lose([gone])
        self.world.at(self.world.now + RESTART_S, Worker, self.world, self.name, self.target)


class DecodeRoom:
    def __init__(self, order):
        self.order, self.sent, self.left = order, 1, order.sampling.max_new_tokens - 1
        self.is_running = False


class Client:
    """Asks again and again, for what the phase says."""

    def __init__(self, world):
        self.world, self.entry, self.inbox = world, None, None

    def ask(self):
        self.inbox = Inbox(lambda: self.world.now)
        num_prompt, num_output = self.world.phase
        number = next(self.world.numbers)
        job = Job(
            prompt_ids=[3 + number % 30_000, 3 + number // 30_000, *self.world.stem[: num_prompt - 2]],
            sampling=Sampling(max_new_tokens=num_output, ignore_eos=True),
            arrived=self.world.now,
            tokenize_s=0.0,
        )
        [self.entry] = self.world.dispatcher.submit([job], self.inbox)

    def read(self):
        for _, event in read_inbox(self.inbox) if self.inbox._events else ():
            if isinstance(event, Deliver):
                self.world.num_tokens += len(event.ids)
            elif isinstance(event, Ended):
                self.world.num_ended += 1
                self.ask()
                return
            elif isinstance(event, Failure):
                self.world.failures.append(event)
                self.ask()
                return


class RoleWorld:
    """A router, `num_prefill` prefill workers of `num_workers`, and `num_clients` clients."""

    def __init__(self, num_prefill, num_workers, num_clients, *, scaler=None, seed=0):
        self.now, self.rng = 0.0, Random(seed)
        self.phase = (100, 100)
        self.numbers, self.stem = itertools.count(), [7 + i % 900 for i in range(CONTEXT)]
        self.workers, self.failures = {}, []
        self.num_ended = self.num_tokens = self.num_moved = 0
        self._due, self._order = [], itertools.count()
        self._decoder = control_down_decoder()
        self.dispatcher = Dispatcher(
            Registry("a" * 32, 3.0), self._transmit, lambda: self.now, QuietMetrics(), max_queue=4096,
            queue_timeout_s=600.0, timeouts=Timeouts(first_token_s=600.0, token_s=600.0),
            mint=lambda: hex_id(self.rng), scaler=scaler,
        )  # fmt: skip
        for i in range(num_workers):
            Worker(self, f"w{i}", "prefill" if i < num_prefill else "decode")
        self.clients = [Client(self) for _ in range(num_clients)]
        for when, what in ((0.0, self._turn), (0.05, self._tick), (0.02, self._beat)):
            self.at(when, what)
        for client in self.clients:
            self.at(0.1 + 2.0 * self.rng.random(), client.ask)

    def at(self, when, what, *args):
        heapq.heappush(self._due, (when, next(self._order), what, args))

    def _transmit(self, identity, frame):
        worker = self.workers.get(identity)
        if worker is None:
            return False
        messages = [self._decoder.decode(frame)] if not isinstance(frame, list) else frame
        for message in messages:
            self.at(self.now + 0.001, self._arrive, worker, message)
        return True

    def _arrive(self, worker, message):
        if worker.is_alive:
            worker.take(message)

    def handed(self, room, epoch):
        """The KV of a prompt is on decode."""
        for worker in self.workers.values():
            if (room, epoch) in worker.rooms:
                worker.rooms[room, epoch].is_running = True

    def _turn(self):
        for worker in list(self.workers.values()):
            if worker.role == "decode" or worker.leaves_at is not None:
                worker.turn()
        for client in self.clients:
            if client.inbox is not None:
                client.read()
        self.at(self.now + TURN_S, self._turn)

    def _tick(self):
        self.dispatcher.tick()
        self.at(self.now + TICK_S, self._tick)

    def _beat(self):
        for worker in list(self.workers.values()):
            worker.beat()
        self.at(self.now + BEAT_S, self._beat)

    @property
    def split(self):
        """(prefill workers, decode workers)"""
        roles = [worker.role for worker in self.workers.values()]
        return roles.count("prefill"), roles.count("decode")

    def run(self, phase, seconds):
        """The answers per second of a phase, from its first moment to its last."""
        self.phase = phase
        end, before = self.now + seconds, self.num_ended
        while self._due[0][0] <= end:
            self.now, _, what, args = heapq.heappop(self._due)
            what(*args)
        self.now = end
        return (self.num_ended - before) / seconds
