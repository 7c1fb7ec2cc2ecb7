"""A DFLASH config is read as published; what baton does not run is refused with file, key and remedy."""

import json
from pathlib import Path

import pytest
import torch
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.errors import CheckpointError
from baton.engine.loader import EngineLoader
from baton.engine.speculative.drafters.dflash import DflashDrafter
from baton.engine.speculative.drafters.dflash_config import load_dflash_config
from baton.engine.speculative.drafters.dflash_weights import load_dflash
from baton.engine.speculative.drafters.registry import DflashSource, Eagle3Source, read_drafter
from baton.engine.speculative.drafting.shape import DraftShape
from baton.tests.parity.dflash_toys import BLOCK, MASK, dflash_config, dflash_tensors, write_dflash
from baton.tests.parity.eagle3_toys import head_config, toy_target

MIXED = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 9,
    "use_sliding_window": None,
}
# config.json as published: of Qwen3-8B, and with block size and rotary settings nested, of Qwen3.5-122B-A10B
QWEN3_8B = {
    "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16, "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}, "dtype": "bfloat16",
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 12288, "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960, "max_window_layers": 5, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 5, "num_key_value_heads": 8, "num_target_layers": 36,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": False, "transformers_version": "4.57.3", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
NESTED = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": "bfloat16", "hidden_size": 3072,
    "num_hidden_layers": 6, "vocab_size": 248320, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 9216, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000}, "use_sliding_window": True,
    "sliding_window": 4096, "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "tie_word_embeddings": False, "num_target_layers": 48, "max_window_layers": 6,
    "dflash_config": {"block_size": 16, "mask_token_id": 248077,
                      "target_layer_ids": [1, 7, 14, 20, 26, 32, 39, 45]},
}  # fmt: skip


def write(path: Path, *, dflash: object = None, **changes: object) -> Path:
    inner = {"mask_token_id": 9} if dflash is None else dflash
    if isinstance(inner, dict):
        inner = {"mask_token_id": 9} | inner
    config = dflash_config(dflash_config=inner, num_hidden_layers=5, layer_types=None) | changes
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
    assert source.drafts_blocks
    (tmp_path / "config.json").write_text(json.dumps(head_config(2)))
    assert isinstance(read_drafter(tmp_path, toy_target()), Eagle3Source)


@pytest.mark.parametrize(("changes", "words"), [
    ({"dflash": {"target_layer_ids": [1, 5, 1]}}, ["target_layer_ids", "[1, 5, 1]", "twice"]),
    ({"dflash": {"target_layer_ids": [1, 12]}}, ["target_layer_ids", "12 is out of range"]),
    ({"dflash": {"target_layer_ids": 3}}, ["target_layer_ids", "3", "list of layer ids"]),
    ({"dflash": [1]}, ["dflash_config", "expected an object"]),
    ({"hidden_size": 96}, ["hidden_size is 96", "target has 64"]),
    ({"num_hidden_layers": 10}, ["12 layers", "10 defaults"]),
    ({"num_target_layers": 36}, ["num_target_layers is 36", "target has 12"]),
    ({"vocab_size": 300}, ["vocab_size is 300", "target has 256"]),
    ({"dflash": {"mask_token_id": 256}}, ["mask_token_id is 256", "vocabulary of 256", "another mask token"]),
    ({"dflash": {"mask_token_id": None}}, ["mask_token_id is None", "id of the mask token"]),
    ({"dflash": {"projector_type": "domino"}}, ["dflash_config.projector_type = 'domino'", "extensions"]),
    ({"dflash": {"markov_rank": 8}}, ["dflash_config.markov_rank = 8", "extensions"]),
    ({"conv_kernel_size": 2}, ["conv_kernel_size = 2", "not known to baton"]),
    ({"dflash": {"attention_mode": "mla"}}, ["attention_mode is 'mla'", "gqa, mha"]),
    ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'"]),
    ({"block_size": 1}, ["block_size is 1", "at least one draft"]),
    ({"num_key_value_heads": 3}, ["num_key_value_heads is 3", "4 heads"]),
    ({"layer_types": ["full_attention"]}, ["layer_types", "each of 5 layers"]),
    ({"layer_types": ["sliding_attention"] * 5, "sliding_window": 9}, ["layer_types", "use_sliding_window"]),
    ({"layer_types": ["sliding_attention"] * 5, "use_sliding_window": None}, ["layer_types", "no size"]),
    ({"speculators_model_type": "dflash"}, ["speculators_model_type 'dflash'", "z-lab or SpecForge"]),
    ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, ["rope_scaling.rope_type", "spiral"]),
])  # fmt: skip
def test_a_config_that_cannot_run_is_refused_with_file_and_key(tmp_path, changes, words):
    with pytest.raises(CheckpointError) as caught:
        load_dflash_config(write(tmp_path, **changes), toy_target())
    assert all(word in str(caught.value) for word in [str(tmp_path / "config.json"), *words]), caught.value


@pytest.mark.parametrize(("published", "windows", "theta"), [
    (QWEN3_8B, (None,) * 5, 1e6), (NESTED, (4096,) * 5 + (None,), 1e7),
])  # fmt: skip
def test_configs_are_read_as_published(tmp_path, published, windows, theta):
    (tmp_path / "config.json").write_text(json.dumps(published))
    sizes = {key: published[key] for key in ("hidden_size", "vocab_size")}
    config = load_dflash_config(tmp_path, toy_target(num_layers=published["num_target_layers"], **sizes))
    inner = published["dflash_config"]
    assert (config.block_size, config.mask_token_id) == (16, inner["mask_token_id"])
    assert (list(config.aux.ids), config.rope.theta) == (inner["target_layer_ids"], theta)
    assert config.windows == windows
    assert config.are_causal == tuple(window is not None for window in windows)


