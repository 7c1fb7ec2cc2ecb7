"""What the launches of joined experts share, whatever the form of their weights.

The first products choose the experts of their row, and the second add them and end in the residual sum. See
`few_experts`.

Legend: E experts, K experts of a row, H hidden size.
"""

from __future__ import annotations

from .route_experts import choices_of, finite_logits, scores_of
from .triton_jit import jit, tl


@jit
def choose_expert(
    p_logits: tl.tensor,
    p_bias: tl.tensor,
    p_id: tl.tensor,
    p_weight: tl.tensor,
    choice: tl.tensor,
    is_stored: tl.tensor,
    scale: tl.tensor,
    TOP_K: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SUM: tl.constexpr,
) -> tl.tensor:
    """The expert number `choice` of a row with logits at `p_logits` `[E]`, as `route_experts` chooses.

    With `is_stored` it and its weight go to `p_id` and `p_weight`.
    """
    i_expert = tl.arange(0, BLOCK)
    m_expert = i_expert < NUM_EXPERTS
    b_logit = tl.load(p_logits + i_expert, mask=m_expert, other=0.0)
    b_logit = finite_logits(b_logit, m_expert, LARGEST)
    b_choice = choices_of(b_logit, p_bias, i_expert, m_expert, IS_SIGMOID, HAS_BIAS, False)
    is_above = b_choice[:, None] > b_choice[None, :]
    is_before = (b_choice[:, None] == b_choice[None, :]) & (i_expert[:, None] < i_expert[None, :])
    b_rank = tl.sum((is_above | is_before).to(tl.int32), axis=0)
    expert = tl.sum(tl.where(b_rank == choice, i_expert, 0))
    if is_stored:
        b_score = scores_of(b_logit, IS_SIGMOID)
        weight = tl.sum(tl.where(b_rank == choice, b_score, 0.0))
        if IS_NORMALISED:
            weight = weight / (tl.sum(tl.where(b_rank < TOP_K, b_score, 0.0)) + SMALLEST_SUM)
        tl.store(p_id, expert)
        tl.store(p_weight, weight * scale)
    return expert


@jit
def store_row_sum(
    b_total: tl.tensor,
    b_residual: tl.tensor,
    p_norm: tl.tensor,
    p_total: tl.tensor,
    p_z: tl.tensor,
    p_sum: tl.tensor,
    row: tl.tensor,
    i_out: tl.tensor,
    HIDDEN: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    """As `row_product.store_sum`, of the outputs `[OUT]` of one row; the sum of squares goes to `p_sum`."""
    dtype: tl.constexpr = p_total.dtype.element_ty
    m_out = i_out < HIDDEN
    b_rounded = (b_total.to(dtype).to(tl.float32) + b_residual).to(dtype)
    tl.store(p_total + row * HIDDEN + i_out, b_rounded, mask=m_out)
    if HAS_NORM:
        b_wide = tl.where(m_out, b_rounded.to(tl.float32), 0.0)
        b_norm = tl.load(p_norm + i_out, mask=m_out, other=0.0).to(tl.float32) + OFFSET
        tl.store(p_z + row * HIDDEN + i_out, (b_wide * b_norm).to(dtype), mask=m_out)
        tl.store(p_sum, tl.sum(b_wide * b_wide))
