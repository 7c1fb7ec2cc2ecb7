"""A deterministic engine refuses a device whose products depend on the number of rows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from baton.bench.engine.model import fill_stored
from baton.engine import invariance
from baton.engine.errors import CheckpointError
from baton.engine.invariance import check_invariance
from baton.engine.models.interface import CausalLM
from baton.engine.models.moe import QWEN_NAMES, MoEConfig
from baton.engine.models.quant.config import Fp8Form, Int4Form, QuantConfig
from baton.engine.models.quant.experts import Fp8Experts, Int4Experts
from baton.engine.models.quant.fp8_projection import Fp8Projection
from baton.engine.models.quant.int4_projection import Int4Projection
from baton.engine.models.registry import build_model
from baton.engine.models.weights import load_model
from baton.kernels.row_ops import INVARIANT
from baton.tests.parity.eagle3_toys import toy_target


def product_by_number(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Few rows are summed in another order."""
    if x.shape[0] > 16:
        return F.linear(x, weight, bias)
    return F.linear(x.flip(1), weight.flip(1), bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_devices_own_operations_pass(dtype: torch.dtype, is_tied: bool):
    config = toy_target(num_layers=2, vocab_size=96, tie_word_embeddings=is_tied)
    model = build_model(config, dtype=dtype, is_invariant=True)
    for _, weight in model.tensors():
        torch.nn.init.normal_(weight)
    check_invariance(model, INVARIANT)


@pytest.mark.parametrize("is_linear", [False, True])
def test_a_product_that_depends_on_the_number_of_rows_is_refused(is_linear: bool):
    model = build_model(toy_target(num_layers=2, vocab_size=96), dtype=torch.float32, is_invariant=True)
    for _, weight in model.tensors():
        torch.nn.init.normal_(weight)
    changed = (
        {"linear": product_by_number} if is_linear else {"logits": lambda x, w: product_by_number(x, w, None)}
    )
    name = "q_proj" if is_linear else "lm_head"
    with pytest.raises(CheckpointError, match=rf"{name}.*use --deterministic off"):
        check_invariance(model, replace(INVARIANT, **changed))


FORMS = {
    "channel": Fp8Form(),
    "block": Fp8Form(has_blocks=True),
    "int4": Int4Form(packing="awq", group_size=32),
}
# sizes that blocks and groups divide
SIZES = {"num_layers": 1, "vocab_size": 96, "intermediate_size": 128, "hidden_size": 128, "head_dim": 64}
EXPERTS = MoEConfig(num_experts=4, top_k=2, intermediate_size=128, is_normalised=True, names=QWEN_NAMES)


def quantised(form: str, moe: MoEConfig | None) -> CausalLM:
    config = replace(toy_target(**SIZES), moe=moe, quant=QuantConfig(form=FORMS[form]))
    model = build_model(config, dtype=torch.bfloat16, is_invariant=True)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.tensors():
        fill_stored(name, weight, generator)
    model.projections.finish()
    return model


@pytest.mark.parametrize("moe", [None, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("form", FORMS)
def test_quantised_products_of_the_device_pass(form: str, moe: MoEConfig | None):
    check_invariance(quantised(form, moe), INVARIANT)


@pytest.mark.parametrize("is_of_experts", [False, True])
@pytest.mark.parametrize("form", ["block", "int4"])
def test_a_quantised_product_that_depends_on_the_number_of_rows_is_refused(
    monkeypatch: pytest.MonkeyPatch, form: str, is_of_experts: bool
):
    model = quantised(form, EXPERTS)
    kind = (Fp8Experts, Fp8Projection) if form == "block" else (Int4Experts, Int4Projection)
    planted = kind[0] if is_of_experts else kind[1]
    compute = planted.__call__
    monkeypatch.setattr(
        planted, "__call__", lambda self, x, *rest: compute(self, x, *rest) + 1e-2 * (x.shape[0] == 17)
    )
    named = "the MLP of layer 0" if is_of_experts else "q_proj"
    with pytest.raises(CheckpointError, match=rf"a row of .*{named}.*use --deterministic off"):
        check_invariance(model, INVARIANT)


def test_attention_over_latents_is_refused_in_one_line(toy_checkpoint: Callable[..., Path], tmp_path: Path):
    """Before anything is loaded: the weights are not there."""
    path = toy_checkpoint("deepseek_v3")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"latents \(DeepseekV3ForCausalLM\).*--deterministic off"):
        load_model(tmp_path, dtype=torch.bfloat16, is_invariant=True)


def test_attention_that_depends_on_the_number_of_rows_is_refused(monkeypatch: pytest.MonkeyPatch):
    model = build_model(toy_target(num_layers=2, vocab_size=96), dtype=torch.float32, is_invariant=True)
    for _, weight in model.tensors():
        torch.nn.init.normal_(weight)
    attend = invariance.invariant_attention
    monkeypatch.setattr(
        invariance, "invariant_attention", lambda q, *rest: attend(q, *rest) + 1e-6 * (q.shape[0] == 4)
    )
    with pytest.raises(CheckpointError, match=r"a row of attention.*use --deterministic off"):
        check_invariance(model, INVARIANT)
