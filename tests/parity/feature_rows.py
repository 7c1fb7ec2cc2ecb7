"""Records a drafter's features by request and position: received ones and those of its own verifies."""

from collections.abc import Sequence

import torch
from baton.engine.speculative.chain import ChainPlan
from baton.engine.speculative.draft_worker import DraftPrefill, DraftWorker

Known = dict[int, dict[int, torch.Tensor]]


class FeatureRows:
    """Watches `drafter`. A request goes by the first of its pages.

    `prefilled` and `decoded`: its features `[K*H]` by position. `accept_lens`: of its verifies, in order.
    """

    def __init__(self, drafter: DraftWorker) -> None:
        self.prefilled: Known = {}
        self.decoded: Known = {}
        self.accept_lens: dict[int, list[int]] = {}
        self._prefill, self._extend = drafter.prefill, drafter.extend
        drafter.prefill, drafter.extend = self._watch_prefill, self._watch_extend

    def clear(self) -> None:
        for known in (self.prefilled, self.decoded, self.accept_lens):
            known.clear()

    def of(self, first_page: int) -> dict[int, torch.Tensor]:
        """All features of a request by position."""
        return self.prefilled.get(first_page, {}) | self.decoded.get(first_page, {})

    def _watch_prefill(self, items: Sequence[DraftPrefill]) -> None:
        for item in items:
            _keep(self.prefilled, item.pages[0], item.start, item.features)
        self._prefill(items)

    def _watch_extend(
        self, chain: ChainPlan, rows: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor, features: torch.Tensor,
        accept_len: torch.Tensor,
    ) -> None:  # fmt: skip
        by_request = features.view(*ids.shape, -1)
        first_pages = chain.page_table[:, 0].tolist()
        for page, start, mine, count in zip(
            first_pages, chain.lens, by_request, accept_len.tolist(), strict=True
        ):
            _keep(self.decoded, page, start, mine[:count])
            self.accept_lens.setdefault(page, []).append(count)
        self._extend(chain, rows, slots, ids, features, accept_len)


def _keep(known: Known, page: int, start: int, features: torch.Tensor) -> None:
    known.setdefault(page, {}).update(enumerate(features.clone(), start))
