"""Ends a process whose main loop hangs, so that its supervisor restarts it.

A Python thread cannot do that while the hung thread holds the interpreter lock, so no step needs the lock.
A timer of the kernel expires when the loop has not fed the watchdog for most of the limit. Its C function
calls alarm() for the rest. faulthandler's C handler of SIGALRM then writes all stacks to stderr and lets the
signal end the process. The main loop feeds the watchdog. Long operations feed it as they progress, for
instance a forward between its layers. Each feed also pings the service manager.

The two steps tell a hang from a pause. While the process is stopped or its host is suspended, no function of
it runs. The timer may expire meanwhile, but alarm() is called when the process runs again, and a loop that
does not hang then feeds the watchdog long before the alarm.
"""

import ctypes
import faulthandler
import signal
import sys
from typing import Protocol

from .sd_notify import Notifier

FEEDS_PER_LIMIT = 20  # arming costs system calls, so not every feed arms
GRACE_SHARE = 1 / 3  # of the limit: the second step
SHORTEST_GRACE_S = 1  # alarm() takes whole seconds
CLOCK_MONOTONIC = 1  # of <time.h>
SIGEV_THREAD = 2  # of <signal.h>: expiry calls a C function in a thread of the C library


class Timer(Protocol):
    """A timer that ends the process unless it is armed again in time."""

    def arm(self, seconds: float) -> None:
        """Sets the timer to `seconds` from now, in place of an earlier setting."""

    def disarm(self) -> None:
        """Stops the timer. Idempotent."""


class _SigEvent(ctypes.Structure):
    """struct sigevent of Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 32),
    )


class _TimerSpec(ctypes.Structure):
    """struct itimerspec: the interval and the first expiry, each in seconds and nanoseconds."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("first_s", ctypes.c_long),
        ("first_ns", ctypes.c_long),
    )


class ProcessTimer:
    """The timer of this process. There can be only one. Raises OSError where the kernel gives none."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._rt = self._libc if hasattr(self._libc, "timer_create") else ctypes.CDLL("librt.so.1")
        self._timer: ctypes.c_void_p | None = None  # made by the first `arm`
        self._grace_s = 0

    def arm(self, seconds: float) -> None:
        if self._timer is None:
            faulthandler.register(
                signal.SIGALRM, file=sys.__stderr__ or sys.stderr, all_threads=True, chain=True
            )
        grace_s = max(SHORTEST_GRACE_S, round(seconds * GRACE_SHARE))
        if self._timer is None or grace_s != self._grace_s:
            self._make(grace_s)
        self._set(max(seconds - grace_s, seconds / 2))
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm from before or after a pause

    def disarm(self) -> None:
        if self._timer is not None:
            self._set(0.0)
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _make(self, grace_s: int) -> None:
        """A timer of the kernel that calls alarm(`grace_s`) at its expiry."""
        if self._timer is not None:
            self._rt.timer_delete(self._timer)
        self._timer, self._grace_s = ctypes.c_void_p(), grace_s
        alarm = ctypes.cast(self._libc.alarm, ctypes.c_void_p).value
        event = _SigEvent(value=grace_s, notify=SIGEV_THREAD, function=alarm)
        self._check(
            self._rt.timer_create(CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)),
            "timer_create",
        )

    def _set(self, seconds: float) -> None:
        """Lets the timer expire once, `seconds` from now; 0 stops it."""
        spec = _TimerSpec(first_s=int(seconds), first_ns=int(seconds % 1 * 1e9))
        self._check(self._rt.timer_settime(self._timer, 0, ctypes.byref(spec), None), "timer_settime")

    def _check(self, result: int, call: str) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), f"{call} failed: the watchdog has no timer; --watchdog-s 0")


class Watchdog:
    """The watchdog of one process.

    With a `limit_s` of 0 it never fires. It is armed by the first `feed`. Each feed also pings `notifier`.
    """

    def __init__(self, limit_s: float, timer: Timer | None = None, notifier: Notifier | None = None) -> None:
        self.limit_s = limit_s
        self._timer = timer or ProcessTimer()
        self._notifier = notifier or Notifier()
        self._armed_at = float("-inf")

    def __repr__(self) -> str:
        return f"Watchdog({self.limit_s:g} s)" if self.limit_s else "Watchdog(off)"

    @property
    def shortest_s(self) -> float:
        """The shorter of the own limit and the service manager's, in seconds; infinite without either."""
        return min([limit for limit in (self.limit_s, self._notifier.limit_s) if limit], default=float("inf"))

    def feed(self, now: float) -> None:
        """Reports at `now` (monotonic seconds) that the loop runs.

        The process then has `limit_s`, or a twentieth less, and at least SHORTEST_GRACE_S.
        """
        self._notifier.ping(now)
        if self.limit_s and now - self._armed_at >= self.limit_s / FEEDS_PER_LIMIT:
            self._armed_at = now
            self._timer.arm(self.limit_s)

    def stop(self) -> None:
        """Disarms the timer at the regular end of the loop."""
        if self._armed_at != float("-inf"):
            self._armed_at = float("-inf")
            self._timer.disarm()
