"""A small model with sparse attention, its checkpoint, and its definition in plain torch over a whole text.

The definition shares no code with the paged attention: it computes every row of a text at once, from
contiguous keys and values, with no pages, plans, slots or caches.

Legend: T tokens of a text, V vocabulary, D head dimension.
"""

import json
from pathlib import Path

import torch
from baton.engine.models.interface import CausalLM
from baton.engine.models.registry import build_model
from baton.engine.models.rope import RopeConfig
from baton.engine.models.sparse_block import SparseConfig
from baton.tests.parity.answer_engine import randomise
from safetensors.torch import save_file

ARCHITECTURE = "SparseBlockForCausalLM"
# Windows and groups so short that a text of a hundred tokens has blocks to choose from and groups to read.
WINDOW, TOP_K, INDEX_BLOCK, GROUP = 8, 3, 4, 32


def sparse_config(**changes: object) -> SparseConfig:
    """The config of the toy; `changes` override it."""
    values: dict[str, object] = {
        "architecture": ARCHITECTURE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "eos_token_ids": (),
        "dtype": "float32",
        "index_heads": 2,
        "index_topk": TOP_K,
        "index_block": INDEX_BLOCK,
        "compressed_block": GROUP,
        "window": WINDOW,
    }
    return SparseConfig(**(values | changes))  # type: ignore[arg-type]


def built(config: SparseConfig, dtype: torch.dtype) -> CausalLM:
    """A random model, of the same weights for the same shapes."""
    model = build_model(config, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.tensors():
        randomise(name, weight, generator)
    return model


def write_sparse_checkpoint(path: Path, model: CausalLM) -> Path:
    """The checkpoint of a toy: its weights, and its config as a file has it."""
    config = model.config
    assert isinstance(config, SparseConfig)
    path.mkdir(parents=True, exist_ok=True)
    raw = {
        "architectures": [ARCHITECTURE],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "index_n_heads": config.index_heads,
        "index_topk": config.index_topk,
        "index_block_size": config.index_block,
        "compressed_block_size": config.compressed_block,
        "local_window": config.window,
    }
    (path / "config.json").write_text(json.dumps(raw))
    tensors = {name: tensor.cpu().float().contiguous() for name, tensor in model.tensors()}
    save_file(tensors, path / "model.safetensors")
    return path


class Reference:
    """The definition of a toy's forward, with the weights of `model`, in float32 on the CPU."""

    def __init__(self, model: CausalLM) -> None:
        assert isinstance(model.config, SparseConfig)
        self.config = model.config
        self.w = {name: tensor.float().cpu() for name, tensor in model.tensors()}

    def logits(self, ids: list[int]) -> torch.Tensor:
        """The logits `[T, V]` of a text."""
        hidden = self.w["model.embed_tokens.weight"][torch.tensor(ids)]
        for layer in range(self.config.num_layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(hidden, prefix + "input_layernorm")
            hidden = hidden + self._attention(normed, prefix + "self_attn.")
            normed = self._norm(hidden, prefix + "post_attention_layernorm")
            gate, up = (normed @ self.w[f"{prefix}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            hidden = (
                hidden + (torch.nn.functional.silu(gate) * up) @ self.w[prefix + "mlp.down_proj.weight"].T
            )
        return self._norm(hidden, "model.norm") @ self.w["lm_head.weight"].T

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """The `count` likeliest tokens, each from a forward over the whole text."""
        text = list(ids)
        for _ in range(count):
            text.append(int(self.logits(text)[-1].argmax()))
        return text[len(ids) :]

    def would_say(self, ids: list[int], answer: list[int]) -> bool:
        """Whether `answer` is what `greedy` gives, by one forward."""
        return self.logits(ids + answer[:-1]).argmax(-1).tolist()[len(ids) - 1 :] == answer

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * self.w[name + ".weight"]

    def _attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        c, length = self.config, x.shape[0]

        def project(name: str) -> torch.Tensor:
            return (x @ self.w[f"{prefix}{name}_proj.weight"].T).view(length, -1, c.head_dim)

        q, k, v, queries = (
            rotate(project("q")),
            rotate(project("k")),
            project("v"),
            rotate(project("index_q")),
        )
        gate = torch.sigmoid(x @ self.w[prefix + "index_gate_proj.weight"].T)
        queries = queries * gate[:, :, None]
        index = means(k, c.index_block).mean(1)
        far_k, far_v = means(k, c.compressed_block), means(v, c.compressed_block)
        rows = []
        for t in range(length):
            start = max(t - c.window + 1, 0) // c.index_block * c.index_block
            scores = (queries[t] @ index[: start // c.index_block].T).relu().sum(0).tolist()
            chosen = sorted(range(len(scores)), key=lambda b: (scores[b], b), reverse=True)[: c.index_topk]
            tokens = [i for b in chosen for i in range(b * c.index_block, (b + 1) * c.index_block)]
            tokens += range(start, t + 1)
            seen = start // c.compressed_block
            keys, values = torch.cat((k[tokens], far_k[:seen])), torch.cat((v[tokens], far_v[:seen]))
            grouped = q[t].view(c.num_kv_heads, -1, c.head_dim)
            weights = (torch.einsum("kgd,ckd->kgc", grouped, keys) * c.head_dim**-0.5).softmax(-1)
            rows.append(torch.einsum("kgc,ckd->kgd", weights, values).flatten())
        return torch.stack(rows) @ self.w[prefix + "o_proj.weight"].T


def means(rows: torch.Tensor, size: int) -> torch.Tensor:
    """The means of the whole groups of `size` rows: `[T, ...]` -> `[T // size, ...]`."""
    count = rows.shape[0] // size
    return rows[: count * size].view(count, size, *rows.shape[1:]).mean(1)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Neox-style rotation of `[T, heads, D]`, base 10000."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[0])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
