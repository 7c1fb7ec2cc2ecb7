"""A disk that is full, wherever the disk tier needs room: one log line, no tier, and the same answers.

The worker has real threads and real files. The disk is a small file system of memory in a namespace of its
own, or, where none may be mounted, system calls that answer as one would.
"""

import errno
import os
import subprocess
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from baton.engine.kv.tiers.disk_files import RECORD_BYTES
from baton.tests.sim.tiered_decode import chats, decode_worker, settled, told_without_tiers

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = 4096  # of the file system
SLOTS, SLAB_SLOTS = 32, 8
MANY = 1 << 30
REMEDY = "No space left on device; make room there, or lower --disk-cache-gib, and restart the worker"
HOLD = 'mount -t tmpfs -o "size=$1" tmpfs "$0" && echo mounted && exec cat'


@pytest.fixture(scope="module")
def target(toy_checkpoint):
    return toy_checkpoint("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def expected(target):
    return told_without_tiers(target)


@pytest.fixture(scope="module")
def slot_bytes(target):
    worker = decode_worker(target, None, "cpu", pages=14, tiers=(MANY >> 8, "", 0))
    worker.tiers.close()
    return worker.tiers.tiers.page_bytes


@contextmanager
def mounted(place, size):
    """The path of a file system of `size` bytes, in the namespace of a process that holds it."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", HOLD, str(place), str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            if holder.stdout.readline() != "mounted\n":
                pytest.skip("no file system may be mounted here")
            yield Path(f"/proc/{holder.pid}/root{place}")
        finally:
            holder.stdin.close()


class Disk:
    """System calls of a disk with room for `room` bytes. They do what there is room for, and then fail.

    `reserves`: whether posix_fallocate takes room, which it does not on a disk that copies on write.
    """

    def __init__(self, room, *, reserves=True):
        self.room, self.reserves = room, reserves
        self.used = {}  # of each file and each of its pages
        self._allocate, self._write = os.posix_fallocate, os.pwrite

    def patch(self, monkeypatch):
        monkeypatch.setattr(os, "posix_fallocate", self.allocate)
        monkeypatch.setattr(os, "pwrite", self.write)

    def take(self, fd, start, length):
        """The bytes that there is room for."""
        inode = os.fstat(fd).st_ino
        for at in range(start // PAGE, -(-(start + length) // PAGE)):
            if (inode, at) not in self.used:
                if (len(self.used) + 1) * PAGE > self.room:
                    return max(0, at * PAGE - start)
                self.used[inode, at] = True
        return length

    def allocate(self, fd, offset, length):
        if not self.reserves:
            return
        if taken := self.take(fd, offset, length):
            self._allocate(fd, offset, taken)
        if taken < length:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, fd, data, offset):
        taken = self.take(fd, offset, len(data))
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(fd, data[:taken], offset)


PLACES = {
    "first slab": (lambda slot: SLAB_SLOTS * slot - PAGE, True),
    "index": (lambda slot: SLAB_SLOTS * slot, True),
    "later slab": (lambda slot: SLAB_SLOTS * slot + PAGE, True),
    "first page": (lambda slot: PAGE, False),
    "part of a page": (lambda slot: PAGE + 5 * slot + slot // 2, False),
}


@pytest.mark.parametrize("host", [0, 1 << 19], ids=["disk only", "host and disk"])
@pytest.mark.parametrize("is_mounted", [True, False], ids=["mounted", "patched"])
@pytest.mark.parametrize("place", PLACES)
def test_a_full_disk_ends_its_tier_and_nothing_else(
    target, expected, slot_bytes, tmp_path, caplog, monkeypatch, place, is_mounted, host
):
    monkeypatch.setattr("baton.engine.kv.tiers.cache_tiers.JOB_PAGES", 1)  # more of them are under way
    room, reserves = PLACES[place]
    disk = Disk(room(slot_bytes), reserves=reserves)
    if is_mounted and not reserves:
        monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, length: None)
    if not is_mounted:
        disk.patch(monkeypatch)
    with mounted(tmp_path, disk.room) if is_mounted else nullcontext(tmp_path) as folder:
        worker = small_worker(target, folder, slot_bytes, host)
        try:
            assert [said for said, _ in chats(worker)] == expected
            settled(worker)
            is_told_once(caplog, folder)
            assert [tier.name for tier in worker.stats().tiers] == (["host"] if host else [])
            nothing_is_held(worker)
            assert [said for said, _ in chats(worker)] == expected, "the worker goes on"
            is_told_once(caplog, folder)
        finally:
            worker.tiers.close()
        sizes = [path.stat().st_size for path in sorted(folder.rglob("slab-*"))]
    if "slab" in place:
        whole = [SLAB_SLOTS * slot_bytes] if place == "later slab" else []
        assert sizes == [*whole, 0], "what it could not get whole it gives back"


def test_pages_that_were_written_before_are_found_when_there_is_room(
    target, expected, slot_bytes, tmp_path, caplog
):
    """All that a full disk let through is whole, and what it cut off is no page."""
    room, _ = PLACES["part of a page"]
    with pytest.MonkeyPatch.context() as patch:
        Disk(room(slot_bytes), reserves=False).patch(patch)
        worker = small_worker(target, tmp_path, slot_bytes, 0)
        chats(worker)
        settled(worker)
        worker.tiers.close()
    is_told_once(caplog, tmp_path)
    again = small_worker(target, tmp_path, slot_bytes, 0)
    assert len(again.tiers.tiers.disk) == 5, "as many as there was room for"
    assert [said for said, _ in chats(again)] == expected
    assert again.tiers.counters["disk_bad_pages"] == 0
    assert again.tiers.counters["disk_hit_tokens"] > 0
    settled(again)
    nothing_is_held(again)
    again.tiers.close()
    is_told_once(caplog, tmp_path)


def small_worker(target, folder, slot_bytes, host):
    """A worker with a disk tier of SLOTS pages, in slabs of SLAB_SLOTS."""
    budget = SLOTS * (slot_bytes + RECORD_BYTES)
    worker = decode_worker(target, None, "cpu", pages=14, tiers=(host, folder, budget))
    find = worker.tiers.find_disk

    def find_small():
        files = find()
        if files is not None:
            files._slots_per_slab = SLAB_SLOTS
        return files

    worker.tiers.find_disk = find_small
    settled(worker)
    return worker


def is_told_once(caplog, folder):
    (line,) = [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert line.startswith(f"the disk tier of the KV cache is off: {folder}")
    assert line.endswith(REMEDY)


def nothing_is_held(worker):
    """Each page of the pool is in the cache or free, and no copy has another."""
    tiers, cache = worker.tiers.tiers, worker.engine.cache
    tiers.check_integrity()
    assert tiers.num_held == 0
    assert not tiers.is_busy
    assert cache.allocator.num_used == cache.num_cached
    assert cache.num_idle == cache.num_cached
