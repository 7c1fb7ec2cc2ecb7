"""A pool with its tiers, without an engine: pages hold the prefix that they stand for, copies end at random.

A request takes pages, restores what a tier has, writes the rest and checks every page that it would read. The
memory of a copy is read and written when the copy ends, which is the worst time.
"""

import random

from baton.engine.kv.page_names import name_of
from baton.engine.kv.pool import PageAllocator, PoolExhausted
from baton.engine.kv.prefix_cache import PrefixCache
from baton.engine.kv.prefix_journal import PrefixJournal
from baton.engine.kv.tiers.cache_tiers import CacheTiers
from baton.engine.kv.tiers.jobs import Fetch, JobDone, Load, Save, Spill
from baton.engine.kv.tiers.page_keys import PageKeys
from baton.engine.kv.tiers.slot_table import SlotTable, StoredPage

SIZE = 2  # tokens of a page
NUM_PAGES, HOST_SLOTS, DISK_SLOTS = 18, 10, 20
FAULTS = ("host flip", "disk flip", "torn", "fetch fails", "save fails", "disk full", "disk hangs", "restart")
PATIENCE_TURNS = 400


def digest_of(key, content):
    return hash((key, content))


class Ask:
    """A request: its prompt, its pages, and the restore that it waits for."""

    def __init__(self, salt, tokens):
        self.salt, self.tokens = salt, tokens
        self.pages, self.restore, self.have, self.waited = [], None, 0, 0

    def content(self, place):
        return self.salt, tuple(self.tokens[: (place + 1) * SIZE])


class JournalReader:
    """Follows a journal, and now and then loses a part of it."""

    def __init__(self, journal, rng):
        self.journal, self.rng, self.names = journal, rng, set()

    def read(self, limit):
        """Takes one part in; False when there was none."""
        if self.rng.random() < 0.5:
            self.journal.work(self.rng.randint(1, 20))
        part = self.journal.take(limit)
        if part is None:
            return False
        if self.rng.random() < 0.05:
            self.journal.restart()
            return True
        if part.is_first:
            self.names.clear()
        self.names.update(part.added)
        self.names.difference_update(part.removed)
        return True


