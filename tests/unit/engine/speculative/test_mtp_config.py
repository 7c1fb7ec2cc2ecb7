"""MTP modules in every dialect: recognised by their config, named by their family, loaded strictly."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError, LifecycleError
from baton.engine.models.config import ModelConfig
from baton.engine.models.registry import load_model_config
from baton.engine.models.weights import load_model, needless_tensors, weight_bytes
from baton.engine.speculative.drafters.mtp_config import DIALECTS, load_mtp_config
from baton.engine.speculative.drafters.mtp_names import is_mtp
from baton.engine.speculative.drafters.mtp_prefill import look_ahead
from baton.engine.speculative.drafters.mtp_states import FrontStates
from baton.engine.speculative.drafters.mtp_weights import load_mtp
from baton.engine.speculative.drafters.mtp_window import newest_rows, rotate
from baton.engine.speculative.drafters.protocol import DraftPrefill
from baton.engine.speculative.drafters.registry import MtpSource, read_drafter
from baton.tests.parity.eagle3_toys import head_config
from baton.tests.parity.mtp_toys import NAMES, named, random_modules, write_mtp
from safetensors.torch import load_file, save_file

COUNTS = {"qwen": 1, "deepseek": 2, "mimo": 2, "mimo_v2": 3}


@pytest.fixture(scope="session")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=2)


@pytest.fixture(scope="session")
def config(target: Path) -> ModelConfig:
    return load_model_config(target)


def load(path: Path, config: ModelConfig, count: int = 1):
    return load_mtp(load_mtp_config(path, config, dtype="float32"), count, dtype=torch.float32)


# --- recognised ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_nextn_predict_layers": 1}, True),
        ({"mtp_num_hidden_layers": 1}, True),
        ({"num_nextn_predict_layers": 0}, False),
        ({"architectures": ["MiMoForCausalLM"]}, True),
        ({"architectures": ["Qwen3NextForCausalLM"]}, True),
        ({"speculators_model_type": "mtp"}, True),
        ({}, False),
        ({"num_nextn_predict_layers": 1, "draft_vocab_size": 96}, False),
        ({"num_nextn_predict_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}, False),
    ],
)
def test_a_config_with_modules_is_told_from_every_other_draft(changes, expected):
    assert is_mtp({"architectures": ["LlamaForCausalLM"]} | changes) is expected


@pytest.mark.parametrize("dialect", [1, 2, 3, 4])
def test_no_eagle3_head_is_taken_for_modules(dialect):
    assert not is_mtp(head_config(dialect))


def test_the_feature_is_the_output_of_the_last_layer_and_one_row_wide(target, config, tmp_path):
    source = read_drafter(write_mtp(tmp_path, target, "qwen", random_modules(target, 1)), config)
    assert isinstance(source, MtpSource)
    assert source.config.aux.ids == (config.num_layers - 1,)
    assert source.config.dims.target_feature_width == source.config.dims.self_width == config.hidden_size


# --- dialects -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", COUNTS)
def test_every_dialect_round_trips(target, config, tmp_path, dialect):
    """Written by the names of the family's own code, read, and named again by ours."""
    modules = random_modules(target, COUNTS[dialect])
    head = load(write_mtp(tmp_path, target, dialect, modules), config, len(modules))
    assert head.dialect.name == dialect
    again = {}
    for k, (module, expected) in enumerate(zip(head.modules, modules, strict=True)):
        found = dict(module.tensors())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        again |= {head.dialect.checkpoint_name(name, k, config.num_layers): found[name] for name in found}
    written = load_file(tmp_path / "model.safetensors")
    assert again.keys() == written.keys()
    assert all(torch.equal(again[name], written[name]) for name in written)


def test_the_switches_of_each_family_are_those_of_its_reference_code():
    found = {d.name: (d.hidden_first, d.is_normed, d.is_chained) for d in DIALECTS}
    assert found == {
        "qwen": (False, True, False),
        "deepseek": (False, True, True),
        "mimo": (True, True, False),
        "mimo_v2": (False, False, False),
    }
    assert NAMES.keys() == found.keys()


