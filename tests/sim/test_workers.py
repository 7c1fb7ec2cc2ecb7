"""Both workers, their schedulers and the KV plane in one process: random arrivals, random cancels, one seeded order.

The engines, schedulers, sessions, codec and digests are the real ones; the network, the router and the clock are the
test's. After every turn the pools must balance, and at the end nothing may be held.
"""

import random

import msgspec
import pytest
import torch
from baton.cluster.messages import Cancel, Failed, Finished, FirstToken, Gone, Heartbeat, Prefill, Reserve, Sampling, Tokens
from baton.decode.worker import DecodeWorker
from baton.engine.config import EngineConfig
from baton.engine.loader import EngineLoader
from baton.kvtransfer.identity import layout_of, planes_of
from baton.kvtransfer.link import Advance, Drop, Ended
from baton.kvtransfer.transport import Offer, PullRequest
from baton.kvtransfer.transports.fake import FakeNetwork, FakeReceiver, FakeSender
from baton.prefill.worker import PrefillWorker
from baton.tests.parity.toy_engine import ToyEngine

P, D, ENDPOINT = "a" * 32, "b" * 32, "fake://p"


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class DirectLink:
    """What WorkerLink does, without a thread: commands go to the transport, the rest to the test's router."""

    def __init__(self):
        self.transport = None
        self.to_router = []
        self.events = []

    def post(self, item):
        match item:
            case Offer():
                self.transport.offer(item)
            case PullRequest():
                self.transport.pull(item)
            case Advance():
                self.transport.advance(item.room, item.epoch, item.tokens_ready, item.first_token)
            case Drop():
                self.transport.release(item.room, item.epoch, item.reason)
                self.events.append(Ended(room=item.room, epoch=item.epoch))
            case Heartbeat():
                pass
            case _:
                msgspec.msgpack.decode(msgspec.msgpack.encode(item), type=type(item))  # it fits the wire
                self.to_router.append(item)

    def take(self):
        events, self.events = self.events + list(self.transport.turn()), []
        return events


def layout(engine):
    return layout_of(
        engine.pool,
        model_fingerprint=engine.fingerprint,
        feature_ids=engine.feature_ids,
        feature_width=engine.feature_width,
    )


