"""Targets that drafters are trained for: what is refused, and what a drafter's config takes from them."""

import json
from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.tests.parity.sparse_toys import built, sparse_config, write_sparse_checkpoint
from baton.training.frozen_target import FrozenTarget
from baton.training.head_files import write_mtp_config


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
