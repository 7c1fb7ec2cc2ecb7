"""EAGLE heads on disk: random ones, and an oracle that is right exactly where feature and token agree.

The oracle's target is that of `eagle3_toys`, whose final hidden is the one-hot of a row's token. The head
writes the digits of the feature's successor beside those of the row's own token, which come through attention
from the row itself. Where all digits agree, it answers with the one-hot of its token, scaled as the target's
normed hidden; the shared output projection makes the successor of that. Elsewhere RESERVED is the likeliest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from baton.engine.models.config import ModelConfig
from baton.engine.models.interface import CausalLM
from baton.engine.speculative.drafters.protocol import Drafter
from baton.engine.speculative.drafters.registry import TargetWeights, read_drafter
from baton.tests.parity.eagle3_engine import NUM_PAGES, PAGE_SIZE, Engine
from baton.tests.parity.eagle3_toys import (
    BASE,
    CODE,
    CONST,
    DIGITS,
    HIDDEN,
    ORACLE_HIDDEN,
    ORACLE_VOCAB,
    RESERVED,
    SEEN,
    SHAPE,
    digit_columns,
    successor,
    write_head,
    write_oracle,
)

# The last layer but one writes a digit, which the last one erases: its output is another feature.
TARGET_IDS = (1, 3, 6)
RAW, DOUBT = 0, 2.0  # columns of the token's digits before attention; weight of RESERVED


@dataclass
class SourcedEngine(Engine):
    """One target whose drafter the registry reads, whatever its kind."""

    def make_drafter(self, model: CausalLM, config: ModelConfig) -> Drafter:
        source = read_drafter(self.head, config, dtype="float32")
        self.runner.set_aux_layer_ids(self.aux_ids or source.config.aux.ids)
        lent = TargetWeights(
            embed_tokens=model.embed_tokens,
            lm_head=model.lm_head,
            final_norm=model.norm,
            steps=self.steps,
            max_context=config.max_position_embeddings,
            dtype=torch.float32,
            device=torch.device(self.device),
        )
        return source.load(lent).drafter(num_pages=NUM_PAGES, page_size=PAGE_SIZE, capacity=2)


def eagle_config(**changes: object) -> dict[str, object]:
    """config.json of a head as its authors publish it."""
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    return SHAPE | names | {"tie_word_embeddings": False, "bias": True} | changes


def plain_tensors(prefix: str, draw: Callable[[str, tuple[int, ...]], None]) -> None:
    """Draws the tensors of one plain layer of the toy shape."""
    inner, kv = SHAPE["intermediate_size"], HIDDEN // 2
    for name, shape in {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (inner, HIDDEN),
        "mlp.up_proj": (inner, HIDDEN),
        "mlp.down_proj": (HIDDEN, inner),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }.items():
        draw(f"{prefix}{name}.weight", shape)


def random_layers(names: tuple[str, ...], seed: int) -> dict[str, torch.Tensor]:
    """The tensors of plain layers under these prefixes."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()

    def draw(name: str, shape: tuple[int, ...]) -> None:
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * noise if "norm" in name else 0.2 * noise

    for prefix in names:
        plain_tensors(prefix, draw)
    return tensors


def eagle_tensors(seed: int = 0, num_layers: int = 1) -> dict[str, torch.Tensor]:
    """Random weights of an EAGLE head for the toy target."""
    tensors = random_layers(tuple(f"layers.{i}." for i in range(num_layers)), seed)
    del tensors["layers.0.input_layernorm.weight"]
    generator = torch.Generator().manual_seed(seed + 1)
    tensors["fc.weight"] = 0.2 * torch.randn(HIDDEN, 2 * HIDDEN, generator=generator)
    tensors["fc.bias"] = 0.2 * torch.randn(HIDDEN, generator=generator)
    return tensors


def write_eagle_oracle(path: Path) -> tuple[Path, Path]:
    """(target directory, head directory)."""
    target, _ = write_oracle(path, TARGET_IDS)
    hidden, vocab, width = ORACLE_HIDDEN, ORACLE_VOCAB, 32
    config = {
        "architectures": ["LlamaForCausalLMEagle"],
        "hidden_size": hidden,
        "intermediate_size": vocab,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": width,
        "num_hidden_layers": 1,
        "rms_norm_eps": 0.0,
        "max_position_embeddings": 256,
        "vocab_size": vocab,
        "bias": False,
    }
    fc = torch.zeros(hidden, 2 * hidden)
    scale = hidden**0.5  # the norm of a one-hot
    for token in range(vocab):
        fc[digit_columns(token, RAW), token] = 1.0
        fc[CONST, token] = 1.0
        fc[RESERVED, token] = DOUBT
        fc[digit_columns(successor(token), CODE), hidden + token] = 1.0 / scale
    # Queries and keys are constant, so under rotation a row sees practically only itself.
    query, value, output = (
        torch.zeros(shape) for shape in ((width, hidden), (width, hidden), (hidden, width))
    )
    query[:, CONST] = 49.0
    for column in range(BASE * DIGITS):
        value[column, RAW + column] = 1.0
        output[SEEN + column, column] = 1.0
    gate, up, down = torch.zeros(vocab, hidden), torch.zeros(vocab, hidden), torch.zeros(hidden, vocab)
    normed = (hidden / (3 * DIGITS + 1 + DOUBT**2)) ** 0.5
    amplitude = float(torch.nn.functional.silu(torch.tensor(20.0 * 0.5 * normed)) * normed)
    for token in range(RESERVED):
        agreeing = digit_columns(token, CODE) + digit_columns(token, SEEN)
        gate[token, agreeing] = 20.0
        gate[token, CONST] = -20.0 * 5.5
        up[token, CONST] = 1.0
        down[agreeing + digit_columns(token, RAW), token] -= 1.0 / amplitude
        down[RESERVED, token] -= DOUBT / amplitude
        down[token, token] += scale / amplitude
    prefix = "layers.0."
    tensors = {
        "fc.weight": fc,
        f"{prefix}post_attention_layernorm.weight": torch.ones(hidden),
        f"{prefix}self_attn.q_proj.weight": query,
        f"{prefix}self_attn.k_proj.weight": query.clone(),
        f"{prefix}self_attn.v_proj.weight": value,
        f"{prefix}self_attn.o_proj.weight": output,
        f"{prefix}mlp.gate_proj.weight": gate,
        f"{prefix}mlp.up_proj.weight": up,
        f"{prefix}mlp.down_proj.weight": down,
    }
    return target, write_head(path / "eagle", config, tensors)
