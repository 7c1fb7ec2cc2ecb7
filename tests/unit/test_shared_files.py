"""Files that several test processes share are whole from the moment that they have their name."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from baton.tests.shared_files import SharedFiles

NUM_FILES = 40


def write_many(path: Path) -> None:
    for number in range(NUM_FILES):
        (path / str(number)).write_text("x")


def test_every_reader_sees_a_complete_folder(tmp_path):
    def count(_: int) -> int:
        return len(list(SharedFiles(tmp_path).folder("many", "key", write_many).iterdir()))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(count, range(64))) == [NUM_FILES] * 64
    assert len(list((tmp_path / "shared").iterdir())) == 1, "nothing else is left"


def test_a_folder_is_written_once_for_a_key_or_not_at_all(tmp_path):
    files, written = SharedFiles(tmp_path), []
    first = files.folder("toy", "a", written.append)
    assert files.folder("toy", "a", written.append) == first
    assert files.folder("toy", "b", written.append) != first
    assert len(written) == 2

    def fail(path: Path) -> None:
        (path / "half").write_text("x")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        files.folder("toy", "c", fail)
    assert list(files.folder("toy", "c", written.append).iterdir()) == []
