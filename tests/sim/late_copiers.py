"""Copies of a worker's tiers that end at random turns, with the real memory and a disk that is a table."""

from baton.engine.kv.tiers.cache_tiers import CacheTiers
from baton.engine.kv.tiers.host_slab import HostSlab
from baton.engine.kv.tiers.jobs import Fetch, JobDone, Load, Save, Spill
from baton.engine.kv.tiers.page_copies import PageCopies
from baton.engine.kv.tiers.page_keys import PageKeys
from baton.engine.kv.tiers.running_tiers import RunningTiers
from baton.engine.kv.tiers.slot_table import SlotTable
from baton.worker.tier_startup import linear_depth_of, tier_fingerprint, tier_planes


class LateCopiers:
    """Copiers for `RunningTiers`. `flips`: the share of copies whose host slot is damaged before.

    Copies tell that they took no time, so what is stored is restored.
    """

    def __init__(self, copies, rng, flips=0.0):
        self.copies, self.rng, self.flips = copies, rng, flips
        self.jobs, self.disk, self.num_flips = [], {}, 0

    def submit(self, job):
        self.jobs.append(job)

    def open_disk(self, files):
        raise AssertionError("its disk is a table")

    def close(self):
        self.jobs.clear()

    def results(self):
        ended = []
        for kinds in ((Save,), (Load,), (Spill, Fetch)):
            mine = [job for job in self.jobs if isinstance(job, kinds)]
            for job in mine[: self.rng.randrange(len(mine) + 1)]:
                self.jobs.remove(job)
                ended.append(JobDone(number=job.number, digests=tuple(self.digests(job)), ended=0.0))
        return ended

    def digests(self, job):
        if isinstance(job, Save):
            return self.copies.save(job.moves)
        if isinstance(job, Load):
            self.damage(job)
            return self.copies.load(job.moves)
        return [self.moved(job, move) for move in job.moves]

    def damage(self, job):
        if self.rng.random() < self.flips:
            self.num_flips += 1
            self.copies.slab.page(job.moves[0].slot)[self.rng.randrange(8)] ^= 4

    def moved(self, job, move):
        page = self.copies.slab.page(move.slot)
        if isinstance(job, Spill):
            self.disk[move.disk_slot] = page.copy()
            return move.digest
        page[:] = self.disk[move.disk_slot]
        digest = self.copies.digest(move)
        return digest if digest == move.digest else None


def attach_tiers(worker, clock, rng, *, host_slots, disk_slots=0, flips=0.0):
    """Gives a worker of a `Pair` tiers whose copies end late. Returns its copiers."""
    engine = worker.engine
    planes = tier_planes(engine)
    page_bytes = sum(plane.shape[1] for plane in planes)
    slab = HostSlab(host_slots, page_bytes, engine.pool.device)
    depth = linear_depth_of(engine)
    tiers = CacheTiers(
        engine.cache,
        PageKeys(engine.cache, tier_fingerprint(engine)),
        SlotTable(host_slots, depth),
        page_bytes=page_bytes,
    )
    if disk_slots:
        tiers.open_disk(SlotTable(disk_slots, depth))
    copiers = LateCopiers(PageCopies(planes, slab, engine.pool.order), rng, flips)
    worker.tiers = RunningTiers(tiers, copiers, linear_depth=depth, clock=clock)
    return copiers
