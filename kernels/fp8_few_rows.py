"""Projections of two to MAX_ROWS rows with weights of 8-bit floating point, with the rows as they are.

Values of e4m3 become bfloat16 in the registers that matrix instructions read, and are exact there. Rows need
not be rounded to 8 bits first, which would take a launch before each product. See `split_rows`.

Legend: T rows, N outputs, H inputs, LINES lines of weights of a tile, SPAN inputs of a part.
"""

from __future__ import annotations

import torch

from .chained_launch import release_next, wait_for_previous
from .fp8_scales import BLOCK, Fp8Weight
from .packed_words import unpacks_pairs
from .row_product import load_residual, load_squares
from .split_rows import SplitProduct, SplitTile, split_columns, split_lines, store_lines, sum_splits
from .triton_jit import jit, jit_varying, tl

MAX_ROWS = 4  # 8 rows of an 8B Llama take longer than rounded ones
SPAN = BLOCK  # of a part, which then lies in one block of scales


def most_rows(dtype: torch.dtype) -> int:
    """Up to how many rows of `dtype` are multiplied as they are: float16 has no instruction here that makes
    pairs.
    """
    return 1 if dtype == torch.float16 else MAX_ROWS


@jit
def _values(b_bytes: tl.tensor, dtype: tl.constexpr, HAS_PAIRS: tl.constexpr) -> tl.tensor:
    """e4m3 in int8 `[LINES, SPAN]`, in `dtype`.

    HAS_PAIRS makes two bfloat16 with each instruction. The seven bits below the sign become the lowest bits
    of exponent and mantissa, which makes a value smaller by 2^120, also one that is below the smallest normal
    one, and a product makes up for it. All finite values are exact; NaN becomes 480.
    """
    if HAS_PAIRS:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t, u, scale, zero;
            mov.b32 scale, 0x7b807b80;
            mov.b32 zero, 0x80008000;
            prmt.b32 t, $2, 0, 0x1404;
            shr.u32 u, t, 4;
            and.b32 u, u, 0x07f007f0;
            lop3.b32 t, t, 0x80008000, u, 0xea;
            fma.rn.bf16x2 $0, t, scale, zero;
            prmt.b32 t, $2, 0, 0x3424;
            shr.u32 u, t, 4;
            and.b32 u, u, 0x07f007f0;
            lop3.b32 t, t, 0x80008000, u, 0xea;
            fma.rn.bf16x2 $1, t, scale, zero;
            }
            """,
            "=&r,=&r,r",
            [b_bytes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        return b_bytes.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(dtype)


@jit_varying("num_rows")
def _fp8_few_rows_kernel(
    p_x: tl.tensor,
    p_squares: tl.tensor,
    p_weight: tl.tensor,
    p_scales: tl.tensor,
    p_bias: tl.tensor,
    p_residual: tl.tensor,
    p_norm: tl.tensor,
    p_y: tl.tensor,
    p_z: tl.tensor,
    p_sums: tl.tensor,
    num_rows: tl.tensor,
    num_squares: tl.tensor,
    out_size: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_SUM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    IN_SIZE: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    wait_for_previous(CHAINED)
    i_tile = tl.program_id(0)
    i_row = tl.arange(0, BLOCK_ROWS)
    m_row = i_row < num_rows
    i_out = i_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m_out = i_out < out_size
    b_squares = load_squares(p_squares, num_squares, i_row, m_row, IS_SCALED, BLOCK_SQUARES)
    b_residual, b_norm = load_residual(
        p_residual, p_norm, i_row, m_row, i_out, m_out, out_size, IS_SUM, HAS_NORM, OFFSET
    )
    _, i_own, i_line_split = split_lines(i_tile, out_size, IS_GATED, BLOCK_OUT, SPLITS)
    i_column_row, i_column_split, m_column = split_columns(num_rows, BLOCK_ROWS, COLUMNS, SPLITS)
    IS_EVEN: tl.constexpr = IN_SIZE % (SPLITS * SPAN) == 0
    i_in = tl.arange(0, SPAN)
    p_columns = p_x + (i_column_row * x_stride + i_column_split * SPAN)[None, :] + i_in[:, None]
    p_lines = p_weight + (i_own.to(tl.int64) * IN_SIZE + i_line_split * SPAN)[:, None] + i_in[None, :]
    p_blocks = p_scales + i_own // SCALE_BLOCK * SCALE_STRIDE
    b_each = tl.zeros((i_own.shape[0], COLUMNS), dtype=tl.float32)
    for first in range(0, IN_SIZE, SPLITS * SPAN):
        i_part = first // SPAN + i_line_split
        if IS_EVEN:
            b_x = tl.load(p_columns + first, mask=m_column[None, :], other=0.0)
            b_bytes = tl.load(p_lines + first, eviction_policy="evict_first")
        else:
            m_x = (first + i_column_split * SPAN)[None, :] + i_in[:, None] < IN_SIZE
            b_x = tl.load(p_columns + first, mask=m_x & m_column[None, :], other=0.0)
            m_bytes = (first + i_line_split * SPAN)[:, None] + i_in[None, :] < IN_SIZE
            b_bytes = tl.load(p_lines + first, mask=m_bytes, other=0)
        b_weight = _values(b_bytes, b_x.dtype, HAS_PAIRS)
        if HAS_BLOCKS:
            b_scale = tl.load(p_blocks + i_part, mask=i_part < SCALE_STRIDE, other=0.0)
            b_each += tl.dot(b_weight, b_x, input_precision="ieee") * b_scale[:, None]
        else:
            b_each = tl.dot(b_weight, b_x, b_each, input_precision="ieee")
    release_next(CHAINED)
    b_lines = sum_splits(b_each, i_line_split, i_column_split, SPLITS, BLOCK_ROWS)
    if not HAS_BLOCKS:
        _, i_first, _ = split_lines(i_tile, out_size, IS_GATED, BLOCK_OUT, 1)
        b_lines *= tl.load(p_scales + i_first)[:, None]
    store_lines(
        b_lines, b_squares, b_residual, b_norm, p_bias, p_y, p_z, p_sums, i_row, m_row, i_out, m_out,
        out_size, IN_SIZE, eps, HAS_BIAS, IS_SCALED, IS_GATED, IS_SUM, HAS_NORM,
    )  # fmt: skip


def few_rows_tile(num_rows: int, is_gated: bool) -> SplitTile:
    """The tile of a product, the best of 11 for each product of an 8B Llama on an H200. A layer with joined
    norms takes 75.4 us for 2 rows and 84.7 for 4, with scales of blocks 86.5 for 4. Rounded rows and norms of
    their own took 102.1, 105.8 and 116.6.
    """
    if is_gated:
        return SplitTile(out=16, splits=2, num_warps=4, num_stages=3)
    if num_rows <= 2:
        return SplitTile(out=16, splits=4, num_warps=4, num_stages=4)
    return SplitTile(out=16, splits=4, num_warps=2, num_stages=3)


def few_rows_product(x: torch.Tensor, weight: Fp8Weight, has_pairs: bool | None = None) -> SplitProduct:
    """The product of rows like `x` `[T, H]` with `weight` `[N, H]`. `has_pairs` as in
    `packed_experts_triton`.
    """
    scales = weight.scales
    form = {
        "HAS_PAIRS": unpacks_pairs(x, has_pairs),
        "HAS_BLOCKS": scales.dim() == 2,
        "SCALE_STRIDE": scales.shape[-1],
        "SCALE_BLOCK": BLOCK,
        "SPAN": SPAN,
    }
    stored = weight.values.view(torch.int8)
    return SplitProduct(_fp8_few_rows_kernel, stored, scales, weight.bias, form)
