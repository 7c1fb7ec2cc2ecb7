"""Samples of a decode worker with a DFLASH drafter follow the target's law, whatever the block is conditioned
on.

The drafts of a block see each other's places and not each other's tokens. The rule of `test_sampled_law` asks
nothing of the drafter, so the same chi-square test holds here, and the same wrong rules fail it.
"""

from pathlib import Path

import pytest
import torch
from baton.engine.speculative.step import fused_step
from baton.tests.parity.dflash_toys import dflash_config, write_dflash
from baton.tests.parity.test_sampled_law import (
    FEW,
    GROSS_AGAIN,
    HIDDEN,
    MANY,
    QUICK,
    TOKENS,
    VOCAB,
    is_refuted,
    layer,
    sample,
    write_target,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("markov")
    return write_target(path / "target"), write_drafter(path / "dflash")


def write_drafter(path: Path) -> Path:
    """Random weights; the mask token is one that the target says, too."""
    config = dflash_config(
        block_size=TOKENS,
        dflash_config={"mask_token_id": 2, "target_layer_ids": [0]},
        hidden_size=HIDDEN,
        intermediate_size=4,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=VOCAB,
        max_position_embeddings=64,
    )
    random = torch.Generator().manual_seed(4)
    tensors = layer("layers.0.", HIDDEN, 0.4)
    tensors |= {f"layers.0.self_attn.{name}_norm.weight": torch.ones(8) for name in "qk"}
    tensors |= {name: torch.ones(HIDDEN) for name in ("hidden_norm.weight", "norm.weight")}
    tensors["fc.weight"] = torch.randn(HIDDEN, HIDDEN, generator=random) * 0.4
    return write_dflash(path, config, tensors)


def test_sequences_of_a_decode_worker_have_the_targets_law(models):
    assert not is_refuted(sample(models, QUICK))


@pytest.mark.parametrize("rule", GROSS_AGAIN)
def test_a_wrong_rule_is_refuted(models, monkeypatch, rule):
    torch.manual_seed(1)
    monkeypatch.setattr(fused_step, "verify_drafts", rule)
    assert is_refuted(sample(models, FEW))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_sequences_have_the_targets_law(models):
    assert not is_refuted(sample(models, MANY))
