"""A worker that is killed at every point of its tiers' input and output, and started again: the same tokens.

The worker is a process with its engine, threads and files, without a router.
"""

import json
import os
import signal
import subprocess
import sys

import pytest
from baton.tests.sim.tiered_decode import told_without_tiers

POINTS = (
    pytest.param("tier:save:4", marks=pytest.mark.slow),
    pytest.param("tier:load:2", marks=pytest.mark.slow),
    pytest.param("tier:clear:9", marks=pytest.mark.slow),
    "tier:write:9",
    pytest.param("tier:index:9", marks=pytest.mark.slow),
    pytest.param("tier:fetch:2", marks=pytest.mark.slow),
)
LIFE_S = 120


@pytest.fixture(scope="module")
def target(toy_checkpoint):
    return toy_checkpoint("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def expected(target):
    return told_without_tiers(target)


def lived(target, disk, fault=""):
    """(exit code, pages found on disk, [tokens, cached] of each turn, log lines) of one life of a worker."""
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"BATON_FAULT": fault, "BATON_ALLOW_FAULTS": "1"} if fault else {}
    command = [sys.executable, "-m", "baton.tests.sim.tiered_decode", str(target), str(disk)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIFE_S, check=False)
    found, *turns = [json.loads(line) for line in ended.stdout.splitlines()]
    return ended.returncode, found, turns, [line for line in ended.stderr.splitlines() if "WARNING" in line]


@pytest.mark.parametrize("point", POINTS)
def test_a_worker_killed_at_a_point_of_its_tiers_gives_the_same_tokens(target, expected, tmp_path, point):
    if "load" in point or "fetch" in point:
        assert lived(target, tmp_path)[0] == 0  # an earlier life leaves pages to be read
    code, _, before, _ = lived(target, tmp_path, point)
    assert code == -signal.SIGKILL
    assert [tokens for tokens, _ in before] == expected[: len(before)]
    code, found, turns, lines = lived(target, tmp_path)
    assert code == 0
    assert [tokens for tokens, _ in turns] == expected
    assert found > 0 or "save" in point, "what was complete on disk is found again"
    assert lines == []
