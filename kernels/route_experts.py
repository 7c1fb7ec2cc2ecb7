"""The router of a mixture-of-experts layer: the experts of each row, and their weights.

The scores are float32: a softmax over all experts (Shazeer et al., "Outrageously large neural networks",
2017), or the sigmoid of each logit (DeepSeek-AI, "DeepSeek-V3", 2024). A bias may be added for the choice
alone; the weights are scores without it. Without a bias and groups a softmax is compared by its logits, which
order alike and are not rounded. With groups, only experts of the best groups can be chosen, where a
group counts as much as its best experts together. Of equal scores, the one of the lower expert id wins, and
of equal groups the one of the lower number.

Legend: T rows, E experts, G groups of E/G neighbours, K experts of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .chained_launch import chained, wait_for_previous
from .triton_jit import jit, next_power_of_2, tl

LARGEST = 3.0e38  # below the largest float32
SMALLEST_SUM = 1.0e-20  # added to a sum that divides: sigmoids may all be 0


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a layer chooses experts.

    `is_sigmoid`: the scores are sigmoids, otherwise a softmax. `num_groups` and `kept_groups`: G, and the
    groups to choose from. `best_of_group`: the experts whose scores are added to the score of a group.
    `is_normalised`: the weights of a row sum to 1 before they are multiplied by `scale`.
    """

    top_k: int
    is_normalised: bool
    is_sigmoid: bool = False
    num_groups: int = 1
    kept_groups: int = 1
    best_of_group: int = 1
    scale: float = 1.0

    def fault(self, num_experts: int) -> str:
        """Why no layer of `num_experts` experts can choose so; "" if it can."""
        if not 1 <= self.top_k <= num_experts:
            return f"{self.top_k} experts of {num_experts} cannot be chosen"
        if self.num_groups < 1 or num_experts % self.num_groups:
            return f"{num_experts} experts do not make {self.num_groups} equal groups"
        if not 1 <= self.kept_groups <= self.num_groups:
            return f"{self.kept_groups} of {self.num_groups} groups cannot be kept"
        size = num_experts // self.num_groups
        if not 1 <= self.best_of_group <= size and self.num_groups > 1:
            return f"groups of {size} experts have no {self.best_of_group} best ones"
        if self.top_k > self.kept_groups * size:
            return f"{self.kept_groups} groups of {size} experts do not have {self.top_k} to choose"
        return ""


