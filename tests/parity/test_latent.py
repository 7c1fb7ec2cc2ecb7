"""DeepSeek models on every path: both forms of attention over latents, graphs, drafts, hand-offs, bugs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baton.engine.attention import latent_attention
from baton.engine.models import moe
from baton.engine.models.deepseek_config import LatentConfig
from baton.engine.models.registry import load_model_config
from baton.kernels.expanded_attention import HeadSizes, is_expansion_cheaper
from baton.tests.parity.answer_engine import CHAIN, TREE, Models, Way
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.graph_engine import arena, with_graphs
from baton.tests.parity.test_batch_invariance import answers_of
from baton.tests.parity.test_graph_paths import assert_same
from baton.tests.parity.toy_engine import ToyEngine, random_ids
from baton.tests.parity.toy_models import reference_logits, reference_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
FORMS = {"expanded": True, "absorbed": False}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_both_forms_give_the_logits_of_transformers(
    toy_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str, form: str
):
    monkeypatch.setattr(latent_attention, "is_expansion_cheaper", lambda *_: FORMS[form])
    monkeypatch.setattr(latent_attention, "EXPANDED_BYTES", 20000)  # heads in two parts
    path, prompt, other = toy_checkpoint(family), random_ids(90, seed=3), random_ids(37, seed=4)
    expected = reference_logits(reference_model(path), prompt)
    ours = ToyEngine(path)
    found = [ours.run(("all", prompt[:40])).logits]
    found.append(ours.run(("all", prompt[40:53]), ("other", other)).logits[:13])
    found.append(ours.run(("all", prompt[53:])).logits)
    torch.testing.assert_close(torch.cat(found), expected, atol=TOLERANCE, rtol=0)


def test_expansion_pays_from_171_new_rows_of_deepseek_v3():
    sizes = HeadSizes(key=128, rope=64, value=128, rank=512)
    for context in (0, 10_000_000):
        costs = [is_expansion_cheaper([rows], [context + rows], sizes) for rows in (170, 171, 172)]
        assert costs == ([False, True, True] if context else [False, False, False])
    assert is_expansion_cheaper([400], [400], sizes)
    assert not is_expansion_cheaper([1] * 400, [500] * 400, sizes), "rows of decode steps are absorbed"


@pytest.mark.parametrize(
    "shape",
    [pytest.param({}, id="chain", marks=pytest.mark.slow), pytest.param({"topk": 2, "tokens": 8}, id="tree")],
)
def test_graphs_and_drafts_give_the_tokens_of_eager_steps(
    toy_checkpoint: Callable[..., Path], head: Path, shape: dict[str, int]
):
    target = toy_checkpoint("deepseek_v3", num_hidden_layers=4)
    eager, graphed = Engine(target, head, **shape), Engine(target, head, **shape)
    with_graphs(graphed, arena())
    assert_same(eager, graphed)


def test_batches_chunks_graphs_drafts_and_hand_offs_give_the_same_tokens(toy_checkpoint: Callable[..., Path]):
    config = load_model_config(toy_checkpoint("deepseek_v3"))
    models = Models(config, torch.float32, "cpu")
    prompts = [random_ids(n, seed=n) for n in (5, 17, 70)]
    alone = answers_of(models, Way(), prompts, [], is_invariant=False)
    for way in (
        Way(batch=3, chunk=16),
        Way(shape=CHAIN, batch=3, chunk=7, has_graphs=True),
        Way(shape=TREE, batch=2, chunk=50, is_disaggregated=True),
        Way(shape=TREE, batch=3, chunk=16, has_graphs=True, has_breaks=True, is_disaggregated=True),
    ):
        found = answers_of(models, way, prompts, alone, is_invariant=False)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in alone], way
        if way.shape.steps:
            accepted = {count for answer in found for count in answer.accept_lens}
            assert min(accepted) < max(accepted), way


def without_mscale(monkeypatch: pytest.MonkeyPatch, engine: ToyEngine) -> None:
    config = engine.config
    assert isinstance(config, LatentConfig)
    engine.runner.attention.scale = config.head_dim**-0.5


def halves_instead_of_neighbours(monkeypatch: pytest.MonkeyPatch, engine: ToyEngine) -> None:
    for layer in engine.model.layers:
        layer.attention.config = replace(layer.attention.config, is_interleaved=False)


def rotated_at_the_wrong_end(monkeypatch: pytest.MonkeyPatch, engine: ToyEngine) -> None:
    """The sizes of the two parts of a query are exchanged."""
    for layer in engine.model.layers:
        config = layer.attention.config
        queries = layer.attention.query_up.weight.view(config.num_heads, config.head_dim, -1)
        queries.copy_(queries.roll(config.rope_size, dims=1))


def bias_in_the_weights(monkeypatch: pytest.MonkeyPatch, engine: ToyEngine) -> None:
    real = moe.recorded_route_experts

    def biased(logits, routing, bias):
        ids, _ = real(logits, routing, bias)
        weights = (torch.sigmoid(logits) + bias).gather(1, ids.long())
        return ids, weights / weights.sum(-1, keepdim=True) * routing.scale

    monkeypatch.setattr(moe, "recorded_route_experts", biased)


def latents_without_norm(monkeypatch: pytest.MonkeyPatch, engine: ToyEngine) -> None:
    for layer in engine.model.layers:
        layer.attention.latent_norm = lambda x: x


def groups_by_their_best(monkeypatch: pytest.MonkeyPatch, engine: ToyEngine) -> None:
    for layer in engine.model.layers[1:]:
        layer.mlp.config = replace(layer.mlp.config, best_of_group=1)


def no_shared_expert(monkeypatch: pytest.MonkeyPatch, engine: ToyEngine) -> None:
    for layer in engine.model.layers[1:]:
        layer.mlp.shared = None


BUGS = (
    without_mscale,
    halves_instead_of_neighbours,
    rotated_at_the_wrong_end,
    bias_in_the_weights,
    latents_without_norm,
    groups_by_their_best,
    no_shared_expert,
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_changes_the_logits(
    toy_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch, ToyEngine], None],
):
    path, prompt = toy_checkpoint("deepseek_v3"), random_ids(60, seed=3)
    expected = reference_logits(reference_model(path), prompt)
    engine = ToyEngine(path)
    bug(monkeypatch, engine)
    assert (engine.run(("all", prompt)).logits - expected).abs().max() > 100 * TOLERANCE


def test_latents_take_one_plane(toy_checkpoint: Callable[..., Path]):
    config = load_model_config(toy_checkpoint("deepseek_v3"))
    layout = config.kv_layout(config.num_layers, 16, torch.bfloat16)
    assert (layout.planes, layout.page_shape) == (("latent",), (3, 1, 16, 1, 32))
