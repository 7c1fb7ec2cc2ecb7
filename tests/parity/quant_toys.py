"""Tiny checkpoints in the forms of quantised ones, written by the formulas of each format, and their values.

Nothing of the engine is used here. Each form has a function that turns one matrix `[N, H]` into the tensors
that a checkpoint stores under its module, and the values that these stand for.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, PreTrainedModel

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


def int4_groups(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(integers `[N, H]`, zero points `[N, H/G]`, scales float16 `[N, H/G]`) of the nearest values."""
    grouped = weight.view(weight.shape[0], -1, group)
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(1, 15).int()
    stored = (grouped / scales.float()[..., None]).round().int() + zeros[..., None]
    return stored.clamp(0, 15).view(weight.shape), zeros, scales


def int4_values(stored: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    group = stored.shape[1] // zeros.shape[1]
    spread = (each.float().repeat_interleave(group, dim=1) for each in (zeros, scales))
    zero, scale = spread
    return (stored - zero) * scale


def words(values: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """int32 `[R, C/8]`: value `order[i]` of each eight of a row lies in bits 4*i and above."""
    eights = values.long().view(values.shape[0], -1, 8)
    found = sum(eights[..., place] << 4 * i for i, place in enumerate(order))
    return torch.where(found >= 2**31, found - 2**32, found).int()


def awq(weight: torch.Tensor, group: int = 64) -> Stored:
    """As AutoAWQ packs: outputs along a row, in an order that suits its kernels."""
    stored, zeros, scales = int4_groups(weight, group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(stored.t(), order),
        "qzeros": words(zeros.t(), order),
        "scales": scales.t(),
    }
    return tensors, int4_values(stored, zeros, scales)


def gptq(weight: torch.Tensor, group: int = 32, offset: int = 1) -> Stored:
    """As AutoGPTQ packs: inputs along a column in sequence, zero points less one."""
    stored, zeros, scales = int4_groups(weight, group)
    order = tuple(range(8))
    tensors = {
        "qweight": words(stored, order).t(),
        "qzeros": words(zeros.t() - offset, order),
        "scales": scales.t(),
        "g_idx": (torch.arange(weight.shape[1]) // group).int(),
    }
    return tensors, int4_values(stored, zeros, scales)


def gptq_v2(weight: torch.Tensor) -> Stored:
    return gptq(weight, 64, 0)


def gptq_ordered(weight: torch.Tensor, group: int = 32) -> Stored:
    """As AutoGPTQ with act-order: groups are of inputs in an order, which matrices of one input share."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    tensors, values = gptq(weight[:, order], group)
    back = torch.argsort(order)
    stored, _, _ = int4_groups(weight[:, order], group)
    tensors["qweight"] = words(stored[:, back], tuple(range(8))).t()
    tensors["g_idx"] = tensors["g_idx"][back]
    return tensors, values[:, back]


GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False}


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
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
    ),
    "gptq": (gptq, GPTQ | {"group_size": 32}),
    "gptq_v2": (gptq_v2, GPTQ | {"group_size": 64, "checkpoint_format": "gptq_v2"}),
    "gptq_ordered": (gptq_ordered, GPTQ | {"group_size": 32, "desc_act": True}),
}
ORDERED = "gptq_ordered"  # which cannot be cut, and which experts do not have
# Experts whose sizes blocks and groups can divide, beside SHAPE.
EXPERTS = {
    "qwen3_moe": {"moe_intermediate_size": 128, "num_hidden_layers": 2},
    "qwen2_moe": {
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "num_hidden_layers": 1,
    },
    "mixtral": {"num_hidden_layers": 2},
    "glm4_moe": {"moe_intermediate_size": 128, "num_hidden_layers": 2},
    "deepseek_v3": {
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "head_dim": 32,
    },
}
# The same with whole blocks on each of two ranks, for heads of 128 values.
WIDE_EXPERTS = {
    family: {**sizes, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    for family, sizes in EXPERTS.items()
}
WIDE_EXPERTS["deepseek_v3"] |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "head_dim": 64}
QUANTISED = re.compile(r"(_proj|_proj_with_mqa|\.w[123])\.weight$")
# sizes that blocks can divide, with a ragged end of the inner dimension
SHAPE = {
    "hidden_size": 192,
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
        if not QUANTISED.search(name) or any(part in name for part in ignored):
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


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def write_kv_scales(path: Path, num_layers: int) -> dict[str, float]:
    """Adds scales of keys and values to the compressed-tensors checkpoint at `path`; by their names."""
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"]["kv_cache_scheme"] = KV_SCHEME
    (path / "config.json").write_text(json.dumps(raw))
    scales = {
        f"model.layers.{layer}.self_attn.{kind}_scale": base * (1 + layer)
        for layer in range(num_layers)
        for kind, base in (("k", 0.011), ("v", 0.023))
    }
    tensors = load_file(path / "model.safetensors")
    tensors |= {name: torch.tensor([scale]) for name, scale in scales.items()}
    save_file(tensors, path / "model.safetensors")
    return scales


class RoundedCache(DynamicCache):
    """A cache of transformers that keeps e4m3 keys and values, divided by the scales of their layer."""

    def __init__(self, scales: dict[str, float]) -> None:
        super().__init__()
        self._scales = scales

    def update(self, key_states, value_states, layer_idx, *rest, **options):
        found = []
        for kind, states in (("k", key_states), ("v", value_states)):
            scale = self._scales.get(f"model.layers.{layer_idx}.self_attn.{kind}_scale", 1.0)
            found.append((states / scale).clamp(-448, 448).to(FP8).float() * scale)
        return super().update(*found, layer_idx, *rest, **options)


@torch.no_grad()
def rounded_greedy(
    model: PreTrainedModel, ids: list[int], count: int, scales: dict[str, float]
) -> tuple[list[int], torch.Tensor]:
    """(`count` tokens that argmax chooses with a RoundedCache, logits `[V]` of the first)."""
    cache, out, given = RoundedCache(scales), [], torch.tensor([ids])
    first = None
    for _ in range(count):
        logits = model(given, past_key_values=cache, use_cache=True).logits[0, -1]
        first = logits if first is None else first
        out.append(int(logits.argmax()))
        given = torch.tensor([out[-1:]])
    assert first is not None
    return out, first
