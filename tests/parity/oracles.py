"""Drafts that are right as often as a test wants, and a pair whose draft finds its answer in its own KV.

The memory pair: the target's next token is a function of the token DISTANCE positions back, which one
attention head of it fetches; the draft fetches the same from the draft KV of that position. A constant query
that is rotated back by DISTANCE positions against constant keys scores highest there. So a hole in the
draft's KV, a row in a wrong slot or a guess that was never overwritten gives a wrong draft when it is looked
up, DISTANCE tokens later.
"""

import json
import random
from dataclasses import fields, replace
from pathlib import Path

import torch
from baton.engine.speculative.drafters.protocol import DraftView, Proposal
from baton.engine.speculative.drafting.choice import DraftSampling
from baton.engine.speculative.drafting.shape import DraftShape
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.eagle3_toys import write_head
from safetensors.torch import save_file

DISTANCE = 9
VOCAB, HIDDEN, HEAD_DIM, LAYERS = 16, 48, 32, 3
FETCHED, CONST = VOCAB, 2 * VOCAB  # columns: token one-hot, fetched one-hot, a constant
SHARPNESS = 15.0


def follower(token: int) -> int:
    """What comes DISTANCE + 1 positions behind `token`."""
    return (token + 5) % VOCAB


def write_memory_oracle(path: Path, mask: int | None = None) -> tuple[Path, Path]:
    """(target directory, head directory) of the memory pair; with `mask` the head is a parallel one.

    A row of the mask token fetches as any other row does. Up to DISTANCE drafts are right: the rows that they
    fetch from are committed.
    """
    return _write_target(path / "target"), _write_head(path / "head", mask)


def is_right(seed: int, row: int, position: int, alpha: float) -> bool:
    """Whether a tuned draft of batch row `row` for `position` is kept: pure, true with chance alpha."""
    return random.Random(f"{seed} {row} {position}").random() < alpha


def expected_accept_length(alpha: float, steps: int) -> float:
    return sum(alpha**i for i in range(steps + 1))


def tune(engine: Engine, alpha: float, seed: int = 0) -> None:
    """Make each draft of `engine`'s eager path wrong with chance 1 - alpha; what follows in the chain sees
    the wrong one."""
    propose = engine.drafter.propose

    class Tuned(DraftSampling):
        def choose(
            self, logits: torch.Tensor, positions: torch.Tensor, target_ids: torch.Tensor
        ) -> torch.Tensor:
            drafts = super().choose(logits, positions, target_ids)
            wrong = [
                not is_right(seed, row, position, alpha) for row, position in enumerate(positions.tolist())
            ]
            return torch.where(torch.tensor(wrong), (drafts + 1) % engine.vocab_size, drafts)

    def tuned(view: DraftView, shape: DraftShape) -> Proposal:
        sampling = Tuned(**{f.name: getattr(view.sampling, f.name) for f in fields(view.sampling)})
        return propose(replace(view, sampling=sampling), shape)

    engine.drafter.propose = tuned


def _phases() -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key, constant before rotation, whose score is highest DISTANCE positions back."""
    half = HEAD_DIM // 2
    angles = DISTANCE * 10000.0 ** (-torch.arange(half) / half)
    query = torch.cat((angles.cos() + angles.sin(), angles.cos() - angles.sin()))
    return SHARPNESS * query, torch.full((HEAD_DIM,), SHARPNESS)


def _write_target(path: Path) -> Path:
    path.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": 8,
        "num_hidden_layers": LAYERS, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HEAD_DIM,
        "vocab_size": VOCAB, "rms_norm_eps": 0.0, "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    embed, lm_head = torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB, HIDDEN)
    embed[:, :VOCAB] = torch.eye(VOCAB)
    embed[:, CONST] = 1.0
    for token in range(VOCAB):
        lm_head[follower(token), FETCHED + token] = 1.0
    tensors = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": lm_head,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    norm = (HIDDEN / 2) ** 0.5  # what norming makes of a 1 among two
    for layer in range(LAYERS):
        parts = (
            _attention(HIDDEN, CONST, norm, 0, norm, 1.0)
            if layer == 0
            else _attention(HIDDEN, CONST, 1.0, 0, 1.0, 0.0)
        )
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in parts.items()}
        tensors |= {f"model.layers.{layer}.{name}": torch.ones(HIDDEN)
                    for name in ("input_layernorm.weight", "post_attention_layernorm.weight")}  # fmt: skip
    save_file(tensors, path / "model.safetensors")
    return path


def _write_head(path: Path, mask: int | None) -> Path:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": HIDDEN, "intermediate_size": 8,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "rms_norm_eps": 0.0,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "vocab_size": VOCAB,
        "norm_before_residual": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    } | ({} if mask is None else {"ptd_token_id": mask})  # fmt: skip
    fc, lm_head, only_const = torch.zeros(HIDDEN, 2 * HIDDEN), torch.zeros(VOCAB, HIDDEN), torch.zeros(HIDDEN)
    fc[CONST, CONST] = 1.0
    only_const[CONST] = 1.0  # what an earlier step fetched is not part of this one's hidden
    for token in range(VOCAB):
        lm_head[follower(token), FETCHED + token] = 1.0
    parts = _attention(2 * HIDDEN, HIDDEN + CONST, HIDDEN**0.5, 0, (HIDDEN / 2) ** 0.5, 0.5)
    norms = {"input_layernorm.weight": torch.ones(HIDDEN), "hidden_norm.weight": only_const,
             "post_attention_layernorm.weight": torch.ones(HIDDEN)}  # fmt: skip
    tensors = {f"midlayer.{name}": tensor for name, tensor in (parts | norms).items()}
    tensors |= {"fc.weight": fc, "norm.weight": torch.ones(HIDDEN), "lm_head.weight": lm_head}
    if mask is not None:
        tensors["mask_hidden"] = only_const.clone()
    return write_head(path, config, tensors)


def _attention(
    width: int, const: int, const_norm: float, tokens: int, token_norm: float, strength: float
) -> dict[str, torch.Tensor]:
    """Weights that fetch the one-hot at columns `tokens` DISTANCE rows back into FETCHED; the MLP is zero."""
    query, key = _phases()
    q, k, v, o = (
        torch.zeros(HEAD_DIM, width),
        torch.zeros(HEAD_DIM, width),
        torch.zeros(HEAD_DIM, width),
        None,
    )
    q[:, const], k[:, const] = query / const_norm, key / const_norm
    v[:VOCAB, tokens : tokens + VOCAB] = torch.eye(VOCAB) / token_norm
    o = torch.zeros(HIDDEN, HEAD_DIM)
    o[FETCHED : FETCHED + VOCAB, :VOCAB] = strength * torch.eye(VOCAB)
    attention = {
        f"self_attn.{name}_proj.weight": tensor for name, tensor in zip("qkvo", (q, k, v, o), strict=True)
    }
    mlp = {
        "mlp.gate_proj.weight": (8, HIDDEN),
        "mlp.up_proj.weight": (8, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, 8),
    }
    return attention | {name: torch.zeros(shape) for name, shape in mlp.items()}
