"""Projections of one to four rows with weights of 8-bit floating point: y = x W^T + b, optionally gated, and
with the residual sums and norms of `normed_linear`. Rows are not rounded to 8 bits.

A matrix instruction pads one row to 8 or more, whose tiles would be loaded for one. Here each thread
multiplies the values that it loads with those of the row and adds them in float32, so that nothing but the
weight is moved. From two rows on, `fp8_few_rows` is faster.

Legend: T rows, N outputs, H inputs, S tiles whose squares were summed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .fp8_few_rows import MAX_ROWS, few_rows_product, few_rows_tile
from .fp8_scales import BLOCK, Fp8Weight, check_gated, dequantise_fp8
from .normed_linear import Sums, UnscaledRows, new_sums, scaled_linear_reference, sum_linear_reference
from .rms_norm import NextNorm
from .row_product import load_residual, load_squares, store_sum
from .silu_mul import activated
from .triton_jit import cdiv, jit, next_power_of_2, tl


@jit
def _output(
    b_sum: tl.tensor,
    scale: tl.tensor,
    p_scales: tl.tensor,
    p_bias: tl.tensor,
    i_out: tl.tensor,
    m_out: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
) -> tl.tensor:
    """The outputs `[OUT]`, float32, of sums `[OUT]` of products of a row with values that are not yet
    scaled.
    """
    b_y = b_sum * scale
    if not HAS_BLOCKS:
        b_y *= tl.load(p_scales + i_out, mask=m_out, other=0.0)
    if HAS_BIAS:
        b_y += tl.load(p_bias + i_out, mask=m_out, other=0.0).to(tl.float32)
    return b_y


@jit
def row_outputs(
    b_sum: tl.tensor,
    b_up: tl.tensor,
    scale: tl.tensor,
    p_scales: tl.tensor,
    p_bias: tl.tensor,
    i_out: tl.tensor,
    out_size: tl.tensor,
    dtype: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_GATED: tl.constexpr,
) -> tl.tensor:
    """The outputs `[OUT]` of a row, float32: the sums `b_sum` and, with a gate, `b_up` `[OUT]` by the row's
    `scale` and those of the weight, with bias and gate.
    """
    m_out = i_out < out_size
    b_total = _output(b_sum, scale, p_scales, p_bias, i_out, m_out, HAS_BIAS, HAS_BLOCKS)
    if IS_GATED:
        b_gate = activated(b_total.to(dtype).to(tl.float32), False).to(dtype).to(tl.float32)
        b_total = _output(
            b_up, scale, p_scales + out_size, p_bias + out_size, i_out, m_out, HAS_BIAS, HAS_BLOCKS
        )
        b_total = b_gate * b_total.to(dtype).to(tl.float32)
    return b_total


@jit
def row_values(p_row: tl.tensor, i_in: tl.tensor, in_size: tl.tensor, IS_EVEN: tl.constexpr) -> tl.tensor:
    """The inputs `i_in` of a row, float32."""
    if IS_EVEN:
        return tl.load(p_row + i_in).to(tl.float32)
    else:
        return tl.load(p_row + i_in, mask=i_in < in_size, other=0.0).to(tl.float32)


@jit
def line_values(p_lines: tl.tensor, i_in: tl.tensor, in_size: tl.tensor, IS_EVEN: tl.constexpr) -> tl.tensor:
    """Stored values `[LINES, IN]` in float32."""
    if IS_EVEN:
        return tl.load(p_lines + i_in[None, :], eviction_policy="evict_first").to(tl.float32)
    else:
        return tl.load(p_lines + i_in[None, :], mask=(i_in < in_size)[None, :], other=0.0).to(tl.float32)


@jit
def by_blocks(
    b_x: tl.tensor,
    p_scales: tl.tensor,
    first: tl.tensor,
    in_size: tl.tensor,
    HAS_BLOCKS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> tl.tensor:
    """The inputs `b_x` of a row from `first` on times the scales of their blocks, if the weights have blocks.
    """
    if HAS_BLOCKS:
        if BLOCK_IN > SCALE_BLOCK:
            i_block = first // SCALE_BLOCK + tl.arange(0, BLOCK_IN // SCALE_BLOCK)
            b_scales = tl.load(p_scales + i_block, mask=i_block * SCALE_BLOCK < in_size, other=0.0)
            b_wide = tl.broadcast_to(b_scales[:, None], (BLOCK_IN // SCALE_BLOCK, SCALE_BLOCK))
            b_x *= tl.reshape(b_wide, (BLOCK_IN,))
        else:
            b_x *= tl.load(p_scales + first // SCALE_BLOCK)
    return b_x


@jit
def row_sums(
    p_row: tl.tensor,
    p_weight: tl.tensor,
    p_scales: tl.tensor,
    first_out: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    scale_stride: tl.tensor,
    HAS_BLOCKS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Sums `[OUT]`, float32, of the products of a row with outputs from `first_out` on, and with a gate those
    of the other half; scaled if the weights have blocks, of which the outputs lie in one.
    """
    i_offset = tl.arange(0, BLOCK_IN)
    # with a gate, lines are pairs of gate and up, which one load asks for
    HALVES: tl.constexpr = 2 if IS_GATED else 1
    i_line = tl.arange(0, HALVES * BLOCK_OUT)
    is_up = i_line % HALVES == 1
    i_own = tl.minimum(first_out + i_line // HALVES, out_size - 1).to(tl.int64)
    p_lines = p_weight + (i_own + i_line % HALVES * out_size)[:, None] * in_size
    p_out_scales = p_scales + (first_out // SCALE_BLOCK) * scale_stride
    p_up_scales = p_out_scales + (out_size // SCALE_BLOCK) * scale_stride
    b_each = tl.zeros((HALVES * BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
    for first in tl.range(0, in_size, BLOCK_IN, num_stages=NUM_STAGES):
        i_in = first + i_offset
        b_x = row_values(p_row, i_in, in_size, IS_EVEN)
        b_lines = line_values(p_lines, i_in, in_size, IS_EVEN)
        b_scaled = by_blocks(b_x, p_out_scales, first, in_size, HAS_BLOCKS, SCALE_BLOCK, BLOCK_IN)[None, :]
        if IS_GATED and HAS_BLOCKS:
            b_for_up = by_blocks(b_x, p_up_scales, first, in_size, HAS_BLOCKS, SCALE_BLOCK, BLOCK_IN)
            b_scaled = tl.where(is_up[:, None], b_for_up[None, :], b_scaled)
        b_each += b_lines * b_scaled
    b_sum = tl.sum(b_each, axis=1)
    b_up = b_sum
    if IS_GATED:
        b_sum, b_up = tl.split(tl.reshape(b_sum, (BLOCK_OUT, 2)))
    return b_sum, b_up


@jit
def _fp8_rows_kernel(
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
    num_squares: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    scale_stride: tl.tensor,
    eps: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_SUM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    wait_for_previous(CHAINED)
    i_out = tl.program_id(0).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m_out = i_out < out_size
    dtype: tl.constexpr = p_y.dtype.element_ty
    i_row = tl.arange(0, 1)
    b_squares = load_squares(p_squares, num_squares, i_row, i_row < 1, IS_SCALED, BLOCK_SQUARES)
    b_residual, b_norm = load_residual(
        p_residual, p_norm, i_row, i_row < 1, i_out, m_out, out_size, IS_SUM, HAS_NORM, OFFSET
    )
    b_sum, b_up = row_sums(
        p_x, p_weight, p_scales, tl.program_id(0) * BLOCK_OUT, out_size, in_size, scale_stride, HAS_BLOCKS,
        IS_GATED, IS_EVEN, SCALE_BLOCK, BLOCK_OUT, BLOCK_IN, NUM_STAGES,
    )  # fmt: skip
    release_next(CHAINED)
    scale = 1.0
    if IS_SCALED:
        scale = tl.rsqrt(tl.sum(b_squares) / in_size + eps)
    b_y = row_outputs(
        b_sum, b_up, scale, p_scales, p_bias, i_out, out_size, dtype, HAS_BIAS, HAS_BLOCKS, IS_GATED
    )
    if IS_SUM:
        store_sum(
            b_y[:, None], b_residual, b_norm, p_y, p_z, p_sums, tl.program_id(0), tl.num_programs(0), i_row,
            i_row < 1, i_out, m_out, out_size, HAS_NORM,
        )  # fmt: skip
    else:
        tl.store(p_y + i_out, b_y.to(dtype), mask=m_out)


class RowsShape(NamedTuple):
    """Launch configuration: tiles of outputs and inputs. The sums of a program are in registers."""

    out: int
    inner: int
    num_warps: int
    num_stages: int


def rows_shape(is_gated: bool, has_blocks: bool) -> RowsShape:
    """The tile of a product; with a gate each output has two lines. These were the best of 6 (with blocks) to
    12 for a layer of an 8B Llama on an H200: 71.4 and 70.2 us with its norms joined.
    """
    if not is_gated:
        return RowsShape(out=8, inner=512, num_warps=2, num_stages=4)
    if has_blocks:
        return RowsShape(out=4, inner=256, num_warps=2, num_stages=5)
    return RowsShape(out=4, inner=512, num_warps=4, num_stages=5)


def _launch(
    rows: UnscaledRows,
    weight: Fp8Weight,
    y: torch.Tensor,
    tile: RowsShape,
    *,
    is_scaled: bool = False,
    is_gated: bool = False,
    sums: Sums | None = None,
) -> None:
    if y.numel() == 0:
        return
    x, out_size, in_size = rows.z.contiguous(), y.shape[1], rows.z.shape[1]
    scales, bias = weight.scales, weight.bias
    num_squares = rows.squares.shape[1] if is_scaled else 1
    residual, norm, z, squares = (y, None, y, rows.squares) if sums is None else sums
    _fp8_rows_kernel[(cdiv(out_size, tile.out),)](
        x,
        rows.squares,
        weight.values,
        scales,
        scales if bias is None else bias,
        residual,
        scales if norm is None else norm.weight,
        y,
        z,
        squares,
        num_squares,
        out_size,
        in_size,
        scales.shape[1] if scales.dim() == 2 else 1,
        rows.eps,
        HAS_BIAS=bias is not None,
        HAS_BLOCKS=scales.dim() == 2,
        IS_SCALED=is_scaled,
        IS_GATED=is_gated,
        IS_SUM=sums is not None,
        HAS_NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset or 0.0,
        IS_EVEN=in_size % tile.inner == 0,
        SCALE_BLOCK=BLOCK,
        BLOCK_SQUARES=next_power_of_2(num_squares),
        BLOCK_OUT=tile.out,
        BLOCK_IN=tile.inner,
        NUM_STAGES=tile.num_stages,
        **chained(x.device),
        num_warps=tile.num_warps,
    )


def fp8_rows_triton(
    x: torch.Tensor, weight: Fp8Weight, *, is_gated: bool = False, shape: RowsShape | None = None
) -> torch.Tensor:
    """Launch with checked arguments of `fp8_linear.fp8_linear`, for up to MAX_ROWS rows. `shape`: of one
    row.
    """
    if x.shape[0] != 1:
        return few_rows_product(x, weight).plain(x, few_rows_tile(x.shape[0], is_gated), is_gated=is_gated)
    y = torch.empty(1, weight.values.shape[0] // (2 if is_gated else 1), dtype=x.dtype, device=x.device)
    chosen = rows_shape(is_gated, weight.scales.dim() == 2) if shape is None else shape
    _launch(UnscaledRows(x, y, 0.0), weight, y, chosen, is_gated=is_gated)
    return y


def sum_fp8_triton(
    x: torch.Tensor,
    weight: Fp8Weight,
    residual: torch.Tensor,
    norm: NextNorm | None,
    *,
    shape: RowsShape | None = None,
) -> tuple[torch.Tensor, UnscaledRows | None]:
    """Launch; arguments as in `sum_fp8`. `shape`: of one row. Raises ValueError as it does."""
    _check(x, weight)
    if x.shape[0] != 1:
        return few_rows_product(x, weight).summed(x, residual, norm, few_rows_tile(x.shape[0], False))
    chosen = rows_shape(False, weight.scales.dim() == 2) if shape is None else shape
    total, sums = new_sums(x, len(weight.values), residual, norm, chosen.out)
    _launch(UnscaledRows(x, sums.squares, 0.0), weight, total, chosen, sums=sums)
    return total, sums.rows()


def scaled_fp8_triton(
    rows: UnscaledRows, weight: Fp8Weight, *, is_gated: bool = False, shape: RowsShape | None = None
) -> torch.Tensor:
    """Launch; arguments as in `scaled_fp8`. `shape`: of one row. Raises ValueError as it does."""
    _check(rows.z, weight, is_gated)
    if rows.z.shape[0] != 1:
        tile = few_rows_tile(rows.z.shape[0], is_gated)
        return few_rows_product(rows.z, weight).scaled(rows, tile, is_gated=is_gated)
    out_size = weight.values.shape[0] // (2 if is_gated else 1)
    y = torch.empty(1, out_size, dtype=rows.z.dtype, device=rows.z.device)
    chosen = rows_shape(is_gated, weight.scales.dim() == 2) if shape is None else shape
    _launch(rows, weight, y, chosen, is_scaled=True, is_gated=is_gated)
    return y


def _check(x: torch.Tensor, weight: Fp8Weight, is_gated: bool = False) -> None:
    check_gated("normed fp8", weight.values, weight.scales, is_gated)
    if x.dim() != 2 or x.shape[1] != weight.values.shape[1] or x.shape[0] > MAX_ROWS:
        raise ValueError(
            f"normed fp8: rows {tuple(x.shape)} do not fit weight {tuple(weight.values.shape)}; expected up "
            f"to {MAX_ROWS} rows, [T, H] and [N, H]"
        )


def sum_fp8(
    x: torch.Tensor, weight: Fp8Weight, residual: torch.Tensor, norm: NextNorm | None
) -> tuple[torch.Tensor, UnscaledRows | None]:
    """As `normed_linear.sum_linear`, for up to MAX_ROWS rows. Raises ValueError for more, or other sizes."""
    if x.is_cuda:
        return sum_fp8_triton(x, weight, residual, norm)
    _check(x, weight)
    values = dequantise_fp8(weight.values, weight.scales, x.dtype)
    return sum_linear_reference(x, values, weight.bias, residual, norm)


def scaled_fp8(rows: UnscaledRows, weight: Fp8Weight, *, is_gated: bool = False) -> torch.Tensor:
    """As `normed_linear.scaled_linear`, for up to MAX_ROWS rows. Raises ValueError for more, or other
    sizes.
    """
    if rows.z.is_cuda:
        return scaled_fp8_triton(rows, weight, is_gated=is_gated)
    _check(rows.z, weight, is_gated)
    values = dequantise_fp8(weight.values, weight.scales, rows.z.dtype)
    return scaled_linear_reference(rows, values, weight.bias, is_gated=is_gated)
