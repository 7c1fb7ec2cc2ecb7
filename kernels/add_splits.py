"""Adds what the programs of a product found that had a part of the inputs each, and a bias.

Legend: P parts, T rows, N outputs.
"""

from __future__ import annotations

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .triton_jit import cdiv, jit_varying, tl

BLOCK = 1024  # outputs of a program


@jit_varying("num_values")
def _add_splits_kernel(
    p_sums: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    num_values: tl.tensor,
    out_size: tl.tensor,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    wait_for_previous(CHAINED)
    i_value = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_value = i_value < num_values
    b_y = tl.load(p_sums + i_value, mask=m_value, other=0.0)
    for split in tl.static_range(1, SPLITS):
        b_y += tl.load(p_sums + split * num_values + i_value, mask=m_value, other=0.0)
    if HAS_BIAS:
        b_y += tl.load(p_bias + i_value % out_size, mask=m_value, other=0.0).to(tl.float32)
    release_next(CHAINED)
    tl.store(p_y + i_value, b_y.to(p_y.dtype.element_ty), mask=m_value)


def add_splits(sums: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    """Launch: `y` `[T, N]` becomes the sum over the parts of `sums` `[P, T, N]`, float32, plus `bias` `[N]`
    if there is one.
    """
    _add_splits_kernel[(cdiv(y.numel(), BLOCK),)](
        sums,
        sums if bias is None else bias,
        y,
        y.numel(),
        y.shape[1],
        HAS_BIAS=bias is not None,
        SPLITS=sums.shape[0],
        BLOCK=BLOCK,
        **chained(y.device),
        num_warps=4,
    )
