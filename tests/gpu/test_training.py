"""Training on a GPU: the flash kernel's joint attention, the loss kernels, and runs of every kind."""

import json
from pathlib import Path

import pytest
import torch
from baton.tests.unit.training.toy_run import ToyRun, toy_run
from baton.training import trainer as training_loop
from baton.training.chain_attention import chain_attention, plain_chain_attention
from baton.training.command import main
from baton.training.optimizers import ADAMW, MUON
from baton.training.run_state import CURVE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return toy_run(tmp_path_factory.mktemp("toy"))


def test_chains_of_the_flash_kernel_attend_as_defined_with_all_gradients() -> None:
    generator = torch.Generator("cuda").manual_seed(2)

    def random(heads: int) -> torch.Tensor:
        shape, dtype = (2, heads, 200, 64), torch.bfloat16
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype).requires_grad_()

    q, given = random(9), random(9).detach()
    steps = [(random(3), random(3)) for _ in range(4)]
    leaves = [q, *(x for pair in steps for x in pair)]
    out = chain_attention(q, steps)
    wanted = plain_chain_attention(q.float(), [(k.float(), v.float()) for k, v in steps])
    ours = torch.autograd.grad(out, leaves, given)
    theirs = torch.autograd.grad(wanted, leaves, given.float())
    for one, other in zip((out, *ours), (wanted, *theirs), strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("eagle3", ("--layers", "1,2,4", "--steps", "3", "--draft-vocab", "40")),
        ("mtp", ("--steps", "3")),
        ("dflash", ("--block", "4", "--draft-layers", "2", "--anchors", "8")),
        ("eagle3", ("--layers", "1,2,4", "--steps", "3", "--draft-vocab", "40", "--missed", "0.5")),
        ("mtp", ("--steps", "3", "--loss-vocab", "56", "--missed", "0.5", "--optimizer", "muon")),
        (
            "dflash",
            (
                *("--block", "4", "--draft-layers", "2", "--anchors", "8"),
                "--loss-vocab",
                "56",
                "--optimizer",
                "muon",
            ),
        ),
    ],
)
def test_a_run_in_bfloat16_lowers_the_loss_and_drafts(
    run: ToyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, more: tuple[str, ...]
) -> None:
    assert main([
        "train", "--model", str(run.model), "--samples", str(run.model.parent / "samples"), "--out",
        str(tmp_path), "--kind", kind, "--max-tokens", "256", "--lr", "0.003", "--held-out", "4", "--epochs",
        "30", "--device", "cuda", *more,
    ]) == 0  # fmt: skip
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / CURVE).read_text().splitlines()]
    # drafts behind right ones weigh more, so that a better head may have a greater loss
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5]) or "--missed" in more
    assert float(capsys.readouterr().out.partition("accept length ")[2].split()[0]) > 1.2


@pytest.mark.parametrize("optimizer", [ADAMW, MUON])
def test_a_run_that_was_killed_goes_on_from_its_state(
    run: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """What fused optimizers keep must be on the GPU, unlike a state just read."""
    arguments = [
        "train", "--model", str(run.model), "--samples", str(run.model.parent / "samples"), "--out",
        str(tmp_path), "--kind", "mtp", "--steps", "3", "--max-tokens", "256", "--lr", "0.003",
        "--held-out", "0", "--epochs", "4", "--save-every", "3", "--device", "cuda", "--optimizer", optimizer,
    ]  # fmt: skip
    rates = training_loop.learning_rate

    class Killed(Exception):
        pass

    def until_step_5(step: int, total: int, settings: training_loop.TrainSettings) -> float:
        if step >= 5:
            raise Killed
        return rates(step, total, settings)

    with monkeypatch.context() as patch:
        patch.setattr(training_loop, "learning_rate", until_step_5)
        with pytest.raises(Killed):
            main(arguments)
    assert main(arguments) == 0
    torch.cuda.synchronize()
    curve = [json.loads(line) for line in (tmp_path / "run" / CURVE).read_text().splitlines()]
    assert [line["step"] for line in curve] == list(range(1, len(curve) + 1))
    assert len(curve) > 6
    assert curve[-1]["loss"] < curve[0]["loss"]
