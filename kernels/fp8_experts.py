"""Experts with weights of 8-bit floating point: the SwiGLU MLPs of `expert_mlp`, of `fp8_scales` values.

The definition multiplies rows with the values of the weights. With few slots `fp8_expert_rows` does that, a
slot at a time. More slots are grouped by expert, and their rows rounded to 8 bits, each with a scale of its
own (in blocks of 128 inputs if the weights have blocks), for 8-bit matrix instructions: weights are never
converted. The rows of the second product are rounded again.

A product is one chain of matrix instructions along the inner dimension, whatever the number of rows of a
tile, so where rows are rounded the bits of a row do not depend on the rows beside it.

Legend: T rows, K experts of a row, S = T*K slots, E experts, H hidden size, I intermediate size of an expert.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from .combine_experts import combine_experts_triton
from .expert_mlp import PLAIN_EXPERTS, Dequantised, ExpertForm, experts_by_definition
from .expert_products import (
    FEW_SLOTS,
    MIN_TILE_ROWS,
    check_experts,
    expert_tiles,
    store_expert_tile,
)
from .fp8_expert_rows import fp8_expert_rows_triton
from .fp8_scales import BLOCK, FP8, check_scales, dequantise_fp8
from .fp8_tile import by_outputs, fp8_tile
from .quantise_rows import quantise_rows
from .triton_jit import cdiv, jit_varying, tl

FEW_SHARE = 6  # experts for each slot, from which on slots are multiplied by themselves
MIDDLE_SLOTS, MANY_SLOTS = 32, 80  # of an expert on average, up to which tiles have 32 and 64 rows


class Fp8Matrices(NamedTuple):
    """The e4m3 `weight` `[E, N, H]` of all experts with float32 `scales`, for each expert in a form of
    `fp8_scales`: `[E, N]`, or `[E, ceil(N / BLOCK), ceil(H / BLOCK)]`.
    """

    weight: torch.Tensor
    scales: torch.Tensor

    @property
    def has_blocks(self) -> bool:
        return self.scales.dim() == 3

    def values(self, dtype: torch.dtype) -> Dequantised:
        """The values of each expert's matrix."""
        return Dequantised(partial(self._values, dtype), len(self.weight))

    def _values(self, dtype: torch.dtype, expert: int) -> torch.Tensor:
        return dequantise_fp8(self.weight[expert], self.scales[expert], dtype)


def fp8_experts_reference(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Fp8Matrices,
    down: Fp8Matrices,
    is_invariant: bool = False,
    form: ExpertForm = PLAIN_EXPERTS,
) -> torch.Tensor:
    """The definition and the CPU path: the weights' values, of one expert at a time."""
    first, second = gate_up.values(x.dtype), down.values(x.dtype)
    return experts_by_definition(x, ids, weights, first, second, is_invariant, form)


