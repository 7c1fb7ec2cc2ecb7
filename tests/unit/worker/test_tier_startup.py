"""The tiers of a worker with real threads and real files: tokens, restarts, and what a disk can do.

Each fault is a miss with one log line. The tokens are those of a worker without tiers.
"""

import os
import shutil
import stat

import pytest
from baton.engine.kv.tiers.disk_files import RECORD_BYTES, DiskFiles
from baton.tests.parity.toy_engine import random_ids
from baton.tests.sim.tiered_decode import ask, chats, decode_worker, settled, told_without_tiers

pytestmark = pytest.mark.usefixtures("one_thread")

HOST, DISK = 4 << 20, 64 << 20
FIRST = random_ids(70, seed=0)  # the prompt of the first conversation


@pytest.fixture(scope="module")
def target(toy_checkpoint):
    return toy_checkpoint("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def expected(target):
    return told_without_tiers(target)


@pytest.fixture
def opened(target):
    """Makes workers whose tiers end with the test."""
    workers = []

    def make(disk, *, host=0, size=DISK, **settings):
        worker = decode_worker(target, None, "cpu", pages=14, tiers=(host, disk, size), **settings)
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker.tiers.close()


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def files_of(disk):
    return sorted(path for path in disk.rglob("*") if path.is_file())


def test_a_restarted_worker_finds_its_pages_on_disk(opened, expected, tmp_path, caplog):
    disk = tmp_path / "new" / "disk"
    worker = opened(disk)
    told = chats(worker)
    assert [said for said, _ in told] == expected
    assert min(cached for _, cached in told[6:]) >= 64
    worker.tiers.close()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in files_of(disk)}
    folders = {stat.S_IMODE(path.stat().st_mode) for path in (disk, *disk.iterdir())}
    assert (modes, folders) == ({0o600}, {0o700})
    again = opened(disk)
    settled(again)
    assert ask(again, FIRST) == (expected[0], 64)
    assert again.tiers.counters["disk_hit_tokens"] == 64
    assert again.stats().tiers[0].used == worker.stats().tiers[0].used
    assert lines(caplog) == []


def test_another_tenant_does_not_hit(opened, tmp_path):
    worker = opened(tmp_path, host=HOST)
    chats(worker, rounds=1)
    said, cached = ask(worker, FIRST, salt="another")
    assert cached == 0
    settled(worker)
    chats(worker, rounds=1)
    assert ask(worker, FIRST, salt="another") == (said, 64)


def test_a_flipped_bit_and_a_torn_page_are_misses(opened, expected, tmp_path, caplog):
    worker = opened(tmp_path)
    chats(worker)
    worker.tiers.close()
    (slab,) = tmp_path.rglob("slab-*")
    with slab.open("r+b") as file:
        size = worker.tiers.tiers.page_bytes
        for slot in range(slab.stat().st_size // size):
            file.seek(slot * size + 1000)
            byte = file.read(1)
            file.seek(slot * size + 1000)
            file.write(bytes([byte[0] ^ 2]))
    again = opened(tmp_path)
    settled(again)
    assert ask(again, FIRST) == (expected[0], 0)
    assert set(lines(caplog)) == {"a page of the disk tier is damaged, its tokens are computed again"}
    assert len(lines(caplog)) == again.tiers.counters["disk_bad_pages"] == 4


def test_a_vanished_directory_turns_the_tier_off_with_one_line(opened, expected, tmp_path, caplog):
    worker = opened(tmp_path / "disk", host=HOST)
    settled(worker)
    shutil.rmtree(tmp_path / "disk")
    assert [said for said, _ in chats(worker)] == expected
    assert [line.endswith("was removed") for line in lines(caplog)] == [True]
    assert worker.tiers.counters["host_hit_tokens"] > 200, "the other tier goes on"
    assert [tier.name for tier in worker.stats().tiers] == ["host"]


def refused(*_):
    raise OSError(5, "Input/output error")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "answer", "end"),
    [
        ("pwrite", refused, "Input/output error"),
        ("preadv", refused, "Input/output error"),
        ("pwrite", lambda fd, data, offset: 0, "nothing was written"),
    ],
    ids=("write", "read", "nothing"),
)
def test_a_disk_that_fails_later_turns_its_tier_off_with_one_line(
    opened, expected, tmp_path, caplog, monkeypatch, call, answer, end
):
    if call == "preadv":  # it reads what another life has left
        chats(before := opened(tmp_path, host=HOST // 8), rounds=1)
        before.tiers.close()
    worker = opened(tmp_path, host=HOST // 8)
    settled(worker)
    monkeypatch.setattr(os, call, answer)
    assert [said for said, _ in chats(worker)] == expected
    assert [line.endswith(end) for line in lines(caplog)] == [True]
    assert [tier.name for tier in worker.stats().tiers] == ["host"]
    settled(worker)
    worker.engine.cache.check_integrity()


def flip_the_index(folder):
    """A bit of every record."""
    path = folder / "index"
    raw = bytearray(path.read_bytes())
    for at in range(0, len(raw), RECORD_BYTES):
        raw[at + 20] ^= 1
    path.write_bytes(raw)


def cut_the_slab(folder):
    os.truncate(folder / "slab-0000", 4096)


def remove_the_slab(folder):
    (folder / "slab-0000").unlink()


def remove_the_index(folder):
    (folder / "index").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip_the_index, cut_the_slab, remove_the_slab, remove_the_index])
def test_files_that_were_damaged_between_two_lives_are_misses(opened, expected, tmp_path, damage):
    worker = opened(tmp_path)
    chats(worker)
    worker.tiers.close()
    (folder,) = tmp_path.iterdir()
    damage(folder)
    again = opened(tmp_path)
    settled(again)
    assert ask(again, FIRST) == (expected[0], 0)
    assert [said for said, _ in chats(again)] == expected, "and the tier goes on"
    again.tiers.close()
    settled(last := opened(tmp_path))
    assert ask(last, FIRST) == (expected[0], 64)
    assert last.tiers.counters["disk_hit_tokens"] == 64


def test_a_directory_that_cannot_be_made_turns_the_tier_off_with_one_line(opened, tmp_path, caplog):
    (tmp_path / "file").touch()
    worker = opened(tmp_path / "file")
    settled(worker)
    assert worker.tiers.tiers.is_off
    assert len(lines(caplog)) == 1


def test_two_workers_share_a_directory_and_no_file(opened, expected, tmp_path):
    first, second = opened(tmp_path), opened(tmp_path)
    for worker in (first, second):
        chats(worker, rounds=1)
    assert len(list(tmp_path.iterdir())) == 2
    assert ask(second, FIRST)[0] == expected[0]


def test_a_smaller_budget_cuts_the_files(opened, expected, tmp_path):
    worker = opened(tmp_path)
    chats(worker)
    worker.tiers.close()
    less = opened(tmp_path, size=DISK // 8)
    settled(less)
    chats(less)
    less.tiers.close()
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= DISK // 8


def test_pages_of_other_weights_are_not_found(tmp_path):
    mine = DiskFiles(tmp_path, fingerprint="one", slot_bytes=4096, budget=1 << 20)
    other = DiskFiles(tmp_path, fingerprint="two", slot_bytes=4096, budget=1 << 20)
    assert (mine.open(), other.open()) == ([], [])
    assert mine.folder != other.folder
    mine.close()
    other.close()
