"""Rows of up to three tables in one launch: embeddings and the rotary tables of their positions, and the
states of requests.

Legend: T rows, R rows of a table, W its width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl

MAX_TABLES = 3
MAX_BLOCK = 1024
SHARE = 2048  # columns of a program


class Lookup(NamedTuple):
    """Rows `ids` int64 `[T]` of `table` `[R, W]`, of any dtype."""

    table: torch.Tensor
    ids: torch.Tensor


def look_up_rows_reference(lookups: tuple[Lookup, ...]) -> tuple[torch.Tensor, ...]:
    """The definition and the CPU path."""
    return tuple(table.index_select(0, ids) for table, ids in lookups)


@jit
def copy_row(
    p_from: tl.tensor,
    p_to: tl.tensor,
    is_copied: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Copies this program's share of a row of WIDTH columns, the last work of a kernel."""
    i_offset = tl.arange(0, BLOCK)
    start = tl.program_id(2) * SHARE
    for first in range(start, tl.minimum(start + SHARE, WIDTH), BLOCK):
        i_column = first + i_offset
        m_column = (i_column < WIDTH) & is_copied
        b_row = tl.load(p_from + i_column, mask=m_column, other=0.0)
        tl.store(p_to + i_column, b_row, mask=m_column)
    release_next(CHAINED)


@jit
def _look_up_row(
    p_table: tl.tensor,
    p_ids: tl.tensor,
    p_out: tl.tensor,
    ids_stride: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    row = tl.load(p_ids + i_row * ids_stride).to(tl.int64)
    row = tl.minimum(tl.maximum(row, 0), num_rows - 1)
    copy_row(p_table + row * WIDTH, p_out + i_row * WIDTH, True, WIDTH, BLOCK, SHARE, CHAINED)


@jit_varying("p_ids_0", "p_ids_1", "p_ids_2", "stride_0", "stride_1", "stride_2",
             "rows_0", "rows_1", "rows_2")  # fmt: skip
def _look_up_kernel(
    p_table_0: tl.tensor,
    p_ids_0: tl.tensor,
    p_out_0: tl.tensor,
    stride_0: tl.tensor,
    rows_0: tl.tensor,
    p_table_1: tl.tensor,
    p_ids_1: tl.tensor,
    p_out_1: tl.tensor,
    stride_1: tl.tensor,
    rows_1: tl.tensor,
    p_table_2: tl.tensor,
    p_ids_2: tl.tensor,
    p_out_2: tl.tensor,
    stride_2: tl.tensor,
    rows_2: tl.tensor,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    BLOCK_0: tl.constexpr,
    BLOCK_1: tl.constexpr,
    BLOCK_2: tl.constexpr,
    SHARE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (row, table, share of the columns)
    wait_for_previous(CHAINED)
    if tl.program_id(1) == 0:
        _look_up_row(p_table_0, p_ids_0, p_out_0, stride_0, rows_0, WIDTH_0, BLOCK_0, SHARE, CHAINED)
    elif tl.program_id(1) == 1:
        _look_up_row(p_table_1, p_ids_1, p_out_1, stride_1, rows_1, WIDTH_1, BLOCK_1, SHARE, CHAINED)
    else:
        _look_up_row(p_table_2, p_ids_2, p_out_2, stride_2, rows_2, WIDTH_2, BLOCK_2, SHARE, CHAINED)


def look_up_rows_triton(*lookups: Lookup) -> tuple[torch.Tensor, ...]:
    """Launch; arguments as in `look_up_rows`. Raises ValueError as it does."""
    count = _check(lookups)
    found = tuple(table.new_empty((count, table.shape[1])) for table, _ in lookups)
    if count == 0:
        return found
    filled = [*zip(lookups, found, strict=True)]
    filled += filled[:1] * (MAX_TABLES - len(lookups))
    arguments: list[object] = []
    sizes: dict[str, int] = {}
    for index, ((table, ids), out) in enumerate(filled):
        arguments += (table, ids, out, ids.stride(0), table.shape[0])
        sizes[f"WIDTH_{index}"] = table.shape[1]
        sizes[f"BLOCK_{index}"] = min(next_power_of_2(table.shape[1]), MAX_BLOCK)
    grid = (count, len(lookups), cdiv(max(table.shape[1] for table, _ in lookups), SHARE))
    _look_up_kernel[grid](*arguments, **sizes, SHARE=SHARE, **chained(lookups[0].table.device), num_warps=4)
    return found


def _check(lookups: tuple[Lookup, ...]) -> int:
    """T. Raises ValueError if the arguments do not fit."""
    if not 1 <= len(lookups) <= MAX_TABLES:
        raise ValueError(f"look_up_rows: {len(lookups)} tables; one launch has 1 to {MAX_TABLES}")
    count = lookups[0].ids.shape[0]
    for table, ids in lookups:
        if table.dim() != 2 or ids.shape != (count,) or ids.dtype != torch.int64:
            raise ValueError(
                f"look_up_rows: table {tuple(table.shape)} and ids {tuple(ids.shape)} {ids.dtype} beside "
                f"{count} others; expected [R, W] and int64 [T]"
            )
        if not table.is_contiguous():
            raise ValueError(f"look_up_rows: table {tuple(table.shape)} is not contiguous; copy it once")
    return count


def look_up_rows(*lookups: Lookup) -> tuple[torch.Tensor, ...]:
    """The rows of each of 1 to 3 lookups, `[T, W]` in the dtype of its table. T is common, W is not.

    Ids outside of a table raise IndexError on a CPU, and take its first or last row on a GPU. Raises
    ValueError if shapes or dtypes do not fit, or if a table is not contiguous.
    """
    if lookups and lookups[0].table.is_cuda:
        return look_up_rows_triton(*lookups)
    _check(lookups)
    return look_up_rows_reference(lookups)
