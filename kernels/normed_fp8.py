"""Products of one to four rows with weights of 8-bit floating point, with residual sums and norms as in
`normed_linear`.

As in `fp8_rows`, each thread multiplies the values that it loads with those of the rows and adds them in
float32. A weight is converted once for all rows, and rows are not rounded to 8 bits.

Legend: T rows, N outputs, H inputs, S tiles whose squares were summed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .fp8_rows import weights_tile
from .fp8_scales import BLOCK, dequantise_fp8
from .normed_linear import UnscaledRows, scaled_linear_reference, sum_linear_reference
from .rms_norm import NextNorm
from .silu_mul import activated
from .triton_jit import cdiv, jit, next_power_of_2, tl

MAX_ROWS = 4


class Fp8Weight(NamedTuple):
    """A weight e4m3 `[N, H]` with its `scales`, in one of the forms of `fp8_scales`, and bias `[N]` or
    None.
    """

    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None = None


@jit
def _loaded_row(p_row: tl.tensor, i_in: tl.tensor, in_size: tl.tensor, IS_EVEN: tl.constexpr) -> tl.tensor:
    """The inputs `i_in` of a row, float32 `[1, IN]`."""
    if IS_EVEN:
        return tl.load(p_row + i_in).to(tl.float32)[None, :]
    else:
        return tl.load(p_row + i_in, mask=i_in < in_size, other=0.0).to(tl.float32)[None, :]


@jit
def _finish_row(
    b_y: tl.tensor,
    b_up: tl.tensor,
    row: tl.constexpr,
    p_squares: tl.tensor,
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
    eps: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_SUM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
) -> None:
    """Stores the outputs of a row: the sums over the inputs of `b_y` and `b_up` `[OUT, IN]`."""
    i_tile = tl.program_id(0)
    i_out = i_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m_out = i_out < out_size
    dtype: tl.constexpr = p_y.dtype.element_ty
    b_total = tl.sum(b_y, axis=1)
    scale = 1.0
    if IS_SCALED:
        i_part = tl.arange(0, BLOCK_SQUARES)
        b_squares = tl.load(p_squares + row * num_squares + i_part, mask=i_part < num_squares, other=0.0)
        scale = tl.rsqrt(tl.sum(b_squares) / in_size + eps)
    b_total *= scale
    if not HAS_BLOCKS:
        b_total *= tl.load(p_scales + i_out, mask=m_out, other=0.0)
    if HAS_BIAS:
        b_total += tl.load(p_bias + i_out, mask=m_out, other=0.0).to(tl.float32)
    if IS_GATED:
        b_up_total = tl.sum(b_up, axis=1) * scale
        if not HAS_BLOCKS:
            b_up_total *= tl.load(p_scales + out_size + i_out, mask=m_out, other=0.0)
        if HAS_BIAS:
            b_up_total += tl.load(p_bias + out_size + i_out, mask=m_out, other=0.0).to(tl.float32)
        b_silu = activated(b_total.to(dtype).to(tl.float32), False).to(dtype).to(tl.float32)
        b_total = b_silu * b_up_total.to(dtype).to(tl.float32)
    o_row = row * out_size
    if IS_SUM:
        b_residual = tl.load(p_residual + o_row + i_out, mask=m_out, other=0.0).to(tl.float32)
        b_rounded = (b_total.to(dtype).to(tl.float32) + b_residual).to(dtype)
        tl.store(p_y + o_row + i_out, b_rounded, mask=m_out)
        if HAS_NORM:
            b_wide = tl.where(m_out, b_rounded.to(tl.float32), 0.0)
            b_norm = tl.load(p_norm + i_out, mask=m_out, other=0.0).to(tl.float32) + OFFSET
            tl.store(p_z + o_row + i_out, (b_wide * b_norm).to(dtype), mask=m_out)
            tl.store(p_sums + row * tl.num_programs(0) + i_tile, tl.sum(b_wide * b_wide))
    else:
        tl.store(p_y + o_row + i_out, b_total.to(dtype), mask=m_out)


@jit
def _normed_fp8_kernel(
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
    NUM_ROWS: tl.constexpr,
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
) -> None:
    # a name for the sums of each row: they stay in registers
    i_out = tl.program_id(0).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    i_offset = tl.arange(0, BLOCK_IN)
    p_outs = p_weight + tl.minimum(i_out, out_size - 1)[:, None] * in_size
    p_ups = p_outs + out_size.to(tl.int64) * in_size
    p_out_scales = p_scales + (tl.program_id(0) * BLOCK_OUT // SCALE_BLOCK) * scale_stride
    p_up_scales = p_out_scales + (out_size // SCALE_BLOCK) * scale_stride
    b_0 = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
    b_1, b_2, b_3 = b_0, b_0, b_0
    u_0, u_1, u_2, u_3 = b_0, b_0, b_0, b_0
    for first in tl.range(0, in_size, BLOCK_IN, num_stages=NUM_STAGES):
        i_in = first + i_offset
        b_weight = weights_tile(p_outs, p_out_scales, i_in, in_size, HAS_BLOCKS, IS_EVEN, SCALE_BLOCK)
        x_0 = _loaded_row(p_x, i_in, in_size, IS_EVEN)
        b_0 += b_weight * x_0
        if NUM_ROWS > 1:
            x_1 = _loaded_row(p_x + in_size, i_in, in_size, IS_EVEN)
            b_1 += b_weight * x_1
        if NUM_ROWS > 2:
            x_2 = _loaded_row(p_x + 2 * in_size, i_in, in_size, IS_EVEN)
            b_2 += b_weight * x_2
        if NUM_ROWS > 3:
            x_3 = _loaded_row(p_x + 3 * in_size, i_in, in_size, IS_EVEN)
            b_3 += b_weight * x_3
        if IS_GATED:
            b_weight = weights_tile(p_ups, p_up_scales, i_in, in_size, HAS_BLOCKS, IS_EVEN, SCALE_BLOCK)
            u_0 += b_weight * x_0
            if NUM_ROWS > 1:
                u_1 += b_weight * x_1
            if NUM_ROWS > 2:
                u_2 += b_weight * x_2
            if NUM_ROWS > 3:
                u_3 += b_weight * x_3
    _finish_row(
        b_0, u_0, 0, p_squares, p_scales, p_bias, p_residual, p_norm, p_y, p_z, p_sums, num_squares, out_size,
        in_size, eps, HAS_BIAS, HAS_BLOCKS, IS_SCALED, IS_GATED, IS_SUM, HAS_NORM, OFFSET, BLOCK_SQUARES,
        BLOCK_OUT,
    )  # fmt: skip
    if NUM_ROWS > 1:
        _finish_row(
            b_1, u_1, 1, p_squares, p_scales, p_bias, p_residual, p_norm, p_y, p_z, p_sums, num_squares,
            out_size, in_size, eps, HAS_BIAS, HAS_BLOCKS, IS_SCALED, IS_GATED, IS_SUM, HAS_NORM, OFFSET,
            BLOCK_SQUARES, BLOCK_OUT,
        )  # fmt: skip
    if NUM_ROWS > 2:
        _finish_row(
            b_2, u_2, 2, p_squares, p_scales, p_bias, p_residual, p_norm, p_y, p_z, p_sums, num_squares,
            out_size, in_size, eps, HAS_BIAS, HAS_BLOCKS, IS_SCALED, IS_GATED, IS_SUM, HAS_NORM, OFFSET,
            BLOCK_SQUARES, BLOCK_OUT,
        )  # fmt: skip
    if NUM_ROWS > 3:
        _finish_row(
            b_3, u_3, 3, p_squares, p_scales, p_bias, p_residual, p_norm, p_y, p_z, p_sums, num_squares,
            out_size, in_size, eps, HAS_BIAS, HAS_BLOCKS, IS_SCALED, IS_GATED, IS_SUM, HAS_NORM, OFFSET,
            BLOCK_SQUARES, BLOCK_OUT,
        )  # fmt: skip


class Fp8Tile(NamedTuple):
    """Launch configuration: outputs and inputs of a step."""

    out: int
    inner: int
    num_warps: int
    num_stages: int


def fp8_tile(num_rows: int, is_gated: bool) -> Fp8Tile:
    """The sums of a program, a tile for each row and each half of the weight, are in registers."""
    if num_rows == 1:
        return Fp8Tile(out=4 if is_gated else 8, inner=1024, num_warps=4, num_stages=3)
    return Fp8Tile(out=4 if is_gated else 8, inner=512, num_warps=4, num_stages=4)


def _launch(
    rows: UnscaledRows,
    weight: Fp8Weight,
    y: torch.Tensor,
    tile: Fp8Tile,
    *,
    is_scaled: bool,
    is_gated: bool = False,
    sums: tuple[torch.Tensor, NextNorm | None, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    if y.numel() == 0:
        return
    x, out_size, in_size = rows.z.contiguous(), y.shape[1], rows.z.shape[1]
    residual, norm, z, squares = sums if sums is not None else (y, None, y, rows.squares)
    _normed_fp8_kernel[(cdiv(out_size, tile.out),)](
        x,
        rows.squares,
        weight.values,
        weight.scales,
        weight.scales if weight.bias is None else weight.bias,
        residual,
        weight.scales if norm is None else norm.weight,
        y,
        z,
        squares,
        rows.squares.shape[1],
        out_size,
        in_size,
        weight.scales.shape[1] if weight.scales.dim() == 2 else 1,
        rows.eps,
        NUM_ROWS=x.shape[0],
        HAS_BIAS=weight.bias is not None,
        HAS_BLOCKS=weight.scales.dim() == 2,
        IS_SCALED=is_scaled,
        IS_GATED=is_gated,
        IS_SUM=sums is not None,
        HAS_NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset or 0.0,
        IS_EVEN=in_size % tile.inner == 0,
        SCALE_BLOCK=BLOCK,
        BLOCK_SQUARES=next_power_of_2(rows.squares.shape[1]),
        BLOCK_OUT=tile.out,
        BLOCK_IN=tile.inner,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )


def sum_fp8_triton(
    x: torch.Tensor,
    weight: Fp8Weight,
    residual: torch.Tensor,
    norm: NextNorm | None,
    *,
    tile: Fp8Tile | None = None,
) -> tuple[torch.Tensor, UnscaledRows | None]:
    """Launch; arguments as in `sum_fp8`."""
    _check(x, weight)
    num_rows, out_size = x.shape[0], weight.values.shape[0]
    tile = fp8_tile(num_rows, False) if tile is None else tile
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    z = total if norm is None else torch.empty_like(total)
    squares = torch.empty(num_rows, cdiv(out_size, tile.out), dtype=torch.float32, device=x.device)
    sums = residual.contiguous(), norm, z, squares
    _launch(UnscaledRows(x, squares, 0.0), weight, total, tile, is_scaled=False, sums=sums)
    return total, None if norm is None else UnscaledRows(z, squares, norm.eps)


def scaled_fp8_triton(
    rows: UnscaledRows, weight: Fp8Weight, *, is_gated: bool = False, tile: Fp8Tile | None = None
) -> torch.Tensor:
    """Launch; arguments as in `scaled_fp8`."""
    _check(rows.z, weight)
    num_rows, out_size = rows.z.shape[0], weight.values.shape[0] // (2 if is_gated else 1)
    y = torch.empty(num_rows, out_size, dtype=rows.z.dtype, device=rows.z.device)
    tile = fp8_tile(num_rows, is_gated) if tile is None else tile
    _launch(rows, weight, y, tile, is_scaled=True, is_gated=is_gated)
    return y


def _check(x: torch.Tensor, weight: Fp8Weight) -> None:
    if x.shape[0] > MAX_ROWS or x.shape[1] != weight.values.shape[1]:
        raise ValueError(
            f"normed fp8: rows {tuple(x.shape)} do not fit weight {tuple(weight.values.shape)}; expected up "
            f"to {MAX_ROWS} rows [T, H] and [N, H]"
        )


def sum_fp8(
    x: torch.Tensor, weight: Fp8Weight, residual: torch.Tensor, norm: NextNorm | None
) -> tuple[torch.Tensor, UnscaledRows | None]:
    """As `normed_linear.sum_linear`, for at most MAX_ROWS rows. Raises ValueError for more, or other
    sizes.
    """
    if x.is_cuda:
        return sum_fp8_triton(x, weight, residual, norm)
    _check(x, weight)
    values = dequantise_fp8(weight.values, weight.scales, x.dtype)
    return sum_linear_reference(x, values, weight.bias, residual, norm)


def scaled_fp8(rows: UnscaledRows, weight: Fp8Weight, *, is_gated: bool = False) -> torch.Tensor:
    """As `normed_linear.scaled_linear`, for at most MAX_ROWS rows. Raises ValueError for more, or other
    sizes.
    """
    if rows.z.is_cuda:
        return scaled_fp8_triton(rows, weight, is_gated=is_gated)
    _check(rows.z, weight)
    values = dequantise_fp8(weight.values, weight.scales, rows.z.dtype)
    return scaled_linear_reference(rows, values, weight.bias, is_gated=is_gated)
