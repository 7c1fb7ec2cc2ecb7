"""Production's router and decode worker around a KV pool, with answers of known lengths, in virtual time.

Nothing is computed: a forward takes the device some time, and an answer ends at the length that was drawn for
it. What is measured is what pages are worth: how many requests run at once, and how often their pages are
taken back. The worker computes the prompts itself.
"""

import math
from collections import Counter, deque
from pathlib import Path
from random import Random
from types import SimpleNamespace

import torch
from baton.cluster.protocol.codec import control_down_decoder
from baton.cluster.protocol.messages import Cancel, Heartbeat, Hello, Reserve, Sampling
from baton.decode.page_growth import AHEAD_TOKENS
from baton.decode.worker import DecodeWorker
from baton.engine.batch.forward_batch import ForwardOutput
from baton.engine.engine import Engine
from baton.engine.grammar.guided import GrammarCompiler
from baton.engine.kv.layouts import MHALayout
from baton.engine.kv.pool import KVPool, PageAllocator
from baton.engine.kv.prefix_cache import PrefixCache
from baton.engine.request_windows import RequestWindows
from baton.engine.runner.lifecycle import Lifecycle
from baton.engine.sampling.sampler import SampleOutput
from baton.engine.speculative.drafting.shape import DraftShape
from baton.engine.speculative.step.result import StepResult
from baton.router.rooms.effects import Deliver, Ended, Failure, Timeouts
from baton.router.scheduling.dispatcher import Dispatcher
from baton.router.scheduling.inbox import Inbox
from baton.router.scheduling.request_state import Job
from baton.router.workers.registry import Registry
from baton.tests.sim.cluster_clients import read_inbox
from baton.tests.sim.cluster_nodes import QuietMetrics
from baton.tests.sim.draws import hex_id
from baton.worker.main_loop import SOON_S

PAGE, CONTEXT, VOCAB, EOS = 16, 20_000, 1000, 1
STEP_S, SEAT_S = 0.004, 0.00002  # of a model of 1B to 8B on an H200: a step reads the weights
LAUNCH_S, TOKEN_S = 0.002, 0.00001
BEAT_S, TICK_S = 0.3, 0.1
STEP = DraftShape.of(0)


