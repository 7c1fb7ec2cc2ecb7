"""Which pages of a prompt a restore brings back, by the measured times of both tiers and of computing."""

import pytest
from baton.engine.kv.pool import PageAllocator
from baton.engine.kv.prefix_cache import ROOT, PrefixCache
from baton.engine.kv.tiers.cache_tiers import JOB_PAGES, CacheTiers
from baton.engine.kv.tiers.jobs import Fetch, JobDone, Load
from baton.engine.kv.tiers.page_keys import PageKeys
from baton.engine.kv.tiers.slot_table import SlotTable, StoredPage

SIZE, NUM_PAGES, HOST_PAGES = 2, 30, 10  # of the prompt the first pages are in host memory, all on disk
LOAD_S, FETCH_S = 0.001, 0.01  # of a page
PROMPT = list(range(SIZE * NUM_PAGES + 1))
NOW = 1000.0


class Stored:
    """Tiers with the prompt, whose copies were measured."""

    def __init__(self):
        self.cache = PrefixCache(PageAllocator(4 * NUM_PAGES), SIZE)
        keys = PageKeys(self.cache, "weights")
        self.tiers = CacheTiers(self.cache, keys, SlotTable(100, 8.0), page_bytes=100)
        disk, named = SlotTable(100, 8.0), list(keys.of_prompt(ROOT, PROMPT, 0, NUM_PAGES, ""))
        for table, count in ((self.tiers.host, HOST_PAGES), (disk, NUM_PAGES)):
            table.adopt(
                StoredPage(key=key, parent=parent, slot=place, depth=SIZE * place, priority=0.0, digest=7)
                for place, (parent, key) in enumerate(named[:count])
            )
        self.tiers.open_disk(disk)
        costs = self.tiers.costs
        costs.load.ended(100, 0.0, 100 * LOAD_S)
        costs.fetch.ended(100, 0.0, 100 * FETCH_S)
        for num_fetched in (0, 1):
            costs.is_sooner(num_fetched=num_fetched, num_loaded=1, compute_s=-1.0, now=NOW)  # the try

    def begin(self, token_s, before=0, now=NOW):
        """The pages that come back where a token takes `token_s`, behind `before` others; None: unknown."""
        pages = self.cache.alloc(NUM_PAGES + 1)
        compute_time = None if token_s is None else lambda tokens: token_s * (before + tokens)
        self.restore = self.tiers.begin(PROMPT, len(PROMPT) - 1, "", pages, 0, now, compute_time)
        self.tiers.check_integrity()
        return 0 if self.restore is None else len(self.restore.pages)

    @property
    def declined(self):
        return self.tiers.counters["tier_declined_restores"]


BREAK_EVEN = {
    "host": LOAD_S / SIZE,
    "disk": (FETCH_S + LOAD_S) / SIZE,
}  # seconds of a token at which a page comes back as soon as it is computed


@pytest.mark.parametrize(
    ("token_s", "num_pages", "declined"),
    [
        (None, NUM_PAGES, 0),
        (1.01 * BREAK_EVEN["disk"], NUM_PAGES, 0),
        (0.99 * BREAK_EVEN["disk"], HOST_PAGES, 1),
        (1.01 * BREAK_EVEN["host"], HOST_PAGES, 1),
        (0.99 * BREAK_EVEN["host"], 0, 1),
    ],
)
def test_pages_come_back_as_far_as_that_is_sooner(token_s, num_pages, declined):
    stored = Stored()
    assert stored.begin(token_s) == num_pages
    assert stored.declined == declined
    kinds = {type(job) for job in stored.tiers.take_jobs()}
    assert kinds == ({Fetch} if num_pages > HOST_PAGES else {Load} if num_pages else set())


def test_prompts_that_are_computed_before_leave_time_for_a_restore():
    token_s = 0.5 * BREAK_EVEN["disk"]
    assert Stored().begin(token_s, before=SIZE * (NUM_PAGES - HOST_PAGES) - 1) == HOST_PAGES
    assert Stored().begin(token_s, before=SIZE * (NUM_PAGES - HOST_PAGES) + 1) == NUM_PAGES


@pytest.mark.parametrize(("tier", "count"), [("host", HOST_PAGES), ("disk", NUM_PAGES)])
def test_pages_that_are_copied_before_count_for_those_behind(tier, count):
    stored, token_s = Stored(), BREAK_EVEN[tier]
    assert stored.begin(1.01 * token_s) == count
    other = [90, *PROMPT][: SIZE * count + 1]  # another prompt of as many pages, in this tier alone
    table = stored.tiers.host if tier == "host" else stored.tiers.disk
    for parent, key in stored.tiers.keys.of_prompt(ROOT, other, 0, count, ""):
        table.commit(table.reserve(key, parent, 0), 7)
    for factor, num_pages in ((1.5, 0), (2.01, count)):
        pages, compute_time = stored.cache.alloc(count + 1), (factor * token_s).__mul__
        restore = stored.tiers.begin(other, len(other) - 1, "", pages, 0, NOW, compute_time)
        assert (0 if restore is None else len(restore.pages)) == num_pages


def test_ends_of_copies_are_measured():
    stored = Stored()
    stored.begin(None)
    jobs, ended = stored.tiers.take_jobs(), NOW
    while jobs:
        kind, count = type(jobs[0]), sum(len(job.moves) for job in jobs)
        for job in jobs:
            ended += len(job.moves) * 3 * FETCH_S
            digests = (7,) * len(job.moves)
            stored.tiers.done(JobDone(number=job.number, digests=digests, ended=ended), ended + 5.0)
        time = stored.tiers.costs.fetch if kind is Fetch else stored.tiers.costs.load
        rounded = -(-count // JOB_PAGES) * JOB_PAGES / count  # few pages count as more
        assert time.of(100) == pytest.approx(300 * FETCH_S, rel=rounded - 1 + 0.01)
        jobs, ended = stored.tiers.take_jobs(), ended + 5.0
    assert stored.restore.num_pages == NUM_PAGES


def test_a_host_page_found_damaged_while_it_is_spilled_leaves_the_disk():
    cache = PrefixCache(PageAllocator(4 * NUM_PAGES), SIZE)
    keys, disk = PageKeys(cache, "weights"), SlotTable(100, 8.0)
    tiers = CacheTiers(cache, keys, SlotTable(100, 8.0), page_bytes=100)
    named = list(keys.of_prompt(ROOT, PROMPT, 0, 3, ""))
    tiers.host.adopt(
        StoredPage(key=key, parent=parent, slot=place, depth=SIZE * place, priority=0.0, digest=7)
        for place, (parent, key) in enumerate(named)
    )
    tiers.open_disk(disk)
    tiers.turn(NOW)
    restore = tiers.begin(PROMPT, 3 * SIZE, "", cache.alloc(3), 0, NOW)
    spill, load = tiers.take_jobs()
    tiers.done(JobDone(number=load.number, digests=(7, 6, 7), ended=NOW), NOW)
    assert restore.num_pages == 1
    tiers.done(JobDone(number=spill.number, digests=(7, 7, 7), ended=NOW), NOW)
    tiers.check_integrity()
    assert [key in disk for _, key in named] == [True, False, True]
    assert [key in tiers.host for _, key in named] == [True, False, True]
