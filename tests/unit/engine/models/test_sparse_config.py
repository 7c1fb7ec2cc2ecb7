"""The config.json of a model with sparse attention."""

from pathlib import Path

import pytest
from baton.engine.errors import CheckpointError
from baton.engine.models.registry import load_model_config
from baton.engine.models.sparse_block import SparseConfig
from baton.tests.unit.engine.models.test_model_config import write

NAMED = {"architectures": ["SparseBlockForCausalLM"]}


def test_every_size_is_read_and_has_a_default(tmp_path: Path):
    config = load_model_config(write(tmp_path, NAMED))
    assert isinstance(config, SparseConfig)
    found = (config.index_heads, config.index_topk, config.index_block, config.compressed_block)
    assert (*found, config.window) == (2, 8, 4, 128, 64)
    assert config.query_heads == config.num_heads + 2
    keys = {
        "index_n_heads": 3,
        "index_topk": 5,
        "index_block_size": 8,
        "compressed_block_size": 32,
        "local_window": 9,
    }
    config = load_model_config(write(tmp_path, NAMED | keys))
    assert isinstance(config, SparseConfig)
    assert (config.index_heads, config.index_topk, config.index_block) == (3, 5, 8)
    assert (config.compressed_block, config.window) == (32, 9)


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("index_topk", 0, "a positive integer is required"),
        ("local_window", "64", "a positive integer is required"),
        ("compressed_block_size", 30, "it must be a multiple of index_block_size = 4"),
    ],
)
def test_a_size_that_does_not_fit_is_named_with_the_remedy(tmp_path: Path, key: str, value, remedy: str):
    with pytest.raises(CheckpointError, match=rf"{key} = .*{remedy}"):
        load_model_config(write(tmp_path, NAMED | {key: value}))