@pytest.mark.parametrize(("given", "expected"), [(None, True), (False, False), (True, True)])
def test_a_config_may_say_whether_modules_are_chained(target, config, tmp_path, given, expected):
    changes = {} if given is None else {"chain_mtp_hidden_states": given}
    path = write_mtp(tmp_path, target, "deepseek", random_modules(target, 2), **changes)
    assert load(path, config, 2).is_chained is expected


def test_copies_of_the_targets_weights_are_shared_and_others_are_kept(target, config, tmp_path):
    theirs = load_file(target / "model.safetensors")
    embed, lm_head = theirs["model.embed_tokens.weight"], theirs["lm_head.weight"]
    extra = {
        "model.layers.2.embed_tokens.weight": embed,
        "model.layers.2.shared_head.head.weight": lm_head + 1,
    }
    path = write_mtp(tmp_path, target, "deepseek", random_modules(target, 1), extra=extra)
    head, (model, _) = load(path, config), load_model(target, dtype=torch.float32)
    head.share(model.embed_tokens, model.lm_head, model.norm, 64)
    assert head.modules[0].embed_tokens is model.embed_tokens
    assert torch.equal(head.modules[0].lm_head, lm_head + 1)


@pytest.mark.parametrize("dialect", COUNTS)
def test_a_target_with_modules_in_its_checkpoint_loads_without_them(target, config, tmp_path, dialect):
    modules = random_modules(target, COUNTS[dialect])
    both = write_mtp(tmp_path / "both", target, dialect, modules, is_beside=True)
    model, found = load_model(both, dtype=torch.float32)
    plain, _ = load_model(target, dtype=torch.float32)
    pairs = zip(model.tensors(), plain.tensors(), strict=True)
    assert all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)
    assert found.num_mtp_modules == len(modules)
    head = load(both, config, len(modules))
    assert len(head.modules) == len(modules)


def test_modules_do_not_count_as_weights_of_the_target(target, tmp_path):
    both = write_mtp(tmp_path, target, "deepseek", random_modules(target, 2), is_beside=True)
    sizes = [
        weight_bytes(path, torch.float32, needless_tensors(load_model_config(path)))
        for path in (target, both)
    ]
    assert sizes[0] == sizes[1]


# --- refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 8}, ("num_experts = 8", "routed experts")),
        ({"linear_num_value_heads": 32}, ("linear attention",)),
        ({"speculators_model_type": "mtp"}, ("speculators_model_type", "speculators library")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "only full rotary")),
        ({"mtp_use_dedicated_embeddings": True}, ("mtp_use_dedicated_embeddings",)),
        ({"hidden_size": 32}, ("hidden_size = 32", "the target has 64")),
        ({"vocab_size": 300}, ("vocab_size = 300", "the target has 256")),
        ({"num_hidden_layers": 5}, ("num_hidden_layers = 5", "the target has 2")),
        ({"num_nextn_predict_layers": -1}, ("num_nextn_predict_layers = -1", "positive integer")),
        ({"chain_mtp_hidden_states": 3}, ("chain_mtp_hidden_states = 3", "true or false")),
    ],
)
def test_a_config_that_cannot_run_names_key_value_and_remedy(target, config, tmp_path, changes, words):
    path = write_mtp(tmp_path, target, "deepseek", random_modules(target, 1), **changes)
    with pytest.raises(CheckpointError) as caught:
        load_mtp_config(path, config)
    assert all(word in str(caught.value) for word in (str(path / "config.json"), *words)), caught.value


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.3.enorm.weight"), ("model.layers.3.enorm.weight", "missing")),
        (lambda t: t.update({"model.layers.3.extra.weight": torch.ones(2)}), ("extra.weight", "unknown")),
        (lambda t: t.update({"model.layers.4.enorm.weight": torch.ones(64)}), ("module 3", "counts 2")),
        (
            lambda t: t.update({"model.layers.2.eh_proj.weight": torch.ones(64, 64)}),
            ("[64, 64]", "[64, 128]"),
        ),
        (lambda t: t.update({"mtp.fc.weight": torch.ones(64, 128)}), ("hold 2 of", "exactly one")),
        (lambda t: t.pop("model.layers.2.eh_proj.weight"), ("hold 0 of", "exactly one")),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(target, config, tmp_path, change, words):
    path = write_mtp(tmp_path, target, "deepseek", random_modules(target, 2))
    rewrite(path, change)
    with pytest.raises(CheckpointError) as caught:
        load(path, config, 2)
    assert all(word in str(caught.value) for word in (str(path), *words)), caught.value