class Pair:
    """One prefill and one decode worker, and a router that only keeps books."""

    def __init__(self, model, draft="", *, pages=24, chunk_size=8, max_running=4, fault=None, **settings):
        self.clock = Clock()
        self.network = FakeNetwork(fault)
        self.links = {P: DirectLink(), D: DirectLink()}
        engines = {}
        for name, has_drafter in ((P, False), (D, True)):
            config = EngineConfig(
                model=str(model), draft=str(draft), device="cpu", page_size=4, pages=pages, max_context=96, **settings
            )
            loader = EngineLoader(config, has_drafter=has_drafter)
            for _, run in loader.phases():
                run()
            engines[name] = loader.engine()
        p, d = engines[P], engines[D]
        planes = planes_of(p.pool, p.features)
        self.links[P].transport = FakeSender(self.network, ENDPOINT, P, layout(p), planes, clock=self.clock)
        planes = planes_of(d.pool, d.features)
        self.links[D].transport = FakeReceiver(self.network, D, layout(d), planes, clock=self.clock)
        self.prefill = PrefillWorker(p, self.links[P], instance=P, chunk_size=chunk_size, max_batch=4, max_queue=64)
        self.decode = DecodeWorker(d, self.links[D], instance=D, max_running=max_running, spec_steps=3)
        self.tokens, self.ends, self.gone = {}, {}, {}

    def send(self, room, prompt_ids, epoch=0, **sampling):
        common = {
            "room": room,
            "epoch": epoch,
            "prompt_ids": list(prompt_ids),
            "sampling": Sampling(**{"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 12, **sampling}),
            "deadline_ms": 0,
        }
        reserve = Reserve(instance=D, prefill_endpoint=ENDPOINT, prefill_instance=P, **common)
        self.decode.handle(reserve, self.clock.now)
        self.prefill.handle(Prefill(instance=P, **common), self.clock.now)

    def cancel(self, room):
        self.prefill.handle(Cancel(room=room, instance=P), self.clock.now)
        self.decode.handle(Cancel(room=room, instance=D), self.clock.now)

    def turn(self, rng=None):
        """One turn of each loop, in any order, with any part of the network's messages delivered."""
        workers = [(self.prefill, self.links[P]), (self.decode, self.links[D])]
        if rng is not None:
            rng.shuffle(workers)
        for worker, link in workers:
            for _ in range(len(self.network.packets) if rng is None else rng.randrange(len(self.network.packets) + 1)):
                if self.network.packets:
                    self.network.deliver()
            for event in link.take():
                worker.handle(event, self.clock.now)
            worker.expire(self.clock.now)
            worker.step()
            worker.engine.cache.check_integrity()
        self.clock.now += 0.01
        self._read()

    def _read(self):
        for link in self.links.values():
            for message in link.to_router:
                match message:
                    case FirstToken():
                        assert message.room not in self.tokens
                        self.tokens[message.room] = [message.token]
                        if message.finish:
                            self.ends[message.room] = message.finish
                            self.decode.handle(Cancel(room=message.room, instance=D), self.clock.now)
                    case Tokens():
                        for item in message.items:
                            assert item.seq == len(self.tokens[item.room]), "tokens are contiguous"
                            self.tokens[item.room] += item.ids
                    case Finished() | Failed():
                        # Decode may report the hand-off of a request that ended with its first token as lost.
                        assert message.room not in self.ends or isinstance(message, Failed)
                        self.ends.setdefault(message.room, message)
                    case Gone():
                        self.gone[message.room] = self.gone.get(message.room, 0) + 1
            link.to_router.clear()

    def run(self, rng=None, turns=400, until=None):
        for _ in range(turns):
            self.turn(rng)
            if (until or (lambda: self.is_idle))():
                return
        raise AssertionError(f"not idle after {turns} turns: {self.prefill!r}, {self.decode!r}")

    @property
    def is_idle(self):
        return not self.prefill.num_rooms and not self.decode.num_rooms

    def assert_nothing_is_held(self):
        for worker in (self.prefill, self.decode):
            stats = worker.stats()
            assert stats.pages_free == stats.pages_total, worker
            worker.engine.cache.clear()
            assert worker.engine.cache.allocator.num_used == 0, worker
        assert not self.decode.decoder._warm


def name(i):
    return f"{i:032x}"


@pytest.fixture(scope="module")
def model(toy_checkpoint):
    torch.set_num_threads(1)
    return toy_checkpoint("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def toy(model):
    return ToyEngine(model)


@pytest.fixture(scope="module")
def reference(toy):
    """Greedy tokens of one process without paging tricks, by prompt."""
    known = {}

    def greedy(prompt, count=12):
        key = tuple(prompt)
        if key not in known:
            toy.lengths.clear()
            for pages in toy.pages.values():
                toy.free.extend(pages)
            toy.pages.clear()
            known[key] = toy.greedy(list(prompt), 12)
        return known[key][:count]

    return greedy


def prompts(rng, count):
    """Prompts that share prefixes with each other now and then."""
    stems = [[rng.randrange(3, 250) for _ in range(rng.randrange(1, 30))] for _ in range(3)]
    return [rng.choice(stems)[: rng.randrange(1, 30)] + [rng.randrange(3, 250) for _ in range(rng.randrange(1, 12))]
            for _ in range(count)]  # fmt: skip


@pytest.mark.parametrize("chunk_size", [4, 0])
def test_the_pair_says_what_one_process_says(model, reference, chunk_size):
    pair = Pair(model, chunk_size=chunk_size, pages=96, max_running=8)
    wanted = prompts(random.Random(1), 8)
    for i, prompt in enumerate(wanted):
        pair.send(name(i), prompt)
    pair.run()
    assert [pair.tokens[name(i)] for i in range(8)] == [reference(prompt) for prompt in wanted]
    assert {end.reason for end in pair.ends.values()} == {"length"}
    pair.assert_nothing_is_held()


def test_a_repeated_prompt_is_neither_computed_nor_pulled_again(model, reference):
    pair = Pair(model, pages=96)
    prompt = prompts(random.Random(2), 1)[0] + list(range(20, 36))
    pair.send(name(1), prompt)
    pair.run()
    pair.send(name(2), prompt)
    pair.run()
    assert pair.tokens[name(1)] == pair.tokens[name(2)] == reference(prompt)
    assert pair.ends[name(2)].timeline.have_tokens >= len(prompt) - 8
    assert pair.ends[name(2)].timeline.handoff_bytes < pair.ends[name(1)].timeline.handoff_bytes
    assert pair.prefill.stats().counters["cached_tokens"] >= len(prompt) - 8


@pytest.mark.parametrize("seed", range(20))
def test_random_cancels_in_any_order_leave_nothing_and_disturb_nobody(model, reference, seed):
    rng = random.Random(seed)
    pair = Pair(model, chunk_size=rng.choice([4, 8, 0]), pages=rng.choice([24, 40]), max_running=3)
    waiting = list(enumerate(prompts(rng, 12)))
    sent, cancelled = {}, set()
    for _ in range(600):
        if waiting and rng.random() < 0.3:
            i, prompt = waiting.pop()
            sent[name(i)] = prompt
            pair.send(name(i), prompt, max_new_tokens=rng.choice([1, 5, 12]))
        if sent and rng.random() < 0.15:
            room = rng.choice(list(sent))
            cancelled.add(room)
            pair.cancel(room)
        pair.turn(rng)
        if not waiting and pair.is_idle and not pair.network.packets:
            break
    pair.clock.now += 10  # leases of rooms that one side refused
    pair.run(rng)
    for room, prompt in sent.items():
        got = pair.tokens.get(room, [])
        assert got == reference(prompt, len(got)), "what was said is right, also of a room that was cancelled"
        assert room in cancelled or len(got) in (1, 5, 12) or room not in pair.ends or isinstance(pair.ends[room], Failed)
    assert all(pair.gone[room] >= 2 for room in cancelled), "each cancel was answered by both"
    pair.assert_nothing_is_held()


def test_losing_the_router_drops_every_room(model):
    pair = Pair(model, pages=96, max_running=8)
    for i, prompt in enumerate(prompts(random.Random(3), 6)):
        pair.send(name(i), prompt)
    for _ in range(3):
        pair.turn()
    pair.prefill.drop_all("the router is gone")
    pair.decode.drop_all("the router is gone")
    pair.run()
    pair.assert_nothing_is_held()


def test_a_newer_epoch_replaces_the_older_attempt(model, reference):
    pair = Pair(model, pages=96)
    prompt = list(range(10, 40))
    pair.send(name(1), prompt)
    pair.turn()
    pair.cancel(name(1))
    for _ in range(3):
        pair.turn()
    pair.tokens.clear()
    pair.send(name(1), prompt, epoch=1)
    pair.run()
    assert pair.tokens[name(1)] == reference(prompt)
    pair.assert_nothing_is_held()
