"""Targets that drafters are trained for: what is refused, and what a drafter's config takes from them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.engine.models.registry import load_model_config
from baton.engine.models.rope import read_rope_config
from baton.tests.parity.sparse_toys import built, sparse_config, write_sparse_checkpoint
from baton.training.frozen_target import FrozenTarget
from baton.training.head_files import write_dflash_config, write_eagle3_config, write_mtp_config
from baton.training.kinds import HeadSettings


def test_a_target_with_sparse_attention_is_refused_in_training(tmp_path: Path) -> None:
    model = write_sparse_checkpoint(tmp_path, built(sparse_config(), torch.float32))
    with pytest.raises(CheckpointError, match="whose attention is sparse"):
        FrozenTarget.load(model, (1,), dtype=torch.float32, device=torch.device("cpu"))


def test_a_trained_module_is_counted_without_those_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"hidden_size": 8, "num_nextn_predict_layers": 3, "chain_mtp_hidden_states": True})
    )
    write_mtp_config(tmp_path / "head", tmp_path)
    written = json.loads((tmp_path / "head/config.json").read_text())
    assert written == {"hidden_size": 8, "torch_dtype": "bfloat16", "mtp_num_hidden_layers": 1}


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@pytest.mark.parametrize("is_nested", [False, True], ids=["of the hub", "of transformers 5"])
def test_a_head_for_a_gemma_has_the_rotation_of_its_global_layers(
    kind: str, is_nested: bool, tmp_path: Path
) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    text: dict[str, object] = {"model_type": "gemma3_text", "num_hidden_layers": 6, "rope_scaling": scaling}
    text |= {"hidden_size": 64, "intermediate_size": 64, "sliding_window": 16, "num_key_value_heads": 4}
    if is_nested:
        local = {"rope_type": "default", "rope_theta": 10000.0}
        del text["rope_scaling"]
        text["rope_parameters"] = {
            "full_attention": {**scaling, "rope_theta": 1e6},
            "sliding_attention": local,
        }
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = load_model_config(tmp_path)
    if kind == "eagle3":
        write_eagle3_config(tmp_path / "head", tmp_path, target, (1, 3), 8)
    else:
        numbers = {"num_layers": 1, "block_size": 4, "mask_token": 5}
        write_dflash_config(tmp_path / "head", tmp_path, target, (1, 3), **numbers)
    written = json.loads((tmp_path / "head/config.json").read_text())
    assert read_rope_config(written, tmp_path / "head/config.json") == target.rope


def test_a_target_whose_layers_no_module_has_is_one_line(
    toy_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = toy_checkpoint("gemma3", num_hidden_layers=4)
    config = load_model_config(path)
    counts = torch.ones(config.vocab_size, dtype=torch.int64)
    settings = HeadSettings(kind="mtp", steps=2).resolved(config, counts)
    settings.write_config(tmp_path, path, config)
    target = FrozenTarget.load(path, settings.layers, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(CheckpointError, match="an MTP module has plain layers in floats") as caught:
        settings.trainee(tmp_path, config, target, counts)
    assert "\n" not in str(caught.value)
