"""Batch-invariant paged attention: the bits of a row do not depend on the rows beside it.

The other attention kernels choose tiles and splits by the number of rows, so the same row is rounded
differently in a decode step, a verify step and a prefill chunk. Here, one kernel serves all of them. The
context is cut at fixed columns into splits. A split is a fold over tiles of a fixed size, and the splits are
joined from left to right. With few programs, splits run in parallel and a second kernel joins them. With
many, each program joins its own in registers. Both perform the same operations in the same order. A row of a
draft tree folds its ancestors at the columns that they would have in a chain.

Legend: T new rows of all requests, B requests, Q rows of each request where that is one number, W columns
that a tree mask covers, P pages per request, N query heads, K key/value heads, G = N/K, D head dimension, S
splits. Pool and page numbers are those of `kv_store`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .attention_form import PLAIN_FORM, AttentionForm
from .invariant_rows import attend_rows
from .invariant_splits import BASE_SPLIT, LEVEL_SPLITS, MAX_PARTIAL_BYTES, num_splits, partial_bytes
from .kv_store import kv_rows
from .paged_attention import gather_kv
from .paged_tile import (
    LOG2_E,
    MIN_DOT,
    TileShape,
    check_paged,
    check_tree_mask,
    first_sums,
    fold_tile,
    load_kv_tile,
    tree_positions,
)
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl

# With fewer programs than multiprocessors of an H200, splits run in parallel.
MIN_PROGRAMS = 132
MAX_TILE_ROWS = 128


@jit
def _split_start(i_split: tl.tensor, BASE_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr) -> tl.tensor:
    level = i_split // LEVEL_SPLITS
    before = LEVEL_SPLITS * ((1 << level) - 1) + (i_split % LEVEL_SPLITS) * (1 << level)
    return before * BASE_SPLIT


@jit
def _join_factors(left_max: tl.tensor, right_max: tl.tensor) -> tl.tensor:
    """(maximum of both, factor of the left, factor of the right) of two folds."""
    top = tl.maximum(left_max, right_max)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.exp2(left_max - shift), tl.exp2(right_max - shift)


@jit
def _empty_fold(BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr) -> tl.tensor:
    """(max, sum, out) of no column."""
    b_max = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_ROWS, 16), dtype=tl.float32)
    return b_max, b_sum, tl.zeros((BLOCK_ROWS, BLOCK_DIM), dtype=tl.float32)


@jit
def _join(
    total_max: tl.tensor,
    total_sum: tl.tensor,
    total_out: tl.tensor,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    b_out: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """The fold of the columns so far and that of the next split, joined."""
    top, keep, add = _join_factors(total_max, b_max)
    b_keep = tl.broadcast_to(keep[:, None], (BLOCK_ROWS, BLOCK_DIM))
    total_sum = tl.fma(total_sum, tl.broadcast_to(keep[:, None], (BLOCK_ROWS, 16)), b_sum * add[:, None])
    return top, total_sum, tl.fma(total_out, b_keep, b_out * add[:, None])


@jit
def _fold_columns(
    b_q: tl.tensor,
    b_begin: tl.tensor,
    b_end: tl.tensor,
    b_node_rank: tl.tensor,
    b_first_max: tl.tensor,
    b_first_sum: tl.tensor,
    p_kv: tl.tensor,
    p_pages: tl.tensor,
    start: tl.tensor,
    full_end: tl.tensor,
    end: tl.tensor,
    context: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    o_value: tl.tensor,
    scale: tl.tensor,
    HAS_TREE: tl.constexpr,
    SLIDING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BASE_SPLIT: tl.constexpr,
    LEVEL_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,
) -> tl.tensor:
    """(max, sum, out) of rows `b_q` over columns [start, end): of one split, or of all splits, joined.

    All rows see the columns before `full_end`, a number of whole tiles, and each those before its `b_end`.
    With a SLIDING window, no row sees columns before its `b_begin`, and `start` may be within a split: tiles
    that no row sees change no bit. With a tree, column context + j is the node of rank j in `b_node_rank`.
    All splits, joined, begin with the sinks' (`b_first_max`, `b_first_sum`, 0).
    """
    b_max, b_sum, b_out = _empty_fold(BLOCK_ROWS, BLOCK_DIM)
    total_max, total_out = b_first_max, b_out
    total_sum = b_sum + b_first_sum[:, None]
    i_split = start * 0
    split_end = start * 0 + BASE_SPLIT
    if SLIDING:
        while split_end <= start:
            i_split += 1
            split_end = _split_start(i_split + 1, BASE_SPLIT, LEVEL_SPLITS)
    for first in range(start, full_end, BLOCK_COLUMNS):
        i_column = first + tl.arange(0, BLOCK_COLUMNS)
        b_k, b_v = load_kv_tile(
            p_kv, p_pages, i_column, i_column < full_end, page_stride, slot_stride, o_value, True, PAGE_SIZE,
            HEAD_DIM, BLOCK_DIM,
        )  # fmt: skip
        b_max, b_sum, b_out = fold_tile(
            b_q, b_k, b_v, b_end[:, None] > 0, b_max, b_sum, b_out, scale, True, True, SOFTCAP
        )
        if not IS_SPLIT and first + BLOCK_COLUMNS == split_end:
            total_max, total_sum, total_out = _join(
                total_max, total_sum, total_out, b_max, b_sum, b_out, BLOCK_ROWS, BLOCK_DIM
            )
            b_max, b_sum, b_out = _empty_fold(BLOCK_ROWS, BLOCK_DIM)
            i_split += 1
            split_end = _split_start(i_split + 1, BASE_SPLIT, LEVEL_SPLITS)
    for first in range(full_end, end, BLOCK_COLUMNS):
        i_column = first + tl.arange(0, BLOCK_COLUMNS)
        m_column = i_column < end
        i_place = i_column
        if HAS_TREE:
            m_node = b_node_rank[:, None] == (i_column - context)[None, :]
            i_node = tl.sum(tl.where(m_node, tl.arange(0, BLOCK_WINDOW)[:, None], 0), axis=0)
            i_place = tl.where(i_column < context, i_column, context + i_node)
            m_column = m_column & (i_place >= 0)  # an idle request may have fewer columns than nodes
        b_k, b_v = load_kv_tile(
            p_kv, p_pages, i_place, m_column, page_stride, slot_stride, o_value, False, PAGE_SIZE, HEAD_DIM,
            BLOCK_DIM,
        )  # fmt: skip
        m_visible = (i_column[None, :] < b_end[:, None]) & m_column[None, :]
        if SLIDING:
            m_visible = m_visible & (i_column[None, :] >= b_begin[:, None])
        b_max, b_sum, b_out = fold_tile(
            b_q, b_k, b_v, m_visible, b_max, b_sum, b_out, scale, False, True, SOFTCAP
        )
        if not IS_SPLIT and first + BLOCK_COLUMNS == split_end:
            total_max, total_sum, total_out = _join(
                total_max, total_sum, total_out, b_max, b_sum, b_out, BLOCK_ROWS, BLOCK_DIM
            )
            b_max, b_sum, b_out = _empty_fold(BLOCK_ROWS, BLOCK_DIM)
            i_split += 1
            split_end = _split_start(i_split + 1, BASE_SPLIT, LEVEL_SPLITS)
    if not IS_SPLIT:
        b_max, b_sum, b_out = _join(
            total_max, total_sum, total_out, b_max, b_sum, b_out, BLOCK_ROWS, BLOCK_DIM
        )
    return b_max, tl.max(b_sum, axis=1), b_out  # all columns of the sum are equal


@jit_varying("uniform_rows", "num_flat", "shared_tiles", "window", "table_stride")
def _fold_kernel(
    p_q: tl.tensor,
    p_kv: tl.tensor,
    p_pages: tl.tensor,
    p_q_starts: tl.tensor,
    p_kv_lens: tl.tensor,
    p_tree_mask: tl.tensor,
    p_sinks: tl.tensor,
    p_out: tl.tensor,
    p_max: tl.tensor,
    p_sum: tl.tensor,
    uniform_rows: tl.tensor,
    num_flat: tl.tensor,
    shared_tiles: tl.tensor,
    window: tl.tensor,
    kv_heads: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    o_layer: tl.tensor,
    o_value: tl.tensor,
    scale: tl.tensor,
    HAS_TREE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SLIDING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BASE_SPLIT: tl.constexpr,
    LEVEL_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,
) -> None:
    # program (tile of rows and kv head, split, request); the last tiles see the most context and start first
    i_tile = tl.num_programs(0) // kv_heads - 1 - tl.program_id(0) // kv_heads
    i_kv_head = tl.program_id(0) % kv_heads
    i_request = tl.program_id(2).to(tl.int64)
    kv_len = tl.load(p_kv_lens + i_request).to(tl.int32)
    if IS_RAGGED:
        q_start = tl.load(p_q_starts + i_request).to(tl.int64)
        num_rows = (tl.load(p_q_starts + i_request + 1).to(tl.int64) - q_start).to(tl.int32)
        if i_tile * BLOCK_ROWS >= num_rows * GROUP:
            return
    else:
        num_rows = uniform_rows
        q_start = i_request * num_rows
    i_row = i_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    i_query = i_row // GROUP
    i_head = i_kv_head * GROUP + i_row % GROUP
    m_row = i_query < num_rows
    context = kv_len - num_rows
    b_end = context + i_query + 1
    b_begin = b_end - SLIDING
    low = context + i_tile * BLOCK_ROWS // GROUP + 1 - SLIDING
    last_query = tl.minimum((i_tile * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, num_rows - 1)
    end_column = context + last_query + 1
    # the first row of the tile sees the fewest columns
    full_column = tl.maximum(context + i_tile * BLOCK_ROWS // GROUP + 1, 0) // BLOCK_COLUMNS * BLOCK_COLUMNS
    b_node_rank = tl.full((BLOCK_WINDOW,), -1, dtype=tl.int32)
    if HAS_TREE:
        context = kv_len - window
        full_column = tl.maximum(context, 0) // BLOCK_COLUMNS * BLOCK_COLUMNS
        low = context - SLIDING
        i_node = tl.arange(0, BLOCK_WINDOW)
        if i_tile < shared_tiles:
            # all rows see the whole splits before the tree
            b_end = tl.zeros_like(i_row) + context
            end_column = context
            if SLIDING:
                p_masks = p_tree_mask + i_request * num_rows * window
                b_begin = tree_positions(p_masks, i_query, m_row, context, window) + 1 - SLIDING
        else:
            # a tile has the heads of one node, which sees the columns of its own ancestors
            node = i_tile - shared_tiles
            i_query = tl.zeros_like(i_row) + node
            i_head = i_kv_head * GROUP + tl.arange(0, BLOCK_ROWS)
            m_row = tl.arange(0, BLOCK_ROWS) < GROUP
            o_mask = (i_request * num_rows + node) * window
            b_seen = tl.load(p_tree_mask + o_mask + i_node, mask=i_node < window, other=0).to(tl.int32)
            b_seen = tl.where(b_seen != 0, 1, 0)
            b_node_rank = tl.where(b_seen != 0, tl.cumsum(b_seen, axis=0) - 1, -1)
            end_column = context + tl.sum(b_seen, axis=0)
            b_end = tl.zeros_like(i_row) + end_column
            b_begin = b_end - SLIDING
    low = tl.maximum(low, 0) // BLOCK_COLUMNS * BLOCK_COLUMNS

    i_dim = tl.arange(0, BLOCK_DIM)
    m_rows = m_row[:, None] & (i_dim < HEAD_DIM)[None, :]
    o_q = (q_start + i_query) * q_stride + i_head * q_head_stride
    b_q = tl.load(p_q + o_q[:, None] + i_dim[None, :], mask=m_rows, other=0.0)
    p_head = p_kv + o_layer + i_kv_head * HEAD_DIM
    p_row_pages = p_pages + i_request * table_stride
    o_flat = (q_start + i_query) * (kv_heads * GROUP) + i_head
    o_out = o_flat[:, None] * HEAD_DIM + i_dim[None, :]

    if IS_SPLIT:
        i_split = tl.program_id(1)
        start = _split_start(i_split, BASE_SPLIT, LEVEL_SPLITS)
        end = _split_start(i_split + 1, BASE_SPLIT, LEVEL_SPLITS)
        if start >= kv_len:
            return  # nor does the second kernel read this split
        # whole splits before the tree belong to the shared tiles, the others to those of one node
        if HAS_TREE and (end <= context) != (i_tile < shared_tiles):
            return
        end = tl.minimum(end, end_column)
        full_end = tl.minimum(full_column, end)
        if SLIDING:
            start = tl.maximum(start, low)  # a split before the window is an empty fold
            full_end = start
        b_max, b_sum = first_sums(p_sinks, i_head, m_row, False, False)  # the second kernel adds the sinks
        b_max, b_sum, b_out = _fold_columns(
            b_q, b_begin, b_end, b_node_rank, b_max, b_sum, p_head, p_row_pages, start,
            tl.maximum(full_end, start), end, context, page_stride, kv_heads * HEAD_DIM, o_value, scale,
            HAS_TREE, SLIDING, SOFTCAP, True, PAGE_SIZE, HEAD_DIM, BASE_SPLIT, LEVEL_SPLITS, BLOCK_ROWS,
            BLOCK_COLUMNS, BLOCK_DIM, BLOCK_WINDOW,
        )  # fmt: skip
        o_split = i_split.to(tl.int64) * num_flat
        tl.store(p_max + o_split + o_flat, b_max, mask=m_row)
        tl.store(p_sum + o_split + o_flat, b_sum, mask=m_row)
        tl.store(p_out + o_split * HEAD_DIM + o_out, b_out, mask=m_rows)
    else:
        start = kv_len * 0
        full_end = tl.minimum(full_column, end_column)
        if SLIDING:
            start = low
            full_end = low
        b_max, b_sum = first_sums(p_sinks, i_head, m_row, True, HAS_SINKS)
        b_max, b_sum, b_out = _fold_columns(
            b_q, b_begin, b_end, b_node_rank, b_max, b_sum, p_head, p_row_pages, start, full_end, end_column,
            context, page_stride, kv_heads * HEAD_DIM, o_value, scale, HAS_TREE, SLIDING, SOFTCAP, False,
            PAGE_SIZE, HEAD_DIM, BASE_SPLIT, LEVEL_SPLITS, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DIM, BLOCK_WINDOW,
        )  # fmt: skip
        b_out = b_out / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
        tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_rows)


@jit_varying("num_flat", "rows_heads")
def _join_kernel(
    p_partial: tl.tensor,
    p_max: tl.tensor,
    p_sum: tl.tensor,
    p_kv_lens: tl.tensor,
    p_sinks: tl.tensor,
    p_out: tl.tensor,
    num_flat: tl.tensor,
    rows_heads: tl.tensor,
    num_heads: tl.tensor,
    HAS_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BASE_SPLIT: tl.constexpr,
    LEVEL_SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    # one (row, head) per program
    i_flat = tl.program_id(0).to(tl.int64)
    kv_len = tl.load(p_kv_lens + i_flat // rows_heads).to(tl.int32)
    i_dim = tl.arange(0, BLOCK_DIM)
    m_dim = i_dim < HEAD_DIM
    total_max = tl.full((BLOCK_DIM,), float("-inf"), dtype=tl.float32)
    total_sum = tl.zeros((BLOCK_DIM,), dtype=tl.float32)
    total_out = tl.zeros((BLOCK_DIM,), dtype=tl.float32)
    if HAS_SINKS:
        i_head = tl.zeros_like(i_dim) + (i_flat % num_heads).to(tl.int32)
        total_max, total_sum = first_sums(p_sinks, i_head, i_dim >= 0, True, True)
    o_split = i_flat
    i_split = 0
    start = 0
    while start < kv_len:
        b_max = tl.load(p_max + o_split + tl.zeros_like(i_dim))
        b_sum = tl.load(p_sum + o_split + tl.zeros_like(i_dim))
        b_out = tl.load(p_partial + o_split * HEAD_DIM + i_dim, mask=m_dim, other=0.0)
        total_max, keep, add = _join_factors(total_max, b_max)
        total_sum = tl.fma(total_sum, keep, b_sum * add)
        total_out = tl.fma(total_out, keep, b_out * add)
        i_split += 1
        start = _split_start(i_split, BASE_SPLIT, LEVEL_SPLITS)
        o_split += num_flat
    b_out = total_out / tl.where(total_sum == 0.0, 1.0, total_sum)
    tl.store(p_out + i_flat * HEAD_DIM + i_dim, b_out.to(p_out.dtype.element_ty), mask=m_dim)


def _tile(dtype: torch.dtype, head_dim: int, num_rows: int, group: int) -> TileShape:
    """The tile for `num_rows` (row, head) pairs; it holds at least the `group` heads of one row.

    The order of sums follows from its columns, which depend on dtype and head dimension alone. float32 has
    no matrix instruction of full precision; it is for tests.
    """
    dim = max(next_power_of_2(head_dim), MIN_DOT)
    if dtype == torch.float32:
        return TileShape(rows=max(32, next_power_of_2(group)), columns=32, dim=dim, num_warps=4, num_stages=2)
    most = MAX_TILE_ROWS if dim <= 128 else MAX_TILE_ROWS // 2
    rows = max(min(next_power_of_2(num_rows), most), next_power_of_2(group), MIN_DOT)
    warps = 2 if rows == MIN_DOT else 4 if rows < 128 else 8
    columns = 64 if dim <= 128 else 32
    return TileShape(rows=rows, columns=columns, dim=dim, num_warps=warps, num_stages=2 if rows < 128 else 3)


class Rows(NamedTuple):
    """The requests that own the rows of a forward.

    `kv_lens` int `[B]` count the new rows, which are stored already. Either each request owns `uniform` rows,
    or request b owns the rows [`starts[b]`, `starts[b + 1]`), `starts` int `[B+1]`, at most `longest`.
    `tree_mask` bool `[B, Q, W]`, only with `uniform` rows: the columns that each row sees among the last W;
    a row's nodes are ordered from the root.
    """

    kv_lens: torch.Tensor
    uniform: int = 0
    starts: torch.Tensor | None = None
    longest: int = 0
    tree_mask: torch.Tensor | None = None


def invariant_attention_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    rows: Rows,
    scale: float,
    *,
    form: AttentionForm = PLAIN_FORM,
    base_split: int = BASE_SPLIT,
    max_partial_bytes: int = MAX_PARTIAL_BYTES,
) -> torch.Tensor:
    """Launch on `q` `[T, N, D]`; returns `[T, N, D]`, zeros in rows that see nothing.

    `kv`: `[num_pages, L, 2, page_size, K, D]`. `page_table`: int `[B, P]`. Values of lengths and pages are
    not checked. Raises ValueError if shapes or dtypes do not fit.
    """
    _check(q, kv, page_table, rows)
    new = torch.empty if rows.starts is None else torch.zeros
    out = new(q.shape, dtype=q.dtype, device=q.device)
    longest = rows.uniform or rows.longest
    if q.numel() == 0 or page_table.shape[0] == 0 or longest == 0:
        return out
    num_requests, num_flat = page_table.shape[0], q.shape[0] * q.shape[1]
    page_size, kv_heads, head_dim = kv.shape[3:]
    group = q.shape[1] // kv_heads
    has_tree = rows.tree_mask is not None
    tile = _tile(q.dtype, head_dim, longest * group, group)
    tiles = cdiv(longest * group, tile.rows)
    splits = num_splits(page_table.shape[1] * page_size, base_split)
    fits = partial_bytes(splits, num_flat, head_dim) <= max_partial_bytes
    is_few = has_tree or tiles * kv_heads * num_requests < MIN_PROGRAMS
    if splits == 1 or rows.starts is not None or not fits or not is_few:
        grid = ((longest if has_tree else tiles) * kv_heads, 1, num_requests)
        _launch(
            grid,
            tile,
            q,
            kv,
            layer,
            page_table,
            rows,
            scale,
            form,
            0,
            (out, out, out),
            is_split=False,
            base_split=base_split,
        )
        return out
    partial = torch.empty(splits, num_flat, head_dim, dtype=torch.float32, device=q.device)
    tops, sums = torch.empty(2, splits, num_flat, dtype=torch.float32, device=q.device)
    grid = ((tiles + longest if has_tree else tiles) * kv_heads, splits, num_requests)
    _launch(
        grid,
        tile,
        q,
        kv,
        layer,
        page_table,
        rows,
        scale,
        form,
        tiles,
        (partial, tops, sums),
        is_split=True,
        base_split=base_split,
    )
    _join_kernel[(num_flat,)](
        partial,
        tops,
        sums,
        rows.kv_lens,
        q if form.sinks is None else form.sinks,
        out,
        num_flat,
        longest * q.shape[1],
        q.shape[1],
        HAS_SINKS=form.sinks is not None,
        HEAD_DIM=head_dim,
        BASE_SPLIT=base_split,
        LEVEL_SPLITS=LEVEL_SPLITS,
        BLOCK_DIM=next_power_of_2(head_dim),
        num_warps=4,
    )
    return out


def _launch(
    grid: tuple[int, int, int],
    tile: TileShape,
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    rows: Rows,
    scale: float,
    form: AttentionForm,
    shared_tiles: int,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    is_split: bool,
    base_split: int,
) -> None:
    """`results`: parts of the splits, their maxima and sums; without splits, the output thrice."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    page_size, kv_heads, head_dim = kv.shape[3:]
    plane = page_size * kv_heads * head_dim
    mask, starts = rows.tree_mask, rows.starts
    window = 0 if mask is None else mask.shape[2]
    _fold_kernel[grid](
        q,
        kv,
        page_table,
        rows.kv_lens if starts is None else starts.contiguous(),
        rows.kv_lens.contiguous(),
        rows.kv_lens if mask is None else mask.contiguous().view(torch.uint8),
        q if form.sinks is None else form.sinks,
        *results,
        rows.uniform,
        q.shape[0] * q.shape[1],
        shared_tiles,
        window,
        kv_heads,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        kv.stride(0),
        layer * 2 * plane,
        plane,
        scale * LOG2_E,
        HAS_TREE=mask is not None,
        HAS_SINKS=form.sinks is not None,
        SLIDING=form.window,
        SOFTCAP=form.softcap,
        IS_RAGGED=starts is not None,
        IS_SPLIT=is_split,
        GROUP=q.shape[1] // kv_heads,
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        BASE_SPLIT=base_split,
        LEVEL_SPLITS=LEVEL_SPLITS,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        BLOCK_DIM=tile.dim,
        BLOCK_WINDOW=max(next_power_of_2(window), 16),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _check(q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, rows: Rows) -> None:
    lens = (rows.kv_lens,) if rows.starts is None else (rows.kv_lens, rows.starts)
    check_paged("invariant_attention", q, kv, page_table, lens)
    num_requests = page_table.shape[0]
    owned = q.shape[0] if rows.starts is not None else num_requests * rows.uniform
    starts_fit = rows.starts is None or rows.starts.shape == (num_requests + 1,)
    if q.dim() != 3 or rows.kv_lens.shape != (num_requests,) or not starts_fit or owned != q.shape[0]:
        raise ValueError(
            f"invariant_attention: q {tuple(q.shape)} and {rows} do not fit {num_requests} requests; "
            "expected [T, N, D], kv_lens [B], and Q rows each or starts [B+1]"
        )
    if rows.tree_mask is not None:
        check_tree_mask("invariant_attention", rows.tree_mask, num_requests, rows.uniform)


def invariant_attention_torch(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    rows: Rows,
    scale: float,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """The CPU path. It reads lengths and masks on the host and calls products of one shape only."""
    _check(q, kv, page_table, rows)
    out, page_size = torch.zeros_like(q), kv.shape[3]
    num_requests = page_table.shape[0]
    if rows.starts is None:
        starts = [request * rows.uniform for request in range(num_requests + 1)]
    else:
        starts = rows.starts.tolist()
    for request, kv_len in enumerate(rows.kv_lens.tolist()):
        mine = slice(starts[request], starts[request + 1])
        if mine.start == mine.stop or kv_len <= 0:
            continue
        columns = torch.arange(kv_len)
        slots = page_table[request, columns // page_size].to(torch.int64) * page_size + columns % page_size
        if rows.tree_mask is None:
            first = kv_len - (mine.stop - mine.start) + 1
            out[mine] = _attend_slots(q[mine], kv, layer, slots, first, scale, form)
            continue
        context = max(kv_len - rows.tree_mask.shape[2], 0)
        for node, seen in enumerate(rows.tree_mask[request]):
            row = slice(mine.start + node, mine.start + node + 1)
            ancestors = slots[context:][seen[rows.tree_mask.shape[2] - (kv_len - context) :]]
            path = torch.cat((slots[:context], ancestors))
            if path.numel():
                out[row] = _attend_slots(q[row], kv, layer, path, path.numel(), scale, form)
    return out


def _attend_slots(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    first: int,
    scale: float,
    form: AttentionForm,
) -> torch.Tensor:
    """Rows `q` `[Q, N, D]` of one request over `slots`; row i sees the first `first` + i of them."""
    rows = kv_rows(slots, kv)
    keys, values = gather_kv(kv, layer, torch.cat((rows, rows + kv.shape[3])), q.dtype)
    return attend_rows(q, keys, values, first, scale, form)


def invariant_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    rows: Rows,
    scale: float,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """Attend rows `q` `[T, N, D]` over the pages `page_table` int `[B, P]` of `layer` in `kv`.

    A row sees the rows before it and itself, or what a tree mask allows. Returns `[T, N, D]`; a row that
    sees nothing (an idle request with kv_len 0, padding) gives zeros. `form`: window, soft cap and sinks; no
    tree may be deeper than the window. Raises ValueError if shapes or dtypes do not fit.
    """
    if q.is_cuda:
        return invariant_attention_triton(q, kv, layer, page_table, rows, scale, form=form)
    return invariant_attention_torch(q, kv, layer, page_table, rows, scale, form)
