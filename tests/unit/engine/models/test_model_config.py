"""config.json: what it means, and one clear line for what we do not serve."""

import json
from pathlib import Path

import pytest
from baton.deploy.capacity.checkpoints import shape_of
from baton.engine.errors import CheckpointError
from baton.engine.models.config import ModelConfig
from baton.engine.models.families import END_TOKENS, FAMILIES
from baton.engine.models.moe import QWEN_NAMES, MoEConfig
from baton.engine.models.registry import load_model_config
from baton.engine.models.rope import RopeConfig
from transformers import AutoConfig

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000,
    "rope_scaling": None,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GEMMA = {"architectures": ["Gemma2ForCausalLM"], "num_key_value_heads": 3}
QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 96,
}


def write(path: Path, changes: dict, generation: dict | None = None) -> Path:
    config = {key: value for key, value in (SMOLLM2 | changes).items() if value != "absent"}
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_every_field_of_a_llama_is_read(tmp_path: Path):
    assert load_model_config(write(tmp_path, {})) == ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100000.0),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_token_ids=(2,),
        dtype="bfloat16",
    )


@pytest.mark.parametrize(
    ("architecture", "bias", "output_bias", "qk_norm", "head_dim"),
    [
        ("LlamaForCausalLM", False, False, False, 64),
        ("Qwen2ForCausalLM", True, False, False, 64),
        ("Qwen3ForCausalLM", False, False, True, 128),
    ],
)
def test_families_differ_by_switches(
    tmp_path: Path, architecture: str, bias: bool, output_bias: bool, qk_norm: bool, head_dim: int
):
    config = load_model_config(write(tmp_path, {"architectures": [architecture], "head_dim": None}))
    assert (config.attention_bias, config.attention_output_bias) == (bias, output_bias)
    assert (config.qk_norm, config.head_dim) == (qk_norm, head_dim)


def test_absent_keys_take_the_defaults_of_the_format(tmp_path: Path):
    absent = dict.fromkeys(
        ("num_key_value_heads", "tie_word_embeddings", "eos_token_id", "torch_dtype"), "absent"
    )
    config = load_model_config(write(tmp_path, absent | {"architectures": "absent", "model_type": "llama"}))
    assert config.num_kv_heads == 9
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert config.dtype == "float32"


@pytest.mark.parametrize("family", sorted({*FAMILIES.values()} - {"mimo", "sparse_block"}))
def test_end_tokens_of_a_family_are_those_of_its_class_in_transformers(family: str):
    assert END_TOKENS.get(family) == AutoConfig.for_model(family).eos_token_id


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),
        ({"rope_type": "linear", "factor": 4.0}, 8192),
    ],
    ids=["yarn", "older key", "positions are the product", "no original", "linear"],
)
def test_yarn_reaches_its_factor_of_the_original_positions(scaling: dict, positions: int, tmp_path: Path):
    path = write(tmp_path, {"rope_scaling": scaling})
    assert load_model_config(path).max_position_embeddings == positions
    assert shape_of(path).max_context == positions


def test_an_end_token_of_a_file_replaces_that_of_the_family(tmp_path: Path):
    absent = {"eos_token_id": "absent"}
    assert load_model_config(write(tmp_path, absent, {"eos_token_id": 5})).eos_token_ids == (5,)
    assert load_model_config(write(tmp_path, {"eos_token_id": None}, {})).eos_token_ids == ()
    assert load_model_config(write(tmp_path, absent, {})).eos_token_ids == (2,)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", "\udc80"])
