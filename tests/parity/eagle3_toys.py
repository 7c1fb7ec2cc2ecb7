"""Small EAGLE3 heads written to disk in every dialect, and an oracle pair whose head is always right."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from baton.engine.models.config import ModelConfig
from baton.engine.models.rope import RopeConfig
from safetensors.torch import save_file

HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS = 64, 256, 96, 12
DEFAULT_IDS = (1, 5, 8)  # outputs, what dialect 1 means for 12 layers
PREFIXES = {1: "midlayer.", 2: "layers.0.", 3: "model.layers.0.", 4: "layers.0."}
SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "vocab_size": VOCAB,
}


def toy_target(**changes: object) -> ModelConfig:
    """The config of the target that the toy heads are for."""
    values: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_layers": LAYERS,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "eos_token_ids": (),
        "dtype": "float32",
    }
    return ModelConfig(**(values | changes))  # type: ignore[arg-type]


def head_config(dialect: int, ids: tuple[int, ...] = DEFAULT_IDS, **changes: object) -> dict[str, object]:
    """config.json of one and the same head as each dialect spells it; `changes` go to the top level."""
    if dialect == 4:
        config: dict[str, object] = {
            "speculators_model_type": "eagle3",
            "speculators_version": "0.2.0",
            "architectures": ["Eagle3Speculator"],
            "speculators_config": {"algorithm": "eagle3"},
            "draft_vocab_size": DRAFT_VOCAB,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids],
            "transformer_layer_config": SHAPE | {"model_type": "llama", "rope_theta": 10000.0},
        }
        return config | changes
    config = SHAPE | {"draft_vocab_size": DRAFT_VOCAB, "num_hidden_layers": 1, "tie_word_embeddings": False}
    if dialect == 1:
        return config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | changes
    eagle: dict[str, object] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(ids)}
    if dialect == 3:
        eagle |= {
            "use_last_layernorm": True,
            "use_input_layernorm_in_first_layer": True,
            "next_layer_regular": True,
        }
    native = {"architectures": ["LlamaForCausalLMEagle3"], "rope_theta": 10000.0, "eagle_config": eagle}
    return config | native | changes


def head_tensors(seed: int = 0, num_features: int = 3, prefix: str = "midlayer.") -> dict[str, torch.Tensor]:
    """Random weights of a head; every third target token is in its vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    inner, heads, kv_heads = SHAPE["intermediate_size"], HIDDEN, HIDDEN // 2
    shapes = {
        "fc.weight": (HIDDEN, num_features * HIDDEN),
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}hidden_norm.weight": (HIDDEN,),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}self_attn.q_proj.weight": (heads, 2 * HIDDEN),
        f"{prefix}self_attn.k_proj.weight": (kv_heads, 2 * HIDDEN),
        f"{prefix}self_attn.v_proj.weight": (kv_heads, 2 * HIDDEN),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, heads),
        f"{prefix}mlp.gate_proj.weight": (inner, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (inner, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, inner),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
    }
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * noise if "norm" in name else 0.2 * noise
    target_ids = torch.arange(DRAFT_VOCAB) * 2 + 1
    tensors["d2t"] = target_ids - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, target_ids, True)
    return tensors


