"""EAGLE heads and EAGLE3 heads of several layers, of one feature or of parallel drafts, against formulas."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafters.eagle3 import Eagle3Model
from baton.engine.speculative.drafters.eagle3_head import FeatureHead
from baton.engine.speculative.drafters.eagle_head import EagleHead
from baton.engine.speculative.drafters.protocol import DraftView, Proposal
from baton.engine.speculative.drafting.shape import DraftShape
from baton.tests.parity.eagle3_engine import STEPS, Engine, head_layer, record_drafts, rms, rotate
from baton.tests.parity.eagle3_toys import (
    DEFAULT_IDS,
    HIDDEN,
    SHAPE,
    head_config,
    head_tensors,
    successor,
    write_head,
    write_oracle,
    write_oracle_head,
)
from baton.tests.parity.eagle_toys import (
    TARGET_IDS,
    SourcedEngine,
    eagle_config,
    eagle_tensors,
    random_layers,
    write_eagle_oracle,
)
from baton.tests.parity.graph_engine import BREAKABLE, FULL, arena, kv_of, with_graphs
from baton.tests.parity.overlap_engine import overlapped, run_ahead
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model
from baton.tests.variants import slow, witnesses

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 24
PROMPTS = ([5, 9, 200, 31, 7, 7, 90, 18, 3], [17], list(range(40, 64)), [250, 3, 250, 3, 250, 3])
PATHS: dict[str, set | None] = {"eager": None, "breakable": BREAKABLE, "full": FULL}
SHAPES = {"chain": {}, "tree": {"steps": 3, "topk": 2, "tokens": 7}}
Weights = dict[str, torch.Tensor]
QUICK = (
    ("eagle", "chain", "breakable"),
    ("eagle", "tree", "full"),
    ("eagle3 of three layers", "chain", "full"),
    ("eagle of two layers", "tree", "eager"),
    ("parallel eagle3", "chain", "full"),
)


def greedy(count: int = COUNT) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)


def one_feature() -> tuple[dict[str, object], Weights]:
    """An EAGLE3 head that reads the target's hidden behind its final norm."""
    config = head_config(2)
    config["eagle_config"] = {"use_aux_hidden_state": False}
    return config, head_tensors(seed=6, num_features=1)


def deep() -> tuple[dict[str, object], Weights]:
    """An EAGLE3 head of three layers."""
    config = head_config(3, architectures=["LlamaForCausalLMEagle3Deep"], num_hidden_layers=3)
    return config, head_tensors(seed=7) | random_layers(("layers.1.", "layers.2."), 8)


def eagle() -> tuple[dict[str, object], Weights]:
    return eagle_config(), eagle_tensors(seed=3)


def deep_eagle() -> tuple[dict[str, object], Weights]:
    return eagle_config(), eagle_tensors(seed=4, num_layers=2)


def parallel() -> tuple[dict[str, object], Weights]:
    """A P-EAGLE head of two layers, whose mask is a feature."""
    mask = 0.5 * torch.randn(1, 1, 3 * HIDDEN, generator=torch.Generator().manual_seed(9))
    tensors = head_tensors(seed=10) | random_layers(("layers.1.",), 11) | {"mask_hidden": mask}
    return head_config(2, num_hidden_layers=2, ptd_token_id=MASK), tensors


def parallel_speculators() -> tuple[dict[str, object], Weights]:
    """The same in the other format, with a mask of the head's own width."""
    mask = 0.5 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(12))
    config = head_config(4, speculators_model_type="peagle", mask_token_id=MASK)
    return config, head_tensors(seed=13) | {"mask_hidden": mask}


MASK = 201  # a token that no prompt has
HEADS: dict[str, Callable[[], tuple[dict[str, object], Weights]]] = {
    "eagle": eagle,
    "eagle of two layers": deep_eagle,
    "eagle3 of three layers": deep,
    "eagle3 of one feature": one_feature,
    "parallel eagle3": parallel,
    "parallel eagle3 of speculators": parallel_speculators,
}
BOTH = [(head, shape) for head in HEADS for shape in SHAPES if shape == "chain" or "parallel" not in head]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {name: write_head(folder / name, *make()) for name, make in HEADS.items()}