class TierWorld:
    """One seed. `faults`: those that may happen. `has_disk`, `is_staging`: the tiers."""

    def __init__(self, seed, faults=FAULTS, *, tiers_type=CacheTiers, keys_type=PageKeys, is_checked=True):
        self.rng = random.Random(seed)
        self.faults = [fault for fault in faults if self.rng.random() < 0.5]
        self.has_disk, self.is_staging = self.rng.random() < 0.7, False
        if self.has_disk:
            self.is_staging = self.rng.random() < 0.4
        self.types = tiers_type, keys_type
        self.is_checked = is_checked  # the copies compare digests
        # as on a GPU, which digests its own memory alone
        self.checks_fetches = random.Random(f"{seed} fetches").random() < 0.5
        self.pool, self.host, self.disk = {}, {}, {}
        self.index = {}  # of the disk, which survives a restart
        self.now, self.restarts = 0.0, 0
        self.asks, self.stems = [], [self.draw(20) for _ in range(3)]
        self.num_done = self.num_restored = self.num_declined = 0
        self.costs = random.Random(f"{seed} costs")
        self.token_s = self.costs.choice([0.0, 0.001, 0.01, 0.1]) if self.costs.random() < 0.5 else None
        self.start()

    def draw(self, count):
        return [self.rng.randrange(50) for _ in range(count)]

    def start(self):
        """A life of the worker: what is in memory is lost, what is on disk is found again."""
        tiers_type, keys_type = self.types
        self.allocator = PageAllocator(NUM_PAGES)
        self.cache = PrefixCache(self.allocator, SIZE)
        self.keys = keys_type(self.cache, "weights")
        self.tiers = tiers_type(
            self.cache,
            self.keys,
            SlotTable(HOST_SLOTS, 8.0),
            page_bytes=100,
            is_staging=self.is_staging,
        )
        self.reader = JournalReader(PrefixJournal(self.cache, self.keys), random.Random(self.rng.random()))
        self.tiers.keep_journal(self.reader.journal)
        self.is_full = self.hangs = False
        self.jobs, self.asks = [], []
        self.pool, self.host = {}, {}
        if self.has_disk:
            table = SlotTable(DISK_SLOTS, 8.0)
            table.adopt([
                StoredPage(key=key, parent=parent, slot=slot, depth=depth, priority=0.0, digest=digest)
                for slot, (key, parent, depth, digest) in self.index.items()
            ])  # fmt: skip
            self.tiers.open_disk(table)

    def check_journal(self):
        """What was told is what is held, once everything has been told."""
        self.reader.read(3)
        if self.reader.rng.random() < 0.9:
            return
        while self.reader.read(7):
            pass
        held = {name_of(self.keys.of_page(page)) for page in self.cache.cached_pages()}
        for tier in (self.tiers.host, self.tiers.disk):
            if tier is not None and not (tier is self.tiers.host and self.tiers.is_off):
                held |= {name_of(page.key) for page in tier if page.is_ready}
        assert self.reader.names == held, "what is told is not what is held"

    # --- copies ---------------------------------------------------------------------------------------------

    def flip(self, memory, fault):
        if fault in self.faults and memory and self.rng.random() < 0.02:
            slot = self.rng.choice(sorted(memory))
            memory[slot] = ("damaged", self.rng.random())

    def hits(self, fault, chance=0.05):
        return fault in self.faults and self.rng.random() < chance

    def end_some(self):
        """Some of the copies under way end, those of a kind in order, but for what is read from a disk."""
        self.jobs += self.tiers.take_jobs()
        self.flip(self.host, "host flip")
        self.flip(self.disk, "disk flip")
        for kind in (Save, Load, Spill, Fetch):
            mine = [job for job in self.jobs if isinstance(job, kind)]
            if self.hangs and kind in (Spill, Fetch):
                continue
            if kind is Fetch:
                self.rng.shuffle(mine)
            for job in mine[: self.rng.randrange(len(mine) + 1)]:
                self.jobs.remove(job)
                done = self.performed(job)
                self.tiers.done(done, self.now)
                self.tiers.check_integrity()
                if isinstance(job, Load):
                    self.check_discarded(job, done)

    def check_discarded(self, job, done):
        """A page that was not what it should be is met once."""
        for move, digest in zip(job.moves, done.digests, strict=True):
            tiers = [self.tiers.host] if self.tiers.disk is None else [self.tiers.host, self.tiers.disk]
            if digest != move.digest:
                assert not any(tier.get(move.key) for tier in tiers), "a damaged page is still offered"

    def performed(self, job):
        fault = ""
        if isinstance(job, (Spill, Fetch)):
            self.is_full = self.is_full or self.hits("disk full", 0.01)
            fault = "no space left on device" if self.is_full else ""
        digests = [None if fault else self.moved(job, move) for move in job.moves]
        return JobDone(number=job.number, digests=tuple(digests), ended=self.now, fault=fault)

    def moved(self, job, move):
        if isinstance(job, Save):
            if self.hits("save fails", 0.02):
                return None
            self.host[move.slot] = self.pool.get(move.page)
            return digest_of(move.key, self.host[move.slot])
        if isinstance(job, Load):
            self.pool[move.page] = self.host.get(move.slot)
            return digest_of(move.key, self.pool[move.page]) if self.is_checked else move.digest
        if isinstance(job, Spill):
            self.index.pop(move.disk_slot, None)
            self.disk[move.disk_slot] = self.host.get(move.slot)
            self.index[move.disk_slot] = (move.key, move.parent, move.depth, move.digest)
            return move.digest
        if self.hits("fetch fails"):
            return None
        self.host[move.slot] = self.disk.get(move.disk_slot)
        is_right = digest_of(move.key, self.host[move.slot]) == move.digest
        return move.digest if is_right or not self.is_checked or not self.checks_fetches else None

    # --- requests -------------------------------------------------------------------------------------------

    def arrive(self):
        stem = self.rng.choice(self.stems)[: self.rng.randrange(2, 21)]
        ask = Ask(self.rng.choice(["", "tenant a", "tenant b"]), stem + self.draw(self.rng.randrange(1, 4)))
        cached = self.cache.match(ask.tokens, len(ask.tokens) - 1, ask.salt)
        try:
            ask.pages = cached + self.cache.alloc(-(-len(ask.tokens) // SIZE) - len(cached))
        except PoolExhausted:
            self.allocator.release(cached)
            return
        ask.have = len(cached)
        for page in ask.pages[ask.have :]:
            self.pool[page] = "not written"
        ask.restore = self.begin(ask)
        self.asks.append(ask)

    def begin(self, ask):
        """Where the time of a token is known, it may be sooner to compute the pages."""
        limit, compute_time = len(ask.tokens) - 1, None
        if self.token_s is not None:
            compute_time = lambda tokens: self.token_s * tokens  # noqa: E731
        before = self.tiers.counters["tier_declined_restores"]
        restore = self.tiers.begin(ask.tokens, limit, ask.salt, ask.pages, ask.have, self.now, compute_time)
        self.num_declined += self.tiers.counters["tier_declined_restores"] - before
        return restore

    def serve(self, ask):
        """Takes in the restored pages, computes the others, and gives all back."""
        restore, ask.restore = ask.restore, None
        if restore is not None:
            if restore.num_pages:
                whole = (ask.have + restore.num_pages) * SIZE
                self.cache.insert(ask.tokens[:whole], ask.pages, ask.salt)
                ask.have += restore.num_pages
                self.num_restored += restore.num_pages
            elif restore.is_follower and (again := self.begin(ask)) is not None:
                ask.restore = again
                return
        for place in range(ask.have):
            found = self.pool[ask.pages[place]]
            assert found == ask.content(place), (
                f"page {ask.pages[place]} holds {found} for {ask.content(place)}"
            )
        for place in range(ask.have, len(ask.pages)):
            self.pool[ask.pages[place]] = ask.content(place)
        self.cache.insert(ask.tokens, ask.pages, ask.salt)
        self.leave(ask)
        self.num_done += 1

    def leave(self, ask):
        if ask.restore is not None:
            self.tiers.give_up(ask.restore)
        self.allocator.release(ask.pages)
        self.asks.remove(ask)

    def turn(self):
        self.now += 0.02
        if self.hits("restart", 0.01):
            self.restart()
        self.hangs = self.hangs or self.hits("disk hangs", 0.002)
        if self.rng.random() < 0.5:
            self.arrive()
        self.end_some()
        self.tiers.turn(self.now)
        for ask in list(self.asks):
            ask.waited += 1
            assert ask.waited < PATIENCE_TURNS, f"{ask.restore!r} keeps a request waiting: {self.tiers!r}"
            if ask.restore is None or ask.restore.is_done:
                if self.rng.random() < 0.7:
                    self.serve(ask)
            elif self.rng.random() < 0.02:
                self.leave(ask)  # its client went away
        self.tiers.check_integrity()
        host, disk = self.tiers.host_bytes[0], self.tiers.disk_bytes[0]
        assert host <= HOST_SLOTS * 100, "the host tier is beyond its budget"
        assert disk <= DISK_SLOTS * 100, "the disk tier is beyond its budget"
        assert not self.host or max(self.host) < HOST_SLOTS, "a copy goes beyond the host slots"
        self.check_journal()

    def restart(self):
        """kill -9: a copy to the disk may be torn."""
        self.restarts += 1
        if "torn" in self.faults and self.index:
            self.disk[self.rng.choice(sorted(self.index))] = "torn"
        for job in self.jobs:
            if isinstance(job, Spill) and self.rng.random() < 0.5:
                self.index.pop(job.moves[0].disk_slot, None)
                self.disk[job.moves[0].disk_slot] = "torn"
        self.start()

    def run(self, turns=150):
        for _ in range(turns):
            self.turn()
        self.faults, self.hangs = [], False
        for _ in range(2 * PATIENCE_TURNS):
            if not self.asks and not self.tiers.is_busy:
                break
            self.turn_quietly()
        assert not self.asks, "a request starves"
        self.cache.clear()
        self.tiers.check_integrity()
        assert self.allocator.num_used == 0, f"{self.allocator!r}: pages are lost"

    def turn_quietly(self):
        self.now += 0.02
        self.end_some()
        for ask in list(self.asks):
            if ask.restore is None or ask.restore.is_done:
                self.serve(ask)
        self.jobs += self.tiers.take_jobs()
