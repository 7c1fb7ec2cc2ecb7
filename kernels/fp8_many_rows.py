"""Projections of many rows with weights of 8-bit floating point: rows are rounded to 8 bits, each with a
scale of its own (in blocks of 128 inputs if the weight has blocks), for 8-bit matrix instructions.

The products are the library's where it has them. With blocks those are cuBLAS's on Hopper; elsewhere a kernel
here takes their place. Scales of outputs with rows in float16 or sizes that the library does not take:
dequantised weights.

Source: cuBLAS documentation, "1D and 2D block scaling for FP8 data types", for the layouts of scales.
Legend: T rows, N outputs, H inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from .fp8_scales import BLOCK, dequantise_fp8
from .quantise_rows import quantise_rows
from .triton_jit import cdiv, jit_varying, tl

ALIGNED = 16  # sizes of the library's products are multiples of this
ALIGNED_ROWS = 4  # and rows with scales of blocks of this,
ALIGNED_BLOCKS = 4  # as are the scales of an output's blocks
BLOCK_DEVICE = (9, 0)  # the compute capability with products of blocks in the library,
BLOCK_CUDA = (12, 9)  # and its first version


@jit_varying("num_rows", "x_scale_stride")
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
    p_row_scales = p_x_scales + tl.minimum(i_row, num_rows - 1)
    p_out_scales = p_scales + (tl.minimum(i_out, out_size - 1) // SCALE_BLOCK) * scale_stride
    b_y = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
    for i_block in range(0, tl.cdiv(in_size, SCALE_BLOCK)):
        i_in = i_block * SCALE_BLOCK + i_offset
        m_in = i_in < in_size
        b_x = tl.load(p_rows + i_in[None, :], mask=m_in[None, :], other=0.0)
        b_weight = tl.load(p_outs + i_in[:, None], mask=m_in[:, None], other=0.0)
        b_both = tl.load(p_row_scales)[:, None] * tl.load(p_out_scales + i_block)[None, :]
        b_y += tl.dot(b_x, b_weight) * b_both
        p_row_scales += x_scale_stride
    if HAS_BIAS:
        b_y += tl.load(p_bias + i_out, mask=m_out, other=0.0).to(tl.float32)[None, :]
    o_y = i_row[:, None].to(tl.int64) * out_size + i_out[None, :]
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_row[:, None] & m_out[None, :])


def fp8_blocks_triton(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Launch on `x` `[T, H]`, rounded in blocks of BLOCK inputs, `weight` `[N, H]` with block `scales` and
    `bias` None or `[N]`; returns `[T, N]`.
    """
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
        x_scales.stride(1),
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


# torch's own form for fake tensors counts whole blocks only, and a dry run would end at a smaller last block
torch.library.define(
    "baton::scaled_blocks", "(Tensor rows, Tensor row_scales, Tensor weight, Tensor scales) -> Tensor"
)


def _scaled_blocks(
    rows: torch.Tensor, row_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """The library's product of e4m3 `rows` `[T, H]` and `weight` `[N, H]`, bfloat16 `[T, N]`. `row_scales`
    `[T, G]` and `scales` `[ceil(N / BLOCK), G']` with G' a multiple of ALIGNED_BLOCKS.
    """
    return F.scaled_mm(
        rows,
        weight.t(),
        row_scales,
        ScalingType.BlockWise1x128,
        scales.t(),
        ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )


def _fake_scaled_blocks(
    rows: torch.Tensor, row_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[0]), dtype=torch.bfloat16)


torch.library.impl("baton::scaled_blocks", "cuda", _scaled_blocks)
torch.library.register_fake("baton::scaled_blocks", _fake_scaled_blocks)


def fp8_blocks_product(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As `fp8_blocks_triton`, by the library."""
    rounded, x_scales = quantise_rows(x, BLOCK, ALIGNED_ROWS)
    missing = -scales.shape[1] % ALIGNED_BLOCKS
    whole = F.pad(scales, (0, missing)) if missing else scales
    y: torch.Tensor = torch.ops.baton.scaled_blocks.default(rounded, x_scales, weight, whole)
    return _finished(y if len(y) == len(x) else y[: len(x)], x.dtype, bias)


def fp8_rows_product(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x` `[T, H]`, each row rounded to 8 bits, times `weight` `[N, H]` with `scales` `[N]`."""
    rounded, x_scales = quantise_rows(x, x.shape[1])
    y: torch.Tensor = torch._scaled_mm(
        rounded,
        weight.t(),
        scale_a=x_scales,
        scale_b=scales.unsqueeze(0),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return _finished(y, x.dtype, bias)


def _finished(y: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    y = y if y.dtype == dtype else y.to(dtype)
    return y if bias is None else y + bias


def by_library(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether the library multiplies `x` and `weight`, which fit."""
    is_aligned = weight.shape[0] % ALIGNED == weight.shape[1] % ALIGNED == 0 and x.dtype == torch.bfloat16
    if scales.dim() == 1 or not is_aligned:
        return is_aligned
    version = tuple(map(int, (torch.version.cuda or "0").split(".")))
    return version >= BLOCK_CUDA and torch.cuda.get_device_capability(x.device) == BLOCK_DEVICE


def fp8_many_rows(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x W^T + b on a GPU with products of e4m3: `x` `[T, H]`, `weight` `[N, H]` with `scales` in a form of
    `fp8_scales`, `bias` None or `[N]` -> `[T, N]`.
    """
    has_blocks = scales.dim() == 2
    if by_library(x, weight, scales):
        return (fp8_blocks_product if has_blocks else fp8_rows_product)(x, weight, scales, bias)
    if has_blocks:
        return fp8_blocks_triton(x, weight, scales, bias)
    return F.linear(x, dequantise_fp8(weight, scales, x.dtype), bias)
