"""Rounds rows to 8-bit floating point (e4m3), with a float32 scale for each group of values of a row.

The largest value of a group becomes the largest e4m3. The kernel gives the bits of the definition.

Legend: T rows, H values of a row, G groups of a row.
"""

from __future__ import annotations

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .fp8_scales import FP8, FP8_MAX, quantise_rows_fp8
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl

TILE = 2048  # values of a program that rounds whole groups
WIDE_STEP = 1024  # values that a program of one wide row reads at a time
FEW_ROWS = 64  # up to as many, several programs share a wide row
FEW_STEP = 4096  # values of which each of them rounds
MAX_STEPS = 16  # of a row


def quantise_rows_reference(
    x: torch.Tensor, group: int, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition and the CPU path; arguments as in `quantise_rows`."""
    num_rows, width = x.shape
    padded = torch.nn.functional.pad(x, (0, -width % group, 0, -num_rows % multiple))
    rounded, scales = quantise_rows_fp8(padded.view(len(padded), -1, group))
    return rounded.view(len(padded), -1)[:, :width].contiguous(), scales.t().contiguous().t()


@jit
def _rounded(b_x: tl.tensor, b_scale: tl.tensor, FP8_MAX: tl.constexpr) -> tl.tensor:
    """Quotients within e4m3. Triton's / is approximate on a GPU. Quotients of bfloat16 are often half-way
    between two neighbours, and one unit in the last place then decides for the other.
    """
    return tl.minimum(tl.maximum(tl.div_rn(b_x, b_scale), -FP8_MAX), FP8_MAX)


@jit
def _scale_of(b_most: tl.tensor, FP8_MAX: tl.constexpr) -> tl.tensor:
    """The scales of groups by their largest values."""
    return tl.where(b_most == 0.0, 1.0, tl.div_rn(b_most, FP8_MAX))


@jit_varying("num_rows", "x_stride", "group_stride")
def _quantise_kernel(
    p_x: tl.tensor,
    p_y: tl.tensor,
    p_scales: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    group_stride: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    FP8_MAX: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    i_group = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    i_value = tl.arange(0, BLOCK_WIDTH)
    i_column = i_group[:, None] * GROUP + i_value[None, :]
    m_column = (i_value < GROUP)[None, :] & (i_column < width)
    b_x = tl.load(p_x + i_row * x_stride + i_column, mask=m_column & (i_row < num_rows), other=0.0)
    b_x = b_x.to(tl.float32)
    b_scale = _scale_of(tl.max(tl.abs(b_x), axis=1), FP8_MAX)
    release_next(CHAINED)
    b_y = _rounded(b_x, b_scale[:, None], FP8_MAX).to(p_y.dtype.element_ty)
    tl.store(p_y + i_row * width + i_column, b_y, mask=m_column)
    tl.store(p_scales + i_group * group_stride + i_row, b_scale, mask=i_group * GROUP < width)


@jit_varying("num_rows", "x_stride")
def _quantise_wide_kernel(
    p_x: tl.tensor,
    p_y: tl.tensor,
    p_scales: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    STEP: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    OWN_STEPS: tl.constexpr,
    FP8_MAX: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # A row is read twice, the second time from a cache: it does not fit the registers of a program. Programs
    # that share a row each find its largest value, and round OWN_STEPS steps.
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_x + i_row * x_stride
    b_most = tl.zeros((STEP,), dtype=tl.float32)
    for step in tl.static_range(NUM_STEPS):
        i_column = step * STEP + tl.arange(0, STEP)
        b_x = tl.load(p_row + i_column, mask=(i_column < width) & (i_row < num_rows), other=0.0)
        b_most = tl.maximum(b_most, tl.abs(b_x.to(tl.float32)))
    b_scale = _scale_of(tl.max(b_most, axis=0), FP8_MAX)
    release_next(CHAINED)
    for step in tl.static_range(OWN_STEPS):
        i_column = (tl.program_id(1) * OWN_STEPS + step) * STEP + tl.arange(0, STEP)
        b_x = tl.load(p_row + i_column, mask=(i_column < width) & (i_row < num_rows), other=0.0)
        b_y = _rounded(b_x.to(tl.float32), b_scale, FP8_MAX).to(p_y.dtype.element_ty)
        tl.store(p_y + i_row * width + i_column, b_y, mask=i_column < width)
    tl.store(p_scales + i_row, b_scale, mask=tl.program_id(1) == 0)


def quantise_rows_triton(
    x: torch.Tensor, group: int, multiple: int = 1, *, shares: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch with the arguments of `quantise_rows`."""
    num_rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    all_rows, num_groups = cdiv(num_rows, multiple) * multiple, cdiv(width, group)
    y = torch.empty((all_rows, width), dtype=FP8, device=x.device)
    scales = torch.empty((num_groups, all_rows), dtype=torch.float32, device=x.device).t()
    if y.numel() == 0:
        return y, scales
    if num_groups == 1 and width > WIDE_STEP:
        is_shared = shares and all_rows <= FEW_ROWS
        step = max(FEW_STEP if is_shared else WIDE_STEP, next_power_of_2(cdiv(width, MAX_STEPS)))
        num_steps = cdiv(width, step)
        _quantise_wide_kernel[(all_rows, num_steps if is_shared else 1)](
            x,
            y,
            scales,
            num_rows,
            width,
            x.stride(0),
            STEP=step,
            NUM_STEPS=num_steps,
            OWN_STEPS=1 if is_shared else num_steps,
            FP8_MAX=FP8_MAX,
            **chained(x.device),
            num_warps=16 if is_shared else 4,
        )
        return y, scales
    block = next_power_of_2(group)
    groups = min(max(1, TILE // block), next_power_of_2(num_groups))
    _quantise_kernel[(all_rows, cdiv(num_groups, groups))](
        x,
        y,
        scales,
        num_rows,
        width,
        x.stride(0),
        scales.stride(1),
        GROUP=group,
        BLOCK_GROUPS=groups,
        BLOCK_WIDTH=block,
        FP8_MAX=FP8_MAX,
        **chained(x.device),
        num_warps=4 if groups * block > 512 else 1,
    )
    return y, scales


def quantise_rows(
    x: torch.Tensor, group: int, multiple: int = 1, *, shares: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 `[T', H]`, float32 scales `[T', G]`) of `x` `[T, H]`, in groups of `group` values; the last group
    of a row may be shorter. T' is the next multiple of `multiple`; rows behind the last are zeros.

    The scales of a group lie side by side, `[G, T']` in memory. `shares`: programs share a wide row where
    there are few rows, in another variant of the kernel.

    Raises ValueError for another number of dimensions, or an empty group.
    """
    if x.dim() != 2 or group < 1:
        raise ValueError(
            f"quantise_rows: x {tuple(x.shape)} in groups of {group}; expected [T, H], groups from 1"
        )
    if x.is_cuda:
        return quantise_rows_triton(x, group, multiple, shares=shares)
    return quantise_rows_reference(x, group, multiple)
