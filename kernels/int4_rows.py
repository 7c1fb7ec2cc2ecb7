"""Projections of few rows with weights of 4-bit integers: y = x W^T + b, optionally gated, and with the
residual sums and norms of `normed_linear`.

The inputs of a tile are split, so that most columns of a matrix instruction have work, see `packed_product`.
Words of `int4_values` are read as pairs of 16-bit words, each with four values that are QUARTER inputs apart.

Legend: T rows, N outputs, H inputs, G inputs of a group, S tiles whose squares were summed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .int4_values import VALUES_A_WORD, dequantise_int4, unit_of
from .normed_linear import MIN_ROWS, UnscaledRows, scaled_linear_reference, sum_linear_reference
from .packed_product import split_product
from .packed_words import unpacks_pairs
from .rms_norm import NextNorm
from .row_product import gated, load_residual, load_squares, store_sum, with_bias
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl

MAX_ROWS = 4  # with more, the kernels that unpack a tile once for all rows are faster
QUARTER = 8  # inputs between the values of a 16-bit word
CAPABILITY = (8, 0)  # the first compute capability with matrix instructions of bfloat16
MIN_UNIT = 64  # inputs: the steps of a matrix instruction take 16 words


class Int4Weight(NamedTuple):
    """A weight int32 `[N, H/8]` with its `groups` int32 `[H/G, N]`, see `int4_values`, and bias `[N]` or
    None.
    """

    words: torch.Tensor
    groups: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def unit(self) -> int:
        """Inputs of a unit."""
        in_size = VALUES_A_WORD * self.words.shape[1]
        return unit_of(in_size, in_size // self.groups.shape[0])

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """The values `[N, H]`."""
        return dequantise_int4(self.words, self.groups, dtype)


def can_join(dtype: torch.dtype, unit: int) -> bool:
    """Whether norms and sums are joined for rows of `dtype` and units of `unit` inputs. float16 has no
    instruction here that unpacks pairs.
    """
    return dtype != torch.float16 and unit >= MIN_UNIT


def can_run(x: torch.Tensor, weight: Int4Weight) -> bool:
    """Whether the kernel is the one for rows `x` `[T, H]` on a CUDA device."""
    is_few = x.shape[0] <= MAX_ROWS and x.dtype == torch.bfloat16 and weight.unit >= MIN_UNIT
    return is_few and torch.cuda.get_device_capability(x.device) >= CAPABILITY


@jit
def _inputs_of_words(UNIT: tl.constexpr) -> tl.tensor:
    """The inputs `[UNIT/4]` of a unit to which the first values of its 16-bit words belong."""
    i_half = tl.arange(0, UNIT // 4)
    i_word = i_half // 2
    return 32 * (i_word % (UNIT // 32)) + 2 * (i_word // (UNIT // 32)) + i_half % 2


@jit_varying("num_rows")
def _int4_rows_kernel(
    p_x: tl.tensor,
    p_squares: tl.tensor,
    p_halves: tl.tensor,
    p_groups: tl.tensor,
    p_bias: tl.tensor,
    p_residual: tl.tensor,
    p_norm: tl.tensor,
    p_y: tl.tensor,
    p_z: tl.tensor,
    p_sums: tl.tensor,
    num_rows: tl.tensor,
    num_squares: tl.tensor,
    out_size: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_SUM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    IN_SIZE: tl.constexpr,
    NUM_LINES: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    QUARTER: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # lines are (split, output) or, with a gate, (split, output, gate or up); columns are (split, row)
    wait_for_previous(CHAINED)
    HALVES: tl.constexpr = 2 if IS_GATED else 1
    LINES: tl.constexpr = SPLITS * BLOCK_OUT * HALVES
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
    i_line = tl.arange(0, LINES)
    i_line_out = i_tile * BLOCK_OUT + i_line // HALVES % BLOCK_OUT
    i_line_split = i_line // (HALVES * BLOCK_OUT)
    i_own = tl.minimum(i_line_out, out_size - 1) + i_line % HALVES * out_size
    i_column = tl.arange(0, COLUMNS)
    i_column_row = i_column % BLOCK_ROWS
    m_column = (i_column < SPLITS * BLOCK_ROWS) & (i_column_row < num_rows)
    i_half = tl.arange(0, UNIT // 4)
    b_each = split_product(
        p_x + i_column_row * x_stride, m_column, i_column // BLOCK_ROWS, _inputs_of_words(UNIT),
        p_halves + i_own.to(tl.int64)[:, None] * (IN_SIZE // 4) + i_half[None, :], p_groups + i_own,
        i_line_out < out_size, i_line_split, IN_SIZE, NUM_LINES, SPLITS, HAS_PAIRS, GROUP, UNIT // 4, QUARTER,
    )  # fmt: skip
    release_next(CHAINED)
    # of each line the columns of its own split, then the sums of the splits
    b_each = tl.where(i_line_split[:, None] == (i_column // BLOCK_ROWS)[None, :], b_each, 0.0)
    b_lines = tl.sum(tl.reshape(b_each, (LINES, COLUMNS // BLOCK_ROWS, BLOCK_ROWS)), axis=1)
    b_lines = tl.sum(tl.reshape(b_lines, (SPLITS, BLOCK_OUT * HALVES, BLOCK_ROWS)), axis=0)
    if IS_SCALED:
        b_lines *= tl.rsqrt(tl.sum(b_squares, axis=1) / IN_SIZE + eps)[None, :]
    if IS_GATED:
        b_pairs = tl.reshape(b_lines, (BLOCK_OUT, HALVES, BLOCK_ROWS))
        b_y, b_up = tl.split(tl.permute(b_pairs, (0, 2, 1)))
        if HAS_BIAS:
            b_y = with_bias(b_y, p_bias, i_out, m_out)
            b_up = with_bias(b_up, p_bias + out_size, i_out, m_out)
        b_y = gated(b_y, b_up, dtype, False)
    else:
        b_y = b_lines
        if HAS_BIAS:
            b_y = with_bias(b_y, p_bias, i_out, m_out)
    if IS_SUM:
        store_sum(
            b_y, b_residual, b_norm, p_y, p_z, p_sums, i_tile, tl.num_programs(0), i_row, m_row, i_out, m_out,
            out_size, HAS_NORM,
        )  # fmt: skip
    else:
        o_y = i_row[None, :].to(tl.int64) * out_size + i_out[:, None]
        tl.store(p_y + o_y, b_y.to(dtype), mask=m_out[:, None] & m_row[None, :])


class Int4Tile(NamedTuple):
    """The tile of a product: outputs, parts of the inputs, warps, and steps under way at once."""

    out: int
    splits: int
    num_warps: int
    num_stages: int


def int4_tile(num_rows: int, *, is_gated: bool) -> Int4Tile:
    """The tile of a product. A layer of an 8B Llama in groups of 128 takes with these, the best of 6 to 8 for
    each product on an H200, 55.3, 61.3 and 67.4 us for 1, 2 and 4 rows with its norms joined; with
    `int4_mma` and `int4_wgmma` and without that it takes 70.1, 71.8 and 75.0. 8 rows take 83.7 and 80.5.
    """
    if num_rows == 1:
        return Int4Tile(out=16, splits=4 if is_gated else 8, num_warps=4, num_stages=3)
    if not is_gated:
        return Int4Tile(out=16, splits=4, num_warps=2, num_stages=4)
    if num_rows == 2:
        return Int4Tile(out=16, splits=2, num_warps=2, num_stages=4)
    return Int4Tile(out=32, splits=2, num_warps=4, num_stages=3)


def _launch(
    rows: UnscaledRows,
    weight: Int4Weight,
    y: torch.Tensor,
    tile: Int4Tile,
    *,
    is_scaled: bool = False,
    is_gated: bool = False,
    sums: tuple[torch.Tensor, NextNorm | None, torch.Tensor, torch.Tensor] | None = None,
    has_pairs: bool | None = None,
) -> None:
    """`sums`: the residual, the norm of the sum, and where its rows in front of the norm's scale go."""
    if y.numel() == 0:
        return
    x = rows.z if rows.z.stride(1) == 1 else rows.z.contiguous()
    (num_rows, in_size), out_size, bias = x.shape, y.shape[1], weight.bias
    residual, norm, z, squares = (y, None, y, rows.squares) if sums is None else sums
    num_squares = rows.squares.shape[1] if is_scaled else 1
    block_rows, splits = next_power_of_2(num_rows), tile.splits
    _int4_rows_kernel[(cdiv(out_size, tile.out),)](
        x,
        rows.squares,
        weight.words.view(torch.int16),
        weight.groups,
        weight.groups if bias is None else bias,
        residual,
        weight.groups if norm is None else norm.weight,
        y,
        z,
        squares,
        num_rows,
        num_squares,
        out_size,
        x.stride(0),
        rows.eps,
        HAS_BIAS=bias is not None,
        IS_SCALED=is_scaled,
        IS_GATED=is_gated,
        IS_SUM=sums is not None,
        HAS_NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset or 0.0,
        HAS_PAIRS=unpacks_pairs(x, has_pairs),
        IN_SIZE=in_size,
        NUM_LINES=weight.words.shape[0],
        GROUP=in_size // weight.groups.shape[0],
        UNIT=weight.unit,
        QUARTER=QUARTER,
        BLOCK_SQUARES=next_power_of_2(num_squares),
        BLOCK_OUT=tile.out,
        BLOCK_ROWS=block_rows,
        COLUMNS=max(MIN_ROWS, splits * block_rows),
        SPLITS=splits,
        **chained(x.device),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def int4_rows_triton(
    x: torch.Tensor,
    weight: Int4Weight,
    *,
    is_gated: bool = False,
    tile: Int4Tile | None = None,
    has_pairs: bool | None = None,
) -> torch.Tensor:
    """Launch with checked arguments of `int4_linear.int4_linear`, for up to MAX_ROWS rows. `has_pairs` as in
    `packed_experts_triton`.
    """
    num_rows = x.shape[0]
    assert num_rows <= MAX_ROWS, num_rows
    assert weight.unit >= MIN_UNIT, weight.unit
    y = torch.empty(num_rows, weight.words.shape[0] // (2 if is_gated else 1), dtype=x.dtype, device=x.device)
    tile = int4_tile(num_rows, is_gated=is_gated) if tile is None else tile
    _launch(UnscaledRows(x, y, 0.0), weight, y, tile, is_gated=is_gated, has_pairs=has_pairs)
    return y


def sum_int4_triton(
    x: torch.Tensor,
    weight: Int4Weight,
    residual: torch.Tensor,
    norm: NextNorm | None,
    *,
    tile: Int4Tile | None = None,
    has_pairs: bool | None = None,
) -> tuple[torch.Tensor, UnscaledRows | None]:
    """Launch; arguments as in `sum_int4`. Raises ValueError as it does."""
    _check(x, weight)
    tile = int4_tile(x.shape[0], is_gated=False) if tile is None else tile
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    z = total if norm is None else torch.empty_like(total)
    squares = torch.empty(x.shape[0], cdiv(total.shape[1], tile.out), dtype=torch.float32, device=x.device)
    sums = residual.contiguous(), norm, z, squares
    _launch(UnscaledRows(x, squares, 0.0), weight, total, tile, sums=sums, has_pairs=has_pairs)
    return total, None if norm is None else UnscaledRows(z, squares, norm.eps)


def scaled_int4_triton(
    rows: UnscaledRows,
    weight: Int4Weight,
    *,
    is_gated: bool = False,
    tile: Int4Tile | None = None,
    has_pairs: bool | None = None,
) -> torch.Tensor:
    """Launch; arguments as in `scaled_int4`. Raises ValueError as it does."""
    _check(rows.z, weight)
    num_rows, out_size = rows.z.shape[0], weight.words.shape[0] // (2 if is_gated else 1)
    y = torch.empty(num_rows, out_size, dtype=rows.z.dtype, device=rows.z.device)
    tile = int4_tile(num_rows, is_gated=is_gated) if tile is None else tile
    _launch(rows, weight, y, tile, is_scaled=True, is_gated=is_gated, has_pairs=has_pairs)
    return y


def _check(x: torch.Tensor, weight: Int4Weight) -> None:
    in_size = VALUES_A_WORD * weight.words.shape[1]
    if x.dim() != 2 or x.shape[1] != in_size or x.shape[0] > MAX_ROWS or weight.unit < MIN_UNIT:
        raise ValueError(
            f"normed int4: rows {tuple(x.shape)} do not fit weight {tuple(weight.words.shape)} with units of "
            f"{weight.unit}; expected up to {MAX_ROWS} rows [T, H], [N, H/8] and units of {MIN_UNIT} or more"
        )


def sum_int4(
    x: torch.Tensor, weight: Int4Weight, residual: torch.Tensor, norm: NextNorm | None
) -> tuple[torch.Tensor, UnscaledRows | None]:
    """As `normed_linear.sum_linear`, for up to MAX_ROWS rows and units of MIN_UNIT or more. Raises ValueError
    for others, or other sizes.
    """
    if x.is_cuda:
        return sum_int4_triton(x, weight, residual, norm)
    _check(x, weight)
    return sum_linear_reference(x, weight.values(x.dtype), weight.bias, residual, norm)


def scaled_int4(rows: UnscaledRows, weight: Int4Weight, *, is_gated: bool = False) -> torch.Tensor:
    """As `normed_linear.scaled_linear`, for up to MAX_ROWS rows and units of MIN_UNIT or more. Raises
    ValueError for others, or other sizes.
    """
    if rows.z.is_cuda:
        return scaled_int4_triton(rows, weight, is_gated=is_gated)
    _check(rows.z, weight)
    return scaled_linear_reference(rows, weight.values(rows.z.dtype), weight.bias, is_gated=is_gated)
