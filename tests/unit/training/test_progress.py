"""Laws of the progress of training: lines without a terminal, at a steady pace."""

import io

from baton.training import progress
from baton.training.progress import LINE_EVERY, progress_bar
from rich.console import Console


def test_without_a_terminal_a_line_comes_every_few_seconds(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress._Lines, "clock", lambda self: now[0])
    told = io.StringIO()
    with progress_bar(Console(file=told)) as bar:
        task = bar.add_task("training", total=40)
        for step in range(40):
            bar.update(task, completed=step, description=f"loss {step}")
            now[0] += 1.0
    lines = [line for line in told.getvalue().splitlines() if line.startswith("loss")][:8]
    assert lines == [f"loss {step}  {step}/40" for step in range(0, 40, int(LINE_EVERY))]
