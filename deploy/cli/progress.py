"""The progress of a long measurement on stderr: a bar on a terminal, elsewhere a line every few seconds."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

LINE_EVERY = 5.0  # seconds between two lines where there is no terminal


class JobProgress:
    """One job after another, each from 0 to 1. Close it before other output to the terminal."""

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_terminal: bool | None = None,
    ) -> None:
        self._stream, self._clock = stream or sys.stderr, clock
        has_bar = self._stream.isatty() if is_terminal is None else is_terminal
        self._bar: Progress | None = None
        self._told_at = clock()
        if has_bar:
            console = Console(file=self._stream, force_terminal=is_terminal)
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn(), TimeElapsedColumn(),
                TextColumn("{task.fields[text]}"), console=console, transient=True, refresh_per_second=4,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=1.0, text="")
            self._bar.start()

    def begin(self, name: str) -> None:
        """Starts the job `name`; told at once, since it may take long."""
        self._name = name
        if self._bar is not None:
            self._bar.reset(self._task, description=name, text="")
        else:
            self._write(name)

    def show(self, share: float, text: str) -> None:
        """The share of the job that is done, from 0 to 1, and the figures so far."""
        if self._bar is not None:
            self._bar.update(self._task, completed=min(1.0, share), text=text)
        elif self._clock() - self._told_at >= LINE_EVERY:
            self._write(f"{self._name}: {min(1.0, share):.0%}, {text}")

    def close(self) -> None:
        """Removes the bar. Idempotent."""
        if self._bar is not None:
            self._bar.stop()

    def _write(self, line: str) -> None:
        self._told_at = self._clock()
        self._stream.write(f"{line}\n")
        self._stream.flush()
