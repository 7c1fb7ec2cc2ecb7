"""Draft configs of every dialect resolve to one record, and what is not understood is refused."""

import json
from pathlib import Path

import pytest
from baton.engine.errors import CheckpointError
from baton.engine.speculative.drafters.spec_config import Eagle3Config, load_draft_config
from baton.tests.parity.eagle3_toys import DEFAULT_IDS, DRAFT_VOCAB, HIDDEN, head_config, toy_target


def load(tmp_path: Path, config: dict[str, object], **options: object) -> Eagle3Config:
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = options.pop("target", toy_target())
    return load_draft_config(tmp_path, target, **options)


def eagle(**keys: object) -> dict[str, object]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(DEFAULT_IDS)} | keys}


@pytest.mark.parametrize("dialect", [1, 2, 3, 4])
def test_each_dialect_names_the_same_layers_widths_and_rope(tmp_path: Path, dialect: int) -> None:
    config = load(tmp_path, head_config(dialect))
    assert config.dialect == dialect
    assert config.aux.ids == DEFAULT_IDS
    assert config.rope.theta == 10000.0
    assert (config.vocab_size, config.draft_vocab_size) == (256, DRAFT_VOCAB)
    assert (config.dims.target_feature_width, config.dims.self_width, config.dims.num_features) == (
        3 * 64,
        HIDDEN,
        3,
    )
    assert not config.norm_before_residual


@pytest.mark.parametrize(
    ("dialect", "written", "ids", "convention"),
    [
        (2, [4, 7, 10], (4, 7, 10), "output"),
        (2, [9, 1, 5], (9, 1, 5), "output"),
        (2, [0, 5, 11], (0, 5, 11), "output"),
        (2, [2, 6, 9], (1, 5, 8), "input"),  # the default triple as inputs
        (2, [3, 7, 12], (2, 6, 11), "input"),  # 12 layers have no output 12
        (3, [4, 7, 10], (4, 7, 10), "output"),
        (4, [4, 7, 10], (3, 6, 9), "input"),
    ],
)
def test_layer_ids_become_outputs_in_the_order_written(
    tmp_path: Path, dialect: int, written: list[int], ids: tuple[int, ...], convention: str
) -> None:
    raw = head_config(dialect)
    place = raw if dialect == 4 else raw["eagle_config"]
    place["eagle_aux_hidden_state_layer_ids"] = written
    aux = load(tmp_path, raw).aux
    assert (aux.ids, aux.convention) == (ids, convention)


def test_the_convention_can_be_overridden(tmp_path: Path) -> None:
    assert load(tmp_path, head_config(2, (4, 7, 10)), convention="input").aux.ids == (3, 6, 9)


def test_the_features_have_the_dtype_that_the_target_runs_in(tmp_path: Path) -> None:
    config = load(tmp_path, head_config(2), target=toy_target(dtype="bfloat16"))
    assert config.dims.target_feature_dtype == config.dims.self_dtype == config.aux.dtype == "bfloat16"
    config = load(tmp_path, head_config(2), target=toy_target(dtype="bfloat16"), dtype="float32")
    assert config.dims.target_feature_dtype == config.dims.self_dtype == config.aux.dtype == "float32"


def test_a_native_head_without_ids_reads_the_default_layers(tmp_path: Path) -> None:
    raw = head_config(2)
    del raw["eagle_config"]
    assert load(tmp_path, raw).aux.ids == DEFAULT_IDS


@pytest.mark.parametrize(("num_features", "width"), [(1, 64), (2, 128), (5, 320)])
def test_the_feature_width_follows_the_number_of_layers(
    tmp_path: Path, num_features: int, width: int
) -> None:
    config = load(tmp_path, head_config(2, tuple(range(num_features)), num_aux_hidden_states=num_features))
    assert config.dims.target_feature_width == width


