"""Our models are transformers' models: equal logits and equal greedy tokens, by family and by switch."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.models.registry import load_model_config
from baton.tests.parity.toy_engine import ToyEngine, random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_logits, reference_model

pytestmark = pytest.mark.usefixtures("one_thread")

# Measured 1e-5 at most, on logits of standard deviation 10; one position too far gives more than 1.
TOLERANCE = 1e-4
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0],
    "long_factor": [1.5, 1.8, 2.2, 3.0, 4.0, 6.0],
    "original_max_position_embeddings": 512,
}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}


def assert_same_model(path: Path) -> None:
    theirs, prompt = reference_model(path), random_ids(150, seed=3)
    ours = ToyEngine(path)
    torch.testing.assert_close(
        ours.run(("all", prompt)).logits, reference_logits(theirs, prompt), atol=TOLERANCE, rtol=0
    )
    for length in (1, 16, 61):
        start = prompt[:length]
        assert ours.greedy(start, 12, f"greedy {length}") == reference_greedy(theirs, start, 12)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "phi3", "olmo2", "smollm3", "gpt_oss"])
def test_each_family_of_other_layers_equals_transformers(toy_checkpoint: Callable[..., Path], family: str):
    assert_same_model(toy_checkpoint(family))


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "qwen2_moe"])
def test_each_family_equals_transformers(toy_checkpoint: Callable[..., Path], family: str, is_tied: bool):
    assert_same_model(toy_checkpoint(family, tie_word_embeddings=is_tied))


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["gemma3_whole", "mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_text_models_beside_models_of_images_equal_transformers(
    toy_checkpoint: Callable[..., Path], family: str, is_tied: bool
):
    assert_same_model(toy_checkpoint(family, tie_word_embeddings=is_tied))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_many_shards_equal_one(toy_checkpoint: Callable[..., Path], family: str):
    path = toy_checkpoint(family, shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    assert_same_model(path)


@pytest.mark.parametrize(
    ("family", "switches"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
        ("llama", {"rms_norm_eps": 0.1}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
        ("qwen3_moe", {"num_experts_per_tok": 6}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True, "mlp_only_layers": [0]}),
        ("glm4_moe", {}),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "n_group": 4, "topk_group": 2}),
        ("deepseek_v2", {}),
        (
            "deepseek_v2",
            {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        ),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"rope_interleave": False, "attention_bias": True, "norm_topk_prob": False}),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3, "layer_types": None},
        ),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 17}),
        ("mixtral", {"sliding_window": 15}),
        ("mistral", {"sliding_window": None}),
        ("phi3", {"rope_parameters": LONGROPE, "sliding_window": 30}),
        ("gemma2", {"final_logit_softcapping": None, "attn_logit_softcapping": None}),
        ("gemma2", {"tie_word_embeddings": True, "sliding_window": 16}),
        ("gemma3", {"rope_parameters": TWO_ROPES}),
        ("olmo2", {"num_key_value_heads": 4, "attention_bias": True}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 12}),
        ("smollm3", {"attention_bias": True, "mlp_bias": True}),
    ],
    ids=[
        "llama-bias",
        "qwen3-bias",
        "no-gqa",
        "mqa-head-dim",
        "eps",
        "raw-weights-of-experts",
        "every-other-layer-dense",
        "all-experts",
        "one-expert",
        "qwen2-moe",
        "glm-4.5",
        "glm-4.5-groups",
        "deepseek-v2",
        "deepseek-v2-lite",
        "deepseek-v3",
        "deepseek-v3-bias",
        "window-behind-the-last-layer",
        "window-of-later-layers",
        "window-of-qwen3-moe",
        "window-of-mixtral",
        "no-window",
        "longrope-of-some-dimensions",
        "no-caps",
        "tied-gemma",
        "two-rotations",
        "biases-of-olmo",
        "window-of-layers-without-rotation",
        "biases-of-smollm3",
    ],
)
def test_each_switch_of_the_config_acts(toy_checkpoint: Callable[..., Path], family: str, switches: dict):
    assert_same_model(toy_checkpoint(family, **switches))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_each_rope_in_the_new_spelling_equals_transformers(
    toy_checkpoint: Callable[..., Path], family: str, rope: str
):
    path = toy_checkpoint(family, rope_parameters=ROPES[rope])
    assert "rope_parameters" in json.loads((path / "config.json").read_text())
    assert_same_model(path)


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
@pytest.mark.parametrize("rope", ROPES)
def test_each_rope_in_the_old_spelling_equals_transformers(
    toy_copy: Callable[..., Path], rope: str, type_key: str
):
    path = toy_copy("llama", rope_parameters=ROPES[rope])
    config = json.loads((path / "config.json").read_text())
    settings = config.pop("rope_parameters")
    config["rope_theta"] = settings.pop("rope_theta")
    settings[type_key] = settings.pop("rope_type")
    config["rope_scaling"] = None if rope == "default" else settings
    (path / "config.json").write_text(json.dumps(config))
    assert_same_model(path)


def test_longrope_of_long_texts_equals_transformers(toy_checkpoint: Callable[..., Path]):
    """Beyond the original positions; below them transformers would use the short factors."""
    rope = LONGROPE | {"original_max_position_embeddings": 32}
    path = toy_checkpoint("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    theirs, prompt, ours = reference_model(path), random_ids(90, seed=4), ToyEngine(path)
    found = ours.run(("all", prompt)).logits
    torch.testing.assert_close(found, reference_logits(theirs, prompt), atol=TOLERANCE, rtol=0)
    assert ours.greedy(prompt[:40], 8) == reference_greedy(theirs, prompt[:40], 8)


def test_two_rotations_in_the_old_spelling_are_those_of_the_new_one(toy_copy: Callable[..., Path]):
    path = toy_copy("gemma3", rope_parameters=TWO_ROPES)
    new, file = load_model_config(path), path / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 9000.0, "rope_local_base_freq": 300.0}
    file.write_text(json.dumps(config | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}))
    old = load_model_config(path)
    assert (old.rope, old.forms) == (new.rope, new.forms)


def test_rows_at_every_edge_of_a_window_equal_transformers(toy_checkpoint: Callable[..., Path]):
    """Chunks and steps that end at, before and behind the edges of the window, of pages and of chunks."""
    for family, window in (("mistral", 16), ("gemma2", 17)):
        path = toy_checkpoint(family, sliding_window=window)
        prompt = random_ids(70, seed=5)
        wanted = reference_logits(reference_model(path), prompt)
        for chunk in (1, window - 1, window, window + 1, 32):
            ours = ToyEngine(path)
            parts = [ours.run(("a", prompt[i : i + chunk])).logits for i in range(0, len(prompt), chunk)]
            torch.testing.assert_close(torch.cat(parts), wanted, atol=TOLERANCE, rtol=0)
