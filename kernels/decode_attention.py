"""Attention of a decode or verify step in one launch: it rotates new queries and keys, stores new keys and
values, attends over splits of the context, and merges the splits.

It joins `rotate_store` and `verify_attention`. The columns before the new rows are cut into splits; the new
rows are columns of one more split, or of the last one, whose program rotates and stores them. The last
program of a request's KV head to finish merges the splits of all. Source of the last step: the
threadFenceReduction sample of NVIDIA's CUDA samples.

Legend: B requests, Q new rows of a request, T = B*Q tokens, P pages per request, N query heads, K key/value
heads, G = N/K, D head dimension, R rotated dimensions, S splits. Pool and page numbers are those of
`kv_store`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .attention_form import PLAIN_FORM, AttentionForm
from .fp8_scales import to_fp8_tile
from .paged_tile import LOG2_E, MIN_DOT, attend_columns, check_paged, first_sums, fold_tile, tile_shape
from .rope import check_tables
from .rotate_store import HeadNorms, rotate_store
from .triton_jit import jit, jit_varying, next_power_of_2, tl
from .verify_attention import MAX_TILE_ROWS, MIN_SPLIT, choose_splits, paged_verify_reference


@jit
def _rotated(
    p_tile: tl.tensor,
    m_row: tl.tensor,
    i_token: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_norm: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    OFFSET: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """Heads `[M, D]` at the addresses `p_tile` `[M]`, normalised and rotated, with the rounding of
    `rotate_store`.
    """
    dtype: tl.constexpr = p_tile.dtype.element_ty
    i_dim = tl.arange(0, BLOCK_DIM)
    m_dim = i_dim < HEAD_DIM
    i_paired = tl.where(i_dim < ROTARY_DIM, (i_dim + ROTARY_DIM // 2) % ROTARY_DIM, i_dim)
    m_tile = m_row[:, None] & m_dim[None, :]
    m_table = m_row[:, None] & (i_dim < ROTARY_DIM)[None, :]
    o_table = i_token[:, None] * ROTARY_DIM + i_dim[None, :]
    b_wide = tl.load(p_tile[:, None] + i_dim[None, :], mask=m_tile, other=0.0).to(tl.float32)
    b_other = tl.load(p_tile[:, None] + i_paired[None, :], mask=m_tile, other=0.0).to(tl.float32)
    b_cos = tl.load(p_cos + o_table, mask=m_table, other=1.0).to(tl.float32)
    b_sin = tl.load(p_sin + o_table, mask=m_table, other=0.0).to(tl.float32)
    if HAS_NORM:
        b_scale = tl.rsqrt(tl.sum(b_wide * b_wide, axis=1) / HEAD_DIM + eps)[:, None]
        b_weight = tl.load(p_norm + i_dim, mask=m_dim, other=0.0).to(tl.float32)[None, :]
        b_paired = tl.load(p_norm + i_paired, mask=m_dim, other=0.0).to(tl.float32)[None, :]
        b_wide, b_other = b_wide * b_scale, b_other * b_scale
        if HAS_OFFSET:
            b_weight, b_paired = b_weight + OFFSET, b_paired + OFFSET
        else:
            b_wide, b_other = b_wide.to(dtype).to(tl.float32), b_other.to(dtype).to(tl.float32)
        b_wide = (b_wide * b_weight).to(dtype).to(tl.float32)
        b_other = (b_other * b_paired).to(dtype).to(tl.float32)
    return (b_wide * b_cos + b_other * b_sin).to(dtype)


@jit
def merged_splits(
    p_partial: tl.tensor,
    p_lse: tl.tensor,
    o_flat: tl.tensor,
    m_flat: tl.tensor,
    num_used: tl.tensor,
    num_flat: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """The rows `o_flat` `[M]` of the first `num_used` splits, weighted by their shares of the denominators:
    float32 `[M, D]`.
    """
    i_dim = tl.arange(0, BLOCK_DIM)
    b_max = tl.full(o_flat.shape, float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros(o_flat.shape, dtype=tl.float32)
    b_out = tl.zeros((o_flat.shape[0], BLOCK_DIM), dtype=tl.float32)
    for first in range(0, num_used, BLOCK_SPLITS):
        i_split = first + tl.arange(0, BLOCK_SPLITS)
        m_used = (i_split < num_used)[:, None] & m_flat[None, :]
        o_split = i_split[:, None] * num_flat + o_flat.to(tl.int32)[None, :]
        # not through the first cache, which may not know what other programs of this launch wrote
        b_lse = tl.load(p_lse + o_split, mask=m_used, other=float("-inf"), cache_modifier=".cg")
        o_part = o_split[:, :, None] * HEAD_DIM + i_dim[None, None, :]
        m_part = m_used[:, :, None] & (i_dim < HEAD_DIM)[None, None, :]
        b_part = tl.load(p_partial + o_part, mask=m_part, other=0.0, cache_modifier=".cg")
        b_new_max = tl.maximum(b_max, tl.max(b_lse, axis=0))
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_weight = tl.exp2(b_lse - b_shift[None, :])
        # a split in which a row sees nothing may hold anything for it
        b_part = tl.where((b_weight > 0.0)[:, :, None], b_part * b_weight[:, :, None], 0.0)
        b_rescale = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_rescale + tl.sum(b_weight, axis=0)
        b_out = b_out * b_rescale[:, None] + tl.sum(b_part, axis=0)
        b_max = b_new_max
    return b_out / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]


@jit_varying("num_requests", "num_rows", "num_splits", "table_stride", "p_kv_lens", "p_rows")
def _decode_kernel(
    p_heads: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_q_norm: tl.tensor,
    p_k_norm: tl.tensor,
    p_rows: tl.tensor,
    p_kv: tl.tensor,
    p_pages: tl.tensor,
    p_kv_lens: tl.tensor,
    p_sinks: tl.tensor,
    p_partial: tl.tensor,
    p_lse: tl.tensor,
    p_out: tl.tensor,
    p_arrivals: tl.tensor,
    num_requests: tl.tensor,
    num_rows: tl.tensor,
    kv_heads: tl.tensor,
    num_splits: tl.tensor,
    token_stride: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    o_layer: tl.tensor,
    o_value: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    HAS_NORMS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SLIDING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_NEW: tl.constexpr,
    BLOCK_MERGED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
) -> None:
    # program (kv head, split, request)
    i_kv_head = tl.program_id(0)
    i_split = tl.program_id(1)
    i_request = tl.program_id(2).to(tl.int64)
    kv_len = tl.load(p_kv_lens + i_request).to(tl.int32)
    context = tl.maximum(kv_len - num_rows, 0)
    # a short context is not cut finer than MIN_SPLIT, so its later splits are empty
    base = context * 0
    low_end = base
    if SLIDING:
        base = tl.maximum(context - SLIDING, 0) // BLOCK_COLUMNS * BLOCK_COLUMNS
        low_end = tl.cdiv(tl.maximum(kv_len - SLIDING, 0), BLOCK_COLUMNS) * BLOCK_COLUMNS
    share = tl.cdiv(context - base, num_splits)
    split_len = tl.cdiv(tl.maximum(share, MIN_SPLIT), BLOCK_COLUMNS) * BLOCK_COLUMNS
    num_full = tl.cdiv(context - base, split_len)
    new_split = tl.minimum(num_full, num_splits - 1)  # that of the new rows
    if i_split > new_split:
        return
    i_row = tl.arange(0, BLOCK_ROWS)
    i_query = i_row // GROUP
    i_head = i_kv_head * GROUP + i_row % GROUP
    m_row = i_query < num_rows
    first_token = i_request * num_rows
    i_dim = tl.arange(0, BLOCK_DIM)
    b_q = _rotated(
        p_heads + (first_token + i_query) * token_stride + i_head * HEAD_DIM, m_row, first_token + i_query,
        p_cos, p_sin, p_q_norm, eps, HAS_NORMS, HAS_OFFSET, OFFSET, ROTARY_DIM, HEAD_DIM, BLOCK_DIM,
    )  # fmt: skip
    b_max, b_sum = first_sums(p_sinks, i_head, m_row, i_split == 0, HAS_SINKS)
    start = tl.minimum(base + i_split * split_len, context)
    end = tl.minimum(start + split_len, context)
    full_end = tl.maximum(tl.minimum(context // BLOCK_COLUMNS * BLOCK_COLUMNS, end), start)
    b_max, b_sum, b_out = attend_columns(
        b_q, i_query, context + i_query, b_max, b_sum, p_kv + o_layer + i_kv_head * HEAD_DIM,
        p_pages + i_request * table_stride, p_pages, start, tl.minimum(tl.maximum(low_end, start), full_end),
        full_end, end, context, num_rows, num_rows, page_stride, kv_heads * HEAD_DIM, o_value, scale, False,
        SLIDING, SOFTCAP, PAGE_SIZE, HEAD_DIM, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DIM,
    )  # fmt: skip
    if i_split == new_split:
        i_new = tl.arange(0, BLOCK_NEW)
        m_new = i_new < num_rows
        i_token = first_token + i_new
        p_key = p_heads + i_token * token_stride + (kv_heads * GROUP + i_kv_head) * HEAD_DIM
        b_k = _rotated(
            p_key, m_new, i_token, p_cos, p_sin, p_k_norm, eps, HAS_NORMS, HAS_OFFSET, OFFSET, ROTARY_DIM,
            HEAD_DIM, BLOCK_DIM,
        )  # fmt: skip
        m_tile = m_new[:, None] & (i_dim < HEAD_DIM)[None, :]
        b_v = tl.load(p_key[:, None] + kv_heads * HEAD_DIM + i_dim[None, :], mask=m_tile, other=0.0)
        # padding rows, and one row more, write zeros to row 0, the sink, so their order does not matter
        i_slot = tl.load(p_rows + i_token, mask=m_new, other=0)
        b_k = tl.where((i_slot != 0)[:, None], b_k, 0.0)
        b_v = tl.where((i_slot != 0)[:, None], b_v, 0.0)
        if p_kv.dtype.element_ty == tl.float8e4nv:
            b_k, b_v = to_fp8_tile(b_k), to_fp8_tile(b_v)
        o_kv = o_layer + (i_slot * kv_heads + i_kv_head) * HEAD_DIM
        p_stored = p_kv + o_kv[:, None] + i_dim[None, :]
        m_tile = (i_new <= num_rows)[:, None] & (i_dim < HEAD_DIM)[None, :]
        tl.store(p_stored, b_k, mask=m_tile)
        tl.store(p_stored + o_value, b_v, mask=m_tile)
        m_seen = (i_new[None, :] <= i_query[:, None]) & m_new[None, :] & (kv_len >= num_rows)
        if SLIDING:
            m_seen = m_seen & (i_query[:, None] - i_new[None, :] < SLIDING)
        b_max, b_sum, b_out = fold_tile(
            b_q, tl.trans(b_k), b_v, m_seen, b_max, b_sum, b_out, scale, False, False, SOFTCAP
        )
    o_flat = (first_token + i_query) * (kv_heads * GROUP) + i_head
    b_total = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_out = b_out / b_total[:, None]
    m_out = m_row[:, None] & (i_dim < HEAD_DIM)[None, :]
    if new_split == 0:
        tl.store(
            p_out + o_flat[:, None] * HEAD_DIM + i_dim[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out
        )
    else:
        num_flat = num_requests * num_rows * (kv_heads * GROUP)
        o_part = o_flat + i_split.to(tl.int64) * num_flat
        tl.store(p_lse + o_part, tl.where(b_sum == 0.0, float("-inf"), b_max + tl.log2(b_total)), mask=m_row)
        tl.store(p_partial + o_part[:, None] * HEAD_DIM + i_dim[None, :], b_out, mask=m_out)
        tl.debug_barrier()  # the stores of all threads come before the arrival of one
        p_arrival = p_arrivals + i_request * kv_heads + i_kv_head
        if tl.atomic_add(p_arrival, 1, sem="acq_rel", scope="gpu") == new_split:
            tl.store(p_arrival, 0)
            i_merged = tl.arange(0, BLOCK_MERGED)
            i_flat = (
                (first_token + i_merged // GROUP) * (kv_heads * GROUP) + i_kv_head * GROUP + i_merged % GROUP
            )
            m_flat = i_merged < num_rows * GROUP
            b_merged = merged_splits(
                p_partial, p_lse, i_flat, m_flat, new_split + 1, num_flat, HEAD_DIM, BLOCK_SPLITS, BLOCK_DIM
            )
            m_merged = m_flat[:, None] & (i_dim < HEAD_DIM)[None, :]
            p_merged = p_out + i_flat[:, None] * HEAD_DIM + i_dim[None, :]
            tl.store(p_merged, b_merged.to(p_out.dtype.element_ty), mask=m_merged)


class DecodeTile(NamedTuple):
    """Launch configuration. `min_split`: columns of the shortest split; `merged`: values of a tile of merged
    splits, for each warp.
    """

    columns: int
    num_warps: int
    num_stages: int
    min_split: int = MIN_SPLIT
    merged: int = 1024


def decode_tile(dtype: torch.dtype, head_dim: int, num_rows: int) -> DecodeTile:
    """The tile for `num_rows` (row, head) pairs, as in `verify_attention`."""
    tile = tile_shape(dtype, head_dim, num_rows, MAX_TILE_ROWS)
    return DecodeTile(tile.columns, 2 if tile.rows == MIN_DOT and tile.dim <= 128 else tile.num_warps, 2)


def joins_rows(num_rows: int, num_heads: int, kv_heads: int) -> bool:
    """Whether one tile holds the (row, head) pairs of a request and KV head."""
    return num_rows * (num_heads // kv_heads) <= MAX_TILE_ROWS // 2


def num_arrivals(num_requests: int, kv_heads: int) -> int:
    """The counters that `decode_attention` needs."""
    return num_requests * kv_heads


def decode_attention_triton(
    kv: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
    heads: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    arrivals: torch.Tensor,
    norms: HeadNorms | None = None,
    form: AttentionForm = PLAIN_FORM,
    *,
    tile: DecodeTile | None = None,
    num_splits: int = 0,
) -> torch.Tensor:
    """Launch; arguments as in `decode_attention`. `num_splits` 0: chosen by the shapes."""
    num_heads = _check(kv, rows, heads, cos, signed_sin, page_table, kv_lens, arrivals)
    num_tokens, _, head_dim = heads.shape
    num_requests = page_table.shape[0]
    page_size, kv_heads = kv.shape[3:5]
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    if out.numel() == 0:
        return out
    heads = heads if heads.stride()[1:] == (head_dim, 1) else heads.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    num_rows = num_tokens // num_requests
    group = num_heads // kv_heads
    block_rows = max(next_power_of_2(num_rows * group), MIN_DOT)
    chosen = decode_tile(heads.dtype, head_dim, num_rows * group) if tile is None else tile
    capacity = page_table.shape[1] * page_size
    capacity = min(capacity, form.window + num_rows) if form.window else capacity
    splits = num_splits or choose_splits(kv_heads * num_requests, capacity) + 1
    num_flat = num_tokens * num_heads
    partial = torch.empty(splits, num_flat, head_dim, dtype=torch.float32, device=heads.device)
    lse = torch.empty(splits, num_flat, dtype=torch.float32, device=heads.device)
    block_dim = max(next_power_of_2(head_dim), MIN_DOT)
    merged_rows = next_power_of_2(num_rows * group)
    plane = page_size * kv_heads * head_dim
    _decode_kernel[(kv_heads, splits, num_requests)](
        heads,
        cos.contiguous(),
        signed_sin.contiguous(),
        heads if norms is None else norms.q,
        heads if norms is None else norms.k,
        rows.contiguous(),
        kv,
        page_table,
        kv_lens.contiguous(),
        heads if form.sinks is None else form.sinks,
        partial,
        lse,
        out,
        arrivals,
        num_requests,
        num_rows,
        kv_heads,
        splits,
        heads.stride(0),
        page_table.stride(0),
        kv.stride(0),
        layer * 2 * plane,
        plane,
        scale * LOG2_E,
        0.0 if norms is None else norms.eps,
        HAS_NORMS=norms is not None,
        HAS_OFFSET=norms is not None and norms.offset is not None,
        OFFSET=0.0 if norms is None else norms.offset or 0.0,
        HAS_SINKS=form.sinks is not None,
        SLIDING=form.window,
        SOFTCAP=form.softcap,
        MIN_SPLIT=chosen.min_split,
        GROUP=group,
        PAGE_SIZE=page_size,
        ROTARY_DIM=cos.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=chosen.columns,
        BLOCK_DIM=block_dim,
        BLOCK_NEW=max(next_power_of_2(num_rows + 1), MIN_DOT),
        BLOCK_MERGED=merged_rows,
        BLOCK_SPLITS=max(1, chosen.merged * chosen.num_warps // (merged_rows * block_dim)),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    return out


def _check(
    kv: torch.Tensor,
    rows: torch.Tensor,
    heads: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    arrivals: torch.Tensor,
) -> int:
    """The number of query heads. Raises ValueError if shapes or dtypes do not fit."""
    num_heads, num_requests = heads.shape[1] - 2 * kv.shape[4], page_table.shape[0]
    check_tables(heads, cos, signed_sin)
    check_paged("decode_attention", heads[:, :num_heads], kv, page_table, (kv_lens, rows))
    num_rows = heads.shape[0] // max(num_requests, 1)
    if (
        heads.shape[0] != num_rows * num_requests
        or rows.shape[0] != heads.shape[0]
        or kv_lens.shape[0] != num_requests
    ):
        raise ValueError(
            f"decode_attention: {heads.shape[0]} tokens, {rows.shape[0]} rows and {kv_lens.shape[0]} lengths "
            f"do not fit {num_requests} requests"
        )
    if not joins_rows(num_rows, num_heads, kv.shape[4]):
        raise ValueError(f"decode_attention: {num_rows} rows of {num_heads} heads are more than one tile")
    if arrivals.dtype != torch.int32 or arrivals.numel() < num_arrivals(num_requests, kv.shape[4]):
        raise ValueError(
            f"decode_attention: {arrivals.numel()} counters {arrivals.dtype}; expected int32 for each of "
            f"{num_requests} requests and {kv.shape[4]} heads"
        )
    return num_heads


def decode_attention(
    kv: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
    heads: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    arrivals: torch.Tensor,
    norms: HeadNorms | None = None,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """Rotates and stores `heads` `[T, N+2K, D]` as `rotate_store`, then attends as `paged_verify` without a
    tree: returns `[T, N, D]`.

    The rows of a request are neighbours; `kv_lens` int `[B]` counts them. A request with fewer is idle, and
    its rows give zeros. `arrivals`: int32 zeros, `num_arrivals` of them, which every launch leaves as zeros.
    Raises ValueError if shapes or dtypes do not fit.
    """
    if heads.is_cuda:
        return decode_attention_triton(
            kv, layer, rows, heads, cos, signed_sin, page_table, kv_lens, scale, arrivals, norms, form
        )
    num_heads = _check(kv, rows, heads, cos, signed_sin, page_table, kv_lens, arrivals)
    q = rotate_store(kv, layer, rows, heads, cos, signed_sin, norms)
    grouped = q.reshape(page_table.shape[0], -1, num_heads, heads.shape[2])
    found = paged_verify_reference(grouped, kv, layer, page_table, kv_lens, scale, None, form)
    return found.reshape(q.shape)
