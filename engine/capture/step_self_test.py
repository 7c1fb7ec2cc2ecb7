"""Compares each graph of a whole decode step, and of a drafter that catches up, with the eager path.

Both paths run the graph's number of rows, so they compute the same products. Reports must be equal; log
probabilities, written KV and the states that a drafter writes when it catches up must agree within a
tolerance. The comparison writes into the first pages of the KV pools and zeroes them afterwards.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ...kernels.fp8_scales import fill_normal
from ...kernels.step_glue import LATE, NUM_COUNTS
from ..graphs.breakable import Breaks
from ..graphs.bucketed_graphs import GraphFamily, PathDecision
from ..kv.page_table import pages_for
from ..sampling.edits import SamplingRow
from ..sampling.logprobs import packed_width
from ..sampling.params import SamplingParams
from ..speculative.drafters.protocol import draft_pools
from ..speculative.drafters.states import PAD_ROW
from ..speculative.step.device_state import RequestInit
from ..speculative.step.fused_step import StepContext, StepKind
from ..speculative.step.late_rows import LateRows
from ..speculative.step.step_graphs import StepGraphs
from .graph_self_test import SEED, TOLERANCES, edges, relative_error

logger = logging.getLogger(__name__)

NUM_TOKENS = 8  # of random histories; a vocabulary has at least as many
# By kind: the first two are free draws, the next two are ranked, the rest need edited logits.
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, min_p=0.01),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(
        temperature=0.0,
        frequency_penalty=0.5,
        repetition_penalty=1.3,
        logit_bias={7: 99.0, 9: 50.0},
        logprobs=3,
    ),
    SamplingParams(temperature=1.0, presence_penalty=0.5, logit_bias={1: 2.0, 5: -3.0}, min_new_tokens=3),
)


def forbid_token_7(drafts: torch.Tensor, parents: torch.Tensor | None, masks: torch.Tensor) -> None:
    """Acts as a grammar of the first request that forbids its first bias, so the second bias wins."""
    masks[0, :, 0] = ~(1 << 7)


def logprobs_in(packed: torch.Tensor, kind: StepKind) -> torch.Tensor:
    """The log probabilities of a report, float32, 0 for rows without logprobs."""
    each = packed_width(kind.num_top)
    if not each:
        return packed.float()
    values = packed.reshape(-1, each)[:, : 1 + kind.num_top].to(torch.int32).contiguous()
    return values.view(torch.float32).nan_to_num(0.0)


class _Requests(NamedTuple):
    """Requests of one kind of step. `initial` are copies of `states`, the tensors of their state."""

    kind: StepKind
    slots: tuple[int, ...]
    joining: Sequence[RequestInit]
    states: tuple[torch.Tensor, ...]
    initial: tuple[torch.Tensor, ...]


class StepSelfTest:
    """Compares all graphs of `steps` with the eager step; if `is_brief`, one of each kind."""

    def __init__(self, steps: StepGraphs, *, is_brief: bool = False) -> None:
        self.steps = steps
        self.is_brief = is_brief
        self.num_compared = 0
        self._step = steps.step

    @torch.no_grad()
    def run(self) -> int:
        """Compares all graphs, drops those that differ, and returns their number."""
        dropped = sum(self._run_kind(kind, family) for kind, family in self.steps.families.items())
        return dropped + self._run_catch_up()

    def _run_kind(self, kind: StepKind, family: GraphFamily[StepContext, torch.Tensor]) -> int:
        """Compares the graphs of one kind, drops those that differ, and returns their number."""
        trials = edges(family, is_brief=self.is_brief)
        if not trials:
            return 0
        trial = self._open(kind, max(size for _, size in trials))
        dropped = self._drop_wrong(family, trials, lambda *at: self._difference(trial, family, *at))
        self._close(trial)
        return dropped

    def _run_catch_up(self) -> int:
        """As `_run_kind`, for the graphs in which the drafter observes late rows."""
        family, late = self.steps.catch_up_graphs, self._step.late
        if family is None or late is None:
            return 0
        trials = edges(family, is_brief=self.is_brief)
        if not trials:
            return 0
        trial = self._open(StepKind(shape=late.shape), max(size for _, size in trials), late)
        dropped = self._drop_wrong(family, trials, lambda *at: self._late_difference(trial, family, *at))
        self._close(trial)
        for values in late.anchors:
            values.zero_()
        return dropped

    def _drop_wrong(
        self,
        family: GraphFamily[StepContext, torch.Tensor],
        trials: Sequence[tuple[int, int]],
        difference_at: Callable[[int, int], str],
    ) -> int:
        """Drops the graphs for which `difference_at(bucket, size)` is not empty on some rank; returns their
        number.
        """
        dropped = 0
        for bucket, size in trials:
            if size < bucket < family.buckets[-1] and not self.is_brief:
                continue  # padding is the same in all graphs; the largest of each kind shows it
            if bucket in family.captured:  # it did not fail at its other edge, on any rank
                dropped += family.drop_if_wrong(bucket, size, difference_at(bucket, size))
        return dropped

    def _difference(
        self, trial: _Requests, family: GraphFamily[StepContext, torch.Tensor], bucket: int, size: int
    ) -> str:
        """The difference between both paths for the first `size` requests; "" without one."""
        kind, slots, joining = trial.kind, trial.slots[:size], trial.joining[:size]
        self.steps.tell(slots)
        context = StepContext(num_rows=len(slots), fill=forbid_token_7 if kind.is_edited else None)
        self._restore(trial, joining)
        eager = self._step.run(self.steps.slots[:bucket], kind, Breaks(context))[: len(slots)].clone()
        eager_kv = [kv.clone() for kv in self._pages(joining)]
        self._restore(trial, joining)
        graphed = family.replay(PathDecision(kind=family.kind, bucket=bucket), context)[: len(slots)]
        self.num_compared += 1
        return self._compare(kind, (eager, graphed), eager_kv, self._pages(joining))

    def _late_difference(
        self, trial: _Requests, family: GraphFamily[StepContext, torch.Tensor], bucket: int, size: int
    ) -> str:
        """The difference between both paths in which the drafter observes the late rows of the first `size`
        requests; "" without one.
        """
        slots, joining = trial.slots[:size], trial.joining[:size]
        self.steps.tell(slots)
        context = StepContext(num_rows=len(slots))
        self._restore(trial, joining)
        eager = self._step.catch_up(self.steps.slots[:bucket], Breaks(context))[: len(slots)].clone()
        expected = [values.clone() for values in (*self._pages(joining), *self._states(joining))]
        self._restore(trial, joining)
        graphed = family.replay(PathDecision(kind=family.kind, bucket=bucket), context)[: len(slots)]
        self.num_compared += 1
        if not torch.equal(eager, graphed):
            return f"{int((eager != graphed).any(dim=1).sum())} of {len(eager)} numbers of rows or matches"
        tolerance = TOLERANCES[self._step.runner.pool.row_dtype]
        pairs = zip(expected, (*self._pages(joining), *self._states(joining)), strict=True)
        errors = [relative_error(*pair) for pair in pairs]
        return ", ".join(
            f"part {i} by {error:.2g}" for i, error in enumerate(errors) if not error <= tolerance
        )

    def _compare(
        self,
        kind: StepKind,
        reports: tuple[torch.Tensor, torch.Tensor],
        eager_kv: Sequence[torch.Tensor],
        graphed_kv: Sequence[torch.Tensor],
    ) -> str:
        eager, graphed = reports
        width = kind.shape.num_path + NUM_COUNTS
        if not torch.equal(eager[:, :width], graphed[:, :width]):
            return f"{int((eager != graphed)[:, :width].any(dim=1).sum())} of {len(eager)} reports"
        tolerance = TOLERANCES[self._step.runner.pool.row_dtype]
        packed = (x[:, width : kind.report_width] for x in reports)
        if not relative_error(*(logprobs_in(x, kind) for x in packed)) <= tolerance:
            return "log probabilities"
        errors = [relative_error(*pair) for pair in zip(eager_kv, graphed_kv, strict=True)]
        return ", ".join(f"KV {i} by {error:.2g}" for i, error in enumerate(errors) if not error <= tolerance)

    def _joining(self, size: int, kind: StepKind) -> list[RequestInit]:
        """`size` requests with several context lengths, or as many as the pool can hold."""
        pool, found, next_page = self._step.runner.pool, [], 1
        drafter, spare = self._step.drafter, kind.shape.spare_slots
        spread = max(min(2 * pool.page_size, self._step.max_context - spare), 1)
        for i in range(size):
            length = 1 + i * 5 % spread
            # One request always fits.
            count = min(pages_for(length + spare, pool.page_size), pool.num_lendable)
            if next_page + count > pool.num_lendable + 1:
                break
            params = PARAMS[(i + 4) % 6 if kind.is_edited else i % (4 if kind.is_ranked else 2)]
            found.append(
                RequestInit(
                    newest=i,
                    length=length,
                    remaining=spare,
                    capacity=min(count * pool.page_size, self._step.max_context),
                    draft_row=PAD_ROW if drafter is None else drafter.open(),
                    pages=range(next_page, next_page + count),
                    row=SamplingRow(
                        params=replace(params, seed=i),
                        position=length + 1,
                        prompt_ids=range(0, 32, 3),
                        output_ids=range(0, 32, 5),
                        ends=[2, 3],
                        first_end=length + 2,
                    ),
                )
            )
            next_page += count
        return found

    def _open(self, kind: StepKind, size: int, late: LateRows | None = None) -> _Requests:
        """Up to `size` requests that have joined. Their state is written once for all graphs of `kind`.

        With `late`, requests have up to `late.num_rows` late rows, of random features and tokens.
        """
        joining, state = self._joining(size, kind), self._step.state
        self._step.runner.pool.lend(joining[-1].pages[-1])
        slots = tuple(state.open() for _ in joining)
        state.write(slots, joining)
        if late is not None:
            for i, (slot, each) in enumerate(zip(slots, joining, strict=True)):
                state.integers[slot, LATE] = min(each.length, late.num_rows - i % (late.num_rows + 1))
            self._randomize(late.anchors)
        states = (*state.anchors, *state.edit_anchors)
        return _Requests(kind, slots, joining, states, tuple(values.clone() for values in states))

    def _restore(self, trial: _Requests, joining: Sequence[RequestInit]) -> None:
        """Writes the initial state, and the KV of the requests `joining`."""
        for values, initial in zip(trial.states, trial.initial, strict=True):
            values.copy_(initial)
        generator = torch.Generator(self._step.state.device)
        for kv in self._pages(joining):
            fill_normal(kv, generator.manual_seed(SEED))
        if self._step.drafter is not None:
            self._randomize(self._step.drafter.anchors)

    def _randomize(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fills states of a drafter, equally at each call."""
        generator = torch.Generator(self._step.state.device)
        for values in tensors:
            generator.manual_seed(SEED)
            if values.is_floating_point():
                values.normal_(generator=generator)
            else:  # tokens, few of them so that some repeat, or numbers of rows
                values.random_(0, NUM_TOKENS, generator=generator)

    def _states(self, joining: Sequence[RequestInit]) -> list[torch.Tensor]:
        """The rows of `joining` in each tensor of the drafter's states."""
        drafter, rows = self._step.drafter, [each.draft_row for each in joining]
        return [] if drafter is None else [values[rows] for values in drafter.anchors]

    def _close(self, trial: _Requests) -> None:
        for slot, each in zip(trial.slots, trial.joining, strict=True):
            self._step.state.close(slot)
            if self._step.drafter is not None:
                self._step.drafter.close(each.draft_row)
        for kv in self._pages(trial.joining):
            kv.zero_()
        self._step.runner.pool.lend(0)
        if self._step.drafter is not None:
            for values in self._step.drafter.anchors:
                values.zero_()

    def _pages(self, joining: Sequence[RequestInit]) -> list[torch.Tensor]:
        """The KV of all pages of `joining` in each pool."""
        end = max(each.pages[-1] for each in joining) + 1
        pools = [self._step.runner.pool, *draft_pools(self._step.drafter)]
        return [part for pool in pools for part in pool.memory_of(end)]