def test_several_modules_under_the_names_of_one_are_refused(target, config, tmp_path):
    modules = random_modules(target, 2)
    path = write_mtp(tmp_path, target, "qwen", modules[:1], num_nextn_predict_layers=2)
    with pytest.raises(CheckpointError, match=r"counts 2 modules, but only 1"):
        load(path, config, 2)


def test_modules_run_only_after_the_targets_weights_are_shared(target, config, tmp_path):
    head = load(write_mtp(tmp_path, target, "qwen", random_modules(target, 1)), config)
    with pytest.raises(LifecycleError, match="shared"):
        head.project(torch.zeros(1, 64))


# --- rows ---------------------------------------------------------------------------------------------------


def test_look_ahead_gives_each_module_the_token_that_it_takes():
    item = DraftPrefill(
        pages=[], start=2, next_ids=[13, 14], features=torch.zeros(2, 1), state_row=1, is_final=False,
        known_ids=[10, 11, 12, 13, 14, 15],
    )  # fmt: skip
    assert look_ahead(item, 2, 3).tolist() == [[13, 14, 15], [14, 15, 0]]
    assert look_ahead(item, 1, 2).tolist() == [[12, 13], [13, 14], [14, 15]]


def test_rotation_puts_the_proposal_behind_the_accepted_tokens():
    tokens = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    found = rotate(tokens, torch.tensor([2, 4]), torch.tensor([77, 88]))
    assert found.tolist() == [[2, 3, 77, 5, 5], [7, 8, 9, 10, 88]]


def test_the_newest_rows_end_at_the_accepted_boundary():
    values = torch.arange(10).view(2, 5)
    assert newest_rows(values, torch.tensor([1, 3]), 2).tolist() == [[1, 2], [8, 9]]
    assert newest_rows(values[:, :, None], torch.tensor([0, 2]), 2).tolist() == [[[0], [1]], [[7], [8]]]


def test_states_grow_by_doubling_and_keep_their_rows():
    states = FrontStates(2, 3, 4, torch.float32, "cpu")
    rows = [states.open() for _ in range(3)]
    assert (len(set(rows)), states.num_open, states.capacity) == (3, 3, 4)
    states.write_front(
        torch.tensor([rows[0]]), torch.ones(1, 2, 4), torch.tensor([[5, 6]]), torch.tensor([2])
    )
    states.reserve(9)
    assert states.hidden[rows[0]].sum() == 8
    assert states.tokens[rows[0]].tolist() == [5, 6]
    states.close(rows[0])
    with pytest.raises(AssertionError, match="is not open"):
        states.close(rows[0])


def test_a_config_without_weights_is_enough_for_a_prefill_worker(target, config, tmp_path):
    raw = json.loads((target / "config.json").read_text()) | {"num_nextn_predict_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = load_mtp_config(tmp_path, config)
    assert (found.num_modules, found.aux.num_features) == (3, 1)
    assert named("qwen", 0, 2, {"fc.weight": torch.ones(1)}).keys() == {"mtp.fc.weight"}
