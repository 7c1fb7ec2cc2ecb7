"""The SwiGLU MLPs of a mixture-of-experts layer, each row through the experts that its router chose.

Experts may have biases, and the gate of gpt-oss: (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g) with
g = min(gate, limit), instead of silu(gate) * up.

Both products are grouped: a tile of rows shares the weights of one expert. With few slots, each slot is a
tile of its own, since the experts differ anyway, and no grouping is launched. With many, `prompt_experts`
multiplies where it can. A product is one chain of matrix instructions along the inner dimension, as in
`skinny_linear`, and the experts of a row are added in the order of its choices, so the bits of a row do not
depend on the rows beside it.

Of experts that are elsewhere nothing is computed: a row's sum is over those that are here.

Legend: T rows, K experts of a row, S = T*K slots, E experts, H hidden size, I intermediate size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from .combine_experts import combine_experts_reference, combine_experts_triton
from .expert_products import (
    FEW_SLOTS,
    MIN_TILE_ROWS,
    SOME_SLOTS,
    expert_tiles,
    pays_grouping,
    store_expert_tile,
)
from .invariant_rows import exp_rounded, linear_rows, silu_mul_rows
from .prompt_experts import TILE_ROWS, can_multiply, prompt_product_triton
from .silu_mul import silu_mul_reference
from .triton_jit import cdiv, jit_varying, tl


class ExpertForm(NamedTuple):
    """What experts may have beside their matrices: biases `[E, 2*I]` and `[E, H]`, and the gate of gpt-oss.

    `limit` 0.0: the gate is silu. `first`: the id of the first of the E experts. `total`: the number of all
    experts, if there are others elsewhere, of which ids tell too; otherwise 0.
    """

    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    limit: float = 0.0
    alpha: float = 0.0
    first: int = 0
    total: int = 0


PLAIN_EXPERTS = ExpertForm()


class Matrices(Protocol):
    """A matrix for each expert here: a tensor, or what makes each when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, expert: int, /) -> torch.Tensor: ...


class Dequantised:
    """The matrices of `count` experts, each made of its stored form when it is asked for, and not kept."""

    def __init__(self, make: Callable[[int], torch.Tensor], count: int) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, expert: int, /) -> torch.Tensor:
        return self._make(expert)


def clamped_gate(gate_up: torch.Tensor, form: ExpertForm, is_invariant: bool = False) -> torch.Tensor:
    """The gate of gpt-oss: `gate_up` `[..., 2*I]` (gate first) -> `[..., I]`, in float32, rounded once."""
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    scaled = gate * form.alpha
    share = 1.0 / (exp_rounded(-scaled) + 1.0) if is_invariant else torch.sigmoid(scaled)
    return ((up + 1.0) * (gate * share)).to(gate_up.dtype)


