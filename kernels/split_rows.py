"""What the products of few rows with small weights have in common: weights in 4 or 8 bits.

Making operands of such weights takes as long as reading them, so that many small tiles must be under way at
once, and the inputs of a tile are split: what would be empty columns of a matrix instruction holds other
parts of the rows, and lines of weights follow each other part by part. Products may have the residual sums
and norms of `normed_linear`. A kernel computes the products of its lines between `split_lines` and
`sum_splits`, and ends with `store_lines`.

Legend: T rows, N outputs, H inputs, S tiles whose squares were summed; LINES lines of weights and COLUMNS
columns of a tile, OUT outputs, ROWS rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .chained_launch import chained
from .normed_linear import MIN_ROWS, Sums, UnscaledRows, new_sums
from .rms_norm import NextNorm
from .row_product import gated, store_sum, with_bias
from .triton_jit import Kernel, cdiv, jit, next_power_of_2, tl


@jit
def split_lines(
    i_tile: tl.tensor,
    out_size: tl.tensor,
    IS_GATED: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    SPLITS: tl.constexpr,
) -> tl.tensor:
    """(outputs, rows of the weight, splits), each `[LINES]`, of the lines of a tile: lines are (split,
    output) or, with a gate, (split, output, gate or up). Rows behind the last are the last again.
    """
    HALVES: tl.constexpr = 2 if IS_GATED else 1
    i_line = tl.arange(0, SPLITS * BLOCK_OUT * HALVES)
    i_line_out = i_tile * BLOCK_OUT + i_line // HALVES % BLOCK_OUT
    i_own = tl.minimum(i_line_out, out_size - 1) + i_line % HALVES * out_size
    return i_line_out, i_own, i_line // (HALVES * BLOCK_OUT)


@jit
def split_columns(
    num_rows: tl.tensor, BLOCK_ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr
) -> tl.tensor:
    """(rows, splits, whether there is such a row), each `[COLUMNS]`: columns are (split, row)."""
    i_column = tl.arange(0, COLUMNS)
    i_row = i_column % BLOCK_ROWS
    return i_row, i_column // BLOCK_ROWS, (i_column < SPLITS * BLOCK_ROWS) & (i_row < num_rows)


@jit
def sum_splits(
    b_each: tl.tensor,
    i_line_split: tl.tensor,
    i_column_split: tl.tensor,
    SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> tl.tensor:
    """Sums `[LINES/SPLITS, ROWS]` over the splits of products `[LINES, COLUMNS]`, of which each line has
    those of its own split.
    """
    LINES: tl.constexpr = b_each.shape[0]
    b_each = tl.where(i_line_split[:, None] == i_column_split[None, :], b_each, 0.0)
    b_lines = tl.sum(tl.reshape(b_each, (LINES, b_each.shape[1] // BLOCK_ROWS, BLOCK_ROWS)), axis=1)
    return tl.sum(tl.reshape(b_lines, (SPLITS, LINES // SPLITS, BLOCK_ROWS)), axis=0)


@jit
def store_lines(
    b_lines: tl.tensor,
    b_squares: tl.tensor,
    b_residual: tl.tensor,
    b_norm: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    p_z: tl.tensor,
    p_sums: tl.tensor,
    i_row: tl.tensor,
    m_row: tl.tensor,
    i_out: tl.tensor,
    m_out: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    eps: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_SUM: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    """Stores the sums of `sum_splits` with the scales of the rows, bias, gate, or residual sum and norm."""
    dtype: tl.constexpr = p_y.dtype.element_ty
    if IS_SCALED:
        b_lines *= tl.rsqrt(tl.sum(b_squares, axis=1) / in_size + eps)[None, :]
    if IS_GATED:
        b_pairs = tl.reshape(b_lines, (i_out.shape[0], 2, i_row.shape[0]))
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
            b_y, b_residual, b_norm, p_y, p_z, p_sums, tl.program_id(0), tl.num_programs(0), i_row, m_row,
            i_out, m_out, out_size, HAS_NORM,
        )  # fmt: skip
    else:
        o_y = i_row[None, :].to(tl.int64) * out_size + i_out[:, None]
        tl.store(p_y + o_y, b_y.to(dtype), mask=m_out[:, None] & m_row[None, :])


class SplitTile(NamedTuple):
    """The tile of a product: outputs, parts of the inputs, warps, and steps under way at once."""

    out: int
    splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class SplitProduct:
    """A product of few rows with `weight` `[N, ...]`, its `scales` and `bias` `[N]` or None, as the
    operations of `normed_linear`. `kernel` is given the other arguments of `form`, too.
    """

    kernel: Kernel
    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    form: Mapping[str, object] = field(default_factory=dict)

    def plain(self, x: torch.Tensor, tile: SplitTile, *, is_gated: bool = False) -> torch.Tensor:
        """`x` `[T, H]` -> `[T, N]`; with `is_gated`, as `linear_triton`, `[T, N/2]`."""
        y = self._outputs(x, is_gated)
        no_squares = y  # which are not read
        self._launch(UnscaledRows(x, no_squares, 0.0), y, tile, is_gated=is_gated)
        return y

    def scaled(self, rows: UnscaledRows, tile: SplitTile, *, is_gated: bool = False) -> torch.Tensor:
        """As `scaled_linear`."""
        y = self._outputs(rows.z, is_gated)
        self._launch(rows, y, tile, is_scaled=True, is_gated=is_gated)
        return y

    def summed(
        self, x: torch.Tensor, residual: torch.Tensor, norm: NextNorm | None, tile: SplitTile
    ) -> tuple[torch.Tensor, UnscaledRows | None]:
        """As `sum_linear`. Raises ValueError for a residual that does not fit."""
        total, sums = new_sums(x, len(self.weight), residual, norm, tile.out)
        self._launch(UnscaledRows(x, sums.squares, 0.0), total, tile, sums=sums)
        return total, sums.rows()

    def _outputs(self, x: torch.Tensor, is_gated: bool) -> torch.Tensor:
        size = len(self.weight) // (2 if is_gated else 1)
        return torch.empty(x.shape[0], size, dtype=x.dtype, device=x.device)

    def _launch(
        self,
        rows: UnscaledRows,
        y: torch.Tensor,
        tile: SplitTile,
        *,
        is_scaled: bool = False,
        is_gated: bool = False,
        sums: Sums | None = None,
    ) -> None:
        if y.numel() == 0:
            return
        x = rows.z if rows.z.stride(1) == 1 else rows.z.contiguous()
        (num_rows, in_size), out_size = x.shape, y.shape[1]
        residual, norm, z, squares = sums or Sums(y, None, y, y)
        num_squares = rows.squares.shape[1] if is_scaled else 1
        block_rows = next_power_of_2(num_rows)
        self.kernel[(cdiv(out_size, tile.out),)](
            x,
            rows.squares,
            self.weight,
            self.scales,
            self.scales if self.bias is None else self.bias,
            residual,
            self.scales if norm is None else norm.weight,
            y,
            z,
            squares,
            num_rows,
            num_squares,
            out_size,
            x.stride(0),
            rows.eps,
            HAS_BIAS=self.bias is not None,
            IS_SCALED=is_scaled,
            IS_GATED=is_gated,
            IS_SUM=sums is not None,
            HAS_NORM=norm is not None,
            OFFSET=0.0 if norm is None else norm.offset or 0.0,
            IN_SIZE=in_size,
            BLOCK_SQUARES=next_power_of_2(num_squares),
            BLOCK_OUT=tile.out,
            BLOCK_ROWS=block_rows,
            COLUMNS=max(MIN_ROWS, tile.splits * block_rows),
            SPLITS=tile.splits,
            **self.form,
            **chained(x.device),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
