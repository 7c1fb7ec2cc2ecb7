"""Captured features are the named layers' outputs in the named order on every path, or start-up fails."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.batch.forward_batch import CaptureHidden
from baton.engine.errors import CheckpointError, LifecycleError
from baton.engine.runner.model_runner import ModelRunner
from baton.tests.parity.toy_engine import ToyEngine, random_ids
from baton.tests.parity.toy_models import reference_model
from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 12
PROMPT = random_ids(60, seed=9)


@pytest.fixture(scope="module")
def checkpoint(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def layer_outputs(checkpoint: Path) -> list[torch.Tensor]:
    """Output of every layer over PROMPT, by hooks on transformers' modules; its last hidden is normed."""
    model: PreTrainedModel = reference_model(checkpoint)
    seen: list[torch.Tensor] = []

    def keep(
        _module: torch.nn.Module, _inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output).reshape(len(PROMPT), -1))

    for layer in model.model.layers:
        layer.register_forward_hook(keep)
    with torch.no_grad():
        model(torch.tensor([PROMPT]))
    assert len(seen) == LAYERS
    return seen


def assert_features(features: torch.Tensor | None, expected: list[torch.Tensor]) -> None:
    assert features is not None
    torch.testing.assert_close(features, torch.cat(expected, dim=-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "ids",
    [(1, 5, 9), (9, 1, 5), (LAYERS - 1,), (0, LAYERS - 1, 3, 7, 2)],
    ids=["sorted", "unsorted", "last", "five"],
)
def test_features_are_the_named_layers_outputs_in_the_order_given(
    checkpoint: Path, layer_outputs: list[torch.Tensor], ids: tuple[int, ...]
):
    output = ToyEngine(checkpoint, ids).run(("a", PROMPT), capture=CaptureHidden.FULL)
    assert_features(output.hidden, [layer_outputs[i] for i in ids])


def test_a_neighbouring_layer_is_told_apart(checkpoint: Path, layer_outputs: list[torch.Tensor]):
    output = ToyEngine(checkpoint, (2, 5, 9)).run(("a", PROMPT), capture=CaptureHidden.FULL)
    with pytest.raises(AssertionError):
        assert_features(output.hidden, [layer_outputs[i] for i in (1, 5, 9)])


def test_chunks_decode_and_verify_capture_the_same_features(
    checkpoint: Path, layer_outputs: list[torch.Tensor]
):
    engine = ToyEngine(checkpoint, (1, 5, 9))
    parts, start = [], 0
    for size in (17, 32, 1, 1, 4, 5):
        chunk = ("a", PROMPT[start : start + size])
        output = engine.run(chunk, ("other", PROMPT[:size]), capture=CaptureHidden.FULL)
        assert output.hidden is not None
        parts.append(output.hidden[:size])
        start += size
    assert start == len(PROMPT)
    assert_features(torch.cat(parts), [layer_outputs[i] for i in (1, 5, 9)])


def test_capturing_changes_no_logit_and_is_off_unless_asked(checkpoint: Path):
    plain, capturing = ToyEngine(checkpoint), ToyEngine(checkpoint, (1, 5, 9))
    expected = plain.run(("a", PROMPT))
    captured = capturing.run(("a", PROMPT), capture=CaptureHidden.FULL)
    assert expected.hidden is None
    assert torch.equal(expected.logits, captured.logits)
    assert capturing.run(("b", PROMPT)).hidden is None


def test_an_idle_batch_has_features_of_the_full_width(checkpoint: Path):
    output = ToyEngine(checkpoint, (1, 5, 9)).run(capture=CaptureHidden.FULL)
    assert output.hidden is not None
    assert output.hidden.shape == (0, 3 * 64)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ((1, 5, 1), ["[1, 5, 1]", "1 is listed twice"]),
        ((1, LAYERS), ["[1, 12]", "12 is not a layer", "0 to 11"]),
        ((-1,), ["[-1]", "-1 is not a layer"]),
    ],
)
def test_duplicates_and_layers_that_do_not_exist_are_refused(
    checkpoint: Path, ids: tuple[int, ...], words: list[str]
):
    engine = ToyEngine(checkpoint)
    with pytest.raises(CheckpointError) as caught:
        engine.runner.set_aux_layer_ids(ids)
    assert all(word in str(caught.value) for word in [*words, "LlamaForCausalLM"]), caught.value
    assert engine.model.aux_layer_ids is None


def test_a_second_choice_of_layers_must_equal_the_first(checkpoint: Path):
    engine = ToyEngine(checkpoint, (1, 5, 9))
    engine.runner.set_aux_layer_ids((1, 5, 9))
    with pytest.raises(LifecycleError, match=r"\[9, 5, 1\].*already configured as \[1, 5, 9\]"):
        engine.runner.set_aux_layer_ids((9, 5, 1))


def test_a_model_without_the_hook_is_refused_by_its_class(checkpoint: Path):
    engine = ToyEngine(checkpoint)

    class Hookless:
        def __init__(self) -> None:
            self.config, self.dtype, self.device = engine.config, engine.model.dtype, engine.model.device
            self.embed, self.body, self.compute_logits = (
                engine.model.embed,
                engine.model.body,
                engine.model.compute_logits,
            )

    runner = ModelRunner(Hookless(), engine.pool)
    with pytest.raises(CheckpointError, match="Hookless cannot capture layer outputs"):
        runner.set_aux_layer_ids((1, 5, 9))


def test_asking_for_hidden_rows_before_any_layer_is_chosen_raises(checkpoint: Path):
    with pytest.raises(LifecycleError, match="set_aux_layer_ids first"):
        ToyEngine(checkpoint).run(("a", PROMPT), capture=CaptureHidden.FULL)
