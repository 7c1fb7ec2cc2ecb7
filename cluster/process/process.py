"""The life of a process: start in phases, serve, drain, leave.

    phases    each is logged with its time; an error ends the process with one line on stderr and exit code 1,
              or 2 for a wrong setting
    serving   a crash is logged with its traceback; exit code 70
    SIGTERM   (or SIGINT) sets `drain`: no new work is accepted, running work finishes
    second    sets `stop`: the process leaves now; a third signal ends it at once

A child of `baton up` asks the kernel to be sent SIGTERM when its parent dies, so no worker outlives its
launcher.
"""

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from ..errors import BatonError, ConfigError
from .failpoints import read_faults
from .log import PACKAGE, fields, is_json

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_CANNOT_START = 1
EXIT_USAGE = 2  # a wrong setting; the same as argparse's
EXIT_AGAIN = 75  # EX_TEMPFAIL: the process wants to be started again
EXIT_OTHER_ROLE = 79  # the process goes on in another role; no supervisor sees it
EXIT_CRASHED = 70  # EX_SOFTWARE of sysexits.h
EXIT_INTERRUPTED = 130

# Longest time for which a computing thread keeps the interpreter lock from a thread that moves blocks and
# needs it after each copy. CPython's default of 5 ms is longer than a decode step.
SWITCH_INTERVAL_S = 0.0002

# audit event: from here on messages of peers are read, and an audit hook may be strict
SERVING = f"{PACKAGE}.serving"
PARENT_VARIABLE = "BATON_PARENT_PID"  # set by the launcher for its children
# also set by the launcher, which reads a router's /status with it and without an API key
OPERATOR_VARIABLE = "BATON_OPERATOR_TOKEN"
PR_SET_PDEATHSIG = 1

Phase = tuple[str, Callable[[], None]]
Serve = Callable[[], int]


def run_phases(
    phases: Sequence[Phase], clock: Callable[[], float] = time.monotonic
) -> list[tuple[str, float]]:
    """Runs the phases in order and logs the time of each. Returns their names and seconds.

    An exception ends the sequence and is passed on.
    """
    times: list[tuple[str, float]] = []
    for name, run in phases:
        started = clock()
        logger.debug("%s", name)
        try:
            run()
        except Exception:
            logger.debug("%s failed", name, extra=fields(seconds=clock() - started))
            raise
        times.append((name, round(clock() - started, 3)))
        logger.info("%s done", name, extra=fields(seconds=times[-1][1]))
    return times


class Shutdown:
    """Shutdown requests as two events. The first SIGTERM or SIGINT sets `drain`, the second sets `stop`.

    `on_change` runs in the main thread after each signal, to wake a waiting loop.
    """

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        self.drain = threading.Event()
        self.stop = threading.Event()
        self.first_signal = 0  # the one that set `drain`
        self._on_change = on_change

    def __repr__(self) -> str:
        state = "stopping" if self.stop.is_set() else "draining" if self.drain.is_set() else "running"
        return f"Shutdown({state})"

    def install(self) -> None:
        """Installs the handlers of SIGTERM and SIGINT. Must run in the main thread."""
        signal.signal(signal.SIGTERM, self.handle)
        signal.signal(signal.SIGINT, self.handle)

    def handle(self, signum: int, frame: FrameType | None = None) -> None:
        """Handles a signal. Does not log, since a handler may interrupt a log call that holds the lock."""
        if self.stop.is_set():
            os._exit(128 + signum)
        self.first_signal = self.first_signal or signum
        (self.stop if self.drain.is_set() else self.drain).set()
        if self._on_change is not None:
            self._on_change()


def run_role(prog: str, start: Callable[[], Serve], env: Mapping[str, str] = os.environ) -> int:
    """Runs one role. `start` builds everything and returns the function that serves and returns the exit
    code.

    Returns that code, 2 when a setting is wrong, 1 when `start` failed otherwise (one line on stderr; the
    traceback only with log level debug), 70 when serving crashed (logged with its traceback), 130 on
    KeyboardInterrupt.
    """
    watch_parent(env)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        read_faults(env)  # refuses to start with a fault that is not permitted
        serve = start()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        report_cannot_start(prog, error)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_CANNOT_START
    sys.audit(SERVING)
    try:
        return serve()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:
        logger.exception("crashed")
        return EXIT_CRASHED


def report_cannot_start(prog: str, error: Exception) -> None:
    """Writes one line to stderr with the reason why the process did not start; log level debug adds the
    traceback. With JSON logs the line is a record, except in a child of `baton up`."""
    is_debug = logging.getLogger(PACKAGE).level == logging.DEBUG
    if is_debug:
        logger.debug("start failed", exc_info=error)
    text = " ".join(str(error).split())
    # an unexpected error without a message for users
    if not isinstance(error, (BatonError, ValueError, OSError)):
        hint = "" if is_debug else "; --log-level debug shows the traceback"
        text = f"{type(error).__name__}: {text}{hint}"
    text = text or type(error).__name__
    if is_json() and PARENT_VARIABLE not in os.environ:  # the launcher looks for the line of a child
        logger.error("cannot start", extra=fields(program=prog, reason=text))
        return
    sys.stderr.write(f"{prog}: {text}\n")
    sys.stderr.flush()


def watch_parent(env: Mapping[str, str] = os.environ) -> None:
    """Makes the kernel send SIGTERM to a child of the launcher when the launcher dies. A no-op elsewhere.

    The kernel ties the request to the parent's thread that spawned this process. Linux only; elsewhere a
    child survives its killed launcher.
    """
    parent = env.get(PARENT_VARIABLE, "")
    if parent.isdigit() and sys.platform.startswith("linux"):
        end_with_parent(int(parent), signal.SIGTERM)


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Makes the kernel send signal `number` to this process when its parent, the process `parent`, dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        logger.warning("this process will outlive a killed parent: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:  # the parent died before the request
        os.kill(os.getpid(), number)