def test_switches_of_the_dialects_reach_the_record(tmp_path: Path) -> None:
    config = load(
        tmp_path, head_config(2, fc_norm=True, norm_output=True, norm_before_residual=True, bias=True)
    )
    assert config.fc_norm
    assert config.norm_output
    assert config.norm_before_residual
    assert config.fc_bias
    assert load(tmp_path, head_config(2) | eagle(norm_before_fc=True)).input_norm
    assert load(tmp_path, head_config(2, use_aux_norm=True)).fc_norm


def test_norm_output_without_feature_norms_leaves_the_feedback_alone(tmp_path: Path) -> None:
    assert not load(tmp_path, head_config(2, norm_output=True)).norm_output


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 36},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"quantization_config": None},
    ],
)
@pytest.mark.parametrize("dialect", [1, 2, 3])
def test_keys_that_are_null_or_switched_off_change_nothing(tmp_path: Path, dialect, changes) -> None:
    assert load(tmp_path, head_config(dialect, **changes)) == load(tmp_path, head_config(dialect))


def test_speculators_defaults_differ_from_native_ones(tmp_path: Path) -> None:
    raw = head_config(4)
    del raw["norm_before_residual"]
    raw["transformer_layer_config"]["model_type"] = "qwen3"
    config = load(tmp_path, raw)
    assert config.norm_before_residual
    assert config.qk_norm


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        (head_config(2, (4, 4, 9)), ["[4, 4, 9]", "twice"]),
        (head_config(2, (4, 7, 13)), ["13", "12 layers"]),
        (head_config(2, (-1, 7, 9)), ["-1", "12 layers"]),
        (head_config(4, (-1, 7, 9)), ["0", "1 to 12"]),
        (head_config(2, num_aux_hidden_states=4), ["num_aux_hidden_states", "4"]),
        (head_config(2) | eagle(eagle_aux_hidden_state_layer_ids=[]), ["[]"]),
        (head_config(2) | eagle(parallel_draft_step=4), ["parallel_draft_step", "4"]),
        (head_config(2) | eagle(mask_token=7), ["mask_token", "7"]),
        (head_config(2, hidden_size=128), ["another hidden size", "128", "64", "config.json"]),
        (head_config(2, target_hidden_size=80), ["another hidden size", "80", "64"]),
        (head_config(2, vocab_size=300), ["vocab_size", "300", "256"]),
        (head_config(2, draft_vocab_size=999), ["draft_vocab_size", "999"]),
        (head_config(2, sliding_window=128), ["sliding_window", "128"]),
        (head_config(2, hidden_act="gelu"), ["hidden_act", "gelu"]),
        (head_config(2, target_model_type="gemma3"), ["gemma3"]),
        (head_config(2, architectures=["Eagle3DeepseekV2ForCausalLM"]), ["Eagle3DeepseekV2ForCausalLM"]),
        (head_config(2, architectures=["LlamaForCausalLM"], draft_vocab_size=None), ["LlamaForCausalLM"]),
        (head_config(4, speculators_model_type="dflash"), ["dflash"]),
        (head_config(2, rope_scaling={"rope_type": "longrope"}), ["longrope"]),
        (head_config(2, num_attention_heads="four"), ["num_attention_heads", "four"]),
    ],
)
def test_an_unsupported_head_config_is_refused_naming_file_key_and_value(
    tmp_path: Path, raw: dict[str, object], parts: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, raw)
    text = str(caught.value)
    assert str(tmp_path) in text
    assert "\n" not in text
    assert all(part in text for part in parts), text


def test_a_head_for_another_hidden_size_names_both_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"/models/target/config\.json"):
        load(tmp_path, head_config(2, hidden_size=128), target_path=Path("/models/target"))


def test_a_missing_config_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        load_draft_config(tmp_path, toy_target())


def test_the_shipped_head_resolves(tmp_path: Path) -> None:
    path = Path(__file__).resolve().parents[4] / "assets" / "smollm2-135m-eagle3"
    config = load_draft_config(path, toy_target(hidden_size=576, num_layers=30, vocab_size=49152))
    assert (config.aux.ids, config.aux.convention) == ((4, 15, 26), "output")
    assert config.dims.target_feature_width == 1728
