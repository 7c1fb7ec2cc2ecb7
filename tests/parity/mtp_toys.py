"""Small MTP modules written to disk in every dialect, and an engine that drafts with them."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from baton.tests.parity.eagle_toys import SourcedEngine
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
DIALECTS = ("qwen", "deepseek", "mimo", "mimo_v2")
# What the papers and the reference code of each family say, written down once more.
NAMES = {
    "qwen": ("mtp.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "mtp.layers.{k}."),
    "deepseek": ("model.layers.{l}.", "eh_proj", "enorm", "hnorm", "shared_head.norm", "model.layers.{l}."),
    "mimo": ("model.mtp_layers.{k}.", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm",
             "model.mtp_layers.{k}."),
    "mimo_v2": ("model.mtp.layers.{k}.", "eh_proj", "enorm", "hnorm", "final_layernorm",
                "model.mtp.layers.{k}."),
}  # fmt: skip


def module_tensors(
    config: dict[str, int], seed: int, *, bias: bool = False, qk_norm: bool = False
) -> Tensors:
    """Random weights of one module, by our names."""
    generator = torch.Generator().manual_seed(1000 + seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv_heads = (config[f"num_{name}_heads"] * head_dim for name in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden),
        "embed_norm.weight": (hidden,),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "layer.input_layernorm.weight": (hidden,),
        "layer.post_attention_layernorm.weight": (hidden,),
        "layer.self_attn.q_proj.weight": (heads, hidden),
        "layer.self_attn.k_proj.weight": (kv_heads, hidden),
        "layer.self_attn.v_proj.weight": (kv_heads, hidden),
        "layer.self_attn.o_proj.weight": (hidden, heads),
        "layer.mlp.gate_proj.weight": (inner, hidden),
        "layer.mlp.up_proj.weight": (inner, hidden),
        "layer.mlp.down_proj.weight": (hidden, inner),
    }
    if bias:
        widths = {"q": heads, "k": kv_heads, "v": kv_heads}
        shapes |= {f"layer.self_attn.{name}_proj.bias": (width,) for name, width in widths.items()}
    if qk_norm:
        shapes |= {f"layer.self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.3 * noise if "norm" in name else 0.2 * noise
    return tensors


def named(dialect: str, module: int, num_layers: int, tensors: Tensors) -> Tensors:
    """`tensors` of one module by the names of `dialect`."""
    prefix, fc, embed_norm, hidden_norm, norm, layer = NAMES[dialect]
    parts = {"fc": fc, "embed_norm": embed_norm, "hidden_norm": hidden_norm, "norm": norm}
    found = {}
    for name, tensor in tensors.items():
        part, kind = name.rsplit(".", 1)
        whole = layer + part.removeprefix("layer.") if part.startswith("layer.") else prefix + parts[part]
        if dialect == "mimo_v2":
            whole = whole.replace("post_attention_layernorm", "pre_mlp_layernorm")
        found[f"{whole.format(k=module, l=num_layers + module)}.{kind}"] = tensor
    return found


def write_mtp(
    path: Path,
    target: Path,
    dialect: str,
    modules: Sequence[Tensors],
    *,
    is_beside: bool = False,
    extra: Tensors | None = None,
    **changes: object,
) -> Path:
    """A checkpoint of `modules` for `target`; `is_beside`: with the target's own weights in it."""
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    config |= {"num_nextn_predict_layers": len(modules)} | changes
    (path / "config.json").write_text(json.dumps(config))
    tensors = dict(extra or {})
    for k, module in enumerate(modules):
        tensors |= named(dialect, k, config["num_hidden_layers"], module)
    if is_beside:
        tensors |= load_file(target / "model.safetensors")
        for name in ("generation_config.json",):
            if (target / name).exists():
                shutil.copy(target / name, path / name)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def random_modules(target: Path, count: int, *, seed: int = 0, **parts: bool) -> list[Tensors]:
    """`count` modules with the sizes of the target's layers; `parts` as in `module_tensors`."""
    config = json.loads((target / "config.json").read_text())
    return [module_tensors(config, seed + k, **parts) for k in range(count)]


@dataclass
class MtpEngine(SourcedEngine):
    """An engine whose head is a checkpoint of MTP modules."""
