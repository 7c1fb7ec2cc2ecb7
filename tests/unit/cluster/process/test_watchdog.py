"""The watchdog ends a process that hangs in Python or in C, with or without the interpreter's lock."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest
from baton.cluster.process.watchdog import FEEDS_PER_LIMIT, Watchdog


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
}
MOVES = """
import os, signal, sys, time
from baton.cluster.process.watchdog import Watchdog
left = lambda: signal.getitimer(signal.ITIMER_REAL)[0]
threads = lambda: len(os.listdir("/proc/self/task"))
dog, alone = Watchdog(60.0), threads()
for now in (0.0, 3.0, 6.0):
    dog.feed(now)
    assert left() > 40.0, "the kernel's timer was wound up"
    while threads() != alone + 1:  # and so was faulthandler's: the thread before it ends when it gets a core
        time.sleep(0.01)
    signal.setitimer(signal.ITIMER_REAL, 20.0)  # as if 40 s had passed
dog.stop()
assert left() == 0.0
while threads() > alone:
    time.sleep(0.01)
sys.exit(5)
"""


@pytest.mark.parametrize("how", HANGS)
def test_a_hung_process_writes_its_stacks_and_dies(how):
    code = (
        "import ctypes, sys, time\nfrom baton.cluster.process.watchdog import Watchdog\ndog = Watchdog(0.2)\n"
    )
    body = textwrap.indent(HANGS[how], "    ")
    code += f"def stuck():\n    dog.feed(time.monotonic())\n{body}\nstuck()\n"  # armed in there
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGALRM
    assert "in stuck" in done.stderr
    assert time.monotonic() - began < 30


def test_each_feed_rearms_the_timers_and_an_orderly_end_stops_them():
    done = subprocess.run([sys.executable, "-c", MOVES], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (5, "")
