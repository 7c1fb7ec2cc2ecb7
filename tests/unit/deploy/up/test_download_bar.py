"""Laws of the bar of a download: bytes of all files in one line, and nothing for what is in the cache."""

import io

from baton.cluster.process.progress import LINE_EVERY, JobProgress
from baton.deploy.up.download_bar import download_bar


def hub_bars(bar):
    """The bars that the hub makes for a snapshot: received bytes, written bytes, files."""
    of_bytes = {"total": 0, "initial": 0, "unit": "B", "unit_scale": True}
    received = bar(desc="Downloading bytes", **of_bytes)
    return (
        received,
        bar(desc="Reconstructing (incomplete total...)", **of_bytes),
        bar(desc="Fetching", total=3),
    )


def test_the_bytes_of_all_files_are_one_line(capfd):
    now, told = [0.0], io.StringIO()
    progress = JobProgress(told, lambda: now[0])
    received, written, files = hub_bars(download_bar("org/model", progress))
    for _ in range(2):  # two files of 2 GB
        written.total += 2_000_000_000
        written.refresh()
    for _ in range(4):
        now[0] += LINE_EVERY / 2
        received.update(1_000_000_000)
        written.update(1_000_000_000)
    files.update()
    progress.close()
    assert told.getvalue().splitlines() == [
        "downloading org/model",
        "downloading org/model: 75%, 3.00 of 4.00 GB",
    ]
    assert capfd.readouterr() == ("", ""), "the hub's own bars are not shown"


def test_a_model_in_the_cache_shows_nothing(capfd):
    told = io.StringIO()
    progress = JobProgress(told, is_terminal=True)
    _, _, files = hub_bars(download_bar("org/model", progress))
    for _ in range(3):
        files.update()
    progress.close()
    assert told.getvalue() == ""
    assert capfd.readouterr() == ("", "")
