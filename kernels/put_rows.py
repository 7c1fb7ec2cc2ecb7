"""Writes rows into up to two tables in one launch: the states of requests behind a step.

Legend: T rows, R rows of a table, W its width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .chained_launch import chained, wait_for_previous
from .look_up_rows import MAX_BLOCK, SHARE, copy_row
from .triton_jit import cdiv, jit_varying, next_power_of_2, tl

MAX_TABLES = 2


class Put(NamedTuple):
    """`rows` `[T, W]` for a `table` `[R, W]`, both contiguous and of one dtype."""

    table: torch.Tensor
    rows: torch.Tensor


def put_rows_reference(ids: torch.Tensor, puts: tuple[Put, ...], counts: torch.Tensor | None) -> None:
    """The definition and the CPU path. It never waits for the device."""
    for table, rows in puts:
        if counts is not None:
            rows = torch.where((counts > 0)[:, None], rows, table.index_select(0, ids))
        table.index_copy_(0, ids, rows)


@jit_varying("p_ids", "p_counts", "ids_stride", "counts_stride")
def _put_kernel(
    p_ids: tl.tensor,
    p_counts: tl.tensor,
    p_table_0: tl.tensor,
    p_rows_0: tl.tensor,
    p_table_1: tl.tensor,
    p_rows_1: tl.tensor,
    ids_stride: tl.tensor,
    counts_stride: tl.tensor,
    HAS_COUNTS: tl.constexpr,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    BLOCK_0: tl.constexpr,
    BLOCK_1: tl.constexpr,
    SHARE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (row, table, share of the columns)
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    row = tl.load(p_ids + i_row * ids_stride).to(tl.int64)
    is_kept = True
    if HAS_COUNTS:
        is_kept = tl.load(p_counts + i_row * counts_stride) > 0
    if tl.program_id(1) == 0:
        copy_row(
            p_rows_0 + i_row * WIDTH_0, p_table_0 + row * WIDTH_0, is_kept, WIDTH_0, BLOCK_0, SHARE, CHAINED
        )
    else:
        copy_row(
            p_rows_1 + i_row * WIDTH_1, p_table_1 + row * WIDTH_1, is_kept, WIDTH_1, BLOCK_1, SHARE, CHAINED
        )


def put_rows_triton(ids: torch.Tensor, *puts: Put, counts: torch.Tensor | None = None) -> None:
    """Launch; arguments as in `put_rows`. Raises ValueError as it does."""
    _check(ids, puts, counts)
    if ids.shape[0] == 0:
        return
    filled = [*puts, *puts[:1] * (MAX_TABLES - len(puts))]
    widths = [put.table.shape[1] for put in filled]
    _put_kernel[(ids.shape[0], len(puts), cdiv(max(widths), SHARE))](
        ids,
        ids if counts is None else counts,
        *(part for put in filled for part in put),
        ids.stride(0),
        0 if counts is None else counts.stride(0),
        HAS_COUNTS=counts is not None,
        WIDTH_0=widths[0],
        WIDTH_1=widths[1],
        BLOCK_0=min(next_power_of_2(widths[0]), MAX_BLOCK),
        BLOCK_1=min(next_power_of_2(widths[1]), MAX_BLOCK),
        SHARE=SHARE,
        **chained(ids.device),
        num_warps=4,
    )


def _check(ids: torch.Tensor, puts: tuple[Put, ...], counts: torch.Tensor | None) -> None:
    """Raises ValueError if the arguments do not fit."""
    if not 1 <= len(puts) <= MAX_TABLES:
        raise ValueError(f"put_rows: {len(puts)} tables; one launch has 1 to {MAX_TABLES}")
    for numbers in (ids,) if counts is None else (ids, counts):
        if numbers.shape != (ids.numel(),) or numbers.dtype != torch.int64:
            raise ValueError(
                f"put_rows: {tuple(numbers.shape)} {numbers.dtype} for {ids.numel()} rows; expected ids and "
                "counts int64 [T]"
            )
    for table, rows in puts:
        is_plain = table.dtype == rows.dtype and table.is_contiguous() and rows.is_contiguous()
        if table.dim() != 2 or rows.shape != (ids.shape[0], table.shape[1]) or not is_plain:
            raise ValueError(
                f"put_rows: rows {tuple(rows.shape)} {rows.dtype} do not fit a table {tuple(table.shape)} "
                f"{table.dtype} and {ids.shape[0]} ids; expected contiguous [T, W] and [R, W]"
            )


def put_rows(ids: torch.Tensor, *puts: Put, counts: torch.Tensor | None = None) -> None:
    """Copies row t of each of 1 to 2 `puts` to row `ids[t]` of its table, or none where `counts[t]` is 0.

    `ids`, `counts` int64 `[T]`. Ids lie inside of the tables, which is not checked on a GPU. Of several rows
    for one id, any may stay. Raises ValueError if shapes or dtypes do not fit.
    """
    if ids.is_cuda:
        put_rows_triton(ids, *puts, counts=counts)
    else:
        _check(ids, puts, counts)
        put_rows_reference(ids, puts, counts)
