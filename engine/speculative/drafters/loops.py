"""The draft loops of a token-by-token drafter. Shapes are fixed, and no operation synchronises with the host.

Shape legend: B requests, S spare slots of each, N nodes, R rows of the longest branch, H draft hidden, Vd
draft vocabulary.
"""

from typing import Protocol

import torch

from ....kernels.look_up_rows import Lookup, look_up_rows
from ....kernels.select_rows import select_last_rows
from ...kv.pool import KVPool
from ...models.layers import Attend
from ...row_plans import plan_rows
from ..drafting.shape import DraftShape
from ..drafting.tree import DraftHead, DraftTree, grow_tree
from ..drafting.verify import AcceptResult
from .eagle3_head import DraftPhase
from .protocol import DraftView
from .states import DraftStates


class ChainHead(DraftHead, Protocol):
    """A draft model that feeds its own hidden back, one layer of KV deep."""

    def forward(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        phase: DraftPhase,
    ) -> torch.Tensor:
        """Hidden rows `[T, H]` and tokens `[T]` at `positions` `[T]` -> the output `[T, H]`."""


def recycled(states: DraftStates, view: DraftView) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden `[B, H]` and the logits `[B, Vd]` of the first proposals of `view`'s requests."""
    hidden, logits = look_up_rows(Lookup(states.hidden, view.states), Lookup(states.logits, view.states))
    return hidden, logits


def remember(
    head: ChainHead,
    states: DraftStates,
    rows: torch.Tensor,
    out: torch.Tensor,
    emitted: torch.Tensor | None = None,
) -> None:
    """Writes the outputs `[R, H]` of the newest rows of R requests into their states `rows` int64 `[R]`.

    A request whose `emitted` int64 `[R]` is 0 keeps its state, because its output row is undefined.
    """
    states.write(rows, head.feedback(out), head.compute_logits(out), emitted)


def observe_branch(
    head: ChainHead,
    pool: KVPool,
    states: DraftStates,
    view: DraftView,
    features: torch.Tensor,
    accepted: AcceptResult,
    emitted: torch.Tensor,
    shape: DraftShape,
) -> None:
    """Implements `Drafter.observe` in one forward of R rows per request, along the accepted branches."""
    count = shape.num_path
    features = accepted_features(features, accepted, shape)
    rows = view.kv_rows[:, :count].reshape(-1)
    plan = plan_rows(pool, rows, view.page_table, view.extend_lens, is_recorded=view.is_recorded)
    positions = view.positions[:, :count].reshape(-1)
    phase = DraftPhase.FROM_TARGET_FEATURES
    out = head.forward(features, accepted.tokens.reshape(-1), positions, plan, phase)
    remember(head, states, view.states, select_last_rows(out, emitted), emitted)


def draft_chain(
    head: ChainHead,
    pool: KVPool,
    view: DraftView,
    state: tuple[torch.Tensor, torch.Tensor],
    num_drafts: int,
) -> torch.Tensor:
    """Returns chains `[B, num_drafts]` of target ids, from `num_drafts` - 1 forwards.

    `state` is the hidden `[B, H]` and the logits `[B, Vd]` of the first proposal. Step j feeds row j-1 back.
    That row has position lens + j - 1 and attends to lens + j rows.
    """
    positions, proposed, sampling, (hidden, logits) = view.positions, view.proposed, view.sampling, state
    drafts = [sampling.choose(logits, proposed[:, 0], head.target_ids)]
    for step in range(1, num_drafts):
        rows = view.kv_rows[:, step - 1]
        plan = plan_rows(pool, rows, view.page_table, view.chain_lens[step], is_recorded=view.is_recorded)
        out = head.forward(hidden, drafts[-1], positions[:, step - 1], plan, DraftPhase.SELF_CHAIN)
        hidden = head.feedback(out)
        drafts.append(sampling.choose(head.compute_logits(out), proposed[:, step], head.target_ids))
    return torch.stack(drafts, dim=1)


def first_choices(head: DraftHead, logits: torch.Tensor, view: DraftView, topk: int) -> torch.Tensor:
    """The target ids of the `topk` first drafts, int64 `[B, topk]`, from remembered logits `[B, Vd]`."""
    positions = view.proposed[:, 0]
    if topk == 1:  # as a chain proposes: one kernel, where a ranking scores the whole vocabulary
        return view.sampling.choose(logits, positions, head.target_ids)[:, None]
    ids, _ = view.sampling.rank(logits, positions, head.target_ids, topk)
    return ids


def accepted_features(features: torch.Tensor, accepted: AcceptResult, shape: DraftShape) -> torch.Tensor:
    """The rows `[B*R, K*Ht]` of the accepted branches among those of all nodes, `[B*N, K*Ht]`."""
    if not shape.is_tree:
        return features
    count = features.shape[0] // shape.num_nodes
    firsts = torch.arange(count, device=features.device)[:, None] * shape.num_nodes
    return features.index_select(0, (firsts + accepted.path).reshape(-1))


def draft_tree(
    head: ChainHead,
    pool: KVPool,
    view: DraftView,
    state: tuple[torch.Tensor, torch.Tensor],
    shape: DraftShape,
) -> DraftTree:
    """Returns trees of `shape`, from `steps` choices and `steps` - 1 forwards of `topk` rows per request.

    `state` is that of `draft_chain`. The nodes of level j have position lens + j - 1. Their KV rows follow
    the rows of all earlier levels.
    """
    k, count = shape.topk, view.lens.shape[0]

    def forward(level: int, hidden: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = view.kv_rows[:, (level - 1) * k : level * k].reshape(-1)
        lens = view.lens + level * k
        plan = plan_rows(pool, rows, view.page_table, lens, mask, is_recorded=view.is_recorded)
        at = view.positions[:, level - 1 : level].expand(count, k).reshape(-1)
        return head.forward(hidden, tokens, at, plan, DraftPhase.SELF_CHAIN)

    return grow_tree(shape, head, view.sampling, state, view.proposed[:, 0], forward)
