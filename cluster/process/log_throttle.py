"""Limits how often a log line about the same subject is written, so that no peer can fill a disk."""

import time
from collections.abc import Callable

QUIET_S = 60.0  # between two lines about one subject
MAX_SUBJECTS = 256


class LogThrottle:
    """Decides whether a subject may be logged again. Remembers at most MAX_SUBJECTS subjects."""

    def __init__(self, quiet_s: float = QUIET_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet_s = quiet_s
        self._clock = clock
        self._said: dict[str, float] = {}

    def is_due(self, subject: str) -> bool:
        """True for the first line about a subject, and again once `quiet_s` has passed since the last one."""
        now = self._clock()
        if now - self._said.get(subject, float("-inf")) < self._quiet_s:
            return False
        if len(self._said) >= MAX_SUBJECTS:
            self._said = {name: at for name, at in self._said.items() if now - at < self._quiet_s}
        if len(self._said) >= MAX_SUBJECTS:  # strangers with new keys all the time are one subject
            return self.is_due("") if subject else False
        self._said[subject] = now
        return True