def route_experts_reference(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition and the CPU path."""
    wide = logits.to(torch.float32)
    scores = torch.sigmoid(wide) if routing.is_sigmoid else torch.softmax(wide, dim=-1)
    chosen_by = scores if bias is None else scores + bias
    if bias is None and not routing.is_sigmoid and routing.num_groups == 1:
        chosen_by = wide.nan_to_num(-LARGEST, LARGEST, -LARGEST)
    if routing.num_groups > 1:
        grouped = chosen_by.view(len(chosen_by), routing.num_groups, chosen_by.shape[1] // routing.num_groups)
        group_scores = grouped.sort(dim=-1, descending=True).values[..., : routing.best_of_group].sum(-1)
        order = torch.sort(group_scores, dim=-1, descending=True, stable=True).indices
        is_kept = torch.zeros_like(group_scores, dtype=torch.bool)
        is_kept.scatter_(1, order[:, : routing.kept_groups], True)
        chosen_by = grouped.masked_fill(~is_kept[..., None], float("-inf")).flatten(1)
    ids = torch.sort(chosen_by, dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.is_normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    return ids.to(torch.int32), weights * routing.scale


@jit
def finite_logits(b_logit: tl.tensor, m_expert: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """The logits clamped to finite values, NaN to the lowest, so that a broken row chooses experts that
    exist; -inf behind the last expert.
    """
    b_logit = tl.where(b_logit == b_logit, tl.clamp(b_logit, -LARGEST, LARGEST), -LARGEST)
    return tl.where(m_expert, b_logit, float("-inf"))


@jit
def scores_of(b_logit: tl.tensor, IS_SIGMOID: tl.constexpr) -> tl.tensor:
    """Their sigmoids, or their softmax."""
    if IS_SIGMOID:
        return 1.0 / (1.0 + tl.exp(-b_logit))
    b_score = tl.exp(b_logit - tl.max(b_logit))
    return b_score / tl.sum(b_score)


@jit
def choices_of(
    b_logit: tl.tensor,
    p_bias: tl.tensor,
    i_expert: tl.tensor,
    m_expert: tl.tensor,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
) -> tl.tensor:
    """What the experts of finite logits are compared by; -inf behind the last one."""
    b_choice = b_logit
    if IS_SIGMOID or HAS_BIAS or HAS_GROUPS:
        b_choice = scores_of(b_logit, IS_SIGMOID)
    if HAS_BIAS:
        b_choice += tl.load(p_bias + i_expert, mask=m_expert, other=0.0)
    return tl.where(m_expert, b_choice, float("-inf"))


@jit
def _kept_experts(
    b_choice: tl.tensor,
    i_expert: tl.tensor,
    num_experts: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
) -> tl.tensor:
    """The scores `[BLOCK]` of the experts in the best groups; the others are -inf."""
    size = num_experts // NUM_GROUPS
    i_group = tl.arange(0, BLOCK_GROUPS)
    b_groups = tl.full((BLOCK_GROUPS,), float("-inf"), dtype=tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        b_own = tl.where(i_expert // size == group, b_choice, float("-inf"))
        total = tl.max(b_own)
        for _ in tl.static_range(BEST_OF_GROUP - 1):
            best = tl.min(tl.where(b_own == tl.max(b_own), i_expert, num_experts))
            b_own = tl.where(i_expert == best, float("-inf"), b_own)
            total += tl.max(b_own)
        b_groups = tl.where(i_group == group, total, b_groups)
    b_kept = tl.full(b_choice.shape, float("-inf"), dtype=tl.float32)
    for _ in tl.static_range(KEPT_GROUPS):
        group = tl.min(tl.where(b_groups == tl.max(b_groups), i_group, NUM_GROUPS - 1))
        b_kept = tl.where(i_expert // size == group, b_choice, b_kept)
        b_groups = tl.where(i_group == group, float("-inf"), b_groups)
    return b_kept


@jit
def _route_kernel(
    p_logits: tl.tensor,
    p_bias: tl.tensor,
    p_ids: tl.tensor,
    p_weights: tl.tensor,
    num_experts: tl.tensor,
    scale: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SUM: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    i_expert = tl.arange(0, BLOCK)
    m_expert = i_expert < num_experts
    b_logit = tl.load(p_logits + i_row * num_experts + i_expert, mask=m_expert, other=0.0).to(tl.float32)
    b_logit = finite_logits(b_logit, m_expert, LARGEST)
    b_score = scores_of(b_logit, IS_SIGMOID)
    b_choice = choices_of(b_logit, p_bias, i_expert, m_expert, IS_SIGMOID, HAS_BIAS, NUM_GROUPS > 1)
    if NUM_GROUPS > 1:
        b_choice = _kept_experts(
            b_choice, i_expert, num_experts, NUM_GROUPS, KEPT_GROUPS, BEST_OF_GROUP, BLOCK_GROUPS
        )
    i_slot = tl.arange(0, BLOCK_K)
    b_weights = tl.zeros((BLOCK_K,), dtype=tl.float32)
    b_ids = tl.zeros((BLOCK_K,), dtype=tl.int32)
    for slot in tl.static_range(TOP_K):
        b_best = tl.max(b_choice)
        b_id = tl.min(tl.where(b_choice == b_best, i_expert, num_experts - 1))  # the lowest of equal ones
        b_weights = tl.where(i_slot == slot, tl.sum(tl.where(i_expert == b_id, b_score, 0.0)), b_weights)
        b_ids = tl.where(i_slot == slot, b_id, b_ids)
        b_choice = tl.where(i_expert == b_id, float("-inf"), b_choice)
    if IS_NORMALISED:
        b_weights = b_weights / (tl.sum(b_weights) + SMALLEST_SUM)
    m_slot = i_slot < TOP_K
    tl.store(p_ids + i_row * TOP_K + i_slot, b_ids, mask=m_slot)
    tl.store(p_weights + i_row * TOP_K + i_slot, b_weights * scale, mask=m_slot)


def route_experts_triton(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch on `logits` `[T, E]`; returns ids int32 and weights float32, both `[T, K]`.

    Raises ValueError as `route_experts`.
    """
    _check(logits, routing, bias)
    num_rows, num_experts = logits.shape
    ids = torch.empty(num_rows, routing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, routing.top_k, dtype=torch.float32, device=logits.device)
    if num_rows:
        _route_kernel[(num_rows,)](
            logits.contiguous(),
            logits if bias is None else bias,
            ids,
            weights,
            num_experts,
            float(routing.scale),
            TOP_K=routing.top_k,
            BLOCK_K=next_power_of_2(routing.top_k),
            IS_NORMALISED=routing.is_normalised,
            IS_SIGMOID=routing.is_sigmoid,
            HAS_BIAS=bias is not None,
            NUM_GROUPS=routing.num_groups,
            KEPT_GROUPS=routing.kept_groups,
            BEST_OF_GROUP=routing.best_of_group,
            BLOCK_GROUPS=next_power_of_2(routing.num_groups),
            BLOCK=next_power_of_2(num_experts),
            LARGEST=LARGEST,
            SMALLEST_SUM=SMALLEST_SUM,
            **chained(logits.device),
            num_warps=1 if num_experts <= 128 else 4,
        )
    return ids, weights


def _check(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> None:
    if logits.dim() != 2:
        raise ValueError(f"route_experts: logits {tuple(logits.shape)}; expected [T, E]")
    fault = routing.fault(logits.shape[1])
    if fault:
        raise ValueError(f"route_experts: logits {tuple(logits.shape)}: {fault}")
    if bias is not None and (bias.shape != logits.shape[1:] or bias.dtype != torch.float32):
        raise ValueError(
            f"route_experts: bias {tuple(bias.shape)} {bias.dtype}; expected float32 {list(logits.shape[1:])}"
        )


def route_experts(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row: `logits` `[T, E]` -> ids int32 `[T, K]`, best first, and weights float32
    `[T, K]`.

    `bias`: float32 `[E]`, for the choice alone, or None. Raises ValueError if shapes, dtypes or numbers do
    not fit.
    """
    if logits.is_cuda:
        return route_experts_triton(logits, routing, bias)
    _check(logits, routing, bias)
    return route_experts_reference(logits, routing, bias)
