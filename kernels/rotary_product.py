"""The projection of a few rows to queries, keys and values, which are rotated and stored in the same launch.

Each program computes dimensions d and d + D/2 of one head, because rotation combines them. In 16 bits the
results are those of `scaled_linear` and `rotate_store`, one after the other.

Legend: T rows, H inputs, N query heads, K key/value heads, D head dimension, L layers.
"""

from __future__ import annotations

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .fp8_scales import to_fp8_tile
from .kv_store import check_kv
from .normed_linear import UnscaledRows, check_rows, scaled_linear, scaled_shape, tile_rows
from .rotate_store import rotate_store
from .row_product import load_squares, row_product, with_bias
from .skinny_linear import MIN_ROWS_TILE, SkinnyShape
from .triton_jit import jit_varying, next_power_of_2, tl


@jit_varying("num_rows", "p_places", "places_stride")
def _rotary_kernel(
    p_x: tl.tensor,
    p_squares: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_places: tl.tensor,
    p_q: tl.tensor,
    p_kv: tl.tensor,
    num_rows: tl.tensor,
    num_squares: tl.tensor,
    in_size: tl.tensor,
    x_stride: tl.tensor,
    places_stride: tl.tensor,
    eps: tl.tensor,
    num_heads: tl.tensor,
    kv_heads: tl.tensor,
    o_layer: tl.tensor,
    o_value: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    wait_for_previous(CHAINED)
    HALF: tl.constexpr = BLOCK_OUT // 2
    TILES: tl.constexpr = HEAD_DIM // BLOCK_OUT
    i_head = tl.program_id(0) // TILES
    first_dim = tl.program_id(0) % TILES * HALF
    i_lane = tl.arange(0, BLOCK_OUT)
    i_out = i_head * HEAD_DIM + first_dim + i_lane % HALF + i_lane // HALF * (HEAD_DIM // 2)
    i_row = tl.arange(0, BLOCK_ROWS)
    m_row = i_row < num_rows
    i_dim = first_dim + tl.arange(0, HALF)
    b_squares = load_squares(p_squares, num_squares, i_row, m_row, True, BLOCK_SQUARES)
    o_table = i_row[None, :] * HEAD_DIM + i_dim[:, None]
    m_table = m_row[None, :]
    b_cos = tl.load(p_cos + o_table, mask=m_table, other=0.0).to(tl.float32)
    b_sin = tl.load(p_sin + o_table, mask=m_table, other=0.0).to(tl.float32)
    b_far_cos = tl.load(p_cos + o_table + HEAD_DIM // 2, mask=m_table, other=0.0).to(tl.float32)
    b_far_sin = tl.load(p_sin + o_table + HEAD_DIM // 2, mask=m_table, other=0.0).to(tl.float32)
    i_place = tl.load(p_places + i_row * places_stride, mask=m_row, other=0)
    b_zero = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    out_size = (num_heads + 2 * kv_heads) * HEAD_DIM
    b_y, _ = row_product(
        p_x, p_weight, i_row, m_row, i_out, i_out < out_size, 0, out_size, in_size, x_stride, 0, b_zero,
        b_zero, False, IS_EVEN, BLOCK_IN, NUM_STAGES,
    )  # fmt: skip
    release_next(CHAINED)
    b_y *= tl.rsqrt(tl.sum(b_squares, axis=1) / in_size + eps)[None, :]
    if HAS_BIAS:
        b_y = with_bias(b_y, p_bias, i_out, i_out < out_size)
    dtype: tl.constexpr = p_q.dtype.element_ty
    b_y = b_y.to(dtype).to(tl.float32)  # rounded as a product that is stored
    b_near, b_far = tl.split(tl.permute(tl.reshape(b_y, (2, HALF, BLOCK_ROWS)), (1, 2, 0)))
    if i_head < num_heads + kv_heads:
        b_rotated = b_near * b_cos + b_far * b_sin
        b_far = b_far * b_far_cos + b_near * b_far_sin
        b_near = b_rotated
    b_near, b_far = b_near.to(dtype), b_far.to(dtype)
    if i_head < num_heads:
        o_q = (i_row.to(tl.int64)[None, :] * num_heads + i_head) * HEAD_DIM + i_dim[:, None]
        tl.store(p_q + o_q, b_near, mask=m_table)
        tl.store(p_q + o_q + HEAD_DIM // 2, b_far, mask=m_table)
    else:
        # padding rows lie in row 0, the sink, and write zeros there, as every program does
        b_kept = tl.where(i_place[None, :] != 0, b_near, 0.0)
        b_far_kept = tl.where(i_place[None, :] != 0, b_far, 0.0)
        if p_kv.dtype.element_ty == tl.float8e4nv:
            b_kept, b_far_kept = to_fp8_tile(b_kept), to_fp8_tile(b_far_kept)
        i_kv_head = i_head - num_heads
        p_mine = p_kv + o_layer + tl.where(i_kv_head < kv_heads, 0, o_value) + i_kv_head % kv_heads * HEAD_DIM
        o_kv = i_place[None, :] * (kv_heads * HEAD_DIM) + i_dim[:, None]
        tl.store(p_mine + o_kv, b_kept, mask=m_table)
        tl.store(p_mine + o_kv + HEAD_DIM // 2, b_far_kept, mask=m_table)
        b_none = tl.zeros((HALF,), dtype=tl.float32).to(p_kv.dtype.element_ty)
        tl.store(p_mine + i_dim, b_none)
        tl.store(p_mine + i_dim + HEAD_DIM // 2, b_none)


def can_rotate(num_rows: int, out_size: int, in_size: int, head_dim: int, rotary_dim: int) -> bool:
    """Whether this kernel projects `num_rows` rows of `in_size` values to `out_size` in heads of `head_dim`,
    of which `rotary_dim` are rotated.
    """
    tile = scaled_shape(num_rows, out_size, in_size, is_gated=False)
    return num_rows <= MIN_ROWS_TILE and rotary_dim == head_dim and head_dim % tile.out == 0


def rotary_product_triton(
    kv: torch.Tensor,
    layer: int,
    places: torch.Tensor,
    rows: UnscaledRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    *,
    shape: SkinnyShape | None = None,
) -> torch.Tensor:
    """Launch; arguments as in `rotary_product`. Raises ValueError as it does."""
    num_heads = _check(kv, places, rows, weight, bias, cos, signed_sin)
    num_rows, in_size = rows.z.shape
    page_size, kv_heads, head_dim = kv.shape[3:]
    tile = shape or scaled_shape(num_rows, weight.shape[0], in_size, is_gated=False)
    if head_dim % tile.out:
        raise ValueError(f"rotary_product: heads of {head_dim} values have no tiles of {tile.out}")
    q = torch.empty((num_rows, num_heads, head_dim), dtype=rows.z.dtype, device=rows.z.device)
    plane = page_size * kv_heads * head_dim
    x = rows.z if rows.z.stride(1) == 1 else rows.z.contiguous()
    _rotary_kernel[(weight.shape[0] // tile.out,)](
        x,
        rows.squares,
        weight,
        weight if bias is None else bias,
        cos.contiguous(),
        signed_sin.contiguous(),
        places,
        q,
        kv,
        num_rows,
        rows.squares.shape[1],
        in_size,
        x.stride(0),
        places.stride(0),
        rows.eps,
        num_heads,
        kv_heads,
        layer * 2 * plane,
        plane,
        HAS_BIAS=bias is not None,
        IS_EVEN=in_size % tile.inner == 0,
        HEAD_DIM=head_dim,
        BLOCK_SQUARES=next_power_of_2(rows.squares.shape[1]),
        BLOCK_OUT=tile.out,
        BLOCK_IN=tile.inner,
        BLOCK_ROWS=tile_rows(num_rows),
        NUM_STAGES=tile.num_stages,
        **chained(x.device),
        num_warps=tile.num_warps,
    )
    return q


def _check(
    kv: torch.Tensor,
    places: torch.Tensor,
    rows: UnscaledRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
) -> int:
    """N. Raises ValueError if shapes or dtypes do not fit."""
    check_rows(rows.z, weight, bias)
    num_rows, kv_heads, head_dim = rows.z.shape[0], *kv.shape[4:]
    num_heads = weight.shape[0] // head_dim - 2 * kv_heads
    is_whole = num_heads > 0 and weight.shape[0] % head_dim == 0 and places.dtype == torch.int64
    if not is_whole or cos.shape != (num_rows, head_dim) or signed_sin.shape != cos.shape or num_rows == 0:
        raise ValueError(
            f"rotary_product: {num_rows} rows, {weight.shape[0]} outputs, tables {tuple(cos.shape)} and "
            f"places {places.dtype} do not fit a pool of {kv_heads} heads x {head_dim}; expected rows, "
            "(N + 2*K) * D, [T, D] and int64"
        )
    keys = rows.z[:, :1, None].expand(-1, kv_heads, head_dim)  # shape and dtype of what will be stored
    check_kv(kv, places, keys, keys)
    return num_heads


def rotary_product(
    kv: torch.Tensor,
    layer: int,
    places: torch.Tensor,
    rows: UnscaledRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
) -> torch.Tensor:
    """Projects `rows` of H values by `weight` `[(N + 2*K) * D, H]` and `bias` (None or its length), rotates
    and stores as `rotate_store` does, and returns the rotated queries `[T, N, D]`.

    `kv`, `places` int64 `[T]` and the tables `[T, D]` are those of `rotate_store`. There is at least one row.
    Raises ValueError if shapes or dtypes do not fit, and on a GPU if the tiles do not divide a head (see
    `can_rotate`).
    """
    if rows.z.is_cuda:
        return rotary_product_triton(kv, layer, places, rows, weight, bias, cos, signed_sin)
    _check(kv, places, rows, weight, bias, cos, signed_sin)
    heads = scaled_linear(rows, weight, bias).view(rows.z.shape[0], -1, kv.shape[5])
    return rotate_store(kv, layer, places, heads, cos, signed_sin)
