"""Projections of one row with weights of 8-bit floating point: y = x W^T + b, optionally gated.

A matrix instruction needs 16 rows, and its tiles of rows would be loaded and padded for one. Here each thread
multiplies the values that it loads with those of the row and adds them in float32, so that nothing but the
weight is moved. From two rows on, matrix instructions are faster.

Legend: N outputs, H inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .fp8_scales import BLOCK
from .triton_jit import cdiv, jit, tl


@jit
def store_row(
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
    """Stores one row of outputs: sums over the inputs of `b_y` `[OUT, IN]`, by scale, with bias and gate."""
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
def row_values(p_row: tl.tensor, i_in: tl.tensor, in_size: tl.tensor, IS_EVEN: tl.constexpr) -> tl.tensor:
    """The inputs `i_in` of a row, float32."""
    if IS_EVEN:
        return tl.load(p_row + i_in).to(tl.float32)
    else:
        return tl.load(p_row + i_in, mask=i_in < in_size, other=0.0).to(tl.float32)


@jit
def weights_tile(
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


@jit
def _fp8_rows_kernel(
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_scales: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    scale_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    i_out = tl.program_id(0).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    i_offset = tl.arange(0, BLOCK_IN)
    p_outs = p_weight + tl.minimum(i_out, out_size - 1)[:, None] * in_size
    p_ups = p_outs + out_size.to(tl.int64) * in_size
    p_out_scales = p_scales + (tl.program_id(0) * BLOCK_OUT // SCALE_BLOCK) * scale_stride
    p_up_scales = p_out_scales + (out_size // SCALE_BLOCK) * scale_stride
    b_zero = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
    b_y, b_up = b_zero, b_zero
    for first in tl.range(0, in_size, BLOCK_IN, num_stages=NUM_STAGES):
        i_in = first + i_offset
        b_x = row_values(p_x, i_in, in_size, IS_EVEN)
        b_weight = weights_tile(p_outs, p_out_scales, i_in, in_size, HAS_BLOCKS, IS_EVEN, SCALE_BLOCK)
        b_y += b_weight * b_x[None, :]
        if IS_GATED:
            b_weight = weights_tile(p_ups, p_up_scales, i_in, in_size, HAS_BLOCKS, IS_EVEN, SCALE_BLOCK)
            b_up += b_weight * b_x[None, :]
    store_row(b_y, b_up, p_scales, p_bias, p_y, i_out, out_size, HAS_BIAS, HAS_BLOCKS, IS_GATED)


class RowsShape(NamedTuple):
    """Launch configuration."""

    out: int
    inner: int
    num_warps: int
    num_stages: int


def rows_shape(is_gated: bool) -> RowsShape:
    """Tiles of outputs and inputs; with a gate each has two weights. A program's sums are in registers."""
    return RowsShape(out=4 if is_gated else 8, inner=1024, num_warps=4, num_stages=3)


def fp8_rows_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    shape: RowsShape | None = None,
) -> torch.Tensor:
    """Launch with checked arguments of `fp8_linear.fp8_linear`, for one row."""
    num_rows, in_size = x.shape
    assert num_rows == 1, num_rows
    out_size = weight.shape[0] // 2 if is_gated else weight.shape[0]
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = rows_shape(is_gated) if shape is None else shape
    _fp8_rows_kernel[(cdiv(out_size, tile.out),)](
        x,
        weight,
        scales,
        scales if bias is None else bias,
        y,
        out_size,
        in_size,
        scales.shape[1] if scales.dim() == 2 else 1,
        HAS_BIAS=bias is not None,
        HAS_BLOCKS=scales.dim() == 2,
        IS_GATED=is_gated,
        IS_EVEN=in_size % tile.inner == 0,
        SCALE_BLOCK=BLOCK,
        BLOCK_OUT=tile.out,
        BLOCK_IN=tile.inner,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return y
