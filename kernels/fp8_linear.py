"""Projections with weights of 8-bit floating point: y = x W^T + b, optionally with the gate of a SwiGLU MLP.

The definition multiplies rows with the values of the weights. For few rows `fp8_rows` does that. More rows
are rounded to 8 bits themselves, each row with a scale of its own (in blocks of 128 inputs if the weight
has blocks), and multiplied by 8-bit matrix instructions: weights are never converted, and prompts take half
the time. Up to MAX_ROWS rows, as in decode steps, a kernel with the gate in it streams the weight once; for
more the library is faster. Devices without these instructions take the dequantised weight.

Batch-invariant products round rows in any number, by that kernel: each output is one chain of matrix
instructions along the inner dimension.

Legend: T rows, N outputs, H inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .chained_launch import chained, release_next, wait_for_previous
from .fp8_few_rows import most_rows
from .fp8_rows import fp8_rows_triton
from .fp8_scales import BLOCK, FP8, Fp8Weight, check_gated, check_scales, dequantise_fp8
from .invariant_linear import invariant_linear
from .invariant_rows import linear_rows, silu_mul_rows
from .quantise_rows import quantise_rows
from .silu_mul import silu_mul, silu_mul_reference
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl

MAX_ROWS = 64
MIN_ROWS_TILE = 16
NATIVE = (8, 9)  # the first compute capability with conversions and products of e4m3
ALIGNED = 16  # sizes of the library's products are multiples of this


def fp8_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """The definition and the CPU path: a product with the weight's values, rounded to the dtype of `x`."""
    y = F.linear(x, dequantise_fp8(weight, scales, x.dtype), bias)
    return silu_mul_reference(y) if is_gated else y


def fp8_linear_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """As `fp8_linear_reference`, batch-invariant on a CPU."""
    y = linear_rows(x, dequantise_fp8(weight, scales, x.dtype), bias)
    return silu_mul_rows(y) if is_gated else y