@pytest.fixture(scope="module")
def answers(deep_target: Path) -> list[list[int]]:
    return [reference_greedy(reference_model(deep_target), prompt, COUNT) for prompt in PROMPTS]


# --- formulas -----------------------------------------------------------------------------------------------


def plain(w: Weights, prefix: str, normed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """A plain layer over all rows `[T, H]`, position i in row i, from its normed input and the residual."""
    count, dim = normed.shape[0], SHAPE["head_dim"]
    q, k, v = (
        (normed @ w[f"{prefix}self_attn.{n}_proj.weight"].T).view(count, -1, dim).transpose(0, 1)
        for n in "qkv"
    )
    q, k, v = rotate(q), rotate(k).repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    mask = torch.ones(count, count, dtype=torch.bool).triu(1)
    mixed = (q @ k.transpose(1, 2) / dim**0.5).masked_fill(mask, float("-inf")).softmax(-1) @ v
    residual = residual + mixed.transpose(0, 1).reshape(count, -1) @ w[f"{prefix}self_attn.o_proj.weight"].T
    x = rms(residual, w[f"{prefix}post_attention_layernorm.weight"])
    gated = torch.nn.functional.silu(x @ w[f"{prefix}mlp.gate_proj.weight"].T)
    return (
        residual + (gated * (x @ w[f"{prefix}mlp.up_proj.weight"].T)) @ w[f"{prefix}mlp.down_proj.weight"].T
    )


def further(w: Weights, x: torch.Tensor, first: int) -> torch.Tensor:
    while f"layers.{first}.input_layernorm.weight" in w:
        prefix = f"layers.{first}."
        x, first = plain(w, prefix, rms(x, w[f"{prefix}input_layernorm.weight"]), x), first + 1
    return x


def eagle_layers(w: Weights, hidden: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
    x = torch.cat((embeds, hidden), -1) @ w["fc.weight"].T + w["fc.bias"]
    return further(w, plain(w, "layers.0.", x, x), 1)


def formula_drafts(name: str, target: Path, w: Weights, ids: Sequence[int]) -> list[int]:
    """Greedy drafts behind `ids`, without any cache; features are those of transformers."""
    model = reference_model(target)
    embed = model.get_input_embeddings().weight.detach()
    with torch.no_grad():
        states = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    is_eagle3 = "eagle3" in name
    if "parallel" in name:
        return formula_parallel(embed, states, w, ids)
    if name == "eagle3 of three layers":
        rows = torch.cat([states[i + 1][0] for i in DEFAULT_IDS], -1) @ w["fc.weight"].T
    else:
        rows = states[-1][0]  # transformers' last hidden state is normed
        rows = rows @ w["fc.weight"].T if is_eagle3 else rows
    tokens, drafts = list(ids[1:]), []
    for _ in range(STEPS):
        if is_eagle3:
            out = further(w, head_layer(w, rows, embed[tokens], {}), 1)
            index = int((rms(out[-1:], w["norm.weight"]) @ w["lm_head.weight"].T).argmax())
            drafts.append(index + int(w["d2t"][index]))
        else:
            out = eagle_layers(w, rows, embed[tokens])
            drafts.append(int((out[-1:] @ model.lm_head.weight.detach().T).argmax()))
        tokens, rows = [*tokens, drafts[-1]], torch.cat((rows, out[-1:]))
    return drafts


def formula_parallel(
    embed: torch.Tensor, states: Sequence[torch.Tensor], w: Weights, ids: Sequence[int]
) -> list[int]:
    """All drafts from one pass over the true rows and those of the mask."""
    mask = w["mask_hidden"].view(1, -1)
    mask = mask @ w["fc.weight"].T if mask.shape[1] > HIDDEN else mask
    rows = torch.cat([states[i + 1][0] for i in DEFAULT_IDS], -1) @ w["fc.weight"].T
    rows = torch.cat((rows, mask.expand(STEPS - 1, -1)))
    out = head_layer(w, rows, embed[[*ids[1:], *[MASK] * (STEPS - 1)]], {})
    logits = rms(further(w, out, 1)[-STEPS:], w["norm.weight"]) @ w["lm_head.weight"].T
    best = logits.argmax(-1)
    return (best + w["d2t"][best]).tolist()


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_formulas_over_all_rows(
    deep_target: Path, heads: dict[str, Path], name: str
) -> None:
    engine = SourcedEngine(deep_target, heads[name])
    weights = HEADS[name]()[1]
    request = engine.prefill(PROMPTS[0], greedy(30), chunk=4)
    for _ in range(4):
        before = list(request.all_ids)
        assert record_drafts(engine, request) == formula_drafts(name, deep_target, weights, before)


# --- tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "path"),
    [
        *((head, "chain", "eager") for head in HEADS),
        *QUICK,
        *(
            slow(*cell, path)
            for cell in BOTH
            for path in PATHS
            if (cell[1], path) != ("chain", "eager") and (*cell, path) not in QUICK
        ),
    ],
)
def test_greedy_tokens_are_those_of_transformers_on_every_path(
    deep_target: Path, heads: dict[str, Path], answers: list[list[int]], name: str, shape: str, path: str
) -> None:
    engine = SourcedEngine(deep_target, heads[name], is_greedy=True, **SHAPES[shape])
    if path != "eager":
        with_graphs(engine, arena(), PATHS[path])
    assert engine.generate(PROMPTS, greedy()) == answers
    assert engine.generate(PROMPTS[:1], greedy()) == answers[:1]
    assert {result.path for result in engine.results} == ({"graph"} if path == "full" else {"eager"})


@pytest.mark.parametrize("name", witnesses(HEADS, {"eagle", "eagle3 of three layers", "parallel eagle3"}))
def test_steps_launched_ahead_give_the_same_tokens(
    deep_target: Path, heads: dict[str, Path], answers: list[list[int]], name: str
) -> None:
    engine = SourcedEngine(deep_target, heads[name], is_greedy=True)
    overlapped(engine, graphs=True)
    requests = [engine.prefill(prompt, greedy(), chunk=5) for prompt in PROMPTS]
    run_ahead(engine, requests)
    assert [request.output_ids for request in requests] == answers


@pytest.mark.parametrize("name", witnesses(HEADS, {"eagle of two layers", "parallel eagle3 of speculators"}))
def test_sampled_tokens_with_a_seed_are_those_without_drafts(
    deep_target: Path, heads: dict[str, Path], name: str
) -> None:
    params = SamplingParams(temperature=1.0, seed=11, top_p=0.8, max_new_tokens=COUNT, ignore_eos=True)
    plain_engine = Engine(deep_target)
    assert SourcedEngine(deep_target, heads[name]).generate(PROMPTS, params) == plain_engine.generate(
        PROMPTS, params
    )


@pytest.mark.parametrize("name", HEADS)
def test_draft_kv_of_all_layers_is_that_of_a_prefill(
    deep_target: Path, heads: dict[str, Path], name: str
) -> None:
    engine, scratch = SourcedEngine(deep_target, heads[name]), SourcedEngine(deep_target, heads[name])
    request = engine.prefill(PROMPTS[0], greedy(30), chunk=3)
    for _ in range(5):
        engine.decoder.step([request])
    anew = scratch.prefill(request.all_ids[:-1], greedy(1))
    for mine, other in zip(kv_of(engine, request), kv_of(scratch, anew), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


# --- the oracle ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_eagle_oracle(tmp_path_factory.mktemp("oracle"))


def oracle_accepts(engine: Engine, steps: int = 3) -> set[int]:
    """The accept lengths of `steps` steps, whose tokens must be right whatever is drafted."""
    request = engine.prefill([40, 7, 9], greedy(1 + steps * (1 + engine.steps)))
    found = {engine.decoder.step([request]).accept_lens[0] for _ in range(steps)}
    tokens = request.all_ids[2:]
    assert tokens[1:] == [successor(token) for token in tokens[:-1]]
    engine.decoder.forget(request)
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("path", PATHS)
def test_the_oracle_is_accepted_in_full_on_every_path(
    oracle: tuple[Path, Path], path: str, shape: str
) -> None:
    engine = SourcedEngine(*oracle, is_greedy=True, **SHAPES[shape])
    if path != "eager":
        with_graphs(engine, arena(), PATHS[path])
    assert oracle_accepts(engine) == {1 + engine.steps}


@pytest.fixture(scope="module")
def deep_oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An EAGLE3 head of two layers, each of which does a part of the work."""
    path = tmp_path_factory.mktemp("deep oracle")
    target, _ = write_oracle(path)
    return target, write_oracle_head(path / "deep", num_layers=2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("path", PATHS)
def test_an_oracle_of_two_layers_is_accepted_in_full(
    deep_oracle: tuple[Path, Path], path: str, shape: str
) -> None:
    engine = SourcedEngine(*deep_oracle, is_greedy=True, **SHAPES[shape])
    if path != "eager":
        with_graphs(engine, arena(), PATHS[path])
    assert oracle_accepts(engine) == {1 + engine.steps}


def second_layer_left_out(engine: SourcedEngine) -> None:
    engine.drafter.head.further.clear()


def features_of_another_layer(engine: SourcedEngine) -> None:
    ids = engine.runner.model.aux_layer_ids
    engine.runner.model.aux_layer_ids = (*ids[:-1], ids[-1] + 1)


@pytest.mark.parametrize("plant", [second_layer_left_out, features_of_another_layer])
def test_wrong_layers_of_a_deep_head_are_never_accepted(
    deep_oracle: tuple[Path, Path], plant: Callable[[SourcedEngine], None]
) -> None:
    engine = SourcedEngine(*deep_oracle)
    plant(engine)
    assert oracle_accepts(engine) == {1}


def another_layer(engine: SourcedEngine) -> None:
    engine.runner.model.aux_layer_ids = (TARGET_IDS[-1],)


def features_as_captured(engine: SourcedEngine) -> None:
    """The target's final norm is left out."""
    engine.drafter.head.final_norm = None


def hidden_first(engine: SourcedEngine) -> None:
    weight = engine.drafter.head.fc.weight
    weight.copy_(weight.roll(weight.shape[1] // 2, 1))


def fed_back_normed(engine: SourcedEngine) -> None:
    """The norm of EAGLE3.1 heads, which knows no scale of the hidden."""
    head = engine.drafter.head
    head.feedback = lambda out: out / out.norm(dim=-1, keepdim=True)


def tokens_not_shifted(engine: SourcedEngine) -> None:
    """Row i gets the token at i instead of that at i + 1."""
    forward = engine.drafter.head.forward
    engine.drafter.head.forward = lambda hidden, ids, *rest, **more: forward(
        hidden, (ids - 5) % 63, *rest, **more
    )


@pytest.mark.parametrize(
    "plant", [another_layer, features_as_captured, hidden_first, fed_back_normed, tokens_not_shifted]
)
def test_a_wrong_input_is_never_accepted_in_full(
    oracle: tuple[Path, Path], plant: Callable[[SourcedEngine], None]
) -> None:
    engine = SourcedEngine(*oracle)
    plant(engine)
    assert 1 + engine.steps not in oracle_accepts(engine)


# --- checkpoints --------------------------------------------------------------------------------------------


def load(path: Path, target: Path, *head: object) -> FeatureHead:
    return SourcedEngine(target, write_head(path, *head)).drafter.head


def test_depth_and_bias_are_those_of_the_weights(deep_target: Path, tmp_path: Path) -> None:
    config, tensors = eagle()
    del config["bias"]
    head = load(tmp_path / "a", deep_target, config, tensors)
    assert (head.config.num_layers, head.config.fc_bias) == (1, True)
    del tensors["fc.bias"]
    head = load(tmp_path / "b", deep_target, config, tensors)
    assert isinstance(head, EagleHead)
    assert head.fc.bias is None
    config["bias"] = True
    with pytest.raises(CheckpointError, match=r"fc\.bias .* is missing"):
        load(tmp_path / "c", deep_target, config, tensors)


def test_layers_with_a_gap_are_refused(deep_target: Path, tmp_path: Path) -> None:
    config, tensors = deep()
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("layers.1.")}
    with pytest.raises(CheckpointError, match=r"layers \[2\]"):
        load(tmp_path, deep_target, config, tensors)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 32}, ["another hidden size", "32", "64"]),
        ({"hidden_size": 32, "target_hidden_size": 64}, ["hidden_size", "32", "as wide as", "64"]),
        ({"vocab_size": 300}, ["vocab_size", "300", "256"]),
        ({"sliding_window": 128}, ["sliding_window", "128"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"swiglu_limit": 7}, ["swiglu_limit", "7", "not known"]),
        ({"eagle_config": {"use_last_layernorm": True}}, ["use_last_layernorm", "False"]),
        ({"eagle_config": {"novel": 1}}, ["novel", "not known"]),
        (
            {"architectures": ["LlamaForCausalLMEagle"], "draft_vocab_size": 96},
            ["draft_vocab_size", "96", "whole vocabulary"],
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_key_and_value(
    deep_target: Path, tmp_path: Path, changes: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path, deep_target, eagle_config(**changes), eagle_tensors())
    assert all(word in str(refused.value) for word in [str(tmp_path), *words])


@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "LlamaForCausalLM"])
def test_all_published_names_are_read(deep_target: Path, tmp_path: Path, name: str) -> None:
    tensors = {f"model.{key}": tensor for key, tensor in eagle_tensors().items()}
    head = load(tmp_path, deep_target, eagle_config(architectures=[name]), tensors)
    assert isinstance(head, EagleHead)
    assert head.config.aux.ids == (11,)
    assert head.dims.target_feature_width == HIDDEN


