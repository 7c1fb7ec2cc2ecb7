"""Both workers of a hand-off in one process; the test plays network, link thread, router and clock."""

import time

import msgspec
import numpy as np
import torch
from baton.cluster.errors import LocalProtocolError
from baton.cluster.protocol.messages import (
    Cancel,
    Failed,
    Finished,
    FirstToken,
    Gone,
    Heartbeat,
    OfferPrefix,
    Prefill,
    PrefillTimeline,
    Refused,
    Reserve,
    Sampling,
    Tokens,
)
from baton.decode.worker import DecodeWorker
from baton.engine.config import EngineConfig
from baton.engine.loader import EngineLoader
from baton.kvtransfer.transport import Dropped, Lost, Offer, PullRequest
from baton.kvtransfer.transports.fake import FakeNetwork, FakeReceiver, FakeSender
from baton.prefill.worker import PrefillWorker
from baton.tests.unit.virtual_time import Clock
from baton.worker.commands import Advance, Command, Drop, DropDone, Underway
from baton.worker.identity import layout_of, planes_of
from baton.worker.prompt_embeds import embeds_inbox

P, D, ENDPOINT = "a" * 32, "b" * 32, "fake://p"
NAN_BITS = -1  # one float32, two of 16 bits, or four of 8
DEFAULTS = {"dtype": "float32", "page_size": 4, "max_context": 96}  # of both engines


def words_of(plane):
    """The bits of a plane's pages, `[pages, words]` int32; on a CPU torch takes ten times as long to compare
    them as numpy.
    """
    pages = plane.view(torch.uint8).view(plane.shape[0], -1)
    return pages.view(torch.int32) if plane.is_cuda else pages.numpy().view(np.int32)


class DirectLink:
    """WorkerLink without a thread: commands wait for the transport, the rest goes to the test's router."""

    def __init__(self):
        self.transport = None
        self.transport_counters = {}
        self.to_router = []
        self.events = []
        self.commands = []

    def hand_over(self) -> None:
        pass

    def post(self, item):
        if isinstance(item, Command):
            self.commands.append(item)
        elif not isinstance(item, Heartbeat):
            msgspec.msgpack.decode(msgspec.msgpack.encode(item), type=type(item))  # it fits the wire
            self.to_router.append(item)

    def perform(self, rng=None):
        """The link thread runs all commands, or as many as it gets before the scheduler thread runs again."""
        count = len(self.commands) if rng is None else rng.randrange(len(self.commands) + 1)
        due, self.commands = self.commands[:count], self.commands[count:]
        for command in due:
            self.do(command)

    def do(self, item):
        match item:
            case Offer():
                self.open(item, self.transport.offer, Dropped)
            case PullRequest():
                self.open(item, self.transport.pull, Lost)
            case Underway():
                self.transport.launched(item.room, item.epoch, item.start, item.tokens)
            case Advance():
                self.transport.advance(item.room, item.epoch, item.tokens_ready, item.first_token)
            case Drop():
                self.transport.release(item.room, item.epoch, item.reason)
                self.events.append(DropDone(room=item.room, epoch=item.epoch))

    def open(self, item, opening, event):
        try:
            opening(item)
        except LocalProtocolError as error:
            kind = {"kind": "LocalProtocolError"} if event is Lost else {}
            self.events.append(event(room=item.room, epoch=item.epoch, reason=str(error), **kind))

    def take(self):
        events, self.events = self.events + list(self.transport.turn()), []
        return events


def engine_of(settings, *, has_drafter):
    loader = EngineLoader(EngineConfig(**({"device": "cpu"} | DEFAULTS | settings)), has_drafter=has_drafter)
    for _, run in loader.phases():
        run()
    return loader.engine()


def layout(engine):
    return layout_of(
        engine.pool,
        model_fingerprint=engine.fingerprint,
        feature_ids=engine.feature_ids,
        feature_width=engine.feature_width,
        window_margin=engine.windows.margin,
    )


