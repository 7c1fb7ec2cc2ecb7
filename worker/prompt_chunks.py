"""Forwards over parts of prompts: prefill's work, and decode's for prompts computed locally."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from ..cluster.protocol.messages import PromptLogprobs, RoutedExperts
from ..cluster.protocol.prompt_scores import prompt_logprobs, routed_experts
from ..engine.batch.extend_batch import extend_plan, planned_batch
from ..engine.batch.forward_batch import ForwardBatch, ForwardOutput
from ..engine.batch.input_embeds import set_input_embeds
from ..engine.engine import Engine
from ..engine.prompt_logprobs import most_scored, scores_of
from ..engine.request import Request
from ..engine.runner.routed_experts import ExpertRows
from ..engine.sampling.sampler import LaunchedSample
from .room import WorkerRoom

R = TypeVar("R", bound=WorkerRoom)


@dataclass(frozen=True, kw_only=True)
class Chunk(Generic[R]):
    """Prompt tokens [start, end) of a room, computed by one forward."""

    room: R
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Rows of the forward that are the chunk's."""
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends here."""
        return self.end == self.room.request.num_prompt

    @property
    def span(self) -> tuple[Request, int, int]:
        """The chunk as the engine takes it."""
        return self.room.request, self.start, self.end


def share_time(chunks: Sequence[Chunk[R]], seconds: float) -> None:
    """Adds to each room its rows' share of the `seconds` for which a forward kept the device busy."""
    num_rows = sum(chunk.num_tokens for chunk in chunks)
    for chunk in chunks:
        chunk.room.work_s += seconds * chunk.num_tokens / num_rows


def scored_limit(request: Request, before: Sequence[Chunk[R]], vocab_size: int) -> int | None:
    """The most tokens of `request` that fit behind the chunks `before` into the memory of scored logits.

    None: any number fits.
    """
    return most_scored(request, vocab_size, [chunk.span for chunk in before])


def batch_of(engine: Engine, chunks: Sequence[Chunk[R]], *, has_features: bool) -> ForwardBatch:
    """The batch of all chunks, in order.

    `has_features`: the forward returns the aux features of every row. It must follow at once, because
    the other ranks of a tensor-parallel worker are told of it here.
    """
    engine.place_windows()
    spans = [chunk.span for chunk in chunks]
    plan = extend_plan(spans, page_size=engine.page_size, has_features=has_features)
    if engine.tell is not None:
        engine.tell(plan)
    batch = planned_batch(plan, page_size=engine.page_size, device=engine.pool.device)
    batch.wants_experts = any(request.sampling.routed_experts >= 0 for request, _, _ in spans)
    if any(request.num_embeds for request, _, _ in spans):
        set_input_embeds(batch, spans, engine.runner.model)
    return batch


def launch_first_tokens(engine: Engine, chunks: Sequence[Chunk[R]], output: ForwardOutput) -> LaunchedSample:
    """Launches the choice of token 1 of every prompt that ends in `chunks`, in order.

    The first rows of `output.logits` belong to these prompts.
    """
    rows = [chunk.room.request.masked_row for chunk in chunks if chunk.is_last]
    return engine.sampler.launch(output.logits[: len(rows)], rows)


def score_prompts(
    chunks: Sequence[Chunk[R]], logits: torch.Tensor, instance: str
) -> Iterator[PromptLogprobs]:
    """Messages with the log probabilities of prompts that request them.

    `logits` `[R, V]`: those of the whole forward, rows of ended prompts first, then the scored rows.
    """
    spans = [chunk.span for chunk in chunks]
    scored = scores_of(spans, logits[sum(chunk.is_last for chunk in chunks) :])
    for (request, start, _), scores in zip(spans, scored, strict=True):
        yield from prompt_logprobs(request.room, request.epoch, instance, start + 1, scores)


def launched_experts(output: ForwardOutput) -> ExpertRows | None:
    """The experts of all rows of a forward on their way to the host; None if no prompt requests them."""
    return None if output.experts is None else ExpertRows(output.experts)


def experts_of_prompts(
    engine: Engine, chunks: Sequence[Chunk[R]], experts: ExpertRows | None, instance: str
) -> Iterator[RoutedExperts]:
    """Messages with the experts of the rows of `chunks` that requests ask for. Waits for the forward."""
    shape, before = engine.expert_shape, 0
    if experts is None or shape is None:
        return
    for chunk in chunks:
        request, start, end = chunk.span
        first = max(start, request.sampling.routed_experts)
        if request.sampling.routed_experts >= 0 and first < end:
            ids = experts.read(before + first - start, before + end - start)
            yield from routed_experts(request.room, request.epoch, instance, first, ids, shape.row_bytes)
        before += end - start
