"""All draft steps of a verify, of fixed shape and without a look at the host: what the graphs of chains and trees hold.

Shape legend: B requests, S draft slots planned for per request, N nodes, H draft hidden, Vd draft vocabulary, P pages.
"""

from dataclasses import dataclass

import torch

from ...fixed_rows import attend_rows
from ...kv_pool import KVPool
from ..drafting.choice import DraftSampling
from ..drafting.shape import DraftShape
from ..drafting.tree import DraftTree, grow_tree
from .eagle3_head import DraftPhase, Eagle3Head


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """Where drafts are made: `positions` `[B, S]` and `kv_rows` `[B, S]` of the pool, `page_table` `[B, P]`, `lens` `[B]`
    committed rows; and from what: `hidden` `[B, H]` and `logits` `[B, Vd]` of the first proposal. All on the device."""

    pool: KVPool
    positions: torch.Tensor
    kv_rows: torch.Tensor
    page_table: torch.Tensor
    lens: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor


def draft_chain(head: Eagle3Head, sampling: DraftSampling, rows: DraftRows, num_drafts: int) -> torch.Tensor:
    """Chains `[B, num_drafts]` of target ids; one forward less than drafts, since the first is remembered.

    Step j feeds row j-1 back: it stands at position lens + j - 1 and sees lens + j rows.
    """
    positions, scale, hidden = rows.positions, rows.pool.head_dim**-0.5, rows.hidden
    drafts = [head.target_ids[sampling.choose(rows.logits, positions[:, 0] + 1, head.target_ids)]]
    for step in range(1, num_drafts):
        attend = attend_rows(rows.pool, rows.kv_rows[:, step - 1], rows.page_table, rows.lens + step, scale)
        out = head.forward(hidden, drafts[-1], positions[:, step - 1], attend, DraftPhase.SELF_CHAIN)
        hidden = head.feedback(out)
        chosen = sampling.choose(head.compute_logits(out), positions[:, step] + 1, head.target_ids)
        drafts.append(head.target_ids[chosen])
    return torch.stack(drafts, dim=1)


def draft_tree(head: Eagle3Head, sampling: DraftSampling, rows: DraftRows, shape: DraftShape) -> DraftTree:
    """Trees of `shape`: `steps` choices and `steps` - 1 forwards of `topk` rows per request.

    The nodes of level j stand at position lens + j - 1, behind the rows of all levels before.
    """
    k, count, scale = shape.topk, rows.lens.shape[0], rows.pool.head_dim**-0.5

    def forward(level: int, hidden: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        own_rows = rows.kv_rows[:, (level - 1) * k : level * k].reshape(-1)
        attend = attend_rows(rows.pool, own_rows, rows.page_table, rows.lens + level * k, scale, mask)
        at = rows.positions[:, level - 1 : level].expand(count, k).reshape(-1)
        return head.forward(hidden, tokens, at, attend, DraftPhase.SELF_CHAIN)

    return grow_tree(shape, head, sampling, (rows.hidden, rows.logits), rows.positions[:, 0] + 1, forward)
