"""The drafter of one MTP module, which is applied again to its own hidden in every further draft step.

Rows of drafts are provisional; each step rewrites the rows that it verified from the target's features. Shape
legend: B requests, N nodes each, R rows of the longest branch, H hidden, V vocabulary.
"""

from collections.abc import Sequence

import torch

from ...host_copy import to_device
from ..drafting.shape import DraftShape
from ..drafting.verify import AcceptResult
from .loops import draft_chain, draft_tree, first_choices, observe_branch, recycled, remember
from .mtp_head import MtpHead
from .mtp_prefill import MtpDrafter
from .protocol import DraftPrefill, DraftView, Proposal
from .states import DraftStates


class SharedMtpDrafter(MtpDrafter):
    """One module that is applied to its own hidden in every draft step behind the first one."""

    states: DraftStates

    def __init__(
        self, head: MtpHead, *, num_pages: int, page_size: int, capacity: int = 64, row_multiple: int = 1
    ) -> None:
        assert head.num_modules == 1, head
        super().__init__(head, num_pages=num_pages, page_size=page_size, row_multiple=row_multiple)
        layer = head.config.layer
        self.states = DraftStates(capacity, layer.hidden_size, layer.vocab_size, head.dtype, self.device)

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

    def _with_dirty_rows(self, item: DraftPrefill) -> tuple[int, torch.Tensor]:
        return item.start, item.features

    def _remember(
        self,
        items: Sequence[DraftPrefill],
        widened: Sequence[tuple[int, torch.Tensor]],
        out: torch.Tensor,
    ) -> None:
        ends = torch.tensor([len(item.next_ids) for item in items]).cumsum(0) - 1
        final = [i for i, item in enumerate(items) if item.is_final]
        if final:
            rows = to_device(torch.tensor([items[i].state_row for i in final]), self.device)
            last = out[to_device(ends[final], self.device)]
            remember(self.head, self.states, rows, last)
