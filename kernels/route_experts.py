"""The router of a mixture-of-experts layer: the experts of each row, and their weights.

The scores are a softmax over all experts, in float32, and the `top_k` largest are taken (Shazeer et al.,
"Outrageously large neural networks", 2017). Of equal scores, the one of the lower expert id wins. Legend: T
rows, E experts, K experts of a row.
"""

from __future__ import annotations

import torch

from .triton_jit import jit, next_power_of_2, tl

LARGEST = 3.0e38  # below the largest float32


def route_experts_reference(
    logits: torch.Tensor, top_k: int, is_normalised: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition and the CPU path."""
    scores = torch.softmax(logits.to(torch.float32), dim=-1)
    best, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    weights = best[:, :top_k]
    if is_normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids[:, :top_k].to(torch.int32), weights.contiguous()


@jit
def _route_kernel(
    p_logits: tl.tensor,
    p_ids: tl.tensor,
    p_weights: tl.tensor,
    num_experts: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    i_expert = tl.arange(0, BLOCK)
    m_expert = i_expert < num_experts
    b_logit = tl.load(p_logits + i_row * num_experts + i_expert, mask=m_expert, other=0.0).to(tl.float32)
    # finite, so that a row of NaN or infinities takes experts that exist
    b_logit = tl.where(b_logit == b_logit, tl.clamp(b_logit, -LARGEST, LARGEST), -LARGEST)
    b_logit = tl.where(m_expert, b_logit, float("-inf"))
    b_score = tl.exp(b_logit - tl.max(b_logit))
    b_score = b_score / tl.sum(b_score)
    b_score = tl.where(m_expert, b_score, -1.0)
    i_slot = tl.arange(0, BLOCK_K)
    b_weights = tl.zeros((BLOCK_K,), dtype=tl.float32)
    b_ids = tl.zeros((BLOCK_K,), dtype=tl.int32)
    for slot in tl.static_range(TOP_K):
        b_best = tl.max(b_score)
        b_id = tl.min(tl.where(b_score == b_best, i_expert, num_experts - 1))  # the lowest of equal ones
        b_weights = tl.where(i_slot == slot, b_best, b_weights)
        b_ids = tl.where(i_slot == slot, b_id, b_ids)
        b_score = tl.where(i_expert == b_id, -1.0, b_score)
    if IS_NORMALISED:
        b_weights = b_weights / tl.sum(b_weights)
    m_slot = i_slot < TOP_K
    tl.store(p_ids + i_row * TOP_K + i_slot, b_ids, mask=m_slot)
    tl.store(p_weights + i_row * TOP_K + i_slot, b_weights, mask=m_slot)


def route_experts_triton(
    logits: torch.Tensor, top_k: int, is_normalised: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch on `logits` `[T, E]`; returns ids int32 and weights float32, both `[T, K]`.

    Raises ValueError as `route_experts`.
    """
    _check(logits, top_k)
    num_rows, num_experts = logits.shape
    ids = torch.empty(num_rows, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits.device)
    if num_rows:
        _route_kernel[(num_rows,)](
            logits.contiguous(),
            ids,
            weights,
            num_experts,
            TOP_K=top_k,
            BLOCK_K=next_power_of_2(top_k),
            IS_NORMALISED=is_normalised,
            BLOCK=next_power_of_2(num_experts),
            LARGEST=LARGEST,
            num_warps=1 if num_experts <= 128 else 4,
        )
    return ids, weights


def _check(logits: torch.Tensor, top_k: int) -> None:
    if logits.dim() != 2 or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(
            f"route_experts: logits {tuple(logits.shape)} and top_k {top_k}; expected [T, E] and 1 to E"
        )


def route_experts(logits: torch.Tensor, top_k: int, is_normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row: `logits` `[T, E]` -> ids int32 `[T, K]`, best first, and weights float32
    `[T, K]`.

    `is_normalised`: the weights of a row sum to 1. Raises ValueError unless 1 <= K <= E.
    """
    if logits.is_cuda:
        return route_experts_triton(logits, top_k, is_normalised)
    _check(logits, top_k)
    return route_experts_reference(logits, top_k, is_normalised)
