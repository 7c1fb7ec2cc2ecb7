"""Runs every kind of forward once before an engine serves.

Libraries create their handles, load their kernels and take their workspaces at the first call of each kind.
torch takes memory from the device until its pool holds the largest forward. A rehearsal moves all of that
before the first request: prompts of every bucket, behind a prefix and side by side, every way to choose a
token, decode steps of small and full batches, and drafts.

The rehearsal writes into free pages of the KV pools and zeroes them afterwards.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from ..batch.extend_batch import extend_batch
from ..batch.forward_batch import CaptureHidden, ForwardOutput
from ..graphs.buckets import batch_buckets, token_buckets
from ..host_copy import to_device
from ..kv.page_table import pages_for
from ..kv.pool import FeaturePlane, KVPool
from ..kv.prefix_cache import PrefixCache
from ..models.config import ModelConfig
from ..prompt_logprobs import most_scored, scores_of
from ..request import Request
from ..request_windows import RequestWindows
from ..runner.model_runner import ModelRunner
from ..sampling.edits import ALL_ALLOWED
from ..sampling.params import SamplingParams
from ..sampling.sampler import Sampler
from ..speculative.drafters.protocol import MAX_PREFILL_ROWS, Drafter, draft_pools, reads_features
from ..speculative.drafting.shape import DraftShape
from ..speculative.step.async_decoder import AsyncDecoder
from ..speculative.step.device_state import PAD_SLOT
from ..speculative.step.fused_step import StepKind
from ..speculative.step.step_graphs import StepGraphs

logger = logging.getLogger(__name__)

Prompt = tuple[Request, int, int]  # the rows [start, end) of a request

PROMPT_TOKENS = 9  # of a request that only decodes
NEW_TOKENS = 3  # steps without drafts of such a request

# Every way to choose a token: likeliest, free, top-k, nucleus, a nucleus wider than ranked candidates, edits.
WAYS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, min_p=0.01),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=100.0, top_p=0.99),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.0, presence_penalty=0.5, logit_bias={1: 2.0, 5: -3.0}, min_new_tokens=3),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.3, logprobs=0),
)


def pieces(count: int, most: int) -> list[int]:
    """`count` rows as rows of several requests, of at most `most` rows each."""
    return [min(most, count - start) for start in range(0, count, most)]


class RehearsedEngine(Protocol):
    """The parts of an engine that a rehearsal uses."""

    runner: ModelRunner
    sampler: Sampler
    pool: KVPool
    features: FeaturePlane | None
    drafter: Drafter | None
    cache: PrefixCache
    windows: RequestWindows
    shape: DraftShape
    steps: StepGraphs | None
    max_context: int
    model_config: ModelConfig
    feature_ids: tuple[int, ...]

    def decoder(self) -> AsyncDecoder:
        """The decoder of the engine."""

    def place_windows(self) -> None:
        """Tells the device of changed window pages."""


@dataclass(frozen=True, kw_only=True)
class RehearsalSizes:
    """The largest forward over prompts, in rows and prompts, and the largest decode step, in requests."""

    prompt_rows: int
    max_prompts: int
    max_requests: int


class Rehearsal:
    """One rehearsal of `engine`, before it serves."""

    def __init__(self, engine: RehearsedEngine, sizes: RehearsalSizes) -> None:
        self.engine = engine
        self.sizes = sizes
        self.num_forwards = 0
        self._allocator = engine.cache.allocator
        self._last_page = 0
        self._num_requests = 0
        # What serving keeps of a forward until the next one is launched.
        self._unread: ForwardOutput | torch.Tensor | None = None

    @torch.no_grad()
    def run(self) -> None:
        """Runs everything; frees every page, slot and state row that it took."""
        try:
            self._prompts()
            if self.engine.steps is not None:
                self._decode()
        finally:
            self._clear()
        logger.info("%d forwards rehearsed", self.num_forwards)

    # --- prompts --------------------------------------------------------------------------------------------

    def _prompts(self) -> None:
        most, rows = self.sizes.max_prompts, self._fitting(self.sizes.prompt_rows)
        for count in token_buckets(self.sizes.prompt_rows):
            self._prompt_batch(pieces(count, rows))
        for count in sorted({1, min(17, rows), rows}):
            self._prompt_batch([count], prefix=self._fitting(rows + self.engine.pool.page_size) - count)
        prompts = min(most, rows)
        for lens in ([rows // prompts] * prompts, [1] * prompts, [min(2, rows), 1], [rows // 2 or 1, 1]):
            if sum(lens) <= rows:
                self._prompt_batch(lens)
        for params in WAYS:
            self._prompt_batch([1], params)
            self._prompt_batch([1] * prompts, params)
        self._prompt_batch([min(3, rows)], replace(WAYS[0], prompt_logprobs=2))
        self._prompt_batch([rows], replace(WAYS[0], prompt_logprobs=2))
        self._prompt_batch([1], WAYS[1], has_grammar=True)

    def _prompt_batch(
        self,
        lens: Sequence[int],
        params: SamplingParams = WAYS[0],
        *,
        prefix: int = 0,
        has_grammar: bool = False,
    ) -> None:
        """One forward over prompts of these lengths, each behind `prefix` tokens, and their first tokens."""
        vocab_size = self.engine.model_config.vocab_size
        if not self._has_room([prefix + count for count in lens], prefix):
            return
        requests = [self._request(prefix + count, params, prefix) for count in lens]
        try:
            parts: list[Prompt] = []
            for request in requests:
                limit = most_scored(request, vocab_size, parts)
                start = prefix if limit is None else max(request.num_prompt - limit, 0)
                parts.append((request, start, request.num_prompt))
            output = self._forward(parts)
            rows = [request.sampling_row for request in requests]
            if has_grammar:
                mask = np.full(-(-vocab_size // 32), ALL_ALLOWED, dtype=np.int32)
                mask[0] = ~1
                rows = [replace(row, mask=mask) for row in rows]
            sampler, logits = self.engine.sampler, output.logits[: len(rows)]
            launched = sampler.launch(logits, rows)
            exact = sampler.sample(logits, sampler.build(rows))  # the choice for rows that stay unseen
            for sampled in (launched.read(), exact):
                sampled.tokens.tolist()
                sampled.token_logprobs(0, params.logprobs)
            scores_of(parts, output.logits[len(rows) :])
        finally:
            self._release(requests)

    def _forward(self, parts: Sequence[Prompt]) -> ForwardOutput:
        engine = self.engine
        has_features = engine.features is not None or reads_features(engine.drafter)
        batch = extend_batch(
            parts,
            page_size=engine.pool.page_size,
            device=engine.pool.device,
            capture=CaptureHidden.FULL if has_features else CaptureHidden.NULL,
        )
        engine.place_windows()
        output = engine.runner.forward(batch)
        if engine.features is not None and output.hidden is not None:
            engine.features.store(batch.slots, output.hidden)
        self._unread = output if reads_features(engine.drafter) else output.logits
        self.num_forwards += 1
        return output

    # --- decode ---------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        engine = self.engine
        decoder, most = engine.decoder(), self.sizes.max_requests
        if engine.drafter is not None and reads_features(engine.drafter):
            self._draft_prompts(decoder, engine.drafter)
        decoder.policy = None  # this chooses the shapes itself, and leaves the policy's averages alone
        for shape in dict.fromkeys((decoder.shape, *(kind.shape for kind in decoder.steps.kinds))):
            ways = WAYS if shape == decoder.shape else WAYS[:1]
            decoder.shape = shape
            for params in ways:
                for count in sorted({1, min(2, most), most}):
                    self._steps(decoder, count, params)
            self._guided_step(decoder)
        for count in batch_buckets(most) if decoder.steps.late_rows else ():
            decoder.steps.catch_up((PAD_SLOT,) * count)
            self.num_forwards += 1

    def _draft_prompts(self, decoder: AsyncDecoder, drafter: Drafter) -> None:
        limit = min(self._fitting(MAX_PREFILL_ROWS), drafter.max_context)
        for count in token_buckets(MAX_PREFILL_ROWS):
            self._draft(decoder, pieces(count, limit))
        # No more requests than planned: the drafter's states would move, and no graph could run again.
        most = min(limit, self.sizes.max_requests)
        for lens in ([min(2, limit), 1], [1] * most, [limit // 2 or 1, limit - limit // 2]):
            if sum(lens) <= limit:
                self._draft(decoder, lens)

    def _draft(self, decoder: AsyncDecoder, lens: Sequence[int]) -> None:
        if len(lens) > self.sizes.max_requests or not self._has_room(lens):
            return
        requests = [self._request(count, WAYS[0]) for count in lens]
        try:
            self._begin(decoder, requests)
        finally:
            self._end(decoder, requests)

    def _begin(self, decoder: AsyncDecoder, requests: Sequence[Request]) -> None:
        """Gives every request its first token and its drafts, as a hand-off does."""
        drafter, pool = self.engine.drafter, self.engine.pool
        for request in requests:
            request.num_computed = request.num_prompt
            request.append([1], ())
        if drafter is None or not reads_features(drafter):
            return
        width = drafter.feature_width
        items = [
            (request, torch.zeros((request.num_prompt, width), dtype=pool.row_dtype, device=pool.device), 0)
            for request in requests
        ]
        decoder.draft_prefill_batch(items)
        self.num_forwards += 1

    def _steps(self, decoder: AsyncDecoder, count: int, params: SamplingParams) -> None:
        """Steps of `count` requests to their end; some leave early, so the batch shrinks."""
        requests: list[Request] = []
        try:
            tokens = self._fitting(PROMPT_TOKENS)
            while len(requests) < count and self._has_room([tokens]):
                requests.append(self._request(tokens, params))
            for start in range(0, len(requests), MAX_PREFILL_ROWS // PROMPT_TOKENS):
                self._begin(decoder, requests[start : start + MAX_PREFILL_ROWS // PROMPT_TOKENS])
            while live := [request for request in requests if not request.is_finished]:
                decoder.step(live)
                self.num_forwards += 1
                for request in live[1 : len(live) // 2]:  # these are cancelled
                    request.finish_reason = request.finish_reason or "cancelled"
        finally:
            self._end(decoder, requests)

    def _guided_step(self, decoder: AsyncDecoder) -> None:
        """A step whose grammar masks the host fills in, of the idle request that pads batches."""

        def fill(drafts: torch.Tensor, parents: torch.Tensor | None, masks: torch.Tensor) -> None:
            drafts.tolist()
            where = to_device(torch.zeros(1, dtype=torch.int64), masks.device)
            masks.index_copy_(0, where, torch.full_like(masks[:1], ALL_ALLOWED))

        kind = StepKind(shape=decoder.shape, is_ranked=True, is_edited=True, num_top=0)
        report, _ = decoder.steps.launch((PAD_SLOT,), kind, fill)
        report.rows()
        self.num_forwards += 1

    def _end(self, decoder: AsyncDecoder, requests: Sequence[Request]) -> None:
        for request in requests:
            decoder.forget(request)
        self._release(requests)

    # --- requests -------------------------------------------------------------------------------------------

    @property
    def _longest(self) -> int:
        """Tokens of the longest prompt that one request may have."""
        spare = NEW_TOKENS + self.engine.shape.spare_slots
        held = self._allocator.num_free * self.engine.pool.page_size
        return max(1, min(self.engine.max_context, held) - spare)

    def _fitting(self, tokens: int) -> int:
        """`tokens`, or as many as one prompt may have here."""
        return max(1, min(tokens, self._longest))

    def _has_room(self, lens: Sequence[int], prefix: int = 0) -> bool:
        """Whether requests with prompts of `lens` tokens, which are written from `prefix` on, fit into the
        context and the free pages.
        """
        windows = self.engine.windows
        if windows.is_on:
            wanted = sum(self._pages(count) - windows.pages.first_page(prefix) for count in lens)
            if wanted > windows.pages.num_available:
                return False
        return max(lens) <= self._longest and sum(map(self._pages, lens)) <= self._allocator.num_free

    def _pages(self, tokens: int) -> int:
        return pages_for(tokens + NEW_TOKENS + self.engine.shape.spare_slots, self.engine.pool.page_size)

    def _request(self, num_tokens: int, params: SamplingParams, prefix: int = 0) -> Request:
        """A request with pages, whose prompt is made of few tokens and written from `prefix` on."""
        self._num_requests += 1
        request = Request(
            room=f"{self._num_requests:032x}",
            epoch=0,
            prompt_ids=[1 + i % 3 for i in range(num_tokens)],
            sampling=replace(params, max_new_tokens=1 + NEW_TOKENS, ignore_eos=True, seed=self._num_requests),
        )
        request.pages = self._allocator.alloc(self._pages(num_tokens))
        self._last_page = max(self._last_page, *request.pages)
        self.engine.windows.take(request, prefix)
        return request

    def _release(self, requests: Sequence[Request]) -> None:
        for request in reversed(requests):  # the free pages keep their order
            self.engine.windows.release(request)
            self._allocator.release(reversed(request.pages))
            request.pages = []

    def _clear(self) -> None:
        self._unread = None
        self.engine.place_windows()
        engine, end = self.engine, self._last_page + 1
        for memory in engine.pool.memory_of(end):
            memory.zero_()
        if engine.features is not None:
            engine.features.features[1:end].zero_()
        for draft_pool in draft_pools(engine.drafter):
            draft_pool.kv[1:end].zero_()
        if engine.drafter is not None:
            for values in engine.drafter.anchors:
                values.zero_()
