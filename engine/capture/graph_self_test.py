"""Compares each captured graph with the eager path before serving, on random input at the edges of its
bucket.

In models whose rows choose (`ModelConfig.has_choices`), a rounding may give a row other experts, and paths
round differently where their numbers of rows differ. There, each row of a graph is compared with what it was
captured from, run eagerly on as many rows, and half of the rows must agree with the eager path.

The comparison writes into the first pages of the KV pools and zeroes them afterwards.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...kernels.fp8_scales import fill_normal
from ..batch.forward_batch import CaptureHidden, ForwardBatch
from ..graphs.bucketed_graphs import EAGER, GraphFamily, PathDecision
from ..kv.page_table import build_page_table, pages_for, slots_for
from ..kv.pool import KVPool
from ..runner.model_runner import ModelRunner
from ..speculative.drafters.mtp_prefill import MtpDrafter
from ..speculative.drafters.protocol import Drafter, draft_pools

logger = logging.getLogger(__name__)

# Largest relative error of a row. The paths sum in different orders, and errors grow over the layers.
# Measured over 30 layers: 0.05 in bfloat16, 5e-5 in float32. A row that reads the wrong input is off by about
# 1.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.03}
# KV in the dtype of the rows has many more rows than outputs have, and few values each, so its largest error
# is larger.
KV_TOLERANCES = {dtype: 2.5 * tolerance for dtype, tolerance in TOLERANCES.items()}
CHOICE_TOLERANCE = 0.5  # half of the rows, where rows choose: most differ by few choices, if any
COMPARED_PAGES = 16  # of those that a trial fills: copies of all would take much memory
SEED = 20
LOGIT_ROWS = 256  # rows of a prompt whose logits are compared
COMPARED = 1 << 24  # elements of a tensor that are compared at once

Outputs = Sequence[torch.Tensor | None]
Run = Callable[[PathDecision], Outputs]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One graph at one size. `run` computes on the given path, with KV in the first `num_pages` pages of
    `pool`. `has_choices`: as `ModelConfig.has_choices`, of what computes.
    """

    family: GraphFamily[Any, Any]
    bucket: int
    size: int
    pool: KVPool
    run: Run
    has_choices: bool

    @property
    def num_pages(self) -> int:
        """The pages of its tokens."""
        return pages_for(self.size, self.pool.page_size)


