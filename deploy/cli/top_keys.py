"""Single keys of the user while a view is shown: read without Enter, and without an echo."""

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType


class Keyboard:
    """The terminal's keys within a `with` block. Without a terminal there are none, and `wait` only waits."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = sys.stdin.fileno() if descriptor is None else descriptor
        self._before: list[int | list[bytes | int]] | None = None

    def __enter__(self) -> "Keyboard":
        if os.isatty(self._descriptor):
            self._before = termios.tcgetattr(self._descriptor)
            tty.setcbreak(self._descriptor)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
            self._before = None

    def wait(self, seconds: float) -> str:
        """The next key, or "" when none came in time."""
        if self._before is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        return os.read(self._descriptor, 1).decode("latin-1") if ready else ""
