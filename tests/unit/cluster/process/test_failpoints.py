"""Faults on request: they happen at the nth reach of their site, and never without permission."""

import signal
import subprocess
import sys
import threading
import time

import pytest
from baton.cluster.errors import ConfigError
from baton.cluster.process.failpoints import PAUSE_S, Failpoints, perform, reach_of, read_faults, unarmed

ALLOWED = {"BATON_ALLOW_FAULTS": "1"}


def test_a_fault_happens_at_the_nth_reach_of_its_own_site_and_only_then():
    happened = []
    faults = read_faults({"BATON_FAULT": "decode:step:2:raise,prefill:chunk:1", **ALLOWED})
    points = Failpoints(faults, act=happened.append)
    for _ in range(4):
        points.reach("decode:step")
    assert [(fault.site, fault.action) for fault in happened] == [("decode:step", "raise")]
    points.reach("prefill:chunk")
    assert (happened[-1].site, happened[-1].action) == ("prefill:chunk", "kill")


def test_a_site_that_several_threads_reach_has_its_fault_once():
    class Site(str):
        __slots__ = ()

        def __hash__(self):
            time.sleep(0)  # another thread's turn, while the site is looked up
            return super().__hash__()

    happened, count = [], 200
    text = ",".join(f"tier:fetch:{4 * count - nth}" for nth in range(100))
    points = Failpoints(read_faults({"BATON_FAULT": text, **ALLOWED}), act=happened.append)

    def reach():
        for _ in range(count):
            points.reach(Site("tier:fetch"))

    threads = [threading.Thread(target=reach) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(happened) == len(set(happened)) == 100


def test_without_the_variable_a_site_is_a_function_that_does_nothing():
    assert reach_of({}) is unarmed
    assert reach_of(ALLOWED) is unarmed
    assert reach_of({"BATON_FAULT": ""}) is unarmed


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("decode:step", "site:nth"),
        ("decode:step:0", "site:nth"),
        ("decode:step:1:explode", "explode"),
        ("decode:stop:1", "decode:stop"),
        ("decode:step:1,", "site:nth"),
    ],
)
def test_an_unknown_fault_is_refused_and_named(text, word):
    with pytest.raises(ConfigError, match=word):
        read_faults({"BATON_FAULT": text, **ALLOWED})


@pytest.mark.parametrize("action", ["kill", "abort", "raise"])
def test_each_action_ends_the_process_in_its_way(action):
    code = (
        f"from baton.cluster.process.failpoints import Fault, perform; perform(Fault(site='s', nth=1, "
        f"action={action!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd="/", check=False)
    assert ended.returncode == {"kill": -signal.SIGKILL, "abort": -signal.SIGABRT, "raise": 1}[action]
    assert (b"FaultInjected" in ended.stderr) == (action == "raise")


def test_a_pause_ends(monkeypatch):
    slept = []
    monkeypatch.setattr("baton.cluster.process.failpoints.time.sleep", slept.append)
    perform(read_faults({"BATON_FAULT": "decode:step:1:pause", **ALLOWED})[0])
    assert slept == [PAUSE_S]


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_no_role_starts_with_a_fault_without_permission(role):
    ended = subprocess.run(
        [sys.executable, "-m", f"baton.{role}", "--model=/nowhere"], cwd="/", check=False,
        capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "BATON_FAULT": "decode:step:1"},
    )  # fmt: skip
    lines = [line for line in ended.stderr.splitlines() if line.startswith(f"baton {role}: ")]
    assert ended.returncode == 2
    assert len(lines) == 1
    assert "BATON_ALLOW_FAULTS" in lines[0]


def test_another_rank_of_a_worker_has_faults_of_its_own():
    env = {"BATON_FAULT_RANK_2": "sender:block:1:raise", **ALLOWED}
    assert reach_of(env) is reach_of(env, rank=1) is unarmed
    with pytest.raises(RuntimeError):
        reach_of(env, rank=2)("sender:block")
    with pytest.raises(ConfigError, match="BATON_FAULT_RANK_2=sender:block:1"):
        reach_of({"BATON_FAULT_RANK_2": "sender:block:1"}, rank=2)
