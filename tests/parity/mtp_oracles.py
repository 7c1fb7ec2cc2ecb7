"""A target and MTP modules whose drafts are right exactly when rows, positions and modules are.

The target's next token is a function of the token DISTANCE positions back, which its attention fetches. Each
module fetches the same token from its own KV. With `source` "embed" the KV holds the token behind each row,
so a row that was written from a wrong guess and never again gives a wrong draft DISTANCE rows later. With
"hidden" the KV holds the token of the row itself, by the hidden input, and module k looks DISTANCE-1-k rows
back; so features of other rows, and KV of other modules, give wrong drafts.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from baton.engine.speculative.drafters import mtp_deep
from baton.engine.speculative.drafters.mtp_head import MtpHead
from baton.engine.speculative.drafters.mtp_window import Window
from baton.engine.speculative.drafting.choice import DraftSampling
from baton.tests.parity.mtp_toys import MtpEngine, Tensors, write_mtp
from baton.tests.parity.oracles import is_right
from safetensors.torch import save_file

DISTANCE, SHARPNESS = 9, 15.0
VOCAB, HIDDEN, HEAD_DIM, LAYERS = 16, 80, 32, 2
FETCHED, CONST, OWN = VOCAB, 2 * VOCAB, 48  # columns: token one-hot, fetched one-hot, a constant, row's token
SOURCES = ("embed", "hidden")


def follower(token: int) -> int:
    """The token that comes DISTANCE + 1 positions behind `token`."""
    return (token + 5) % VOCAB


def write_oracle_target(path: Path) -> Path:
    path.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": 8,
        "num_hidden_layers": LAYERS, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HEAD_DIM,
        "vocab_size": VOCAB, "rms_norm_eps": 0.0, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "torch_dtype": "float32",
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
    for layer in range(LAYERS):
        parts = _layer(0, DISTANCE, 1.0 if layer == 0 else 0.0)
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in parts.items()}
    save_file(tensors, path / "model.safetensors")
    return path


def write_oracle_modules(
    path: Path, target: Path, count: int, *, source: str = "embed", is_chained: bool = True
) -> Path:
    """`count` modules for the target, in the dialect of a family that chains them or does not."""
    modules = [_module(k, source, is_chained) for k in range(count)]
    dialect = "deepseek" if is_chained else "mimo_v2"
    return write_mtp(path, target, dialect, modules)


def corrupt(monkeypatch: object, engine: MtpEngine, alpha: float, seed: int = 0) -> None:
    """Makes each draft of the modules of `engine`, run eagerly, wrong with chance 1 - `alpha`."""
    run = mtp_deep.draft_window

    class Tuned(DraftSampling):
        def choose(
            self, logits: torch.Tensor, positions: torch.Tensor, target_ids: torch.Tensor
        ) -> torch.Tensor:
            drafts = super().choose(logits, positions, target_ids)
            wrong = [not is_right(seed, 0, position, alpha) for position in positions.tolist()]
            return torch.where(torch.tensor(wrong), (drafts + 1) % engine.vocab_size, drafts)

    def tuned(
        head: MtpHead, window: Window, attends: list[Callable[..., torch.Tensor]], sampling: DraftSampling
    ) -> torch.Tensor:
        parts = {name: getattr(sampling, name) for name in ("seeds", "temperature", "is_drawn")}
        return run(head, window, attends, Tuned(**parts))

    monkeypatch.setattr(mtp_deep, "draft_window", tuned)


def expected_lens(num_prompt: int, num_tokens: int, steps: int, alpha: float, seed: int = 0) -> list[int]:
    """Accept lengths of all steps of a request whose drafts are right where `is_right` says so."""
    length, found = num_prompt + 1, []
    while length < num_prompt + num_tokens:
        kept = 0
        while kept < steps and is_right(seed, 0, length + kept, alpha):
            kept += 1
        found.append(min(1 + kept, num_prompt + num_tokens - length))
        length += found[-1]
    return found


def _module(number: int, source: str, is_chained: bool) -> Tensors:
    fc = torch.zeros(HIDDEN, 2 * HIDDEN)
    fc[:VOCAB, :VOCAB] = torch.eye(VOCAB)
    fc[CONST, CONST] = 1.0
    # The token of the row itself: in the target's stream by its embedding, in a module's own in OWN.
    theirs = HIDDEN + (OWN if is_chained and number else 0)
    fc[OWN : OWN + VOCAB, theirs : theirs + VOCAB] = torch.eye(VOCAB)
    column, distance = (0, DISTANCE) if source == "embed" else (OWN, DISTANCE - 1 - number)
    found = {f"layer.{name}": tensor for name, tensor in _layer(column, distance, 1.0).items()}
    return found | {"fc.weight": fc, **{f"{name}.weight": torch.ones(HIDDEN) for name in
                                        ("embed_norm", "hidden_norm", "norm")}}  # fmt: skip


def _layer(column: int, distance: int, strength: float) -> Tensors:
    """Weights that fetch the one-hot at `column` of the row `distance` rows back; the MLP is zero."""
    half = HEAD_DIM // 2
    angles = distance * 10000.0 ** (-torch.arange(half) / half)
    query = torch.cat((angles.cos() + angles.sin(), angles.cos() - angles.sin()))
    q, k, v = (torch.zeros(HEAD_DIM, HIDDEN) for _ in range(3))
    norm = (HIDDEN / 3) ** 0.5  # about what norming makes of a 1 among two or three
    q[:, CONST] = SHARPNESS * query / norm
    k[:, CONST] = SHARPNESS / norm
    v[:VOCAB, column : column + VOCAB] = torch.eye(VOCAB) / norm
    o = torch.zeros(HIDDEN, HEAD_DIM)
    o[FETCHED : FETCHED + VOCAB, :VOCAB] = strength * torch.eye(VOCAB)
    named = {f"self_attn.{name}_proj.weight": x for name, x in zip("qkvo", (q, k, v, o), strict=True)}
    named |= {f"mlp.{name}_proj.weight": torch.zeros(8, HIDDEN) for name in ("gate", "up")}
    named |= {"mlp.down_proj.weight": torch.zeros(HIDDEN, 8)}
    return named | {f"{name}.weight": torch.ones(HIDDEN) for name in
                    ("input_layernorm", "post_attention_layernorm")}  # fmt: skip
