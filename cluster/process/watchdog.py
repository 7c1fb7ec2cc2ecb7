"""Ends a process whose main loop hangs, so that its supervisor restarts it.

A Python thread cannot do that while the hung thread holds the interpreter lock. Two mechanisms work without the lock:
faulthandler's C timer thread writes all stacks to stderr, then the kernel's interval timer ends the process with SIGALRM.
The main loop feeds the watchdog. Long operations feed it as they progress, for instance a forward between its layers. Each
feed also pings the service manager.
"""

import faulthandler
import signal
import sys
from typing import Protocol

from .sd_notify import Notifier

FEEDS_PER_LIMIT = 20  # arming starts a thread, so not every feed arms
STACK_DUMP_S = 0.5  # for the stacks to be written


class Timer(Protocol):
    """Ends the process unless it is armed again in time."""

    def arm(self, seconds: float) -> None:
        """From now on; replaces an earlier arming."""

    def disarm(self) -> None:
        """Idempotent."""


class ProcessTimer:
    """The timer of this process; there can be one."""

    def arm(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, file=sys.__stderr__ or sys.stderr)
        signal.setitimer(signal.ITIMER_REAL, seconds + STACK_DUMP_S)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)


class Watchdog:
    """One per process. `limit_s` 0 never fires; nothing is armed before the first `feed`. Feeds reach `notifier` too."""

    def __init__(self, limit_s: float, timer: Timer | None = None, notifier: Notifier | None = None) -> None:
        self.limit_s = limit_s
        self._timer = timer or ProcessTimer()
        self._notifier = notifier or Notifier()
        self._armed_at = float("-inf")

    def __repr__(self) -> str:
        return f"Watchdog({self.limit_s:g} s)" if self.limit_s else "Watchdog(off)"

    @property
    def shortest_s(self) -> float:
        """The shorter limit of ours and the service manager's; infinite without either."""
        return min([limit for limit in (self.limit_s, self._notifier.limit_s) if limit], default=float("inf"))

    def feed(self, now: float) -> None:
        """The loop moves, at `now` (monotonic seconds): the process has `limit_s` from here, or a twentieth less."""
        self._notifier.ping(now)
        if self.limit_s and now - self._armed_at >= self.limit_s / FEEDS_PER_LIMIT:
            self._armed_at = now
            self._timer.arm(self.limit_s)

    def stop(self) -> None:
        """The loop ends in order."""
        if self._armed_at != float("-inf"):
            self._armed_at = float("-inf")
            self._timer.disarm()
