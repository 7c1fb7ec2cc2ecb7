"""The progress of a long command on stderr: a bar on a terminal, elsewhere a line every few seconds."""

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

LINE_EVERY = 5.0  # seconds between two lines where there is no terminal
BAR_EVERY = 0.1  # seconds between two drawings of the bar
BAR_WIDTH = 20
CLEARED = "\r\x1b[2K"  # the terminal's line


class JobProgress:
    """One job after another, each from 0 to 1. Close it before other output to the terminal."""

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_terminal: bool | None = None,
    ) -> None:
        self._stream, self._clock = stream or sys.stderr, clock
        self._is_terminal = self._stream.isatty() if is_terminal is None else is_terminal
        self._name = ""
        self._began = self._told_at = clock()
        self._is_drawn = False

    def begin(self, name: str) -> None:
        """Starts the job `name`; told at once, since it may take long."""
        self._name, self._began = name, self._clock()
        if self._is_terminal:
            self._draw(0.0, "")
        else:
            self._write(f"{name}\n")

    def show(self, share: float, text: str) -> None:
        """The share of the job that is done, from 0 to 1, and the figures so far."""
        share, elapsed = min(1.0, max(0.0, share)), self._clock() - self._told_at
        if self._is_terminal and (elapsed >= BAR_EVERY or share == 1.0):
            self._draw(share, text)
        elif not self._is_terminal and elapsed >= LINE_EVERY:
            self._write(f"{self._name}: {share:.0%}, {text}\n")

    def close(self) -> None:
        """Removes the bar. Idempotent."""
        if self._is_drawn:
            self._write(CLEARED)
            self._is_drawn = False

    def _draw(self, share: float, text: str) -> None:
        full = round(share * BAR_WIDTH)
        bar = "#" * full + "." * (BAR_WIDTH - full)
        line = f"{self._name} [{bar}] {share:4.0%} {self._clock() - self._began:4.0f} s  {text}"
        self._write(CLEARED + line[: shutil.get_terminal_size().columns - 1])
        self._is_drawn = True

    def _write(self, text: str) -> None:
        self._told_at = self._clock()
        self._stream.write(text)
        self._stream.flush()
