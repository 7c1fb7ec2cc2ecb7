"""The weighted sum of the experts of each row, in the order of the row's choices.

Of experts that are elsewhere nothing is read: the sum is over those that are here.

Legend: T rows, K experts of a row, H hidden size.
"""

from __future__ import annotations

import torch

from .triton_jit import cdiv, jit, next_power_of_2, tl


def combine_experts_reference(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The definition and the CPU path: `outputs` `[T*K, H]` by `weights` `[T, K]`, float32 `[T, H]`."""
    num_rows, top_k = weights.shape
    parts = outputs.view(num_rows, top_k, outputs.shape[1]).to(torch.float32) * weights[..., None]
    total = parts[:, 0]
    for choice in range(1, top_k):
        total = total + parts[:, choice]
    return total


@jit
def _combine_kernel(
    p_outputs: tl.tensor,
    p_weights: tl.tensor,
    p_ids: tl.tensor,
    p_y: tl.tensor,
    width: tl.tensor,
    first_expert: tl.tensor,
    num_experts: tl.tensor,
    TOP_K: tl.constexpr,
    IS_PART: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    i_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = i_column < width
    b_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = i_row * TOP_K + choice
        m_part = m_column
        if IS_PART:
            expert = tl.load(p_ids + slot) - first_expert
            m_part = m_column & (expert >= 0) & (expert < num_experts)
        b_part = tl.load(p_outputs + slot * width + i_column, mask=m_part, other=0.0).to(tl.float32)
        b_sum += b_part * tl.load(p_weights + slot)
    tl.store(p_y + i_row * width + i_column, b_sum.to(p_y.dtype.element_ty), mask=m_column)


def combine_experts_triton(
    outputs: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor | None = None,
    first: int = 0,
    num_experts: int = 0,
) -> torch.Tensor:
    """Launch on `outputs` `[T*K, H]` and float32 `weights` `[T, K]`, T at least 1; returns `[T, H]` in the
    dtype of `outputs`.

    `ids`: int32 `[T, K]`, if only the `num_experts` experts from `first` on are here.
    """
    (num_rows, top_k), width = weights.shape, outputs.shape[1]
    y = torch.empty(num_rows, width, dtype=outputs.dtype, device=outputs.device)
    block = min(next_power_of_2(width), 1024)
    _combine_kernel[(num_rows, cdiv(width, block))](
        outputs,
        weights,
        weights if ids is None else ids,
        y,
        width,
        first,
        num_experts,
        TOP_K=top_k,
        IS_PART=ids is not None,
        BLOCK=block,
        num_warps=4,
    )
    return y
