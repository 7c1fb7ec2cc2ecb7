"""`baton bench load`: plain reads get every byte, and the loader is compared with the faster of them."""

import os
from pathlib import Path

import pytest
from baton.bench.engine import plain_reads
from baton.bench.engine.load import COLD, DIRECT, LOADER, PLAIN, WARM, Reading, share_of_plain, table_of
from baton.bench.engine.load_rank import RankLoad
from baton.bench.engine.plain_reads import drop_cached, file_system_of, read_plainly

GIB = 1 << 30


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("is_direct", [False, True])
def test_plain_reads_get_every_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool, is_kept: bool
):
    monkeypatch.setattr(plain_reads, "PIECE_BYTES", 8192)
    files = [tmp_path / "a", tmp_path / "b", tmp_path / "none"]
    for file, size in zip(files, (5 * 8192 + 777, 100, 0), strict=True):
        file.write_bytes(os.urandom(size))
    drop_cached(files)
    try:
        read = read_plainly(files, 3, is_direct=is_direct, is_kept=is_kept)
    except OSError:
        assert is_direct
        pytest.skip("no direct reads on this file system")
    assert read.num_bytes == 5 * 8192 + 777 + 100
    assert file_system_of(tmp_path)


def test_a_file_that_is_gone_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        read_plainly([tmp_path / "none"], 2, is_direct=False)


def test_the_share_is_that_of_the_faster_plain_read_of_a_round():
    def reading(way: str, cache: str, seconds: float, *ranks: RankLoad) -> Reading:
        return Reading(way=way, cache=cache, num_bytes=GIB, total_s=seconds, ranks=ranks)

    rank = RankLoad(
        total_s=2.0, read_bytes=GIB, held_bytes=GIB, before_bytes=GIB // 2, peak_bytes=GIB * 7 // 4
    )
    rounds = [
        [
            reading(DIRECT, COLD, 1.0),
            reading(PLAIN, COLD, slow),
            reading(LOADER, COLD, 2.0, rank),
            reading(PLAIN, WARM, 0.5),
            reading(LOADER, WARM, 0.5, rank),
        ]
        for slow in (4.0, 0.5, 4.0)
    ]
    assert share_of_plain(rounds, COLD) == 0.5, "of direct reads in two rounds, of plain ones in the other"
    assert share_of_plain(rounds, WARM) == 1.0
    (loader,) = (line for line in table_of(rounds) if line.startswith(f"| {LOADER} | {COLD}"))
    assert loader == "| loader | cold | 1.00 | 2.00 | 0.50 | 0.50 | 1.25 | 1.25 |"
