"""Rotary position embedding (Su et al., "RoFormer", 2021), neox pairing: dimension d is rotated with d + R/2.

Legend: T tokens, N heads, D head dimension, R rotated dimensions, the first ones of a head; mostly R = D.
"""

from __future__ import annotations

import torch

from .triton_jit import cdiv, jit, next_power_of_2, tl

# Heads of one program's tile.
BLOCK_HEADS = 16


def rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The definition, with half-wide unsigned `cos`, `sin` `[T, R/2]`: `x` `[T, N, D]` -> `[T, N, D]`."""
    first, second, rest = x.tensor_split((cos.shape[-1], 2 * cos.shape[-1]), dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@jit
def rotated_tile(
    p_x: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    i_token: tl.tensor,
    m_token: tl.tensor,
    i_head: tl.tensor,
    m_head: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """Heads `i_head` of token `i_token` after rotation, float32 `[BLOCK_HEADS, BLOCK_DIM]`, masked: 0."""
    i_dim = tl.arange(0, BLOCK_DIM)
    m_dim = i_dim < HEAD_DIM
    m_tile = m_head[:, None] & m_dim[None, :] & m_token
    m_table = (i_dim < ROTARY_DIM) & m_token
    p_head = p_x + i_token * token_stride + i_head[:, None] * head_stride
    b_x = tl.load(p_head + i_dim[None, :], mask=m_tile, other=0.0).to(tl.float32)
    i_paired = tl.where(i_dim < ROTARY_DIM, (i_dim + ROTARY_DIM // 2) % ROTARY_DIM, i_dim)
    b_paired = tl.load(p_head + i_paired[None, :], mask=m_tile, other=0.0).to(tl.float32)
    b_cos = tl.load(p_cos + i_token * ROTARY_DIM + i_dim, mask=m_table, other=1.0).to(tl.float32)
    b_sin = tl.load(p_sin + i_token * ROTARY_DIM + i_dim, mask=m_table, other=0.0).to(tl.float32)
    return b_x * b_cos[None, :] + b_paired * b_sin[None, :]


@jit
def _rope_kernel(
    p_x: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_y: tl.tensor,
    num_heads: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    m_head = i_head < num_heads
    b_y = rotated_tile(
        p_x,
        p_cos,
        p_sin,
        i_token,
        i_token >= 0,
        i_head,
        m_head,
        token_stride,
        head_stride,
        ROTARY_DIM,
        HEAD_DIM,
        BLOCK_DIM,
    )
    i_dim = tl.arange(0, BLOCK_DIM)
    o_y = (i_token * num_heads + i_head[:, None]) * HEAD_DIM + i_dim[None, :]
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_head[:, None] & (i_dim < HEAD_DIM)[None, :])


def apply_rope_triton(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Launch on `x` `[T, N, D]` (last dimension contiguous) and `cos`, `signed_sin` `[T, R]`; returns
    `[T, N, D]`.

    Computed in float32 and rounded once. Raises ValueError if the tables do not fit the rows.
    """
    check_tables(x, cos, signed_sin)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_tokens, num_heads, head_dim = x.shape
    block_heads = min(next_power_of_2(num_heads), BLOCK_HEADS)
    _rope_kernel[(num_tokens, cdiv(num_heads, block_heads))](
        x,
        cos.contiguous(),
        signed_sin.contiguous(),
        y,
        num_heads,
        x.stride(0),
        x.stride(1),
        ROTARY_DIM=cos.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=next_power_of_2(head_dim),
        num_warps=4,
    )
    return y


def check_tables(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """Raises ValueError unless both tables are `[T, R]`, R even and at most D, for `x` `[T, N, D]`."""
    fits = cos.dim() == 2 and cos.shape[0] == x.shape[0] and cos.shape[1] <= x.shape[2]
    if not fits or cos.shape[1] % 2 or signed_sin.shape != cos.shape:
        raise ValueError(
            f"apply_rope: tables {tuple(cos.shape)} and {tuple(signed_sin.shape)} do not fit x "
            f"{tuple(x.shape)}; "
            "expected [T, R]"
        )


def apply_rope(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` `[T, N, D]` by `cos` `[T, R]` and `signed_sin` `[T, R]`, the sine with a negated first half.

    With the sign in the table, the half rotation is a plain roll: three operations instead of seven. Raises
    ValueError if the tables do not fit the rows.
    """
    if x.is_cuda:
        return apply_rope_triton(x, cos, signed_sin)
    check_tables(x, cos, signed_sin)
    width = cos.shape[1]
    part = x if width == x.shape[-1] else x[..., :width]
    turned = torch.addcmul(part * cos.unsqueeze(1), part.roll(width // 2, dims=-1), signed_sin.unsqueeze(1))
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)
