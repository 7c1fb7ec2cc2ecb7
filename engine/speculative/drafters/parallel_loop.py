"""The draft forward of a parallel head (P-EAGLE): all drafts but the first come out of one forward.

Behind the last row of true features stand rows of the mask token and the mask's hidden input. Row j of them
predicts draft j + 1. It attends to all committed rows and to the mask rows before it. Shape legend: B
requests, D drafts, H draft hidden, Vd draft vocabulary.
"""

from dataclasses import replace

import torch

from ...kv.pool import KVPool
from ...row_plans import plan_rows
from .eagle3_head import DraftPhase, FeatureHead
from .protocol import DraftView


def draft_parallel(
    head: FeatureHead, pool: KVPool, view: DraftView, logits: torch.Tensor, num_drafts: int
) -> torch.Tensor:
    """Returns chains `[B, num_drafts]` of target ids. `logits` `[B, Vd]` are those of the first proposal."""
    sampling, first = view.sampling, view.proposed[:, 0]
    drafts = sampling.choose(logits, first, head.target_ids)[:, None]
    count, num_masks = view.lens.shape[0], num_drafts - 1
    if not num_masks:
        return drafts
    mask = head.mask_input
    assert mask is not None, "the head drafts token by token"
    rows = view.kv_rows[:, :num_masks].reshape(-1)
    lens = view.lens + num_masks
    plan = plan_rows(pool, rows, view.page_table, lens, is_recorded=view.is_recorded)
    tokens = torch.full_like(rows, head.mask_token)
    positions = view.positions[:, :num_masks]
    hidden = mask.expand(count * num_masks, -1)
    out = head.forward(hidden, tokens, positions.reshape(-1), plan.attend, DraftPhase.SELF_CHAIN)
    each = replace(
        sampling,
        seeds=_spread(sampling.seeds, num_masks),
        temperature=_spread(sampling.temperature, num_masks),
        is_drawn=_spread(sampling.is_drawn, num_masks),
    )
    at = (view.positions[:, 1 : num_masks + 1] + 1).reshape(-1)
    chosen = each.choose(head.compute_logits(out), at, head.target_ids)
    return torch.cat((drafts, chosen.view(count, num_masks)), dim=1)


def _spread(values: torch.Tensor, each: int) -> torch.Tensor:
    """`values` `[B]`, each one `each` times in a row."""
    return values[:, None].expand(-1, each).reshape(-1)
