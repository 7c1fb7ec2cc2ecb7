"""Laws of progress: lines without a terminal, and a bar that leaves nothing behind with one."""

import io

from baton.cluster.process.progress import LINE_EVERY, JobProgress


def test_without_a_terminal_a_job_is_told_and_a_line_every_few_seconds():
    now, told = [0.0], io.StringIO()
    progress = JobProgress(told, lambda: now[0])
    for name in ("8 clients", "16 clients"):
        progress.begin(name)
        for second in range(12):
            now[0] += 1.0
            progress.show(second / 10, f"{second} ended")
    progress.close()
    at = [int(LINE_EVERY) - 1, 2 * int(LINE_EVERY) - 1]
    rows = [f"{at[0] * 10}%, {at[0]} ended", f"{at[1] * 10}%, {at[1]} ended"]
    assert told.getvalue().splitlines() == [
        line for name in ("8 clients", "16 clients") for line in (name, *(f"{name}: {row}" for row in rows))
    ]


def test_on_a_terminal_there_is_a_bar_that_ends_with_the_job(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    now, told = [0.0], io.StringIO()
    progress = JobProgress(told, lambda: now[0], is_terminal=True)
    progress.begin("8 clients")
    now[0] += 3.0
    progress.show(0.5, "100 ended " + "x" * 60)
    progress.show(0.6, "too soon")
    progress.close()
    progress.close()
    first, last, cleared = told.getvalue().split("\r\x1b[2K")[1:]
    assert first == "8 clients [....................]   0%    0 s  "
    assert last.startswith("8 clients [##########..........]  50%    3 s  100 ended")
    assert len(last) < 60, "a longer line would wrap, and stay"
    assert cleared == ""