class SelfTest:
    """Compares all prefill graphs of an engine with its eager path; if `is_brief`, one of each kind."""

    def __init__(
        self, runner: ModelRunner, drafter: Drafter | None, max_context: int, *, is_brief: bool = False
    ) -> None:
        self.runner = runner
        self.drafter = drafter
        self.max_context = max_context
        self.is_brief = is_brief
        self.num_compared = 0
        self._random = torch.Generator().manual_seed(SEED)

    @torch.no_grad()
    def run(self) -> int:
        """Compares all graphs, drops those that differ on some rank, and returns their number."""
        dropped = 0
        for trial in self._trials():
            if trial.bucket not in trial.family.captured:
                continue  # failed at its other edge, on all ranks
            dropped += trial.family.drop_if_wrong(trial.bucket, trial.size, self._difference(trial))
        return dropped

    def _trials(self) -> Iterator[Trial]:
        graphs = self.runner.graphs
        if graphs is not None:
            families: list[GraphFamily[Any, Any]] = [graphs.tokens.family]
            families += [] if graphs.whole is None else [graphs.whole.family]
            for family in families:
                for bucket, size in edges(family, is_brief=self.is_brief):
                    if pages_for(size, self.runner.pool.page_size) <= self.runner.pool.num_lendable:
                        yield self._prefill_trial(family, bucket, size)
        draft = None if self.drafter is None else self.drafter.prefill_family
        if self.drafter is not None and draft is not None:
            for bucket, size in edges(draft, is_brief=self.is_brief):
                yield self._draft_prefill_trial(self.drafter, draft, bucket, size)

    def _difference(self, trial: Trial) -> str:
        """The differing outputs or KV between the paths from the same KV; "" without a difference."""
        graph = PathDecision(kind=trial.family.kind, bucket=trial.bucket)
        trial.pool.lend(trial.num_pages)
        eager, graphed = self._computed(trial, EAGER), self._computed(trial, graph)
        if trial.has_choices:
            found = _differing(trial, self._computed(trial, replace(graph, is_replayed=False)), graphed)
            if found:
                found = f"run on as many rows, {found}"
            else:
                found = _differing(trial, eager, graphed, is_half=True)
        else:
            found = _differing(trial, eager, graphed)
        for part in trial.pool.memory_of(1 + trial.num_pages):
            part.zero_()
        trial.pool.lend(0)
        self.num_compared += 1
        return found

    def _computed(self, trial: Trial, decision: PathDecision) -> tuple[Outputs, list[torch.Tensor]]:
        """What one path computes: outputs, and copies of the rows that it writes into some pages."""
        pages = trial.pool.memory_of(1 + trial.num_pages)
        context = torch.Generator(trial.pool.device)
        for part in pages:
            fill_normal(part, context.manual_seed(SEED))
        spread = torch.linspace(0, trial.num_pages - 1, COMPARED_PAGES)
        compared = sorted({round(page) for page in spread.tolist()})

        def rows_of(part: torch.Tensor) -> torch.Tensor:
            copies = [part[page].to(trial.pool.row_dtype) for page in compared]
            return torch.stack(copies).flatten(0, -2)

        before = [rows_of(part) for part in pages]
        outputs = trial.run(decision)
        after = [rows_of(part) for part in pages]
        return outputs, [new[(new != old).any(-1)] for old, new in zip(before, after, strict=True)]

    # --- random batches --------------------------------------------------------------------------------

    def _prefill_trial(self, family: GraphFamily[Any, Any], bucket: int, size: int) -> Trial:
        pool = self.runner.pool
        capture = CaptureHidden(family.limits.hidden)

        def run(decision: PathDecision) -> Outputs:
            batch = self._extend_batch(pool, size, capture)
            batch.logit_rows = torch.linspace(0, size - 1, min(size, LOGIT_ROWS)).long().to(pool.device)
            batch.decision = decision
            output = self.runner.forward(batch)
            return output.logits, output.hidden

        has_choices = self.runner.model.config.has_choices
        return Trial(family=family, bucket=bucket, size=size, pool=pool, run=run, has_choices=has_choices)

    def _draft_prefill_trial(
        self, drafter: Drafter, family: GraphFamily[Any, Any], bucket: int, size: int
    ) -> Trial:
        (pool,) = draft_pools(drafter)
        features = self._normal(size, drafter.feature_width)

        def run(decision: PathDecision) -> Outputs:
            batch = self._extend_batch(pool, size, CaptureHidden.LAST)
            batch.features = features
            batch.decision = decision
            return (drafter.prefill_rows(batch),)

        # MTP modules have layers of the target's kind, other heads are dense
        has_choices = isinstance(drafter, MtpDrafter) and self.runner.model.config.has_choices
        return Trial(family=family, bucket=bucket, size=size, pool=pool, run=run, has_choices=has_choices)

    def _extend_batch(self, pool: KVPool, size: int, capture: CaptureHidden) -> ForwardBatch:
        """A batch of `size` new tokens without cached prefixes, in the fewest requests that the context
        allows.
        """
        ids = torch.arange(size, device=pool.device) * 7919 % self.runner.model.config.vocab_size
        whole = max(self.max_context // pool.page_size * pool.page_size, 1)  # requests begin at page borders
        lens = [min(whole, size - start) for start in range(0, size, whole)]
        starts = [start // pool.page_size + 1 for start in range(0, size, whole)]
        tables = [
            list(range(first, first + pages_for(n, pool.page_size)))
            for first, n in zip(starts, lens, strict=True)
        ]
        slots = [slots_for(table, 0, n, pool.page_size) for table, n in zip(tables, lens, strict=True)]
        return ForwardBatch(
            input_ids=ids,
            positions=torch.cat([torch.arange(n) for n in lens]).to(pool.device),
            slots=torch.cat(slots).to(pool.device),
            page_table=build_page_table(tables, pool.device),
            q_lens=lens,
            kv_lens=lens,
            capture_hidden=capture,
        )

    def _normal(self, rows: int, width: int) -> torch.Tensor:
        normal = torch.randn((rows, width), generator=self._random)
        return normal.to(device=self.runner.pool.device, dtype=self.runner.pool.row_dtype)


def edges(family: GraphFamily[Any, Any], *, is_brief: bool = False) -> list[tuple[int, int]]:
    """(bucket, size) of each captured bucket at its largest and its smallest size; if `is_brief`, of the
    smallest bucket behind the first at its smallest size, which has both padding and real rows.
    """
    found = []
    for bucket in family.captured:
        below = max((smaller for smaller in family.buckets if smaller < bucket), default=0)
        found += [(bucket, size) for size in sorted({below + 1, bucket}, reverse=True)]
    if not is_brief:
        return found
    padded = [(bucket, size) for bucket, size in found if size < bucket]
    return (padded or found)[:1]


def _differing(
    trial: Trial,
    one: tuple[Outputs, list[torch.Tensor]],
    other: tuple[Outputs, list[torch.Tensor]],
    *,
    is_half: bool = False,
) -> str:
    """The outputs and KV of two paths that differ by more than the tolerance in some row, or, `is_half`, by
    more than CHOICE_TOLERANCE in half of the rows.
    """
    found = []
    is_whole = trial.pool.kv.dtype == trial.pool.row_dtype
    for name, tolerances, *sides in (
        ("output", TOLERANCES, one[0], other[0]),
        ("KV", KV_TOLERANCES if is_whole else TOLERANCES, one[1], other[1]),
    ):
        tolerance = CHOICE_TOLERANCE if is_half else tolerances[trial.pool.row_dtype]
        for i, pair in enumerate(zip(*sides, strict=True)):
            error = relative_error(*pair, share=0.5 if is_half else 1.0)
            if not error <= tolerance:
                found.append(f"{name} {i} by {error:.2g}" + " in half of its rows" * is_half)
    return ", ".join(found)


def relative_error(eager: torch.Tensor | None, graphed: torch.Tensor | None, *, share: float = 1.0) -> float:
    """The error of a row (along the last dimension), relative to the norm of the eager row, that `share` of
    the rows do not exceed; 1.0: the largest.

    A tenth of the average norm bounds the divisor from below. The result is infinite when one side is missing
    or not finite.
    """
    if eager is None or graphed is None:
        return 0.0 if eager is graphed else float("inf")
    if eager.shape != graphed.shape:
        return float("inf")
    if eager.numel() == 0:
        return 0.0
    if torch.equal(eager, graphed):  # a single pass; NaN differs from itself
        return 0.0
    if not eager.is_floating_point():
        return float("inf")
    rows, others = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (eager, graphed))
    parts, step = [], -(-COMPARED // rows.shape[1])
    for start in range(0, len(rows), step):  # float32 copies of the whole would take several times its memory
        mine, other = (side[start : start + step].float() for side in (rows, others))
        parts.append(torch.stack((mine.norm(dim=1), (mine - other).norm(dim=1))))
    norms, errors = torch.cat(parts, dim=1)
    relative = errors / norms.clamp(min=norms.mean() / 10 + 1e-6)
    if not bool(relative.isfinite().all()):
        return float("inf")
    return float(relative.kthvalue(max(math.ceil(share * len(relative)), 1)).values)
