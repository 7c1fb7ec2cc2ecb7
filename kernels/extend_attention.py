"""Causal attention of ragged runs of new rows over their requests' pages: prefill and draft prefill.

Legend: T new rows of all requests, B requests, P pages per request, N query heads, K key/value heads, G =
N/K, D head dimension. Request b owns rows [q_starts[b], q_starts[b+1]), the last of its kv_lens[b] context
rows. Rows from q_starts[B] on are padding. Pool and page numbers are those of `kv_store`.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from .attention_form import PLAIN_FORM, AttentionForm
from .kv_store import kv_rows
from .paged_attention import QUERY_BLOCK, causal_band, extend_attention, gather_kv
from .paged_tile import LOG2_E, attend_columns, check_paged, first_sums, tile_shape
from .triton_jit import cdiv, jit_varying, tl

MAX_TILE_ROWS = 128
# From this number of (row, head) pairs on, two programs of four warps per multiprocessor beat one of
# eight. On an H200, 8192 rows of 32 heads take 1.59 ms instead of 1.73, but 1024 rows take 60 us instead
# of 54.
MANY_ROWS = 8192


def paged_extend_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """The CPU path: one request after the other. It reads the lengths on the host."""
    out = torch.zeros_like(q)
    starts, lens = q_starts.tolist(), kv_lens.tolist()
    q_lens = [end - start for start, end in pairwise(starts)]
    block = min(max(q_lens, default=0), QUERY_BLOCK)
    band = causal_band(max(lens, default=0), block, q.dtype, q.device, form.window)
    page_size = kv.shape[3]
    for request, (start, q_len, kv_len) in enumerate(zip(starts[:-1], q_lens, lens, strict=True)):
        if q_len == 0:
            continue
        columns = torch.arange(kv_len, device=q.device)
        slots = page_table[request, columns // page_size].to(torch.int64) * page_size + columns % page_size
        rows = kv_rows(slots, kv)
        keys, values = gather_kv(kv, layer, torch.cat((rows, rows + page_size)), q.dtype)
        mine = slice(start, start + q_len)
        out[mine] = extend_attention(q[mine], keys, values, band, scale, form)
    return out


@jit_varying("table_stride")
def _extend_kernel(
    p_q: tl.tensor,
    p_kv: tl.tensor,
    p_pages: tl.tensor,
    p_q_starts: tl.tensor,
    p_kv_lens: tl.tensor,
    p_sinks: tl.tensor,
    p_out: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    num_heads: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    o_layer: tl.tensor,
    o_value: tl.tensor,
    scale: tl.tensor,
    HAS_SINKS: tl.constexpr,
    SLIDING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    # the last tiles of a request see the most context, so they start first
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i_kv_head = tl.program_id(1)
    i_request = tl.program_id(2).to(tl.int64)
    q_start = tl.load(p_q_starts + i_request).to(tl.int64)
    q_len = (tl.load(p_q_starts + i_request + 1).to(tl.int64) - q_start).to(tl.int32)
    if i_tile * BLOCK_ROWS >= q_len * GROUP:
        return
    context = tl.load(p_kv_lens + i_request).to(tl.int32) - q_len

    # a tile's rows are (query, head of the group) pairs, so keys and values are read once for the whole group
    i_row = i_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    i_query = i_row // GROUP
    i_head = i_kv_head * GROUP + i_row % GROUP
    i_dim = tl.arange(0, BLOCK_DIM)
    m_rows = (i_query < q_len)[:, None] & (i_dim < HEAD_DIM)[None, :]
    o_q = (q_start + i_query) * q_stride + i_head * q_head_stride
    b_q = tl.load(p_q + o_q[:, None] + i_dim[None, :], mask=m_rows, other=0.0)

    # every row of the tile sees columns [low_end, num_full), some rows see those before and those up to
    # num_seen
    first_query = i_tile * BLOCK_ROWS // GROUP
    last_query = tl.minimum((i_tile * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, q_len - 1)
    num_full = (context + first_query + 1) // BLOCK_COLUMNS * BLOCK_COLUMNS
    num_seen = context + last_query + 1
    start = context * 0
    low_end = start
    if SLIDING:
        start = tl.maximum(context + first_query + 1 - SLIDING, 0) // BLOCK_COLUMNS * BLOCK_COLUMNS
        low_end = tl.cdiv(tl.maximum(context + last_query + 1 - SLIDING, 0), BLOCK_COLUMNS) * BLOCK_COLUMNS
        num_full = tl.maximum(num_full, start)
        low_end = tl.minimum(low_end, num_full)
    p_head = p_kv + o_layer + i_kv_head * HEAD_DIM
    p_row_pages = p_pages + i_request * table_stride
    b_max, b_sum = first_sums(p_sinks, i_head, i_query < q_len, True, HAS_SINKS)
    _, b_sum, b_out = attend_columns(
        b_q, i_query, context + i_query, b_max, b_sum, p_head, p_row_pages, p_pages, start, low_end, num_full,
        num_seen, context, q_len, 0, page_stride, slot_stride, o_value, scale, False, SLIDING, SOFTCAP,
        PAGE_SIZE, HEAD_DIM, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DIM,
    )  # fmt: skip

    o_out = ((q_start + i_query) * num_heads + i_head) * HEAD_DIM
    b_out = b_out / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    tl.store(p_out + o_out[:, None] + i_dim[None, :], b_out.to(p_out.dtype.element_ty), mask=m_rows)


def paged_extend_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    max_q_len: int,
    scale: float,
    out: torch.Tensor | None = None,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """Launch on `q` `[T, N, D]`; returns `[T, N, D]`, zeros in padding rows, or `out`, which keeps those.

    `kv`: `[num_pages, L, 2, page_size, K, D]`. `page_table`: int `[B, P]`. `q_starts`: int `[B+1]`.
    `kv_lens`: int `[B]`. `max_q_len`: an upper bound of the rows per request, known to the host. Values of
    lengths and pages are not checked. Raises ValueError if shapes or dtypes do not fit.
    """
    _check(q, kv, page_table, q_starts, kv_lens)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    num_requests = kv_lens.shape[0]
    if q.numel() == 0 or num_requests == 0 or max_q_len == 0:
        return out
    q = q if q.stride(-1) == 1 else q.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    page_size, kv_heads, head_dim = kv.shape[3:]
    group = q.shape[1] // kv_heads
    tile = tile_shape(q.dtype, head_dim, max_q_len * group, MAX_TILE_ROWS)
    if max_q_len * group >= MANY_ROWS:
        tile = tile._replace(num_warps=4)
    plane = page_size * kv_heads * head_dim
    _extend_kernel[(cdiv(max_q_len * group, tile.rows), kv_heads, num_requests)](
        q,
        kv,
        page_table,
        q_starts.contiguous(),
        kv_lens.contiguous(),
        q if form.sinks is None else form.sinks,
        out,
        q.stride(0),
        q.stride(1),
        q.shape[1],
        page_table.stride(0),
        kv.stride(0),
        kv_heads * head_dim,
        layer * 2 * plane,
        plane,
        scale * LOG2_E,
        HAS_SINKS=form.sinks is not None,
        SLIDING=form.window,
        SOFTCAP=form.softcap,
        GROUP=group,
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        BLOCK_DIM=tile.dim,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _check(
    q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, q_starts: torch.Tensor, kv_lens: torch.Tensor
) -> None:
    check_paged("paged_extend", q, kv, page_table, (q_starts, kv_lens))
    num_requests = page_table.shape[0]
    if q.dim() != 3 or kv_lens.shape != (num_requests,) or q_starts.shape != (num_requests + 1,):
        raise ValueError(
            f"paged_extend: q {tuple(q.shape)}, q_starts {tuple(q_starts.shape)}, kv_lens "
            f"{tuple(kv_lens.shape)} do "
            f"not fit {num_requests} requests; expected [T, N, D], [B+1], [B]"
        )


def paged_extend(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    max_q_len: int,
    scale: float,
    out: torch.Tensor | None = None,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """Attend rows `q` `[T, N, D]` over their requests' pages, each row up to itself.

    `page_table` int `[B, P]`: pages of `layer` in `kv`. `q_starts`: int `[B+1]`. `kv_lens`: int `[B]`, the
    new rows included, which are stored already. `max_q_len`: an upper bound of the rows per request. Returns
    `[T, N, D]`, zeros in padding rows. With `out`, contiguous of that shape, it writes the other rows of it
    and returns it. `form`: window, soft cap and sinks. Raises ValueError if shapes or dtypes do not fit.
    """
    if q.is_cuda:
        return paged_extend_triton(q, kv, layer, page_table, q_starts, kv_lens, max_q_len, scale, out, form)
    _check(q, kv, page_table, q_starts, kv_lens)
    computed = paged_extend_reference(q, kv, layer, page_table, q_starts, kv_lens, scale, form)
    return computed if out is None else out.copy_(computed)
