"""Experts with weights of 4 bits: the SwiGLU MLPs of `expert_mlp`, of MXFP4 values or 4-bit integers.

A kernel reads the packed weights and makes the values of a tile in registers while it multiplies, so weights
stay packed for any number of rows; rows are never rounded. Values of MXFP4 are exact in bfloat16. Those of
integers are exact without their scale and zero point, which meet the sums of each group.

A product is one chain of matrix instructions along the inner dimension, whatever the number of rows of a
tile, so the bits of a row do not depend on the rows beside it. With few slots, each slot is a tile of its
own, and no grouping is launched, as in `expert_mlp`.

Sources: Open Compute Project, "Microscaling formats (MX) specification", 2023; Frantar et al., "MARLIN:
Mixed-precision auto-regressive parallel inference on LLMs", 2024.
Legend: T rows, K experts of a row, S = T*K slots, E experts, N outputs of a matrix, H inputs, I intermediate
size of an expert, P parts of the inputs (see `packed_words`), G groups of inputs that share a scale.
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
    SOME_SLOTS,
    check_experts,
    expert_tiles,
    pays_grouping,
    store_expert_tile,
)
from .mxfp4 import mxfp4_quarters, unpack_mxfp4
from .packed_words import SPAN, UNIT, dequantise_words, group_scale, integer_quarters, unpacks_pairs
from .triton_jit import cdiv, jit, jit_varying, tl

MXFP4 = 0  # in the place of the inputs of a group
GROUPS = (MXFP4, 32, 64, 128)


class PackedMatrices(NamedTuple):
    """The matrices `[E, N, H]` of all experts in words int16 `[E, N, 32*P]`, with int32 `scales`.

    `group` MXFP4: for each expert as in `mxfp4`, scales `[E, P, N]`. Otherwise integers in groups of so many
    inputs, for each expert as in `packed_words`, scales `[E, G, N]`.
    """

    words: torch.Tensor
    scales: torch.Tensor
    group: int = MXFP4

    def values(self, in_size: int, dtype: torch.dtype) -> Dequantised:
        """The values `[N, H]` of each expert's matrix, H = `in_size`."""
        return Dequantised(partial(self._values, in_size, dtype), len(self.words))

    def _values(self, in_size: int, dtype: torch.dtype, expert: int) -> torch.Tensor:
        words, scales = self.words[expert], self.scales[expert]
        if self.group == MXFP4:
            return unpack_mxfp4(words, scales, in_size, dtype)
        return dequantise_words(words, scales, self.group, in_size, dtype)


