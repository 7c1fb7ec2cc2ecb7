"""Supervision of children: restarts, pauses, giving up and ending, on a fake clock with fake processes."""

import io
import itertools
import json
import logging
import os
import random
import signal
import sys
import threading
import time

import psutil
import pytest
from baton.cluster.process.process import EXIT_AGAIN
from baton.deploy.up.supervise import (
    FORGIVEN_AFTER_S,
    KILL_AFTER_S,
    LONGEST_PAUSE_S,
    STUCK_S,
    TERM_AGAIN_S,
    ChildSpec,
    SpawnedProcess,
    Supervisor,
    pause_after,
)


class FakeProcess:
    """A child whose end the test decides; `patience` is how many SIGTERMs it takes."""

    def __init__(self, pid, patience=1):
        self.pid, self.code, self.line, self.received, self._patience = pid, None, "", [], patience

    def poll(self):
        return self.code

    def terminate(self):
        self.received.append("term")
        if self.received.count("term") >= self._patience:
            self.code = 0

    def kill(self):
        self.received.append("kill")
        self.code = -signal.SIGKILL

    def finish(self, patience_s=0.0):
        return self.line


class World:
    """A supervisor of fake children and the clock that both live by."""

    def __init__(self, names=("router",), patience=1):
        self.now, self.patience, self.spawned = 0.0, patience, []
        specs = [ChildSpec(name=name, role=name, argv=("x",), env={}, cwd="/") for name in names]
        self.supervisor = Supervisor(
            specs, self.spawn, clock=lambda: self.now, sleep=self.sleep, rng=random.Random(1)
        )

    def spawn(self, spec):
        process = FakeProcess(len(self.spawned) + 1, self.patience)
        self.spawned.append((self.now, spec.name, process))
        return process

    def sleep(self, seconds):
        self.now += seconds

    def run(self, seconds, step=0.01):
        end = self.now + seconds
        while self.now < end:
            self.supervisor.step()
            self.now += step

    @property
    def last(self):
        return self.spawned[-1][2]


def test_a_drain_ends_the_first_child_alone_and_waits_for_it():
    world = World(("router", "prefill-0"))
    world.run(0.1)
    router, prefill = (process for _, _, process in world.spawned)
    router.terminate = lambda: router.received.append("drain")
    ends_at = world.now + 7.0
    router.poll = lambda: 0 if world.now >= ends_at else None
    world.supervisor.drain("router", 30.0)
    assert ends_at <= world.now < ends_at + 0.1
    assert (router.received, prefill.received) == (["drain"], [])
    world.supervisor.stop()
    assert prefill.received == ["term"]


def test_the_wait_for_a_drain_ends_at_its_limit_or_when_hurried():
    for hurried in (False, True):
        world = World(("router",), patience=99)
        world.run(0.1)
        began, hurry = world.now, threading.Event()
        if hurried:
            world.last.terminate = hurry.set
        world.supervisor.drain("router", 9.0, hurry)
        assert world.now - began == pytest.approx(0.0 if hurried else 9.0, abs=0.1)


def test_children_start_at_once_and_are_left_alone_while_they_run():
    world = World(("router", "prefill-0", "decode-0"))
    world.run(5.0)
    assert [(now, name) for now, name, _ in world.spawned] == [
        (0.0, "router"),
        (0.0, "prefill-0"),
        (0.0, "decode-0"),
    ]


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGSEGV, 70, 0, 3])
def test_a_crashed_child_is_restarted_after_half_a_second(code):
    world = World(("router", "decode-0"))
    world.run(1.0)
    world.last.code = code
    died = world.now
    world.run(1.0)
    assert [name for _, name, _ in world.spawned] == ["router", "decode-0", "decode-0"]
    assert 0.5 <= world.spawned[-1][0] - died <= 0.7
    assert not world.supervisor.failure


def test_pauses_double_up_to_the_longest_and_carry_jitter():
    pauses = [pause_after(failures, random.Random(failures)) for failures in range(1, 40)]
    for failures, pause in enumerate(pauses, 1):
        assert min(0.5 * 2 ** (failures - 1), LONGEST_PAUSE_S) <= pause <= LONGEST_PAUSE_S
    assert len({pause_after(1, random.Random(seed)) for seed in range(10)}) == 10


def test_a_child_that_keeps_crashing_is_started_less_and_less_often():
    world = World()
    for _ in range(40 * 60):
        world.run(0.1)
        if world.last.code is None:
            world.last.code = -11
    assert len(world.spawned) <= 15
    assert world.spawned[-1][0] - world.spawned[-2][0] >= LONGEST_PAUSE_S - 0.1


def test_a_long_life_forgives_earlier_failures():
    world = World()
    for _ in range(5):
        world.run(0.1)
        world.last.code = 70
        world.run(LONGEST_PAUSE_S)
    assert world.supervisor.children[0].num_failures == 5
    world.run(FORGIVEN_AFTER_S)
    world.last.code = 70
    died = world.now
    world.run(1.0)
    assert world.spawned[-1][0] - died <= 0.7