@pytest.mark.parametrize(("changes", "windows", "are_causal"), [
    ({}, (None, None), (False, False)),
    ({"use_sliding_window": True, "sliding_window": 9}, (None, None), (False, False)),
    ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, (None, 9), (False, True)),
    ({"is_causal": True}, (None, None), (True, True)),
    (MIXED, (9, None), (True, False)),
    (MIXED | {"is_causal": False}, (9, None), (False, False)),
])  # fmt: skip
def test_layers_have_their_types_or_those_of_qwen3(tmp_path, changes, windows, are_causal):
    config = dflash_config(layer_types=None) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = load_dflash_config(tmp_path, toy_target())
    assert (read.windows, read.are_causal) == (windows, are_causal)


def test_a_drafter_for_another_algorithm_is_refused_by_name(tmp_path):
    write(tmp_path, architectures=["DFlash2DraftModel"])
    with pytest.raises(CheckpointError, match=r"architectures \['DFlash2DraftModel'\].*DFlashDraftModel"):
        read_drafter(tmp_path, toy_target())


def test_a_checkpoint_with_published_names_is_read_whole(tmp_path):
    tensors = dflash_tensors()
    config = load_dflash_config(write_dflash(tmp_path, dflash_config(), tensors), toy_target())
    assert (config.block_size, config.mask_token_id) == (BLOCK, MASK)
    read = dict(load_dflash(config, dtype=torch.float32).tensors())
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    aliases = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    write_dflash(tmp_path, dflash_config(), {aliases.get(n, f"model.{n}"): x for n, x in tensors.items()})
    again = dict(load_dflash(config, dtype=torch.float32).tensors())
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(("change", "words"), [
    (lambda w: w.pop("layers.1.mlp.up_proj.weight"), ["layers.1.mlp.up_proj.weight", "missing"]),
    (lambda w: w.update({"markov_head.weight": torch.ones(2)}), ["markov_head.weight", "extension"]),
    (lambda w: w.update({"layers.2.input_layernorm.weight": torch.ones(64)}), ["number of layers"]),
    (lambda w: w.update({"fc.weight": torch.ones(64, 128)}), ["fc.weight is [64, 128]", "[64, 192]"]),
    (lambda w: w.update({"norm.weight": torch.ones(32)}), ["norm.weight", "[32]", "[64]"]),
    (lambda w: w.update({"norm.weight": torch.ones(64).char()}), ["norm.weight is torch.int8"]),
    (lambda w: w.update({"model.norm.weight": torch.ones(64)}), ["norm.weight", "fetch"]),
])  # fmt: skip
def test_a_checkpoint_that_does_not_fit_its_config_is_refused(tmp_path, change, words):
    tensors = dflash_tensors()
    change(tensors)
    config = load_dflash_config(write_dflash(tmp_path, dflash_config(), tensors), toy_target())
    with pytest.raises(CheckpointError) as caught:
        load_dflash(config, dtype=torch.float32)
    assert all(word in str(caught.value) for word in [str(tmp_path), *words]), caught.value


def test_prefill_ships_features_and_decode_drafts(toy_checkpoint, tmp_path):
    target = toy_checkpoint("llama", num_hidden_layers=12)
    ids = (9, 1, 5, 7, 2)
    draft = write_dflash(tmp_path, dflash_config(ids), dflash_tensors(num_features=5))
    settings = {"model": str(target), "draft": str(draft), "device": "cpu", "dtype": "float32"}
    sizes = {"page_size": 4, "pages": 40, "max_context": 64, "max_running": 2, "spec_steps": BLOCK - 1}
    config = EngineConfig(**settings, **sizes)
    prefill, decode = (loaded(config, has_drafter=has_drafter) for has_drafter in (False, True))
    for engine in (prefill, decode):
        assert engine.model.aux_layer_ids == engine.feature_ids == ids
        assert engine.feature_width == 5 * 64
    assert prefill.features.width == 5 * 64
    assert prefill.drafter is None
    assert isinstance(decode.drafter, DflashDrafter)
    assert decode.shape == DraftShape.of(BLOCK - 1)
    assert decode.cache.lookahead == 0, "draft KV depends on no later token"


@pytest.mark.parametrize(("shape", "words"), [
    ({"spec_steps": BLOCK}, [f"spec_steps {BLOCK}", f"blocks of {BLOCK}", f"--spec-steps {BLOCK - 1}"]),
    ({"spec_topk": 2}, ["spec_topk 2", "--spec-topk 1"]),
])  # fmt: skip
def test_shapes_that_no_block_has_are_refused(toy_checkpoint, tmp_path, shape, words):
    target = toy_checkpoint("llama", num_hidden_layers=12)
    draft = write_dflash(tmp_path, dflash_config(), dflash_tensors())
    config = EngineConfig(model=str(target), draft=str(draft), device="cpu", pages=40, **shape)
    with pytest.raises(CheckpointError) as caught:
        loaded(config, has_drafter=True)
    assert all(word in str(caught.value) for word in words), caught.value


def loaded(config: EngineConfig, *, has_drafter: bool) -> Engine:
    loader = EngineLoader(config, has_drafter=has_drafter)
    for _, run in loader.phases():
        run()
    return loader.engine()
