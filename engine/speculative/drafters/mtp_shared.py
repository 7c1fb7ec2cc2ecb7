"""The drafter of one MTP module, which is applied again to its own hidden in every further draft step.

Rows of drafts are provisional; each step rewrites the rows that it verified from the target's features. Shape
legend: T rows, H hidden.
"""

from collections.abc import Sequence

import torch

from .mtp_graphs import MtpPrefillGraphs
from .mtp_head import MtpHead
from .mtp_prefill import MtpDrafter
from .protocol import DraftPrefill
from .recycling import RecyclingDrafter
from .states import DraftStates


class SharedMtpDrafter(RecyclingDrafter[MtpHead, MtpPrefillGraphs], MtpDrafter):
    """One module that is applied to its own hidden in every draft step behind the first one."""

    states: DraftStates

    def __init__(
        self, head: MtpHead, *, num_pages: int, page_size: int, capacity: int = 64, row_multiple: int = 1
    ) -> None:
        assert head.num_modules == 1, head
        super().__init__(head, num_pages=num_pages, page_size=page_size, row_multiple=row_multiple)
        layer = head.config.layer
        self.states = DraftStates(capacity, layer.hidden_size, layer.vocab_size, head.dtype, self.device)

    def _with_dirty_rows(self, item: DraftPrefill) -> tuple[int, torch.Tensor]:
        return item.start, item.features

    def _remember(
        self,
        items: Sequence[DraftPrefill],
        widened: Sequence[tuple[int, torch.Tensor]],
        out: torch.Tensor,
    ) -> None:
        self._remember_last(items, out)
