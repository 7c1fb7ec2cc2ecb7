"""Tiny checkpoints in the forms of quantised ones, written by the formulas of each format, and their values.

Nothing of the engine is used here. Each form has a function that turns one matrix `[N, H]` into the tensors
that a checkpoint stores under its module, and the values that these stand for.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = 128
FP8 = torch.float8_e4m3fn
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]  # tensors by their names behind the module, values


def per_tensor(weight: torch.Tensor) -> Stored:
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(FP8)
    tensors = {"weight": stored, "weight_scale": scale.reshape(1), "input_scale": torch.tensor([0.25])}
    return tensors, stored.float() * scale


def per_channel(weight: torch.Tensor) -> Stored:
    """Scales `[N, 1]` in bfloat16, as compressed-tensors writes them."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    stored = (weight / scale.float()).clamp(-448, 448).to(FP8)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale.float()


def per_block(weight: torch.Tensor) -> Stored:
    rows, columns = weight.shape
    stored, values = torch.empty_like(weight, dtype=FP8), torch.empty_like(weight)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = weight[block].abs().max() / 448
            stored[block] = (weight[block] / scales[i, j]).to(FP8)
            values[block] = stored[block].float() * scales[i, j]
    return {"weight": stored, "weight_scale_inv": scales}, values


def compressed(weights_by: str, **inputs: object) -> dict[str, object]:
    weights = {"num_bits": 8, "type": "float", "strategy": weights_by, "symmetric": True, "dynamic": False}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True} | inputs
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FORMS: dict[str, tuple[Callable[[torch.Tensor], Stored], dict[str, object]]] = {
    "tensor": (per_tensor, compressed("tensor", strategy="tensor", dynamic=False)),
    "channel": (per_channel, compressed("channel")),
    "block": (
        per_block,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    ),
}
# sizes that blocks can divide, with a ragged end of the inner dimension
SHAPE = {
    "hidden_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
}


def write_quantised(
    plain: Path, path: Path, form: str, *, ignored: tuple[str, ...] = (), **config: object
) -> Path:
    """Writes the float32 checkpoint `plain` in `form` to `path`, and its values as floats to `path`/values.

    Matrices whose names hold one of `ignored` stay as they are. `config` overrides the quantization_config.
    Returns the folder of the values.
    """
    quantise, section = FORMS[form]
    tensors, values = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight") or any(part in name for part in ignored):
            tensors[name] = values[name] = tensor
            continue
        stored, values[name] = quantise(tensor)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{suffix}": each.contiguous() for suffix, each in stored.items()}
    whole = path / "values"
    whole.mkdir(parents=True)
    for file in plain.glob("*.json"):
        shutil.copy(file, path)
        shutil.copy(file, whole)
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] = section | config
    (path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, path / "model.safetensors")
    save_file(values, whole / "model.safetensors", metadata={"format": "pt"})
    return whole