def write_head(path: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


# The oracle pair. The target's next token is a fixed permutation of the newest one. The digits (base 4) of
# the next token stand in the residual stream at the output of one layer each, and the layer behind it erases
# them again. The head reads digit j from feature j alone, compares the number with the token embedding of the
# same row, and when both agree predicts the token after it, whose digits become its hidden; else it predicts
# RESERVED, which never comes.
BASE, DIGITS = 4, 3
ORACLE_VOCAB = BASE**DIGITS
RESERVED = ORACLE_VOCAB - 1
ORACLE_HIDDEN = 96
ORACLE_LAYERS = 8
ORACLE_IDS = (1, 3, 5)
CODE = ORACLE_VOCAB  # columns: token one-hot, digits by feature, digits by embedding, a constant
SEEN = CODE + BASE * DIGITS
CONST = SEEN + BASE * DIGITS


def successor(token: int) -> int:
    """The permutation: one cycle through all tokens but RESERVED."""
    return RESERVED if token == RESERVED else (token + 5) % (ORACLE_VOCAB - 1)


def digit_columns(token: int, start: int) -> list[int]:
    return [start + j * BASE + token // BASE**j % BASE for j in range(DIGITS)]


def write_oracle(
    path: Path, ids: Sequence[int] = ORACLE_IDS, *, num_layers: int = ORACLE_LAYERS, attention: float = 0.0
) -> tuple[Path, Path]:
    """(target directory, head directory) of the oracle pair.

    `ids`: whose outputs the digits stand in, in the order of the head's features. `attention`: how much of
    what a row sees is written to columns that nothing reads, so that features depend on the KV, and on all of
    it.
    """
    return _write_oracle_target(path / "target", tuple(ids), num_layers, attention), write_oracle_head(
        path / "head", ids
    )


def _write_oracle_target(path: Path, ids: tuple[int, ...], num_layers: int, attention: float) -> Path:
    path.mkdir(parents=True)
    hidden, vocab, heads = ORACLE_HIDDEN, ORACLE_VOCAB, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": vocab,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "head_dim": 16,
        "vocab_size": vocab,
        "rms_norm_eps": 0.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    embed = torch.zeros(vocab, hidden)
    embed[:, :vocab] = torch.eye(vocab)
    lm_head = torch.zeros(vocab, hidden)
    for token in range(vocab):
        lm_head[successor(token), token] = 1.0
    tensors = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": lm_head,
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(num_layers):
        tensors |= _oracle_layer(f"model.layers.{layer}.", layer, ids)
        tensors |= _scribbling_attention(f"model.layers.{layer}.", layer, attention)
    save_file(tensors, path / "model.safetensors")
    return path


def _oracle_layer(prefix: str, layer: int, ids: tuple[int, ...]) -> dict[str, torch.Tensor]:
    hidden, vocab = ORACLE_HIDDEN, ORACLE_VOCAB
    pick = torch.zeros(vocab, hidden)
    pick[:, :vocab] = torch.eye(vocab)
    down = torch.zeros(hidden, vocab)
    # The stream is one 1, and another behind a layer that wrote a digit: its mean square is 1/H or 2/H.
    ones = 1 + sum(layer == owner + 1 for owner in ids)
    for j, owner in enumerate(ids):
        if layer in (owner, owner + 1):
            normed = torch.tensor(hidden / ones).sqrt()
            amplitude = torch.nn.functional.silu(normed) * normed
            for token in range(vocab):
                down[digit_columns(successor(token), CODE)[j], token] = (
                    1.0 if layer == owner else -1.0
                ) / amplitude
    return {
        f"{prefix}input_layernorm.weight": torch.ones(hidden),
        f"{prefix}post_attention_layernorm.weight": torch.ones(hidden),
        f"{prefix}mlp.gate_proj.weight": pick,
        f"{prefix}mlp.up_proj.weight": pick.clone(),
        f"{prefix}mlp.down_proj.weight": down,
    }


def _scribbling_attention(prefix: str, layer: int, strength: float) -> dict[str, torch.Tensor]:
    """Attention from every column, written to those that the target does not use; none at strength 0."""
    random, inner = torch.Generator().manual_seed(layer), 32
    scale = strength / ORACLE_HIDDEN**0.5
    q, k, v = (
        torch.randn(inner, ORACLE_HIDDEN, generator=random) * (0.1 if strength else 0.0) for _ in range(3)
    )
    output = torch.zeros(ORACLE_HIDDEN, inner)
    output[SEEN:] = torch.randn(ORACLE_HIDDEN - SEEN, inner, generator=random) * scale
    parts = {"q": q, "k": k, "v": v, "o": output}
    return {f"{prefix}self_attn.{name}_proj.weight": tensor for name, tensor in parts.items()}


def write_oracle_head(path: Path, ids: Sequence[int] = ORACLE_IDS, *, num_layers: int = 1) -> Path:
    """The oracle's head; its config asks for the outputs of `ids`.

    With two layers the first one only attends and the second one only looks up, which it does from what the
    first one fetched.
    """
    hidden, vocab, width = ORACLE_HIDDEN, ORACLE_VOCAB, 32
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "intermediate_size": vocab,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": width,
        "rms_norm_eps": 0.0,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "vocab_size": vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids)},
    }
    fc = torch.zeros(hidden, DIGITS * hidden)
    for j in range(DIGITS):
        for digit in range(BASE):
            column = CODE + j * BASE + digit
            fc[column, j * hidden + column] = 1.0
    fc[CONST, :vocab] = 1.0
    tensors = {"fc.weight": fc, "norm.weight": torch.ones(hidden)} | _oracle_head_layer()
    if num_layers == 2:
        tensors |= _second_layer(tensors)
        config |= {"architectures": ["LlamaForCausalLMEagle3Deep"], "num_hidden_layers": 2}
    return write_head(path, config, tensors)


