"""Batch-invariant projections: the bits of a row of x W^T + b do not depend on the number of rows.

A library splits the inner dimension by the number of rows, so it rounds a row differently in a decode step, a
verify step and a prefill. On a GPU, the kernel of `skinny_linear` runs here for any number of rows: each
output is one chain of matrix instructions along the inner dimension, from the first column to the last.
Source: He, "Defeating nondeterminism in LLM inference", 2025.

Legend: T rows, N outputs, H inputs.
"""

from __future__ import annotations

import torch

from .invariant_rows import linear_rows
from .logits import widened_logits
from .skinny_linear import SkinnyShape, fitting_stages, linear_triton, skinny_shape

# float32 has no matrix instruction of full precision; it is for tests.
FLOAT32 = SkinnyShape(out=32, inner=32, num_warps=4, num_stages=2)
# Outputs from which on large tiles fill an H200, and up to which small ones are needed for that.
WIDE, NARROW = 16384, 4096


def _tile(num_rows: int, out_size: int) -> tuple[SkinnyShape, int]:
    """The tile for `num_rows` x `out_size` outputs, and its most rows. It does not change the bits."""
    if num_rows <= 32:
        return skinny_shape(num_rows, out_size), 32
    if out_size <= (WIDE if num_rows <= 64 else NARROW) and num_rows <= 128:
        return SkinnyShape(out=64, inner=128, num_warps=4, num_stages=4), 64
    if num_rows <= 64:
        return SkinnyShape(out=128, inner=64, num_warps=8, num_stages=4), 64
    if num_rows <= 256 and out_size <= WIDE:
        return SkinnyShape(out=64, inner=64, num_warps=4, num_stages=4), 128
    return SkinnyShape(out=128, inner=64, num_warps=8, num_stages=3), 256


def _on_gpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if x.dtype == torch.float32:
        return linear_triton(x, weight, bias, shape=FLOAT32, max_tile_rows=16)
    shape, most = _tile(x.shape[0], weight.shape[0])
    # the stages in flight do not change the bits either: as many as the device has memory for
    stage_bytes = (shape.out + most) * shape.inner * x.itemsize
    shape = shape._replace(num_stages=fitting_stages(shape.num_stages, stage_bytes, x.device))
    return linear_triton(x, weight, bias, shape=shape, max_tile_rows=most, out_dtype=out_dtype)


def invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b: `x` `[T, H]`, `weight` `[N, H]`, `bias` None or `[N]` -> `[T, N]`."""
    return _on_gpu(x, weight, bias) if x.is_cuda else linear_rows(x, weight, bias)


def invariant_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `logits.float32_logits`: `hidden` `[R, H]`, `weight` `[V, H]` -> float32 `[R, V]`."""
    if hidden.is_cuda:
        return _on_gpu(hidden, weight, out_dtype=torch.float32)
    return widened_logits(hidden.to(torch.float32), weight, product=linear_rows)
