"""Converts the GGUF file of a Llama model to a Hugging Face directory (config, float32 safetensors,
tokenizer).

Weights are dequantised to float32, which is exact; rounding to bfloat16 would change the model. llama.cpp
stores the rows of q_proj and k_proj so that each rotary pair lies side by side; Hugging Face keeps the two
halves of a head apart, so these rows are reordered. Tensors stream through one at a time.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ...cluster.errors import StartupError

FloatArray = NDArray[np.float32]
Report = Callable[[int, int], None]  # (bytes written, bytes in total)

CONTROL_TOKEN = 3  # gguf TokenType.CONTROL

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert(source: Path, target: Path, report: Report) -> None:
    """Writes the model in `source` into the existing directory `target`. Calls `report` after each tensor.

    Raises StartupError when `source` is not a Llama model with a byte-level BPE tokenizer.
    """
    reader = gguf.GGUFReader(source)
    fields = dict(reader.fields)
    for key, wanted in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
        found = fields[key].contents() if key in fields else None
        if found != wanted:
            raise StartupError(f"{source.name}: {key} is {found!r}; only {wanted!r} can be converted")
    config = hf_config(fields, tied=not any(t.name == "output.weight" for t in reader.tensors))
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", {k: config[k] for k in _GENERATION_KEYS})
    write_tokenizer(fields, target)
    write_safetensors(target / "model.safetensors", _HFTensors(reader.tensors, config), report)


_GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def hf_config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """The config.json for a Llama GGUF's metadata `fields`."""

    def value(name: str) -> Any:  # noqa: ANN401 - str, int, float or list
        return fields[name].contents()

    heads = value("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "head_dim": value("llama.embedding_length") // heads,
        "hidden_act": "silu",
        "vocab_size": value("llama.vocab_size"),
        "max_position_embeddings": value("llama.context_length"),
        # undo the rounding through float32, which turns 1e-5 into 9.99999975e-06
        "rms_norm_eps": float(f"{value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": value("llama.rope.freq_base"),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


# --- weights ------------------------------------------------------------------------------------------------


def hf_name(name: str) -> str:
    """The Hugging Face name of the GGUF tensor `name`; KeyError for a tensor that a Llama model does not
    have."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}"


def unpermute(weight: FloatArray, num_heads: int) -> FloatArray:
    """Reorders the rows of `[num_heads * D, H]` per head: from 0, D/2, 1, D/2+1, .. (pairs side by side) to 0
    .. D-1."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    halves: FloatArray = pairs.swapaxes(1, 2).reshape(rows, columns)
    return halves


class _HFTensors:
    """The tensors of a GGUF by their Hugging Face names, dequantised one at a time."""

    def __init__(self, tensors: list[Any], config: dict[str, Any]) -> None:
        self._tensors = {hf_name(t.name): t for t in tensors}
        self._heads = {
            "q_proj": config["num_attention_heads"],
            "k_proj": config["num_key_value_heads"],
        }

    def shapes(self) -> dict[str, list[int]]:
        return {name: [int(n) for n in reversed(t.shape)] for name, t in self._tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, FloatArray]]:
        for name, tensor in self._tensors.items():
            weight: FloatArray = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(
                np.float32, copy=False
            )
            heads = self._heads.get(name.split(".")[-2])
            yield name, unpermute(weight, heads) if heads else weight


def write_safetensors(path: Path, tensors: _HFTensors, report: Report) -> None:
    """Streams `tensors` into a safetensors file: header size (u64), JSON header, then the data without
    gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name, shape in tensors.shapes().items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [total, total + size]}
        total += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    done = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, weight in tensors:
            data = np.ascontiguousarray(weight, dtype="<f4").data.cast("B")
            assert header[name]["data_offsets"] == [done, done + len(data)], name
            file.write(data)
            done += len(data)
            report(done, total)


# --- tokenizer ----------------------------------------------------------------------------------------------


def build_tokenizer(tokens: list[str], token_types: list[int], merges: list[str]) -> Tokenizer:
    """The byte-level BPE tokenizer that llama.cpp calls "smollm": digits one by one, no BOS, control tokens
    special."""
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment, unused-ignore]
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment, unused-ignore]
    control = [token for token, kind in zip(tokens, token_types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def write_tokenizer(fields: dict[str, Any], target: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, with the chat template."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    pre = fields["tokenizer.ggml.pre"].contents()
    if pre != "smollm":
        raise StartupError(f"the GGUF's pre-tokenizer is {pre!r}; only 'smollm' can be converted")
    tokenizer = build_tokenizer(
        tokens, fields["tokenizer.ggml.token_type"].contents(), fields["tokenizer.ggml.merges"].contents()
    )
    tokenizer.save(str(target / "tokenizer.json"))

    def token(kind: str) -> str:
        index: int = fields[f"tokenizer.ggml.{kind}_token_id"].contents()
        return tokens[index]

    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": token("bos"),
            "eos_token": token("eos"),
            "pad_token": token("padding"),
            "unk_token": token("unknown"),
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"].contents(),
            "chat_template": fields["tokenizer.chat_template"].contents(),
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
