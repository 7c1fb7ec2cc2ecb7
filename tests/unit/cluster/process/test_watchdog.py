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
import signal, sys, time
from baton.cluster.process.watchdog import Watchdog
left = lambda: signal.getitimer(signal.ITIMER_REAL)[0]
dog = Watchdog(60.0)
for now in (0.0, 3.0, 6.0):
    dog.feed(now)
    assert left() == 0.0, "the second step has not begun"
    signal.setitimer(signal.ITIMER_REAL, 20.0)  # as if the first step were over
dog.stop()
assert left() == 0.0
sys.exit(5)
"""
LIMIT_S = 1.5
LIVES = f"""
import sys, time
from baton.cluster.process.watchdog import Watchdog
dog = Watchdog({LIMIT_S})
dog.feed(time.monotonic())
print("armed", flush=True)
began = time.monotonic()
while time.monotonic() - began < {LIMIT_S} + 2.5:
    dog.feed(time.monotonic())
    time.sleep(0.05)
dog.stop()
sys.exit(5)
"""


def hanging(how):
    """A program that hangs with a watchdog of 0.2 s armed."""
    body = textwrap.indent(HANGS[how], "    ")
    return (
        "import ctypes, sys, time\nfrom baton.cluster.process.watchdog import Watchdog\ndog = Watchdog(0.2)\n"
        f"def stuck():\n    dog.feed(time.monotonic())\n{body}\nstuck()\n"
    )


@pytest.fixture(scope="module")
def programs():
    """Running at once, since most of the time they wait: those of HANGS by name, and LIVES."""
    codes = {"lives": LIVES, **{how: hanging(how) for how in HANGS}}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = {name: subprocess.Popen([sys.executable, "-c", code], **pipes) for name, code in codes.items()}
    yield running
    for process in running.values():
        process.kill()
        process.communicate()


def test_a_pause_of_the_process_is_no_hang(programs):
    process = programs["lives"]
    assert process.stdout.readline() == "armed\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(LIMIT_S + 1.0)
    process.send_signal(signal.SIGCONT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (5, ""), "no stacks, no signal"


@pytest.mark.parametrize("how", HANGS)
def test_a_hung_process_writes_its_stacks_and_dies(how, programs):
    _, said = programs[how].communicate(timeout=30)
    assert programs[how].returncode == -signal.SIGALRM
    assert "in stuck" in said


def test_each_feed_rearms_the_timers_and_an_orderly_end_stops_them():
    done = subprocess.run([sys.executable, "-c", MOVES], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (5, "")
