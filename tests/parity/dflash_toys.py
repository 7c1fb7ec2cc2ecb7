"""Small DFLASH drafters as published: one with random weights, and an oracle pair."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from baton.tests.parity.eagle3_toys import (
    BASE,
    CODE,
    CONST,
    DIGITS,
    ORACLE_HIDDEN,
    ORACLE_IDS,
    ORACLE_LAYERS,
    ORACLE_VOCAB,
    RESERVED,
    SEEN,
    digit_columns,
    successor,
    write_head,
    write_oracle,
)

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


# The oracle pair. The target is that of EAGLE3's oracle: the digits of the next token stand at the outputs of
# one layer each. A mask token at position i fetches the context vector DISTANCE positions back, whose digits
# say which token followed there. A chain of successors leads from that token to the one at position i. Layer
# 0 fetches all digits but the last, layer 1 the last one and looks the token up. Without all digits, or with
# a wrong mask token, the draft is RESERVED, which never comes.
DISTANCE = 5
WIDTH, SHARPNESS = 32, 15.0


def chain(token: int, count: int) -> list[int]:
    """`count` tokens, each the successor of the one before; the prompts that the oracle knows."""
    tokens = [token]
    while len(tokens) < count:
        tokens.append(successor(tokens[-1]))
    return tokens


def write_dflash_oracle(
    path: Path, ids: Sequence[int] = ORACLE_IDS, *, num_layers: int = ORACLE_LAYERS, attention: float = 0.0
) -> tuple[Path, Path]:
    """(target directory, drafter directory) of the oracle pair, as `write_oracle`.

    Its blocks have up to DISTANCE tokens. Prompts are chains of at least DISTANCE tokens.
    """
    target, _ = write_oracle(path, ids, num_layers=num_layers, attention=attention)
    config = dflash_config(
        ids,
        block_size=DISTANCE,
        dflash_config={"mask_token_id": RESERVED, "target_layer_ids": list(ids)},
        hidden_size=ORACLE_HIDDEN,
        intermediate_size=ORACLE_VOCAB,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=WIDTH,
        rope_theta=10000.0,
        vocab_size=ORACLE_VOCAB,
    )
    hidden = ORACLE_HIDDEN
    fc = torch.zeros(hidden, DIGITS * hidden)
    for j in range(DIGITS):
        for column in range(CODE + j * BASE, CODE + (j + 1) * BASE):
            fc[column, j * hidden + column] = 1.0
    fc[CONST, :ORACLE_VOCAB] = 1.0
    tensors = {"fc.weight": fc, "hidden_norm.weight": torch.ones(hidden), "norm.weight": torch.ones(hidden)}
    tensors |= _fetching_layer("layers.0.", range(BASE * (DIGITS - 1)), _no_lookup())
    tensors |= _fetching_layer("layers.1.", range(BASE * (DIGITS - 1), BASE * DIGITS), _lookup())
    return target, write_dflash(path / "dflash", config, tensors)


def _fetching_layer(
    prefix: str, digits: Iterable[int], mlp: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Copies columns `digits` of the context vector DISTANCE positions back into the columns from SEEN on."""
    hidden, half = ORACLE_HIDDEN, WIDTH // 2
    angles = DISTANCE * 10000.0 ** (-torch.arange(half) / half)
    query, key = torch.zeros(WIDTH, hidden), torch.zeros(WIDTH, hidden)
    query[:, RESERVED] = torch.cat((angles.cos() + angles.sin(), angles.cos() - angles.sin()))
    key[:, CONST] = 1.0
    value, output = torch.zeros(WIDTH, hidden), torch.zeros(hidden, WIDTH)
    for digit in digits:
        value[digit, CODE + digit] = (4 / hidden) ** 0.5  # the norm of a vector with four ones
        output[SEEN + digit, digit] = 1.0
    projections = {"q": query, "k": key, "v": value, "o": output}
    tensors = {f"{prefix}self_attn.{name}_proj.weight": tensor for name, tensor in projections.items()}
    tensors |= {f"{prefix}self_attn.{name}_norm.weight": SHARPNESS * torch.ones(WIDTH) for name in "qk"}
    tensors |= {f"{prefix}{name}.weight": torch.ones(hidden)
                for name in ("input_layernorm", "post_attention_layernorm")}  # fmt: skip
    return tensors | {f"{prefix}mlp.{name}_proj.weight": tensor for name, tensor in mlp.items()}


def _no_lookup() -> dict[str, torch.Tensor]:
    shapes = {"gate": (ORACLE_VOCAB, ORACLE_HIDDEN), "up": (ORACLE_VOCAB, ORACLE_HIDDEN)}
    return {
        name: torch.zeros(shape) for name, shape in (shapes | {"down": (ORACLE_HIDDEN, ORACLE_VOCAB)}).items()
    }


def _lookup() -> dict[str, torch.Tensor]:
    """Digits of the token DISTANCE - 1 positions back -> the one-hot of the token before this position."""
    weights = _no_lookup()
    normed = (ORACLE_HIDDEN / (1 + DIGITS)) ** 0.5  # of the mask token's one-hot and as many ones as digits
    amplitude = float(torch.nn.functional.silu(torch.tensor(10.0 * normed)) * normed)
    for token in range(RESERVED):
        weights["gate"][token, digit_columns(token, SEEN)] = 20.0
        weights["gate"][token, RESERVED] = -20.0 * (DIGITS - 0.5)
        weights["up"][token, RESERVED] = 1.0
        weights["down"][chain(token, DISTANCE - 1)[-1], token] = 3.0 / amplitude
    return weights
