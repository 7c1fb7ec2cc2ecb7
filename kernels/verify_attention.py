"""Attention of equally many new rows per request over its pages, causal or along a tree: decode and verify.

The context is cut into splits that run in parallel, and a second pass merges them. Without splits, a decode
step at batch 1 would keep only K of 132 multiprocessors busy. Lengths stay on the device and shapes are
fixed, so a graph can hold it. Source: Dao et al., "Flash-Decoding for long-context inference", 2023.

Legend: B requests, Q new rows of a request, W columns that a tree mask covers, P pages per request, N query
heads, K key/value heads, G = N/K, D head dimension, S splits. Pool and page numbers are those of `kv_store`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .attention_form import PLAIN_FORM, AttentionForm
from .chained_launch import chained, release_next, wait_for_previous
from .kv_store import kv_rows
from .paged_attention import batched_attention, gather_kv
from .paged_tile import (
    LOG2_E,
    MIN_DOT,
    TileShape,
    attend_columns,
    check_paged,
    check_tree_mask,
    first_sums,
    tile_shape,
    tree_positions,
)
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl

MAX_TILE_ROWS = 64
# The fewest programs that are worth a split: two per multiprocessor of an H200.
TARGET_PROGRAMS = 264
# Programs that run at once on an H200, of a tile of up to SMALL_TILE (row, value) pairs and of a larger one:
# six and four per multiprocessor.
SMALL_TILE, MANY_SLOTS, SLOTS = 16 * 64, 792, 528
FULL_SPLITS = 6  # fill those slots; more splits are for batches of too few programs alone
ROUND_SPLITS = 4  # even out the last round of programs, where there are LONG columns or more
LONG = 512
SPLIT_COST = 0.09  # of the device's time, for each split that evens out
MIN_SPLIT = 64  # columns, of heads of up to WIDE_HEAD values; of wider ones half as many
WIDE_HEAD = 128
MAX_SPLITS = 64
MERGE_BLOCKS = 4, 8, 16, MAX_SPLITS  # splits that a tile of the merge holds
MERGE_VALUES = 4096  # of its tile


def visible_columns(
    kv_lens: torch.Tensor, num_rows: int, length: int, tree_mask: torch.Tensor | None, sliding: int = 0
) -> torch.Tensor:
    """The context rows, of `length`, that each new row sees: bool `[B, Q, length]`.

    A row sees all rows before the new ones, and the new ones up to itself. With `tree_mask` bool `[B, Q, W]`,
    it sees all but the last W rows, and of those W the ones that the mask allows. With a `sliding` window, it
    sees no column at its own position - `sliding` or before; the position of a tree's row is its depth behind
    the prefix, and nodes are never hidden.
    """
    columns = torch.arange(length, device=kv_lens.device)
    window = num_rows if tree_mask is None else tree_mask.shape[2]
    node = columns - (kv_lens[:, None] - window)  # [B, length], negative before the window
    if tree_mask is None:
        among = node[:, None] <= torch.arange(num_rows, device=kv_lens.device)[:, None]
    else:
        index = node.clamp(0, window - 1)[:, None].expand(-1, num_rows, -1)
        among = tree_mask.gather(2, index) | (node < 0)[:, None]
    if sliding:
        depth = (
            torch.arange(num_rows, device=kv_lens.device)[None]
            if tree_mask is None
            else tree_mask.sum(dim=2, dtype=kv_lens.dtype) - 1
        )
        positions = (kv_lens[:, None] - window) + depth  # [B, Q]
        is_near = columns > positions[:, :, None] - sliding
        among = among & (is_near if tree_mask is None else is_near | (node >= 0)[:, None])
    return among & (columns < kv_lens[:, None])[:, None]


class VerifyColumns(NamedTuple):
    """The gathered columns that all layers of a forward attend to.

    `rows` int64 `[2*B*S]` are the row numbers of layer 0, keys first, then values. `mask` `[B, 1, Q, S]` is
    added to the scores. `is_blind` bool `[B, Q, 1, 1]` marks rows that attend to nothing; None if there are
    none.
    """

    rows: torch.Tensor
    mask: torch.Tensor
    is_blind: torch.Tensor | None


def verify_columns(
    kv: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    num_rows: int,
    tree_mask: torch.Tensor | None = None,
    sliding: int = 0,
    *,
    dtype: torch.dtype | None = None,
) -> VerifyColumns:
    """The columns of `num_rows` rows per request over every page of `page_table` `[B, P]`; no host
    synchronisation. `sliding`: the window of the layers that attend to them, 0: none. `dtype`: that of the
    rows, by default the pool's.
    """
    page_size = kv.shape[3]
    slots = page_table.to(torch.int64)[:, :, None] * page_size + torch.arange(page_size, device=kv.device)
    slots = slots.flatten(1)
    visible = visible_columns(kv_lens.to(torch.int64), num_rows, slots.shape[1], tree_mask, sliding)
    used = visible.any(dim=1)
    rows = kv_rows(torch.where(used, slots, 0), kv).flatten()  # unused ones read the sink, which is zeros
    mask = torch.zeros(visible.shape, dtype=dtype or kv.dtype, device=kv.device)
    mask.masked_fill_(~visible, float("-inf"))
    is_blind = ~visible.any(dim=2)[:, :, None, None]
    return VerifyColumns(torch.cat((rows, rows + page_size)), mask.unsqueeze(1), is_blind)


def attend_verify_columns(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    columns: VerifyColumns,
    scale: float,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """`q` `[B, Q, N, D]` over `columns` of `layer` -> `[B, Q, N, D]`; rows that see nothing give 0."""
    keys, values = gather_kv(kv, layer, columns.rows, q.dtype)
    shape = (q.shape[0], -1, *kv.shape[4:])
    out = batched_attention(q.contiguous(), keys.view(shape), values.view(shape), columns.mask, scale, form)
    return out if columns.is_blind is None else out.masked_fill(columns.is_blind, 0)


def paged_verify_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    tree_mask: torch.Tensor | None = None,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """The CPU path: gather every page of the table, mask, attend. Rows that see nothing give 0.

    It never waits for the device.
    """
    if q.numel() == 0:
        return torch.empty_like(q)
    columns = verify_columns(kv, page_table, kv_lens, q.shape[1], tree_mask, form.window, dtype=q.dtype)
    return attend_verify_columns(q, kv, layer, columns, scale, form)


@jit
def _split_bounds(
    kv_len: tl.tensor,
    context: tl.tensor,
    i_split: tl.tensor,
    num_splits: tl.tensor,
    SLIDING: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> tl.tensor:
    """(start, begin and end of the columns that every row sees, end) of a split.

    A short context is not cut finer than MIN_SPLIT, so its later splits are empty. With a SLIDING window, the
    splits share the columns from the first one that any row sees.
    """
    base = kv_len * 0
    low_end = base
    if SLIDING:
        base = tl.maximum(context - SLIDING, 0) // BLOCK_COLUMNS * BLOCK_COLUMNS
        low_end = tl.cdiv(tl.maximum(kv_len - SLIDING, 0), BLOCK_COLUMNS) * BLOCK_COLUMNS
    share = tl.cdiv(kv_len - base, num_splits)
    split_len = tl.cdiv(tl.maximum(share, MIN_SPLIT), BLOCK_COLUMNS) * BLOCK_COLUMNS
    start = tl.minimum(base + i_split * split_len, kv_len)
    end = tl.minimum(start + split_len, kv_len)
    full_end = tl.maximum(context, 0) // BLOCK_COLUMNS * BLOCK_COLUMNS
    full_end = tl.maximum(tl.minimum(full_end, end), start)
    return start, tl.minimum(tl.maximum(low_end, start), full_end), full_end, end


@jit_varying("num_requests", "num_rows", "window", "num_splits", "table_stride", "p_kv_lens", "p_tree_mask")
def _verify_kernel(
    p_q: tl.tensor,
    p_kv: tl.tensor,
    p_pages: tl.tensor,
    p_kv_lens: tl.tensor,
    p_tree_mask: tl.tensor,
    p_sinks: tl.tensor,
    p_partial: tl.tensor,
    p_lse: tl.tensor,
    num_requests: tl.tensor,
    num_rows: tl.tensor,
    window: tl.tensor,
    kv_heads: tl.tensor,
    num_splits: tl.tensor,
    q_batch_stride: tl.tensor,
    q_row_stride: tl.tensor,
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
    IS_SPLIT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (tile of rows and kv head, split, request)
    wait_for_previous(CHAINED)
    i_tile, i_kv_head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    i_split = tl.program_id(1)
    i_request = tl.program_id(2).to(tl.int64)
    kv_len = tl.load(p_kv_lens + i_request).to(tl.int32)
    context = kv_len - window
    i_row = i_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    i_query = i_row // GROUP
    i_head = i_kv_head * GROUP + i_row % GROUP
    i_dim = tl.arange(0, BLOCK_DIM)
    m_row = i_query < num_rows
    m_rows = m_row[:, None] & (i_dim < HEAD_DIM)[None, :]
    o_q = i_request * q_batch_stride + i_query * q_row_stride + i_head * q_head_stride
    b_q = tl.load(p_q + o_q[:, None] + i_dim[None, :], mask=m_rows, other=0.0)
    split_start, low_end, full_end, split_end = _split_bounds(
        kv_len, context, i_split, num_splits, SLIDING, MIN_SPLIT, BLOCK_COLUMNS
    )
    p_row_mask = p_tree_mask + i_request * num_rows * window
    b_position = context + i_query
    if HAS_TREE and SLIDING:
        b_position = tree_positions(p_row_mask, i_query, m_row, context, window)
    # one split alone adds the sink
    b_max, b_sum = first_sums(p_sinks, i_head, m_row, i_split == 0, HAS_SINKS)
    b_max, b_sum, b_out = attend_columns(
        b_q, i_query, b_position, b_max, b_sum, p_kv + o_layer + i_kv_head * HEAD_DIM,
        p_pages + i_request * table_stride, p_row_mask, split_start, low_end, full_end, split_end, context,
        num_rows, window, page_stride, kv_heads * HEAD_DIM, o_value, scale, HAS_TREE, SLIDING, SOFTCAP,
        PAGE_SIZE, HEAD_DIM, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DIM,
    )  # fmt: skip
    release_next(CHAINED)
    o_flat = (i_request * num_rows + i_query) * (kv_heads * GROUP) + i_head
    b_total = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_out = (b_out / b_total[:, None]).to(p_partial.dtype.element_ty)
    if IS_SPLIT:
        o_flat += i_split * num_requests * num_rows * (kv_heads * GROUP)
        tl.store(p_lse + o_flat, tl.where(b_sum == 0.0, float("-inf"), b_max + tl.log2(b_total)), mask=m_row)
        m_rows = m_rows & (b_sum > 0.0)[:, None]  # rows left unwritten by an empty split are never read
    tl.store(p_partial + o_flat[:, None] * HEAD_DIM + i_dim[None, :], b_out, mask=m_rows)


@jit_varying("num_splits", "num_flat")
def _merge_kernel(
    p_partial: tl.tensor,
    p_lse: tl.tensor,
    p_out: tl.tensor,
    num_splits: tl.tensor,
    num_flat: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_FLAT: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # a few (request, row, head) per program: their splits, weighted by their share of the softmax's
    # denominator
    wait_for_previous(CHAINED)
    i_flat = tl.program_id(0).to(tl.int64) * BLOCK_FLAT + tl.arange(0, BLOCK_FLAT)
    i_split = tl.arange(0, BLOCK_SPLITS)
    i_dim = tl.arange(0, BLOCK_DIM)
    m_flat, m_dim = i_flat < num_flat, i_dim < HEAD_DIM
    o_split = i_split[None, :] * num_flat + i_flat[:, None]
    m_split = m_flat[:, None] & (i_split < num_splits)[None, :]
    b_lse = tl.load(p_lse + o_split, mask=m_split, other=float("-inf"))
    m_used = b_lse > float("-inf")
    top = tl.max(b_lse, axis=1)
    top = tl.where(top == float("-inf"), 0.0, top)
    b_weight = tl.where(m_used, tl.exp2(b_lse - top[:, None]), 0.0)
    o_partial = o_split[:, :, None] * HEAD_DIM + i_dim[None, None, :]
    b_partial = tl.load(p_partial + o_partial, mask=m_used[:, :, None] & m_dim[None, None, :], other=0.0)
    release_next(CHAINED)
    total = tl.sum(b_weight, axis=1)
    b_out = tl.sum(b_partial * b_weight[:, :, None], axis=1) / tl.where(total == 0.0, 1.0, total)[:, None]
    o_out = i_flat[:, None] * HEAD_DIM + i_dim[None, :]
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_flat[:, None] & m_dim[None, :])


def _tile(dtype: torch.dtype, head_dim: int, num_rows: int) -> TileShape:
    """The tile for `num_rows` (row, head) pairs.

    Few rows need few warps, and two stages leave room for more parallel programs: on an H200, a decode of 1,
    8 and 32 requests x 1024 takes 8, 17 and 39 us, against 15, 21 and 55 us with three stages, four warps and
    wider splits.
    """
    tile = tile_shape(dtype, head_dim, num_rows, MAX_TILE_ROWS)
    return tile._replace(num_stages=2, num_warps=2 if tile.rows == MIN_DOT else tile.num_warps)


def _split_tile(tile: TileShape, num_programs: int) -> TileShape:
    """`tile` for a context that is split into `num_programs` programs: if they are few, those of a
    multiprocessor copy all that it reads, and two warps are too few for wide heads.

    On an H200 a decode of 1, 8, 32 and 128 requests x 1024, with 4 heads of 256 values that share keys and a
    window of 512, takes 7.4, 8.9, 14.0 and 28.4 us so, against 10.8, 12.0, 16.0 and 31.7 us with two warps
    and splits of 64. With a window three programs of four warps run on a multiprocessor, four of two: 512
    programs of 8 KV heads take 105 us with four warps, 78 with two.
    """
    is_wide = tile.dim > WIDE_HEAD and num_programs <= SLOTS * 3 // 4
    return tile._replace(num_warps=max(tile.num_warps, 4)) if is_wide else tile


def least_split(head_dim: int) -> int:
    """The fewest columns of a split."""
    return MIN_SPLIT // 2 if head_dim > WIDE_HEAD else MIN_SPLIT


def choose_splits(num_programs: int, capacity: int, tile: TileShape, min_split: int = MIN_SPLIT) -> int:
    """The number of splits of a context of up to `capacity` rows, for `num_programs` programs without
    splits, of `min_split` columns or more.

    Few programs are split until the device is full. Some more than fit at once would leave most of the
    device idle in their last round, which splits even out: on an H200 a decode of 64 and of 80 requests x
    1024 with 8 KV heads of 128 values takes 71 and 109 us without splits, and the latter 91 us with three.
    """
    slots = MANY_SLOTS if tile.rows * tile.dim <= SMALL_TILE else SLOTS
    is_tall = tile.rows > MIN_DOT and tile.dim >= WIDE_HEAD  # its kernel without splits has half the slots
    least = 0 if is_tall or tile.dim > WIDE_HEAD else slots  # up to so many have one full round
    if num_programs <= slots // 2:
        num = max(num_programs, 1)
        splits = max(cdiv(TARGET_PROGRAMS, num), min(slots // num, FULL_SPLITS))
    elif capacity < LONG or not least < num_programs <= 2 * slots:
        splits = 1
    else:
        splits = max(range(1 + is_tall, ROUND_SPLITS + 1), key=lambda n: _worth(num_programs * n, slots, n))
    return max(1, min(splits, cdiv(capacity, min_split), MAX_SPLITS))


def _worth(num_programs: int, slots: int, splits: int) -> float:
    """The part of the device's time that its programs use, less what splits cost."""
    return num_programs / (cdiv(num_programs, slots) * slots) - SPLIT_COST * (splits - 1)


