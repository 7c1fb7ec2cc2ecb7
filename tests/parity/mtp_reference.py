"""MTP modules by their formulas over all rows, from transformers' hidden states; no cache, no engine."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from baton.tests.parity.mtp_toys import DIALECTS, NAMES, Tensors
from baton.tests.parity.toy_models import reference_model
from safetensors.torch import load_file

HIDDEN_FIRST = {"mimo"}
BEFORE_NORM = {"mimo_v2"}
CHAINED = {"deepseek"}
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """The greedy `tokens`, the `logits` `[drafts, V]` that chose them, and K and V `[rows, heads, D]` of each
    pass. `outputs` are the hidden rows behind each pass, before the final norm.
    """

    tokens: list[int]
    logits: torch.Tensor
    kv: list[Pair]
    outputs: list[torch.Tensor]
    is_normed: bool
    is_chained: bool


class Modules:
    """The modules at `path`, whose target is at `target`."""

    def __init__(self, target: Path, path: Path) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.model = reference_model(target)
        tensors, layers = load_file(path / "model.safetensors"), self.config["num_hidden_layers"]
        self.dialect = next(
            d for d in DIALECTS if f"{NAMES[d][0]}{NAMES[d][1]}.weight".format(k=0, l=layers) in tensors
        )
        self.modules = [
            self._module(tensors, k, layers) for k in range(self.config["num_nextn_predict_layers"])
        ]
        self.embed = self.model.get_input_embeddings().weight.detach()
        self.lm_head = self.model.lm_head.weight.detach()
        self.eps = self.config["rms_norm_eps"]
        self.heads, self.kv_heads = (self.config[f"num_{n}_heads"] for n in ("attention", "key_value"))
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.heads

    def _module(self, tensors: Tensors, number: int, layers: int) -> Tensors:
        prefix, fc, embed_norm, hidden_norm, norm, layer = (
            name.format(k=number, l=layers + number) for name in NAMES[self.dialect]
        )
        renamed = {prefix + fc: "fc", prefix + embed_norm: "embed_norm", prefix + hidden_norm: "hidden_norm",
                   prefix + norm: "norm"}  # fmt: skip
        found = {}
        for name, tensor in tensors.items():
            part, kind = name.rsplit(".", 1)
            if part in renamed:
                found[f"{renamed[part]}.{kind}"] = tensor
            elif part.startswith(layer):
                inner = part.removeprefix(layer).replace("pre_mlp_layernorm", "post_attention_layernorm")
                found[f"{inner}.{kind}"] = tensor
        return found

    def stream(self, ids: list[int]) -> torch.Tensor:
        """The residual stream behind the target's last layer `[T, H]`."""
        seen: list[torch.Tensor] = []
        layer = self.model.model.layers[-1]
        hook = layer.register_forward_hook(
            lambda module, args, out: seen.append(out[0] if isinstance(out, tuple) else out)
        )
        with torch.no_grad():
            self.model(torch.tensor([ids]))
        hook.remove()
        return seen[0].reshape(len(ids), -1)

    def run(self, w: Tensors, hidden: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, Pair]:
        """One module over rows 0.. `[T, H]`: its output before the final norm, and its K and V."""
        streams = [
            self.rms(self.embed[tokens], w["embed_norm.weight"]),
            self.rms(hidden, w["hidden_norm.weight"]),
        ]
        if self.dialect in HIDDEN_FIRST:
            streams.reverse()
        x = torch.cat(streams, -1) @ w["fc.weight"].T
        count, normed = len(tokens), self.rms(x, w["input_layernorm.weight"])
        q, k, v = (
            (normed @ w[f"self_attn.{n}_proj.weight"].T + w.get(f"self_attn.{n}_proj.bias", torch.zeros(())))
            .view(count, -1, self.head_dim)
            .transpose(0, 1)
            for n in "qkv"
        )
        if "self_attn.q_norm.weight" in w:
            q, k = self.rms(q, w["self_attn.q_norm.weight"]), self.rms(k, w["self_attn.k_norm.weight"])
        q, k = rotate(q), rotate(k)
        each = self.heads // self.kv_heads
        scores = q @ k.repeat_interleave(each, 0).transpose(1, 2) / self.head_dim**0.5
        mask = torch.ones(count, count, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v.repeat_interleave(each, 0)
        x = x + mixed.transpose(0, 1).reshape(count, -1) @ w["self_attn.o_proj.weight"].T
        normed = self.rms(x, w["post_attention_layernorm.weight"])
        gated = torch.nn.functional.silu(normed @ w["mlp.gate_proj.weight"].T) * (
            normed @ w["mlp.up_proj.weight"].T
        )
        return x + gated @ w["mlp.down_proj.weight"].T, (k.transpose(0, 1), v.transpose(0, 1))

    def rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight


def reference_drafts(
    target: Path,
    path: Path,
    ids: list[int],
    count: int,
    *,
    is_normed: bool | None = None,
    is_chained: bool | None = None,
) -> Drafted:
    """`count` greedy drafts behind `ids`, of which the last has no hidden of the target yet."""
    modules = Modules(target, path)
    is_normed = modules.dialect not in BEFORE_NORM if is_normed is None else is_normed
    is_chained = modules.dialect in CHAINED if is_chained is None else is_chained
    norm = modules.model.model.norm.weight.detach()
    stream = modules.stream(ids[:-1])
    hidden = modules.rms(stream, norm) if is_normed else stream
    is_shared, tokens, found = len(modules.modules) == 1, ids[1:], []
    logits, kv, outputs = [], [], []
    for step in range(count):
        w = modules.modules[0 if is_shared else step]
        out, pair = modules.run(w, hidden, tokens)
        normed = modules.rms(out, w["norm.weight"])
        logits.append(normed[-1] @ modules.lm_head.T)
        kv.append(pair)
        outputs.append(out)
        found.append(int(logits[-1].argmax()))
        fed_back = normed if is_normed else out
        if is_shared:  # one more row, of the module's own hidden
            tokens, hidden = [*tokens, found[-1]], torch.cat((hidden, fed_back[-1:]))
        else:  # the same rows, one token further
            tokens = [*tokens[1:], found[-1]]
            hidden = fed_back if is_chained else hidden
    return Drafted(
        tokens=found,
        logits=torch.stack(logits),
        kv=kv,
        outputs=outputs,
        is_normed=is_normed,
        is_chained=is_chained,
    )


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Neox-style rotation of `[heads, T, D]`, base 10000."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
