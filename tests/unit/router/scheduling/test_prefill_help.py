"""Decode helps prefill in a closed loop: as many tokens as without help, or more.

The router is the real one. Both workers are queues in virtual time, with the times that an 8B model has on an
H200: 23.2 ms for a prompt of 1024 tokens, two of them in a forward, and steps by the number of streams. With
drafts a step makes 3 tokens. Decode takes turns between a forward over its prompts and a step of all streams.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import pytest
from baton.cluster.protocol.messages import (
    DecodeTimeline,
    Finished,
    FirstToken,
    PrefillTimeline,
    Reserve,
    Reserved,
    TokenItem,
    Tokens,
)
from baton.router.scheduling.placement import PairingPolicy
from baton.tests.unit.router.scheduling.test_dispatcher import D, P, World

PROMPT_S, HANDOFF_S, PROMPTS_OF_FORWARD = 0.0232, 0.003, 2
NUM_PROMPT, NUM_OUTPUT, ROUNDS = 16, 256, 3
STEP_MS = {  # by streams
    1: [(1, 4.4), (8, 4.7), (32, 5.8), (64, 6.95), (128, 9.5)],
    3: [(1, 5.3), (8, 5.9), (32, 7.4), (64, 10.0), (128, 17.9)],
}


def step_s(streams, per_step):
    points = STEP_MS[per_step]
    for (few, low), (many, high) in itertools.pairwise(points):
        if streams <= many:
            return (low + (high - low) * max(0, streams - few) / (many - few)) / 1000
    return points[-1][1] / 1000


def computed(latency_ms):
    return PrefillTimeline(prefill_ms=latency_ms, work_ms=PROMPT_S * 1000, prompt_tokens=NUM_PROMPT)


@dataclass
class Loop:
    """`clients` ask again when their answer is whole, `requests` times together."""

    world: World
    per_step: int
    clients: int
    requests: int
    now: float = 0.0
    asked: int = 0
    ended: int = 0
    waits: float = 0.0  # for first tokens, summed
    asked_at: dict = field(default_factory=dict)
    here: list = field(default_factory=list)  # rooms whose prompt waits on decode
    there: list = field(default_factory=list)  # on prefill
    streams: dict = field(default_factory=dict)  # tokens by room
    events: list = field(default_factory=list)
    order: Iterator[int] = field(default_factory=itertools.count)  # of events of one time
    is_busy: dict = field(default_factory=lambda: {P: False, D: False})
    was_step: bool = True
    is_helped: set = field(default_factory=set)  # rooms whose prompt decode computed

    def run(self):
        """Tokens per second, and the mean wait for a first token in seconds."""
        for _ in range(self.clients):
            self.ask()
        while self.ended < self.requests:
            self.start()
            self.now, _, then, rooms = heapq.heappop(self.events)
            self.world.now = self.now
            then(rooms)
        return self.requests * NUM_OUTPUT / self.now, self.waits / self.requests

    def after(self, seconds, then, rooms):
        heapq.heappush(self.events, (self.now + seconds, next(self.order), then, rooms))

    def ask(self):
        if self.asked == self.requests:
            return
        self.asked += 1
        (entry,), _ = self.world.submit(NUM_OUTPUT)
        room, order = entry.room.room, self.world.of(b"d", Reserve)[-1]
        assert order.room == room, "every request is placed at once"
        self.asked_at[room] = self.now
        self.tell(b"d", Reserved, room)
        (self.there if order.prefill_instance else self.here).append(room)

    def tell(self, identity, kind, room, **more):
        instance = P if identity == b"p" else D
        self.world.dispatcher.on_message(identity, kind(instance=instance, room=room, epoch=0, **more))

    def start(self):
        """Workers that are idle begin."""
        if not self.is_busy[P] and self.there:
            rooms, self.there = self.there[:PROMPTS_OF_FORWARD], self.there[PROMPTS_OF_FORWARD:]
            self.is_busy[P] = True
            self.after(PROMPT_S * len(rooms), self.prefilled, rooms)
        if not self.is_busy[D] and (self.here or self.streams):
            self.is_busy[D] = True
            if self.here and (self.was_step or not self.streams):
                self.was_step = False
                rooms = self.here[:PROMPTS_OF_FORWARD]
                self.after(PROMPT_S * len(rooms), self.helped, rooms)
            else:
                self.was_step = True
                self.after(step_s(len(self.streams), self.per_step), self.stepped, list(self.streams))

    def prefilled(self, rooms):
        self.is_busy[P] = False
        for room in rooms:
            self.waits += self.now - self.asked_at[room]
            latency_ms = 4 * PROMPT_S * 1000  # launched ahead, behind another forward, beside a prompt
            self.tell(b"p", FirstToken, room, token=9, timeline=computed(latency_ms))
            self.after(HANDOFF_S, self.landed, [room])

    def landed(self, rooms):
        self.streams |= dict.fromkeys(rooms, 1)

    def helped(self, rooms):
        self.is_busy[D] = False
        for room in rooms:
            self.here.remove(room)
            self.is_helped.add(room)
            self.waits += self.now - self.asked_at[room]
            self.tokens(room, 0, 1)
            self.streams[room] = 1

    def stepped(self, rooms):
        self.is_busy[D] = False
        for room in rooms:
            self.tokens(room, self.streams[room], self.per_step)
            self.streams[room] += self.per_step
            if self.streams[room] >= NUM_OUTPUT:
                del self.streams[room]
                self.ended += 1
                report = self.report(room)
                self.tell(b"d", Finished, room, reason="length", output_tokens=NUM_OUTPUT, **report)
                self.ask()

    def report(self, room):
        """What decode says of its work in Finished."""
        if room in self.is_helped:
            return {"prefill": computed(2 * PROMPT_S * 1000)}
        return {"timeline": DecodeTimeline(handoff_ms=HANDOFF_S * 1000, handoff_bytes=1, handoff_blocks=1)}

    def tokens(self, room, seq, count):
        items = [TokenItem(seq=seq, ids=[8] * min(count, NUM_OUTPUT - seq), room=room, epoch=0)]
        self.world.dispatcher.on_message(b"d", Tokens(instance=D, items=items))


@cache
def loop(limit, *, clients, per_step, before=()):
    """Its tokens per second and wait, and the router's estimate of a prompt on prefill and on decode.

    `before`: (tokens, ms) of prompts that were computed earlier.
    """
    world = World(policy=PairingPolicy(local_prefill_queued_max=limit), max_queue=1000)
    world.join(local_prefill=True, pages_total=1 << 20, max_running=1000)
    costs = world.dispatcher._placer._cost_model_of(world.dispatcher.registry.get(D))
    for tokens, ms in [*[(NUM_PROMPT, PROMPT_S * 1000)] * 20, *before]:
        costs.prefilled(PrefillTimeline(prefill_ms=4 * ms, work_ms=ms, prompt_tokens=tokens), is_local=False)
        costs.handed_over(tokens, DecodeTimeline(handoff_ms=HANDOFF_S * 1000))
    rate, wait = Loop(world, per_step, clients, ROUNDS * clients).run()
    return rate, wait, costs.prefill.at(NUM_PROMPT), costs.local.at(NUM_PROMPT)


@pytest.mark.parametrize("per_step", [1, 3], ids=["plain", "drafts"])
@pytest.mark.parametrize("clients", [8, 32, 64, 128])
def test_help_costs_no_throughput(clients, per_step):
    rate, wait, *_ = loop(64, clients=clients, per_step=per_step)
    alone, alone_wait, *_ = loop(0, clients=clients, per_step=per_step)
    assert rate >= 0.99 * alone
    assert wait <= 1.01 * alone_wait


def test_help_raises_throughput_where_prefill_is_the_limit():
    (rate, wait, *_), (alone, alone_wait, *_) = (loop(limit, clients=128, per_step=3) for limit in (64, 0))
    assert rate > 1.1 * alone
    assert wait < 0.7 * alone_wait


def test_the_router_knows_the_work_of_a_prompt_also_behind_long_ones():
    """Two prompts of 32768 tokens, at this scale, and latencies of four times the work."""
    before = ((128, 194.0), (512, 1158.0), (512, 1158.0))
    _, _, on_prefill, on_decode = loop(64, clients=64, per_step=3, before=before)
    assert on_prefill == pytest.approx(PROMPT_S, rel=0.1)
    assert on_decode == pytest.approx(PROMPT_S, rel=0.1)
