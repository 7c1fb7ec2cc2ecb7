"""Projections of few rows: y = x W^T + b, optionally followed by the gate of a GLU MLP.

With few rows, the time of a projection is the time to read W. A library splits the inner dimension to fill
the chip and adds the parts in a second kernel. Here each program owns some outputs and streams their rows of
W once, with many tiles in flight, so a small W is read nearly as fast as a large one. The gated form needs no
separate kernel for the gate. One row is multiplied without matrix instructions, see `row_product`; from two
to MIN_ROWS_TILE rows, the order of a sum does not depend on their number.

Legend: T rows, N outputs, H inputs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .chained_launch import are_chained, chained, release_next, wait_for_previous
from .row_product import gated, row_product, with_bias
from .silu_mul import silu_mul, silu_mul_reference
from .triton_jit import cdiv, jit_varying, next_power_of_2, tl

# With more rows or outputs, the library's kernels are as fast on an H200.
MAX_ROWS = 32
MAX_ROWS_GATED = 64
MIN_ROWS_TILE, MAX_TILE_ROWS = 16, 64
# A row of fewer inputs takes small steps; with a gate, one below LONG_ROW takes middling ones.
SHORT_ROW, LONG_ROW = 2048, 4096
WIDE_OUTPUTS = 4096  # more have wide tiles in any product
# Tiles of rows that are computed side by side.
ROW_TILES = 8
# Bytes of shared memory for the widest tile. Devices with less per program use the library.
SHARED_BYTES = 192 * 1024


def gated_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, is_gelu: bool = False
) -> torch.Tensor:
    """The definition and the CPU path: both halves and silu are rounded to the dtype before the product."""
    return silu_mul_reference(F.linear(x, weight, bias), is_gelu)


@jit_varying("num_rows")
def _skinny_kernel(
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    num_rows: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    x_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # programs that run at the same time share rows of x and of W: ROW_TILES tiles of rows for each of W
    wait_for_previous(CHAINED)
    i_group = tl.program_id(0) // (ROW_TILES * tl.cdiv(out_size, BLOCK_OUT))
    i_in_group = tl.program_id(0) % (ROW_TILES * tl.cdiv(out_size, BLOCK_OUT))
    num_tiles = tl.minimum(tl.cdiv(num_rows, BLOCK_ROWS) - i_group * ROW_TILES, ROW_TILES)
    i_out = (i_in_group // num_tiles).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    i_row = (i_group * ROW_TILES + i_in_group % num_tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    m_out = i_out < out_size
    m_row = i_row < num_rows
    b_zero = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    b_y, b_up = row_product(
        p_x, p_weight, i_row, m_row, i_out, m_out, 0, out_size, in_size, x_stride, out_size, b_zero, b_zero,
        IS_GATED, IS_EVEN, BLOCK_IN, NUM_STAGES,
    )  # fmt: skip
    release_next(CHAINED)
    if HAS_BIAS:
        b_y = with_bias(b_y, p_bias, i_out, m_out)
        if IS_GATED:
            b_up = with_bias(b_up, p_bias + out_size, i_out, m_out)
    if IS_GATED:
        b_y = gated(b_y, b_up, p_y.dtype.element_ty, IS_GELU)
    o_y = i_row[None, :].to(tl.int64) * out_size + i_out[:, None]
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_out[:, None] & m_row[None, :])


class SkinnyShape(NamedTuple):
    """Launch configuration."""

    out: int
    inner: int
    num_warps: int
    num_stages: int


# Chained launches make up for fewer programs, where each has many inputs. At 4 rows 10240 x 2560 and
# 6912 x 1152 take 20.8 and 13.0 us instead of 23.0 and 14.0. With 4096 inputs alone they are faster too, but
# behind attention slower: a verify of 2 requests takes 5.14 ms instead of 4.92 (Qwen3-30B-A3B).
FEW_OUTPUTS = SkinnyShape(out=32, inner=256, num_warps=4, num_stages=4)


def skinny_shape(num_rows: int, out_size: int) -> SkinnyShape:
    """Tiles for `num_rows` x `out_size` outputs.

    Few outputs get narrow tiles, so that every multiprocessor of an H200 has some. These were the best of
    thirteen shapes there, for the projections of an 8B Llama at 4, 32 and 64 rows.
    """
    if out_size > WIDE_OUTPUTS:
        return SkinnyShape(out=64, inner=128, num_warps=4, num_stages=4)
    if num_rows > MIN_ROWS_TILE:
        return FEW_OUTPUTS
    return SkinnyShape(out=16, inner=256, num_warps=2, num_stages=5)


def vector_shape(
    in_size: int, out_size: int, *, is_gated: bool = False, is_sum: bool = False
) -> SkinnyShape:
    """Tiles for one row x `out_size` outputs; with a gate, each output has two lines of W. `is_sum`: with a
    residual sum and a norm behind it.

    Many small programs have most bytes on their way. With these instead of matrix instructions, a layer of
    one row takes 115.3 us instead of 123.0 (8B Llama), 42.8 instead of 50.4 (Llama-3.2-1B) and 14.8 instead
    of 20.1 (SmolLM2-135M) on an H200. Few outputs of many inputs need long steps: without a sum, 6912 x 1152,
    10240 x 2560 and 15360 x 3840 (Gemma 3) take 7.2, 17.2 and 30.8 us instead of 9.8, 18.7 and 35.8. With a
    gate, 1152 x 6912 takes 11.6 instead of 13.4.
    """
    if in_size < SHORT_ROW and is_gated and out_size > WIDE_OUTPUTS:
        return SkinnyShape(out=8, inner=256, num_warps=2, num_stages=3)
    if in_size < SHORT_ROW:
        return SkinnyShape(out=4 if is_gated or is_sum else 8, inner=256, num_warps=2, num_stages=4)
    if is_gated and in_size < LONG_ROW:
        return SkinnyShape(out=4, inner=512, num_warps=4, num_stages=3)
    if is_gated:
        return SkinnyShape(out=4, inner=1024, num_warps=8, num_stages=5)
    if is_sum:
        return SkinnyShape(out=8, inner=512, num_warps=4, num_stages=4)
    if out_size < in_size:
        return SkinnyShape(out=4, inner=512, num_warps=4, num_stages=4)
    return SkinnyShape(out=8, inner=256, num_warps=2, num_stages=4)


def linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    is_gelu: bool = False,
    shape: SkinnyShape | None = None,
    max_tile_rows: int = MAX_TILE_ROWS,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Launch on `x` `[T, H]`, `weight` `[N, H]`, `bias` None or `[N]`; returns `[T, N]`, by default in the
    dtype of `x`.

    With `is_gated` it returns silu(first half of the outputs) * second half, `[T, N/2]`, or gelu instead of
    silu. Sums are float32. `max_tile_rows`: the largest number of rows of a program; with 1, no matrix
    instructions are used. Raises ValueError if shapes or dtypes differ, or a gated N is odd.
    """
    _check(x, weight, bias, is_gated)
    num_rows, in_size = x.shape
    out_size = weight.shape[0] // 2 if is_gated else weight.shape[0]
    y = torch.empty(num_rows, out_size, dtype=out_dtype or x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = skinny_shape(num_rows, out_size) if shape is None else shape
    block_rows = min(max(next_power_of_2(num_rows), MIN_ROWS_TILE), max_tile_rows)
    _skinny_kernel[(cdiv(out_size, tile.out) * cdiv(num_rows, block_rows),)](
        x,
        weight,
        weight if bias is None else bias,
        y,
        num_rows,
        out_size,
        in_size,
        x.stride(0),
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        IS_GELU=is_gelu,
        IS_EVEN=out_size % tile.out == 0 and in_size % tile.inner == 0,
        BLOCK_OUT=tile.out,
        BLOCK_IN=tile.inner,
        BLOCK_ROWS=block_rows,
        ROW_TILES=ROW_TILES,
        NUM_STAGES=tile.num_stages,
        **chained(x.device, is_wanted=num_rows <= MIN_ROWS_TILE),
        num_warps=tile.num_warps,
    )
    return y


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_gated: bool) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or not weight.is_contiguous():
        raise ValueError(
            f"linear: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}; expected [T, H], [N, H]"
        )
    if x.dtype != weight.dtype or (
        bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1])
    ):
        raise ValueError(
            f"linear: x {x.dtype}, weight {weight.dtype} and bias must have one dtype, a bias for each output"
        )
    if is_gated and weight.shape[0] % 2:
        raise ValueError(f"gated_linear: {weight.shape[0]} outputs are odd; gate and up must be equally wide")


