"""Rotation and KV store in one pass: queries and keys are rotated, keys and values go straight into the pool.

Legend: T tokens, N query heads, K key/value heads, D head dimension. Pool and row numbers are those of `kv_store`.
"""

from __future__ import annotations

import torch

from .kv_store import check_kv, store_kv
from .rope import BLOCK_HEADS, apply_rope, check_tables, rotated_tile
from .triton_jit import cdiv, jit, next_power_of_2, tl


def rope_store_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
) -> torch.Tensor:
    """The definition, and the CPU path: rotate both, store, return the rotated queries."""
    store_kv(kv, layer, rows, apply_rope(k, cos, signed_sin), v)
    return apply_rope(q, cos, signed_sin)


@jit
def _rope_store_kernel(
    p_q: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_rows: tl.tensor,
    p_out: tl.tensor,
    p_kv: tl.tensor,
    num_heads: tl.tensor,
    kv_heads: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_stride: tl.tensor,
    v_head_stride: tl.tensor,
    num_q_blocks: tl.tensor,
    o_layer: tl.tensor,
    o_value: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    # program (0, any) has no token: it writes no query, and zeros into the sink
    i_token = tl.program_id(0).to(tl.int64) - 1
    i_block = tl.program_id(1)
    m_token = i_token >= 0
    i_dim = tl.arange(0, BLOCK_DIM)
    m_dim = i_dim < HEAD_DIM
    i_row = tl.load(p_rows + i_token, mask=m_token, other=0)
    if i_block < num_q_blocks:
        i_head = i_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        m_head = i_head < num_heads
        b_q = rotated_tile(
            p_q, p_cos, p_sin, i_token, m_token, i_head, m_head, q_stride, q_head_stride, HEAD_DIM, BLOCK_DIM
        )
        o_out = (i_token * num_heads + i_head[:, None]) * HEAD_DIM + i_dim[None, :]
        tl.store(
            p_out + o_out, b_q.to(p_out.dtype.element_ty), mask=m_head[:, None] & m_dim[None, :] & m_token
        )
    else:
        i_head = (i_block - num_q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        m_head = i_head < kv_heads
        m_tile = m_head[:, None] & m_dim[None, :]
        b_k = rotated_tile(
            p_k, p_cos, p_sin, i_token, m_token, i_head, m_head, k_stride, k_head_stride, HEAD_DIM, BLOCK_DIM
        )
        o_v = i_token * v_stride + i_head[:, None] * v_head_stride + i_dim[None, :]
        b_v = tl.load(p_v + o_v, mask=m_tile & m_token, other=0.0)
        is_real = i_row != 0
        o_kv = (i_row * kv_heads + i_head[:, None]) * HEAD_DIM + i_dim[None, :] + o_layer
        tl.store(p_kv + o_kv, tl.where(is_real, b_k, 0.0).to(p_kv.dtype.element_ty), mask=m_tile)
        tl.store(p_kv + o_kv + o_value, tl.where(is_real, b_v, 0.0), mask=m_tile)


def rope_store_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Launch on `q` `[T, N, D]`, `k`, `v` `[T, K, D]` (last dimensions contiguous), `cos`, `signed_sin` `[T, D]`,
    `kv` `[num_pages, L, 2, page_size, K, D]`, `rows` int64 `[T]` -> rotated queries `[T, N, D]`.

    Raises ValueError when tables, shapes or dtypes do not fit.
    """
    check_tables(q, cos, signed_sin)
    check_kv(kv, rows, k, v)
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.dtype != kv.dtype:
        raise ValueError(
            f"rope_store: q {tuple(q.shape)} {q.dtype} does not fit k {tuple(k.shape)} {k.dtype}"
        )
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    num_tokens, num_heads, head_dim = q.shape
    page_size, kv_heads = kv.shape[3], kv.shape[4]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block_heads = min(next_power_of_2(num_heads), BLOCK_HEADS)
    num_q_blocks = cdiv(num_heads, block_heads)
    plane = page_size * kv_heads * head_dim
    _rope_store_kernel[(num_tokens + 1, num_q_blocks + cdiv(kv_heads, block_heads))](
        q,
        k,
        v,
        cos.contiguous(),
        signed_sin.contiguous(),
        rows.contiguous(),
        out,
        kv,
        num_heads,
        kv_heads,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        num_q_blocks,
        layer * 2 * plane,
        plane,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=next_power_of_2(head_dim),
        num_warps=4,
    )
    return out


def rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Rotate `q` `[T, N, D]` and `k` `[T, K, D]` by `cos`, `signed_sin` `[T, D]` (see `apply_rope`), store the rotated
    keys and `v` `[T, K, D]` of `layer` at `rows` `[T]` (see `store_kv`), return the rotated queries.

    Raises ValueError when tables, shapes or dtypes do not fit.
    """
    if q.is_cuda:
        return rope_store_triton(q, k, v, cos, signed_sin, kv, layer, rows)
    return rope_store_reference(q, k, v, cos, signed_sin, kv, layer, rows)
