"""One target with a DFLASH drafter, driven by request, and the drafts that formulas alone give."""

from dataclasses import dataclass
from pathlib import Path

import torch
from baton.engine.models.config import ModelConfig
from baton.engine.models.interface import CausalLM
from baton.engine.speculative.drafters.dflash import DflashDrafter
from baton.engine.speculative.drafters.dflash_config import load_dflash_config
from baton.engine.speculative.drafters.dflash_weights import load_dflash
from baton.tests.parity.dflash_toys import HEAD_DIM, MASK
from baton.tests.parity.eagle3_engine import NUM_PAGES, PAGE_SIZE, Engine
from baton.tests.parity.toy_models import reference_model

THETA = 1000000.0


@dataclass
class DflashEngine(Engine):
    """As `Engine`, with the DFLASH drafter `head`."""

    def make_drafter(self, model: CausalLM, config: ModelConfig) -> DflashDrafter:
        draft = load_dflash_config(self.head, config, dtype="float32")
        self.runner.set_aux_layer_ids(self.aux_ids or draft.aux.ids)
        head = load_dflash(draft, dtype=torch.float32, device=self.device)
        head.share(model.embed_tokens, model.lm_head, config.max_position_embeddings)
        return DflashDrafter(head, num_pages=NUM_PAGES, page_size=PAGE_SIZE, capacity=2)


def recomputed_block(
    target: Path,
    weights: dict[str, torch.Tensor],
    ids: list[int],
    count: int,
    layer_ids: tuple[int, ...],
    *,
    windows: tuple[int | None, ...] = (None, None),
    are_causal: tuple[bool, ...] = (False, False),
) -> torch.Tensor:
    """Logits `[count - 1, V]` of a block of `count` behind `ids`, whose last token is the newest.

    Hidden states are those of transformers, and all rows are computed at once by the published formulas.
    """
    model, w = reference_model(target), weights
    with torch.no_grad():
        states = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1][0] for i in layer_ids], dim=-1)
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    embed = model.get_input_embeddings().weight.detach()
    hidden = embed[[ids[-1]] + [MASK] * (count - 1)]
    positions = torch.arange(len(ids) - 1 + count)
    for layer in range(len(windows)):
        p = f"layers.{layer}."
        normed = rms(hidden, w[p + "input_layernorm.weight"])
        both = torch.cat((context, normed))
        q, k, v = (
            (x @ w[f"{p}self_attn.{n}_proj.weight"].T).view(x.shape[0], -1, HEAD_DIM).transpose(0, 1)
            for n, x in (("q", normed), ("k", both), ("v", both))
        )
        q = rotate(rms(q, w[p + "self_attn.q_norm.weight"]), positions[-count:])
        k = rotate(rms(k, w[p + "self_attn.k_norm.weight"]), positions)
        groups = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        distance = positions[-count:, None] - positions[None]
        hidden_from = torch.zeros_like(distance, dtype=torch.bool)
        if are_causal[layer]:
            hidden_from |= distance < 0
        if (window := windows[layer]) is not None:
            hidden_from |= distance.abs() >= window
        scores = (q @ k.transpose(1, 2) / HEAD_DIM**0.5).masked_fill(hidden_from, float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
        hidden = hidden + mixed @ w[p + "self_attn.o_proj.weight"].T
        x = rms(hidden, w[p + "post_attention_layernorm.weight"])
        gated = torch.nn.functional.silu(x @ w[p + "mlp.gate_proj.weight"].T) * (
            x @ w[p + "mlp.up_proj.weight"].T
        )
        hidden = hidden + gated @ w[p + "mlp.down_proj.weight"].T
    return rms(hidden, w["norm.weight"])[1:] @ model.get_output_embeddings().weight.detach().T


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Neox-style rotation of `[heads, T, D]` to `positions` `[T]`."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * THETA ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