def expert_mlp_reference(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Matrices,
    down: Matrices,
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = F.linear,
    gate: Callable[[torch.Tensor], torch.Tensor] = silu_mul_reference,
    form: ExpertForm = PLAIN_EXPERTS,
) -> torch.Tensor:
    """The definition and the CPU path: an expert's output is rounded to the dtype and weighted in float32."""
    biases = form.gate_up_bias, form.down_bias
    num_rows, top_k = ids.shape
    outputs = torch.zeros(num_rows * top_k, x.shape[1], dtype=x.dtype)
    flat = ids.flatten() - form.first
    for expert in sorted(set(flat.tolist())):
        if form.total and not 0 <= expert < len(gate_up):
            continue
        slots = (flat == expert).nonzero().flatten()
        rows = x[slots // top_k]
        first, second = (None if bias is None else bias[expert] for bias in biases)
        outputs[slots] = product(gate(product(rows, gate_up[expert], first)), down[expert], second)
    return combine_experts_reference(outputs, weights).to(x.dtype)


def experts_by_definition(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Matrices,
    down: Matrices,
    is_invariant: bool = False,
    form: ExpertForm = PLAIN_EXPERTS,
) -> torch.Tensor:
    """`expert_mlp_reference` with the products and the gate of `form`; `is_invariant`: in batch-invariant
    operations.
    """
    gate: Callable[[torch.Tensor], torch.Tensor] = silu_mul_rows if is_invariant else silu_mul_reference
    if form.limit:
        gate = partial(clamped_gate, form=form, is_invariant=is_invariant)
    product = linear_rows if is_invariant else F.linear
    return expert_mlp_reference(x, ids, weights, gate_up, down, product, gate, form)


@jit_varying("num_slots")
def _expert_kernel(
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    p_slots: tl.tensor,
    p_experts: tl.tensor,
    p_num_tiles: tl.tensor,
    num_slots: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    x_stride: tl.tensor,
    first_expert: tl.tensor,
    num_experts: tl.tensor,
    SLOTS_A_ROW: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    IS_PART: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    # outputs are the rows of the product, because they are the long side
    num_outs = tl.cdiv(out_size, BLOCK_OUT)
    i_tile = tl.program_id(0) // num_outs
    i_out = (tl.program_id(0) % num_outs) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    i_row = tl.arange(0, BLOCK_ROWS)
    if IS_GROUPED:
        if i_tile >= tl.load(p_num_tiles):
            return
        b_slot = tl.load(p_slots + i_tile * BLOCK_ROWS + i_row)
    else:
        b_slot = tl.where(i_row == 0, i_tile, num_slots)
    expert = tl.load(p_experts + i_tile).to(tl.int64)
    if IS_PART and not IS_GROUPED:
        expert -= first_expert
        if (expert < 0) | (expert >= num_experts):
            return
    m_slot = b_slot < num_slots
    m_out = i_out < out_size
    rows_of_expert = out_size * 2 if IS_GATED else out_size
    i_offset = tl.arange(0, BLOCK_IN)
    p_rows = p_x + (b_slot // SLOTS_A_ROW).to(tl.int64)[None, :] * x_stride
    first_row = expert * rows_of_expert + tl.minimum(i_out, out_size - 1)
    p_outs = p_weight + first_row[:, None] * in_size
    p_ups = p_outs + out_size.to(tl.int64) * in_size
    b_y = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    b_up = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    for first in range(0, in_size, BLOCK_IN):
        i_in = first + i_offset
        m_in = i_in < in_size
        b_x = tl.load(p_rows + i_in[:, None], mask=m_in[:, None] & m_slot[None, :], other=0.0)
        m_weight = m_out[:, None] & m_in[None, :]
        b_weight = tl.load(p_outs + i_in[None, :], mask=m_weight, other=0.0)
        b_y = tl.dot(b_weight, b_x, b_y, input_precision="ieee")
        if IS_GATED:
            b_weight = tl.load(p_ups + i_in[None, :], mask=m_weight, other=0.0)
            b_up = tl.dot(b_weight, b_x, b_up, input_precision="ieee")
    store_expert_tile(
        b_y,
        b_up,
        p_bias + expert * rows_of_expert,
        p_y,
        b_slot,
        i_out,
        num_slots,
        out_size,
        HAS_BIAS,
        IS_GATED,
        LIMIT,
        ALPHA,
    )


class ExpertTile(NamedTuple):
    """Launch configuration of a grouped product: rows, outputs and inner columns of a tile."""

    rows: int
    out: int
    inner: int
    num_warps: int
    num_stages: int


# float32 has no matrix instruction of full precision; it is for tests.
FLOAT32 = ExpertTile(rows=MIN_TILE_ROWS, out=32, inner=32, num_warps=4, num_stages=2)


def expert_tile(num_slots: int, num_experts: int, dtype: torch.dtype) -> ExpertTile:
    """The tile for `num_slots` slots of `num_experts` experts, by their mean share. It does not change the
    bits.
    """
    if dtype == torch.float32:
        return FLOAT32
    share = num_slots // num_experts
    if share <= FEW_SLOTS:
        return ExpertTile(rows=MIN_TILE_ROWS, out=64, inner=128, num_warps=4, num_stages=3)
    if share <= SOME_SLOTS:
        return ExpertTile(rows=32, out=64, inner=128, num_warps=4, num_stages=3)
    return ExpertTile(rows=64, out=128, inner=64, num_warps=8, num_stages=3)


def expert_mlp_triton(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    form: ExpertForm = PLAIN_EXPERTS,
    tile: ExpertTile | None = None,
    is_grouped: bool | None = None,
    is_prompt: bool | None = None,
) -> torch.Tensor:
    """Launch on `x` `[T, H]`, `ids` int32 and `weights` float32 `[T, K]`, `gate_up` `[E, 2*I, H]`, `down`
    `[E, H, I]`; returns `[T, H]`.

    `tile`, `is_grouped` and `is_prompt`, for the products of `prompt_experts`, are chosen by the shapes and
    the device. None of them changes the bits. Raises ValueError as `expert_mlp`.
    """
    _check(x, ids, weights, gate_up, down)
    num_rows, top_k = ids.shape
    num_experts, double, hidden = gate_up.shape
    num_slots = ids.numel()
    if num_rows == 0:
        return x.new_empty(x.shape)
    if is_grouped is None:
        is_grouped = pays_grouping(num_slots, num_experts, form.total)
    is_part = form.total > 0
    if is_prompt is None:
        share = num_slots // (form.total or num_experts)
        is_prompt = tile is None and share > SOME_SLOTS and can_multiply(x, gate_up, down)
    is_prompt = is_prompt and is_grouped
    tile = expert_tile(num_slots, form.total or num_experts, x.dtype) if tile is None else tile
    tile_rows = TILE_ROWS if is_prompt else tile.rows
    tiles, num_tiles = expert_tiles(ids, num_experts, tile_rows, is_grouped, form.first)
    inner = torch.empty(num_slots, double // 2, dtype=x.dtype, device=x.device)
    outputs = torch.empty(num_slots, hidden, dtype=x.dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    for source, weight, bias, target, slots_a_row in (
        (x, gate_up, form.gate_up_bias, inner, top_k),
        (inner, down, form.down_bias, outputs, 1),
    ):
        if is_prompt:
            prompt_product_triton(
                source,
                weight,
                bias,
                target,
                tiles,
                slots_a_row=slots_a_row,
                is_gated=weight is gate_up,
                limit=form.limit,
                alpha=form.alpha,
            )
            continue
        out_size = target.shape[1]
        _expert_kernel[(num_tiles * cdiv(out_size, tile.out),)](
            source,
            weight,
            weight if bias is None else bias,
            target,
            *tiles,
            num_slots,
            out_size,
            source.shape[1],
            source.stride(0),
            form.first,
            num_experts,
            SLOTS_A_ROW=slots_a_row,
            IS_GROUPED=is_grouped,
            IS_PART=is_part,
            IS_GATED=weight is gate_up,
            HAS_BIAS=bias is not None,
            LIMIT=form.limit,
            ALPHA=form.alpha,
            BLOCK_OUT=tile.out,
            BLOCK_IN=tile.inner,
            BLOCK_ROWS=tile.rows,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    held = ids if is_part else None
    return combine_experts_triton(outputs, weights, held, form.first, num_experts)


def _check(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> None:
    num_experts, double, hidden = gate_up.shape
    shapes = [tuple(each.shape) for each in (x, ids, weights, gate_up, down)]
    if (
        x.dim() != 2
        or ids.shape != weights.shape
        or ids.shape[0] != x.shape[0]
        or x.shape[1] != hidden
        or down.shape != (num_experts, hidden, double // 2)
        or double % 2
    ):
        raise ValueError(
            f"expert_mlp: x, ids, weights, gate_up, down of shapes {shapes}; "
            "expected [T, H], [T, K], [T, K], [E, 2*I, H], [E, H, I]"
        )
    if not x.dtype == gate_up.dtype == down.dtype:
        raise ValueError(
            f"expert_mlp: x is {x.dtype}, the weights {gate_up.dtype} and {down.dtype}; they must be equal"
        )
    if (ids.dtype, weights.dtype) != (torch.int32, torch.float32):
        raise ValueError(f"expert_mlp: ids are {ids.dtype}, weights {weights.dtype}; expected int32, float32")


def expert_mlp(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    is_invariant: bool = False,
    form: ExpertForm = PLAIN_EXPERTS,
) -> torch.Tensor:
    """The weighted sum of the chosen experts: `x` `[T, H]`, `ids` int32 and `weights` float32 `[T, K]`,
    `gate_up` `[E, 2*I, H]` (gate first), `down` `[E, H, I]` -> `[T, H]`.

    `is_invariant`: the bits of a row do not depend on the rows beside it; on a GPU they never do. `form`:
    biases, the gate, and experts that are elsewhere. Raises ValueError if shapes or dtypes differ.
    """
    if x.is_cuda:
        return expert_mlp_triton(x, ids, weights, gate_up, down, form=form)
    _check(x, ids, weights, gate_up, down)
    return experts_by_definition(x, ids, weights, gate_up, down, is_invariant, form)
