"""Ends a process whose main loop hangs, so that its supervisor restarts it.

A Python thread cannot do that while the hung thread holds the interpreter lock. Two mechanisms need no lock.
faulthandler's C timer thread writes all stacks to stderr. Then the kernel's interval timer ends the process
with SIGALRM. The main loop feeds the watchdog. Long operations feed it as they progress, for instance a
forward between its layers. Each feed also pings the service manager.
"""

import faulthandler
import signal
import sys
from typing import Protocol

from .sd_notify import Notifier

FEEDS_PER_LIMIT = 20  # arming starts a thread, so not every feed arms
LAST_WORDS_S = 0.5  # seconds for faulthandler to write the stacks


class Timer(Protocol):
    """A timer that ends the process unless it is armed again in time."""

    def arm(self, seconds: float) -> None:
        """Sets the timer to `seconds` from now, in place of an earlier setting."""

    def disarm(self) -> None:
        """Stops the timer. Idempotent."""


class ProcessTimer:
    """The timer of this process. There can be only one."""

    def arm(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, file=sys.__stderr__ or sys.stderr)
        signal.setitimer(signal.ITIMER_REAL, seconds + LAST_WORDS_S)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)


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

        The process then has `limit_s`, or a twentieth less.
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
