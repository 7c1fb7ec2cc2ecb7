"""Products of few rows without launches for the norms and residual sums between them, see `row_product`.

Rounding differs from `rms_norm`, which rounds once more, before it applies the weights, and from
`skinny_linear` in nothing else but, for one row, the order of sums. Batch-invariant operations do not use
these products.

Legend: T rows, N outputs, H inputs, S tiles whose squares were summed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .chained_launch import are_chained, chained, release_next, wait_for_previous
from .rms_norm import NextNorm
from .row_product import gated, load_residual, load_squares, row_product, store_sum, with_bias
from .silu_mul import silu_mul_reference
from .skinny_linear import (
    FEW_OUTPUTS,
    MIN_ROWS_TILE,
    WIDE_OUTPUTS,
    SkinnyShape,
    skinny_shape,
    vector_shape,
)
from .triton_jit import cdiv, jit_varying, next_power_of_2, tl

MIN_ROWS, MAX_ROWS = 8, 64  # of one tile; the shortest matrix instruction has 8 columns
WIDE_SUMS = (2048, 4096)  # outputs of a sum for 64 or 128 programs with wide tiles
SHORT_INPUTS = 1024  # so few inputs of a product take small steps


class UnscaledRows(NamedTuple):
    """Rows in front of the scale of their norm: `z` `[T, H]`, the rows times the norm's weights.

    `squares` `[T, S]`, float32, are sums of squares of the rows; `eps` is the norm's.
    """

    z: torch.Tensor
    squares: torch.Tensor
    eps: float

    def scale(self) -> torch.Tensor:
        """The factor of each row, float32 `[T, 1]`."""
        return torch.rsqrt(self.squares.sum(1, keepdim=True) / self.z.shape[1] + self.eps)


class Sums(NamedTuple):
    """What a product with a residual sum reads and writes besides the sum: `residual` and rows `z` `[T, N]`,
    the norm of the sum or None, and the sums of squares `[T, S]`.
    """

    residual: torch.Tensor
    norm: NextNorm | None
    z: torch.Tensor
    squares: torch.Tensor

    def rows(self) -> UnscaledRows | None:
        """The sum in front of its norm, if there is one."""
        return None if self.norm is None else UnscaledRows(self.z, self.squares, self.norm.eps)


def new_sums(
    x: torch.Tensor, out_size: int, residual: torch.Tensor, norm: NextNorm | None, tile_outs: int
) -> tuple[torch.Tensor, Sums]:
    """(the sum `[T, N]` to be written, the rest) for rows `x` `[T, H]` and tiles of `tile_outs` outputs.

    Raises ValueError for a residual that does not fit N = `out_size` outputs.
    """
    if residual.shape != (x.shape[0], out_size) or residual.dtype != x.dtype:
        raise ValueError(
            f"sum_linear: residual {tuple(residual.shape)} {residual.dtype} does not fit {x.shape[0]} rows "
            f"of {out_size} {x.dtype} outputs"
        )
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    z = total if norm is None else torch.empty_like(total)
    squares = torch.empty(x.shape[0], cdiv(out_size, tile_outs), dtype=torch.float32, device=x.device)
    return total, Sums(residual.contiguous(), norm, z, squares)


def sum_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: NextNorm | None,
) -> tuple[torch.Tensor, UnscaledRows | None]:
    """The definition and the CPU path."""
    total = F.linear(x, weight, bias) + residual
    if norm is None:
        return total, None
    wide = total.to(torch.float32)
    z = wide * ((norm.offset or 0.0) + norm.weight.to(torch.float32))
    return total, UnscaledRows(z.to(x.dtype), wide.pow(2).sum(1, keepdim=True), norm.eps)


def scaled_linear_reference(
    rows: UnscaledRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    is_gelu: bool = False,
) -> torch.Tensor:
    """The definition and the CPU path: the product is rounded once, behind scale and bias."""
    wide = F.linear(rows.z.to(torch.float32), weight.to(torch.float32)) * rows.scale()
    if bias is not None:
        wide = wide + bias.to(torch.float32)
    y = wide.to(rows.z.dtype)
    return silu_mul_reference(y, is_gelu) if is_gated else y


@jit_varying("num_rows")
def _normed_kernel(
    p_x: tl.tensor,
    p_squares: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor,
    p_residual: tl.tensor,
    p_norm: tl.tensor,
    p_y: tl.tensor,
    p_z: tl.tensor,
    p_sums: tl.tensor,
    num_rows: tl.tensor,
    num_squares: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_SUM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    wait_for_previous(CHAINED)
    i_tile = tl.program_id(0)
    i_row = tl.arange(0, BLOCK_ROWS)
    m_row = i_row < num_rows
    i_out = i_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m_out = i_out < out_size
    dtype: tl.constexpr = p_y.dtype.element_ty
    b_squares = load_squares(p_squares, num_squares, i_row, m_row, IS_SCALED, BLOCK_SQUARES)
    b_residual, b_norm = load_residual(
        p_residual, p_norm, i_row, m_row, i_out, m_out, out_size, IS_SUM, HAS_NORM, OFFSET
    )
    b_zero = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    b_y, b_up = row_product(
        p_x, p_weight, i_row, m_row, i_out, m_out, 0, out_size, in_size, x_stride, out_size, b_zero,
        b_zero, IS_GATED, IS_EVEN, BLOCK_IN, NUM_STAGES,
    )  # fmt: skip
    release_next(CHAINED)
    if IS_SCALED:
        b_scale = tl.rsqrt(tl.sum(b_squares, axis=1) / in_size + eps)[None, :]
        b_y *= b_scale
        b_up *= b_scale
    if HAS_BIAS:
        b_y = with_bias(b_y, p_bias, i_out, m_out)
        if IS_GATED:
            b_up = with_bias(b_up, p_bias + out_size, i_out, m_out)
    if IS_SUM:
        store_sum(
            b_y, b_residual, b_norm, p_y, p_z, p_sums, i_tile, tl.num_programs(0), i_row, m_row, i_out, m_out,
            out_size, HAS_NORM,
        )  # fmt: skip
    else:
        if IS_GATED:
            b_y = gated(b_y, b_up, dtype, IS_GELU)
        o_y = i_row[None, :].to(tl.int64) * out_size + i_out[:, None]
        tl.store(p_y + o_y, b_y.to(dtype), mask=m_out[:, None] & m_row[None, :])


def sum_shape(num_rows: int, out_size: int, in_size: int, device: torch.device) -> SkinnyShape:
    """Tiles for the sums of `num_rows` x `out_size` outputs.

    Two to eight rows take long steps, so that most bytes are on their way. With these and those of
    `scaled_shape`, a decode step of 8 requests takes 0.683 ms instead of 0.707 (SmolLM2-135M), one of 4
    requests 4.278 instead of 4.318 (8B Llama). Nine to 16 rows take wide tiles where launches are chained and
    one round of programs reads the weights. There they are faster for fewer rows, too: 114.4 us a layer
    instead of 116.0; elsewhere they are slower, 118.1 instead of 117.1 (8B Llama, 1 row, when one row took
    tiles of 16).
    """
    if num_rows == 1:
        return vector_shape(in_size, out_size, is_sum=True)
    if num_rows <= MIN_ROWS:
        return SkinnyShape(out=16, inner=256 if in_size <= SHORT_INPUTS else 512, num_warps=2, num_stages=4)
    shape = skinny_shape(num_rows, out_size)
    if num_rows <= MIN_ROWS_TILE and out_size in WIDE_SUMS and are_chained(device):
        return FEW_OUTPUTS
    return shape


def scaled_shape(num_rows: int, out_size: int, in_size: int, is_gated: bool) -> SkinnyShape:
    """Tiles for `num_rows` x `out_size` outputs behind a norm.

    Two to eight rows without a gate take narrow tiles, see `sum_shape`. Others of up to 16 take, with short
    inputs, small steps, of which most are on their way at once, and with many outputs wide tiles, whose
    stages are worth 1.3 us of 126 a layer of an 8B Llama with a gate.
    """
    if num_rows == 1:
        return vector_shape(in_size, out_size, is_gated=is_gated)
    if num_rows <= MIN_ROWS and not is_gated:
        return SkinnyShape(out=32, inner=128, num_warps=2, num_stages=6)
    if num_rows > MIN_ROWS_TILE:
        return skinny_shape(num_rows, out_size)
    if in_size <= SHORT_INPUTS:
        return SkinnyShape(out=16, inner=64, num_warps=4, num_stages=6)
    shape = skinny_shape(num_rows, out_size)
    return shape._replace(num_stages=3 if is_gated else 5) if out_size > WIDE_OUTPUTS else shape


def tile_rows(num_rows: int) -> int:
    """The rows of a tile: 1 for one row, which uses no matrix instruction, otherwise a power of two from
    MIN_ROWS on.
    """
    return 1 if num_rows == 1 else max(next_power_of_2(num_rows), MIN_ROWS)


def sum_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: NextNorm | None,
    *,
    shape: SkinnyShape | None = None,
) -> tuple[torch.Tensor, UnscaledRows | None]:
    """Launch; arguments as in `sum_linear`. Raises ValueError as it does."""
    check_rows(x, weight, bias)
    out_size = weight.shape[0]
    tile = sum_shape(x.shape[0], out_size, x.shape[1], x.device) if shape is None else shape
    total, sums = new_sums(x, out_size, residual, norm, tile.out)
    _launch(UnscaledRows(x, sums.squares, 0.0), weight, bias, total, tile, is_scaled=False, sums=sums)
    return total, sums.rows()


def scaled_linear_triton(
    rows: UnscaledRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    is_gelu: bool = False,
    shape: SkinnyShape | None = None,
) -> torch.Tensor:
    """Launch; arguments as in `scaled_linear`. Raises ValueError as it does."""
    check_rows(rows.z, weight, bias)
    num_rows, out_size = rows.z.shape[0], weight.shape[0] // (2 if is_gated else 1)
    y = torch.empty(num_rows, out_size, dtype=rows.z.dtype, device=rows.z.device)
    tile = scaled_shape(num_rows, out_size, rows.z.shape[1], is_gated) if shape is None else shape
    _launch(rows, weight, bias, y, tile, is_scaled=True, is_gated=is_gated, is_gelu=is_gelu)
    return y


def _launch(
    rows: UnscaledRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: SkinnyShape,
    *,
    is_scaled: bool,
    is_gated: bool = False,
    is_gelu: bool = False,
    sums: Sums | None = None,
) -> None:
    if y.numel() == 0:
        return
    x = rows.z if rows.z.stride(1) == 1 else rows.z.contiguous()
    out_size, in_size = y.shape[1], x.shape[1]
    residual, norm, z, squares = sums if sums is not None else (y, None, y, rows.squares)
    _normed_kernel[(cdiv(out_size, tile.out),)](
        x,
        rows.squares,
        weight,
        weight if bias is None else bias,
        residual,
        weight if norm is None else norm.weight,
        y,
        z,
        squares,
        x.shape[0],
        rows.squares.shape[1],
        out_size,
        in_size,
        x.stride(0),
        rows.eps,
        HAS_BIAS=bias is not None,
        IS_SCALED=is_scaled,
        IS_GATED=is_gated,
        IS_GELU=is_gelu,
        IS_SUM=sums is not None,
        HAS_NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset or 0.0,
        IS_EVEN=out_size % tile.out == 0 and in_size % tile.inner == 0,
        BLOCK_SQUARES=next_power_of_2(rows.squares.shape[1]),
        BLOCK_OUT=tile.out,
        BLOCK_IN=tile.inner,
        BLOCK_ROWS=tile_rows(x.shape[0]),
        NUM_STAGES=tile.num_stages,
        **chained(x.device),
        num_warps=tile.num_warps,
    )


def check_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises ValueError unless `x` `[T, H]`, `weight` `[N, H]` and `bias` fit, in number and dtype."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or not weight.is_contiguous():
        raise ValueError(
            f"normed linear: rows {tuple(x.shape)} do not fit weight {tuple(weight.shape)}; expected [T, H], "
            "[N, H]"
        )
    if x.shape[0] > MAX_ROWS:
        raise ValueError(f"normed linear: {x.shape[0]} rows; one tile has {MAX_ROWS}")
    if x.dtype != weight.dtype or (
        bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1])
    ):
        raise ValueError(
            f"normed linear: rows {x.dtype}, weight {weight.dtype} and bias must have one dtype, a bias for "
            "each output"
        )


def sum_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: NextNorm | None,
) -> tuple[torch.Tensor, UnscaledRows | None]:
    """(x W^T + b + residual, that sum in front of `norm`): `x` `[T, H]`, `weight` `[N, H]`, `bias` None or
    `[N]`, `residual` `[T, N]` -> `[T, N]`, and rows of N values, or None without a norm.

    Raises ValueError if shapes or dtypes differ, or for more than MAX_ROWS rows.
    """
    if x.is_cuda:
        return sum_linear_triton(x, weight, bias, residual, norm)
    check_rows(x, weight, bias)
    return sum_linear_reference(x, weight, bias, residual, norm)


def scaled_linear(
    rows: UnscaledRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    is_gelu: bool = False,
) -> torch.Tensor:
    """norm(rows) W^T + b: `rows` of H values, `weight` `[N, H]`, `bias` None or `[N]` -> `[T, N]`; with
    `is_gated`, silu (or gelu) of the first half of the outputs times the second, `[T, N/2]`.

    Raises ValueError if shapes or dtypes differ, or for more than MAX_ROWS rows.
    """
    if rows.z.is_cuda:
        return scaled_linear_triton(rows, weight, bias, is_gated=is_gated, is_gelu=is_gelu)
    check_rows(rows.z, weight, bias)
    return scaled_linear_reference(rows, weight, bias, is_gated=is_gated, is_gelu=is_gelu)