class Pair:
    """One prefill and one decode worker, and a router that only keeps books."""

    def __init__(
        self,
        model,
        draft="",
        *,
        pages=24,
        chunk_size=8,
        max_running=4,
        fault=None,
        captured=None,
        ours=None,
        theirs=None,
        slo_ttft_s=0.0,
        **settings,
    ):
        """`captured`: chunk_size and max_running that graphs are made for. `ours`, `theirs`: settings of the
        engine of prefill or decode alone.
        """
        self.clock = Clock(100.0)
        self.slo_ttft_s = slo_ttft_s
        self.network = FakeNetwork(fault)
        self.links = {P: DirectLink(), D: DirectLink()}
        self._common = (
            {"model": str(model), "pages": pages, "draft": str(draft)} | settings | (captured or {})
        )
        self._used, self._free = {}, {}
        p = engine_of(self._common | (ours or {}), has_drafter=False)
        self._note_windows(p)
        planes = planes_of(p.pool, p.features)
        self.links[P].transport = FakeSender(self.network, ENDPOINT, P, layout(p), planes, clock=self.clock)
        self.prefill = PrefillWorker(
            p,
            self.links[P],
            instance=P,
            chunk_size=chunk_size,
            max_batch=4,
            max_queue=64,
            slo_ttft_s=slo_ttft_s,
            clock=self.clock if slo_ttft_s else time.monotonic,
            embeds=embeds_inbox(p, is_on=True),
        )
        self.decodes = {}
        self.decode = self.add_decode(D, max_running=max_running, **(theirs or {}))
        self.refused = []
        self.tokens, self.ends, self.gone, self.epochs = {}, {}, {}, {}
        self.prefilled: dict[str, PrefillTimeline] = {}  # by room

    def add_decode(self, instance, *, max_running=4, **theirs):
        """One more decode worker beside the one prefill worker."""
        engine = engine_of(self._common | theirs, has_drafter=True)
        self._note_windows(engine)
        link = self.links[instance] = DirectLink()
        planes = planes_of(engine.pool, engine.features)
        link.transport = FakeReceiver(self.network, instance, layout(engine), planes, clock=self.clock)
        inbox = embeds_inbox(engine, is_on=True)
        self.decodes[instance] = DecodeWorker(
            engine,
            link,
            instance=instance,
            max_running=max_running,
            slo_ttft_s=self.slo_ttft_s,
            clock=self.clock if self.slo_ttft_s else time.monotonic,
            embeds=inbox,
        )
        return self.decodes[instance]

    def send(
        self,
        room,
        prompt_ids,
        epoch=0,
        *,
        is_local=False,
        shares=None,
        num_output=0,
        to=D,
        embeds=None,
        pull=None,
        wants_features=True,
        **sampling,
    ):
        """`is_local`: decode gets the prompt alone. `shares`: the room whose prompt decode shares. `to`: the
        decode worker. `embeds`: Embeddings of the first tokens. `pull`: what prefill gets from a decode
        worker."""
        is_local = is_local or shares is not None
        common = {
            "room": room,
            "epoch": epoch,
            "prompt_ids": list(prompt_ids),
            "num_output": num_output,
            "sampling": Sampling(
                **{"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 12, **sampling}
            ),
            "deadline_ms": 0,
            "embeds": embeds.rows if embeds else None,
        }
        where = {} if is_local else {"prefill_endpoint": ENDPOINT, "prefill_instance": P}
        reserve = Reserve(instance=to, shares=shares, **where, **common)
        prefill = Prefill(instance=P, pull=pull, wants_features=wants_features, **common)
        self.order(self.decodes[to], reserve, embeds)
        if pull is not None:
            self.decodes[pull.instance].handle(self.offer_of(pull, common), self.clock.now)
        if not is_local:
            self.order(self.prefill, prefill, embeds)

    def offer_of(self, pull, common):
        order = OfferPrefix(instance=pull.instance, transfer=pull.transfer, tokens=pull.tokens)
        if pull.is_reader:
            return msgspec.structs.replace(order, room=common["room"], epoch=common["epoch"])
        return msgspec.structs.replace(order, prompt_ids=common["prompt_ids"][: pull.tokens + 2])

    def order(self, worker, order, embeds):
        for part in embeds.parts_before(order) if embeds else ():
            worker.handle(part, self.clock.now)
        worker.handle(order, self.clock.now)

    def cancel(self, room):
        self.prefill.handle(Cancel(room=room, epoch=self.epochs.get(room, 0), instance=P), self.clock.now)
        self.decode.handle(Cancel(room=room, epoch=self.epochs.get(room, 0), instance=D), self.clock.now)

    def turn(self, rng=None):
        """One turn of each loop, in any order, with any part of the network's messages delivered."""
        workers = [(self.prefill, self.links[P])]
        workers += [(decode, self.links[instance]) for instance, decode in self.decodes.items()]
        if rng is not None:
            rng.shuffle(workers)
        for worker, link in workers:
            for _ in range(
                len(self.network.packets) if rng is None else rng.randrange(len(self.network.packets) + 1)
            ):
                if self.network.packets:
                    self.network.deliver()
            link.perform(rng)
            for event in link.take():
                worker.handle(event, self.clock.now)
            worker.expire(self.clock.now)
            worker.step()
            worker.engine.cache.check_integrity()
            self._poison(worker.engine)
        self.clock.now += 0.01
        self._read()

    def _poison(self, engine):
        """Free pages hold NaN: who reads one gets it, and who writes one is seen by the next turn."""
        if engine.pool.kv.is_cuda:
            torch.cuda.synchronize()  # steps run on a stream of their own
        planes = [engine.pool.kv] + ([] if engine.features is None else [engine.features.features])
        self._poison_free(engine.cache.allocator, [plane for plane in planes if plane.nbytes])
        if engine.windows.is_on:
            allocator = engine.windows.pages.allocator
            used = self._used.setdefault(id(allocator), set())
            self._poison_free(allocator, [engine.pool.part.kv], used)
            used.clear()

    def _note_windows(self, engine):
        """A window page may be taken, written and given up within one turn."""
        if engine.windows.is_on:
            allocator = engine.windows.pages.allocator
            used, alloc = self._used.setdefault(id(allocator), set()), allocator.alloc

            def noted(n):
                pages = alloc(n)
                used.update(pages)
                return pages

            allocator.alloc = noted

    def _poison_free(self, allocator, planes, used=frozenset()):
        """`used`: pages that had an owner since the last turn."""
        free = {page for page in range(1, allocator.num_pages) if allocator.refs(page) == 0}
        known = self._free.setdefault(id(allocator), set()) - used
        still, fresh = sorted(free & known), sorted(free - known)
        for plane in planes:
            words = words_of(plane)
            if still and not (words[still] == NAN_BITS).all():
                written = [page for page in still if not (words[page] == NAN_BITS).all()]
                raise AssertionError(f"pages {written} were written while they were free")
            if fresh:
                words[fresh] = NAN_BITS
        self._free[id(allocator)] = free

    def _read(self):
        for link in self.links.values():
            for message in link.to_router:
                if getattr(message, "epoch", 0) < self.epochs.get(getattr(message, "room", ""), 0):
                    continue  # of an attempt that the router has replaced
                match message:
                    case FirstToken():
                        assert message.room not in self.tokens
                        self.tokens[message.room] = [message.token]
                        self.prefilled[message.room] = message.timeline
                        if message.finish:
                            self.ends[message.room] = message.finish
                            for instance, decode in self.decodes.items():
                                decode.handle(
                                    Cancel(room=message.room, epoch=message.epoch, instance=instance),
                                    self.clock.now,
                                )
                    case Tokens():
                        for item in message.items:
                            if item.epoch < self.epochs.get(item.room, 0):
                                continue
                            known = (
                                self.tokens.setdefault(item.room, [])
                                if item.seq == 0
                                else self.tokens[item.room]
                            )
                            assert item.seq == len(known), "tokens are contiguous"
                            known += item.ids
                    case Finished() | Failed():
                        # Decode may report the hand-off of a request that ended with its first token as lost.
                        assert message.room not in self.ends or isinstance(message, Failed)
                        self.ends.setdefault(message.room, message)
                    case Refused():
                        self.refused.append(message)
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
        return not any(worker.num_rooms for worker in (self.prefill, *self.decodes.values()))

    def assert_nothing_is_held(self):
        for worker in (self.prefill, *self.decodes.values()):
            stats = worker.stats()
            assert stats.pages_free == stats.pages_total, worker
            assert stats.window_pages_free == stats.window_pages_total, worker
            worker.engine.cache.clear()
            assert worker.engine.cache.allocator.num_used == 0, worker
            windows = worker.engine.windows
            assert not windows.is_on or windows.pages.allocator.num_used == 0, windows
        for decode in self.decodes.values():
            assert not decode.decoder.coverage.known
            assert decode.engine.steps.step.state.num_open == 0
            drafter = decode.engine.drafter
            assert drafter is None or drafter.states.num_open == 0


def name(i):
    return f"{i:032x}"