@jit_varying("num_slots", "x_scale_stride")
def _fp8_experts_kernel(
    p_x: tl.tensor,
    p_x_scales: tl.tensor,
    p_weight: tl.tensor,
    p_scales: tl.tensor,
    p_y: tl.tensor,
    p_slots: tl.tensor,
    p_experts: tl.tensor,
    p_num_tiles: tl.tensor,
    num_slots: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    x_stride: tl.tensor,
    x_scale_stride: tl.tensor,
    scale_stride: tl.tensor,
    expert_scales: tl.tensor,
    SLOTS_A_ROW: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    # outputs are the rows of the product, because they are the long side
    num_outs = tl.cdiv(out_size, BLOCK_OUT)
    i_tile = tl.program_id(0) // num_outs
    if i_tile >= tl.load(p_num_tiles):
        return
    i_out = (tl.program_id(0) % num_outs) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    b_slot = tl.load(p_slots + i_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))
    expert = tl.load(p_experts + i_tile).to(tl.int64)
    m_slot = b_slot < num_slots
    m_out = i_out < out_size
    i_row = (b_slot // SLOTS_A_ROW).to(tl.int64)
    p_rows = p_x + i_row[None, :] * x_stride
    rows_of_expert = out_size * 2 if IS_GATED else out_size
    first_row = expert * rows_of_expert + tl.minimum(i_out, out_size - 1)
    p_outs = p_weight + first_row[:, None] * in_size
    p_row_scales = p_x_scales + i_row
    p_out_scales = p_scales + expert * expert_scales
    i_first_out = (tl.program_id(0) % num_outs) * BLOCK_OUT
    b_y, b_up = fp8_tile(
        p_rows, p_outs, p_row_scales, p_out_scales, i_first_out, m_slot, 0, in_size, out_size, in_size,
        x_scale_stride, scale_stride, HAS_BLOCKS, IS_ROUNDED, IS_GATED, IS_EVEN, SCALE_BLOCK, BLOCK_IN, "",
    )  # fmt: skip
    if not HAS_BLOCKS:
        b_y, b_up = by_outputs(
            b_y, b_up, p_row_scales, p_out_scales, i_out, m_slot, m_out, out_size, IS_ROUNDED, IS_GATED
        )
    store_expert_tile(b_y, b_up, p_scales, p_y, b_slot, i_out, num_slots, out_size, False, IS_GATED, 0.0, 0.0)


class Fp8ExpertTile(NamedTuple):
    """Launch configuration of a grouped product: rows, outputs and inner columns of a tile."""

    rows: int
    out: int
    inner: int
    num_warps: int
    num_stages: int


def fp8_expert_tile(num_slots: int, num_experts: int, dtype: torch.dtype) -> Fp8ExpertTile:
    """The tile for `num_slots` slots of `num_experts` experts, by their mean share; `dtype`: that of the rows
    in the product. It does not change the bits: all tiles take the same matrix instruction of Hopper.

    A tile of inputs lies in one block of scales, and so does one of outputs. With blocks each product needs
    registers beside its sums: tiles of 128 x 128 take twice the time of those of 128 x 64.
    """
    if dtype != FP8:  # no matrix instruction of full precision; it is for tests
        return Fp8ExpertTile(rows=MIN_TILE_ROWS, out=32, inner=32, num_warps=4, num_stages=2)
    share = num_slots // num_experts
    if share <= FEW_SLOTS:
        return Fp8ExpertTile(rows=MIN_TILE_ROWS, out=64, inner=128, num_warps=4, num_stages=3)
    if share <= MIDDLE_SLOTS:
        return Fp8ExpertTile(rows=32, out=64, inner=128, num_warps=4, num_stages=3)
    if share <= MANY_SLOTS:
        return Fp8ExpertTile(rows=64, out=64, inner=128, num_warps=4, num_stages=3)
    return Fp8ExpertTile(rows=128, out=64, inner=128, num_warps=4, num_stages=3)


def fp8_experts_triton(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Fp8Matrices,
    down: Fp8Matrices,
    *,
    form: ExpertForm = PLAIN_EXPERTS,
    is_rounded: bool = True,
    tile: Fp8ExpertTile | None = None,
) -> torch.Tensor:
    """Launch on grouped slots; arguments as in `fp8_experts`. `is_rounded`: rows are rounded to 8 bits before
    each product.
    """
    _check(x, ids, weights, gate_up, down, form)
    if x.shape[0] == 0:
        return x.new_empty(x.shape)
    num_experts, double, hidden = gate_up.weight.shape
    num_slots, top_k = ids.numel(), ids.shape[1]
    if tile is None:
        dtype = FP8 if is_rounded else x.dtype
        tile = fp8_expert_tile(num_slots, form.total or num_experts, dtype)
    tiles, num_tiles = expert_tiles(ids, num_experts, tile.rows, True, form.first)
    inner = torch.empty(num_slots, double // 2, dtype=x.dtype, device=x.device)
    outputs = torch.empty(num_slots, hidden, dtype=x.dtype, device=x.device)
    source = x if x.stride(1) == 1 else x.contiguous()
    for matrices, target, slots_a_row in ((gate_up, inner, top_k), (down, outputs, 1)):
        out_size, in_size = target.shape[1], source.shape[1]
        rows, row_scales = source, matrices.scales
        if is_rounded:
            # a dry run meets numbers of rows, not of slots
            group = BLOCK if matrices.has_blocks else in_size
            rows, row_scales = quantise_rows(source, group, shares=False)
        _fp8_experts_kernel[(num_tiles * cdiv(out_size, tile.out),)](
            rows,
            row_scales,
            matrices.weight,
            matrices.scales,
            target,
            *tiles,
            num_slots,
            out_size,
            in_size,
            rows.stride(0),
            row_scales.stride(-1),
            matrices.scales.shape[-1],
            matrices.scales.stride(0),
            SLOTS_A_ROW=slots_a_row,
            IS_GATED=matrices is gate_up,
            HAS_BLOCKS=matrices.has_blocks,
            IS_ROUNDED=is_rounded,
            IS_EVEN=in_size % tile.inner == 0,
            SCALE_BLOCK=BLOCK,
            BLOCK_OUT=tile.out,
            BLOCK_IN=tile.inner,
            BLOCK_ROWS=tile.rows,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        source = target
    return combine_experts_triton(outputs, weights, ids if form.total else None, form.first, num_experts)


def _check(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Fp8Matrices,
    down: Fp8Matrices,
    form: ExpertForm,
) -> None:
    check_experts("fp8_experts", x, ids, weights)
    if form[:4] != PLAIN_EXPERTS[:4]:
        raise ValueError("fp8_experts: biases and other gates than silu are for experts in other forms")
    check_fp8_matrices("fp8_experts", gate_up, down, x.shape[1])


def check_fp8_matrices(op: str, gate_up: Fp8Matrices, down: Fp8Matrices, width: int) -> None:
    """Raises ValueError unless the matrices fit together and rows of `width` values, and have scales."""
    num_experts, double, hidden = gate_up.weight.shape
    unit = BLOCK if gate_up.has_blocks else 1
    if down.weight.shape != (num_experts, hidden, double // 2) or width != hidden or double % (2 * unit):
        raise ValueError(
            f"{op}: rows of {width} values, gate_up {tuple(gate_up.weight.shape)}, down "
            f"{tuple(down.weight.shape)}; expected H values, [E, 2*I, H], [E, H, I], I a multiple of {unit}"
        )
    for matrices in (gate_up, down):
        check_scales(op, matrices.weight[0], matrices.scales[0])
        if len(matrices.scales) != num_experts or not matrices.weight.is_contiguous():
            raise ValueError(f"{op}: {len(matrices.scales)} experts have scales, of {num_experts}")


def fp8_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Fp8Matrices,
    down: Fp8Matrices,
    is_invariant: bool = False,
    form: ExpertForm = PLAIN_EXPERTS,
) -> torch.Tensor:
    """The weighted sum of the chosen experts: `x` `[T, H]`, `ids` int32 and `weights` float32 `[T, K]`,
    `gate_up` `[E, 2*I, H]` (gate first), `down` `[E, H, I]` -> `[T, H]`.

    A GPU needs compute capability 8.9. `is_invariant`: the bits of a row do not depend on the rows beside it;
    then rows are rounded in any number. `form`: experts that are elsewhere. Raises ValueError if shapes or
    dtypes do not fit, and for another gate or biases.
    """
    _check(x, ids, weights, gate_up, down, form)
    if not x.is_cuda:
        return fp8_experts_reference(x, ids, weights, gate_up, down, is_invariant, form)
    if x.dtype == torch.float32:
        return fp8_experts_triton(x, ids, weights, gate_up, down, form=form, is_rounded=False)
    num_experts = form.total or gate_up.weight.shape[0]
    is_few = ids.shape[0] == 1 or 0 < ids.numel() <= num_experts // FEW_SHARE  # the slots of a row differ
    if not is_invariant and is_few:
        return fp8_expert_rows_triton(x, ids, weights, *gate_up, *down, form=form)
    return fp8_experts_triton(x, ids, weights, gate_up, down, form=form)
