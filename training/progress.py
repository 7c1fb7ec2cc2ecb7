"""The progress of collecting, training and measuring, on stderr."""

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY = 5.0  # seconds between two lines where there is no terminal


class _Lines(Progress):
    """A bar on a terminal, elsewhere a line every few seconds."""

    clock: Callable[[], float] = time.monotonic
    _told_at = float("-inf")

    def update(self, task_id: TaskID, **changes: Any) -> None:  # noqa: ANN401
        super().update(task_id, **changes)
        if self.console.is_terminal or self.clock() - self._told_at < LINE_EVERY:
            return
        self._told_at = self.clock()
        task = self._tasks[task_id]
        self.console.file.write(f"{task.description}  {task.completed:g}/{task.total:g}\n")
        self.console.file.flush()


def progress_bar(console: Console | None = None) -> Progress:
    """A bar with a text that may change, the steps done, and the time gone and left; without a terminal, a
    line every few seconds."""
    return _Lines(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(), TimeRemainingColumn(), console=console or Console(stderr=True),
    )  # fmt: skip
