"""Limits how often a log line about the same subject is written, so that no peer can fill a disk."""

import time
from collections.abc import Callable

QUIET_S = 60.0  # seconds between two lines about one subject
MAX_SUBJECTS = 256


class LogThrottle:
    """Decides whether a subject may be logged again. Remembers at most MAX_SUBJECTS subjects."""

    def __init__(self, quiet_s: float = QUIET_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet_s = quiet_s
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def is_due(self, subject: str) -> bool:
        """True for the first line about a subject, and again once `quiet_s` has passed since the last one."""
        now = self._clock()
        if now - self._logged_at.get(subject, float("-inf")) < self._quiet_s:
            return False
        if len(self._logged_at) >= MAX_SUBJECTS:
            self._logged_at = {name: at for name, at in self._logged_at.items() if now - at < self._quiet_s}
        if len(self._logged_at) >= MAX_SUBJECTS:  # all further peers with ever new keys count as one subject
            return self.is_due("") if subject else False
        self._logged_at[subject] = now
        return True
