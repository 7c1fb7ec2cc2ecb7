"""Projections with weights of 4-bit integers: y = x W^T + b, optionally with the gate of a SwiGLU MLP.

Up to MAX_ROWS rows, as in decode steps, a kernel reads the packed weight, turns its halves into exact small
values in registers, and applies the scales to the sums of each group. Where few outputs would leave
multiprocessors idle, the inputs are cut into splits that run side by side and add up in float32. More rows,
as in prompts, are multiplied with the dequantised weight by the library. On an H200 a decode step of an 8B
Llama takes about as long as in bfloat16: what 4 bits save is memory.

Batch-invariant products take the kernel for any number of rows, without splits, whose order of addition is
not fixed, and with equal tiles, since the sums of a group's inputs are added in an order that a tile has.

Sources: Frantar et al., "MARLIN: Mixed-precision auto-regressive parallel inference on LLMs", 2024, for the
order of the work, and Kim et al., "Who says elephants can't run", 2022, for values made by bits of the
exponent. Legend: T rows, N outputs, H inputs, G inputs of a group, U inputs of a unit (see `int4_values`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .chained_launch import chained, release_next, wait_for_previous
from .int4_values import check_int4, dequantise_int4, halves_tile, unit_of
from .invariant_rows import linear_rows, silu_mul_rows
from .silu_mul import silu_mul, silu_mul_reference
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl

MAX_ROWS = 64
MIN_ROWS_TILE = 16


def int4_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """The definition and the CPU path: a product with the weight's values, rounded to the dtype of `x`."""
    y = F.linear(x, dequantise_int4(weight, scales, zeros, x.dtype), bias)
    return silu_mul_reference(y) if is_gated else y


def int4_linear_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """As `int4_linear_reference`, batch-invariant on a CPU."""
    y = linear_rows(x, dequantise_int4(weight, scales, zeros, x.dtype), bias)
    return silu_mul_rows(y) if is_gated else y


