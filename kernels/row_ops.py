"""The two sets of row-wise operations of a model: the fastest ones, and batch-invariant ones.

The fastest ones choose tiles and sums by the number of rows, and may join steps of a layer in one launch.
The batch-invariant ones give the same bits for a row alone, in a batch, in a verify step and in a prefill
chunk. Legend: T rows, N outputs, H inputs, V vocabulary, D head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch

from .expert_mlp import PLAIN_EXPERTS, ExpertForm
from .invariant_rows import rms_norm_rows, rope_rows, silu_mul_rows
from .ops import (
    recorded_expert_mlp,
    recorded_invariant_linear,
    recorded_invariant_logits,
    recorded_logits,
)
from .rms_norm import add_rms_norm, rms_norm
from .rope import apply_rope
from .silu_mul import silu_mul
from .skinny_linear import MIN_ROWS_TILE, gated_linear, has_tiles, linear

# (x [T, H], weight [N, H], bias [N] or None) -> [T, N]
Project: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# (x [T, H], weight [2*I, H], bias [2*I] or None, gelu instead of silu) -> [T, I]
Gated: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, bool], torch.Tensor]
# (hidden [T, H], weight [V, H]) -> float32 [T, V]
Logits: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# (x [..., D], weight [D], eps, offset of the weight or None) -> [..., D]
Norm: TypeAlias = Callable[[torch.Tensor, torch.Tensor, float, float | None], torch.Tensor]
# (x [..., D], residual [..., D], weight [D], eps, offset of the weight or None) -> (normed sum, sum)
AddNorm: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float, float | None], tuple[torch.Tensor, torch.Tensor]
]
# (x [T, heads, D], cos [T, R], sin [T, R] with a negated first half) -> [T, heads, D]; R dimensions turn
Rotate: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Experts(Protocol):
    """The chosen experts of each row."""

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        form: ExpertForm = PLAIN_EXPERTS,
    ) -> torch.Tensor:
        """`x` `[T, H]`, `ids`, `weights` `[T, K]`, `gate_up` `[E, 2*I, H]`, `down` `[E, H, I]` -> as `x`."""


class ExpertRows(Protocol):
    """The rows of a layer's experts, where several ranks share the experts. W ranks have T rows each, or the
    same T rows (W counts as 1 then).
    """

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows `[T, H]` -> the rows that the experts compute, `[W*T, H]`."""

    def collect(self, parts: torch.Tensor) -> torch.Tensor:
        """Partial results of this rank's experts, `[W*T, H]` -> the sums of all ranks for this rank's rows,
        `[T, H]`. `parts` may be overwritten.
        """

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Values of all gathered rows, `[W*T, ...]` -> those of this rank's rows, `[T, ...]`."""


class RowsOfOneRank:
    """The rows of a model that has one rank."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """As `ExpertRows.gather`."""
        return x

    def collect(self, parts: torch.Tensor) -> torch.Tensor:
        """As `ExpertRows.collect`."""
        return parts

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """As `ExpertRows.own`."""
        return rows


ROWS_OF_ONE_RANK: ExpertRows = RowsOfOneRank()

# (part [T, H]) -> [T, H]
JoinParts: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def of_one_rank(part: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks of a model that has one."""
    return part


@dataclass(frozen=True, kw_only=True)
class Joins:
    """The most rows for which steps of a layer share launches, in 16 bits on a GPU; 0: for none.

    `norms`: residual sums and norms are part of products, see `normed_linear`. `rotary`: rotation is part of
    a projection, see `rotary_product`, on a GPU alone. `experts`: see `few_experts`, where their size is a
    limit, too. Both need `norms`. `latents`: see `latent_step`. `everywhere`: also on CPUs and in float32, by
    their definitions, for tests.
    """

    norms: int = 0
    rotary: int = 0
    experts: int = 0
    latents: int = 0
    everywhere: bool = False

    def takes(self, x: torch.Tensor, max_rows: int) -> bool:
        """Whether steps over the rows `x` `[T, ...]` are joined; `max_rows` is one of the fields."""
        return x.shape[0] <= max_rows and (self.everywhere or has_tiles(x))