@jit
def _scales_tile(
    p_scales: tl.tensor,
    i_out: tl.tensor,
    first: tl.tensor,
    out_size: tl.tensor,
    scale_stride: tl.tensor,
    SCALE_BLOCK: tl.constexpr,
) -> tl.tensor:
    """The scales of outputs `i_out` for the block of inputs that begins at `first`."""
    o_scale = (i_out // SCALE_BLOCK) * scale_stride + first // SCALE_BLOCK
    return tl.load(p_scales + o_scale, mask=i_out < out_size, other=0.0)


@jit_varying("num_rows")
def _fp8_kernel(
    p_x: tl.tensor,
    p_x_scales: tl.tensor,
    p_weight: tl.tensor,
    p_scales: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    num_rows: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    x_stride: tl.tensor,
    x_scale_stride: tl.tensor,
    scale_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # outputs are the rows of the product, because they are the long side
    wait_for_previous(CHAINED)
    i_out = tl.program_id(0).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    i_row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    m_out = i_out < out_size
    m_row = i_row < num_rows
    i_offset = tl.arange(0, BLOCK_IN)
    p_rows = p_x + i_row.to(tl.int64)[None, :] * x_stride
    p_outs = p_weight + tl.minimum(i_out, out_size - 1)[:, None] * in_size
    p_ups = p_outs + out_size.to(tl.int64) * in_size
    p_up_scales = p_scales + (out_size // SCALE_BLOCK) * scale_stride
    b_y = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    b_up = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    for first in range(0, in_size, BLOCK_IN):
        i_in = first + i_offset
        if IS_EVEN:  # whole tiles of inputs; an output behind the last is read as the last
            b_x = tl.load(p_rows + i_in[:, None], mask=m_row[None, :], other=0.0)
            b_weight = tl.load(p_outs + i_in[None, :], eviction_policy="evict_first")
        else:
            m_in = i_in < in_size
            b_x = tl.load(p_rows + i_in[:, None], mask=m_in[:, None] & m_row[None, :], other=0.0)
            b_weight = tl.load(p_outs + i_in[None, :], mask=m_in[None, :], other=0.0)
        b_weight = b_weight.to(b_x.dtype)
        if HAS_BLOCKS:
            b_x_scales = tl.full((BLOCK_ROWS,), 1.0, dtype=tl.float32)
            if IS_ROUNDED:
                o_x_scale = i_row * x_scale_stride + first // SCALE_BLOCK
                b_x_scales = tl.load(p_x_scales + o_x_scale, mask=m_row, other=0.0)
            b_scales = _scales_tile(p_scales, i_out, first, out_size, scale_stride, SCALE_BLOCK)
            b_both = b_scales[:, None] * b_x_scales[None, :]
            b_y += tl.dot(b_weight, b_x, input_precision="ieee") * b_both
        else:
            b_y = tl.dot(b_weight, b_x, b_y, input_precision="ieee")
        if IS_GATED:
            if IS_EVEN:
                b_weight = tl.load(p_ups + i_in[None, :], eviction_policy="evict_first")
            else:
                b_weight = tl.load(p_ups + i_in[None, :], mask=m_in[None, :], other=0.0)
            b_weight = b_weight.to(b_x.dtype)
            if HAS_BLOCKS:
                b_scales = _scales_tile(p_up_scales, i_out, first, out_size, scale_stride, SCALE_BLOCK)
                b_both = b_scales[:, None] * b_x_scales[None, :]
                b_up += tl.dot(b_weight, b_x, input_precision="ieee") * b_both
            else:
                b_up = tl.dot(b_weight, b_x, b_up, input_precision="ieee")
    release_next(CHAINED)
    if not HAS_BLOCKS:
        b_x_scales = tl.full((BLOCK_ROWS,), 1.0, dtype=tl.float32)
        if IS_ROUNDED:
            b_x_scales = tl.load(p_x_scales + i_row * x_scale_stride, mask=m_row, other=0.0)
        b_y *= tl.load(p_scales + i_out, mask=m_out, other=0.0)[:, None] * b_x_scales[None, :]
        if IS_GATED:
            b_up_scales = tl.load(p_scales + out_size + i_out, mask=m_out, other=0.0)
            b_up *= b_up_scales[:, None] * b_x_scales[None, :]
    if HAS_BIAS:
        b_y += tl.load(p_bias + i_out, mask=m_out, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        if HAS_BIAS:
            b_up += tl.load(p_bias + out_size + i_out, mask=m_out, other=0.0).to(tl.float32)[:, None]
        b_gate = b_y.to(p_y.dtype.element_ty).to(tl.float32)
        b_silu = (b_gate / (1.0 + tl.exp(-b_gate))).to(p_y.dtype.element_ty).to(tl.float32)
        b_y = b_silu * b_up.to(p_y.dtype.element_ty).to(tl.float32)
    o_y = i_row[None, :].to(tl.int64) * out_size + i_out[:, None]
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_out[:, None] & m_row[None, :])


class Fp8Shape(NamedTuple):
    """Launch configuration."""

    out: int
    inner: int
    num_warps: int
    num_stages: int


def fp8_shape(num_rows: int, out_size: int, dtype: torch.dtype = torch.bfloat16) -> Fp8Shape:
    """Tiles for `num_rows` x `out_size` outputs with rows of `dtype`. A tile of inputs lies in one block of
    scales.

    Rows in 8 bits need no conversion: many stages keep enough bytes in flight even where there are fewer
    tiles than multiprocessors.
    """
    if dtype == torch.float32:  # no matrix instruction of full precision; it is for tests
        return Fp8Shape(out=32, inner=32, num_warps=4, num_stages=2)
    if dtype == FP8:
        return Fp8Shape(out=64, inner=128, num_warps=4, num_stages=8)
    if out_size > 4096:
        return Fp8Shape(out=64, inner=128, num_warps=4, num_stages=5)
    return Fp8Shape(out=32, inner=128, num_warps=4, num_stages=5)


def fp8_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    is_rounded: bool = False,
    shape: Fp8Shape | None = None,
) -> torch.Tensor:
    """Launch on `x` `[T, H]`, e4m3 `weight` `[N, H]`, its `scales`, `bias` None or `[N]`; returns `[T, N]`,
    gated `[T, N/2]`, in the dtype of `x`. `is_rounded`: x is rounded to 8 bits before the product.

    Raises ValueError as `fp8_linear`.
    """
    _check(x, weight, scales, bias, is_gated)
    num_rows, in_size = x.shape
    out_size = weight.shape[0] // 2 if is_gated else weight.shape[0]
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    x_scales = scales
    if is_rounded:
        x, x_scales = quantise_rows(x, BLOCK if scales.dim() == 2 else in_size)
    tile = fp8_shape(num_rows, out_size, x.dtype) if shape is None else shape
    block_rows = min(max(next_power_of_2(num_rows), MIN_ROWS_TILE), MAX_ROWS)
    _fp8_kernel[(cdiv(out_size, tile.out), cdiv(num_rows, block_rows))](
        x,
        x_scales,
        weight,
        scales,
        scales if bias is None else bias,
        y,
        num_rows,
        out_size,
        in_size,
        x.stride(0),
        x_scales.shape[1] if x_scales.dim() == 2 else 1,
        scales.shape[1] if scales.dim() == 2 else 1,
        HAS_BIAS=bias is not None,
        HAS_BLOCKS=scales.dim() == 2,
        IS_ROUNDED=is_rounded,
        IS_GATED=is_gated,
        IS_EVEN=in_size % tile.inner == 0,
        SCALE_BLOCK=BLOCK,
        BLOCK_OUT=tile.out,
        BLOCK_IN=tile.inner,
        BLOCK_ROWS=block_rows,
        **chained(x.device),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y


@jit_varying("num_rows")
def _fp8_blocks_kernel(
    p_x: tl.tensor,
    p_x_scales: tl.tensor,
    p_weight: tl.tensor,
    p_scales: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    num_rows: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    x_scale_stride: tl.tensor,
    scale_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    GROUP_TILES: tl.constexpr,
) -> None:
    # GROUP_TILES tiles of rows share the weights of the tiles of outputs that run at the same time
    num_row_tiles, num_out_tiles = tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(out_size, BLOCK_OUT)
    i_group = tl.program_id(0) // (GROUP_TILES * num_out_tiles)
    i_in_group = tl.program_id(0) % (GROUP_TILES * num_out_tiles)
    num_tiles = tl.minimum(num_row_tiles - i_group * GROUP_TILES, GROUP_TILES)
    i_row = (i_group * GROUP_TILES + i_in_group % num_tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    i_out = (i_in_group // num_tiles) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m_row, m_out = i_row < num_rows, i_out < out_size
    i_offset = tl.arange(0, SCALE_BLOCK)
    p_rows = p_x + tl.minimum(i_row, num_rows - 1).to(tl.int64)[:, None] * in_size
    p_outs = p_weight + tl.minimum(i_out, out_size - 1).to(tl.int64)[None, :] * in_size
    p_row_scales = p_x_scales + tl.minimum(i_row, num_rows - 1) * x_scale_stride
    p_out_scales = p_scales + (tl.minimum(i_out, out_size - 1) // SCALE_BLOCK) * scale_stride
    b_y = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
    for i_block in range(0, tl.cdiv(in_size, SCALE_BLOCK)):
        i_in = i_block * SCALE_BLOCK + i_offset
        m_in = i_in < in_size
        b_x = tl.load(p_rows + i_in[None, :], mask=m_in[None, :], other=0.0)
        b_weight = tl.load(p_outs + i_in[:, None], mask=m_in[:, None], other=0.0)
        b_both = tl.load(p_row_scales + i_block)[:, None] * tl.load(p_out_scales + i_block)[None, :]
        b_y += tl.dot(b_x, b_weight) * b_both
    if HAS_BIAS:
        b_y += tl.load(p_bias + i_out, mask=m_out, other=0.0).to(tl.float32)[None, :]
    o_y = i_row[:, None].to(tl.int64) * out_size + i_out[None, :]
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_row[:, None] & m_out[None, :])


def fp8_blocks_triton(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x` `[T, H]`, rounded to 8 bits in blocks of BLOCK inputs, times `weight` `[N, H]` with block `scales`;
    returns `[T, N]`.
    """
    _check(x, weight, scales, bias, False)
    num_rows, in_size = x.shape
    out_size = weight.shape[0]
    rounded, x_scales = quantise_rows(x, BLOCK)
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    block_rows, block_out = (128, 128) if num_rows > 128 else (64, 128)
    _fp8_blocks_kernel[(cdiv(num_rows, block_rows) * cdiv(out_size, block_out),)](
        rounded,
        x_scales,
        weight,
        scales,
        scales if bias is None else bias,
        y,
        num_rows,
        out_size,
        in_size,
        x_scales.shape[1],
        scales.shape[1],
        HAS_BIAS=bias is not None,
        SCALE_BLOCK=BLOCK,
        BLOCK_ROWS=block_rows,
        BLOCK_OUT=block_out,
        GROUP_TILES=8,
        num_warps=8 if block_rows > 64 else 4,
        num_stages=3,
    )
    return y


def fp8_rows_product(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x` `[T, H]`, each row rounded to 8 bits, times `weight` `[N, H]` with `scales` `[N]`, by the library.
    """
    rounded, x_scales = quantise_rows(x, x.shape[1])
    y: torch.Tensor = torch._scaled_mm(
        rounded,
        weight.t(),
        scale_a=x_scales,
        scale_b=scales[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    y = y if y.dtype == x.dtype else y.to(x.dtype)
    return y if bias is None else y + bias


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"fp8_linear: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}; expected [T, H], "
            f"[N, H]"
        )
    check_scales("fp8_linear", weight, scales)
    if bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1]):
        raise ValueError(f"fp8_linear: bias {tuple(bias.shape)} {bias.dtype}; expected [N] {x.dtype}")
    check_gated("fp8_linear", weight, scales, is_gated)


def _is_native(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= NATIVE


def _many_rows(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    is_aligned = weight.shape[0] % ALIGNED == weight.shape[1] % ALIGNED == 0
    if scales.dim() == 2:
        return fp8_blocks_triton(x, weight, scales, bias)
    if is_aligned and x.dtype == torch.bfloat16:
        return fp8_rows_product(x, weight, scales, bias)
    return F.linear(x, dequantise_fp8(weight, scales, x.dtype), bias)


def _invariant(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
) -> torch.Tensor:
    """`fp8_linear` on a GPU, in one way for any number of rows."""
    if x.dtype == torch.float32:
        return fp8_linear_triton(x, weight, scales, bias, is_gated=is_gated)
    if _is_native(x.device):
        return fp8_linear_triton(x, weight, scales, bias, is_gated=is_gated, is_rounded=True)
    y = invariant_linear(x, dequantise_fp8(weight, scales, x.dtype), bias)
    return silu_mul(y) if is_gated else y


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    is_invariant: bool = False,
) -> torch.Tensor:
    """x W^T + b with an e4m3 `weight` `[N, H]`: `x` `[T, H]`, `bias` None or `[N]` -> `[T, N]`.

    `scales`: float32, one of the forms of `fp8_scales`. `is_gated`: silu of the first half of the outputs,
    times the second half, `[T, N/2]`. `is_invariant`: the bits of a row do not depend on the number of rows.
    Raises ValueError if shapes or dtypes do not fit.
    """
    _check(x, weight, scales, bias, is_gated)
    if is_invariant:
        return (_invariant if x.is_cuda else fp8_linear_rows)(x, weight, scales, bias, is_gated)
    if not x.is_cuda or x.dtype == torch.float32 or not _is_native(x.device):
        return fp8_linear_reference(x, weight, scales, bias, is_gated)
    if x.shape[0] <= most_rows(x.dtype):
        return fp8_rows_triton(x, Fp8Weight(weight, scales, bias), is_gated=is_gated)
    if x.shape[0] <= MAX_ROWS:
        return fp8_linear_triton(x, weight, scales, bias, is_gated=is_gated, is_rounded=True)
    y = _many_rows(x, weight, scales, bias)
    return silu_mul(y) if is_gated else y
