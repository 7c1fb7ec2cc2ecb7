"""Rounds rows to 8-bit floating point (e4m3), with a float32 scale for each group of values of a row.

The largest value of a group becomes the largest e4m3. The kernel gives the bits of the definition.

Legend: T rows, H values of a row, G groups of a row.
"""

from __future__ import annotations

import torch

from .fp8_scales import FP8, FP8_MAX, quantise_rows_fp8
from .triton_jit import cdiv, jit_varying, next_power_of_2, tl


def quantise_rows_reference(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition and the CPU path; arguments as in `quantise_rows`."""
    num_rows, width = x.shape
    padded = torch.nn.functional.pad(x, (0, -width % group)).view(num_rows, -1, group)
    rounded, scales = quantise_rows_fp8(padded)
    return rounded.view(num_rows, -1)[:, :width].contiguous(), scales


@jit_varying("x_stride")
def _quantise_kernel(
    p_x: tl.tensor,
    p_y: tl.tensor,
    p_scales: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    FP8_MAX: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    i_group = tl.program_id(1)
    i_value = tl.arange(0, BLOCK_WIDTH)
    i_column = i_group * GROUP + i_value
    m_column = (i_value < GROUP) & (i_column < width)
    b_x = tl.load(p_x + i_row * x_stride + i_column, mask=m_column, other=0.0).to(tl.float32)
    b_most = tl.max(tl.abs(b_x), axis=0)
    # Triton's / is approximate on a GPU. Quotients of bfloat16 are often half-way between two neighbours, and
    # one unit in the last place then decides for the other.
    b_scale = tl.where(b_most == 0.0, 1.0, tl.div_rn(b_most, FP8_MAX))
    b_y = tl.minimum(tl.maximum(tl.div_rn(b_x, b_scale), -FP8_MAX), FP8_MAX)
    tl.store(p_y + i_row * width + i_column, b_y.to(p_y.dtype.element_ty), mask=m_column)
    tl.store(p_scales + i_row * tl.num_programs(1) + i_group, b_scale)


def quantise_rows_triton(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch with the arguments of `quantise_rows`."""
    num_rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty((num_rows, width), dtype=FP8, device=x.device)
    scales = torch.empty((num_rows, cdiv(width, group)), dtype=torch.float32, device=x.device)
    if y.numel() == 0:
        return y, scales
    block = next_power_of_2(group)
    _quantise_kernel[(num_rows, scales.shape[1])](
        x,
        y,
        scales,
        width,
        x.stride(0),
        GROUP=group,
        BLOCK_WIDTH=block,
        FP8_MAX=FP8_MAX,
        num_warps=1 if block <= 256 else 4 if block <= 4096 else 8,
    )
    return y, scales


def quantise_rows(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 `[T, H]`, float32 scales `[T, G]`) of `x` `[T, H]`, in groups of `group` values; the last group
    of a row may be shorter.

    Raises ValueError for another number of dimensions, or an empty group.
    """
    if x.dim() != 2 or group < 1:
        raise ValueError(
            f"quantise_rows: x {tuple(x.shape)} in groups of {group}; expected [T, H], groups from 1"
        )
    return quantise_rows_triton(x, group) if x.is_cuda else quantise_rows_reference(x, group)
