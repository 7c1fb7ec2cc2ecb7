"""RMSNorm, y = x / sqrt(mean(x^2) + eps) * weight, with or without a residual addition.

Llama rounds x / sqrt(...) to the dtype before the product. With an `offset`, the factor is offset + weight,
and only the product is rounded: Gemma has offset 1, OLMo 2 and gpt-oss have 0.

Source: Zhang, Sennrich, "Root mean square layer normalization", 2019.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .chained_launch import chained, release_next, wait_for_previous
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, rows_of, tl

# Elements per program: several narrow rows (heads) together, or one wide row.
TILE = 4096


class NextNorm(NamedTuple):
    """A norm that is computed with something else: its `weight` `[D]`, and `offset` as above."""

    weight: torch.Tensor
    eps: float
    offset: float | None = None


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float | None = None
) -> torch.Tensor:
    """The definition: statistics in float32, rounded to the dtype of `x` before the weight is applied.

    With an `offset`, they are rounded behind it.
    """
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset is None:
        return weight * normed.to(x.dtype)
    return (normed * (offset + weight.to(torch.float32))).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of the fused form: the sum is rounded to the dtype before it is normalised."""
    total = x + residual
    return rms_norm_reference(total, weight, eps, offset), total


@jit
def normed_rows(
    b_x: tl.tensor,
    p_weight: tl.tensor,
    i_column: tl.tensor,
    m_column: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    dtype: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    OFFSET: tl.constexpr,
) -> tl.tensor:
    """Rows `[ROWS, D]`, float32, normalised and rounded to `dtype`."""
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / width + eps)
    b_weight = tl.load(p_weight + i_column, mask=m_column, other=0.0).to(tl.float32)
    b_normed = b_x * b_scale[:, None]
    if HAS_OFFSET:
        b_weight = b_weight + OFFSET
    else:
        b_normed = b_normed.to(dtype).to(tl.float32)
    return (b_normed * b_weight[None, :]).to(dtype)


@jit_varying("num_rows")
def _rms_norm_kernel(
    p_x: tl.tensor,
    p_residual: tl.tensor,
    p_inner: tl.tensor,
    p_weight: tl.tensor,
    p_sum: tl.tensor,
    p_y: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    inner: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    eps: tl.tensor,
    inner_eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    HAS_INNER: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    i_column = tl.arange(0, BLOCK_WIDTH)
    m_column = i_column < width
    m_tile = (i_row < num_rows)[:, None] & m_column[None, :]
    o_x = (i_row // inner) * outer_stride + (i_row % inner) * inner_stride
    o_y = i_row[:, None] * width + i_column[None, :]
    b_x = tl.load(p_x + o_x[:, None] + i_column[None, :], mask=m_tile, other=0.0).to(tl.float32)
    dtype: tl.constexpr = p_y.dtype.element_ty
    if HAS_INNER:
        b_x = normed_rows(b_x, p_inner, i_column, m_column, width, inner_eps, dtype, HAS_OFFSET, OFFSET).to(
            tl.float32
        )
    if HAS_RESIDUAL:
        b_residual = tl.load(p_residual + o_y, mask=m_tile, other=0.0).to(tl.float32)
        b_rounded = (b_x + b_residual).to(p_sum.dtype.element_ty)
        tl.store(p_sum + o_y, b_rounded, mask=m_tile)
        b_x = b_rounded.to(tl.float32)
    b_y = normed_rows(b_x, p_weight, i_column, m_column, width, eps, dtype, HAS_OFFSET, OFFSET)
    release_next(CHAINED)
    tl.store(p_y + o_y, b_y, mask=m_tile)


def rms_norm_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    offset: float | None = None,
    inner: NextNorm | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch on `x` `[..., D]`, `weight` `[D]`, `residual` None or `[..., D]`; returns (normed, sum), each
    `[..., D]`.

    Without a residual, the sum is `x` itself. `inner` normalises `x` before the sum, with the same offset.
    Rows may be strided (heads of a wider projection); D is at most 65536. Raises ValueError if shapes or
    dtypes differ.
    """
    _check(x, weight, residual)
    if inner is not None:
        _check(x, inner.weight, None)
        assert inner.offset == offset, "one kernel has one offset"
    rows, width = rows_of(x), x.shape[-1]
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    if x.numel() == 0:
        return normed, total
    block_width = next_power_of_2(width)
    # The same tile for every number of rows: one compiled variant per width, and one order of a sum.
    block_rows = max(1, min(TILE // block_width, 32))
    _rms_norm_kernel[(cdiv(rows.num_rows, block_rows),)](
        rows.x,
        x if residual is None else residual.contiguous(),
        weight if inner is None else inner.weight.contiguous(),
        weight.contiguous(),
        total,
        normed,
        rows.num_rows,
        width,
        rows.inner,
        rows.outer_stride,
        rows.inner_stride,
        eps,
        0.0 if inner is None else inner.eps,
        HAS_RESIDUAL=residual is not None,
        HAS_INNER=inner is not None,
        HAS_OFFSET=offset is not None,
        OFFSET=offset or 0.0,
        BLOCK_ROWS=block_rows,
        BLOCK_WIDTH=block_width,
        **chained(x.device),
        num_warps=8 if block_width >= 4096 else 4,
        enable_fp_fusion=False,  # a product that is rounded before a sum stays so
    )
    return normed, total


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(
            f"rms_norm: weight {tuple(weight.shape)} {weight.dtype} does not fit x {tuple(x.shape)} "
            f"{x.dtype}; "
            "both need the same last dimension and dtype"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"add_rms_norm: residual {tuple(residual.shape)} {residual.dtype} does not fit x "
            f"{tuple(x.shape)} {x.dtype}"
        )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float | None = None) -> torch.Tensor:
    """Normalise `x` `[..., D]` over its last dimension; `weight` `[D]` of the same dtype.

    Raises ValueError if the widths or dtypes differ.
    """
    if x.is_cuda:
        return rms_norm_triton(x, weight, eps, None, offset)[0]
    _check(x, weight, None)
    if offset is not None:
        return rms_norm_reference(x, weight, eps, offset)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual) for `x`, `residual` `[..., D]`, in one pass over memory.

    Raises ValueError if shapes or dtypes differ.
    """
    if x.is_cuda:
        return rms_norm_triton(x, weight, eps, residual, offset)
    _check(x, weight, residual)
    total = x + residual
    return rms_norm(total, weight, eps, offset), total


def norm_add_norm(
    x: torch.Tensor, inner: NextNorm, residual: torch.Tensor, outer: NextNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """(outer(inner(x) + residual), inner(x) + residual) for `x`, `residual` `[..., D]`, in one pass over
    memory.

    In 16 bits, the bits are those of `rms_norm` and `add_rms_norm`. Raises ValueError if shapes or dtypes
    differ.
    """
    if x.is_cuda and inner.offset == outer.offset:
        return rms_norm_triton(x, outer.weight, outer.eps, residual, outer.offset, inner)
    return add_rms_norm(rms_norm(x, *inner), residual, *outer)
