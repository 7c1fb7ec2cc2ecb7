"""Absorbed attention over latents: the heads of new rows attend to one vector per context row.

A key of head n is the up-projection of a row's latent c, beside the row's rotated key, and so
q_n . (U_n c) = (U_n^T q_n) . c: the query takes the projection instead of every context row, and the weighted
sum of latents is projected to values once per query. So a decode step reads R+P values of a context row for
all heads. Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1. The context is cut into splits that run in
parallel, see `verify_attention`.

Legend: B requests, Q new rows of a request, T new rows in all, W columns that a tree mask covers, N heads, R
rank of the latents, P width of the rotated key, F and V widths of a head's key and value that are made of the
latent, S context rows. The pool is that of `latent_store`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .chained_launch import chained, release_next, wait_for_previous
from .latent_store import gather_latents, is_latent, latent_slots
from .paged_tile import LOG2_E, MIN_DOT, check_tree_mask
from .triton_jit import cdiv, jit_varying, next_power_of_2, tl
from .verify_attention import visible_columns

# Target number of programs: two per multiprocessor of an H200.
TARGET_PROGRAMS = 264
MIN_SPLIT = 64
MAX_SPLITS = 64
FEW_SPLITS = 16


def absorb(q: torch.Tensor, up: torch.Tensor, rope_size: int) -> torch.Tensor:
    """Queries `q` `[T, N, F+P]`, of which the last P = `rope_size` values are rotated, and `up` `[N, F+V, R]`
    with the keys' projections first -> queries of latents `[T, N, R+P]`.
    """
    key_size = q.shape[-1] - rope_size
    made = torch.bmm(q[..., :key_size].transpose(0, 1), up[:, :key_size])
    return torch.cat((made.transpose(0, 1), q[..., key_size:]), dim=-1)


def project_values(attended: torch.Tensor, up: torch.Tensor, value_size: int) -> torch.Tensor:
    """Weighted sums of latents `[T, N, R]` and `up` `[N, F+V, R]` -> values `[T, N, V]`, V = `value_size`."""
    values = up[:, up.shape[1] - value_size :].transpose(1, 2)
    return torch.bmm(attended.transpose(0, 1), values).transpose(0, 1)


def latent_verify_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    rank: int,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The CPU path: gather every page of the table, mask, attend. Rows that see nothing give 0."""
    num_requests, num_rows, num_heads, width = q.shape
    if q.numel() == 0:
        return q.new_empty(*q.shape[:-1], rank)
    rows = latent_slots(page_table, kv)
    visible = visible_columns(kv_lens.to(torch.int64), num_rows, rows.shape[1], tree_mask)
    rows = torch.where(visible.any(dim=1), rows, 0)  # unused ones read the sink, which is zeros
    latents = gather_latents(kv, layer, rows.flatten()).view(num_requests, 1, -1, width)
    mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, float("-inf"))
    mask = mask.repeat_interleave(num_heads, dim=1)[:, None]
    flat = q.reshape(num_requests, 1, num_rows * num_heads, width)
    found = F.scaled_dot_product_attention(flat, latents, latents[..., :rank], attn_mask=mask, scale=scale)
    found = found.view(num_requests, num_rows, num_heads, rank)
    return found.masked_fill(~visible.any(dim=2)[:, :, None, None], 0)


def latent_extend_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    rank: int,
) -> torch.Tensor:
    """The CPU path: requests one by one."""
    out = q.new_zeros(*q.shape[:-1], rank)
    starts = q_starts.tolist()
    for request, (first, end) in enumerate(pairwise(starts)):
        own = slice(request, request + 1)
        out[first:end] = latent_verify_reference(
            q[None, first:end], kv, layer, page_table[own], kv_lens[own], scale, rank
        )[0]
    return out


