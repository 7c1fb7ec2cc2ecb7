"""A quantised checkpoint generates the tokens that transformers generates with the values of its weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.models.quant import int4_projection
from baton.engine.models.weights import load_model
from baton.kernels import fp8_scales, int4_cpu
from baton.tests.parity.quant_toys import FORMS, SHAPE, write_quantised
from baton.tests.parity.toy_engine import ToyEngine, random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_logits, reference_model

pytestmark = pytest.mark.usefixtures("one_thread")

# Products of the same float32 values: measured 2e-5 at most, on logits of standard deviation 20. One scale of
# a neighbour's block gives more than 1.
TOLERANCE = 2e-4


def assert_same_tokens(path: Path, values: Path, seed: int = 3) -> None:
    """`seed`: of a prompt at which no two tokens are nearly equally likely."""
    ours, theirs, prompt = ToyEngine(path), reference_model(values), random_ids(70, seed=seed)
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


@pytest.mark.parametrize("form", ["awq", "gptq"])
def test_4_bits_are_near_their_values_in_bfloat16_on_a_cpu(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, form: str
):
    """By torch's kernel, in a prompt, a short tail and a step of two requests. A wrong zero point is off by
    more than 1. One layer, since further ones of random weights only amplify a rounding.
    """
    path = tmp_path / form
    write_quantised(toy_checkpoint("llama", **SHAPE, num_hidden_layers=1), path, form)
    ours, exact = ToyEngine(path, dtype=torch.bfloat16), ToyEngine(path)
    packed = {tensor.dtype for name, tensor in ours.model.tensors() if name.endswith("qweight")}
    assert packed == {int4_cpu.STORED}
    prompt = random_ids(70, seed=3)
    for chunks in ((("a", prompt[:60]),), (("a", prompt[60:]), ("b", prompt[:5])), (("a", [7]), ("b", [9]))):
        found, expected = (engine.run(*chunks).logits.float() for engine in (ours, exact))
        assert float((found - expected).norm() / expected.norm()) < 0.1


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


def neighbours(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Each block's inputs with the scales of the next block."""
    by_rows = scales.roll(1, dims=1).repeat_interleave(128, dim=0)[: shape[0]]
    return by_rows.repeat_interleave(128, dim=1)[:, : shape[1]]


BUGS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], dict[str, object]]] = {
    "scales of another block": (
        "block",
        lambda patch: patch.setattr(fp8_scales, "expand_scales", neighbours),
        {},
    ),
    "zero points off by one": ("gptq", lambda patch: None, {"checkpoint_format": "gptq_v2"}),
    "order of words": (
        "awq",
        lambda patch: patch.setattr(int4_projection, "AWQ_ORDER", tuple(range(8))),
        {},
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_move_the_logits(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str
):
    """Each makes the laws above fail, by far."""
    form, plant, config = BUGS[bug]
    values = write_quantised(toy_checkpoint("llama", **SHAPE), tmp_path / form, form, **config)
    plant(monkeypatch)
    ours, prompt = ToyEngine(tmp_path / form), random_ids(30, seed=3)
    found = ours.run(("all", prompt)).logits
    error = (found - reference_logits(reference_model(values), prompt)).abs().max()
    assert error > 1000 * TOLERANCE, float(error)
