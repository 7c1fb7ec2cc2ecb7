"""Compares each graph of a whole decode step, and of a drafter that catches up, with the eager path.

Both paths run the graph's number of rows, so they compute the same products. Reports must be equal; log
probabilities, written KV and the states that a drafter writes when it catches up must agree within a
tolerance. The comparison writes into the first pages of the KV pools and zeroes them afterwards.
"""

import logging
from collections.abc import Callable, Sequence

import torch

from ...kernels.step_glue import NUM_COUNTS
from ..graphs.breakable import Breaks
from ..graphs.bucketed_graphs import GraphFamily, PathDecision
from ..sampling.logprobs import packed_width
from ..speculative.step.fused_step import StepContext, StepKind
from ..speculative.step.step_graphs import StepGraphs
from .graph_self_test import TOLERANCES, edges, relative_error
from .trial_requests import TrialRequests

logger = logging.getLogger(__name__)


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
        trial = TrialRequests(self._step, kind, max(size for _, size in trials))
        dropped = self._drop_wrong(family, trials, lambda *at: self._difference(trial, family, *at))
        trial.close()
        return dropped

    def _run_catch_up(self) -> int:
        """As `_run_kind`, for the graphs in which the drafter observes late rows."""
        family, late = self.steps.catch_up_graphs, self._step.late
        if family is None or late is None:
            return 0
        trials = edges(family, is_brief=self.is_brief)
        if not trials:
            return 0
        trial = TrialRequests(self._step, StepKind(shape=late.shape), max(size for _, size in trials), late)
        dropped = self._drop_wrong(family, trials, lambda *at: self._late_difference(trial, family, *at))
        trial.close()
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
        self, trial: TrialRequests, family: GraphFamily[StepContext, torch.Tensor], bucket: int, size: int
    ) -> str:
        """The difference between both paths for the first `size` requests; "" without one."""
        kind, slots = trial.kind, trial.slots[:size]
        self.steps.tell(slots)
        context = StepContext(num_rows=len(slots), fill=forbid_token_7 if kind.is_edited else None)
        self._restore(trial, size)
        eager = self._step.run(self.steps.slots[:bucket], kind, Breaks(context))[: len(slots)].clone()
        eager_kv = [kv.clone() for kv in trial.pages(size)]
        self._restore(trial, size)
        graphed = family.replay(PathDecision(kind=family.kind, bucket=bucket), context)[: len(slots)]
        self.num_compared += 1
        return self._compare(kind, (eager, graphed), eager_kv, trial.pages(size))

    def _late_difference(
        self, trial: TrialRequests, family: GraphFamily[StepContext, torch.Tensor], bucket: int, size: int
    ) -> str:
        """The difference between both paths in which the drafter observes the late rows of the first `size`
        requests; "" without one.
        """
        slots = trial.slots[:size]
        self.steps.tell(slots)
        context = StepContext(num_rows=len(slots))
        self._restore(trial, size)
        eager = self._step.catch_up(self.steps.slots[:bucket], Breaks(context))[: len(slots)].clone()
        expected = [values.clone() for values in (*trial.pages(size), *trial.draft_states(size))]
        self._restore(trial, size)
        graphed = family.replay(PathDecision(kind=family.kind, bucket=bucket), context)[: len(slots)]
        self.num_compared += 1
        if not torch.equal(eager, graphed):
            return f"{int((eager != graphed).any(dim=1).sum())} of {len(eager)} numbers of rows or matches"
        tolerance = TOLERANCES[self._step.runner.pool.row_dtype]
        pairs = zip(expected, (*trial.pages(size), *trial.draft_states(size)), strict=True)
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

    def _restore(self, trial: TrialRequests, size: int) -> None:
        """Writes the initial states, and the KV of the first `size` requests."""
        trial.rewind()
        trial.fill(size)
