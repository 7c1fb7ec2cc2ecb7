"""Mistakes with trees, planted one at a time: none goes unnoticed.

The target is a model with real attention; the tree is built by hand around the tokens that it is known to
choose, which stand in rows 2 and 6 of seven with decoys in between, so that all depends on masks, positions
and the move of the kept rows.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from baton.engine.batch import fixed_rows
from baton.engine.graphs.static import load_rows
from baton.engine.request import Request
from baton.engine.sampler import SamplingBatch
from baton.engine.sampling_params import SamplingParams
from baton.engine.speculative import spec_decoder, verify
from baton.engine.speculative.chain import chain_batch
from baton.engine.speculative.spec_decoder import SpecDecoder
from baton.engine.speculative.tree import DraftTree, ancestors
from baton.kernels.compact_kv import compact_kv
from baton.tests.parity.eagle3_engine import Engine, rows_of
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.graph_engine import arena, kv_of, with_graphs

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

    def propose_tree(shape: object, plan: object, *_: object) -> DraftTree:
        drafts = []
        for request, output, known in zip(requests, outputs, plan.lens, strict=True):
            following = [*output[known + 1 - request.num_prompt :], 0, 0]
            right, then = following[:2]
            decoy = (
                then if then != right else right ^ 1
            )  # a penalty on it would change what comes behind `right`
            drafts.append([decoy, right, then, then ^ 1, then ^ 1, then])
        parents = torch.tensor([PARENTS] * len(drafts))
        mask = ancestors(parents, 2)
        return DraftTree(torch.tensor(drafts), parents, mask.sum(2) - 1, mask)

    engine.drafter.propose_tree = propose_tree


def check(
    models: tuple[Path, Path],
    plain: tuple[list[list[int]], list[torch.Tensor]],
    plant: Plant | None = None,
    *,
    has_graphs: bool = True,
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
        if has_graphs:
            with_graphs(engine, arena())
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
    planting.setattr(spec_decoder, "compact", lambda *_: None)


def moved_the_wrong_way(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(verify, "compact_kv", lambda kv, sources, targets: compact_kv(kv, targets, sources))


def one_layer_not_moved(planting: pytest.MonkeyPatch) -> None:
    def all_but_the_last(kv: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        before = kv[:, -1].clone()
        compact_kv(kv, sources, targets)
        kv[:, -1] = before

    planting.setattr(verify, "compact_kv", all_but_the_last)


def branches_see_each_other(planting: pytest.MonkeyPatch) -> None:
    def causal(plan: object, tokens: torch.Tensor, **options: object) -> object:
        mask = options.get("tree_mask")
        if mask is not None:
            options["tree_mask"] = torch.ones_like(mask).tril()
        return chain_batch(plan, tokens, **options)

    planting.setattr(spec_decoder, "chain_batch", causal)


def positions_by_row(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(
        spec_decoder,
        "chain_batch",
        lambda *args, **options: chain_batch(*args, **(options | {"positions": None})),
    )


def mask_transposed(planting: pytest.MonkeyPatch) -> None:
    def transposed(*args: object, tree_mask: torch.Tensor | None = None, **options: object) -> object:
        mask = None if tree_mask is None else tree_mask.transpose(1, 2).contiguous()
        return chain_batch(*args, tree_mask=mask, **options)

    planting.setattr(spec_decoder, "chain_batch", transposed)


def noise_by_row(planting: pytest.MonkeyPatch) -> None:
    at = SamplingBatch.at

    def by_row(self: SamplingBatch, positions: torch.Tensor) -> SamplingBatch:
        return at(self, (positions.view(-1, 7)[:, :1] + torch.arange(7)).flatten())

    planting.setattr(SamplingBatch, "at", by_row)


def penalties_of_all_rows_before(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(
        spec_decoder, "branches", lambda drafts, parents: [drafts[:node] for node in range(len(parents))]
    )


def features_of_the_first_rows(planting: pytest.MonkeyPatch) -> None:
    extend = SpecDecoder._extend

    def first_rows(self: SpecDecoder, step: object, output: object, verdict: object) -> None:
        extend(self, step, output, verdict._replace(path=torch.arange(3).expand_as(verdict.path)))

    planting.setattr(SpecDecoder, "_extend", first_rows)


def mask_of_the_step_before(planting: pytest.MonkeyPatch) -> None:
    def load_but_the_mask(static: torch.Tensor, values: torch.Tensor, end: int, *, name: str) -> None:
        if name != "tree_mask":
            load_rows(static, values, end, name=name)

    planting.setattr(fixed_rows, "load_rows", load_but_the_mask)


PLANTS = [
    kept_rows_not_moved, moved_the_wrong_way, one_layer_not_moved, branches_see_each_other, positions_by_row,
    mask_transposed, noise_by_row, penalties_of_all_rows_before, features_of_the_first_rows, mask_of_the_step_before,
]  # fmt: skip


@pytest.mark.parametrize("has_graphs", [False, True])
def test_without_a_plant_all_is_well(models, plain, has_graphs):
    check(models, plain, has_graphs=has_graphs)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_each_planted_mistake_is_noticed(models, plain, plant):
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check(models, plain, plant, has_graphs=plant is mask_of_the_step_before)
