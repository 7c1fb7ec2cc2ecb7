"""Rotates new queries and keys, and writes new keys and values into the page-major pool, in one launch.

The input is the merged projection of a layer: the heads of the queries, then those of the keys, then those of
the values. Queries and keys may be normalised before, each head by itself, with the rounding of `rms_norm`.
Rotation is that of `rope`, the pool and its rows are those of `kv_store`.

Legend: T tokens, N query heads, K key/value heads, D head dimension, R rotated dimensions, L layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .fp8_scales import to_fp8_tile
from .kv_store import check_kv, store_kv
from .rms_norm import rms_norm
from .rope import apply_rope, check_tables
from .triton_jit import cdiv, jit_varying, next_power_of_2, tl

BLOCK_HEADS = 16  # heads of one program's tile


class HeadNorms(NamedTuple):
    """The weights `[D]` of the norms of queries and keys; `offset` as in `rms_norm`."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float
    offset: float | None = None


@jit_varying("p_rows", "rows_stride")
def _rotate_store_kernel(
    p_heads: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_rows: tl.tensor,
    p_q_norm: tl.tensor,
    p_k_norm: tl.tensor,
    p_q: tl.tensor,
    p_kv: tl.tensor,
    eps: tl.tensor,
    num_heads: tl.tensor,
    kv_heads: tl.tensor,
    token_stride: tl.tensor,
    rows_stride: tl.tensor,
    o_layer: tl.tensor,
    o_value: tl.tensor,
    HAS_NORMS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    OFFSET: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program 0 has no token: it reads row 0 and zeros, and so clears the sink
    wait_for_previous(CHAINED)
    i_token = tl.program_id(0).to(tl.int64) - 1
    m_token = i_token >= 0
    i_head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    i_dim = tl.arange(0, BLOCK_DIM)
    m_dim = i_dim < HEAD_DIM
    m_tile = (i_head < num_heads + 2 * kv_heads)[:, None] & m_dim[None, :]
    p_head = p_heads + i_token * token_stride + i_head[:, None] * HEAD_DIM
    b_x = tl.load(p_head + i_dim[None, :], mask=m_tile & m_token, other=0.0)
    is_rotated = i_head < num_heads + kv_heads
    i_paired = tl.where(i_dim < ROTARY_DIM, (i_dim + ROTARY_DIM // 2) % ROTARY_DIM, i_dim)
    m_table = (i_dim < ROTARY_DIM) & m_token
    b_paired = tl.load(p_head + i_paired[None, :], mask=m_tile & is_rotated[:, None] & m_token, other=0.0)
    b_cos = tl.load(p_cos + i_token * ROTARY_DIM + i_dim, mask=m_table, other=1.0).to(tl.float32)
    b_sin = tl.load(p_sin + i_token * ROTARY_DIM + i_dim, mask=m_table, other=0.0).to(tl.float32)
    i_row = tl.load(p_rows + i_token * rows_stride, mask=m_token, other=0)
    b_wide, b_other = b_x.to(tl.float32), b_paired.to(tl.float32)
    if HAS_NORMS:
        b_scale = tl.rsqrt(tl.sum(b_wide * b_wide, axis=1) / HEAD_DIM + eps)[:, None]
        is_query = (i_head < num_heads)[:, None]
        b_weight = tl.where(is_query, tl.load(p_q_norm + i_dim, mask=m_dim, other=0.0)[None, :],
                            tl.load(p_k_norm + i_dim, mask=m_dim, other=0.0)[None, :])  # fmt: skip
        b_paired = tl.where(is_query, tl.load(p_q_norm + i_paired, mask=m_dim, other=0.0)[None, :],
                            tl.load(p_k_norm + i_paired, mask=m_dim, other=0.0)[None, :])  # fmt: skip
        b_weight, b_paired = b_weight.to(tl.float32), b_paired.to(tl.float32)
        b_wide, b_other = b_wide * b_scale, b_other * b_scale
        if HAS_OFFSET:
            b_weight, b_paired = b_weight + OFFSET, b_paired + OFFSET
        else:
            b_wide = b_wide.to(p_q.dtype.element_ty).to(tl.float32)
            b_other = b_other.to(p_q.dtype.element_ty).to(tl.float32)
        b_wide = (b_wide * b_weight).to(p_q.dtype.element_ty).to(tl.float32)
        b_other = (b_other * b_paired).to(p_q.dtype.element_ty).to(tl.float32)
    b_rotated = b_wide * b_cos[None, :] + b_other * b_sin[None, :]
    b_y = tl.where(is_rotated[:, None], b_rotated.to(p_q.dtype.element_ty), b_x)
    release_next(CHAINED)
    o_q = (i_token * num_heads + i_head[:, None]) * HEAD_DIM + i_dim[None, :]
    tl.store(p_q + o_q, b_y, mask=m_tile & (i_head < num_heads)[:, None] & m_token)
    # all padding rows write the same zeros to row 0, so their order does not matter
    b_y = tl.where(i_row != 0, b_y, 0.0)
    if p_kv.dtype.element_ty == tl.float8e4nv:
        b_y = to_fp8_tile(b_y)
    i_kv_head = i_head - num_heads
    o_plane = tl.where(i_kv_head < kv_heads, 0, o_value) + o_layer
    o_kv = (i_row * kv_heads + i_kv_head % kv_heads) * HEAD_DIM + o_plane
    tl.store(p_kv + o_kv[:, None] + i_dim[None, :], b_y, mask=m_tile & (i_kv_head >= 0)[:, None])


def rotate_store_triton(
    kv: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
    heads: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    norms: HeadNorms | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch with the arguments of `rotate_store`. Raises ValueError if shapes or dtypes do not fit."""
    num_heads = _check(kv, rows, heads, cos, signed_sin, out)
    num_tokens, width, head_dim = heads.shape
    page_size, kv_heads = kv.shape[3:5]
    heads = heads if heads.stride()[1:] == (head_dim, 1) else heads.contiguous()
    q = out
    if q is None:
        q = torch.empty((num_tokens, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    plane = page_size * kv_heads * head_dim
    _rotate_store_kernel[(num_tokens + 1, cdiv(width, BLOCK_HEADS))](
        heads,
        cos.contiguous(),
        signed_sin.contiguous(),
        rows,
        heads if norms is None else norms.q,
        heads if norms is None else norms.k,
        q,
        kv,
        0.0 if norms is None else norms.eps,
        num_heads,
        kv_heads,
        heads.stride(0),
        rows.stride(0),
        layer * 2 * plane,
        plane,
        HAS_NORMS=norms is not None,
        HAS_OFFSET=norms is not None and norms.offset is not None,
        OFFSET=0.0 if norms is None else norms.offset or 0.0,
        ROTARY_DIM=cos.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_HEADS=BLOCK_HEADS,
        BLOCK_DIM=next_power_of_2(head_dim),
        **chained(heads.device),
        num_warps=4,
    )
    return q


def _check(
    kv: torch.Tensor,
    rows: torch.Tensor,
    heads: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    out: torch.Tensor | None,
) -> int:
    """The number of query heads. Raises ValueError if shapes or dtypes do not fit."""
    kv_heads = kv.shape[4]
    num_heads = heads.shape[1] - 2 * kv_heads
    check_tables(heads, cos, signed_sin)
    check_kv(kv, rows, heads[:, num_heads : num_heads + kv_heads], heads[:, num_heads + kv_heads :])
    wanted = heads.shape[0], num_heads, heads.shape[2]
    if out is not None and not (out.shape == wanted and out.dtype == heads.dtype and out.is_contiguous()):
        raise ValueError(
            f"rotate_store: out {tuple(out.shape)} {out.dtype}, strides {out.stride()}; expected contiguous "
            f"{wanted} {heads.dtype}"
        )
    return num_heads


def rotate_store(
    kv: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
    heads: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    norms: HeadNorms | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotates and stores `heads` `[T, N+2K, D]`, behind `norms`; returns the rotated queries `[T, N, D]`, in
    `out` if there is one.

    `kv` `[num_pages, L, 2, page_size, K, D]`: keys and values of `layer` go to `rows` int64 `[T]` (from
    `kv_rows`), and the sink is cleared. `cos` and `signed_sin` `[T, R]` are those of `apply_rope`. Raises
    ValueError if shapes or dtypes do not fit.
    """
    if heads.is_cuda:
        return rotate_store_triton(kv, layer, rows, heads, cos, signed_sin, norms, out)
    num_heads = _check(kv, rows, heads, cos, signed_sin, out)
    split = num_heads + kv.shape[4]
    turning = heads[:, :split]
    if norms is not None:
        parts = (turning[:, :num_heads], norms.q), (turning[:, num_heads:], norms.k)
        turning = torch.cat(
            [rms_norm(part, weight, norms.eps, norms.offset) for part, weight in parts], dim=1
        )
    rotated = apply_rope(turning, cos, signed_sin)
    store_kv(kv, layer, rows, rotated[:, num_heads:], heads[:, split:])
    q = rotated[:, :num_heads]
    return q if out is None else out.copy_(q)
