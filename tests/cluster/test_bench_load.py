"""`baton bench load` measures the processes of two ranks, and refuses what they cannot load."""

import json
from collections.abc import Callable
from pathlib import Path

from baton.tests.cluster.test_bench_transfer import run


def test_two_ranks_read_their_parts_once(toy_checkpoint: Callable[..., Path], tmp_path: Path):
    path = toy_checkpoint("llama", hidden_size=256, intermediate_size=1024, vocab_size=8192)
    out = tmp_path / "out.json"
    flags = ("--tp", "2", "--device", "cpu", "--dtype", "float32", "--rounds", "1", "--json", str(out))
    done = run("load", str(path), *flags)
    assert done.returncode == 0, done.stderr
    (readings,) = json.loads(out.read_text())["rounds"]
    assert {(each["way"], each["cache"]) for each in readings} >= {
        ("plain reads", "cold"),
        ("loader", "cold"),
        ("loader", "from cache"),
    }
    size = (path / "model.safetensors").stat().st_size
    for loader in (each for each in readings if each["way"] == "loader"):
        assert 0.9 * size < loader["num_bytes"] < 1.2 * size, "each byte is read by one rank"
        ranks = loader["ranks"]
        assert sum(rank["held_bytes"] for rank in ranks) >= 0.95 * size
        assert all(rank["peak_bytes"] >= rank["before_bytes"] > 0 for rank in ranks)
    assert "| loader | cold |" in done.stdout


def test_a_checkpoint_that_cannot_be_cut_is_one_line(toy_checkpoint: Callable[..., Path]):
    done = run("load", str(toy_checkpoint("llama")), "--tp", "3", "--device", "cpu")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("baton bench load: tp 3: the model at ")