@jit
def _group_sum(
    b_values: tl.tensor,
    b_x: tl.tensor,
    b_x_sum: tl.tensor,
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    o_group: tl.tensor,
    m_out: tl.tensor,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """scale * (values - SHIFT - zero) x over one unit, `[OUT, ROWS]`; the zero meets the sum of x instead."""
    b_scale = tl.load(p_scales + o_group, mask=m_out, other=0.0).to(tl.float32)
    b_zero = tl.load(p_zeros + o_group, mask=m_out, other=0).to(tl.float32) + SHIFT
    b_dot = tl.dot(b_values, b_x, input_precision="ieee")
    return (b_dot - b_zero[:, None] * b_x_sum[None, :]) * b_scale[:, None]


@jit_varying("num_rows")
def _int4_kernel(
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
    NUM_SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # outputs are the rows of the product, because they are the long side
    wait_for_previous(CHAINED)
    i_out = tl.program_id(0).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    i_row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    i_split = tl.program_id(2)
    m_out = i_out < out_size
    m_row = i_row < num_rows
    i_offset = tl.arange(0, UNIT)
    SHIFT: tl.constexpr = 128 if HAS_PAIRS else 0
    p_rows = p_x + i_row.to(tl.int64)[None, :] * x_stride + i_offset[:, None]
    i_clamped = tl.minimum(i_out, out_size - 1)
    p_outs = p_weight + i_clamped[:, None] * (in_size // 2) + i_offset[None, :]
    p_ups = p_outs + out_size.to(tl.int64) * (in_size // 2)
    b_y = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    b_up = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    num_pairs = in_size // (2 * UNIT)
    pairs_of_split = tl.cdiv(num_pairs, NUM_SPLITS)
    first_pair = i_split * pairs_of_split
    for i_pair in range(first_pair, tl.minimum(first_pair + pairs_of_split, num_pairs)):
        first = i_pair * 2 * UNIT
        b_x_low = tl.load(p_rows + first, mask=m_row[None, :], other=0.0)
        b_x_high = tl.load(p_rows + first + UNIT, mask=m_row[None, :], other=0.0)
        b_low_sum = tl.sum(b_x_low.to(tl.float32), axis=0)
        b_high_sum = tl.sum(b_x_high.to(tl.float32), axis=0)
        o_low = (first // GROUP) * scale_stride + i_out
        o_high = ((first + UNIT) // GROUP) * scale_stride + i_out
        b_packed = tl.load(p_outs + i_pair * UNIT, eviction_policy="evict_first")
        b_low, b_high = halves_tile(b_packed, b_x_low.dtype, HAS_PAIRS)
        b_y += _group_sum(b_low, b_x_low, b_low_sum, p_scales, p_zeros, o_low, m_out, SHIFT)
        b_y += _group_sum(b_high, b_x_high, b_high_sum, p_scales, p_zeros, o_high, m_out, SHIFT)
        if IS_GATED:
            b_packed = tl.load(p_ups + i_pair * UNIT, eviction_policy="evict_first")
            b_low, b_high = halves_tile(b_packed, b_x_low.dtype, HAS_PAIRS)
            o_up, o_up_high = o_low + out_size, o_high + out_size
            b_up += _group_sum(b_low, b_x_low, b_low_sum, p_scales, p_zeros, o_up, m_out, SHIFT)
            b_up += _group_sum(b_high, b_x_high, b_high_sum, p_scales, p_zeros, o_up_high, m_out, SHIFT)
    release_next(CHAINED)
    o_y = i_row[None, :].to(tl.int64) * out_size + i_out[:, None]
    m_y = m_out[:, None] & m_row[None, :]
    if NUM_SPLITS > 1:
        tl.atomic_add(p_y + o_y, b_y, mask=m_y, sem="relaxed")
    else:
        if HAS_BIAS:
            b_y += tl.load(p_bias + i_out, mask=m_out, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            if HAS_BIAS:
                b_up += tl.load(p_bias + out_size + i_out, mask=m_out, other=0.0).to(tl.float32)[:, None]
            b_gate = b_y.to(p_y.dtype.element_ty).to(tl.float32)
            b_silu = (b_gate / (1.0 + tl.exp(-b_gate))).to(p_y.dtype.element_ty).to(tl.float32)
            b_y = b_silu * b_up.to(p_y.dtype.element_ty).to(tl.float32)
        tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_y)


class Int4Shape(NamedTuple):
    """Launch configuration. `num_splits`: parts of the inputs that run side by side."""

    out: int
    num_warps: int
    num_stages: int
    num_splits: int = 1


def int4_shape(num_rows: int, out_size: int, dtype: torch.dtype = torch.bfloat16) -> Int4Shape:
    """Tiles for `num_rows` x `out_size` outputs."""
    if dtype == torch.float32:  # no matrix instruction of full precision; it is for tests
        return Int4Shape(out=32, num_warps=4, num_stages=2)
    return Int4Shape(out=64, num_warps=4, num_stages=4, num_splits=4)


def int4_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    shape: Int4Shape | None = None,
    has_pairs: bool | None = None,
    tile_rows: int = 0,
) -> torch.Tensor:
    """Launch on `x` `[T, H]` and a packed weight; returns `[T, N]`, gated `[T, N/2]`, in the dtype of `x`.

    `tile_rows`: rows of a tile, 0: by their number.
    `has_pairs`: whether bytes are unpacked by instructions for pairs of bfloat16; by default on a GPU. Splits
    are for products without gate. Raises ValueError as `int4_linear`.
    """
    group = _check(x, weight, scales, zeros, bias, is_gated)
    num_rows, in_size = x.shape
    out_size = weight.shape[0] // 2 if is_gated else weight.shape[0]
    tile = int4_shape(num_rows, out_size, x.dtype) if shape is None else shape
    splits = 1 if is_gated else tile.num_splits
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    sums = y if splits == 1 else torch.zeros(y.shape, dtype=torch.float32, device=x.device)
    block_rows = tile_rows or min(max(next_power_of_2(num_rows), MIN_ROWS_TILE), MAX_ROWS)
    pairs = x.is_cuda if has_pairs is None else has_pairs
    _int4_kernel[(cdiv(out_size, tile.out), cdiv(num_rows, block_rows), splits)](
        x,
        weight,
        scales,
        zeros,
        scales if bias is None else bias,
        sums,
        num_rows,
        out_size,
        in_size,
        x.stride(0),
        scales.shape[1],
        HAS_BIAS=bias is not None,
        HAS_PAIRS=pairs and x.dtype == torch.bfloat16,
        IS_GATED=is_gated,
        NUM_SPLITS=splits,
        GROUP=group,
        UNIT=unit_of(in_size, group),
        BLOCK_OUT=tile.out,
        BLOCK_ROWS=block_rows,
        **chained(x.device),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        y = (sums if bias is None else sums + bias).to(x.dtype)
    return y


@jit
def _dequantise_kernel(
    p_weight: tl.tensor,
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    p_y: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
) -> None:
    i_pair = tl.program_id(0)
    i_out = tl.program_id(1).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    i_offset = tl.arange(0, UNIT)
    m_out = i_out < out_size
    p_bytes = p_weight + i_out[:, None] * (in_size // 2) + i_pair * UNIT + i_offset[None, :]
    b_packed = tl.load(p_bytes, mask=m_out[:, None], other=0)
    p_low = p_y + i_out[:, None] * in_size + i_pair * 2 * UNIT + i_offset[None, :]
    for half in tl.static_range(2):
        b_value = ((b_packed >> (4 * half)) & 15).to(tl.float32)
        o_group = ((2 * i_pair + half) * UNIT // GROUP) * out_size + i_out
        b_zero = tl.load(p_zeros + o_group, mask=m_out, other=0).to(tl.float32)
        b_scale = tl.load(p_scales + o_group, mask=m_out, other=0.0).to(tl.float32)
        b_y = (b_value - b_zero[:, None]) * b_scale[:, None]
        tl.store(p_low + half * UNIT, b_y.to(p_y.dtype.element_ty), mask=m_out[:, None])


def dequantise_int4_triton(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Launch: the values `[N, H]` of a packed weight in `dtype`."""
    group = check_int4("dequantise_int4", weight, scales, zeros)
    out_size, in_size = weight.shape[0], 2 * weight.shape[1]
    y = torch.empty(out_size, in_size, dtype=dtype, device=weight.device)
    unit = unit_of(in_size, group)
    block_out = max(4096 // unit, 1)
    _dequantise_kernel[(in_size // (2 * unit), cdiv(out_size, block_out))](
        weight,
        scales,
        zeros,
        y,
        out_size,
        in_size,
        GROUP=group,
        UNIT=unit,
        BLOCK_OUT=block_out,
        num_warps=4,
    )
    return y


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
) -> int:
    """The number of inputs of a group."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != 2 * weight.shape[1]:
        raise ValueError(
            f"int4_linear: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}; expected [T, H], "
            "[N, H/2]"
        )
    if bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1]):
        raise ValueError(f"int4_linear: bias {tuple(bias.shape)} {bias.dtype}; expected [N] {x.dtype}")
    if is_gated and weight.shape[0] % 2:
        raise ValueError(f"int4_linear: {weight.shape[0]} gated outputs are odd")
    return check_int4("int4_linear", weight, scales, zeros)


def int4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    is_invariant: bool = False,
) -> torch.Tensor:
    """x W^T + b with a packed `weight` uint8 `[N, H/2]`: `x` `[T, H]`, `bias` None or `[N]` -> `[T, N]`.

    `scales` float16 and `zeros` uint8 `[H/G, N]` are those of `int4_values`. `is_gated`: silu of the first
    half of the outputs, times the second half, `[T, N/2]`. `is_invariant`: the bits of a row do not depend on
    the number of rows. Raises ValueError if shapes or dtypes do not fit.
    """
    _check(x, weight, scales, zeros, bias, is_gated)
    if is_invariant and not x.is_cuda:
        return int4_linear_rows(x, weight, scales, zeros, bias, is_gated)
    if is_invariant:
        shape = int4_shape(x.shape[0], weight.shape[0], x.dtype)._replace(num_splits=1)
        return int4_linear_triton(
            x, weight, scales, zeros, bias, is_gated=is_gated, shape=shape, tile_rows=MAX_ROWS
        )
    if not x.is_cuda or x.dtype == torch.float32:
        return int4_linear_reference(x, weight, scales, zeros, bias, is_gated)
    if x.shape[0] <= MAX_ROWS:
        return int4_linear_triton(x, weight, scales, zeros, bias, is_gated=is_gated)
    y = F.linear(x, dequantise_int4_triton(weight, scales, zeros, x.dtype), bias)
    return silu_mul(y) if is_gated else y
