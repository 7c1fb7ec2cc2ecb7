"""Configs of routed experts: what is read, and one clear line for what cannot run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.engine.models.deepseek_config import LatentConfig
from baton.engine.models.registry import load_model_config
from baton.engine.models.weights import load_model
from safetensors.torch import load_file, save_file


def changed(path: Path, **changes: object) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def test_deepseek_sharpens_scores_by_mscale(toy_copy: Callable[..., Path]):
    config = load_model_config(toy_copy("deepseek_v3"))
    assert isinstance(config, LatentConfig)
    assert config.score_scale == pytest.approx(24**-0.5 * (0.1 * 1.3862943611 + 1) ** 2)
    assert config.moe is not None
    assert (config.moe.num_groups, config.moe.kept_groups, config.moe.best_of_group) == (4, 2, 2)
    assert (config.moe.shared_size, config.moe.dense_layers) == (24, {0})


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("deepseek_v3", {"scoring_func": "softmax"}, ("scoring_func = 'softmax'", "supports sigmoid")),
        ("deepseek_v3", {"topk_method": "greedy"}, ("topk_method = 'greedy'", "supports noaux_tc")),
        ("deepseek_v2", {"topk_method": "best"}, ("topk_method = 'best'", "greedy and group_limited_greedy")),
        ("deepseek_v2", {"norm_topk_prob": True}, ("norm_topk_prob = True", "set it to false")),
        ("deepseek_v3", {"n_group": 3}, ("8 experts do not make 3 equal groups", "check n_group")),
        (
            "deepseek_v3",
            {"topk_group": 1, "num_experts_per_tok": 3},
            ("1 groups of 2 experts", "3 to choose"),
        ),
        ("glm4_moe", {"moe_layer_freq": 2}, ("moe_layer_freq = 2", "only 1")),
        ("deepseek_v3", {"kv_lora_rank": 23}, ("kv_lora_rank = 23", "odd rank")),
        (
            "deepseek_v2",
            {"q_lora_rank": None, "attention_bias": True},
            ("attention_bias = True", "q_lora_rank"),
        ),
    ],
)
def test_what_cannot_run_names_key_value_and_remedy(
    toy_copy: Callable[..., Path], family: str, changes: dict[str, object], words: tuple[str, ...]
):
    with pytest.raises(CheckpointError) as caught:
        load_model_config(changed(toy_copy(family), **changes))
    assert all(word in str(caught.value) for word in ("config.json", *words)), caught.value
    assert "\n" not in str(caught.value)


def test_experts_that_a_checkpoint_lacks_are_named(toy_copy: Callable[..., Path]):
    path = toy_copy("deepseek_v3")
    tensors = load_file(path / "model.safetensors")
    missing = "model.layers.1.mlp.experts.5.up_proj.weight"
    del tensors[missing]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {missing} is missing"):
        load_model(path, dtype=torch.float32)
