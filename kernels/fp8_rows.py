"""Projections of very few rows with weights of 8-bit floating point: y = x W^T + b, optionally gated.

A matrix instruction needs 16 rows, and its tiles of rows would be loaded and padded for one. Here each thread
multiplies the values that it loads with those of each row and adds them in float32, so that nothing but the
weight is moved. This is the decode step of a small batch and the verify step of a single request.

Legend: T rows, N outputs, H inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .fp8_scales import BLOCK
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl

MAX_ROWS = 4


@jit
def _finished(
    b_y: tl.tensor,
    b_up: tl.tensor,
    p_scales: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    i_out: tl.tensor,
    out_size: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_GATED: tl.constexpr,
) -> None:
    """Stores one row of outputs: the sums over the inputs of `b_y` `[OUT, IN]`, by scale, with bias and gate.
    """
    m_out = i_out < out_size
    b_total = tl.sum(b_y, axis=1)
    if not HAS_BLOCKS:
        b_total *= tl.load(p_scales + i_out, mask=m_out, other=0.0)
    if HAS_BIAS:
        b_total += tl.load(p_bias + i_out, mask=m_out, other=0.0).to(tl.float32)
    if IS_GATED:
        b_up_total = tl.sum(b_up, axis=1)
        if not HAS_BLOCKS:
            b_up_total *= tl.load(p_scales + out_size + i_out, mask=m_out, other=0.0)
        if HAS_BIAS:
            b_up_total += tl.load(p_bias + out_size + i_out, mask=m_out, other=0.0).to(tl.float32)
        b_gate = b_total.to(p_y.dtype.element_ty).to(tl.float32)
        b_silu = (b_gate / (1.0 + tl.exp(-b_gate))).to(p_y.dtype.element_ty).to(tl.float32)
        b_total = b_silu * b_up_total.to(p_y.dtype.element_ty).to(tl.float32)
    tl.store(p_y + i_out, b_total.to(p_y.dtype.element_ty), mask=m_out)


@jit
def _row(p_row: tl.tensor, i_in: tl.tensor, in_size: tl.tensor, IS_EVEN: tl.constexpr) -> tl.tensor:
    """The inputs `i_in` of a row, float32."""
    if IS_EVEN:
        return tl.load(p_row + i_in).to(tl.float32)
    else:
        return tl.load(p_row + i_in, mask=i_in < in_size, other=0.0).to(tl.float32)


@jit
def _weights(
    p_weight: tl.tensor,
    p_scales: tl.tensor,
    i_in: tl.tensor,
    in_size: tl.tensor,
    HAS_BLOCKS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
) -> tl.tensor:
    """The values `[OUT, IN]` of a tile, float32; all outputs of a program are in one block of scales."""
    if IS_EVEN:
        b_weight = tl.load(p_weight + i_in[None, :], eviction_policy="evict_first").to(tl.float32)
    else:
        b_weight = tl.load(p_weight + i_in[None, :], mask=(i_in < in_size)[None, :], other=0.0).to(tl.float32)
    if HAS_BLOCKS:
        b_scales = tl.load(p_scales + i_in // SCALE_BLOCK, mask=i_in < in_size, other=0.0)
        b_weight *= b_scales[None, :]
    return b_weight


@jit_varying("num_rows")
def _fp8_rows_kernel(
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_scales: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    num_rows: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    x_stride: tl.tensor,
    scale_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    # the sums of each row are a variable of their own, since tiles of three dimensions lose the order of
    # loads
    i_out = tl.program_id(0).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    i_offset = tl.arange(0, BLOCK_IN)
    p_outs = p_weight + tl.minimum(i_out, out_size - 1)[:, None] * in_size
    p_ups = p_outs + out_size.to(tl.int64) * in_size
    p_out_scales = p_scales + (tl.program_id(0) * BLOCK_OUT // SCALE_BLOCK) * scale_stride
    p_up_scales = p_out_scales + (out_size // SCALE_BLOCK) * scale_stride
    last = tl.minimum(num_rows - 1, 3)  # of three rows the last is computed twice
    b_zero = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
    b_y0, b_y1, b_y2, b_y3 = b_zero, b_zero, b_zero, b_zero
    b_up0, b_up1, b_up2, b_up3 = b_zero, b_zero, b_zero, b_zero
    for first in tl.range(0, in_size, BLOCK_IN, num_stages=NUM_STAGES):
        i_in = first + i_offset
        b_x0 = _row(p_x, i_in, in_size, IS_EVEN)
        if ROWS > 1:
            b_x1 = _row(p_x + x_stride, i_in, in_size, IS_EVEN)
        if ROWS > 2:
            b_x2 = _row(p_x + 2 * x_stride, i_in, in_size, IS_EVEN)
        if ROWS > 3:
            b_x3 = _row(p_x + last * x_stride, i_in, in_size, IS_EVEN)
        b_weight = _weights(p_outs, p_out_scales, i_in, in_size, HAS_BLOCKS, IS_EVEN, SCALE_BLOCK)
        b_y0 += b_weight * b_x0[None, :]
        if ROWS > 1:
            b_y1 += b_weight * b_x1[None, :]
        if ROWS > 2:
            b_y2 += b_weight * b_x2[None, :]
        if ROWS > 3:
            b_y3 += b_weight * b_x3[None, :]
        if IS_GATED:
            b_weight = _weights(p_ups, p_up_scales, i_in, in_size, HAS_BLOCKS, IS_EVEN, SCALE_BLOCK)
            b_up0 += b_weight * b_x0[None, :]
            if ROWS > 1:
                b_up1 += b_weight * b_x1[None, :]
            if ROWS > 2:
                b_up2 += b_weight * b_x2[None, :]
            if ROWS > 3:
                b_up3 += b_weight * b_x3[None, :]
    _finished(b_y0, b_up0, p_scales, p_bias, p_y, i_out, out_size, HAS_BIAS, HAS_BLOCKS, IS_GATED)
    if ROWS > 1:
        p_row = p_y + out_size
        _finished(b_y1, b_up1, p_scales, p_bias, p_row, i_out, out_size, HAS_BIAS, HAS_BLOCKS, IS_GATED)
    if ROWS > 2:
        p_row = p_y + 2 * out_size
        _finished(b_y2, b_up2, p_scales, p_bias, p_row, i_out, out_size, HAS_BIAS, HAS_BLOCKS, IS_GATED)
    if ROWS > 3:
        p_row = p_y + last * out_size
        _finished(b_y3, b_up3, p_scales, p_bias, p_row, i_out, out_size, HAS_BIAS, HAS_BLOCKS, IS_GATED)


class RowsShape(NamedTuple):
    """Launch configuration."""

    out: int
    inner: int
    num_warps: int
    num_stages: int


def rows_shape(num_rows: int, is_gated: bool) -> RowsShape:
    """Tiles for `num_rows` rows: the sums of a program are in registers, so more rows get fewer inputs at
    once.
    """
    inner = 1024 if num_rows == 1 else 512 if num_rows == 2 else 256
    return RowsShape(out=4 if is_gated else 8, inner=inner, num_warps=4, num_stages=3)


def fp8_rows_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    shape: RowsShape | None = None,
) -> torch.Tensor:
    """Launch with checked arguments of `fp8_linear.fp8_linear`, for at most MAX_ROWS rows."""
    num_rows, in_size = x.shape
    assert num_rows <= MAX_ROWS, num_rows
    out_size = weight.shape[0] // 2 if is_gated else weight.shape[0]
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = rows_shape(num_rows, is_gated) if shape is None else shape
    _fp8_rows_kernel[(cdiv(out_size, tile.out),)](
        x,
        weight,
        scales,
        scales if bias is None else bias,
        y,
        num_rows,
        out_size,
        in_size,
        x.stride(0),
        scales.shape[1] if scales.dim() == 2 else 1,
        HAS_BIAS=bias is not None,
        HAS_BLOCKS=scales.dim() == 2,
        IS_GATED=is_gated,
        IS_EVEN=in_size % tile.inner == 0,
        SCALE_BLOCK=BLOCK,
        ROWS=next_power_of_2(num_rows),
        BLOCK_OUT=tile.out,
        BLOCK_IN=tile.inner,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return y
