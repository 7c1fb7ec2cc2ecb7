"""4-bit floating-point values with a shared exponent (MXFP4), decoded to a float dtype.

A block of 32 values along the inner dimension has one scale, a power of two; two values share a byte, the
first in its low half. Source: Open Compute Project, "Microscaling formats (MX) specification", 2023 (e2m1,
scales e8m0). Legend: G blocks of a row.
"""

from __future__ import annotations

import torch

BLOCK = 32  # values that share a scale
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127


def decode_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`blocks` uint8 `[..., G, 16]` and `scales` uint8 `[..., G]` -> `[..., G*32]` in `dtype`.

    Raises ValueError if the shapes or dtypes do not fit.
    """
    fits = blocks.shape[:-1] == scales.shape and blocks.shape[-1] == BLOCK // 2
    if not fits or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(
            f"decode_mxfp4: blocks {tuple(blocks.shape)} {blocks.dtype} and scales {tuple(scales.shape)} "
            f"{scales.dtype}; expected uint8 [..., G, {BLOCK // 2}] and [..., G]"
        )
    table = torch.tensor(VALUES, dtype=dtype, device=blocks.device)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    values = table[halves.to(torch.int32)]
    exponents = scales.to(torch.int32)[..., None] - EXPONENT_BIAS
    return torch.ldexp(values, exponents).flatten(-2).to(dtype)
