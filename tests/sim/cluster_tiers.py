"""The tiers below the pools of a simulated cluster, and what goes wrong with them.

Production's state machine, page keys and copying code run as they are. What a thread would do is done at one
virtual instant: when the copy ends, which is the worst time to read or write its memory. A disk is a
dictionary that survives its worker. `add_tiers` gives a part of the seeds tiers and faults of them. Its draws
are its own, so a seed without tiers is what it would be without this file.
"""

import queue
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
from baton.engine.kv.pool import KVPool
from baton.engine.kv.prefix_cache import ROOT
from baton.engine.kv.tiers import page_copies
from baton.engine.kv.tiers.cache_tiers import FETCH_PATIENCE_S, CacheTiers, RestoreState
from baton.engine.kv.tiers.disk_files import RECORD_BYTES, DiskFault, DiskFiles
from baton.engine.kv.tiers.host_slab import HostSlab
from baton.engine.kv.tiers.jobs import Fetch, Load, Save, Spill
from baton.engine.kv.tiers.page_copies import PageCopies
from baton.engine.kv.tiers.page_keys import PageKeys
from baton.engine.kv.tiers.running_tiers import RunningTiers
from baton.engine.kv.tiers.slot_table import SlotTable, StoredPage
from baton.engine.kv.tiers.tier_threads import TierThreads
from baton.tests.sim.cluster_clients import Violation
from baton.tests.sim.cluster_faults import Faults
from baton.tests.sim.cluster_toy import PAGE_SIZE, Memory, layout_of_toy, prompts
from baton.tests.sim.draws import flipped
from baton.worker.tier_startup import tier_fingerprint, tier_planes

SHARE = 0.2  # of the seeds have tiers
LINEAR_DEPTH = 16.0
OTHER_WEIGHTS = 99
MOST_WAIT_S = 2 * FETCH_PATIENCE_S  # of a restore: the patience of a follower
NO_FAULTS = Faults()
LANES = {Save: "save", Load: "load", Spill: "disk"}
HOST_LANES = {"save", "load"}


def add_tiers(seed, faults, settings):
    """(faults, settings) of a seed: of most as they are, of the others with tiers below small pools."""
    rng = Random(f"{seed} tiers")
    if not settings.is_caching or rng.random() >= SHARE:
        return faults, settings

    def on():
        return rng.random() < 0.3

    faults = replace(
        faults,
        tier_slow=0.3 * rng.random() * on(),
        tier_fail=(0.3 + 0.4 * rng.random()) * on(),
        tier_flip=0.3 * rng.random() * on(),
        tier_torn=on(),
        tier_gone=rng.randint(1, 2) * on(),
        tier_hang=rng.randint(1, 2) * on(),
        tier_foreign=on(),
    )
    if faults.tier_torn:
        faults = replace(faults, kill=faults.kill + rng.randint(1, 3))
    has_disk = faults.tier_foreign or faults.tier_torn or rng.random() < 0.7
    return faults, replace(
        settings,
        host_slots=rng.choice((8, 16, 40)),
        disk_slots=rng.choice((24, 60)) * has_disk,
        is_staging=has_disk and rng.random() < 0.3,
        prefill_pages=min(settings.prefill_pages, rng.choice((15, 18, 24))),
        decode_pages=min(settings.decode_pages, rng.choice((20, 24, 32))),
        max_running=max(4, settings.max_running),
        step_s=min(settings.step_s, 0.01),  # there are more clients
        digests_pool=rng.random() < 0.5,
    )


def tiers_of(process):
    """The tiers of a worker that starts."""
    settings, engine = process.settings, process.engine
    planes = tier_planes(engine)
    page_bytes = sum(plane.shape[1] for plane in planes)
    slab = HostSlab(settings.host_slots, page_bytes, engine.pool.device)
    keys = PageKeys(engine.cache, tier_fingerprint(engine))
    tiers = CacheTiers(
        engine.cache,
        keys,
        SlotTable(settings.host_slots, LINEAR_DEPTH),
        page_bytes=page_bytes,
        is_staging=settings.is_staging,
    )
    copies = (PoolDigests if settings.digests_pool else PageCopies)(planes, slab, engine.pool.order)
    running = RunningTiers(
        tiers, TimedCopies(process, copies), linear_depth=LINEAR_DEPTH, clock=process.clock
    )
    if settings.disk_slots:
        weights = engine.runner.memory.weights
        disk = disk_of(process, weights, slab)
        if process.world.faults.tier_foreign:
            disk_of(process, OTHER_WEIGHTS, slab).fill(keys, OTHER_WEIGHTS, settings.head_dim)
        running.find_disk = lambda: disk
    return running


def disk_of(process, weights, slab):
    budget = process.settings.disk_slots * (slab.slot_bytes + RECORD_BYTES)
    return SimDisk(process, fingerprint=f"weights {weights}", slot_bytes=slab.slot_bytes, budget=budget)


