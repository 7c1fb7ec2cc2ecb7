"""Checkpoints are loaded completely or refused in one clear line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.engine.models import weights
from baton.engine.models.weights import iter_safetensors, load_model
from baton.engine.weights_hash import model_fingerprint
from baton.tests.parity.toy_models import reference_model
from safetensors.torch import load_file, save_file

Copy = Callable[..., Path]


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(path, dtype=torch.float32)
    message = str(caught.value)
    assert "\n" not in message
    return message


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_every_tensor_lands_in_the_place_of_its_name(toy_checkpoint: Copy):
    path = toy_checkpoint("qwen2", shard_size="100KB")
    model, _ = load_model(path, dtype=torch.float32)
    ours, theirs = dict(model.tensors()), dict(iter_safetensors(path))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_weights_are_converted_to_the_asked_dtype(toy_checkpoint: Copy):
    model, config = load_model(toy_checkpoint("llama"), dtype=torch.bfloat16)
    assert config.dtype == "float32"
    assert {tensor.dtype for _, tensor in model.tensors()} == {torch.bfloat16}


def test_a_tied_model_has_one_matrix_and_an_untied_two(toy_checkpoint: Copy):
    tied, _ = load_model(toy_checkpoint("llama", tie_word_embeddings=True), dtype=torch.float32)
    untied, _ = load_model(toy_checkpoint("llama"), dtype=torch.float32)
    assert tied.lm_head is tied.embed_tokens
    assert not torch.equal(untied.lm_head, untied.embed_tokens)


def test_derived_and_tied_tensors_of_old_checkpoints_are_skipped(toy_copy: Copy):
    path = toy_copy("llama", tie_word_embeddings=True)

    def add_old_ones(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    rewrite(path, add_old_ones)
    model, config = load_model(path, dtype=torch.float32)
    assert config.tie_word_embeddings
    assert model.lm_head is model.embed_tokens


def test_a_head_of_its_own_is_used_though_the_config_ties_it(
    toy_copy: Copy, caplog: pytest.LogCaptureFixture
):
    """As transformers does, which compares the tensors."""
    path = toy_copy("llama", tie_word_embeddings=True)
    own = torch.randn(256, 64, generator=torch.Generator().manual_seed(7))
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": own}))
    model, config = load_model(path, dtype=torch.float32)
    assert not config.tie_word_embeddings
    assert torch.equal(model.lm_head, own)
    assert torch.equal(reference_model(path).lm_head.weight, own)
    assert "tie_word_embeddings is true, but lm_head.weight is another matrix" in caplog.text
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": own[:200].clone()}))
    assert "lm_head.weight has shape [200, 64], config.json asks for [256, 64]" in refusal(path)


def test_a_missing_shard_is_named_before_anything_is_loaded(toy_copy: Copy):
    path = toy_copy("llama", shard_size="100KB")
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    message = refusal(path)
    assert str(shard) in message
    assert "fetch it again" in message


def test_a_missing_tensor_is_named(toy_copy: Copy):
    path = toy_copy("llama")
    rewrite(path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "tensor model.layers.1.mlp.up_proj.weight is missing" in refusal(path)


def test_an_untied_model_without_a_head_is_refused(toy_copy: Copy):
    path = toy_copy("llama", tie_word_embeddings=True)
    config = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(config))
    assert "lm_head.weight is missing" in refusal(path)


def test_an_unknown_tensor_is_named(toy_copy: Copy):
    path = toy_copy("llama")
    rewrite(path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    assert "tensor model.layers.0.self_attn.q_norm.weight is unknown" in refusal(path)


def test_a_wrong_shape_is_named_with_both_shapes(toy_copy: Copy):
    path = toy_copy("llama")
    rewrite(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    message = refusal(path)
    assert all(part in message for part in ("model.norm.weight", "[65]", "[64]"))


def test_quantised_tensors_are_refused(toy_copy: Copy):
    path = toy_copy("llama")
    rewrite(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    assert "torch.int8" in refusal(path)


def test_a_truncated_file_is_named(toy_copy: Copy):
    path = toy_copy("llama")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file}: not a complete safetensors file" in refusal(path)


def test_a_truncated_shard_of_several_is_named_before_any_is_read(
    toy_copy: Copy, monkeypatch: pytest.MonkeyPatch
):
    path = toy_copy("llama", shard_size="100KB")
    last = sorted(path.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-100])
    monkeypatch.setattr(weights, "read_pieces", lambda pieces: pytest.fail("a shard was read"))
    assert f"{last}: not a complete safetensors file" in refusal(path)


def test_experts_that_no_shard_has_are_named(toy_copy: Copy, monkeypatch: pytest.MonkeyPatch):
    path = toy_copy("qwen3_moe", shard_size="100KB")
    gone = [f"model.layers.0.mlp.experts.5.{name}_proj.weight" for name in ("gate", "up", "down")]
    for shard in path.glob("*.safetensors"):
        tensors = load_file(shard)
        save_file({name: each for name, each in tensors.items() if name not in gone}, shard)
    monkeypatch.setattr(weights, "read_pieces", lambda pieces: pytest.fail("a shard was read"))
    message = refusal(path)
    assert "3 tensors" in message
    assert gone[2] in message
    assert "missing from the weights; fetch the checkpoint again" in message


def test_a_directory_without_weights_is_named(toy_copy: Copy):
    path = toy_copy("llama")
    (path / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {"a": 3}}', "not json"])
def test_a_malformed_index_is_named(toy_copy: Copy, index: str):
    path = toy_copy("llama", shard_size="100KB")
    (path / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refusal(path)


def test_an_index_cannot_point_outside_the_checkpoint(toy_copy: Copy):
    path = toy_copy("llama", shard_size="100KB")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    assert "points outside" in refusal(path)


def test_equal_checkpoints_have_equal_fingerprints(toy_checkpoint: Copy, toy_copy: Copy):
    original, copy = toy_checkpoint("llama", shard_size="100KB"), toy_copy("llama", shard_size="100KB")
    assert model_fingerprint(original) == model_fingerprint(copy)
    assert len(model_fingerprint(copy)) == 64


@pytest.mark.parametrize("offset", ["header", -1, -60000])
def test_a_changed_byte_of_header_or_data_edge_changes_the_fingerprint(toy_copy: Copy, offset: int | str):
    path = toy_copy("llama")
    before = model_fingerprint(path)
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    at = content.index(b'"format":"pt"') + 10 if isinstance(offset, str) else offset
    content[at] ^= 1
    file.write_bytes(content)
    assert model_fingerprint(path) != before


def test_a_changed_config_changes_the_fingerprint(toy_copy: Copy):
    path = toy_copy("llama")
    before = model_fingerprint(path)
    (path / "config.json").write_text((path / "config.json").read_text() + "\n")
    assert model_fingerprint(path) != before


def test_a_header_longer_than_the_file_has_no_fingerprint(toy_copy: Copy):
    path = toy_copy("llama")
    (path / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        model_fingerprint(path)
