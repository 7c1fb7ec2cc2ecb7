"""Projections with weights of 8-bit floating point: y = x W^T + b, optionally with the gate of a SwiGLU MLP.

The definition multiplies rows with the values of the weights. For few rows `fp8_rows` does that. More rows
are rounded to 8 bits themselves, each row with a scale of its own (in blocks of 128 inputs if the weight
has blocks), and multiplied by 8-bit matrix instructions: weights are never converted, and prompts take half
the time. Up to MAX_ROWS rows, as in decode steps, a kernel with the gate in it streams the weight once; more
are those of `fp8_many_rows`. Devices without these instructions take the dequantised weight.

Batch-invariant products round rows in any number, by that kernel: each output is one chain of matrix
instructions along the inner dimension.

Legend: T rows, N outputs, H inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .add_splits import add_splits
from .chained_launch import chained, release_next, wait_for_previous
from .fp8_few_rows import most_rows
from .fp8_many_rows import by_library, fp8_many_rows
from .fp8_rows import fp8_rows_triton
from .fp8_scales import BLOCK, FP8, Fp8Weight, check_gated, check_scales, dequantise_fp8
from .fp8_tile import by_outputs, fp8_tile
from .invariant_linear import invariant_linear
from .invariant_rows import linear_rows, silu_mul_rows
from .quantise_rows import quantise_rows
from .row_product import gated, with_bias
from .silu_mul import silu_mul, silu_mul_reference
from .skinny_linear import fitting_stages
from .triton_jit import cdiv, jit_varying, next_power_of_2, tl

MAX_ROWS = 64
MIN_ROWS_TILE = 16
NATIVE = (8, 9)  # the first compute capability with conversions and products of e4m3
LONG_INPUTS = 8192  # beyond them tiles have 128 outputs with blocks
MANY_OUTPUTS = 8192  # beyond them tiles have as many for more than half of MAX_ROWS rows
LIBRARY_OUTPUTS = 16384  # beyond them the library multiplies so many rows
PROGRAMS = 264  # of a product whose inputs are cut: two for each multiprocessor of an H200
MIN_BLOCKS = 4  # of a part of the inputs
MAX_SPLITS = 8


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


@jit_varying("num_rows", "x_scale_stride")
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
    part: tl.tensor,
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
    i_first_out = tl.program_id(0) * BLOCK_OUT
    i_out = i_first_out.to(tl.int64) + tl.arange(0, BLOCK_OUT)
    i_row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    m_out = i_out < out_size
    m_row = i_row < num_rows
    first_in = tl.program_id(2) * part
    end_in = tl.minimum(first_in + part, in_size)
    p_rows = p_x + i_row.to(tl.int64)[None, :] * x_stride
    p_outs = p_weight + tl.minimum(i_out, out_size - 1)[:, None] * in_size  # behind the last, that again
    p_row_scales = p_x_scales + i_row
    b_y, b_up = fp8_tile(
        p_rows, p_outs, p_row_scales, p_scales, i_first_out, m_row, first_in, end_in, out_size, in_size,
        x_scale_stride, scale_stride, HAS_BLOCKS, IS_ROUNDED, IS_GATED, IS_EVEN, SCALE_BLOCK, BLOCK_IN,
        "evict_first",
    )  # fmt: skip
    release_next(CHAINED)
    if not HAS_BLOCKS:
        b_y, b_up = by_outputs(
            b_y, b_up, p_row_scales, p_scales, i_out, m_row, m_out, out_size, IS_ROUNDED, IS_GATED
        )
    if HAS_BIAS:
        b_y = with_bias(b_y, p_bias, i_out, m_out)
    if IS_GATED:
        if HAS_BIAS:
            b_up = with_bias(b_up, p_bias + out_size, i_out, m_out)
        b_y = gated(b_y, b_up, p_y.dtype.element_ty, False)
    o_y = (tl.program_id(2) * num_rows + i_row)[None, :].to(tl.int64) * out_size + i_out[:, None]
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_out[:, None] & m_row[None, :])


class Fp8Shape(NamedTuple):
    """Launch configuration."""

    out: int
    inner: int
    num_warps: int
    num_stages: int


def fp8_shape(
    num_rows: int,
    out_size: int,
    in_size: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    has_blocks: bool = False,
) -> Fp8Shape:
    """Tiles for `num_rows` x `out_size` outputs of `in_size` inputs, rows of `dtype`. A tile of inputs lies
    in one block of scales, and so does one of outputs.

    Rows in 8 bits need no conversion: many stages keep enough bytes in flight even where there are fewer
    tiles than multiprocessors. With blocks each step waits for its product, and more programs have to make up
    for it (see `num_splits`): fewer stages, so that a multiprocessor holds several.
    """
    if dtype == torch.float32:  # no matrix instruction of full precision; it is for tests
        return Fp8Shape(out=32, inner=32, num_warps=4, num_stages=2)
    if dtype == FP8 and has_blocks:
        if in_size > LONG_INPUTS:
            return Fp8Shape(out=128, inner=128, num_warps=4, num_stages=4)
        if num_rows > MAX_ROWS // 2 and out_size > MANY_OUTPUTS:
            return Fp8Shape(out=128, inner=128, num_warps=8, num_stages=5)
        return Fp8Shape(out=64, inner=128, num_warps=4, num_stages=5)
    if dtype == FP8:
        return Fp8Shape(out=64, inner=128, num_warps=4, num_stages=8)
    if out_size > 4096:
        return Fp8Shape(out=64, inner=128, num_warps=4, num_stages=5)
    return Fp8Shape(out=32, inner=128, num_warps=4, num_stages=5)


def num_splits(num_tiles: int, in_size: int) -> int:
    """How many parts of the inputs the programs of a tile of outputs share, for `num_tiles` tiles."""
    return max(1, min(PROGRAMS // num_tiles, in_size // (MIN_BLOCKS * BLOCK), MAX_SPLITS))


def fp8_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    is_rounded: bool = False,
    splits: int = 1,
    shape: Fp8Shape | None = None,
) -> torch.Tensor:
    """Launch on `x` `[T, H]`, e4m3 `weight` `[N, H]`, its `scales`, `bias` None or `[N]`; returns `[T, N]`,
    gated `[T, N/2]`, in the dtype of `x`. `is_rounded`: x is rounded to 8 bits before the product. `splits`:
    the inputs are cut into as many, which a second launch adds; 0: as many as `num_splits` says. A gated
    product has one.

    Raises ValueError as `fp8_linear`.
    """
    _check(x, weight, scales, bias, is_gated)
    num_rows, in_size = x.shape
    out_size = weight.shape[0] // 2 if is_gated else weight.shape[0]
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    x_scales, has_blocks = scales, scales.dim() == 2
    if is_rounded:
        x, x_scales = quantise_rows(x, BLOCK if has_blocks else in_size)
    tile = fp8_shape(num_rows, out_size, in_size, x.dtype, has_blocks=has_blocks) if shape is None else shape
    tiles = cdiv(out_size, tile.out)
    splits = 1 if is_gated else splits or num_splits(tiles, in_size)
    part = cdiv(cdiv(in_size, splits), BLOCK) * BLOCK
    splits = cdiv(in_size, part)
    sums = y if splits == 1 else torch.empty((splits, *y.shape), dtype=torch.float32, device=x.device)
    block_rows = min(max(next_power_of_2(num_rows), MIN_ROWS_TILE), MAX_ROWS)
    lines, stages = (2 * tile.out if is_gated else tile.out), tile.num_stages
    if x.is_cuda:
        stages = fitting_stages(stages, (lines + block_rows * x.element_size()) * tile.inner, x.device)
    _fp8_kernel[(tiles, cdiv(num_rows, block_rows), splits)](
        x,
        x_scales,
        weight,
        scales,
        scales if bias is None else bias,
        sums,
        num_rows,
        out_size,
        in_size,
        part,
        x.stride(0),
        x_scales.stride(-1),
        scales.shape[1] if has_blocks else 1,
        HAS_BIAS=bias is not None and splits == 1,
        HAS_BLOCKS=has_blocks,
        IS_ROUNDED=is_rounded,
        IS_GATED=is_gated,
        IS_EVEN=in_size % tile.inner == 0,
        SCALE_BLOCK=BLOCK,
        BLOCK_OUT=tile.out,
        BLOCK_IN=tile.inner,
        BLOCK_ROWS=block_rows,
        **chained(x.device),
        num_warps=tile.num_warps,
        num_stages=stages,
    )
    if splits > 1:
        add_splits(sums, bias, y)
    return y


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


def _counts_as_many(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, is_gated: bool) -> bool:
    """Whether `fp8_many_rows` is faster for more than half of MAX_ROWS rows: with blocks and many outputs."""
    out_size = weight.shape[0] // 2 if is_gated else weight.shape[0]
    is_more = x.shape[0] > MAX_ROWS // 2 and out_size > LIBRARY_OUTPUTS
    return is_more and scales.dim() == 2 and by_library(x, weight, scales)


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
        tile = fp8_shape(1, weight.shape[0], x.shape[1], FP8, has_blocks=scales.dim() == 2)
        return fp8_linear_triton(x, weight, scales, bias, is_gated=is_gated, is_rounded=True, shape=tile)
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
    if x.shape[0] <= MAX_ROWS and not _counts_as_many(x, weight, scales, is_gated):
        splits = 0 if scales.dim() == 2 else 1
        return fp8_linear_triton(x, weight, scales, bias, is_gated=is_gated, is_rounded=True, splits=splits)
    y = fp8_many_rows(x, weight, scales, bias)
    return silu_mul(y) if is_gated else y
