"""A DFLASH drafter of random weights for `baton bench engine`, and the least work of its steps.

No place of a block can count its drafts, as the head of `model` does, because one forward drafts all of them.
This drafter drafts TOKEN everywhere, and `SimulatedBlocks` replaces the drafts from the accept length on.
"""

import json
from pathlib import Path

import torch

from ...engine.kv.layouts import MHALayout
from ...engine.models.config import ModelConfig
from ...engine.models.layers import GatedMLP
from ...engine.speculative.drafters.dflash import DflashDrafter
from ...engine.speculative.drafters.dflash_config import ARCHITECTURE, DflashConfig, load_dflash_config
from ...engine.speculative.drafters.dflash_head import DflashHead
from ...engine.speculative.drafters.protocol import DraftView, Proposal
from ...engine.speculative.drafting.shape import DraftShape
from .floors import PassCounts, Work
from .model import LEVEL, SPREAD, WRONG

NUM_LAYERS = 5  # of published drafters, which also read as many layers of the target


def block_config(target: ModelConfig, dtype: str, block_size: int, folder: Path) -> DflashConfig:
    """The config of a drafter of the target's width, for blocks of `block_size` tokens.

    `folder` is for temporary files.
    """
    config = {
        "architectures": [ARCHITECTURE],
        "block_size": block_size,
        "dflash_config": {"mask_token_id": target.vocab_size - 1},
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": min(NUM_LAYERS, max(target.num_layers - 3, 1)),
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
    }
    path = folder / "blocks"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_dflash_config(path, target, dtype=dtype)


@torch.no_grad()
def random_blocks(
    config: DflashConfig, dtype: torch.dtype, device: torch.device, seed: int = 1
) -> DflashHead:
    """A drafter of `config` that drafts TOKEN for a target of `random_target`."""
    head = DflashHead(config, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in head.tensors():
        if "norm" in name:
            weight.fill_(1)
        else:
            weight.normal_(0, SPREAD, generator=generator)
    for layer in head.layers:  # LEVEL stays what the embedding has
        layer.attention.output.weight[LEVEL] = 0
        assert isinstance(layer.mlp, GatedMLP), layer.mlp
        layer.mlp.down.weight[LEVEL] = 0
    return head


class SimulatedBlocks(DflashDrafter):
    """A drafter of `random_blocks`. A target accepts `accept_length` - 1 of its drafts per step."""

    def __init__(
        self, head: DflashHead, accept_length: int, *, num_pages: int, page_size: int, capacity: int
    ) -> None:
        super().__init__(head, num_pages=num_pages, page_size=page_size, capacity=capacity)
        self.accept_length = accept_length

    def propose(self, view: DraftView, shape: DraftShape) -> Proposal:
        drafts = super().propose(view, shape).drafts
        drafts[:, self.accept_length - 1 :] = WRONG
        return Proposal(drafts, None)


def block_counts(config: DflashConfig, itemsize: int) -> PassCounts:
    """The sizes of a drafter, and the work of a pass over it."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    kv = MHALayout.of(config, num_layers=config.num_layers, page_size=1, dtype=torch.bfloat16)
    return PassCounts(
        body=config.num_layers * layer,
        vocab=config.vocab_size * config.hidden_size,
        fc=config.dims.target_feature_width * config.hidden_size,
        kv=kv.elements_per_token,
        attention=config.num_layers * 4 * heads,
        itemsize=itemsize,
    )


def block_step(target: PassCounts, config: DflashConfig, batch: int, steps: int, context: int) -> list[Work]:
    """The passes of one step: the verify, the block, and the projection of the verified rows.

    A projection reads `fc` and the weights of keys and values of all layers.
    """
    drafter, rows = block_counts(config, target.itemsize), steps + 1
    projection = drafter.fc + drafter.kv * config.hidden_size
    written = Work(
        num_bytes=drafter.itemsize * (projection + batch * rows * drafter.kv),
        num_flops=2 * batch * rows * projection,
    )
    return [
        target.step(batch, rows, context, logit_rows=rows),
        drafter.step(batch, rows, context, logit_rows=steps),
        written,
    ]
