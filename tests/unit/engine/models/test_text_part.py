"""Checkpoints that also read images are served as the text models inside of them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.deploy.capacity.checkpoints import count_weights, shape_of
from baton.engine.config import EngineConfig
from baton.engine.errors import CheckpointError
from baton.engine.loader import EngineLoader
from baton.engine.models.registry import load_model_config
from baton.engine.models.text_part import is_whole, text_config, text_name
from baton.engine.models.weights import load_model, needless_tensors, weight_bytes
from safetensors.torch import load_file, save_file

Copy = Callable[..., Path]
SOURCE = Path("config.json")
# What the hub's google/gemma-3-12b-it says, without its vision_config.
GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}
# Qwen/Qwen2.5-VL-7B-Instruct: the keys of the text model are those of the whole.
QWEN = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "eos_token_id": 151645,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}


def written(path: Path, config: dict[str, object]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_gemma_of_the_hub_has_sizes_of_its_text_and_all_end_tokens(tmp_path: Path):
    config = load_model_config(written(tmp_path, GEMMA))
    assert (config.architecture, config.is_text_part) == ("Gemma3ForCausalLM", True)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (48, 16, 8, 256)
    assert (config.vocab_size, config.tie_word_embeddings, config.dtype) == (262208, True, "bfloat16")
    assert config.eos_token_ids == (1, 106)
    assert config.rope.rope_type == "linear"
    assert config.forms.windows[:6] == (1024,) * 5 + (0,)
    shape = shape_of(tmp_path)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.hidden_size) == (48, 8, 256, 3840)
    assert shape.windows == config.forms.windows


def test_a_qwen_of_the_hub_has_keys_of_its_own_and_plain_rotation(tmp_path: Path):
    config = load_model_config(written(tmp_path, QWEN))
    assert (config.architecture, config.num_layers, config.num_kv_heads) == ("Qwen2ForCausalLM", 28, 4)
    assert config.rope.rope_type == "default"
    assert not config.forms.windows
    assert shape_of(tmp_path).num_kv_heads == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"model_type": "ministral3"}, "text_config.model_type = 'ministral3': supported for Mistral3"),
        ({}, "text_config.model_type = None"),
        ([1], "text_config = [1]: an object is required here"),
    ],
    ids=["another model", "no model", "no object"],
)
def test_a_text_model_that_is_not_known_is_refused(text: object, message: str, tmp_path: Path):
    raw = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    with pytest.raises(CheckpointError) as caught:
        load_model_config(written(tmp_path, raw))
    assert f"{tmp_path / 'config.json'}: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("top", "inner", "expected"),
    [(True, False, True), (False, True, True), (False, None, False), (None, True, True), (None, None, None)],
)
def test_embeddings_are_tied_where_the_whole_or_its_text_model_says_so(
    top: bool | None, inner: bool | None, expected: bool | None
):
    whole = {"architectures": ["Mistral3ForConditionalGeneration"]}
    text = {"model_type": "mistral"}
    for each, value in ((whole, top), (text, inner)):
        if value is not None:
            each["tie_word_embeddings"] = value
    assert text_config({**whole, "text_config": text}, SOURCE).get("tie_word_embeddings") is expected


def test_names_of_every_writer_become_those_of_a_text_model():
    for name, expected in {
        "language_model.model.layers.3.mlp.up_proj.weight": "model.layers.3.mlp.up_proj.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "model.language_model.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.3.mlp.up_proj.weight": "model.layers.3.mlp.up_proj.weight",
        "lm_head.weight": "lm_head.weight",
    }.items():
        assert text_name(name) == expected


def test_modules_that_a_quantisation_leaves_out_have_their_names_too():
    ignored = ["language_model.model.layers.0.mlp.down_proj", "re:vision.*", 3]
    given = {"quant_method": "fp8", "ignore": ignored}
    found = text_config({**GEMMA, "quantization_config": given}, SOURCE)["quantization_config"]
    assert found == {**given, "ignore": ["model.layers.0.mlp.down_proj", "re:vision.*", 3]}
    assert ignored[0] == "language_model.model.layers.0.mlp.down_proj", "the given config stays as it is"


def test_a_plain_config_stays_as_it_is():
    raw = {"architectures": ["LlamaForCausalLM"], "text_config": {}}
    assert text_config(raw, SOURCE) is raw
    assert not is_whole(raw)
    assert not is_whole({})


@pytest.mark.parametrize("family", ["gemma3_whole", "qwen2_5_vl", "qwen3_vl", "mistral3"])
def test_only_the_text_model_counts(family: str, toy_checkpoint: Copy):
    path = toy_checkpoint(family)
    model, config = load_model(path, dtype=torch.float32)
    sizes = {name: tensor.numel() for name, tensor in model.tensors()}
    assert count_weights(path) == sum(sizes.values())
    assert weight_bytes(path, torch.float32, needless_tensors(config)) == 4 * sum(sizes.values())


def test_an_lm_head_of_its_own_counts_in_the_memory_of_a_start(toy_copy: Copy):
    path = toy_copy("gemma3_whole")
    tensors = load_file(path / "model.safetensors")
    (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    heads = [name for name in tensors if name.endswith("lm_head.weight")] or ["lm_head.weight"]
    save_file(tensors | {name: tensors[embedding] + 1 for name in heads}, path / "model.safetensors")
    loader = EngineLoader(EngineConfig(model=str(path), dtype="float32", device="cpu"), has_drafter=False)
    phases = dict(loader.phases())
    phases["load weights"]()
    model, config = load_model(path, dtype=torch.float32)
    assert not config.tie_word_embeddings
    assert loader._weight_bytes() == 4 * sum(tensor.numel() for _, tensor in model.tensors())


def test_tensors_of_images_are_unknown_to_a_text_model(toy_copy: Copy):
    path = toy_copy("llama")
    tensors = load_file(path / "model.safetensors") | {"vision_tower.ln_pre.weight": torch.ones(3)}
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"vision_tower\.ln_pre\.weight is unknown"):
        load_model(path, dtype=torch.float32)
