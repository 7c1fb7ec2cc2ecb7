"""The steps of a drafter that feeds its own hidden back: EAGLE and EAGLE3 heads, and a lone MTP module.

Each request has a state of the newest verified row: the hidden that the next draft continues from, and the
logits of the first proposal. Shape legend: B requests, N nodes each, R rows of the longest branch, T rows, H
hidden, V vocabulary.
"""

from abc import ABC
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol, TypeVar

import numpy as np
import torch

from ...host_copy import arrays_to_device
from ..drafting.shape import DraftShape
from ..drafting.verify import AcceptResult
from .loops import ChainHead, draft_chain, draft_tree, first_choices, observe_branch, recycled, remember
from .paged import G, PagedDrafter, SharedHead
from .protocol import DraftPrefill, DraftView, Proposal
from .states import DraftStates


class RecyclingHead(ChainHead, SharedHead, Protocol):
    """A draft model with the target's embedding and lm_head that feeds its own hidden back."""


C = TypeVar("C", bound=RecyclingHead)


class RecyclingDrafter(PagedDrafter[C, G], ABC):
    """A drafter with one row of draft KV per verified row, whose newest row gives the first proposal."""

    states: DraftStates
    device: torch.device

    @property
    def anchors(self) -> tuple[torch.Tensor, ...]:
        return self.states.hidden, self.states.logits

    def propose(self, view: DraftView, shape: DraftShape) -> Proposal:
        """Implements `Drafter.propose` in `steps` - 1 forwards, because the first proposal is remembered."""
        state = recycled(self.states, view)
        if shape.is_tree:
            tree = draft_tree(self.head, self.pool, view, state, shape)
            return Proposal(tree.drafts, tree)
        return Proposal(draft_chain(self.head, self.pool, view, state, shape.steps), None)

    def first_proposals(self, view: DraftView, topk: int) -> torch.Tensor:
        return first_choices(self.head, self.states.logits.index_select(0, view.states), view, topk)

    def observe(
        self,
        view: DraftView,
        features: torch.Tensor,
        accepted: AcceptResult,
        emitted: torch.Tensor,
        shape: DraftShape,
    ) -> None:
        """Implements `Drafter.observe` in one forward of R rows per request."""
        self._check_features(features, view.lens.shape[0] * shape.num_nodes)
        observe_branch(self.head, self.pool, self.states, view, features, accepted, emitted, shape)

    def _remember_last(self, items: Sequence[DraftPrefill], out: torch.Tensor) -> None:
        """Writes the states of the final `items` from the outputs `out` `[T, H]` of all their rows."""
        ends = accumulate(len(item.next_ids) for item in items)
        final = [(item.state_row, end - 1) for item, end in zip(items, ends, strict=True) if item.is_final]
        if final:
            states, rows = arrays_to_device(list(np.array(final, dtype=np.int64).T), self.device)
            remember(self.head, self.states, states, out.index_select(0, rows))
