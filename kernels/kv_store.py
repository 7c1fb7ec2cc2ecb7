"""Write new keys and values into the page-major pool.

The pool is `[num_pages, L, 2, page_size, N, D]`, contiguous, seen here as rows of N*D values. Slot = page *
page_size + offset. The K row of slot s in layer 0 is `kv_rows(s)`. The next layer lies 2*page_size rows
further, V lies page_size rows behind K. Slot 0 is the sink of padding rows and always reads as zeros. Pools
of one plane are those of `latent_store`.
"""

from __future__ import annotations

import torch

from .fp8_scales import FP8, raw, to_fp8, to_fp8_tile
from .triton_jit import cdiv, jit_varying, next_power_of_2, tl

# Values of one program's tile.
TILE = 2048


def kv_rows(slots: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Row numbers in `kv.view(-1, N*D)` of the first plane of layer 0 at `slots`: int64, the shape of
    `slots`.
    """
    num_layers, num_planes, page_size = kv.shape[1:4]
    pages = torch.div(slots, page_size, rounding_mode="floor")
    return pages * (num_layers * num_planes * page_size) + slots % page_size


@jit_varying("p_rows")
def _store_kv_kernel(
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_rows: tl.tensor,
    p_kv: tl.tensor,
    num_heads: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_head_stride: tl.tensor,
    o_layer: tl.tensor,
    o_value: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    # program 0 has no token: it reads row 0 and zeros, and so clears the sink
    i_token = tl.program_id(0).to(tl.int64) - 1
    i_head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    i_dim = tl.arange(0, BLOCK_DIM)
    m_tile = (i_head < num_heads)[:, None] & (i_dim < HEAD_DIM)[None, :]
    m_token = i_token >= 0
    i_row = tl.load(p_rows + i_token, mask=m_token, other=0)
    o_k = i_token * k_stride + i_head[:, None] * k_head_stride + i_dim[None, :]
    o_v = i_token * v_stride + i_head[:, None] * v_head_stride + i_dim[None, :]
    b_k = tl.load(p_k + o_k, mask=m_tile & m_token, other=0.0)
    b_v = tl.load(p_v + o_v, mask=m_tile & m_token, other=0.0)
    # all padding rows write the same zeros to row 0, so their order does not matter
    is_real = i_row != 0
    o_kv = (i_row * num_heads + i_head[:, None]) * HEAD_DIM + i_dim[None, :] + o_layer
    b_k, b_v = tl.where(is_real, b_k, 0.0), tl.where(is_real, b_v, 0.0)
    if p_kv.dtype.element_ty == tl.float8e4nv:
        b_k, b_v = to_fp8_tile(b_k), to_fp8_tile(b_v)
    tl.store(p_kv + o_kv, b_k, mask=m_tile)
    tl.store(p_kv + o_kv + o_value, b_v, mask=m_tile)


def store_kv_triton(
    kv: torch.Tensor, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Launch on `kv` `[num_pages, L, 2, page_size, N, D]`, `rows` int64 `[T]` and `k`, `v` `[T, N, D]`.

    Raises ValueError if shapes or dtypes do not fit the pool.
    """
    check_kv(kv, rows, k, v)
    page_size, num_heads, head_dim = kv.shape[3:]
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    block_dim = next_power_of_2(head_dim)
    block_heads = min(next_power_of_2(num_heads), max(TILE // block_dim, 1))
    plane = page_size * num_heads * head_dim
    _store_kv_kernel[(rows.shape[0] + 1, cdiv(num_heads, block_heads))](
        k,
        v,
        rows.contiguous(),
        kv,
        num_heads,
        k.stride(0),
        v.stride(0),
        k.stride(1),
        v.stride(1),
        layer * 2 * plane,
        plane,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=block_dim,
        num_warps=4,
    )


def check_kv(kv: torch.Tensor, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises ValueError unless `k`, `v` are `[T, N, D]` in the pool's sizes and dtype, with one of `rows`
    `[T]` each. A pool of e4m3 takes any dtype.
    """
    wanted = k.dtype if kv.dtype == FP8 else kv.dtype
    if (
        k.shape != v.shape
        or k.shape != (rows.shape[0], *kv.shape[4:])
        or k.dtype != wanted
        or v.dtype != wanted
    ):
        raise ValueError(
            f"store_kv: k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype} for {rows.shape[0]} rows "
            f"do not fit a pool of {kv.shape[4]} heads x {kv.shape[5]} {kv.dtype}"
        )


def store_kv(kv: torch.Tensor, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store `k`, `v` `[T, N, D]` of `layer` at `rows` int64 `[T]` (from `kv_rows`), then clear the sink.

    Clearing prevents later reads of a padding row's values, NaN included. A pool of e4m3 gets the nearest
    values, beyond the largest one the largest. Raises ValueError if shapes or dtypes do not fit the pool.
    """
    if kv.is_cuda:
        store_kv_triton(kv, layer, rows, k, v)
        return
    check_kv(kv, rows, k, v)
    page_size, width = kv.shape[3], kv.shape[4] * kv.shape[5]
    flat = raw(kv.view(-1, width))
    key_rows = rows + layer * 2 * page_size
    if kv.dtype == FP8:
        k, v = raw(to_fp8(k)), raw(to_fp8(v))
    flat.index_copy_(0, key_rows, k.reshape(-1, width))
    flat.index_copy_(0, key_rows + page_size, v.reshape(-1, width))
    kv[0, layer, :, 0].zero_()
