"""Small DFLASH drafters as published: one with random weights, and an oracle pair."""

from collections.abc import Sequence
from pathlib import Path

import torch
from baton.tests.parity.eagle3_toys import write_head

HIDDEN, VOCAB, DRAFT_LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 256, 2, 4, 2, 16, 80
BLOCK, MASK = 8, 251
DFLASH_IDS = (1, 5, 8)


def dflash_config(ids: Sequence[int] | None = DFLASH_IDS, **changes: object) -> dict[str, object]:
    """config.json as SpecForge and z-lab write it; `changes` go to the top level."""
    config: dict[str, object] = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK} | ({} if ids is None else {"target_layer_ids": list(ids)}),
        "dtype": "float32",
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "max_position_embeddings": 256,
        "max_window_layers": DRAFT_LAYERS,
        "num_attention_heads": HEADS,
        "num_hidden_layers": DRAFT_LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "transformers_version": "4.57.3",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }
    return config | changes


def dflash_tensors(seed: int = 0, num_features: int = 3) -> dict[str, torch.Tensor]:
    """Random weights by their published names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "fc.weight": (HIDDEN, num_features * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for layer in range(DRAFT_LAYERS):
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "self_attn.q_norm": (HEAD_DIM,),
            "self_attn.k_norm": (HEAD_DIM,),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }.items()}  # fmt: skip
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * noise if "norm" in name else 0.2 * noise
    return tensors


def write_dflash(path: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> Path:
    return write_head(path, config, tensors)
