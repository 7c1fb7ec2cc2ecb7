"""A model that betrays every wrong byte, in place of the neural forward of a simulated cluster.

The KV row of a token is a function of the token and of the row before it, different in every layer. The next
token is a hash of all KV bytes of the sequence and of the position. A lost, stale, reordered, cut or foreign
block thus changes the text. A page is filled with a pattern when it is freed, and must still hold it when it
is given out again: who reads a free page gets nonsense, and who writes one is found out.
"""

from collections import deque
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import torch
from baton.engine.batch.forward_batch import ForwardOutput
from baton.engine.engine import Engine
from baton.engine.grammar.guided import GrammarCompiler
from baton.engine.kv.layouts import MHALayout
from baton.engine.kv.pool import FeaturePlane, KVPool, PageAllocator
from baton.engine.kv.prefix_cache import PrefixCache
from baton.engine.request_windows import RequestWindows
from baton.engine.runner.lifecycle import Lifecycle
from baton.engine.sampling.sampler import SampleOutput
from baton.engine.speculative.drafting.shape import DraftShape
from baton.engine.speculative.step.result import StepResult
from crc32c import crc32c

VOCAB = 9973
EOS = frozenset(range(200))
PAGE_SIZE = 4
PLANES = 4  # 2 layers, K and V
MASK = 0xFFFFFFFF
MAX_CONTEXT = 96
LONGEST_OUTPUT = 32
NUM_PROMPTS = 48
FREE = 0xDEADBEEF
STEPS = DraftShape.of(2)  # a step commits up to three tokens
WIDTH = 2  # elements of a token's features, where there are any


def mix(*values):
    """A 32-bit hash of small integers."""
    h = 0x9E3779B9
    for value in values:
        h = ((h ^ value) * 0x85EBCA6B + 0xC2B2AE35) & MASK
        h ^= h >> 15
    return h


@cache
def factors(head_dim):
    """The factor of a token's hash for each word of its row `[PLANES, head_dim]`: odd; the first is 1."""
    words = np.random.default_rng(head_dim).integers(0, 1 << 31, (PLANES, head_dim), dtype=np.uint32) * 2 + 1
    words[0, 0] = 1
    return words.astype(np.uint32)