class PoolDigests(PageCopies):
    """Copies that digest pages in the pool alone."""

    def digest(self, move):
        return move.digest


class Files:
    """What is on a disk: pages by slot, and the page whose write is under way."""

    def __init__(self):
        self.data, self.records, self.writing = {}, {}, None


class SimDisk(DiskFiles):
    """The files of one fingerprint below a worker's directory, which survive the process."""

    def __init__(self, process, *, fingerprint, slot_bytes, budget):
        super().__init__(Path(process.name), fingerprint=fingerprint, slot_bytes=slot_bytes, budget=budget)
        self._process, self._world = process, process.world
        self._files = process.world.disks.setdefault((process.name, self._name), Files())

    def open(self):
        """A write that the last process did not end left an empty record; after a power failure it left a
        record with a part of its page. A directory that was removed before is made again.
        """
        world = self._world
        if self._files is None:
            self._files = world.disks.setdefault((self._process.name, self._name), Files())
        files = self._files
        if files.writing is not None:
            (move, data), files.writing = files.writing, None
            files.records.pop(move.disk_slot, None)
            if world.faults.tier_torn:
                world.reached["tier_torn"] += 1
                self._keep(move.disk_slot, move, data[: len(data) // 2].ljust(len(data), b"\0"))
        found = [
            StoredPage(slot=slot, priority=0.0, **record) for slot, record in sorted(files.records.items())
        ]
        return list({page.key: page for page in found}.values())

    def check(self):
        if self._files is None:
            raise DiskFault(f"{self.folder} was removed")

    def begin_write(self, move, data):
        """From now on the page of `move` is being written."""
        if self._files is not None:
            self._files.writing = move, bytes(data)

    def write(self, page, data):
        self.check()
        self._files.writing = None
        self._keep(page.slot, page, bytes(data))

    def read(self, slot, data):
        self.check()
        data[:] = self._files.data[slot]
        fails = self._world.network.is_faulty and self._world.rng.random() < self._world.faults.tier_fail
        self._world.reached["tier_fail"] += fails
        return not fails

    def close(self):
        """Nothing is open."""

    def remove(self):
        """The directory is gone: for this process, and for those that come."""
        self._world.disks = {
            key: files for key, files in self._world.disks.items() if files is not self._files
        }
        self._files = None

    def flip(self, rng):
        """One bit of a page is another one."""
        if self._files is not None and self._files.data:
            slot = rng.choice(sorted(self._files.data))
            self._files.data[slot] = flipped(self._files.data[slot], rng)

    def fill(self, keys, weights, head_dim):
        """The pages of all prompts, as a worker with other weights has left them."""
        if self._files.data:
            return
        memory = Memory(KVPool(16, layout_of_toy(head_dim)), weights)
        slots, known = iter(range(self.num_slots)), set()
        for ids in prompts():
            pages = range(1, 1 + len(ids) // PAGE_SIZE)
            if pages:
                memory.write(list(pages), 0, ids[: len(pages) * PAGE_SIZE])
            for page, (parent, key) in zip(pages, keys.of_prompt(ROOT, ids, 0, len(pages), ""), strict=True):
                if key in known or (slot := next(slots, None)) is None:
                    continue
                known.add(key)
                data = memory.words[page].tobytes()
                digest = page_copies.digest_of(key, np.frombuffer(data, np.uint8))
                depth = (page - 1) * PAGE_SIZE
                stored = StoredPage(
                    key=key, parent=parent, slot=slot, depth=depth, priority=0.0, digest=digest
                )
                self._keep(slot, stored, data.ljust(self.slot_bytes, b"\0"))

    def _keep(self, slot, page, data):
        self._files.data[slot] = data
        self._files.records[slot] = {
            "key": page.key, "parent": page.parent, "depth": page.depth, "digest": page.digest
        }  # fmt: skip


class Lane:
    """What one thread has to do: the item under way, and those that wait."""

    def __init__(self):
        self.item, self.waiting = None, deque()


class TimedCopies(TierThreads):
    """Production's copies without its threads: each lane does what a thread would do, one item after the
    other, each at the instant of its end. Every Fetch has a lane of its own, so they end in any order.
    """

    def __init__(self, process, copies):
        self._copies, self._process, self._world = copies, process, process.world
        self._notify = lambda: process.wake(0.0002)
        self._reach = self._use
        self._clock = process.clock
        self._disk = None
        self._done = queue.SimpleQueue()
        self._rng = Random(process.rng.getrandbits(64))
        self._lanes = defaultdict(Lane)
        self.files = None
        self.is_lost = False  # host memory is of no use any more
        self.hangs_until = 0.0  # the disk

    def __repr__(self):
        return f"<TimedCopies of {self._process.name}>"

    def submit(self, job):
        self._queue(f"read {job.number}" if isinstance(job, Fetch) else LANES[type(job)], job)

    def open_disk(self, files):
        self.files = files
        self._queue("disk", files)

    def close(self):
        """There are no threads."""

    @property
    def faults(self):
        return self._world.faults if self._world.network.is_faulty else NO_FAULTS

    def _queue(self, name, item):
        lane = self._lanes[name]
        lane.waiting.append(item)
        if lane.item is None:
            self._begin(name)

    def _begin(self, name):
        lane = self._lanes[name]
        lane.item = lane.waiting.popleft()
        took = (0.0005 if name in HOST_LANES else 0.002) * (1 + 4 * self._rng.random())
        if self._rng.random() < self.faults.tier_slow:
            self._world.reached["tier_slow"] += 1
            took += 0.3 * self._rng.random()
        if isinstance(lane.item, Spill):
            took += 0.1 * self.faults.tier_torn  # processes die meanwhile
            move = lane.item.moves[0]
            self.files.begin_write(move, self._copies.slab.whole(move.slot))
        self._world.timeline.at(self._world.timeline.now + took, self._finish, name)

    def _finish(self, name):
        process, now = self._process, self._world.timeline.now
        if not process.is_alive:
            return
        until = max(process.stalled_until, 0.0 if name in HOST_LANES else self.hangs_until)
        if until > now:
            self._world.timeline.at(until, self._finish, name)
            return
        lane = self._lanes[name]
        item, lane.item = lane.item, None
        self._world.timeline.note(process.name, "copied", type(item).__name__)
        self._flip_some()
        if isinstance(item, DiskFiles):
            self._world.reached["tier_foreign"] += self._world.faults.tier_foreign
            self._end(self._open(item))
        elif name not in HOST_LANES:
            self._end(self._moved(item, self._read if isinstance(item, Fetch) else self._write))
        else:
            self._world.reached["pages restored"] += len(item.moves) * isinstance(item, Load)
            jobs = queue.SimpleQueue()
            jobs.put(item)
            jobs.put(None)  # the loop of the thread ends
            self._copy_all(jobs)
        if lane.waiting:
            self._begin(name)
        elif name != "disk" and name not in HOST_LANES:
            del self._lanes[name]

    def _use(self, site):
        if self.is_lost and site != "tier:fetch":
            raise OSError("the memory is lost")

    def _flip_some(self):
        if self._rng.random() >= self.faults.tier_flip:
            return
        self._world.reached["tier_flip"] += 1
        if self.files is not None and self._rng.random() < 0.5:
            self.files.flip(self._rng)
        else:
            data = self._copies.slab.page(self._rng.randrange(len(self._copies.slab.slots)))
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)


# --- faults at chosen times ---------------------------------------------------------------------------------


def lose_tier(process, rng):
    """The disk's directory is removed, or host memory fails; whether there are tiers."""
    if process.worker.tiers is None:
        return False
    copies = process.worker.tiers._copiers
    if copies.files is not None and rng.random() < 0.6:
        copies.files.remove()
    else:
        copies.is_lost = True
    return True


def hang_disk(process, seconds):
    """The disk does not answer for so long; whether there was one."""
    copies = process.worker.tiers and process.worker.tiers._copiers
    if copies is None or copies.files is None:
        return False
    copies.hangs_until = process.timeline.now + seconds
    return True


# --- invariants ---------------------------------------------------------------------------------------------


class TierChecks:
    """Looks at the tiers of one worker from outside."""

    def __init__(self, process):
        self._process, self._tiers = process, process.worker.tiers.tiers

    def audit(self, owners):
        """The books of all tiers hold, and no restore waits too long. Counts the tiers among `owners`."""
        tiers, now = self._tiers, self._process.clock()
        tiers.check_integrity()
        for page, has_left in tiers._saving.items():
            owners[page] += has_left
        for restore in tiers._restores:
            for page in restore.pages:
                owners[page] += 1
            if restore.state is RestoreState.WAITING and not now < restore.patience <= now + MOST_WAIT_S:
                raise Violation(f"{self._process.name}: {restore} keeps a request waiting")

    def check_end(self):
        """What the tables say lies in the slots, unless a fault has changed it. Nothing else was changed."""
        process, tiers, faults = self._process, self._tiers, self._process.world.faults
        process.world.reached["restores declined"] += tiers.counters["tier_declined_restores"]
        if faults.tier_flip or faults.tier_fail or faults.tier_torn:
            return
        slab = process.worker.tiers._copiers._copies.slab
        for page in tiers.host:
            digest = page_copies.digest_of(page.key, slab.page(page.slot))
            if page.is_ready and not page.is_bad and digest != page.digest:
                raise Violation(f"host slot {page.slot} of {process.name} does not hold its page")
        num_bad = tiers.counters["host_bad_pages"] + tiers.counters["disk_bad_pages"]
        if num_bad:
            raise Violation(f"{process.name} found {num_bad} damaged pages, and nobody damaged any")
