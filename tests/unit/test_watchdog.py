"""A process that hangs, in Python or in C, with or without the interpreter's lock, is ended from outside of it."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest
from baton.cluster.watchdog import FEEDS_PER_LIMIT, Watchdog


class FakeTimer:
    def __init__(self):
        self.armed = []

    def arm(self, seconds):
        self.armed.append(seconds)

    def disarm(self):
        self.armed.append(None)


def test_feeds_in_quick_succession_arm_once():
    timer = FakeTimer()
    dog = Watchdog(20.0, timer)
    step = 20.0 / FEEDS_PER_LIMIT
    for now in (5.0, 5.0 + step / 2, 5.0 + step, 5.1 + step, 5.0 + 3 * step):
        dog.feed(now)
    assert timer.armed == [20.0, 20.0, 20.0]
    dog.stop()
    dog.stop()
    assert timer.armed[3:] == [None]


def test_a_limit_of_zero_is_off():
    timer = FakeTimer()
    dog = Watchdog(0.0, timer)
    dog.feed(1.0)
    dog.stop()
    assert timer.armed == []
    assert repr(dog) == "Watchdog(off)"


HANGS = {
    "in Python": "while True: pass",
    "in C without the lock": "time.sleep(60)",
    "in C with the lock": "ctypes.PyDLL(None).sleep(60)",
    "not at all": "for _ in range(12): time.sleep(0.1); dog.feed(time.monotonic())\ndog.stop(); time.sleep(2); sys.exit(5)",
}


@pytest.mark.parametrize("how", HANGS)
def test_a_hung_process_writes_its_stacks_and_dies_and_one_that_moves_lives(how):
    code = "import ctypes, sys, time\nfrom baton.cluster.watchdog import Watchdog\n"
    body = textwrap.indent(HANGS[how], "    ")
    limit_s = 1.0 if how == "not at all" else 0.2
    code += f"dog = Watchdog({limit_s})\ndog.feed(time.monotonic())\ndef stuck():\n{body}\nstuck()\n"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    if how == "not at all":
        assert (done.returncode, done.stderr) == (5, "")
    else:
        assert done.returncode == -signal.SIGALRM
        assert "in stuck" in done.stderr
        assert time.monotonic() - began < 20
