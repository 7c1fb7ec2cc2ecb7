"""The checkpoint directories of trained drafters, in the dialects that SGLang and SpecForge read."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..engine.models.config import ModelConfig
from ..engine.models.config_reader import read_json
from ..engine.models.layer_windows import FULL
from ..engine.models.text_part import text_config
from ..engine.speculative.drafters.mtp_config import CHAIN_KEY
from ..engine.speculative.drafters.mtp_names import COUNT_KEYS
from .tensor_files import write_tensors

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
MAX_POSITIONS = 8192  # of a trained head, unless the target has fewer


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The layer outputs to read: near the start, the middle and the end, all different."""
    chosen = (min(1, num_layers - 1), num_layers // 2 - 1, num_layers - 4)
    return tuple(sorted({max(0, layer) for layer in chosen}))


def spaced_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layer outputs, evenly spaced over 1 to L-3, as DFLASH drafters read them."""
    if count == 1:
        return (num_layers // 2,)
    last = max(num_layers - 3, count)
    return tuple(round(1 + i * (last - 1) / (count - 1)) for i in range(count))


def write_eagle3_config(
    directory: Path, model: Path, target: ModelConfig, layers: Sequence[int], draft_vocab_size: int
) -> None:
    """Writes `directory`/config.json for a head of one layer of the target's width."""
    given = _text_config(model)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": min(MAX_POSITIONS, target.max_position_embeddings),
        "vocab_size": target.vocab_size,
        # null: SGLang takes the target's lm_head only then
        "draft_vocab_size": None if draft_vocab_size == target.vocab_size else draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(layers),
        },
    }
    _write_config(directory, config | _rope_keys(given, target))


def write_dflash_config(
    directory: Path,
    model: Path,
    target: ModelConfig,
    layers: Sequence[int],
    *,
    num_layers: int,
    block_size: int,
    mask_token: int,
) -> None:
    """Writes `directory`/config.json for a DFLASH drafter of the target's width."""
    given = _text_config(model)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "num_hidden_layers": num_layers,
        "num_target_layers": target.num_layers,
        "layer_types": ["full_attention"] * num_layers,
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": min(MAX_POSITIONS, target.max_position_embeddings),
        "vocab_size": target.vocab_size,
        "block_size": block_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "dflash_config": {"mask_token_id": mask_token, "target_layer_ids": list(layers)},
    }
    _write_config(directory, config | _rope_keys(given, target))


def write_mtp_config(directory: Path, model: Path) -> None:
    """Writes `directory`/config.json for one MTP module: the target's config with a count of modules."""
    given = _text_config(model)
    # what the target says of its own modules does not hold for this one
    kept = {key: value for key, value in given.items() if key not in (*COUNT_KEYS, CHAIN_KEY)}
    _write_config(directory, {**kept, "torch_dtype": "bfloat16", "mtp_num_hidden_layers": 1})


def _rope_keys(given: Mapping[str, object], target: ModelConfig) -> dict[str, object]:
    """The rotation of the target's layers without a window, with the value of its family for an absent
    `rope_theta`.
    """
    found = {key: given[key] for key in ROPE_KEYS if key in given}
    kinds = found.get("rope_parameters")
    if isinstance(kinds, Mapping) and isinstance(kinds.get(FULL), Mapping):
        found["rope_parameters"] = kinds[FULL]
    return {"rope_theta": target.rope.theta} | found


def _text_config(model: Path) -> Mapping[str, object]:
    """The config of the text model at `model`."""
    source = model / "config.json"
    return text_config(read_json(source), source)


def _write_config(directory: Path, config: Mapping[str, object]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_weights(directory: Path, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Writes `directory`/model.safetensors with floating-point tensors in `dtype`."""
    stored = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    write_tensors(directory / "model.safetensors", stored)


def unused_token(counts: torch.Tensor) -> int:
    """The first of the least frequent tokens of `counts` int64 `[V]`: the mask token of a block."""
    return int(counts.argmin())


def draft_vocabulary(counts: torch.Tensor, size: int) -> torch.Tensor:
    """The `size` most frequent tokens of `counts` int64 `[V]`, ascending, int64 `[size]`."""
    # a stable order makes two runs over the same samples agree
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:size].sort().values