@jit_varying(
    "num_flat", "num_rows", "window", "num_splits", "table_stride", "p_starts", "p_kv_lens", "p_tree_mask"
)
def _latent_kernel(
    p_q: tl.tensor,
    p_kv: tl.tensor,
    p_pages: tl.tensor,
    p_starts: tl.tensor,
    p_kv_lens: tl.tensor,
    p_tree_mask: tl.tensor,
    p_partial: tl.tensor,
    p_lse: tl.tensor,
    num_flat: tl.tensor,
    num_rows: tl.tensor,
    window: tl.tensor,
    num_splits: tl.tensor,
    q_row_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    o_layer: tl.tensor,
    scale: tl.tensor,
    HAS_STARTS: tl.constexpr,
    HAS_TREE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (tile of rows and heads, split, request)
    wait_for_previous(CHAINED)
    i_split = tl.program_id(1)
    i_request = tl.program_id(2).to(tl.int64)
    kv_len = tl.load(p_kv_lens + i_request).to(tl.int32)
    first_row = i_request * num_rows
    own_rows = num_rows
    context = kv_len - window
    if HAS_STARTS:
        first_row = tl.load(p_starts + i_request).to(tl.int64)
        own_rows = (tl.load(p_starts + i_request + 1) - first_row).to(tl.int32)
        context = kv_len - own_rows
    i_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    if tl.program_id(0) * BLOCK_ROWS >= own_rows * NUM_HEADS:
        return
    i_query = i_row // NUM_HEADS
    i_head = i_row % NUM_HEADS
    m_row = i_query < own_rows
    i_rank = tl.arange(0, BLOCK_RANK)
    i_rope = tl.arange(0, BLOCK_ROPE)
    m_rank = i_rank < RANK
    m_rope = i_rope < ROPE
    o_q = (first_row + i_query) * q_row_stride + i_head * q_head_stride
    b_q = tl.load(p_q + o_q[:, None] + i_rank[None, :], mask=m_row[:, None] & m_rank[None, :], other=0.0)
    m_turned = m_row[:, None] & m_rope[None, :]
    b_turned = tl.load(p_q + o_q[:, None] + RANK + i_rope[None, :], mask=m_turned, other=0.0)
    # a short context is not cut finer than MIN_SPLIT, so its later splits are empty
    split_len = tl.cdiv(tl.maximum(tl.cdiv(kv_len, num_splits), MIN_SPLIT), BLOCK_COLUMNS) * BLOCK_COLUMNS
    start = tl.minimum(i_split * split_len, kv_len)
    end = tl.minimum(start + split_len, kv_len)
    b_max = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    b_out = tl.zeros((BLOCK_ROWS, BLOCK_RANK), dtype=tl.float32)
    p_row_mask = p_tree_mask + i_request * num_rows * window
    for first in range(start, end, BLOCK_COLUMNS):
        i_column = first + tl.arange(0, BLOCK_COLUMNS)
        m_column = i_column < end
        o_page = i_request * table_stride + i_column // PAGE_SIZE
        # a pool may hold more than 2^31 values: page offsets are 64-bit
        i_page = tl.load(p_pages + o_page, mask=m_column, other=0).to(tl.int64)
        o_latent = o_layer + i_page * page_stride + (i_column % PAGE_SIZE) * (RANK + ROPE)
        p_latent = p_kv + o_latent[:, None] + i_rank[None, :]
        b_latent = tl.load(p_latent, mask=m_column[:, None] & m_rank[None, :], other=0.0)
        p_key = p_kv + o_latent[None, :] + RANK + i_rope[:, None]
        b_key = tl.load(p_key, mask=m_column[None, :] & m_rope[:, None], other=0.0)
        # ieee matters for float32 only, which would be truncated to tf32
        b_scores = tl.dot(b_q, tl.trans(b_latent), input_precision="ieee")
        b_scores = tl.dot(b_turned, b_key, b_scores, input_precision="ieee") * scale
        i_node = i_column - context
        m_seen = i_node[None, :] <= i_query[:, None]
        if HAS_TREE:
            m_new = m_row[:, None] & (m_column & (i_node >= 0))[None, :]
            b_seen = tl.load(p_row_mask + i_query[:, None] * window + i_node[None, :], mask=m_new, other=0)
            m_seen = (b_seen != 0) | (i_node < 0)[None, :]
        b_scores = tl.where(m_seen & m_column[None, :], b_scores, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_scores, axis=1))
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)  # -inf - -inf would be NaN
        b_weights = tl.exp2(b_scores - b_shift[:, None])
        b_rescale = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_rescale + tl.sum(b_weights, axis=1)
        b_rounded = b_weights.to(b_latent.dtype)
        b_out = tl.dot(b_rounded, b_latent, b_out * b_rescale[:, None], input_precision="ieee")
        b_max = b_new_max
    release_next(CHAINED)
    o_flat = (first_row + i_query) * NUM_HEADS + i_head
    b_total = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_out = (b_out / b_total[:, None]).to(p_partial.dtype.element_ty)
    m_out = m_row[:, None] & m_rank[None, :]
    if IS_SPLIT:
        o_flat += i_split.to(tl.int64) * num_flat
        tl.store(p_lse + o_flat, tl.where(b_sum == 0.0, float("-inf"), b_max + tl.log2(b_total)), mask=m_row)
        m_out = m_out & (b_sum > 0.0)[:, None]  # rows left unwritten by an empty split are never read
    tl.store(p_partial + o_flat[:, None] * RANK + i_rank[None, :], b_out, mask=m_out)


