"""A deterministic engine refuses a device whose products depend on the number of rows."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from baton.engine import invariance
from baton.engine.errors import CheckpointError
from baton.engine.invariance import check_invariance
from baton.engine.models.registry import build_model
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
