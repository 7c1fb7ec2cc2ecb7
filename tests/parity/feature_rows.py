"""Records a drafter's features by request and position: received ones and those of its own verifies."""

from collections.abc import Sequence

import torch
from baton.engine.speculative.drafters.eagle3 import Eagle3Drafter
from baton.engine.speculative.drafters.protocol import DraftPrefill, DraftView
from baton.engine.speculative.drafting.shape import DraftShape
from baton.engine.speculative.drafting.verify import AcceptResult

Known = dict[int, dict[int, torch.Tensor]]


class FeatureRows:
    """Watches `drafter`. A request goes by the first of its pages.

    `prefilled` and `decoded`: its features `[K*H]` by position.
    """

    def __init__(self, drafter: Eagle3Drafter) -> None:
        self.prefilled: Known = {}
        self.decoded: Known = {}
        self._prefill, self._observe = drafter.prefill, drafter.observe
        drafter.prefill, drafter.observe = self._watch_prefill, self._watch_observe

    def clear(self) -> None:
        for known in (self.prefilled, self.decoded):
            known.clear()

    def of(self, first_page: int) -> dict[int, torch.Tensor]:
        """All features of a request by position."""
        return self.prefilled.get(first_page, {}) | self.decoded.get(first_page, {})

    def _watch_prefill(self, items: Sequence[DraftPrefill]) -> None:
        for item in items:
            _keep(self.prefilled, item.pages[0], item.start, item.features)
        self._prefill(items)

    def _watch_observe(
        self,
        view: DraftView,
        features: torch.Tensor,
        accepted: AcceptResult,
        emitted: torch.Tensor,
        shape: DraftShape,
    ) -> None:
        if not view.is_recorded:
            by_request = features.view(view.lens.shape[0], shape.num_nodes, -1)
            pages, starts, counts = (x.tolist() for x in (view.page_table[:, 0], view.lens, emitted))
            for i, (page, start, count) in enumerate(zip(pages, starts, counts, strict=True)):
                _keep(self.decoded, page, start, by_request[i, accepted.path[i, :count]])
        self._observe(view, features, accepted, emitted, shape)


def _keep(known: Known, page: int, start: int, features: torch.Tensor) -> None:
    known.setdefault(page, {}).update(enumerate(features.clone(), start))
