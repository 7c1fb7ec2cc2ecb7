"""A quantised checkpoint generates the tokens that transformers generates with the values of its weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.models.weights import load_model
from baton.tests.parity.quant_toys import FORMS, SHAPE, write_quantised
from baton.tests.parity.toy_engine import ToyEngine, random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_logits, reference_model

pytestmark = pytest.mark.usefixtures("one_thread")

# Products of the same float32 values: measured 2e-5 at most, on logits of standard deviation 20. One scale of
# a neighbour's block gives more than 1.
TOLERANCE = 2e-4


def assert_same_tokens(path: Path, values: Path) -> None:
    ours, theirs, prompt = ToyEngine(path), reference_model(values), random_ids(70, seed=3)
    logits = ours.run(("all", prompt)).logits
    torch.testing.assert_close(logits, reference_logits(theirs, prompt), atol=TOLERANCE, rtol=0)
    assert ours.greedy(prompt[:20], 12) == reference_greedy(theirs, prompt[:20], 12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_each_form_equals_transformers_with_its_values(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, form: str, family: str
):
    values = write_quantised(toy_checkpoint(family, **SHAPE), tmp_path / form, form)
    assert_same_tokens(tmp_path / form, values)


def test_ignored_matrices_stay_as_they_are(toy_checkpoint: Callable[..., Path], tmp_path: Path):
    values = write_quantised(
        toy_checkpoint("llama", **SHAPE),
        tmp_path / "some",
        "channel",
        ignored=("layers.0.mlp", "layers.1.self_attn.o_proj"),
        ignore=["lm_head", "re:.*layers.0.mlp", "model.layers.1.self_attn.o_proj"],
    )
    model, _ = load_model(tmp_path / "some", dtype=torch.float32)
    dtypes = {name: tensor.dtype for name, tensor in model.tensors()}
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == torch.float32
    assert dtypes["model.layers.1.mlp.up_proj.weight"] == torch.float8_e4m3fn
    assert_same_tokens(tmp_path / "some", values)