@pytest.mark.parametrize("code", [1, 2])
def test_a_child_that_fails_its_first_start_ends_up_with_error_and_code(code):
    world = World(("router", "prefill-0"))
    world.run(0.1)
    world.last.code, world.last.line = code, "missing shard model-2.safetensors"
    world.run(5.0)
    assert world.supervisor.failure == "prefill-0: missing shard model-2.safetensors"
    assert world.supervisor.failure_code == code
    assert len(world.spawned) == 2


def test_a_child_that_cannot_start_again_is_tried_again():
    world = World()
    world.run(0.1)
    world.last.code = -9
    world.run(1.0)
    world.last.code = 1
    world.run(3.0)
    assert not world.supervisor.failure
    assert len(world.spawned) == 3


def test_a_missing_command_ends_the_launcher_with_an_error():
    def spawn(spec):
        raise FileNotFoundError(2, "No such file or directory")

    supervisor = Supervisor([ChildSpec(name="router", role="router", argv=("nope",), env={}, cwd="/")], spawn)
    supervisor.step()
    assert supervisor.failure == "router: cannot run nope: No such file or directory"


@pytest.mark.parametrize(
    ("patience", "received", "seconds"),
    [
        (1, ["term"], 0.1),
        (2, ["term", "term"], TERM_AGAIN_S + 0.1),
        (99, ["term", "term", "kill"], KILL_AFTER_S + 0.1),
    ],
)
def test_stop_escalates_and_ends_within_5_s(patience, received, seconds):
    world = World(("router", "decode-0"), patience=patience)
    world.run(1.0)
    began = world.now
    world.supervisor.stop()
    assert world.now - began <= seconds < 5.0
    assert [process.received for _, _, process in world.spawned] == [received, received]
    assert "0 of 2 up" in repr(world.supervisor)


def test_a_second_stop_kills_the_children_at_once():
    world = World(patience=99)
    world.run(0.1)
    hurry = threading.Event()
    hurry.set()
    began = world.now
    world.supervisor.stop(hurry)
    assert world.now - began < 0.1


def test_a_child_that_outlives_sigkill_is_told_once(caplog):
    world = World(patience=9)
    world.supervisor.step()
    process = world.spawned[0][2]
    process.kill = lambda: process.received.append("kill")

    def sleep(seconds):
        world.now += seconds
        if world.now > STUCK_S + 5:
            process.code = -signal.SIGKILL

    world.supervisor._sleep = sleep
    world.supervisor.stop()
    assert [record.levelname for record in caplog.records if "SIGKILL" in record.message] == ["ERROR"]


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_a_real_child_gets_signals_after_the_clock_was_set(monkeypatch, end):
    """psutil compares times of creation, which some of its releases compute by the system's clock."""
    times = itertools.count()
    monkeypatch.setattr(psutil.Process, "_get_ident", lambda process: (process.pid, next(times)))
    argv = ("sh", "-c", "sleep 60 & wait")
    spec = ChildSpec(name="child", role="router", argv=argv, env=dict(os.environ), cwd="/")
    child = SpawnedProcess(spec, io.StringIO(), "error: ")
    try:
        getattr(child, end)()
        deadline = time.monotonic() + 10
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert child.poll() in (-signal.SIGTERM, -signal.SIGKILL)
    finally:
        child.finish()


@pytest.mark.parametrize(
    ("code", "level", "reason"),
    [
        (0, logging.INFO, "drained"),
        (EXIT_AGAIN, logging.INFO, "restart ordered"),
        (70, logging.WARNING, "unknown"),
    ],
)
def test_an_end_that_was_asked_for_is_no_warning(caplog, code, level, reason):
    caplog.set_level(logging.INFO)
    world = World()
    world.supervisor.step()
    world.spawned[0][2].code = code
    world.supervisor.step()
    (record,) = caplog.records
    assert (record.levelno, record.fields["reason"]) == (level, reason)
    world.now += 60
    world.supervisor.step()
    assert len(world.spawned) == 2, "it starts again all the same"


def test_with_json_logs_lines_of_a_child_are_objects_that_name_it():
    script = 'print(\'{"level": "info", "message": "a"}\'); print("[1, 2]"); print("Fatal: \\"x\\"")'
    spec = ChildSpec(name="decode-0", role="decode", argv=(sys.executable, "-c", script), env={}, cwd="/")
    output = io.StringIO()
    process = SpawnedProcess(spec, output, "baton decode: ", as_json=True)
    while process.poll() is None:
        time.sleep(0.01)
    process.finish(30)
    assert [json.loads(line) for line in output.getvalue().splitlines()] == [
        {"child": "decode-0", "level": "info", "message": "a"},
        {"child": "decode-0", "message": "[1, 2]"},
        {"child": "decode-0", "message": 'Fatal: "x"'},
    ]
