"""Projections of very few rows with weights of 4-bit integers: y = x W^T + b, optionally gated.

As `fp8_rows`, without matrix instructions: each thread multiplies the values that it loads with those of each
row. A tile has one unit of inputs, so it meets one group in its low halves and one in its high halves, and
scales and zero points are applied to the sums of these.

Legend: T rows, N outputs, H inputs, U inputs of a unit (see `int4_values`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .int4_values import halves_tile, unit_of
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl

MAX_ROWS = 4


@jit
def _group_sums(b_values: tl.tensor, b_x: tl.tensor, b_scale: tl.tensor, b_zero: tl.tensor) -> tl.tensor:
    """scale * ((values - zero) x) over one unit, `[OUT]`; the zero meets the sum of x instead."""
    return (tl.sum(b_values * b_x[None, :], axis=1) - b_zero * tl.sum(b_x, axis=0)) * b_scale


@jit
def _finished(
    b_total: tl.tensor,
    b_up_total: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    i_out: tl.tensor,
    out_size: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
) -> None:
    """Stores one row of outputs, with bias and gate."""
    m_out = i_out < out_size
    if HAS_BIAS:
        b_total += tl.load(p_bias + i_out, mask=m_out, other=0.0).to(tl.float32)
    if IS_GATED:
        if HAS_BIAS:
            b_up_total += tl.load(p_bias + out_size + i_out, mask=m_out, other=0.0).to(tl.float32)
        b_gate = b_total.to(p_y.dtype.element_ty).to(tl.float32)
        b_silu = (b_gate / (1.0 + tl.exp(-b_gate))).to(p_y.dtype.element_ty).to(tl.float32)
        b_total = b_silu * b_up_total.to(p_y.dtype.element_ty).to(tl.float32)
    tl.store(p_y + i_out, b_total.to(p_y.dtype.element_ty), mask=m_out)


@jit_varying("num_rows")
def _int4_rows_kernel(
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    num_rows: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    x_stride: tl.tensor,
    scale_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    IS_GATED: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    i_out = tl.program_id(0).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    i_offset = tl.arange(0, UNIT)
    SHIFT: tl.constexpr = 128 if HAS_PAIRS else 0
    i_clamped = tl.minimum(i_out, out_size - 1)
    p_outs = p_weight + i_clamped[:, None] * (in_size // 2) + i_offset[None, :]
    p_ups = p_outs + out_size.to(tl.int64) * (in_size // 2)
    last = tl.minimum(num_rows - 1, 3)  # of three rows the last is computed twice
    b_none = tl.zeros((BLOCK_OUT,), dtype=tl.float32)
    b_y0, b_y1, b_y2, b_y3 = b_none, b_none, b_none, b_none
    b_up0, b_up1, b_up2, b_up3 = b_none, b_none, b_none, b_none
    for i_pair in tl.range(0, in_size // (2 * UNIT), num_stages=NUM_STAGES):
        first = i_pair * 2 * UNIT
        for half in tl.static_range(2):
            i_in = first + half * UNIT + i_offset
            b_x0 = tl.load(p_x + i_in).to(tl.float32)
            if ROWS > 1:
                b_x1 = tl.load(p_x + x_stride + i_in).to(tl.float32)
            if ROWS > 2:
                b_x2 = tl.load(p_x + 2 * x_stride + i_in).to(tl.float32)
            if ROWS > 3:
                b_x3 = tl.load(p_x + last * x_stride + i_in).to(tl.float32)
            o_group = ((first + half * UNIT) // GROUP) * scale_stride + i_clamped
            for part in tl.static_range(2 if IS_GATED else 1):
                b_scale = tl.load(p_scales + o_group + part * out_size).to(tl.float32)
                b_zero = tl.load(p_zeros + o_group + part * out_size).to(tl.float32) + SHIFT
                if part == 0:
                    b_packed = tl.load(p_outs + i_pair * UNIT, eviction_policy="evict_first")
                else:
                    b_packed = tl.load(p_ups + i_pair * UNIT, eviction_policy="evict_first")
                b_low, b_high = halves_tile(b_packed, tl.float32, HAS_PAIRS)
                b_values = (b_low if half == 0 else b_high).to(tl.float32)
                if part == 0:
                    b_y0 += _group_sums(b_values, b_x0, b_scale, b_zero)
                    if ROWS > 1:
                        b_y1 += _group_sums(b_values, b_x1, b_scale, b_zero)
                    if ROWS > 2:
                        b_y2 += _group_sums(b_values, b_x2, b_scale, b_zero)
                    if ROWS > 3:
                        b_y3 += _group_sums(b_values, b_x3, b_scale, b_zero)
                else:
                    b_up0 += _group_sums(b_values, b_x0, b_scale, b_zero)
                    if ROWS > 1:
                        b_up1 += _group_sums(b_values, b_x1, b_scale, b_zero)
                    if ROWS > 2:
                        b_up2 += _group_sums(b_values, b_x2, b_scale, b_zero)
                    if ROWS > 3:
                        b_up3 += _group_sums(b_values, b_x3, b_scale, b_zero)
    _finished(b_y0, b_up0, p_bias, p_y, i_out, out_size, HAS_BIAS, IS_GATED)
    if ROWS > 1:
        _finished(b_y1, b_up1, p_bias, p_y + out_size, i_out, out_size, HAS_BIAS, IS_GATED)
    if ROWS > 2:
        _finished(b_y2, b_up2, p_bias, p_y + 2 * out_size, i_out, out_size, HAS_BIAS, IS_GATED)
    if ROWS > 3:
        _finished(b_y3, b_up3, p_bias, p_y + last * out_size, i_out, out_size, HAS_BIAS, IS_GATED)


class RowsShape(NamedTuple):
    """Launch configuration."""

    out: int
    num_warps: int
    num_stages: int


def rows_shape(is_gated: bool) -> RowsShape:
    """Tiles of outputs: with a gate each has two weights."""
    return RowsShape(out=32 if is_gated else 16, num_warps=4 if is_gated else 2, num_stages=4)


def int4_rows_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    shape: RowsShape | None = None,
    has_pairs: bool | None = None,
) -> torch.Tensor:
    """Launch with checked arguments of `int4_linear.int4_linear`, for at most MAX_ROWS rows.

    `has_pairs` as in `int4_linear.int4_linear_triton`.
    """
    num_rows, in_size = x.shape
    assert num_rows <= MAX_ROWS, num_rows
    out_size = weight.shape[0] // 2 if is_gated else weight.shape[0]
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = rows_shape(is_gated) if shape is None else shape
    group = in_size // scales.shape[0]
    _int4_rows_kernel[(cdiv(out_size, tile.out),)](
        x,
        weight,
        scales,
        zeros,
        scales if bias is None else bias,
        y,
        num_rows,
        out_size,
        in_size,
        x.stride(0),
        scales.shape[1],
        HAS_BIAS=bias is not None,
        HAS_PAIRS=x.is_cuda if has_pairs is None else has_pairs,
        IS_GATED=is_gated,
        GROUP=group,
        UNIT=unit_of(in_size, group),
        ROWS=next_power_of_2(num_rows),
        BLOCK_OUT=tile.out,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return y
