"""Causal attention of ragged runs of new rows over contiguous keys and values: long prompts.

A tile of contiguous rows is one bulk copy of the device (TMA), while a tile of pages is a copy for each of
its values' groups. The paged kernel of `extend_attention` needs no buffers and no copy before it.

Legend: T new rows of all requests, B requests, S buffer rows, N query heads, K key/value heads, G = N/K, D
head dimension. Request b owns rows [q_starts[b], q_starts[b+1]), the last of its kv_lens[b] context rows,
which are buffer rows from kv_starts[b] on (`gather_context`). Rows from q_starts[B] on are padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .paged_tile import LOG2_E, fold_scores, fold_tile
from .triton_jit import jit_varying, tensor_descriptor, tl

REQUEST_BLOCK = 64


@jit_varying("num_requests")
def _context_kernel(
    p_q: tl.tensor,
    d_keys: tl.tensor,
    d_values: tl.tensor,
    p_q_starts: tl.tensor,
    p_kv_starts: tl.tensor,
    p_kv_lens: tl.tensor,
    p_out: tl.tensor,
    num_requests: tl.tensor,
    num_rows: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    num_heads: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    REQUEST_BLOCK: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
) -> None:
    # The tiles of request b are those from q_starts[b] * G / BLOCK_ROWS + b on: at least as many as it needs.
    # The padding rows count as one more request. The last tiles see the most context, so they start first.
    i_kv_head = tl.program_id(0)
    i_slot = tl.num_programs(1) - 1 - tl.program_id(1)
    i_request = -1
    for start in range(0, num_requests + 1, REQUEST_BLOCK):
        i_start = start + tl.arange(0, REQUEST_BLOCK)
        m_start = i_start <= num_requests
        b_starts = tl.load(p_q_starts + i_start, mask=m_start, other=0).to(tl.int32)
        is_before = m_start & (b_starts * GROUP // BLOCK_ROWS + i_start <= i_slot)
        i_request += tl.sum(is_before.to(tl.int32), axis=0)
    q_start = tl.load(p_q_starts + i_request).to(tl.int32)
    q_len = num_rows - q_start
    if i_request < num_requests:
        q_len = tl.load(p_q_starts + i_request + 1).to(tl.int32) - q_start
    i_tile = i_slot - (q_start * GROUP // BLOCK_ROWS + i_request)
    if i_tile * BLOCK_ROWS >= q_len * GROUP:
        return

    # a tile's rows are (query, head of the group) pairs, so keys and values are read once for the whole group
    i_row = i_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    i_query = i_row // GROUP
    i_head = i_kv_head * GROUP + i_row % GROUP
    i_dim = tl.arange(0, HEAD_DIM)
    m_rows = (i_query < q_len)[:, None]
    o_out = ((q_start + i_query).to(tl.int64) * num_heads + i_head) * HEAD_DIM
    p_rows = p_out + o_out[:, None] + i_dim[None, :]
    if i_request == num_requests:
        b_none = tl.zeros((BLOCK_ROWS, HEAD_DIM), dtype=p_out.dtype.element_ty)
        tl.store(p_rows, b_none, mask=m_rows)
        return
    o_q = (q_start + i_query).to(tl.int64) * q_stride + i_head * q_head_stride
    b_q = tl.load(p_q + o_q[:, None] + i_dim[None, :], mask=m_rows, other=0.0)
    context = tl.load(p_kv_lens + i_request).to(tl.int32) - q_len
    o_context = tl.load(p_kv_starts + i_request).to(tl.int32)

    # every row of the tile sees columns [0, num_full), some rows see [num_full, num_seen)
    first_query = i_tile * BLOCK_ROWS // GROUP
    last_query = tl.minimum((i_tile * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, q_len - 1)
    num_full = (context + first_query + 1) // BLOCK_COLUMNS * BLOCK_COLUMNS
    num_seen = context + last_query + 1
    o_head = i_kv_head * HEAD_DIM
    b_max = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    b_out = tl.zeros((BLOCK_ROWS, HEAD_DIM), dtype=tl.float32)
    i_offset = tl.arange(0, BLOCK_COLUMNS)
    if IS_OVERLAPPED:
        # the scores of a tile are under way while the weights of the tile before are computed
        if num_full > 0:
            b_k = d_keys.load([o_context, o_head])
            b_scores = tl.dot(b_q, b_k.T, input_precision="ieee")
            for first in range(BLOCK_COLUMNS, num_full, BLOCK_COLUMNS):
                b_k = d_keys.load([o_context + first, o_head])
                b_next = tl.dot(b_q, b_k.T, input_precision="ieee")
                b_v = d_values.load([o_context + first - BLOCK_COLUMNS, o_head])
                b_max, b_sum, b_out = fold_scores(b_scores, b_v, b_max, b_sum, b_out, scale)
                b_scores = b_next
            b_v = d_values.load([o_context + num_full - BLOCK_COLUMNS, o_head])
            b_max, b_sum, b_out = fold_scores(b_scores, b_v, b_max, b_sum, b_out, scale)
    else:
        for first in range(0, num_full, BLOCK_COLUMNS):
            b_k = d_keys.load([o_context + first, o_head])
            b_v = d_values.load([o_context + first, o_head])
            b_max, b_sum, b_out = fold_tile(b_q, b_k.T, b_v, m_rows, b_max, b_sum, b_out, scale, True)
    for first in range(num_full, num_seen, BLOCK_COLUMNS):
        b_k = d_keys.load([o_context + first, o_head])
        b_v = d_values.load([o_context + first, o_head])
        m_seen = (first + i_offset - context)[None, :] <= i_query[:, None]
        b_max, b_sum, b_out = fold_tile(b_q, b_k.T, b_v, m_seen, b_max, b_sum, b_out, scale, False)
    b_out = b_out / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    tl.store(p_rows, b_out.to(p_out.dtype.element_ty), mask=m_rows)


class ContextTile(NamedTuple):
    """Launch configuration."""

    rows: int = 128
    columns: int = 128
    num_warps: int = 8
    num_stages: int = 2
    is_overlapped: bool = False


BEST_TILE = ContextTile()


def context_attention_triton(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    *,
    out: torch.Tensor | None = None,
    tile: ContextTile = BEST_TILE,
) -> torch.Tensor:
    """Launch on `q` `[T, N, D]`, `keys`, `values` `[S, K, D]`; returns `[T, N, D]`, zeros in padding rows."""
    num_rows, num_heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    group = num_heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    num_requests = kv_lens.shape[0]
    d_keys, d_values = (
        tensor_descriptor(x.view(x.shape[0], -1), (tile.columns, head_dim)) for x in (keys, values)
    )
    _context_kernel[(kv_heads, num_rows * group // tile.rows + num_requests + 1)](
        q,
        d_keys,
        d_values,
        q_starts,
        kv_starts,
        kv_lens,
        out,
        num_requests,
        num_rows,
        q.stride(0),
        q.stride(1),
        num_heads,
        scale * LOG2_E,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        REQUEST_BLOCK=REQUEST_BLOCK,
        IS_OVERLAPPED=tile.is_overlapped,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
