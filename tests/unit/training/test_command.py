"""`baton draft` from the command line, on a toy target."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from baton.engine.models.registry import load_model_config
from baton.engine.speculative.drafters.spec_config import load_draft_config
from baton.tests.unit.training.toy_run import VOCAB, ToyRun, toy_run
from baton.training.command import main
from baton.training.run_state import CURVE
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return toy_run(tmp_path_factory.mktemp("toy"))


def arguments(run: ToyRun, out: Path, *more: str) -> list[str]:
    return [
        "train", "--model", str(run.model), "--samples", str(run.model.parent / "samples"), "--out", str(out),
        "--layers", "1,2,4", "--steps", "3", "--max-tokens", "256", "--lr", "0.003", "--held-out", "4",
        "--device", "cpu", "--dtype", "float32", *more,
    ]  # fmt: skip


def test_train_writes_a_head_that_loads_and_says_its_accept_length(
    run: ToyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(run, tmp_path, "--epochs", "2", "--draft-vocab", "40")) == 0
    said = capsys.readouterr().out
    assert "layers [1, 2, 4], draft vocab 40, steps 3" in said
    assert "accept length 1." in said
    config = load_draft_config(tmp_path / "head", load_model_config(run.model))
    assert (config.aux.ids, config.draft_vocab_size, config.vocab_size) == ((1, 2, 4), 40, VOCAB)
    assert main([
        "evaluate", "--model", str(run.model), "--draft", str(tmp_path / "head"), "--samples",
        str(run.model.parent / "samples"), "--prompts", "4", "--steps", "2", "--tokens", "8",
        "--device", "cpu", "--dtype", "float32",
    ]) == 0  # fmt: skip
    assert "chains of 2" in capsys.readouterr().out


def options(run: ToyRun, out: Path, kind: str, *more: str) -> list[str]:
    """A run of another kind than `arguments` has."""
    return [
        "train", "--model", str(run.model), "--samples", str(run.model.parent / "samples"), "--out", str(out),
        "--kind", kind, "--max-tokens", "256", "--lr", "0.003", "--held-out", "1", "--device", "cpu",
        "--dtype", "float32", *more,
    ]  # fmt: skip


SMALL = {"dflash": ("--block", "4", "--draft-layers", "2", "--anchors", "8"), "mtp": ("--steps", "3")}


@pytest.mark.parametrize("kind", [pytest.param("dflash", marks=pytest.mark.slow), "mtp"])
def test_other_drafters_train_load_and_draft_better_than_at_first(
    run: ToyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    lengths = []
    for out, epochs in (("first", "1"), ("trained", "14")):
        rate = ("--lr", "1e-9") if out == "first" else ()
        more = (*SMALL[kind], "--epochs", epochs, *rate)
        assert main(options(run, tmp_path / out, kind, *more)) == 0
        progress = capsys.readouterr().err
        lengths.append(float(progress.rpartition("accept length ")[2].split()[0]))
    assert lengths[1] > lengths[0] + 0.2, lengths
    losses = [line[1] for line in curve(tmp_path / "trained")]
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])


def test_a_run_by_time_ends_in_time_and_starts_from_another_drafter(run: ToyRun, tmp_path: Path) -> None:
    assert (
        main(options(run, tmp_path / "long", "mtp", "--steps", "2", "--epochs", "8", "--held-out", "0")) == 0
    )
    begun = time.monotonic()
    more = (
        "--steps",
        "2",
        "--minutes",
        "0.003",
        "--held-out",
        "0",
        "--init",
        str(tmp_path / "long" / "head"),
    )
    assert main(options(run, tmp_path / "short", "mtp", *more)) == 0
    assert time.monotonic() - begun < 30
    first, last = curve(tmp_path / "long")[0][1], curve(tmp_path / "long")[-1][1]
    assert abs(curve(tmp_path / "short")[0][1] - last) < 0.5 * (first - last)


def test_a_head_of_another_vocabulary_takes_the_rows_that_both_have(run: ToyRun, tmp_path: Path) -> None:
    first = (*("--epochs", "2", "--held-out", "0"), "--draft-vocab", "40")
    assert main(arguments(run, tmp_path / "one", *first)) == 0
    start = ("--epochs", "1", "--held-out", "0", "--lr", "1e-12", "--init", str(tmp_path / "one" / "head"))
    for out, more, size in (("same", (), 40), ("wider", ("--draft-vocab", "50"), 50)):
        assert main(arguments(run, tmp_path / out, *start, *more)) == 0
        one, other = (load_file(tmp_path / name / "head" / "model.safetensors") for name in ("one", out))
        rows = []
        for found in (one, other):
            ids = (found["d2t"] + torch.arange(len(found["d2t"]))).tolist()
            rows.append(dict(zip(ids, found["lm_head.weight"], strict=True)))
        assert len(rows[1]) == size
        common = rows[0].keys() & rows[1].keys()
        assert len(common) > 30
        assert all(torch.equal(rows[0][token], rows[1][token]) for token in common)
        assert torch.equal(one["fc.weight"], other["fc.weight"])
    whole = ("--epochs", "1", "--held-out", "0", "--lr", "1e-12")
    assert main(arguments(run, tmp_path / "whole", *whole)) == 0
    assert main(arguments(run, tmp_path / "part", *whole, "--init", str(tmp_path / "whole" / "head"),
                          "--draft-vocab", "40")) == 0  # fmt: skip


@pytest.mark.parametrize(
    ("more", "code", "error"),
    [
        (("--layers", "1,x"), 2, "--layers '1,x'"),
        (("--layers", "1,1"), 1, "names a layer"),
        (("--layers", "9"), 1, "out of range"),
        (("--layers", "1,6"), 1, "inputs of layers"),
        (("--draft-vocab", "65"), 1, "--draft-vocab 65"),
        (("--block", "4"), 2, "--block: --kind eagle3 has no such option"),
        (("--init", "nowhere"), 2, "--init 'nowhere'"),
        (("--held-out", "48"), 1, "48 of 48 samples"),
        (("--samples", "nowhere"), 1, "nowhere"),
        (("--model", "nowhere"), 2, "--model 'nowhere'"),
    ],
)
def test_bad_values_end_in_one_line(
    run: ToyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    code: int,
    error: str,
) -> None:
    assert main(arguments(run, tmp_path, *more)) == code
    said = capsys.readouterr().err
    assert error in said
    assert said.count("\n") == 1


def test_a_refused_run_leaves_the_head_of_the_run_before(run: ToyRun, tmp_path: Path) -> None:
    assert main(arguments(run, tmp_path, "--epochs", "1", "--held-out", "0")) == 0
    head = {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()}
    assert json.loads(head["config.json"])["draft_vocab_size"] is None
    assert main(arguments(run, tmp_path, "--epochs", "1", "--held-out", "0", "--layers", "1,3,4")) == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()} == head


def curve(folder: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / "run" / CURVE).read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", *SMALL])
def test_a_run_killed_three_times_has_the_curve_of_an_unbroken_one(
    run: ToyRun, tmp_path: Path, kind: str
) -> None:
    more = ("--epochs", "40", "--save-every", "5", "--held-out", "0", *SMALL.get(kind, ("--steps", "3")))
    command = [sys.executable, "-m", "baton", "draft", *options(run, tmp_path / "broken", kind, *more)]
    assert main(options(run, tmp_path / "whole", kind, *more)) == 0
    path = tmp_path / "broken" / "run" / CURVE
    for steps in (7, 60, 121):
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and child.poll() is None:
            if path.exists() and path.read_text().count("\n") >= steps:
                break
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert curve(tmp_path / "broken") == curve(tmp_path / "whole")


@pytest.mark.slow
def test_two_ranks_end_with_equal_weights_near_those_of_one(run: ToyRun, tmp_path: Path) -> None:
    more = ("--epochs", "10", "--held-out", "0")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", "2", "-m", "baton", "draft", *arguments(run, tmp_path / "two", *more),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 x cpu" in done.stdout
    assert main(arguments(run, tmp_path / "one", *more)) == 0
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert len(one) // 2 - len(two) in range(11)
    assert abs(two[-1][1] - one[len(two) - 1][1]) < 1.0
