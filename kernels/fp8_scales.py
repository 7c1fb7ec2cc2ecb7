"""Values of 8-bit floating point (e4m3) with scales: rounding, and the two forms of scales of a weight.

A weight `[N, H]` has one scale per output, float32 `[N]`, or one per block of BLOCK x BLOCK values, float32
`[ceil(N / BLOCK), ceil(H / BLOCK)]`. The number of dimensions of the scales tells which. A value is the
stored one times its scale.

Formats: Micikevicius et al., "FP8 formats for deep learning", 2022; blocks: DeepSeek-V3 technical report,
2024. Legend: N outputs, H inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .triton_jit import jit, tl

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128
# Half the distance of two neighbours, relative to the smaller: 3 bits of mantissa. The smallest step is 2^-9.
FP8_ROUNDING = 2.0**-4
FP8_STEP = 2.0**-9


class Fp8Weight(NamedTuple):
    """A weight e4m3 `[N, H]` with its `scales`, in one of both forms, and bias `[N]` or None."""

    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None = None


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    """`values` rounded to the nearest e4m3; beyond the largest one they become the largest."""
    return values.to(torch.float32).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def row_scales(values: torch.Tensor) -> torch.Tensor:
    """The scale of each row of `values` `[..., H]`, float32 `[...]`: its largest value becomes FP8_MAX."""
    most = values.to(torch.float32).abs().amax(dim=-1)
    return torch.where(most == 0, 1.0, most / FP8_MAX)


def quantise_rows_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 `[..., H]`, float32 scales `[...]`) of `values` `[..., H]`."""
    scales = row_scales(values)
    return to_fp8(values.to(torch.float32) / scales[..., None]), scales


def expand_scales(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`scales` of a weight of `shape` `[N, H]` as a tensor that multiplies it: `[N, 1]` or `[N, H]`."""
    if scales.dim() == 1:
        return scales[:, None]
    by_rows = scales.repeat_interleave(BLOCK, dim=0)[: shape[0]]
    return by_rows.repeat_interleave(BLOCK, dim=1)[:, : shape[1]]


def dequantise_fp8(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of an e4m3 `weight` `[N, H]` with `scales`, in `dtype`."""
    return (weight.to(torch.float32) * expand_scales(scales, weight.shape)).to(dtype)


@jit
def to_fp8_tile(b_values: tl.tensor) -> tl.tensor:
    """As `to_fp8`, of a tile; NaN stays NaN."""
    b_wide = b_values.to(tl.float32)
    b_wide = tl.minimum(b_wide, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(b_wide, -448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


def raw(stored: torch.Tensor) -> torch.Tensor:
    """`stored` itself, or its bytes if it is e4m3, for which torch has no copies by index."""
    return stored.view(torch.uint8) if stored.dtype == FP8 else stored


def fill_normal(values: torch.Tensor, generator: torch.Generator) -> None:
    """Fills `values` with random normal ones, rounded if they are e4m3."""
    if values.dtype != FP8:
        values.normal_(generator=generator)
        return
    wide = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    values.copy_(to_fp8(wide.normal_(generator=generator)))


def check_scales(op: str, weight: torch.Tensor, scales: torch.Tensor) -> None:
    """Raises ValueError unless `scales` fit an e4m3 `weight` `[N, H]`, contiguous both."""
    out_size, in_size = weight.shape
    shapes = {(out_size,), (-(-out_size // BLOCK), -(-in_size // BLOCK))}
    if weight.dtype != FP8 or tuple(scales.shape) not in shapes or scales.dtype != torch.float32:
        raise ValueError(
            f"{op}: weight {tuple(weight.shape)} {weight.dtype} with scales {tuple(scales.shape)} "
            f"{scales.dtype}; expected {FP8} and float32 {sorted(shapes)}"
        )
    if not weight.is_contiguous() or not scales.is_contiguous():
        raise ValueError(f"{op}: weight and scales must be contiguous")


def check_gated(op: str, weight: torch.Tensor, scales: torch.Tensor, is_gated: bool) -> None:
    """Raises ValueError if both halves of a gated weight would share a block of scales."""
    unit = 2 if scales.dim() == 1 else 2 * BLOCK
    if is_gated and weight.shape[0] % unit:
        raise ValueError(f"{op}: {weight.shape[0]} gated outputs; a multiple of {unit} is needed")