def packed_experts_reference(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: PackedMatrices,
    down: PackedMatrices,
    is_invariant: bool = False,
    form: ExpertForm = PLAIN_EXPERTS,
) -> torch.Tensor:
    """The definition and the CPU path: the weights' values, of one expert at a time."""
    first = gate_up.values(x.shape[1], x.dtype)
    second = down.values(gate_up.words.shape[1] // 2, x.dtype)
    return experts_by_definition(x, ids, weights, first, second, is_invariant, form)


@jit
def _integer_sums(
    b_words: tl.tensor,
    b_x0: tl.tensor,
    b_x1: tl.tensor,
    b_x2: tl.tensor,
    b_x3: tl.tensor,
    p_groups: tl.tensor,
    group_stride: tl.tensor,
    m_out: tl.tensor,
    b_y: tl.tensor,
    GROUP: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
) -> tl.tensor:
    """`b_y` with the product of words of integers with the rows of their quarters, `[OUT, ROWS]`, group by
    group.

    `p_groups`: the words of the first of their groups, the next one `group_stride` behind.
    """
    b_g0 = tl.load(p_groups, mask=m_out, other=0)
    b_g1, b_g2, b_g3 = b_g0, b_g0, b_g0
    if GROUP == 64:
        b_g2 = tl.load(p_groups + group_stride, mask=m_out, other=0)
        b_g3 = b_g2
    if GROUP == 32:
        b_g1 = tl.load(p_groups + group_stride, mask=m_out, other=0)
        b_g2 = tl.load(p_groups + 2 * group_stride, mask=m_out, other=0)
        b_g3 = tl.load(p_groups + 3 * group_stride, mask=m_out, other=0)
    b_0, b_1, b_2, b_3 = integer_quarters(b_words, b_g0, b_g1, b_g2, b_g3, b_x0.dtype, HAS_PAIRS)
    b_dot = tl.dot(b_0, b_x0, input_precision="ieee")
    if GROUP == 32:
        b_y += b_dot * group_scale(b_g0)[:, None]
        b_dot = tl.dot(b_1, b_x1, input_precision="ieee")
        b_y += b_dot * group_scale(b_g1)[:, None]
        b_dot = tl.dot(b_2, b_x2, input_precision="ieee")
        b_y += b_dot * group_scale(b_g2)[:, None]
        b_dot = tl.dot(b_3, b_x3, input_precision="ieee")
    elif GROUP == 64:
        b_dot = tl.dot(b_1, b_x1, b_dot, input_precision="ieee")
        b_y += b_dot * group_scale(b_g0)[:, None]
        b_dot = tl.dot(b_2, b_x2, input_precision="ieee")
        b_dot = tl.dot(b_3, b_x3, b_dot, input_precision="ieee")
    else:
        b_dot = tl.dot(b_1, b_x1, b_dot, input_precision="ieee")
        b_dot = tl.dot(b_2, b_x2, b_dot, input_precision="ieee")
        b_dot = tl.dot(b_3, b_x3, b_dot, input_precision="ieee")
    return b_y + b_dot * group_scale(b_g3)[:, None]


@jit
def packed_sums(
    b_words: tl.tensor,
    b_x0: tl.tensor,
    b_x1: tl.tensor,
    b_x2: tl.tensor,
    b_x3: tl.tensor,
    p_groups: tl.tensor,
    group_stride: tl.tensor,
    m_out: tl.tensor,
    b_y: tl.tensor,
    GROUP: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
) -> tl.tensor:
    """`b_y` with the product of words `[OUT, UNIT]` with the rows of their quarters, `[OUT, ROWS]`.

    `p_groups` `[OUT]`: the first of their scales, the next group's `group_stride` behind. Sums of MXFP4 by
    pairs are smaller by 2^64.
    """
    if GROUP == 0:
        b_scales = tl.load(p_groups, mask=m_out, other=0)
        b_0, b_1, b_2, b_3 = mxfp4_quarters(b_words, b_scales, b_x0.dtype, HAS_PAIRS)
        b_y = tl.dot(b_0, b_x0, b_y, input_precision="ieee")
        b_y = tl.dot(b_1, b_x1, b_y, input_precision="ieee")
        b_y = tl.dot(b_2, b_x2, b_y, input_precision="ieee")
        b_y = tl.dot(b_3, b_x3, b_y, input_precision="ieee")
    else:
        b_y = _integer_sums(
            b_words, b_x0, b_x1, b_x2, b_x3, p_groups, group_stride, m_out, b_y, GROUP, HAS_PAIRS
        )
    return b_y


@jit
def x_quarter(
    p_rows: tl.tensor,
    i_in: tl.tensor,
    in_size: tl.tensor,
    m_row: tl.tensor,
    IS_EVEN: tl.constexpr,
) -> tl.tensor:
    """Inputs `i_in` of the rows of a tile, `[UNIT, ROWS]`, from `p_rows` `[1, ROWS]` on. `in_size` is one for
    all rows, or of each, `[1, ROWS]`.
    """
    if IS_EVEN:
        return tl.load(p_rows + i_in[:, None], mask=m_row[None, :], other=0.0)
    else:  # the last part of the inputs is filled up
        return tl.load(p_rows + i_in[:, None], mask=(i_in[:, None] < in_size) & m_row[None, :], other=0.0)


@jit_varying("num_slots")
def _packed_experts_kernel(
    p_x: tl.tensor,
    p_words: tl.tensor,
    p_scales: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    p_slots: tl.tensor,
    p_experts: tl.tensor,
    p_num_tiles: tl.tensor,
    num_slots: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    x_stride: tl.tensor,
    num_words: tl.tensor,
    expert_scales: tl.tensor,
    first_expert: tl.tensor,
    num_experts: tl.tensor,
    SLOTS_A_ROW: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    IS_PART: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
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
    i_unit = tl.arange(0, UNIT)
    p_rows = p_x + (b_slot // SLOTS_A_ROW).to(tl.int64)[None, :] * x_stride
    rows_of_expert = out_size * 2 if IS_GATED else out_size
    first_row = expert * rows_of_expert + tl.minimum(i_out, out_size - 1)
    p_outs = p_words + first_row[:, None] * num_words + i_unit[None, :]
    p_ups = p_outs + out_size.to(tl.int64) * num_words
    # the scales of a part of 4*UNIT inputs: a word of MXFP4, or one for each group
    GROUPS: tl.constexpr = 1 if GROUP == 0 else 4 * UNIT // GROUP
    p_groups = p_scales + expert * expert_scales + i_out
    b_y = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    b_up = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    for i_part in range(0, num_words // UNIT):
        first = i_part * 4 * UNIT + i_unit
        b_x0 = x_quarter(p_rows, first, in_size, m_slot, IS_EVEN)
        b_x1 = x_quarter(p_rows, first + UNIT, in_size, m_slot, IS_EVEN)
        b_x2 = x_quarter(p_rows, first + 2 * UNIT, in_size, m_slot, IS_EVEN)
        b_x3 = x_quarter(p_rows, first + 3 * UNIT, in_size, m_slot, IS_EVEN)
        p_part = p_groups + i_part * GROUPS * rows_of_expert
        b_words = tl.load(p_outs + i_part * UNIT)
        b_y = packed_sums(
            b_words, b_x0, b_x1, b_x2, b_x3, p_part, rows_of_expert, m_out, b_y, GROUP, HAS_PAIRS
        )
        if IS_GATED:
            p_part += out_size
            b_words = tl.load(p_ups + i_part * UNIT)
            b_up = packed_sums(
                b_words, b_x0, b_x1, b_x2, b_x3, p_part, rows_of_expert, m_out, b_up, GROUP, HAS_PAIRS
            )
    if GROUP == 0 and HAS_PAIRS:
        b_y *= 18446744073709551616.0  # 2^64, by which `mxfp4_quarters` makes them smaller
        b_up *= 18446744073709551616.0
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


class PackedExpertTile(NamedTuple):
    """Launch configuration of a product: rows and outputs of a tile."""

    rows: int
    out: int
    num_warps: int
    num_stages: int


def packed_expert_tile(
    num_slots: int, num_experts: int, dtype: torch.dtype, group: int = MXFP4
) -> PackedExpertTile:
    """The tile for `num_slots` slots of `num_experts` experts, by their mean share, and weights in groups of
    `group`. It does not change the bits: all tiles take the same matrix instruction of Hopper.

    These were the best of 34 tiles on an H200 for experts of gpt-oss-20b and of Qwen3-30B-A3B with 512 to
    8192 rows, and of 6 with fewer. Unpacking costs as much as a product with 64 rows, so a second tile of an
    expert costs as much as the first. Tiles of integers with more rows would need more registers than there
    are.
    """
    if dtype == torch.float32:  # no matrix instruction of full precision; it is for tests
        return PackedExpertTile(rows=MIN_TILE_ROWS, out=32, num_warps=4, num_stages=2)
    share = num_slots // num_experts
    if share <= FEW_SLOTS:
        return PackedExpertTile(rows=MIN_TILE_ROWS, out=64, num_warps=4, num_stages=3)
    if share <= SOME_SLOTS:
        return PackedExpertTile(rows=32, out=64, num_warps=4, num_stages=3)
    rows = 128 if share > 256 and group == MXFP4 else 64
    return PackedExpertTile(rows=rows, out=128, num_warps=8, num_stages=3)


def packed_experts_triton(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: PackedMatrices,
    down: PackedMatrices,
    *,
    form: ExpertForm = PLAIN_EXPERTS,
    tile: PackedExpertTile | None = None,
    is_grouped: bool | None = None,
    has_pairs: bool | None = None,
) -> torch.Tensor:
    """Launch; arguments as in `packed_experts`. `tile` and `is_grouped` are chosen by the shapes.

    `has_pairs`: whether bytes are unpacked by instructions for pairs of bfloat16; by default on a GPU.
    """
    _check(x, ids, weights, gate_up, down)
    if x.shape[0] == 0:
        return x.new_empty(x.shape)
    num_experts, double, _ = gate_up.words.shape
    num_slots, top_k = ids.numel(), ids.shape[1]
    if is_grouped is None:
        is_grouped = pays_grouping(num_slots, num_experts, form.total)
    if tile is None:
        tile = packed_expert_tile(num_slots, form.total or num_experts, x.dtype, gate_up.group)
    tiles, num_tiles = expert_tiles(ids, num_experts, tile.rows, is_grouped, form.first)
    inner = torch.empty(num_slots, double // 2, dtype=x.dtype, device=x.device)
    outputs = torch.empty(num_slots, x.shape[1], dtype=x.dtype, device=x.device)
    source = x if x.stride(1) == 1 else x.contiguous()
    for matrices, bias, target, slots_a_row in (
        (gate_up, form.gate_up_bias, inner, top_k),
        (down, form.down_bias, outputs, 1),
    ):
        out_size, in_size = target.shape[1], source.shape[1]
        _packed_experts_kernel[(num_tiles * cdiv(out_size, tile.out),)](
            source,
            matrices.words,
            matrices.scales,
            matrices.scales if bias is None else bias,
            target,
            *tiles,
            num_slots,
            out_size,
            in_size,
            source.stride(0),
            matrices.words.shape[2],
            matrices.scales.stride(0),
            form.first,
            num_experts,
            SLOTS_A_ROW=slots_a_row,
            IS_GROUPED=is_grouped,
            IS_PART=form.total > 0,
            IS_GATED=matrices is gate_up,
            IS_EVEN=in_size % SPAN == 0,
            HAS_BIAS=bias is not None,
            HAS_PAIRS=unpacks_pairs(x, has_pairs),
            LIMIT=form.limit,
            ALPHA=form.alpha,
            GROUP=matrices.group,
            UNIT=UNIT,
            BLOCK_OUT=tile.out,
            BLOCK_ROWS=tile.rows,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        source = target
    return combine_experts_triton(outputs, weights, ids if form.total else None, form.first, num_experts)


def _check(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: PackedMatrices, down: PackedMatrices
) -> None:
    check_experts("packed_experts", x, ids, weights)
    num_experts, double, _ = gate_up.words.shape
    if double % 2:
        raise ValueError(f"packed_experts: {double} outputs of gate and up are odd")
    check_matrices(gate_up, num_experts, double, x.shape[1])
    check_matrices(down, num_experts, x.shape[1], double // 2)


def check_matrices(matrices: PackedMatrices, num_experts: int, out_size: int, in_size: int) -> None:
    """Raises ValueError unless these are the matrices `[E, N, H]` of so many experts, contiguous."""
    words, scales, group = matrices
    parts = cdiv(in_size, SPAN)
    wanted = [(num_experts, out_size, parts * UNIT)]
    wanted.append((num_experts, parts if group == MXFP4 else parts * SPAN // max(group, 1), out_size))
    fits = group in GROUPS and in_size % (group or UNIT) == 0
    fits = fits and [tuple(words.shape), tuple(scales.shape)] == wanted
    fits = fits and (words.dtype, scales.dtype) == (torch.int16, torch.int32)
    if not fits or not (words.is_contiguous() and scales.is_contiguous()):
        raise ValueError(
            f"packed_experts: words {tuple(words.shape)} {words.dtype} and scales {tuple(scales.shape)} "
            f"{scales.dtype} in groups of {group}; expected int16 and int32 {wanted}, contiguous, for "
            f"{num_experts} matrices [{out_size}, {in_size}]"
        )


def packed_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: PackedMatrices,
    down: PackedMatrices,
    is_invariant: bool = False,
    form: ExpertForm = PLAIN_EXPERTS,
) -> torch.Tensor:
    """The weighted sum of the chosen experts: `x` `[T, H]`, `ids` int32 and `weights` float32 `[T, K]`,
    `gate_up` of matrices `[E, 2*I, H]` (gate first), `down` of `[E, H, I]` -> `[T, H]`.

    `is_invariant`: the bits of a row do not depend on the rows beside it; on a GPU they never do. `form`:
    biases, the gate, and experts that are elsewhere. Raises ValueError if shapes or dtypes do not fit.
    """
    if x.is_cuda:
        return packed_experts_triton(x, ids, weights, gate_up, down, form=form)
    _check(x, ids, weights, gate_up, down)
    return packed_experts_reference(x, ids, weights, gate_up, down, is_invariant, form)
