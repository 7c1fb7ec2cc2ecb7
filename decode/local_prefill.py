"""Prompts that decode computes itself where no prefill worker does: the same engine, the same tokens.

A forward takes the next rows of the waiting prompts, oldest first, within a budget that bounds how long
running streams wait between two of their steps. The aux features go to the drafter at once, so none are kept.
The noise of token 1 depends on its position only: a prompt computed here, on prefill, or half here after a
retry gives the same tokens.
"""

from collections.abc import Callable, Sequence

from ..cluster.protocol.messages import PromptLogprobs
from ..engine.batch.forward_batch import ForwardOutput
from ..engine.loader import Engine
from ..engine.speculative.step.result import StepResult
from ..worker.prompt_chunks import (
    Chunk,
    batch_of,
    sample_first_tokens,
    score_prompts,
    scored_limit,
)
from .queues import DecodeRoom, DecodeState
from .step_decoder import StepDecoder

IDLE_TOKENS = 512  # rows of a forward that no running stream waits for
Chunks = Sequence[Chunk[DecodeRoom]]


class LocalPrefill:
    """Computes the rooms in state PREFILLING, at most `budget` prompt tokens per forward while streams run.

    `clock` tells monotonic seconds; `send` takes prompt log probabilities for the router.
    """

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

    def step(self, rooms: Sequence[DecodeRoom], *, is_alone: bool) -> tuple[list[DecodeRoom], StepResult]:
        """Runs one forward over some of `rooms` (at least one). Returns the rooms whose prompt ended, and
        their token 1.

        `is_alone`: no stream is running.
        """
        started = self._clock()
        budget = max(self.budget, IDLE_TOKENS) if is_alone else self.budget
        chunks = _cut(rooms, budget, self.engine.model_config.vocab_size)
        output = self._forward(chunks)
        ended = [chunk.room for chunk in chunks if chunk.is_last]
        for message in score_prompts(chunks, output.logits, self._instance):  # to the router before token 1
            self._send(message)
        result = self._first_tokens(chunks, ended, output)
        self._draft(chunks, output)
        now = self._clock()
        for chunk in chunks:
            room = chunk.room
            room.prefill_started = room.prefill_started or started
            room.prefill_ended = now
            room.chunks += 1
            room.warmed = room.landed = chunk.end
        for room in ended:
            room.state, room.landed_at, room.started_at = DecodeState.RUNNING, now, now
        return ended, result

    def _forward(self, chunks: Chunks) -> ForwardOutput:
        batch = batch_of(self.engine, chunks, has_features=self.engine.drafter is not None)
        output = self.engine.runner.forward(batch)
        for chunk in chunks:
            chunk.room.request.num_computed = chunk.end
        return output

    def _first_tokens(self, chunks: Chunks, rooms: Sequence[DecodeRoom], output: ForwardOutput) -> StepResult:
        """Token 1 of each of `rooms`, the rooms that end in `chunks`; appended to their requests."""
        sampled = sample_first_tokens(self.engine, chunks, output)
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

    def _draft(self, chunks: Chunks, output: ForwardOutput) -> None:
        """Writes the draft rows of all chunks.

        Row i needs token i+1, so the last chunk of a prompt without a valid token 1 is skipped.
        """
        if output.hidden is None:
            return
        items, row = [], 0
        for chunk in chunks:
            rows = output.hidden[row : row + chunk.num_tokens]
            row += chunk.num_tokens
            if chunk.end < chunk.room.request.num_tokens:
                items.append((chunk.room.request, rows, chunk.start))
        self.decoder.draft_prefill_batch(items)


def _cut(rooms: Sequence[DecodeRoom], budget: int, vocab_size: int) -> list[Chunk[DecodeRoom]]:
    """The next chunks of `rooms`, in order, within `budget` tokens."""
    chunks: list[Chunk[DecodeRoom]] = []
    for room in rooms:
        start = room.request.num_computed
        most = scored_limit(room.request, chunks, vocab_size)
        end = min(room.request.num_prompt, start + (budget if most is None else min(budget, most)))
        budget -= end - start
        chunks.append(Chunk(room=room, start=start, end=end))
        if budget <= 0:
            break
    return chunks
