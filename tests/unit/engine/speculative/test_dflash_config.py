"""A DFLASH config names the layers to capture; prefill captures them, decode refuses it by name."""

import json
from pathlib import Path

import pytest
from baton.engine.config import EngineConfig
from baton.engine.errors import CheckpointError
from baton.engine.loader import EngineLoader
from baton.engine.speculative.drafters.dflash_config import ARCHITECTURE, load_dflash_config
from baton.engine.speculative.drafters.registry import DflashSource, Eagle3Source, read_drafter
from baton.tests.parity.eagle3_toys import head_config, toy_target


def write(path: Path, *, dflash: object = None, **changes: object) -> Path:
    config = {"architectures": [ARCHITECTURE], "hidden_size": 64, "num_hidden_layers": 5, "block_size": 16}
    config |= {"dflash_config": {"mask_token_id": 9} if dflash is None else dflash} | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("layers", "count", "ids"), [
    (36, 5, (1, 9, 17, 25, 33)), (24, 5, (1, 6, 11, 16, 21)), (64, 5, (1, 16, 31, 46, 61)), (36, 1, (18,)),
])  # fmt: skip
def test_ids_that_are_not_named_are_evenly_spaced(tmp_path, layers, count, ids):
    config = load_dflash_config(write(tmp_path, num_hidden_layers=count), toy_target(num_layers=layers))
    assert (config.aux.ids, config.aux.convention) == (ids, "default")
    assert config.dims.target_feature_width == count * 64


def test_named_ids_are_outputs_in_the_order_written(tmp_path):
    path = write(tmp_path, dflash={"target_layer_ids": [9, 1, 11]})
    source = read_drafter(path, toy_target(), dtype="bfloat16")
    assert isinstance(source, DflashSource)
    config = source.config
    assert (config.aux.ids, config.aux.convention) == ((9, 1, 11), "output")
    assert (config.dims.num_features, config.dims.target_feature_dtype) == (3, "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(head_config(2)))
    assert isinstance(read_drafter(tmp_path, toy_target()), Eagle3Source)


@pytest.mark.parametrize(("changes", "words"), [
    ({"dflash": {"target_layer_ids": [1, 5, 1]}}, ["target_layer_ids", "[1, 5, 1]", "twice"]),
    ({"dflash": {"target_layer_ids": [1, 12]}}, ["target_layer_ids", "12 is out of range"]),
    ({"dflash": {"target_layer_ids": 3}}, ["target_layer_ids", "3", "list of layer ids"]),
    ({"dflash": [1]}, ["dflash_config", "expected an object"]),
    ({"hidden_size": 96}, ["hidden_size is 96", "target has 64"]),
    ({"num_hidden_layers": 10}, ["12 layers", "10 defaults"]),
])  # fmt: skip
def test_layers_that_cannot_be_captured_are_refused_with_file_and_key(tmp_path, changes, words):
    with pytest.raises(CheckpointError) as caught:
        load_dflash_config(write(tmp_path, **changes), toy_target())
    assert all(word in str(caught.value) for word in [str(tmp_path / "config.json"), *words]), caught.value


def test_prefill_ships_features_and_decode_refuses_the_drafter_by_name(toy_checkpoint, tmp_path):
    target = toy_checkpoint("llama", num_hidden_layers=12)
    draft = write(tmp_path, dflash={"target_layer_ids": [9, 1, 5, 7, 2]})
    config = EngineConfig(
        model=str(target),
        draft=str(draft),
        device="cpu",
        dtype="float32",
        page_size=4,
        pages=8,
        max_context=32,
    )
    prefill = EngineLoader(config, has_drafter=False)
    for _, run in prefill.phases():
        run()
    engine = prefill.engine()
    assert engine.model.aux_layer_ids == engine.feature_ids == (9, 1, 5, 7, 2)
    assert engine.features.width == engine.feature_width == 5 * 64
    (_, load), (_, configure), *_ = EngineLoader(config, has_drafter=True).phases()
    load()
    with pytest.raises(CheckpointError, match="decode runs EAGLE3 heads only"):
        configure()
