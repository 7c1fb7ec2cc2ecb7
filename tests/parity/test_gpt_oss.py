"""Checkpoints of gpt-oss as published: experts in 4 bits, decoded as transformers decodes them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.engine.models.registry import load_model_config
from baton.engine.models.weights import load_model, weight_bytes
from baton.kernels.mxfp4 import decode_mxfp4
from baton.tests.parity.test_families import assert_same_model
from baton.tests.parity.toy_engine import ToyEngine, random_ids
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

pytestmark = pytest.mark.usefixtures("one_thread")


def packed(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks `[..., 16]` and scales of matrices of `shape`, whose values are some tenths."""
    generator = torch.Generator().manual_seed(seed)
    groups = (*shape[:-1], shape[-1] // 32)
    blocks = torch.randint(0, 256, (*groups, 16), generator=generator).to(torch.uint8)
    return blocks, torch.randint(121, 125, groups, generator=generator).to(torch.uint8)


def write_packed(path: Path, packed_path: Path) -> None:
    """Gives the checkpoint in `path` experts that 4 bits hold, and writes them so to `packed_path`."""
    shutil.copytree(path, packed_path)
    tensors = load_file(path / "model.safetensors")
    stored = dict(tensors)
    for seed, name in enumerate(sorted(tensors)):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, width, rows = tensors[name].shape
            blocks, scales = packed((experts, rows, width), seed)
            tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    save_file(stored, packed_path / "model.safetensors")
    config = json.loads((packed_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed_path / "config.json").write_text(json.dumps(config))


def test_a_packed_checkpoint_gives_the_tokens_of_its_floats(toy_copy: Callable[..., Path], tmp_path: Path):
    path = toy_copy("gpt_oss")
    write_packed(path, tmp_path / "packed")
    assert_same_model(path)
    floats, four_bits = ToyEngine(path), ToyEngine(tmp_path / "packed")
    prompt = random_ids(60, seed=9)
    assert torch.equal(floats.run(("a", prompt)).logits, four_bits.run(("a", prompt)).logits)
    held = {name: tensor for name, tensor in four_bits.model.tensors() if "experts" in name}
    assert {tensor.dtype for name, tensor in held.items() if "words" in name} == {torch.int16}
    assert sum(tensor.nbytes for tensor in held.values()) < weight_bytes(path, torch.float32) / 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoded_values_are_those_of_transformers(dtype: torch.dtype):
    blocks, scales = packed((3, 10, 96), 1)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(decode_mxfp4(blocks, scales, dtype), theirs.transpose(1, 2))
    with pytest.raises(ValueError, match="decode_mxfp4"):
        decode_mxfp4(blocks, scales[..., :1], dtype)


def test_another_quantisation_and_missing_experts_are_one_clear_line(toy_copy: Callable[..., Path]):
    path = toy_copy("gpt_oss")
    file = path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(CheckpointError, match=r"quantization_config.*mxfp4"):
        load_model_config(path)
    file.write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(CheckpointError, match=r"blocks.*missing"):
        load_model(path, dtype=torch.float32)
