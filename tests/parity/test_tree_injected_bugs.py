"""Mistakes with trees, planted one at a time: none goes unnoticed.

The target is a model with real attention; the tree is built by hand around the tokens that it is known to
choose, which stand in rows 2 and 6 of seven with decoys in between, so that all depends on masks, positions
and the move of the kept rows.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from baton.engine.models.llama import LlamaForCausalLM
from baton.engine.request import Request
from baton.engine.row_attention import RowPlan
from baton.engine.sampling.choose import choose_tokens
from baton.engine.sampling.edits import edit_logits
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafters.eagle3 import Eagle3Drafter
from baton.engine.speculative.drafters.protocol import DraftView, Proposal
from baton.engine.speculative.drafting import verify
from baton.engine.speculative.drafting.tree import DraftTree, ancestors
from baton.engine.speculative.step import fused_step
from baton.kernels.compact_kv import compact_kv
from baton.tests.parity.eagle3_engine import Engine, rows_of
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.graph_engine import kv_of

pytestmark = pytest.mark.usefixtures("one_thread")

Plant = Callable[[pytest.MonkeyPatch], None]
PROMPTS = ([5, 9, 200, 31, 7, 7, 90, 18, 3], [17], list(range(40, 64)))
PARAMS = (
    SamplingParams(
        temperature=0.0, max_new_tokens=13, ignore_eos=True, frequency_penalty=0.9, repetition_penalty=1.4
    ),
    SamplingParams(temperature=1.0, seed=5, max_new_tokens=13, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=6, max_new_tokens=13, ignore_eos=True, presence_penalty=0.5),
)
PARENTS = [-1, 0, 0, 1, 1, 2, 2]


@pytest.fixture(scope="module")
def models(
    toy_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    head = write_head(tmp_path_factory.mktemp("head"), head_config(2, (1, 2, 4)), head_tensors())
    return toy_checkpoint("llama", num_hidden_layers=6), head


@pytest.fixture(scope="module")
def plain(models: tuple[Path, Path]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Tokens and target KV without drafts."""
    engine = Engine(models[0])
    requests = [engine.prefill(prompt, p) for prompt, p in zip(PROMPTS, PARAMS, strict=True)]
    return engine.run(requests), [kv_of(engine, request)[0] for request in requests]


def knowing(engine: Engine, requests: Sequence[Request], outputs: list[list[int]]) -> None:
    """Lets the drafter propose the chosen tokens, each beside a decoy and on another branch."""

    def propose(view: DraftView, shape: object) -> Proposal:
        drafts = []
        for request, output, known in zip(requests, outputs, view.lens.tolist(), strict=True):
            following = [*output[known + 1 - request.num_prompt :], 0, 0]
            right, then = following[:2]
            # a penalty on the decoy would change what comes behind `right`
            decoy = then if then != right else right ^ 1
            drafts.append([decoy, right, then, then ^ 1, then ^ 1, then])
        parents = torch.tensor([PARENTS] * len(drafts))
        mask = ancestors(parents, 2)
        tree = DraftTree(torch.tensor(drafts), parents, mask.sum(2) - 1, mask)
        return Proposal(tree.drafts, tree)

    engine.drafter.propose = propose


def check(
    models: tuple[Path, Path],
    plain: tuple[list[list[int]], list[torch.Tensor]],
    plant: Plant | None = None,
) -> None:
    """Raises AssertionError, or whatever the engine raises, unless all is well."""
    outputs, kv = plain
    planting = pytest.MonkeyPatch()
    try:
        if plant is not None:
            plant(planting)
        engine = Engine(*models, steps=2, topk=2, tokens=7)
        requests = [engine.prefill(prompt, p) for prompt, p in zip(PROMPTS, PARAMS, strict=True)]
        knowing(engine, requests, outputs)
        for _ in range(4):
            assert engine.decoder.step(requests).accept_lens == [3, 3, 3]
        assert [request.output_ids for request in requests] == outputs
        for request, wanted in zip(requests, kv, strict=True):
            torch.testing.assert_close(kv_of(engine, request)[0], wanted, atol=2e-4, rtol=1e-4)
        whole = Engine(*models)
        for request in requests:
            ids = request.all_ids[:-1]
            again = whole.prefill(ids, SamplingParams(temperature=0.0, max_new_tokens=1))
            again.output_ids[:] = request.all_ids[-1:]
            for mine, theirs in zip(rows_of(engine, request), rows_of(whole, again), strict=True):
                # The last row depends on the token behind it, which the prefill has chosen otherwise.
                torch.testing.assert_close(mine[: len(ids) - 1], theirs[: len(ids) - 1], atol=2e-4, rtol=1e-4)
    finally:
        planting.undo()


def kept_rows_not_moved(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(fused_step, "compact", lambda *_: None)


def moved_the_wrong_way(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(
        verify, "compact_kv", lambda kv, sources, targets, count: compact_kv(kv, targets, sources, count)
    )


def one_layer_not_moved(planting: pytest.MonkeyPatch) -> None:
    def all_but_the_last(kv: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, count: int) -> None:
        before = kv[:, -1].clone()
        compact_kv(kv, sources, targets, count)
        kv[:, -1] = before

    planting.setattr(verify, "compact_kv", all_but_the_last)


def masked(planting: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def plan(*parts: object, slots: object = None, **settings: bool) -> RowPlan:
        *others, mask = parts
        return RowPlan(*others, None if mask is None else change(mask), **settings)

    planting.setattr(fused_step, "plan_rows", plan)


def branches_see_each_other(planting: pytest.MonkeyPatch) -> None:
    masked(planting, lambda mask: torch.ones_like(mask).tril())


def mask_transposed(planting: pytest.MonkeyPatch) -> None:
    masked(planting, lambda mask: mask.transpose(1, 2).contiguous())


def by_row(positions: torch.Tensor) -> torch.Tensor:
    """As if the nodes of a tree stood behind each other."""
    return (positions.view(-1, 7)[:, :1] + torch.arange(7)).flatten()


def positions_by_row(planting: pytest.MonkeyPatch) -> None:
    body = LlamaForCausalLM.body

    def wrong(self: object, hidden: torch.Tensor, positions: torch.Tensor, *rest: object) -> object:
        is_step = positions.shape[0] == 7 * len(PROMPTS)
        return body(self, hidden, by_row(positions) if is_step else positions, *rest)

    planting.setattr(LlamaForCausalLM, "body", wrong)


def noise_by_row(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(
        fused_step,
        "choose_tokens",
        lambda logits, positions, *rest, **more: choose_tokens(logits, by_row(positions), *rest, **more),
    )


def penalties_of_all_rows_before(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(
        fused_step, "edit_logits", lambda *args, **more: edit_logits(*args, **(more | {"ancestors": None}))
    )


def features_of_the_first_rows(planting: pytest.MonkeyPatch) -> None:
    observe = Eagle3Drafter.observe

    def first_rows(
        self: Eagle3Drafter, view: object, features: object, accepted: object, *rest: object
    ) -> None:
        observe(self, view, features, accepted._replace(path=torch.arange(3).expand_as(accepted.path)), *rest)

    planting.setattr(Eagle3Drafter, "observe", first_rows)


PLANTS = [
    kept_rows_not_moved, moved_the_wrong_way, one_layer_not_moved, branches_see_each_other, positions_by_row,
    mask_transposed, noise_by_row, penalties_of_all_rows_before, features_of_the_first_rows,
]  # fmt: skip


def test_without_a_planted_bug_every_law_holds(models, plain):
    check(models, plain)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_each_planted_bug_is_detected(models, plain, plant):
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check(models, plain, plant)
