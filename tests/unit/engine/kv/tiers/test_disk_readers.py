"""Several threads read a disk: at once, before writes, and without holding anything up that hangs."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from baton.engine.kv.page_order import PageOrder
from baton.engine.kv.tiers import tier_threads
from baton.engine.kv.tiers.disk_files import DiskFiles
from baton.engine.kv.tiers.host_slab import HostSlab
from baton.engine.kv.tiers.jobs import Fetch, PageMove, Spill
from baton.engine.kv.tiers.page_copies import PageCopies
from baton.engine.kv.tiers.tier_threads import NUM_READERS, TierThreads

PAGE, NUM_SLOTS = 4096, 32
WAIT_S = 20.0
KEYS = [bytes([number]) * 32 for number in range(NUM_SLOTS)]


class Tier:
    """The threads of a tier over a file for each two pages."""

    def __init__(self, directory, reach=lambda site: None):
        self.slab = HostSlab(NUM_SLOTS, PAGE, torch.device("cpu"))
        for number, page in enumerate(self.slab.slots):
            page[:] = number
        planes = [torch.zeros(2, PAGE, dtype=torch.uint8)]
        copies = PageCopies(planes, self.slab, PageOrder(2, "cpu"))
        self.digests = [copies.digest(PageMove(key=key, slot=slot)) for slot, key in enumerate(KEYS)]
        self.threads = TierThreads(copies, reach=reach)
        budget = (NUM_SLOTS + 1) * 2 * PAGE
        self.files = DiskFiles(directory, fingerprint="", slot_bytes=PAGE, budget=budget, reach=reach)
        self.files._slots_per_slab = 2
        self.threads.open_disk(self.files)
        self.ends(1)

    def job(self, kind, number, slots):
        moves = (
            PageMove(key=KEYS[slot], slot=slot, disk_slot=slot, digest=self.digests[slot]) for slot in slots
        )
        return kind(number=number, moves=tuple(moves))

    def spill_all(self):
        self.threads.submit(self.job(Spill, 0, range(NUM_SLOTS)))
        self.ends(1)

    def ends(self, count):
        found, until = [], time.monotonic() + WAIT_S
        while len(found) < count:
            assert time.monotonic() < until, found
            found += self.threads.results()
            time.sleep(0.001)
        return found


@pytest.fixture
def opened(tmp_path):
    tiers = []

    def make(**settings):
        tiers.append(Tier(tmp_path, **settings))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.threads.close()


def test_pages_are_read_side_by_side(opened):
    together = threading.Barrier(NUM_READERS)
    tier = opened(reach=lambda site: together.wait(WAIT_S) if site == "tier:fetch" else None)
    tier.spill_all()
    tier.slab.slots[:] = 255
    tier.files.close()  # each slab is opened anew, by several threads
    tier.files.open()
    for number in range(4):
        tier.threads.submit(tier.job(Fetch, number, range(8 * number, 8 * number + 8)))
    for done in tier.ends(4):
        first = 8 * done.number
        assert list(done.digests) == tier.digests[first : first + 8]
        assert not done.fault
    assert (tier.slab.slots == torch.arange(NUM_SLOTS).numpy()[:, None]).all()


def test_a_slab_is_opened_once(opened, monkeypatch):
    tier = opened()
    tier.spill_all()
    tier.files.close()
    tier.files.open()
    names, open_file = [], os.open

    def slow_open(path, *args):
        names.append(str(path))
        time.sleep(0.02)
        return open_file(path, *args)

    monkeypatch.setattr(os, "open", slow_open)
    tier.threads.submit(tier.job(Fetch, 1, range(NUM_SLOTS)))
    (done,) = tier.ends(1)
    assert list(done.digests) == tier.digests
    assert len(names) == len(set(names)) == NUM_SLOTS // 2


def test_nothing_is_read_behind_a_fault(opened):
    num_read = [0]
    lock = threading.Lock()

    def fail(site):
        if site == "tier:fetch":
            with lock:
                num_read[0] += 1
            raise OSError("the disk is gone")

    tier = opened(reach=fail)
    tier.spill_all()
    tier.threads.submit(tier.job(Fetch, 1, range(NUM_SLOTS)))
    (done,) = tier.ends(1)
    assert (done.fault, set(done.digests)) == ("the disk is gone", {None})
    assert num_read[0] <= NUM_READERS


def test_a_write_waits_for_reads(opened):
    said, may_read = [], threading.Event()

    def reach(site):
        if site == "tier:fetch":
            may_read.wait(WAIT_S)
        said.append(site)

    tier = opened(reach=reach)
    tier.spill_all()
    said.clear()
    tier.threads.submit(tier.job(Fetch, 1, range(8)))
    tier.threads.submit(tier.job(Spill, 2, range(8, 9)))
    time.sleep(0.05)
    assert said == []
    may_read.set()
    tier.ends(2)
    assert said == ["tier:fetch"] * 8 + ["tier:clear", "tier:write", "tier:index"]


def test_a_write_begins_behind_a_read_that_hangs(opened, monkeypatch):
    monkeypatch.setattr(tier_threads, "YIELD_S", 0.01)
    may_read = threading.Event()
    tier = opened(reach=lambda site: may_read.wait(WAIT_S) if site == "tier:fetch" else None)
    tier.threads.submit(tier.job(Fetch, 1, range(1)))
    tier.threads.submit(tier.job(Spill, 2, range(8, 9)))
    assert [done.number for done in tier.ends(1)] == [2]
    may_read.set()


def test_files_are_closed_behind_the_pages_that_wait_to_be_read(opened):
    tier = opened(reach=lambda site: time.sleep(0.02) if site == "tier:fetch" else None)
    tier.spill_all()
    tier.threads.submit(tier.job(Fetch, 1, range(NUM_SLOTS)))
    tier.threads.close()
    (done,) = tier.ends(1)
    assert (list(done.digests), done.fault) == (tier.digests, "")
    assert tier.files._index == -1


HANGING = """
import sys, time
from pathlib import Path
from baton.engine.kv.tiers import tier_threads
from baton.engine.kv.tiers.jobs import Fetch
from baton.tests.unit.engine.kv.tiers.test_disk_readers import Tier

tier_threads.CLOSE_S = 0.5
tier = Tier(Path(sys.argv[1]), reach=lambda site: time.sleep(3600))
for number in range(4):
    tier.threads.submit(tier.job(Fetch, number, range(8)))
began = time.monotonic()
tier.threads.close()
print(time.monotonic() - began)
"""


def test_reads_that_hang_hold_up_neither_close_nor_the_end_of_the_process(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", HANGING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert 0.4 < float(ended.stdout) < 5.0
