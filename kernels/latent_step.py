"""Attention of a decode or verify step over latents in three launches.

The first rotates queries and keys, stores the new latents, and takes queries to latents; the second attends
to splits of the context, as in `latent_attention`; the third merges the splits and takes sums of latents to
values. Rounding is that of `latent_store`, `rms_norm`, `rope`, `absorb` and `project_values`.

Legend: B requests, Q new rows of a request, T = B*Q tokens, N heads, R rank of the latents, P width of the
rotated key, F and V widths of a head's key and value that are made of the latent, S splits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .latent_attention import (
    MIN_SPLIT,
    absorb,
    choose_splits,
    latent_splits_triton,
    latent_tile,
    latent_verify_reference,
    project_values,
)
from .latent_store import is_latent, store_latent
from .rms_norm import rms_norm
from .rope import apply_rope
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl


class LatentSizes(NamedTuple):
    """F, P, V and R of a model, and whether neighbours are rotated together, otherwise halves."""

    key: int
    rope: int
    value: int
    rank: int
    is_interleaved: bool


class LatentRows(NamedTuple):
    """New rows: `queries` `[T, N*(F+P)]`, and `latent` `[T, R+P]`, the latent and the key in front of norm
    and rotation; the weights `norm` `[R]` of the latents' norm; rotary tables `[T, P]`.
    """

    queries: torch.Tensor
    latent: torch.Tensor
    norm: torch.Tensor
    eps: float
    cos: torch.Tensor
    signed_sin: torch.Tensor


def prepare_latents_reference(
    kv: torch.Tensor, layer: int, slots: torch.Tensor, rows: LatentRows, up: torch.Tensor, sizes: LatentSizes
) -> torch.Tensor:
    """The definition and the CPU path."""
    num_tokens, num_heads = rows.queries.shape[0], up.shape[0]
    q = rows.queries.reshape(num_tokens, num_heads, sizes.key + sizes.rope)
    turning = torch.cat((q[..., sizes.key :], rows.latent[:, None, sizes.rank :]), dim=1)
    if sizes.is_interleaved:
        turning = turning.view(*turning.shape[:2], -1, 2).transpose(-1, -2).flatten(-2)
    turned = apply_rope(turning, rows.cos, rows.signed_sin)
    q = torch.cat((q[..., : sizes.key], turned[:, :-1]), dim=-1)
    normed = rms_norm(rows.latent[:, : sizes.rank], rows.norm, rows.eps)
    store_latent(kv, layer, slots, torch.cat((normed[:, None], turned[:, -1:]), dim=-1))
    return absorb(q, up, sizes.rope)


@jit
def _turned(
    p_x: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    IS_INTERLEAVED: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
) -> tl.tensor:
    """The values `[P]` at `p_x`, rotated, with the rounding of `rope`."""
    i_dim = tl.arange(0, BLOCK_ROPE)
    m_dim = i_dim < ROPE
    i_paired = (i_dim + ROPE // 2) % ROPE
    i_own, i_other = i_dim, i_paired
    if IS_INTERLEAVED:
        i_own = i_dim % (ROPE // 2) * 2 + i_dim // (ROPE // 2)
        i_other = i_paired % (ROPE // 2) * 2 + i_paired // (ROPE // 2)
    b_x = tl.load(p_x + i_own, mask=m_dim, other=0.0).to(tl.float32)
    b_other = tl.load(p_x + i_other, mask=m_dim, other=0.0).to(tl.float32)
    b_cos = tl.load(p_cos + i_dim, mask=m_dim, other=0.0).to(tl.float32)
    b_sin = tl.load(p_sin + i_dim, mask=m_dim, other=0.0).to(tl.float32)
    return b_x * b_cos + b_other * b_sin


@jit_varying("p_rows")
def _prepare_kernel(
    p_queries: tl.tensor,
    p_latent: tl.tensor,
    p_norm: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_rows: tl.tensor,
    p_up: tl.tensor,
    p_q: tl.tensor,
    p_kv: tl.tensor,
    eps: tl.tensor,
    query_stride: tl.tensor,
    latent_stride: tl.tensor,
    o_layer: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (part of the rank, head, token); the head behind the last stores the latent
    wait_for_previous(CHAINED)
    i_part = tl.program_id(0)
    i_head = tl.program_id(1)
    i_token = tl.program_id(2).to(tl.int64)
    i_rope = tl.arange(0, BLOCK_ROPE)
    m_rope = i_rope < ROPE
    p_own_cos, p_own_sin = p_cos + i_token * ROPE, p_sin + i_token * ROPE
    dtype: tl.constexpr = p_q.dtype.element_ty
    if i_head == NUM_HEADS:
        if i_part == 0:
            i_rank = tl.arange(0, BLOCK_RANK)
            m_rank = i_rank < RANK
            p_own = p_latent + i_token * latent_stride
            i_slot = tl.load(p_rows + i_token)
            b_wide = tl.load(p_own + i_rank, mask=m_rank, other=0.0).to(tl.float32)
            b_weight = tl.load(p_norm + i_rank, mask=m_rank, other=0.0).to(tl.float32)
            b_normed = (b_wide * tl.rsqrt(tl.sum(b_wide * b_wide) / RANK + eps)).to(dtype).to(tl.float32)
            b_latent = (b_normed * b_weight).to(dtype)
            b_key = _turned(p_own + RANK, p_own_cos, p_own_sin, IS_INTERLEAVED, ROPE, BLOCK_ROPE).to(dtype)
            # padding rows write zeros to row 0, the sink, so their order does not matter
            p_stored = p_kv + o_layer + i_slot * (RANK + ROPE)
            tl.store(p_stored + i_rank, tl.where(i_slot != 0, b_latent, 0.0), mask=m_rank)
            tl.store(p_stored + RANK + i_rope, tl.where(i_slot != 0, b_key, 0.0), mask=m_rope)
    else:
        p_own = p_queries + i_token * query_stride + i_head * (KEY + ROPE)
        p_out = p_q + (i_token * NUM_HEADS + i_head) * (RANK + ROPE)
        i_key = tl.arange(0, BLOCK_KEY)
        i_rank = i_part * BLOCK_PART + tl.arange(0, BLOCK_PART)
        m_key = i_key < KEY
        m_rank = i_rank < RANK
        b_q = tl.load(p_own + i_key, mask=m_key, other=0.0).to(tl.float32)
        o_up = (i_head * (KEY + VALUE) + i_key[:, None]) * RANK + i_rank[None, :]
        b_up = tl.load(p_up + o_up, mask=m_key[:, None] & m_rank[None, :], other=0.0).to(tl.float32)
        b_made = tl.sum(b_q[:, None] * b_up, axis=0)
        tl.store(p_out + i_rank, b_made.to(dtype), mask=m_rank)
        if i_part == 0:
            b_turned = _turned(p_own + KEY, p_own_cos, p_own_sin, IS_INTERLEAVED, ROPE, BLOCK_ROPE)
            tl.store(p_out + RANK + i_rope, b_turned.to(dtype), mask=m_rope)


def prepare_latents_triton(
    kv: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    rows: LatentRows,
    up: torch.Tensor,
    sizes: LatentSizes,
    *,
    part: int = 64,
    num_warps: int = 4,
) -> torch.Tensor:
    """Launch; arguments as in `prepare_latents`."""
    num_tokens, num_heads = _check(kv, slots, rows, up, sizes)
    queries = rows.queries if rows.queries.stride(1) == 1 else rows.queries.contiguous()
    latent = rows.latent if rows.latent.stride(1) == 1 else rows.latent.contiguous()
    q = torch.empty(
        num_tokens, num_heads, sizes.rank + sizes.rope, dtype=queries.dtype, device=queries.device
    )
    if num_tokens == 0:
        return q
    _prepare_kernel[(cdiv(sizes.rank, part), num_heads + 1, num_tokens)](
        queries,
        latent,
        rows.norm,
        rows.cos.contiguous(),
        rows.signed_sin.contiguous(),
        slots.contiguous(),
        up,
        q,
        kv,
        rows.eps,
        queries.stride(0),
        latent.stride(0),
        layer * kv.shape[3] * kv.shape[-1],
        NUM_HEADS=num_heads,
        KEY=sizes.key,
        VALUE=sizes.value,
        ROPE=sizes.rope,
        RANK=sizes.rank,
        IS_INTERLEAVED=sizes.is_interleaved,
        BLOCK_KEY=next_power_of_2(sizes.key),
        BLOCK_ROPE=next_power_of_2(sizes.rope),
        BLOCK_RANK=next_power_of_2(sizes.rank),
        BLOCK_PART=part,
        **chained(queries.device),
        num_warps=num_warps,
    )
    return q


def prepare_latents(
    kv: torch.Tensor, layer: int, slots: torch.Tensor, rows: LatentRows, up: torch.Tensor, sizes: LatentSizes
) -> torch.Tensor:
    """Normalises and stores the new latents of `layer` at `slots` int64 `[T]` (from `kv_rows`), and takes the
    queries, rotated, to latents by `up` `[N, F+V, R]`: `[T, N, R+P]`.

    Raises ValueError if shapes do not fit.
    """
    if rows.queries.is_cuda:
        return prepare_latents_triton(kv, layer, slots, rows, up, sizes)
    _check(kv, slots, rows, up, sizes)
    return prepare_latents_reference(kv, layer, slots, rows, up, sizes)


def _check(
    kv: torch.Tensor, slots: torch.Tensor, rows: LatentRows, up: torch.Tensor, sizes: LatentSizes
) -> tuple[int, int]:
    """(T, N). Raises ValueError if shapes do not fit."""
    num_tokens, num_heads = rows.latent.shape[0], up.shape[0]
    width = sizes.rank + sizes.rope
    fits = (
        is_latent(kv)
        and kv.shape[-1] == width
        and rows.latent.shape == (num_tokens, width)
        and rows.queries.shape == (num_tokens, num_heads * (sizes.key + sizes.rope))
        and up.shape[1:] == (sizes.key + sizes.value, sizes.rank)
        and slots.shape == (num_tokens,)
    )
    if not fits or kv.dtype != rows.queries.dtype:
        raise ValueError(
            f"prepare_latents: queries {tuple(rows.queries.shape)} {rows.queries.dtype}, latents "
            f"{tuple(rows.latent.shape)}, projection {tuple(up.shape)} and {slots.shape[0]} slots do not fit "
            f"a pool {tuple(kv.shape)} {kv.dtype} and {sizes}"
        )
    return num_tokens, num_heads


@jit
def _merged_splits(
    p_partial: tl.tensor,
    p_lse: tl.tensor,
    o_flat: tl.tensor,
    num_used: tl.tensor,
    num_flat: tl.tensor,
    RANK: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
) -> tl.tensor:
    """The rows `o_flat` `[M]` of the first `num_used` splits, weighted by their shares of the denominators:
    float32 `[M, R]`.
    """
    i_rank = tl.arange(0, BLOCK_RANK)
    b_max = tl.full(o_flat.shape, float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros(o_flat.shape, dtype=tl.float32)
    b_out = tl.zeros((o_flat.shape[0], BLOCK_RANK), dtype=tl.float32)
    for first in range(0, num_used, BLOCK_SPLITS):
        i_split = first + tl.arange(0, BLOCK_SPLITS)
        m_used = (i_split < num_used)[:, None]
        o_split = i_split[:, None] * num_flat + o_flat.to(tl.int32)[None, :]
        b_lse = tl.load(p_lse + o_split, mask=m_used, other=float("-inf"))
        o_part = o_split[:, :, None] * RANK + i_rank[None, None, :]
        m_part = m_used[:, :, None] & (i_rank < RANK)[None, None, :]
        b_part = tl.load(p_partial + o_part, mask=m_part, other=0.0)
        b_new_max = tl.maximum(b_max, tl.max(b_lse, axis=0))
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_weight = tl.exp2(b_lse - b_shift[None, :])
        # a split in which a row sees nothing may hold anything for it
        b_part = tl.where((b_weight > 0.0)[:, :, None], b_part, 0.0) * b_weight[:, :, None]
        b_rescale = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_rescale + tl.sum(b_weight, axis=0)
        b_out = b_out * b_rescale[:, None] + tl.sum(b_part, axis=0)
        b_max = b_new_max
    return b_out / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]


@jit_varying("num_splits", "num_flat", "num_rows", "p_kv_lens")
def _values_kernel(
    p_partial: tl.tensor,
    p_lse: tl.tensor,
    p_up: tl.tensor,
    p_kv_lens: tl.tensor,
    p_out: tl.tensor,
    num_splits: tl.tensor,
    num_flat: tl.tensor,
    num_rows: tl.tensor,
    MIN_SPLIT: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (part of the values, head, token)
    wait_for_previous(CHAINED)
    i_head = tl.program_id(1)
    i_token = tl.program_id(2).to(tl.int64)
    i_value = tl.program_id(0) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    i_rank = tl.arange(0, BLOCK_RANK)
    m_value = i_value < VALUE
    o_up = (i_head * (KEY + VALUE) + KEY + i_value[:, None]) * RANK + i_rank[None, :]
    b_up = tl.load(p_up + o_up, mask=m_value[:, None] & (i_rank < RANK)[None, :], other=0.0)
    # the splits as `latent_attention` cuts them
    kv_len = tl.load(p_kv_lens + i_token // num_rows).to(tl.int32)
    split_len = tl.cdiv(tl.maximum(tl.cdiv(kv_len, num_splits), MIN_SPLIT), BLOCK_COLUMNS) * BLOCK_COLUMNS
    o_flat = i_token * NUM_HEADS + i_head + tl.zeros((1,), dtype=tl.int64)
    b_sum = _merged_splits(
        p_partial, p_lse, o_flat, tl.cdiv(kv_len, split_len), num_flat, RANK, BLOCK_SPLITS, BLOCK_RANK
    )
    release_next(CHAINED)
    dtype: tl.constexpr = p_out.dtype.element_ty
    b_values = tl.sum(b_up.to(tl.float32) * b_sum.to(dtype).to(tl.float32), axis=1)
    tl.store(p_out + (i_token * NUM_HEADS + i_head) * VALUE + i_value, b_values.to(dtype), mask=m_value)


def attend_latents_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    up: torch.Tensor,
    sizes: LatentSizes,
    tree_mask: torch.Tensor | None = None,
    *,
    num_splits: int = 0,
    min_split: int = MIN_SPLIT,
    part: int = 32,
    num_warps: int = 4,
) -> torch.Tensor:
    """Launch; arguments as in `attend_latents`."""
    num_tokens, num_heads, _ = q.shape
    num_requests = page_table.shape[0]
    out = torch.empty(num_tokens, num_heads, sizes.value, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    num_rows = num_tokens // num_requests
    tile = latent_tile(q.dtype, num_rows * num_heads)
    capacity = page_table.shape[1] * kv.shape[3]
    splits = num_splits or max(
        2, choose_splits(cdiv(num_rows * num_heads, tile.rows) * num_requests, capacity)
    )
    grouped = q.view(num_requests, num_rows, *q.shape[1:])
    partial, lse = latent_splits_triton(
        grouped, kv, layer, page_table, kv_lens, scale, sizes.rank, tree_mask, splits, min_split
    )
    block_rank = next_power_of_2(sizes.rank)
    _values_kernel[(cdiv(sizes.value, part), num_heads, num_tokens)](
        partial,
        lse,
        up,
        kv_lens,
        out,
        splits,
        num_tokens * num_heads,
        num_rows,
        MIN_SPLIT=min_split,
        BLOCK_COLUMNS=tile.columns,
        NUM_HEADS=num_heads,
        KEY=sizes.key,
        VALUE=sizes.value,
        RANK=sizes.rank,
        BLOCK_SPLITS=max(1, 8192 // block_rank),
        BLOCK_RANK=block_rank,
        BLOCK_VALUE=part,
        **chained(q.device),
        num_warps=num_warps,
    )
    return out


def attend_latents(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    up: torch.Tensor,
    sizes: LatentSizes,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends with `q` `[T, N, R+P]` of `prepare_latents` as `latent_verify`, and takes the sums of latents
    to values: `[T, N, V]`. Raises ValueError if shapes or dtypes do not fit.
    """
    if q.is_cuda:
        return attend_latents_triton(q, kv, layer, page_table, kv_lens, scale, up, sizes, tree_mask)
    grouped = q.view(page_table.shape[0], -1, *q.shape[1:])
    found = latent_verify_reference(grouped, kv, layer, page_table, kv_lens, scale, sizes.rank, tree_mask)
    return project_values(found.flatten(0, 1), up, sizes.value)