@cache  # torch takes several us to say it again, before each launch
def shared_bytes(device: torch.device) -> int:
    """Shared memory in bytes that one program may use on CUDA `device`; 0 if torch does not know."""
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def fitting_stages(num_stages: int, step_bytes: int, device: torch.device) -> int:
    """As many of `num_stages` steps of `step_bytes` each as the shared memory of a program on CUDA `device`
    holds, but one at least.
    """
    return max(1, min(num_stages, shared_bytes(device) // step_bytes))


def has_tiles(x: torch.Tensor) -> bool:
    """Whether kernels of few rows take tensors like `x`. float32 is left to the library: Triton has no fast
    product of full precision.
    """
    return x.is_cuda and x.dtype != torch.float32 and shared_bytes(x.device) >= SHARED_BYTES


def _is_skinny(x: torch.Tensor, max_rows: int) -> bool:
    """Whether these kernels take `x`."""
    return x.dim() == 2 and x.shape[0] <= max_rows and has_tiles(x)


def _few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_gated: bool = False,
    is_gelu: bool = False,
) -> torch.Tensor:
    """As `linear_triton`, with the fastest tiles."""
    shape, most, out_size = None, MAX_TILE_ROWS, weight.shape[0] // (2 if is_gated else 1)
    if x.shape[0] == 1:
        shape, most = vector_shape(x.shape[1], out_size, is_gated=is_gated), 1
    elif out_size <= WIDE_OUTPUTS and x.shape[1] > LONG_ROW and are_chained(x.device):
        shape = FEW_OUTPUTS
    return linear_triton(x, weight, bias, is_gated=is_gated, is_gelu=is_gelu, shape=shape, max_tile_rows=most)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b: `x` `[T, H]`, `weight` `[N, H]`, `bias` None or `[N]` -> `[T, N]`."""
    if _is_skinny(x, MAX_ROWS):
        return _few_rows(x, weight, bias)
    return F.linear(x, weight, bias)


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, is_gelu: bool = False
) -> torch.Tensor:
    """silu(x G^T) * (x U^T) with biases added before: `x` `[T, H]`, `bias` None or `[2*I]` -> `[T, I]`.

    `weight` `[2*I, H]` holds G above U. `is_gelu`: gelu by tanh instead of silu. Raises ValueError if
    the number of outputs is odd.
    """
    if _is_skinny(x, MAX_ROWS_GATED):
        return _few_rows(x, weight, bias, is_gated=True, is_gelu=is_gelu)
    _check(x, weight, bias, True)
    if x.is_cuda:
        return silu_mul(F.linear(x, weight, bias), is_gelu)
    return gated_linear_reference(x, weight, bias, is_gelu)