def paged_verify_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    tree_mask: torch.Tensor | None = None,
    *,
    num_splits: int = 0,
    min_split: int = 0,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """Launch on `q` `[B, Q, N, D]`; returns `[B, Q, N, D]`.

    `kv`: `[num_pages, L, 2, page_size, K, D]`. `page_table`: int `[B, P]`. `kv_lens`: int `[B]`. `tree_mask`:
    None or bool `[B, Q, W]` with W >= Q. `num_splits`, `min_split` 0: chosen from the shapes. Values of
    lengths and pages are not checked. Raises ValueError if shapes or dtypes do not fit.
    """
    _check(q, kv, page_table, kv_lens, tree_mask)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return out
    num_requests, num_rows, num_heads, head_dim = q.shape
    page_size, kv_heads = kv.shape[3], kv.shape[4]
    tile = _tile(q.dtype, head_dim, num_rows * (num_heads // kv_heads))
    num_tiles = cdiv(num_rows * (num_heads // kv_heads), tile.rows) * kv_heads
    capacity = page_table.shape[1] * page_size
    capacity = min(capacity, form.window + num_rows) if form.window else capacity
    min_split = min_split or least_split(head_dim)
    splits = num_splits or choose_splits(num_tiles * num_requests, capacity, tile, min_split)
    grid = (num_tiles, splits, num_requests)
    inputs = q, kv, layer, page_table, kv_lens, scale, tree_mask, form
    if splits == 1:
        _launch_splits(grid, tile, *inputs, out, out, min_split)
        return out
    num_flat = num_requests * num_rows * num_heads
    partial = torch.empty(splits, num_flat, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(splits, num_flat, dtype=torch.float32, device=q.device)
    tile = _split_tile(tile, num_tiles * num_requests * splits)
    _launch_splits(grid, tile, *inputs, partial, lse, min_split)
    block = next(size for size in MERGE_BLOCKS if size >= splits)
    dim = next_power_of_2(head_dim)
    # 16384 rows and heads of two splits take 5 us, eight in a program; one in a program 22 us
    flat = min(max(MERGE_VALUES // (block * dim), 1), 8)
    _merge_kernel[(cdiv(num_flat, flat),)](
        partial,
        lse,
        out,
        splits,
        num_flat,
        HEAD_DIM=head_dim,
        BLOCK_FLAT=flat,
        BLOCK_SPLITS=block,
        BLOCK_DIM=dim,
        **chained(q.device),
        num_warps=2 if flat == 1 else 4,
    )
    return out


def _launch_splits(
    grid: tuple[int, int, int],
    tile: TileShape,
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    tree_mask: torch.Tensor | None,
    form: AttentionForm,
    partial: torch.Tensor,
    lse: torch.Tensor,
    min_split: int,
) -> None:
    """The first pass. With one split, `partial` is the output itself and `lse` is not written."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    page_size, kv_heads, head_dim = kv.shape[3:]
    plane = page_size * kv_heads * head_dim
    _verify_kernel[grid](
        q,
        kv,
        page_table,
        kv_lens.contiguous(),
        kv_lens if tree_mask is None else tree_mask.contiguous().view(torch.uint8),
        q if form.sinks is None else form.sinks,
        partial,
        lse,
        q.shape[0],
        q.shape[1],
        q.shape[1] if tree_mask is None else tree_mask.shape[2],
        kv_heads,
        grid[1],
        q.stride(0),
        q.stride(1),
        q.stride(2),
        page_table.stride(0),
        kv.stride(0),
        layer * 2 * plane,
        plane,
        scale * LOG2_E,
        HAS_TREE=tree_mask is not None,
        HAS_SINKS=form.sinks is not None,
        SLIDING=form.window,
        SOFTCAP=form.softcap,
        IS_SPLIT=grid[1] > 1,
        MIN_SPLIT=min_split,
        GROUP=q.shape[2] // kv_heads,
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        BLOCK_DIM=tile.dim,
        **chained(q.device),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _check(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    tree_mask: torch.Tensor | None,
) -> None:
    check_paged("paged_verify", q, kv, page_table, (kv_lens,))
    num_requests = page_table.shape[0]
    if q.dim() != 4 or q.shape[0] != num_requests or kv_lens.shape != (num_requests,):
        raise ValueError(
            f"paged_verify: q {tuple(q.shape)} and kv_lens {tuple(kv_lens.shape)} do not fit {num_requests} "
            "requests; expected [B, Q, N, D] and [B]"
        )
    if tree_mask is not None:
        check_tree_mask("paged_verify", tree_mask, num_requests, q.shape[1])


def paged_verify(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    tree_mask: torch.Tensor | None = None,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """Attend rows `q` `[B, Q, N, D]`, the last Q of each request's `kv_lens` int `[B]` rows, over its pages.

    `page_table` int `[B, P]`: pages of `layer` in `kv`. Without `tree_mask` attention is causal. `tree_mask`
    bool `[B, Q, W]` gives the columns that each row sees among the last W rows: the Q new ones and W - Q rows
    of a tree before them. `form`: window, soft cap and sinks; no tree may be deeper than the window. Returns
    `[B, Q, N, D]`; a row that sees nothing (an idle request with kv_len 0)
    gives zeros. Raises ValueError if shapes or dtypes do not fit.
    """
    if q.is_cuda:
        return paged_verify_triton(q, kv, layer, page_table, kv_lens, scale, tree_mask, form=form)
    _check(q, kv, page_table, kv_lens, tree_mask)
    return paged_verify_reference(q, kv, layer, page_table, kv_lens, scale, tree_mask, form)