@jit_varying("num_splits", "num_flat", "num_requests", "p_starts")
def _merge_kernel(
    p_partial: tl.tensor,
    p_lse: tl.tensor,
    p_out: tl.tensor,
    p_starts: tl.tensor,
    num_splits: tl.tensor,
    num_flat: tl.tensor,
    num_requests: tl.tensor,
    HAS_STARTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # one (row, head) per program: its splits, weighted by their share of the softmax's denominator
    wait_for_previous(CHAINED)
    i_flat = tl.program_id(0).to(tl.int64)
    num_written = num_flat
    if HAS_STARTS:
        num_written = tl.load(p_starts + num_requests).to(tl.int32) * NUM_HEADS
    if i_flat >= num_written:  # no split wrote of rows behind the last request
        return
    i_split = tl.arange(0, BLOCK_SPLITS)
    i_rank = tl.arange(0, BLOCK_RANK)
    m_rank = i_rank < RANK
    b_lse = tl.load(p_lse + i_split * num_flat + i_flat, mask=i_split < num_splits, other=float("-inf"))
    release_next(CHAINED)
    top = tl.max(b_lse, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(b_lse - top), axis=0)
    b_out = tl.zeros((BLOCK_RANK,), dtype=tl.float32)
    for split in range(0, num_splits):
        lse = tl.load(p_lse + split * num_flat + i_flat)
        width = tl.where(lse > float("-inf"), RANK, 0)  # an unused split was left unwritten
        p_part = p_partial + (split * num_flat + i_flat) * RANK + i_rank
        b_out += tl.exp2(lse - top) * tl.load(p_part, mask=i_rank < width, other=0.0)
    b_out = b_out / tl.where(total == 0.0, 1.0, total)
    tl.store(p_out + i_flat * RANK + i_rank, b_out.to(p_out.dtype.element_ty), mask=m_rank)


class LatentTile(NamedTuple):
    """Launch configuration: (row, head) pairs and context columns of a tile."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


def latent_tile(dtype: torch.dtype, num_pairs: int) -> LatentTile:
    """The tile for `num_pairs` (row, head) pairs of a request. float32 is for tests."""
    if dtype == torch.float32:
        return LatentTile(rows=MIN_DOT, columns=16, num_warps=4, num_stages=1)
    if num_pairs <= MIN_DOT:
        return LatentTile(rows=MIN_DOT, columns=32, num_warps=4, num_stages=2)
    if num_pairs <= 32:
        return LatentTile(rows=32, columns=32, num_warps=4, num_stages=2)
    return LatentTile(rows=64, columns=32, num_warps=8, num_stages=2)


def choose_splits(num_programs: int, capacity: int) -> int:
    """The number of splits of a context of up to `capacity` rows, for `num_programs` programs without."""
    return max(1, min(cdiv(TARGET_PROGRAMS, max(num_programs, 1)), cdiv(capacity, MIN_SPLIT), MAX_SPLITS))


class _Rows(NamedTuple):
    """The new rows `[T, N, R+P]`: `num_rows` for each request, or those between `starts` `[B+1]`."""

    q: torch.Tensor
    num_rows: int
    starts: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None


def _attend(
    rows: _Rows,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    rank: int,
    num_splits: int,
    min_split: int,
) -> torch.Tensor:
    """The launches; returns `[T, N, R]`. Rows behind the last start stay unset."""
    num_requests, (num_all, num_heads, _) = page_table.shape[0], rows.q.shape
    out = torch.empty(num_all, num_heads, rank, dtype=rows.q.dtype, device=rows.q.device)
    num_tiles = cdiv(rows.num_rows * num_heads, latent_tile(rows.q.dtype, rows.num_rows * num_heads).rows)
    splits = num_splits or choose_splits(num_tiles * num_requests, page_table.shape[1] * kv.shape[3])
    num_flat = num_all * num_heads
    if splits == 1:
        _launch_splits(rows, kv, layer, page_table, kv_lens, scale, rank, out, out, 1, min_split)
        return out
    partial, lse = _empty_splits(rows.q, splits, rank)
    _launch_splits(rows, kv, layer, page_table, kv_lens, scale, rank, partial, lse, splits, min_split)
    _merge_kernel[(num_flat,)](
        partial,
        lse,
        out,
        kv_lens if rows.starts is None else rows.starts,
        splits,
        num_flat,
        num_requests,
        HAS_STARTS=rows.starts is not None,
        NUM_HEADS=num_heads,
        RANK=rank,
        BLOCK_SPLITS=FEW_SPLITS if splits <= FEW_SPLITS else MAX_SPLITS,
        BLOCK_RANK=next_power_of_2(rank),
        **chained(out.device),
        num_warps=4,
    )
    return out


def _empty_splits(q: torch.Tensor, splits: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of latents `[S, T*N, R]` and the logarithms of their denominators `[S, T*N]`, float32."""
    num_flat = q.shape[0] * q.shape[1]
    partial = torch.empty(splits, num_flat, rank, dtype=torch.float32, device=q.device)
    return partial, torch.empty(splits, num_flat, dtype=torch.float32, device=q.device)


def _launch_splits(
    rows: _Rows,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    rank: int,
    partial: torch.Tensor,
    lse: torch.Tensor,
    splits: int,
    min_split: int,
) -> None:
    """The first pass. With one split, `partial` is the output itself and `lse` is not written."""
    q = rows.q if rows.q.stride(-1) == 1 else rows.q.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    num_requests, (num_all, num_heads, width) = page_table.shape[0], q.shape
    page_size = kv.shape[3]
    tile = latent_tile(q.dtype, rows.num_rows * num_heads)
    num_tiles, num_flat = cdiv(rows.num_rows * num_heads, tile.rows), num_all * num_heads
    mask = rows.tree_mask
    _latent_kernel[(num_tiles, splits, num_requests)](
        q,
        kv,
        page_table,
        kv_lens if rows.starts is None else rows.starts,
        kv_lens.contiguous(),
        kv_lens if mask is None else mask.contiguous().view(torch.uint8),
        partial,
        lse,
        num_flat,
        rows.num_rows,
        rows.num_rows if mask is None else mask.shape[2],
        splits,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        kv.stride(0),
        layer * page_size * width,
        scale * LOG2_E,
        HAS_STARTS=rows.starts is not None,
        HAS_TREE=mask is not None,
        IS_SPLIT=splits > 1,
        MIN_SPLIT=min_split,
        NUM_HEADS=num_heads,
        PAGE_SIZE=page_size,
        RANK=rank,
        ROPE=width - rank,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        BLOCK_RANK=max(next_power_of_2(rank), MIN_DOT),
        BLOCK_ROPE=max(next_power_of_2(width - rank), MIN_DOT),
        **chained(q.device),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def latent_splits_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    rank: int,
    tree_mask: torch.Tensor | None,
    num_splits: int,
    min_split: int = MIN_SPLIT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch of the first pass of `latent_verify` with several splits: their sums of latents `[S, T*N, R]`
    and the logarithms `[S, T*N]`, in base 2, of their denominators. Splits behind a context are unset.
    """
    _check(q, kv, page_table, (kv_lens,), rank)
    if tree_mask is not None:
        check_tree_mask("latent_splits", tree_mask, page_table.shape[0], q.shape[1])
    rows = _Rows(q.flatten(0, 1), q.shape[1], tree_mask=tree_mask)
    partial, lse = _empty_splits(rows.q, num_splits, rank)
    _launch_splits(rows, kv, layer, page_table, kv_lens, scale, rank, partial, lse, num_splits, min_split)
    return partial, lse


def latent_verify_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    rank: int,
    tree_mask: torch.Tensor | None = None,
    *,
    num_splits: int = 0,
    min_split: int = MIN_SPLIT,
) -> torch.Tensor:
    """Launch; arguments as in `latent_verify`. `num_splits` 0: chosen by the shapes."""
    _check(q, kv, page_table, (kv_lens,), rank)
    if tree_mask is not None:
        check_tree_mask("latent_verify", tree_mask, page_table.shape[0], q.shape[1])
    if q.numel() == 0:
        return q.new_empty(*q.shape[:-1], rank)
    rows = _Rows(q.flatten(0, 1), q.shape[1], tree_mask=tree_mask)
    found = _attend(rows, kv, layer, page_table, kv_lens, scale, rank, num_splits, min_split)
    return found.view(*q.shape[:-1], rank)


def latent_extend_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    longest: int,
    scale: float,
    rank: int,
    *,
    num_splits: int = 0,
    min_split: int = MIN_SPLIT,
) -> torch.Tensor:
    """Launch; arguments as in `latent_extend`. `num_splits` 0: chosen by the shapes."""
    _check(q, kv, page_table, (q_starts, kv_lens), rank)
    rows = _Rows(q, longest, starts=q_starts)
    return _attend(rows, kv, layer, page_table, kv_lens, scale, rank, num_splits, min_split)


def _check(
    q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, lens: tuple[torch.Tensor, ...], rank: int
) -> None:
    integers = [x.dtype in (torch.int32, torch.int64) for x in (page_table, *lens)]
    if not is_latent(kv) or not kv.is_contiguous() or page_table.dim() != 2 or not all(integers):
        raise ValueError(
            f"latent attention: pool {tuple(kv.shape)}, page table {tuple(page_table.shape)} "
            f"{page_table.dtype}; expected a contiguous pool of one plane, integer pages and lengths"
        )
    if q.dtype != kv.dtype or q.shape[-1] != kv.shape[-1] or not 0 < rank < kv.shape[-1]:
        raise ValueError(
            f"latent attention: q {tuple(q.shape)} {q.dtype} and rank {rank} do not fit a pool of "
            f"{kv.shape[-1]} {kv.dtype} values a row"
        )


def latent_verify(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    rank: int,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend absorbed rows `q` `[B, Q, N, R+P]`, the last Q of each request's `kv_lens` int `[B]` rows ->
    `[B, Q, N, R]`, R = `rank`.

    `page_table` int `[B, P]`. Without `tree_mask` attention is causal; with it, bool `[B, Q, W]`, as in
    `verify_attention.paged_verify`. A row that sees nothing gives zeros. Raises ValueError if shapes or
    dtypes do not fit.
    """
    if q.is_cuda:
        return latent_verify_triton(q, kv, layer, page_table, kv_lens, scale, rank, tree_mask)
    _check(q, kv, page_table, (kv_lens,), rank)
    return latent_verify_reference(q, kv, layer, page_table, kv_lens, scale, rank, tree_mask)


def latent_extend(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    longest: int,
    scale: float,
    rank: int,
) -> torch.Tensor:
    """Attend absorbed rows `q` `[T, N, R+P]`: rows `q_starts[i]` to `q_starts[i+1]` are the last of request
    i's `kv_lens[i]` rows, and at most `longest` -> `[T, N, R]`.

    Rows behind the last start are padding; their output is not defined. Raises ValueError if shapes or dtypes
    do not fit.
    """
    if q.is_cuda:
        return latent_extend_triton(q, kv, layer, page_table, q_starts, kv_lens, longest, scale, rank)
    _check(q, kv, page_table, (q_starts, kv_lens), rank)
    return latent_extend_reference(q, kv, layer, page_table, q_starts, kv_lens, scale, rank)
