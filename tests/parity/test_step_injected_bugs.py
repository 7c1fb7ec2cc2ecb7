"""Mistakes with the one step, planted one at a time: a law that is tested elsewhere breaks for each."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baton.engine.host_copy import to_device
from baton.engine.sampling import draws
from baton.engine.speculative.drafters import eagle3, prefill_graphs
from baton.engine.speculative.drafters.eagle3 import Eagle3Drafter
from baton.engine.speculative.step.async_decoder import AsyncDecoder
from baton.engine.speculative.step.device_state import DeviceState
from baton.engine.speculative.step.step_graphs import StepGraphs
from baton.tests.parity import (
    test_adaptive_steps,
    test_draft_graphs,
    test_eagle3,
    test_graph_mechanisms,
    test_overlap,
)
from baton.tests.unit.engine.sampling import test_sampler

pytestmark = pytest.mark.usefixtures("one_thread")

Law = Callable[..., None]


def noise_of_another_position(planting: pytest.MonkeyPatch) -> None:
    first = Eagle3Drafter.first_proposals
    planting.setattr(
        Eagle3Drafter,
        "first_proposals",
        lambda self, view, topk: first(self, replace(view, proposed=view.proposed + 1), topk),
    )


def draft_state_written_without_a_token(planting: pytest.MonkeyPatch) -> None:
    observe = Eagle3Drafter.observe
    planting.setattr(
        Eagle3Drafter,
        "observe",
        lambda self, view, features, accepted, emitted, shape: observe(
            self, view, features, accepted, emitted.clamp(min=1), shape
        ),
    )


def padded_places_keep_what_they_had(planting: pytest.MonkeyPatch) -> None:
    def tell(self: StepGraphs, slots: tuple[int, ...]) -> None:
        self.slots[: len(slots)].copy_(to_device(torch.tensor(slots), self.device))

    planting.setattr(StepGraphs, "tell", tell)


def batch_of_an_older_state(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(AsyncDecoder, "_is_known", lambda self, requests: requests == self._batch.requests)


def emitted_tokens_not_counted(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(DeviceState, "count_tokens", lambda *_: None)


def draft_vocabulary_not_bound(planting: pytest.MonkeyPatch) -> None:
    bound = prefill_graphs.parameters_of
    planting.setattr(
        eagle3,
        "parameters_of",
        lambda head: [(name, tensor) for name, tensor in bound(head) if name != "target_ids"],
    )


def mass_before_top_k(planting: pytest.MonkeyPatch) -> None:
    kept = draws.kept_candidates

    def with_all(scaled: torch.Tensor, limit: torch.Tensor, total: object, *rest: torch.Tensor) -> object:
        everything = draws.masses(scaled).sum(dim=1)
        return kept(scaled, limit, everything, *rest)

    planting.setattr(draws, "kept_candidates", with_all)


def law_of_exchanged_ids(target: Path, head: Path) -> None:
    test_graph_mechanisms.test_m2_2_exchanged_weights_are_found_at_replay(target, head, "target_ids")


PLANTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[Law, dict[str, object]]] = {
    noise_of_another_position: (
        test_adaptive_steps.test_unrequested_proposals_match_where_drafts_would_have,
        {"oracle": ...},
    ),
    draft_state_written_without_a_token: (
        test_overlap.test_a_nucleus_wider_than_the_devices_candidates_uses_the_host,
        {"target": ..., "head": ..., "drafts": "chain", "monkeypatch": ...},
    ),
    padded_places_keep_what_they_had: (
        test_overlap.test_a_padding_row_advances_no_request,
        {"target": ..., "head": ...},
    ),
    batch_of_an_older_state: (
        test_draft_graphs.test_m5_2_a_batch_of_an_older_state_is_gathered_anew,
        {"target": ..., "head": ...},
    ),
    emitted_tokens_not_counted: (
        test_eagle3.test_penalties_see_the_drafts_of_the_same_block,
        {"oracle": ...},
    ),
    draft_vocabulary_not_bound: (law_of_exchanged_ids, {"target": ..., "head": ...}),
    mass_before_top_k: (
        test_sampler.test_top_p_after_top_k_does_not_depend_on_other_rows,
        {"form": test_sampler.choose.choose_exact},
    ),
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_each_planted_bug_breaks_its_law(request: pytest.FixtureRequest, plant) -> None:
    law, wanted = PLANTS[plant]
    fixtures = {
        name: request.getfixturevalue(name) if value is ... else value for name, value in wanted.items()
    }
    law(**fixtures)  # holds
    with pytest.MonkeyPatch.context() as planting:
        plant(planting)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            law(**fixtures)
