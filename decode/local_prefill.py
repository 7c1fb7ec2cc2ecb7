"""Prompts that decode computes itself, where no prefill worker is there to do it: the same engine, the same tokens.

A forward takes the next rows of the waiting prompts, oldest first, within a budget that bounds how long running streams
wait between two of their steps. The aux features go to the drafter at once, so nothing of them is kept, and the noise of
token 1 is that of its position: a prompt computed here, on prefill, or half here after a retry gives the same tokens.
"""

from collections.abc import Callable, Sequence

import torch

from ..cluster.messages import PromptLogprobs
from ..cluster.scores import prompt_logprobs
from ..engine.extend_batch import extend_batch
from ..engine.forward_batch import CaptureHidden, ForwardOutput
from ..engine.loader import Engine
from ..engine.prompt_logprobs import most_scored, scores_of
from ..engine.speculative.step.result import StepResult
from .queues import Room, RoomState
from .step_decoder import StepDecoder

IDLE_TOKENS = 512  # rows of a forward that keeps nobody waiting
Chunk = tuple[Room, int, int]  # prompt tokens [start, end) of a room


class LocalPrefill:
    """Computes the rooms in state PREFILLING; `budget` prompt tokens per forward while streams run."""

    def __init__(
        self,
        engine: Engine,
        decoder: StepDecoder,
        budget: int,
        clock: Callable[[], float],
        send: Callable[[PromptLogprobs], None],
        instance: str,
    ) -> None:
        self.engine = engine
        self.decoder = decoder
        self.budget = budget
        self._clock = clock
        self._send = send
        self._instance = instance

    def step(self, rooms: Sequence[Room], *, is_alone: bool) -> tuple[list[Room], StepResult]:
        """One forward over some of `rooms` (at least one). The rooms whose prompt is done, and their token 1."""
        started = self._clock()
        budget = max(self.budget, IDLE_TOKENS) if is_alone else self.budget
        chunks = _cut(rooms, budget, self.engine.model_config.vocab_size)
        output = self._forward(chunks)
        ended = [room for room, _, end in chunks if end == room.request.num_prompt]
        self._score(chunks, output.logits[len(ended) :])
        result = self._first_tokens(ended, output)
        self._draft(chunks, output)
        now = self._clock()
        for room, _, end in chunks:
            room.prefill_started = room.prefill_started or started
            room.prefill_ended = now
            room.chunks += 1
            room.warmed = room.landed = end
        for room in ended:
            room.state, room.landed_at, room.started_at = RoomState.RUNNING, now, now
        return ended, result

    def _forward(self, chunks: Sequence[Chunk]) -> ForwardOutput:
        engine = self.engine
        batch = extend_batch(
            [(room.request, start, end) for room, start, end in chunks],
            page_size=engine.page_size,
            device=engine.pool.device,
            capture=CaptureHidden.NULL if engine.drafter is None else CaptureHidden.FULL,
        )
        output = engine.runner.forward(batch)
        for room, _, end in chunks:
            room.request.num_computed = end
        return output

    def _score(self, chunks: Sequence[Chunk], logits: torch.Tensor) -> None:
        """Log probabilities of the prompts that ask for them, to the router before their token 1."""
        ranges = [(room.request, start, end) for room, start, end in chunks]
        for (request, start, _), scores in zip(ranges, scores_of(ranges, logits), strict=True):
            for message in prompt_logprobs(request.room, request.epoch, self._instance, start + 1, scores):
                self._send(message)

    def _first_tokens(self, rooms: Sequence[Room], output: ForwardOutput) -> StepResult:
        """Token 1 of each room, appended to its request."""
        sampler = self.engine.sampler
        rows = sampler.build([room.request.masked_row for room in rooms])
        sampled = sampler.sample(output.logits[: len(rooms)], rows)
        tokens, is_bad = sampled.tokens.tolist(), sampled.bad_rows.tolist()
        for room, token, bad in zip(rooms, tokens, is_bad, strict=True):
            if not bad:
                room.request.append([token], self.engine.model_config.eos_token_ids)
        return StepResult(
            tokens=[[] if bad else [token] for token, bad in zip(tokens, is_bad, strict=True)],
            logprobs=[
                sampled.token_logprobs(i, room.request.sampling.logprobs) for i, room in enumerate(rooms)
            ],
            accept_lens=[1] * len(rooms),
            drafted=[0] * len(rooms),
            is_bad=is_bad,
            path=output.path,
        )

    def _draft(self, chunks: Sequence[Chunk], output: ForwardOutput) -> None:
        """The draft rows of all chunks; row i needs the token at i+1, which a prompt that has ended badly lacks."""
        if output.hidden is None:
            return
        items, row = [], 0
        for room, start, end in chunks:
            rows = output.hidden[row : row + end - start]
            row += end - start
            if end < room.request.num_tokens:
                items.append((room.request, rows, start))
        self.decoder.draft_prefill_batch(items)


def _cut(rooms: Sequence[Room], budget: int, vocab_size: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    for room in rooms:
        start = room.request.num_computed
        before = [(other.request, first, last) for other, first, last in chunks]
        most = most_scored(room.request, vocab_size, before)
        end = min(room.request.num_prompt, start + (budget if most is None else min(budget, most)))
        budget -= end - start
        chunks.append((room, start, end))
        if budget <= 0:
            break
    return chunks
