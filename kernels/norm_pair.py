"""Two RMSNorms side by side: the input of a layer that reads a pair of rows.

The rounding is that of `rms_norm` without an offset. Legend: T rows, W width of either half.
"""

from __future__ import annotations

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .rms_norm import TILE, NextNorm, normed_rows, rms_norm
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl


def norm_pair_reference(
    left: torch.Tensor, left_norm: NextNorm, right: torch.Tensor, right_norm: NextNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition and the CPU path."""
    normed = rms_norm(right, *right_norm)
    return torch.cat((rms_norm(left, *left_norm), normed), dim=-1), normed


@jit
def _norm_half(
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_pair: tl.tensor,
    p_alone: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    HALF: tl.constexpr,
    HAS_ALONE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    i_column = tl.arange(0, BLOCK_WIDTH)
    m_column = i_column < width
    m_tile = (i_row < num_rows)[:, None] & m_column[None, :]
    b_x = tl.load(p_x + i_row[:, None] * x_stride + i_column[None, :], mask=m_tile, other=0.0)
    b_y = normed_rows(
        b_x.to(tl.float32), p_weight, i_column, m_column, width, eps, p_pair.dtype.element_ty, False, 0.0
    )
    release_next(CHAINED)
    tl.store(p_pair + i_row[:, None] * (2 * width) + HALF * width + i_column[None, :], b_y, mask=m_tile)
    if HALF == 1 and HAS_ALONE:
        tl.store(p_alone + i_row[:, None] * width + i_column[None, :], b_y, mask=m_tile)


@jit_varying("num_rows")
def _norm_pair_kernel(
    p_left: tl.tensor,
    p_left_weight: tl.tensor,
    p_right: tl.tensor,
    p_right_weight: tl.tensor,
    p_pair: tl.tensor,
    p_alone: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    left_stride: tl.tensor,
    right_stride: tl.tensor,
    left_eps: tl.tensor,
    right_eps: tl.tensor,
    HAS_ALONE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (tile of rows, half)
    wait_for_previous(CHAINED)
    if tl.program_id(1) == 0:
        _norm_half(p_left, p_left_weight, p_pair, p_alone, num_rows, width, left_stride, left_eps, 0,
                   HAS_ALONE, BLOCK_ROWS, BLOCK_WIDTH, CHAINED)  # fmt: skip
    else:
        _norm_half(p_right, p_right_weight, p_pair, p_alone, num_rows, width, right_stride, right_eps, 1,
                   HAS_ALONE, BLOCK_ROWS, BLOCK_WIDTH, CHAINED)  # fmt: skip


def norm_pair_triton(
    left: torch.Tensor,
    left_norm: NextNorm,
    right: torch.Tensor,
    right_norm: NextNorm,
    *,
    has_alone: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch; arguments as in `norm_pair`. Raises ValueError as it does."""
    _check(left, left_norm, right, right_norm)
    num_rows, width = left.shape
    pair = left.new_empty((num_rows, 2 * width))
    alone = left.new_empty((num_rows, width)) if has_alone else None
    if pair.numel() == 0:
        return pair, alone
    left, right = (x if x.stride(1) == 1 else x.contiguous() for x in (left, right))
    block_width = next_power_of_2(width)
    block_rows = max(1, min(TILE // block_width, 32))
    _norm_pair_kernel[(cdiv(num_rows, block_rows), 2)](
        left,
        left_norm.weight.contiguous(),
        right,
        right_norm.weight.contiguous(),
        pair,
        pair if alone is None else alone,
        num_rows,
        width,
        left.stride(0),
        right.stride(0),
        left_norm.eps,
        right_norm.eps,
        HAS_ALONE=has_alone,
        BLOCK_ROWS=block_rows,
        BLOCK_WIDTH=block_width,
        **chained(left.device),
        num_warps=8 if block_width >= 4096 else 4,
        enable_fp_fusion=False,
    )
    return pair, alone


def _check(left: torch.Tensor, left_norm: NextNorm, right: torch.Tensor, right_norm: NextNorm) -> None:
    weights = left_norm.weight, right_norm.weight
    is_even = left.dim() == 2 and right.shape == left.shape and right.dtype == left.dtype
    is_fit = all(weight.shape == left.shape[-1:] and weight.dtype == left.dtype for weight in weights)
    if not (is_even and is_fit):
        raise ValueError(
            f"norm_pair: rows {tuple(left.shape)} {left.dtype} and {tuple(right.shape)} {right.dtype}, "
            f"weights {[tuple(weight.shape) for weight in weights]}; expected [T, W] twice, and [W] twice"
        )
    if left_norm.offset is not None or right_norm.offset is not None:
        raise ValueError("norm_pair: norms with an offset have no such kernel; compute them one by one")


def norm_pair(
    left: torch.Tensor,
    left_norm: NextNorm,
    right: torch.Tensor,
    right_norm: NextNorm,
    *,
    has_alone: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(both normed rows side by side, `[T, 2*W]`; the normed `right` alone, `[T, W]`, or None without
    `has_alone`) for `left`, `right` `[T, W]`.

    Raises ValueError if shapes or dtypes differ, or for a norm with an offset.
    """
    if left.is_cuda:
        return norm_pair_triton(left, left_norm, right, right_norm, has_alone=has_alone)
    _check(left, left_norm, right, right_norm)
    pair, alone = norm_pair_reference(left, left_norm, right, right_norm)
    return pair, alone if has_alone else None
