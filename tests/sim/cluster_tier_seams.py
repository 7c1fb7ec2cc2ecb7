"""Switches for each defence of the tiers in a simulated cluster; `cluster_seams` has the rules."""

from contextlib import ExitStack, contextmanager
from unittest.mock import PropertyMock, patch

from baton.engine.kv.prefix_cache import PrefixCache
from baton.engine.kv.tiers import page_copies
from baton.engine.kv.tiers.cache_tiers import CacheTiers
from baton.engine.kv.tiers.disk_files import DiskFiles
from baton.engine.kv.tiers.slot_table import SlotTable
from baton.tests.sim.cluster_faults import Faults
from baton.tests.sim.cluster_world import Options, Settings

TIERED = Settings(host_slots=40, disk_slots=60, prefill_pages=18, decode_pages=22)
STAGED = Settings(host_slots=16, disk_slots=60, is_staging=True, prefill_pages=18, decode_pages=22)


def all_of(*patches):
    """One context manager of several."""

    @contextmanager
    def patched():
        with ExitStack() as stack:
            for each in patches:
                stack.enter_context(each)
            yield

    return patched()


def no_digest():
    """Pages of a tier are taken as they come."""
    return patch.object(page_copies, "digest_of", lambda *_: 0), Options(
        faults=Faults(tier_flip=0.5), settings=TIERED, num_clients=24
    )


def no_digest_of_a_torn_page():
    """Pages that a dead process has written in part are taken as they are."""
    return patch.object(page_copies, "digest_of", lambda *_: 0), Options(
        faults=Faults(tier_torn=True, kill=4), settings=STAGED, num_clients=24
    )


def unguarded_saves():
    """A page that is being saved is given to others when it is evicted."""
    leaves = CacheTiers.leaves

    def freed(self, page):
        if leaves(self, page):
            self._saving[page] = False
        return False

    return patch.object(CacheTiers, "leaves", freed), Options(
        faults=Faults(tier_slow=1.0, burst=True), settings=TIERED, num_clients=24
    )


def unguarded_restores():
    """Pages that are being restored have no owner but their request, which may go away."""
    begin, cut, loaded = CacheTiers.begin, CacheTiers._cut, CacheTiers._loaded

    def own(self, pages):
        self.cache.allocator.retain(page for page in pages if self.cache.allocator.refs(page))

    def begin_unguarded(self, *args):
        restore = begin(self, *args)
        if restore is not None:
            self.cache.allocator.release(restore.pages)
        return restore

    def cut_unguarded(self, restore, count):
        own(self, restore.pages[count:])
        cut(self, restore, count)

    def loaded_unguarded(self, under_way, done):
        own(self, under_way.restore.pages)
        loaded(self, under_way, done)

    return all_of(
        patch.object(CacheTiers, "begin", begin_unguarded),
        patch.object(CacheTiers, "_cut", cut_unguarded),
        patch.object(CacheTiers, "_loaded", loaded_unguarded),
    ), Options(faults=Faults(leave=0.9, tier_slow=1.0), settings=TIERED, num_clients=24)


def unheld_slots():
    """The slot of a page may be given to another one while a copy reads it."""
    return all_of(
        patch.object(SlotTable, "hold", lambda *_: None),
        patch.object(SlotTable, "let_go", lambda *_: None),
        patch.object(CacheTiers, "check_integrity", lambda *_: None),
    ), Options(
        faults=Faults(tier_slow=1.0), settings=Settings(
            host_slots=6, disk_slots=24, prefill_pages=18, decode_pages=22
        ), num_clients=24,
    )  # fmt: skip


def no_patience():
    """A request waits for a disk for as long as it takes."""
    return patch.object(CacheTiers, "_proceed", lambda *_: None), Options(
        faults=Faults(tier_hang=12), settings=STAGED, num_clients=24
    )


def no_fingerprint_of_the_disk():
    """A worker opens the files of one with other weights."""
    make = DiskFiles.__init__

    def make_any(self, directory, *, fingerprint, **sizes):
        make(self, directory, fingerprint="", **sizes)

    return patch.object(DiskFiles, "__init__", make_any), Options(
        faults=Faults(tier_foreign=True), settings=TIERED, num_clients=24
    )


def pages_saved_are_free():
    """Pages that a copy still reads count as free."""
    return patch.object(PrefixCache, "num_held", PropertyMock(return_value=0)), Options(
        faults=Faults(tier_slow=1.0, burst=True), settings=TIERED, num_clients=24
    )


TIER_SEAMS = {
    "digest of a stored page": no_digest,
    "digest of a torn page": no_digest_of_a_torn_page,
    "pages held until saved": unguarded_saves,
    "pages held until restored": unguarded_restores,
    "slots held until read": unheld_slots,
    "patience with a disk": no_patience,
    "fingerprint of a disk": no_fingerprint_of_the_disk,
    "pages being saved": pages_saved_are_free,
}