JOIN_NAMES = ("norms", "rotary", "experts", "latents")
NO_JOINS = Joins()
# Norms and rotation pay from 1 to 16 rows. Each row reads its experts and the projection of its latents for
# itself, which only few rows should.
FEW_ROWS = Joins(norms=MIN_ROWS_TILE, rotary=MIN_ROWS_TILE, experts=4, latents=4)


def named_joins(text: str) -> Joins:
    """Those of FEW_ROWS with the names in `text`, separated by commas; "none" and "all" are such texts, too.

    Raises ValueError for an unknown name.
    """
    names = {"none": (), "all": JOIN_NAMES}.get(text, tuple(text.split(",")))
    unknown = [name for name in names if name not in JOIN_NAMES]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a join; use none, all, or names of {', '.join(JOIN_NAMES)}")
    return Joins(**{name: getattr(FEW_ROWS, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class RowOps:
    """The operations of a model's rows, attention excepted.

    `sum_ranks` sums the results of a matrix whose inputs are split over ranks. `expert_rows`: the rows of
    experts that ranks share. `joins`: the steps of a layer that are not done by these operations, one by one,
    for few rows. `is_invariant`: all are batch-invariant, as quantised products then must be, too.
    """

    linear: Project
    gated_linear: Gated
    logits: Logits
    rms_norm: Norm
    add_rms_norm: AddNorm
    rope: Rotate
    expert_mlp: Experts
    sum_ranks: JoinParts = of_one_rank
    expert_rows: ExpertRows = ROWS_OF_ONE_RANK
    joins: Joins = NO_JOINS
    is_invariant: bool = False


def invariant_gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, is_gelu: bool = False
) -> torch.Tensor:
    """As `skinny_linear.gated_linear`: `x` `[T, H]`, `weight` `[2*I, H]` -> `[T, I]`."""
    return gate_of(recorded_invariant_linear(x, weight, bias), is_gelu, is_invariant=True)


def gate_of(gate_up: torch.Tensor, is_gelu: bool = False, *, is_invariant: bool = False) -> torch.Tensor:
    """As `silu_mul.silu_mul`, whose kernel is batch-invariant on a GPU: `[T, 2*I]` -> `[T, I]`."""
    return (silu_mul_rows if is_invariant and not gate_up.is_cuda else silu_mul)(gate_up, is_gelu)


def invariant_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float | None = None
) -> torch.Tensor:
    """As `rms_norm.rms_norm`, whose kernel is batch-invariant on a GPU."""
    return (rms_norm if x.is_cuda else rms_norm_rows)(x, weight, eps, offset)


def invariant_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rms_norm.add_rms_norm`, whose kernel is batch-invariant on a GPU."""
    if x.is_cuda:
        return add_rms_norm(x, residual, weight, eps, offset)
    total = x + residual
    return rms_norm_rows(total, weight, eps, offset), total


def invariant_rope(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """As `rope.apply_rope`, whose kernel is batch-invariant on a GPU."""
    return apply_rope(x, cos, signed_sin) if x.is_cuda else rope_rows(x, cos, signed_sin)


FASTEST = RowOps(
    linear=linear,
    gated_linear=gated_linear,
    logits=recorded_logits,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope=apply_rope,
    expert_mlp=recorded_expert_mlp,
    joins=FEW_ROWS,
)
INVARIANT = RowOps(
    linear=recorded_invariant_linear,
    gated_linear=invariant_gated_linear,
    logits=recorded_invariant_logits,
    rms_norm=invariant_rms_norm,
    add_rms_norm=invariant_add_rms_norm,
    rope=invariant_rope,
    expert_mlp=partial(recorded_expert_mlp, is_invariant=True),
    is_invariant=True,
)