def test_a_family_with_biases_of_q_k_and_v_has_them(deep_target: Path, tmp_path: Path) -> None:
    config = eagle_config(architectures=["Qwen2ForCausalLMEagle"], use_sliding_window=False, sliding_window=8)
    biases = {"q": HIDDEN, "k": HIDDEN // 2, "v": HIDDEN // 2}
    tensors = {f"layers.0.self_attn.{n}_proj.bias": torch.randn(size) for n, size in biases.items()}
    engine = SourcedEngine(deep_target, write_head(tmp_path, config, eagle_tensors() | tensors))
    prompt = random_ids(12)
    assert engine.generate([prompt], greedy()) == Engine(deep_target).generate([prompt], greedy())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ptd_token_id": 256}, ["ptd_token_id", "256"]),
        ({"ptd_token_id": "many"}, ["ptd_token_id", "many"]),
        ({"ptd_token_id": None}, ["mask_hidden", "no part"]),
    ],
)
def test_a_mask_token_that_does_not_fit_is_refused(
    deep_target: Path, tmp_path: Path, changes: dict[str, object], words: list[str]
) -> None:
    config, tensors = parallel()
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path, deep_target, config | changes, tensors)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_parallel_head_without_its_mask_is_refused_and_so_are_trees(
    deep_target: Path, tmp_path: Path, heads: dict[str, Path]
) -> None:
    config, tensors = parallel()
    del tensors["mask_hidden"]
    with pytest.raises(CheckpointError, match=r"mask_hidden .* is missing"):
        load(tmp_path, deep_target, config, tensors)
    head = SourcedEngine(deep_target, heads["parallel eagle3"]).drafter.head
    with pytest.raises(CheckpointError, match=r"spec_topk 2.*chains"):
        Eagle3Model(head).check(DraftShape.of(3, 2))


