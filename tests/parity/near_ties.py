"""A teacher-forced audit of greedy answers in bfloat16: tokens may differ from float32 at near-ties only.

A forward in plain float32 torch, which shares no code with the engine, replays each answer. Where its best
token is not the answer's, the gap between their logits must be within the rounding error of bfloat16.

The bound. A rounding to bfloat16 has a relative error of at most u = 2^-8, and of u / sqrt(3) in the mean
square if it is uniform. A layer rounds its stream ROUNDINGS times, one after the other. The errors are
independent, so their squares add, and a stream of L layers has the relative error
e = u / sqrt(3) * sqrt(ROUNDINGS * L + HEAD_ROUNDINGS). A row of the output projection points in no special
direction, so the error of a logit is e times the standard deviation s of the logits. Two logits err
independently. The bound is SIGMAS * sqrt(2) * e * s: 0.11 s for 8 layers, 0.21 s for 32.

Legend: T tokens, V vocabulary, H hidden size, N query heads, K key/value heads, D head dimension.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from baton.engine.models.config import ModelConfig
from baton.engine.models.interface import CausalLM

UNIT = 2.0**-8
# Both norms 2 each, qkv, rotation, softmax weights, attention, its projection, gate and up, silu, their
# product, down, and both additions to the stream; the final norm 2.
ROUNDINGS, HEAD_ROUNDINGS = 15, 2
SIGMAS = 3.0


def bound_in_deviations(num_layers: int) -> float:
    """The largest gap of a near-tie, in standard deviations of the logits."""
    error = UNIT / math.sqrt(3) * math.sqrt(ROUNDINGS * num_layers + HEAD_ROUNDINGS)
    return SIGMAS * math.sqrt(2) * error


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A token of an answer that is not float32's best; `gap` in standard deviations of the logits."""

    answer: int
    position: int
    gap: float


class Audit:
    """Replays answers of `model`, whose weights it widens to float32."""

    def __init__(self, model: CausalLM) -> None:
        self.config = model.config
        self.weights = {name: weight.to(torch.float32) for name, weight in model.tensors()}
        self.device = model.device

    @property
    def bound(self) -> float:
        return bound_in_deviations(self.config.num_layers)

    @torch.no_grad()
    def differences(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> list[Difference]:
        """Every token of `answers` that is not the best one of float32, given the tokens before it."""
        found = []
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            ids = torch.tensor([*prompt, *answer[:-1]], device=self.device)
            logits = dense_logits(self.config, self.weights, ids)[len(prompt) - 1 :]
            chosen = logits.gather(1, torch.tensor(answer, device=self.device)[:, None]).squeeze(1)
            gaps = ((logits.amax(1) - chosen) / logits.std(1)).tolist()
            found += [
                Difference(answer=index, position=position, gap=gap)
                for position, gap in enumerate(gaps)
                if gap > 0
            ]
        return found

    def check(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[Difference]:
        """All differences. Raises AssertionError if one of them is no near-tie."""
        found = self.differences(prompts, answers)
        wrong = [difference for difference in found if difference.gap > self.bound]
        assert not wrong, f"{len(wrong)} of {len(found)} differing tokens are no near-ties: {wrong[:4]}"
        return found


def dense_logits(config: ModelConfig, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Llama's formulas over `ids` int64 `[T]` at once, in float32: `[T, V]`."""
    count, half = ids.shape[0], config.head_dim // 2
    angles = torch.arange(count)[:, None] * config.rope.theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos().to(ids.device)[:, None], angles.sin().to(ids.device)[:, None]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        return x * scale * weights[f"{name}.weight"]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    hidden = weights["model.embed_tokens.weight"][ids]
    hidden_from = torch.ones(count, count, dtype=torch.bool, device=ids.device).triu(1)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        x = norm(hidden, prefix + "input_layernorm")
        q, k, v = (
            F.linear(x, weights[f"{prefix}self_attn.{name}_proj.weight"]).view(count, -1, config.head_dim)
            for name in "qkv"
        )
        group = q.shape[1] // k.shape[1]
        k, v = rotate(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qnd,snd->nqs", rotate(q), k) * config.head_dim**-0.5
        mixed = torch.einsum("nqs,snd->qnd", scores.masked_fill(hidden_from, float("-inf")).softmax(-1), v)
        hidden = hidden + F.linear(mixed.flatten(1), weights[prefix + "self_attn.o_proj.weight"])
        x = norm(hidden, prefix + "post_attention_layernorm")
        gate, up = (F.linear(x, weights[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        hidden = hidden + F.linear(F.silu(gate) * up, weights[prefix + "mlp.down_proj.weight"])
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return F.linear(norm(hidden, "model.norm"), head)
