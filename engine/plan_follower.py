"""Another rank of a tensor-parallel worker: does the plans of rank 0 with its part of the weights and KV.

A follower has no requests, no prefix cache and no choice of tokens. Its pages have the ids of rank 0's.
"""

from collections.abc import Sequence

import torch

from .batch.extend_batch import planned_batch, written_pages
from .engine import Engine
from .kv.window_pool import WindowedPool
from .parallel.plan_messages import (
    BeginDraftsPlan,
    CatchUpPlan,
    CopyPagePlan,
    DraftPart,
    DraftPrefillPlan,
    DrawPart,
    GrowPlan,
    JoinPart,
    JoinPlan,
    LeavePlan,
    Plan,
    PromptPlan,
    StepPlan,
    StopDraftingPlan,
    WindowPlan,
)
from .sampling.edits import SamplingRow
from .sampling.params import SamplingParams
from .speculative.drafters.protocol import Drafter, DraftPrefill, HistoryDrafter
from .speculative.step.device_state import DeviceState, MorePages, RequestInit
from .speculative.step.step_graphs import StepGraphs


class Follower:
    """Does plans on `engine`, the part of one rank."""

    def __init__(self, engine: Engine) -> None:
        assert engine.group.rank > 0, engine.group
        self.engine = engine

    @torch.no_grad()
    def perform(self, plan: Plan) -> None:
        """Does `plan`. Collectives wait for the other ranks; on a GPU the host does not."""
        match plan:
            case PromptPlan():
                pool = self.engine.pool
                batch = planned_batch(plan, page_size=pool.page_size, device=pool.device)
                output = self.engine.runner.forward(batch)
                if self.engine.features is not None and output.hidden is not None:
                    self.engine.features.store(batch.slots, output.hidden)
                pool.stamp(written_pages(plan, pool.page_size))
            case DraftPrefillPlan(parts=parts):
                self._prefill_drafts(parts)
            case BeginDraftsPlan(rows=rows, texts=texts):
                drafter = self._drafter
                drafter.reserve(max(rows))
                assert isinstance(drafter, HistoryDrafter), drafter
                drafter.begin(list(zip(rows, texts, strict=True)))
            case JoinPlan(joining=joining):
                self._state.reserve(max(part.slot for part in joining) + 1)
                self._state.write([part.slot for part in joining], [_init_of(part) for part in joining])
            case GrowPlan(grown=grown):
                self._state.append_pages(
                    [
                        MorePages(
                            slot=part.slot,
                            start=part.start,
                            pages=[0] * part.start + part.pages,
                            capacity=part.capacity,
                        )
                        for part in grown
                    ]
                )
            case StopDraftingPlan(slot=slot):
                self._state.stop_drafting(slot)
            case StepPlan() | CatchUpPlan():
                self._steps.follow(plan)
            case CopyPagePlan(source=source, target=target):
                self.engine.copy_page(source, target)
            case WindowPlan(pages=pages, parts=parts):
                assert isinstance(self.engine.pool, WindowedPool), self.engine.pool
                self.engine.pool.map_pages(dict(zip(pages, parts, strict=True)))
            case LeavePlan():
                pass

    def _prefill_drafts(self, parts: Sequence[DraftPart]) -> None:
        drafter, pool = self._drafter, self.engine.pool
        drafter.reserve(max(part.state_row for part in parts))
        rows = [len(part.next_ids) for part in parts]
        shape = (sum(rows), drafter.feature_width)
        features = torch.empty(shape, dtype=self.engine.runner.model.dtype, device=pool.device)
        shared = torch.split(self.engine.group.share(features), rows)
        drafter.prefill([_draft_of(part, own) for part, own in zip(parts, shared, strict=True)])

    @property
    def _steps(self) -> StepGraphs:
        assert self.engine.steps is not None, "a prefill engine takes no decode steps"
        return self.engine.steps

    @property
    def _state(self) -> DeviceState:
        return self._steps.step.state

    @property
    def _drafter(self) -> Drafter:
        assert self.engine.drafter is not None, "this engine has no drafter"
        return self.engine.drafter

    def __repr__(self) -> str:
        return f"<Follower {self.engine.group!r}, {self.engine!r}>"


def _params_of(draw: DrawPart) -> SamplingParams:
    return SamplingParams(seed=draw.seed, temperature=draw.temperature, top_k=draw.top_k)


def _draft_of(part: DraftPart, features: torch.Tensor) -> DraftPrefill:
    return DraftPrefill(
        pages=part.pages,
        start=part.start,
        next_ids=part.next_ids,
        features=features,
        state_row=part.state_row,
        is_final=part.is_final,
        known_ids=part.known_ids,
        params=_params_of(part.draw),
    )


def _init_of(part: JoinPart) -> RequestInit:
    return RequestInit(
        newest=part.newest,
        length=part.length,
        remaining=part.remaining,
        capacity=part.capacity,
        draft_row=part.draft_row,
        pages=part.pages,
        row=SamplingRow(params=_params_of(part.draw), position=part.length + 1),
    )