class Memory:
    """The toy's view of a pool: words `[pages, PLANES, PAGE_SIZE, head_dim]` uint32."""

    def __init__(self, pool, weights=17):
        self.weights = weights  # of the model: another number, other rows
        self.head_dim = pool.kv.shape[-1]
        self.words = pool.kv.numpy().view(np.uint32).reshape(pool.num_pages, PLANES, PAGE_SIZE, self.head_dim)

    def write(self, pages, start, tokens):
        """The KV of `tokens`, which stand at `start` of a sequence that lies in `pages`."""
        last = start - 1
        h = self.weights if start == 0 else int(self.words[pages[last // PAGE_SIZE], 0, last % PAGE_SIZE, 0])
        hashes = []
        for token in tokens:
            h = mix(h, token)
            hashes.append(h)
        if len(hashes) == 1:
            self.words[pages[start // PAGE_SIZE], :, start % PAGE_SIZE] = factors(self.head_dim) * np.uint32(
                h
            )
            return
        rows = np.array(hashes, dtype=np.uint32)[:, None, None] * factors(self.head_dim)
        at = np.arange(start, start + len(hashes))
        self.words[np.array(pages)[at // PAGE_SIZE], :, at % PAGE_SIZE] = rows

    def features(self, pages, start, end):
        """The features `[end - start, WIDTH]` of tokens that stand in `pages`: two parts of their hashes."""
        at = np.arange(start, end)
        hashes = self.words[np.array(pages)[at // PAGE_SIZE], 0, at % PAGE_SIZE, 0].astype(np.int64)
        return torch.from_numpy(np.stack((hashes >> 10, hashes & 0xFFFFF), axis=1)).float()

    def digest(self, pages, num_tokens):
        """A hash of the KV of the first `num_tokens` tokens."""
        full, rest = divmod(num_tokens, PAGE_SIZE)
        digest = crc32c(self.words[pages[:full]].tobytes()) if full else 0
        return crc32c(self.words[pages[full], :, :rest].tobytes(), digest) if rest else digest


def choose(digest, position, seed):
    return mix(digest, position, seed) % VOCAB


class WatchedAllocator(PageAllocator):
    """Marks pages when they are freed and looks at the mark when they are given out."""

    def __init__(self, num_pages, memory):
        super().__init__(num_pages)
        self._memory = memory
        self.plane = None  # of features
        self.num_corrupted = 0  # pages that were written while they were free
        memory.words[:] = FREE

    def alloc(self, n):
        pages = super().alloc(n)
        self.num_corrupted += (
            n - int((self._memory.words[pages] == FREE).all(axis=(1, 2, 3)).sum()) if n else 0
        )
        return pages

    def release(self, pages, *, is_used=True):
        pages = list(pages)
        super().release(pages, is_used=is_used)
        freed = [page for page in pages if not self.refs(page)]
        if freed:
            self._memory.words[freed] = FREE
            if self.plane is not None:
                self.plane.features[freed] = float("nan")

    def check_free_pages(self):
        """Whether nothing was written to the pages that are free now."""
        free = [page for page in range(1, self.num_pages) if not self.refs(page)]
        return not self.num_corrupted and bool((self._memory.words[free] == FREE).all())


def layout_of_toy(head_dim):
    return MHALayout(
        page_size=PAGE_SIZE, num_layers=2, num_kv_heads=1, head_dim=head_dim, dtype=torch.float32
    )


def toy_engine(
    num_pages, head_dim, *, is_caching, lookahead=0, weights=17, is_late=False, offers=False, reads=False
):
    """Production's engine around the toy, with `num_pages` pages of `64 * head_dim` bytes.

    `is_late`: forwards of prompts wait for `ToyRunner.finish`, or for the next one's. `offers`: prefill keeps
    features. `reads`: decode looks at them, as a drafter would; nobody really drafts.
    """
    pool = KVPool(num_pages + 1, layout_of_toy(head_dim))
    memory = Memory(pool, weights)
    allocator = WatchedAllocator(num_pages + 1, memory)
    cache = PrefixCache(allocator, PAGE_SIZE, is_caching, lookahead=lookahead)
    if offers:
        allocator.plane = FeaturePlane(num_pages + 1, PAGE_SIZE, WIDTH, torch.float32)
    return Engine(
        path=Path("toy"),
        fingerprint="toy",
        model_config=SimpleNamespace(vocab_size=VOCAB, eos_token_ids=tuple(EOS), hidden_size=WIDTH),
        model=None,
        draft_config=None,
        runner=ToyRunner(memory, is_late),
        sampler=ToySampler(),
        pool=pool,
        features=allocator.plane,
        drafter=SimpleNamespace(feature_width=WIDTH, pool=None, lookahead=lookahead) if reads else None,
        feature_ids=(1,) if offers or reads else (),
        cache=cache,
        windows=RequestWindows(cache, margin=1),
        max_context=MAX_CONTEXT,
        sizes=None,
        lifecycle=Lifecycle(),
        grammars=GrammarCompiler(Path(), VOCAB, EOS),
        launches_ahead=is_late,
        shape=STEPS,
    )


class ToyRunner:
    """The forward of prompt chunks: `logits` `[R, 1]` int64 are hashes that the sampler maps to tokens."""

    def __init__(self, memory, is_late=False):
        self.memory = memory
        self.is_late = is_late
        self.routed_experts = None
        self._waiting = deque()  # (output, the forward that fills its logits)

    def forward(self, batch):
        ids = batch.input_ids.tolist()
        wanted = list(range(len(ids)) if batch.logit_rows is None else batch.logit_rows.tolist())
        logits, hidden = torch.zeros((len(wanted), 1), dtype=torch.int64), torch.zeros((len(ids), WIDTH))
        output = ForwardOutput(path="toy", logits=logits, hidden=hidden)
        self._waiting.append((output, lambda: self._run(batch, ids, wanted, output)))
        if not self.is_late:
            self.finish(output)
        return output

    def finish(self, output):
        """Runs all forwards up to this one, which is not done yet."""
        done = None
        while done is not output:
            done, run = self._waiting.popleft()
            run()

    def _run(self, batch, ids, wanted, output):
        digests, row = [], 0
        for pages, count, end in zip(batch.page_table.tolist(), batch.q_lens, batch.kv_lens, strict=True):
            self.memory.write(pages, end - count, ids[row : row + count])
            output.hidden[row : row + count] = self.memory.features(pages, end - count, end)
            row += count
            if row - 1 in wanted:
                digests.append(self.memory.digest(pages, end))
        output.logits[:, 0] = torch.tensor(digests, dtype=torch.int64)


class ToySampler:
    def build(self, rows):
        return rows

    def launch(self, logits, rows):
        return SimpleNamespace(read=lambda: self.sample(logits, rows))

    def sample(self, logits, rows):
        digests = logits[:, 0].tolist()
        tokens = [choose(d, row.position, row.params.seed) for d, row in zip(digests, rows, strict=True)]
        return SampleOutput(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            bad_rows=torch.zeros(len(tokens), dtype=torch.bool),
            unseen_rows=torch.zeros(len(tokens), dtype=torch.bool),
        )


class ToyDecoder:
    """Commits one to three tokens per request and step, as verified drafts would."""

    def __init__(self, memory):
        self.memory = memory

    def step(self, requests):
        tokens = [self._advance(request) for request in requests]
        nothing = [[] for _ in requests]
        counts = [len(new) for new in tokens]
        return StepResult(
            tokens=tokens, logprobs=nothing, accept_lens=counts, drafted=[0] * len(counts),
            is_bad=[False] * len(counts), path="toy",
        )  # fmt: skip

    def _advance(self, request):
        new = []
        wanted = 1 + mix(request.num_tokens, request.sampling.seed) % 3
        while len(new) < wanted and not request.is_finished:
            position = request.num_tokens
            self.memory.write(request.pages, position - 1, [request.bonus_token])
            token = choose(self.memory.digest(request.pages, position), position, request.sampling.seed)
            request.append([token], EOS)
            request.num_computed = request.num_tokens - 1
            new.append(token)
        return new

    def draft_prefill_batch(self, items):
        """Looks at the features as a drafter would read them."""
        for request, rows, start in items:
            wanted = self.memory.features(request.pages, start, start + len(rows))
            assert torch.equal(rows, wanted), f"features of {request} from {start} on are of no forward"

    def num_covered(self, request):
        return request.num_computed

    def grow(self, grown):
        """The requests' own pages are read."""

    def forget(self, request):
        """Nothing is kept."""


class ToyAheadDecoder(ToyDecoder):
    """The same tokens in steps that are launched ahead and run as late as possible: when they are read."""

    counters: ClassVar[dict] = {}

    def __init__(self, memory):
        super().__init__(memory)
        self._on_device = {}
        self._waiting = deque()

    def can_launch(self, requests):
        return all(request.sampling.seed % 11 for request in requests)

    def launch(self, requests):
        for request in requests:
            if request not in self._on_device:
                self._on_device[request] = ToySlot(request)
        flight = ToyFlight(list(requests), [self._on_device[request] for request in requests])
        self._waiting.append(flight)
        return flight

    def read(self, flight, is_live):
        assert self._waiting.popleft() is flight, "the oldest is read first"
        made = [slot.advance(self.memory) for slot in flight.slots]
        tokens = []
        for request, new, live in zip(flight.requests, made, is_live, strict=True):
            if live:
                tokens.append(new[: request.append(new, EOS)])
                request.num_computed = request.num_tokens - 1
        counts = [len(new) for new in tokens]
        return StepResult(
            tokens=tokens, logprobs=[[] for _ in counts], accept_lens=counts, drafted=[0] * len(counts),
            is_bad=[False] * len(counts), path="toy",
        )  # fmt: skip

    def step(self, requests):
        assert not self._waiting, "the host steps when nothing is under way"
        self._on_device = {
            request: slot for request, slot in self._on_device.items() if request not in requests
        }
        return super().step(requests)

    def grow(self, grown):
        for request, start in grown:
            if request in self._on_device:
                slot = self._on_device[request]
                assert len(slot.pages) == start, "pages come one group behind the other"
                slot.pages += request.pages[start:]

    def forget(self, request):
        assert not any(request in flight.requests for flight in self._waiting), "a step under way has it"
        self._on_device.pop(request, None)


class ToySlot:
    """What the device knows of a request: all but where it ends by itself."""

    def __init__(self, request):
        self.pages, self.seed = list(request.pages), request.sampling.seed
        self.newest, self.length, self.remaining = (
            request.bonus_token,
            request.num_tokens - 1,
            request.num_remaining,
        )

    def advance(self, memory):
        new = []
        wanted = 1 + mix(self.length + 1, self.seed) % 3
        while len(new) < min(wanted, self.remaining):
            position = self.length + 1
            memory.write(self.pages, position - 1, [self.newest])
            self.newest = choose(memory.digest(self.pages, position), position, self.seed)
            self.length = position
            new.append(self.newest)
        self.remaining -= len(new)
        return new


@dataclass
class ToyFlight:
    requests: list
    slots: list


# --- what clients ask, and what they must get ---------------------------------------------------------------


@cache
def prompts():
    """Prompts of 1 to 44 tokens, most of which share a beginning with others."""
    rng = Random(20)
    stems = [[rng.randrange(VOCAB) for _ in range(n)] for n in (6, 11, 16, 24)]
    made = []
    for i in range(NUM_PROMPTS):
        tail = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 4, 9, 20)))]
        made.append(tuple((stems[i % 5] if i % 5 < 4 else []) + tail))
    return tuple(made)


@lru_cache(maxsize=4096)
def continuation(head_dim, prompt, seed):
    """The LONGEST_OUTPUT tokens that follow the prompt when nothing fails."""
    ids = list(prompt)
    num_pages = (len(ids) + LONGEST_OUTPUT) // PAGE_SIZE + 1
    memory = Memory(KVPool(num_pages + 1, layout_of_toy(head_dim)))
    pages = list(range(1, num_pages + 1))
    memory.write(pages, 0, ids)
    out = []
    while len(out) < LONGEST_OUTPUT:
        position = len(ids) + len(out)
        out.append(choose(memory.digest(pages, position), position, seed))
        memory.write(pages, position, out[-1:])
    return tuple(out)


def expected(head_dim, prompt, sampling):
    """(tokens, finish reason) of a request for the ids `prompt` that nothing disturbs."""
    out = list(continuation(head_dim, prompt, sampling.seed)[: sampling.max_new_tokens])
    if not sampling.ignore_eos:
        for i, token in enumerate(out):
            if token in EOS:
                return out[: i + 1], "stop"
    return out, "length"