def _second_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A layer with the MLP of the first one, which loses it, and attention that adds nothing."""
    hidden, width, first, second = ORACLE_HIDDEN, 32, "midlayer.", "layers.1."
    moved = {
        f"{second}mlp.{name}_proj.weight": tensors[f"{first}mlp.{name}_proj.weight"].clone()
        for name in ("gate", "up", "down")
    }
    down = f"{first}mlp.down_proj.weight"
    found = moved | {down: torch.zeros_like(tensors[down])}
    found |= {f"{second}{name}.weight": torch.ones(hidden) for name in
              ("input_layernorm", "post_attention_layernorm")}  # fmt: skip
    found |= {f"{second}self_attn.{name}_proj.weight": torch.ones(width, hidden) for name in "qkv"}
    return found | {f"{second}self_attn.o_proj.weight": torch.zeros(hidden, width)}


def _oracle_head_layer() -> dict[str, torch.Tensor]:
    hidden, vocab, width, prefix = ORACLE_HIDDEN, ORACLE_VOCAB, 32, "midlayer."
    query = torch.zeros(width, 2 * hidden)
    # Queries and keys are constant, whatever the features: under rotation a row sees practically only itself.
    query[:, :vocab] = 5.0
    value, output = torch.zeros(width, 2 * hidden), torch.zeros(hidden, width)
    for token in range(vocab):
        for column in digit_columns(token, SEEN):
            value[column - SEEN, token] = (
                1.0 / hidden**0.5
            )  # the norm of a one-hot row scales it by sqrt(hidden)
            output[column, column - SEEN] = 1.0
    gate, up, down = torch.zeros(vocab, hidden), torch.zeros(vocab, hidden), torch.zeros(hidden, vocab)
    normed = (hidden / 7) ** 0.5  # seven ones: constant, three digits by feature, three by embedding
    amplitude = float(torch.nn.functional.silu(torch.tensor(20.0 * 0.5 * normed)) * normed)
    lm_head = torch.zeros(vocab, hidden)
    for token in range(RESERVED):
        code, seen = digit_columns(token, CODE), digit_columns(token, SEEN)
        gate[token, code + seen] = 20.0
        gate[token, CONST] = -20.0 * 5.5
        up[token, CONST] = 1.0
        down[code + seen, token] -= 1.0 / amplitude
        down[digit_columns(successor(token), CODE), token] += 1.0 / amplitude
        lm_head[token, code] = 1.0
        # A row that found no agreement keeps its digits by embedding, so these veto.
        lm_head[token, SEEN : SEEN + BASE * DIGITS] = -1.0
    lm_head[RESERVED, CONST] = 2.5
    lm_head[RESERVED, SEEN : SEEN + BASE * DIGITS] = -0.5
    return {
        f"{prefix}input_layernorm.weight": torch.ones(hidden),
        f"{prefix}hidden_norm.weight": torch.ones(hidden),
        f"{prefix}post_attention_layernorm.weight": torch.ones(hidden),
        f"{prefix}self_attn.q_proj.weight": query,
        f"{prefix}self_attn.k_proj.weight": query.clone(),
        f"{prefix}self_attn.v_proj.weight": value,
        f"{prefix}self_attn.o_proj.weight": output,
        f"{prefix}mlp.gate_proj.weight": gate,
        f"{prefix}mlp.up_proj.weight": up,
        f"{prefix}mlp.down_proj.weight": down,
        "lm_head.weight": lm_head,
    }
