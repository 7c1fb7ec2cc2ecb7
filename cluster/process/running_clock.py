"""Clocks that tell "this process did not run" from "the others were silent".

A process stands still when it is stopped, when its host is suspended, or while its virtual machine moves. The
monotonic clock goes on meanwhile, so every silence seems as long as the pause when the process goes on. Its
sockets hold what the others said before and meanwhile. So time in which this process could not listen counts
for no wait for a peer. Deadlines of requests are times of clients, and count all of it. Pure.
"""

from collections.abc import Callable

LONGEST_STEP_S = 0.5  # between two looks at the time, longer than any sleep of a loop that runs


class RunningClock:
    """Monotonic seconds that advance by at most LONGEST_STEP_S from one call to the next.

    For one thread that calls it at least at each turn of its loop.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = self._last = clock()

    def __repr__(self) -> str:
        return f"RunningClock(behind={self._last - self._at:.3f})"

    def __call__(self) -> float:
        now = self._clock()
        self._at += min(now - self._last, LONGEST_STEP_S)
        self._last = now
        return self._at


class PauseMeter:
    """Adds up the time that a loop did not run: each interval of more than `longest_s` between two turns."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._last: float | None = None

    def __repr__(self) -> str:
        return f"PauseMeter({self._longest_s:g} s)"

    def turn(self, now: float) -> float:
        """Call at each turn, at `now` in monotonic seconds. The seconds since the last turn if these are more
        than `longest_s`, else 0."""
        elapsed = 0.0 if self._last is None else now - self._last
        self._last = now
        return elapsed if elapsed > self._longest_s else 0.0