class PoolWorld:
    """`pages` of 16 tokens. `lengths`: of the answers, in the order in which clients ask for them.

    `grows`: pages come as tokens come. `knows`: clients ask for exactly as many tokens as they get.
    """

    def __init__(
        self, lengths, *, pages, width, grows=True, knows=False, prompt=256, max_tokens=16_384, places=128,
        seed=0, priorities=(0,),
    ):  # fmt: skip
        self.now, self.rng = 0.0, Random(seed)
        self.lengths, self.prompt, self.width = list(lengths), prompt, width
        self.max_tokens, self.knows, self.priorities = max_tokens, knows, priorities
        self.numbers = iter(range(len(self.lengths)))
        self.stem = [3 + i % 900 for i in range(prompt)]
        self.instance, self.identity = "b" * 32, b"d"
        self.orders, self._decoder = deque(), control_down_decoder()
        self.dispatcher = Dispatcher(
            Registry("a" * 32, 1000.0), self._transmit, lambda: self.now, QuietMetrics(), max_queue=10_000,
            queue_timeout_s=1e6, timeouts=Timeouts(reserve_s=1e6, first_token_s=1e6, token_s=1e6),
            mint=lambda: hex_id(self.rng),
        )  # fmt: skip
        self.engine = self._engine(pages)
        self.worker = DecodeWorker(
            self.engine, self, instance=self.instance, max_running=places, local_prefill_tokens=2048,
            decoder=Decoder(self), clock=lambda: self.now, grows=grows,
        )  # fmt: skip
        self._tell(
            Hello(
                role="decode", instance=self.instance, protocol=1, fingerprint="f" * 64, model="m",
                pages_total=pages, page_size=PAGE, max_context=CONTEXT, max_running=places,
                vocab_size=VOCAB, local_prefill=True, aggregated=True, grows=grows, preempts=grows,
                ahead_tokens=AHEAD_TOKENS, spec_tokens=STEP.spare_slots,
            )
        )  # fmt: skip
        self._tell(Heartbeat(instance=self.instance, stats=self.worker.stats()))
        self.beat_at = self.soon_at = self.tick_at = 0.0
        self.clients = [self.ask() for _ in range(width)]
        self.ended, self.failures, self.answers = [], [], {}
        self.running, self.used, self.waits = [], [], {}  # at each step; seconds of each answer

    def _engine(self, pages):
        layout = MHALayout(page_size=PAGE, num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
        cache = PrefixCache(PageAllocator(pages + 1), PAGE, False)
        return Engine(
            path=Path("none"), fingerprint="none",
            model_config=SimpleNamespace(vocab_size=VOCAB, eos_token_ids=(EOS,)), model=None,
            draft_config=None, runner=Runner(self), sampler=Sampler(self), pool=KVPool(pages + 1, layout),
            features=None, drafter=None, cache=cache, windows=RequestWindows(cache, margin=1),
            max_context=CONTEXT, sizes=None, lifecycle=Lifecycle(),
            grammars=GrammarCompiler(Path(), VOCAB, frozenset((EOS,))), shape=STEP,
        )  # fmt: skip

    # --- a link without a wire ------------------------------------------------------------------------------

    transport_counters: dict = {}  # noqa: RUF012

    def hand_over(self):
        """Nobody waits."""

    def post(self, item):
        self._tell(item)

    def _tell(self, message):
        self.dispatcher.on_message(self.identity, message)

    def _transmit(self, identity, frame):
        self.orders.append(self._decoder.decode(frame))
        return True

    def token(self, seed, position):
        """The token at `position` of request `seed`: the end after as many tokens as were drawn."""
        return EOS if position >= self.prompt + self.lengths[seed] - 1 else 7

    # --- clients --------------------------------------------------------------------------------------------

    def ask(self):
        number = next(self.numbers, None)
        if number is None:
            return None
        inbox = Inbox(lambda: self.now)
        limit = self.lengths[number] if self.knows else self.max_tokens
        job = Job(
            prompt_ids=list(self.stem),
            sampling=Sampling(max_new_tokens=limit, seed=number),
            arrived=self.now,
            tokenize_s=0.0,
            priority=self.priorities[number % len(self.priorities)],
        )
        [entry] = self.dispatcher.submit([job], inbox)
        return SimpleNamespace(inbox=inbox, entry=entry, number=number, asked_at=self.now, tokens=0)

    def read(self):
        for place, client in enumerate(self.clients):
            if client is None or not client.inbox._events:
                continue
            for _, event in read_inbox(client.inbox):
                if isinstance(event, Deliver):
                    client.tokens += len(event.ids)
                elif isinstance(event, (Ended, Failure)):
                    (self.ended if isinstance(event, Ended) else self.failures).append((self.now, client))
                    self.answers[client.number] = client.tokens
                    self.waits[client.number] = self.now - client.asked_at
                    self.clients[place] = self.ask()

    # --- the run --------------------------------------------------------------------------------------------

    def run(self):
        """Until every answer is there."""
        while any(self.clients) or self.worker.num_rooms:
            if self.now >= self.beat_at or (self.worker.wants_beat and self.now >= self.soon_at):
                self.beat_at, self.soon_at = self.now + BEAT_S, self.now + SOON_S
                self.worker.wants_beat = False
                self._tell(Heartbeat(instance=self.instance, stats=self.worker.stats()))
            if self.now >= self.tick_at:
                self.tick_at = self.now + TICK_S
                self.dispatcher.tick()
            while self.orders:
                order = self.orders.popleft()
                if isinstance(order, (Reserve, Cancel)):
                    self.worker.handle(order, self.now)
            before = self.now
            self.worker.step()
            self.running.append((self.now, self.worker.stats().running))
            self.used.append((self.now, 1 - self.engine.cache.num_available / self.engine.num_pages))
            self.read()
            if self.now == before:
                self.now += 0.001
        self.engine.cache.check_integrity()
        return self

    @property
    def steady(self):
        """From the end of as many answers as there are clients, to the last question."""
        ends = [at for at, _ in self.ended]
        return ends[min(self.width, len(ends)) - 1], max(client.asked_at for _, client in self.ended)

    @property
    def tokens_per_s(self):
        """In the steady time: tokens of the steps by their time."""
        start, end = self.steady
        return sum(count for at, count in self.running if start <= at < end) / (end - start)

    def mean(self, noted):
        start, end = self.steady
        found = [value for at, value in noted if start <= at < end]
        return sum(found) / max(1, len(found))

    @property
    def counters(self):
        return self.worker.stats().counters


class Runner:
    routed_experts = None

    def __init__(self, world):
        self.world = world
        self.routed_experts = None

    def forward(self, batch):
        self.world.now += LAUNCH_S + TOKEN_S * batch.num_tokens
        num_rows = batch.num_tokens if batch.logit_rows is None else len(batch.logit_rows)
        return ForwardOutput(path="none", logits=torch.zeros(num_rows, 1))


class Sampler:
    """Token 1 of a prompt, by the length of its answer."""

    def __init__(self, world):
        self.world = world

    def launch(self, logits, rows):
        tokens = [self.world.token(row.params.seed, row.position) for row in rows]
        made = SampleOutput(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            bad_rows=torch.zeros(len(tokens), dtype=torch.bool),
            unseen_rows=torch.zeros(len(tokens), dtype=torch.bool),
        )
        return SimpleNamespace(read=lambda: made)


class Decoder:
    """A token of each request in every step."""

    def __init__(self, world):
        self.world = world

    def step(self, requests):
        self.world.now += STEP_S + SEAT_S * len(requests)
        tokens = []
        for request in requests:
            token = self.world.token(request.sampling.seed, request.num_tokens)
            request.append([token], (EOS,))
            request.num_computed = request.num_tokens - 1
            tokens.append([token])
        nothing, counts = [[] for _ in tokens], [1] * len(tokens)
        return StepResult(
            tokens=tokens, logprobs=nothing, accept_lens=counts, drafted=[0] * len(counts),
            is_bad=[False] * len(counts), path="none",
        )  # fmt: skip

    def num_covered(self, request):
        return request.num_computed

    def grow(self, grown):
        """Nothing lies on a device."""

    def forget(self, request):
        """Nothing is kept."""


def geometric(rng, count, mean):
    """Lengths that end with the same chance at every token."""
    return [max(1, math.ceil(math.log(1 - rng.random()) / math.log(1 - 1 / mean))) for _ in range(count)]


def in_blocks(rng, count, mean, *, block, longer):
    """As `geometric`, with `longer` more tokens in every second block of requests."""
    drawn = geometric(rng, count, mean)
    return [length + longer * (number // block % 2) for number, length in enumerate(drawn)]


def retractions(world):
    """By reason."""
    names = ("retractions_full_pool", "retractions_urgent_pages", "retractions_urgent_place")
    return Counter({name: int(world.counters[name]) for name in names})
