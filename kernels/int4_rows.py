"""Projections of few rows with weights of 4-bit integers: y = x W^T + b, optionally gated, and with the
residual sums and norms of `normed_linear`.

See `split_rows` and `packed_product`. Words of `int4_values` are read as pairs of 16-bit words, each with
four values that are QUARTER inputs apart.

Legend: T rows, N outputs, H inputs, G inputs of a group.
"""

from __future__ import annotations

import torch

from .chained_launch import release_next, wait_for_previous
from .int4_values import VALUES_A_WORD, Int4Weight
from .normed_linear import UnscaledRows, scaled_linear_reference, sum_linear_reference
from .packed_product import packed_product
from .packed_words import unpacks_pairs
from .rms_norm import NextNorm
from .row_product import load_residual, load_squares
from .split_rows import SplitProduct, SplitTile, split_columns, split_lines, store_lines, sum_splits
from .triton_jit import jit, jit_varying, tl

MAX_ROWS = 4  # with more, the kernels that unpack a tile once for all rows are faster
QUARTER = 8  # inputs between the values of a 16-bit word
CAPABILITY = (8, 0)  # the first compute capability with matrix instructions of bfloat16
MIN_UNIT = 64  # inputs: the steps of a matrix instruction take 16 words


def most_rows(dtype: torch.dtype, unit: int) -> int:
    """Up to how many rows of `dtype` are multiplied here with units of `unit` inputs. float16 has no
    instruction here that unpacks pairs.
    """
    return MAX_ROWS if dtype != torch.float16 and unit >= MIN_UNIT else 0


def can_run(x: torch.Tensor, weight: Int4Weight) -> bool:
    """Whether the kernel is the one for rows `x` `[T, H]` on a CUDA device."""
    is_few = x.dtype == torch.bfloat16 and x.shape[0] <= most_rows(x.dtype, weight.unit)
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
    IN_SIZE: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    NUM_LINES: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    QUARTER: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    wait_for_previous(CHAINED)
    i_tile = tl.program_id(0)
    i_row = tl.arange(0, BLOCK_ROWS)
    m_row = i_row < num_rows
    i_out = i_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m_out = i_out < out_size
    b_squares = load_squares(p_squares, num_squares, i_row, m_row, IS_SCALED, BLOCK_SQUARES)
    b_residual, b_norm = load_residual(
        p_residual, p_norm, i_row, m_row, i_out, m_out, out_size, IS_SUM, HAS_NORM, OFFSET
    )
    i_line_out, i_own, i_line_split = split_lines(i_tile, out_size, IS_GATED, BLOCK_OUT, SPLITS)
    i_column_row, i_column_split, m_column = split_columns(num_rows, BLOCK_ROWS, COLUMNS, SPLITS)
    i_half = tl.arange(0, UNIT // 4)
    b_each = packed_product(
        p_x + i_column_row * x_stride, m_column, i_column_split, _inputs_of_words(UNIT),
        p_halves + i_own.to(tl.int64)[:, None] * (IN_SIZE // 4) + i_half[None, :], p_groups + i_own,
        i_line_out < out_size, i_line_split, IN_SIZE, NUM_LINES, SPLITS, HAS_PAIRS, GROUP, UNIT // 4, QUARTER,
    )  # fmt: skip
    release_next(CHAINED)
    b_lines = sum_splits(b_each, i_line_split, i_column_split, SPLITS, BLOCK_ROWS)
    store_lines(
        b_lines, b_squares, b_residual, b_norm, p_bias, p_y, p_z, p_sums, i_row, m_row, i_out, m_out,
        out_size, IN_SIZE, eps, HAS_BIAS, IS_SCALED, IS_GATED, IS_SUM, HAS_NORM,
    )  # fmt: skip


def int4_tile(num_rows: int, *, is_gated: bool) -> SplitTile:
    """The tile of a product, the best of 6 to 8 for each product of an 8B Llama in groups of 128 on an H200.
    A layer with joined norms takes 55.3, 61.3 and 67.4 us for 1, 2 and 4 rows, and 83.7 for 8. With
    `int4_mma`, `int4_wgmma` and norms of their own it takes 70.1, 71.8, 75.0 and 80.5.
    """
    if num_rows == 1:
        return SplitTile(out=16, splits=4 if is_gated else 8, num_warps=4, num_stages=3)
    if not is_gated:
        return SplitTile(out=16, splits=4, num_warps=2, num_stages=4)
    if num_rows == 2:
        return SplitTile(out=16, splits=2, num_warps=2, num_stages=4)
    return SplitTile(out=32, splits=2, num_warps=4, num_stages=3)


def _product(x: torch.Tensor, weight: Int4Weight, has_pairs: bool | None) -> SplitProduct:
    form = {
        "HAS_PAIRS": unpacks_pairs(x, has_pairs),
        "NUM_LINES": weight.words.shape[0],
        "GROUP": x.shape[1] // weight.groups.shape[0],
        "UNIT": weight.unit,
        "QUARTER": QUARTER,
    }
    halves = weight.words.view(torch.int16)
    return SplitProduct(_int4_rows_kernel, halves, weight.groups, weight.bias, form)


def int4_rows_triton(
    x: torch.Tensor,
    weight: Int4Weight,
    *,
    is_gated: bool = False,
    tile: SplitTile | None = None,
    has_pairs: bool | None = None,
) -> torch.Tensor:
    """Launch with checked arguments of `int4_linear.int4_linear`, for up to MAX_ROWS rows. `has_pairs` as in
    `packed_experts_triton`.
    """
    chosen = int4_tile(x.shape[0], is_gated=is_gated) if tile is None else tile
    return _product(x, weight, has_pairs).plain(x, chosen, is_gated=is_gated)


def sum_int4_triton(
    x: torch.Tensor,
    weight: Int4Weight,
    residual: torch.Tensor,
    norm: NextNorm | None,
    *,
    tile: SplitTile | None = None,
    has_pairs: bool | None = None,
) -> tuple[torch.Tensor, UnscaledRows | None]:
    """Launch; arguments as in `sum_int4`. Raises ValueError as it does."""
    _check(x, weight)
    chosen = int4_tile(x.shape[0], is_gated=False) if tile is None else tile
    return _product(x, weight, has_pairs).summed(x, residual, norm, chosen)


def scaled_int4_triton(
    rows: UnscaledRows,
    weight: Int4Weight,
    *,
    is_gated: bool = False,
    tile: SplitTile | None = None,
    has_pairs: bool | None = None,
) -> torch.Tensor:
    """Launch; arguments as in `scaled_int4`. Raises ValueError as it does."""
    _check(rows.z, weight)
    chosen = int4_tile(rows.z.shape[0], is_gated=is_gated) if tile is None else tile
    return _product(rows.z, weight, has_pairs).scaled(rows, chosen, is_gated=is_gated)


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