def masks_see_each_other_not(engine: SourcedEngine) -> None:
    """Every mask row stands at the same place."""
    propose = engine.drafter.propose

    def proposing(view: DraftView, shape: DraftShape) -> Proposal:
        positions = view.positions[:, :1].expand(view.positions.shape)
        return propose(replace(view, positions=positions), shape)

    engine.drafter.propose = proposing


def another_mask_token(engine: SourcedEngine) -> None:
    head = engine.drafter.head
    head._config = replace(head.config, mask_token=MASK + 1)


def hidden_of_the_last_row(engine: SourcedEngine) -> None:
    engine.drafter.head.mask_input = torch.zeros(HIDDEN)


@pytest.mark.parametrize("plant", [masks_see_each_other_not, another_mask_token, hidden_of_the_last_row])
def test_a_wrong_mask_changes_drafts_but_no_token(
    deep_target: Path,
    heads: dict[str, Path],
    answers: list[list[int]],
    plant: Callable[[SourcedEngine], None],
) -> None:
    engine, weights = SourcedEngine(deep_target, heads["parallel eagle3"]), parallel()[1]
    plant(engine)
    request = engine.prefill(PROMPTS[0], greedy())
    wrong = 0
    for _ in range(4):
        before = list(request.all_ids)
        wanted = formula_drafts("parallel eagle3", deep_target, weights, before)
        found = record_drafts(engine, request)
        assert found[0] == wanted[0], "the first draft needs no mask"
        wrong += found != wanted
    assert wrong
    assert engine.run([request]) == answers[:1]
