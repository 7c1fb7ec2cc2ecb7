"""Samples of a decode worker with EAGLE, deep EAGLE3 and parallel heads follow the target's law."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.speculative.step import fused_step
from baton.tests.parity.eagle3_toys import write_head
from baton.tests.parity.test_sampled_law import (
    FEW,
    GROSS_AGAIN,
    HIDDEN,
    MANY,
    QUICK,
    VOCAB,
    is_refuted,
    layer,
    sample,
    write_random_head,
    write_target,
)
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("one_thread")

EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": HIDDEN, "intermediate_size": 4,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "vocab_size": VOCAB,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0]},
}  # fmt: skip


def eagle(path: Path) -> Path:
    config = {name: value for name, value in EAGLE3.items() if name != "eagle_config"}
    tensors = layer("layers.0.", HIDDEN, 0.4)
    del tensors["layers.0.input_layernorm.weight"]
    random = torch.Generator().manual_seed(5)
    tensors["fc.weight"] = 0.4 * torch.randn(HIDDEN, 2 * HIDDEN, generator=random)
    return write_head(path, config | {"architectures": ["LlamaForCausalLMEagle"], "bias": False}, tensors)


def of_two_layers(path: Path) -> Path:
    tensors = load_file(write_random_head(path / "one") / "model.safetensors")
    config = EAGLE3 | {"architectures": ["LlamaForCausalLMEagle3Deep"], "num_hidden_layers": 2}
    return write_head(path / "two", config, tensors | layer("layers.1.", HIDDEN, 0.4))


def parallel(path: Path) -> Path:
    tensors = load_file(write_random_head(path / "one") / "model.safetensors")
    mask = 0.4 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(6))
    return write_head(path / "parallel", EAGLE3 | {"ptd_token_id": 1}, tensors | {"mask_hidden": mask})


KINDS: dict[str, Callable[[Path], Path]] = {
    "eagle": eagle,
    "two layers": of_two_layers,
    "parallel": parallel,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    path = tmp_path_factory.mktemp("markov")
    target = write_target(path / "target")
    return {kind: (target, write(path / kind)) for kind, write in KINDS.items()}


@pytest.mark.parametrize(
    "kind", [kind if kind == "parallel" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_sequences_of_a_decode_worker_have_the_targets_law(models, kind):
    assert not is_refuted(sample(models[kind], QUICK))


@pytest.mark.parametrize("rule", GROSS_AGAIN)
def test_a_wrong_rule_is_refuted_with_parallel_drafts(models, monkeypatch, rule):
    torch.manual_seed(1)
    monkeypatch.setattr(fused_step, "verify_drafts", rule)
    assert is_refuted(sample(models["parallel"], FEW))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_million_sequences_have_the_targets_law(models, kind):
    assert not is_refuted(sample(models[kind], MANY))