def test_a_file_that_is_no_object_is_one_clear_line(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/config.json: .*fetch the file again$"):
        load_model_config(tmp_path)


def test_eos_ids_outside_the_vocabulary_are_dropped_with_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    assert load_model_config(
        write(tmp_path, {"eos_token_id": 49152}, {"eos_token_id": [7, 60000]})
    ).eos_token_ids == (7,)
    assert "end tokens [60000, 49152] are outside the vocabulary of 49152" in caplog.text


def test_experts_are_read_with_the_layers_that_have_none(tmp_path: Path):
    dense = {"mlp_only_layers": [1], "decoder_sparse_step": 3, "norm_topk_prob": True}
    config = load_model_config(write(tmp_path, QWEN_MOE | dense | {"num_hidden_layers": 6}))
    assert config.moe == MoEConfig(
        num_experts=16,
        top_k=4,
        intermediate_size=96,
        is_normalised=True,
        names=QWEN_NAMES,
        dense_layers=frozenset({0, 1, 3, 4}),
    )
    assert config.qk_norm
    mixtral = load_model_config(write(tmp_path, MIXTRAL | {"num_key_value_heads": 9})).moe
    assert mixtral is not None
    assert (mixtral.num_experts, mixtral.top_k, mixtral.intermediate_size) == (8, 2, 1536)
    assert mixtral.is_normalised
    assert not mixtral.dense_layers


def test_a_mixtral_config_without_rope_and_norm_has_its_own_defaults(tmp_path: Path):
    absent = {"rope_theta": "absent", "rms_norm_eps": "absent"}
    mixtral = load_model_config(write(tmp_path, MIXTRAL | absent))
    assert (mixtral.rope.theta, mixtral.rms_norm_eps) == (1e6, 1e-5)
    named = load_model_config(write(tmp_path, MIXTRAL | {"rope_theta": 5e5}))
    assert named.rope.theta == 5e5


def test_activations_of_experts_are_counted_by_the_experts_of_a_row(tmp_path: Path):
    sparse = load_model_config(write(tmp_path, QWEN_MOE))
    assert sparse.row_width == 4 * (96 + 576) // 3  # 4 experts: each 96 in the middle, 576 at its end
    mixed = load_model_config(write(tmp_path, QWEN_MOE | {"mlp_only_layers": [0]}))
    assert mixed.row_width == 1536
    assert load_model_config(write(tmp_path, {})).row_width == 1536


def test_eos_ids_of_both_files_are_merged_generation_config_first(tmp_path: Path):
    path = write(tmp_path, {"eos_token_id": [5, 2]}, {"eos_token_id": [7, 5]})
    assert load_model_config(path).eos_token_ids == (7, 5, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2", "Qwen3ForCausalLM"]),
        ({"architectures": "absent", "model_type": "gpt2"}, ["architectures"]),
        ({"num_experts": 8}, ["num_experts", "8", "dense checkpoint"]),
        (MIXTRAL | {"num_local_experts": "absent"}, ["num_experts", "None", "positive integer"]),
        (MIXTRAL | {"num_experts_per_tok": 9}, ["num_experts_per_tok", "9", "num_local_experts = 8"]),
        (MIXTRAL | {"sliding_window": -1}, ["sliding_window", "-1", "positive integer"]),
        (QWEN_MOE | {"moe_intermediate_size": "absent"}, ["moe_intermediate_size", "positive integer"]),
        (QWEN_MOE | {"mlp_only_layers": ["1"]}, ["mlp_only_layers", "'1'", "layer numbers"]),
        (QWEN_MOE | {"norm_topk_prob": 1}, ["norm_topk_prob", "true or false"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config.quant_method", "original checkpoint"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "1 entries", "num_hidden_layers = 30"]),
        ({"layer_types": ["chunked_attention"] * 30}, ["layer_types", "chunked_attention", "full_attention"]),
        ({"layer_types": ["sliding_attention"] * 30}, ["layer_types", "use_sliding_window"]),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}, ["no_rope_layers", "30"]),
        (GEMMA | {"hidden_activation": "gelu"}, ["hidden_activation", "'gelu'", "gelu_pytorch_tanh"]),
        (GEMMA | {"attn_logit_softcapping": -1}, ["attn_logit_softcapping", "-1", "positive"]),
        (GEMMA | {"use_bidirectional_attention": True}, ["use_bidirectional_attention", "encoder"]),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, ["rope_type", "'ntk'"]),
        ({"hidden_size": "absent"}, ["hidden_size", "None", "positive integer"]),
        ({"num_hidden_layers": "30"}, ["num_hidden_layers", "'30'"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"vocab_size": True}, ["vocab_size", "True"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads", "4", "9"]),
        ({"num_attention_heads": 10, "num_key_value_heads": 5}, ["num_attention_heads", "576"]),
        ({"head_dim": 63}, ["head_dim", "63"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
        ({"rms_norm_eps": "1e-5"}, ["rms_norm_eps", "'1e-5'"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "'</s>'"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "float8_e4m3fn", "bfloat16"]),
    ],
)
def test_each_unsupported_or_malformed_value_is_one_clear_line(
    tmp_path: Path, changes: dict, words: list[str]
):
    with pytest.raises(CheckpointError) as caught:
        load_model_config(write(tmp_path, changes))
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in [str(tmp_path / "config.json"), *words]), message


@pytest.mark.parametrize("content", ["{", "[1, 2]", "\xff"])
def test_a_broken_file_is_named(tmp_path: Path, content: str):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json.*fetch the file again"):
        load_model_config(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        load_model_config(tmp_path)
