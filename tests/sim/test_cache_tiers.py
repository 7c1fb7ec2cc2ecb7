"""Tiers under random copies and faults: pages are conserved, no wrong page is used, no request starves.

Each defence that is switched off is seen by some seed.
"""

import pytest
from baton.engine.kv.page_names import child_key
from baton.engine.kv.prefix_journal import PrefixJournal
from baton.engine.kv.tiers.cache_tiers import CacheTiers
from baton.engine.kv.tiers.page_keys import PageKeys
from baton.engine.kv.tiers.slot_table import SlotTable
from baton.tests.sim import tier_world
from baton.tests.sim.tier_world import DISK_SLOTS, SIZE, TierWorld

SEEDS = 40
MANY_SEEDS = 5000
SEEDS_OF_A_DEFENCE = 60


def test_tiers_use_no_wrong_page_and_lose_none():
    restored = declined = 0
    for seed in range(SEEDS):
        world = TierWorld(seed)
        world.run()
        restored += world.num_restored
        declined += world.num_declined
    assert declined > SEEDS, "hardly a page was computed though a tier had it"
    assert restored > 10 * SEEDS, "the tiers were hardly used, so this shows little"


@pytest.mark.slow
def test_tiers_use_no_wrong_page_and_lose_none_in_many_seeds():
    for seed in range(SEEDS, MANY_SEEDS):
        TierWorld(seed).run()


class UnguardedSaves(CacheTiers):
    """A page that is being saved is freed at once when it is evicted."""

    def leaves(self, page):
        if super().leaves(page):
            self._saving[page] = False
        return False


class UnguardedRestores(CacheTiers):
    """Pages that are being restored have no owner but their request."""

    def begin(self, *args):
        restore = super().begin(*args)
        if restore is not None:
            self.cache.allocator.release(restore.pages)
        return restore

    def _cut(self, restore, count):
        self.own(restore.pages[count:])
        super()._cut(restore, count)

    def _loaded(self, under_way, done):
        self.own(under_way.restore.pages)
        super()._loaded(under_way, done)

    def own(self, pages):
        self.cache.allocator.retain(page for page in pages if self.cache.allocator.refs(page))


class KeptOnDisk(SlotTable):
    """A damaged page of the disk is offered again and again."""

    def discard(self, page):
        if self.num_slots != DISK_SLOTS:
            super().discard(page)


class UnsaltedKeys(PageKeys):
    """Tenants share keys."""

    def of_prompt(self, before, token_ids, first, end, salt):
        return super().of_prompt(before, token_ids, first, end, "")

    def _found(self, page):
        key, parts, at = self._root, [], page
        while at:
            parts.append(self._cache.part_of(at)[: 8 * SIZE])
            at = self._cache.parent_of(at)
        for part in reversed(parts):
            key = child_key(key, part)
        return key, len(parts) - 1


def seen(**defects):
    """The first fault that a seed finds."""
    for seed in range(SEEDS_OF_A_DEFENCE):
        try:
            TierWorld(seed, **defects).run()
        except AssertionError as fault:
            return str(fault)
    return ""


@pytest.mark.parametrize(
    ("defect", "fault"),
    [
        ({"is_checked": False}, "holds"),
        ({"tiers_type": UnguardedSaves}, "was freed while it is saved"),
        ({"tiers_type": UnguardedRestores}, "was freed while it is restored"),
        ({"keys_type": UnsaltedKeys}, "holds"),
    ],
    ids=["digest", "save guard", "restore guard", "salt"],
)
def test_a_defence_that_is_off_is_seen(defect, fault):
    assert fault in seen(**defect)


def test_a_damaged_page_that_stays_on_the_disk_is_seen(monkeypatch):
    monkeypatch.setattr(tier_world, "SlotTable", KeptOnDisk)
    assert "a damaged page is still offered" in seen()


def test_a_budget_that_does_not_bind_is_seen(monkeypatch):
    def grow(table):
        table._free.append(len(table._pages) + len(table._free))
        table.num_slots += 1
        return True

    monkeypatch.setattr(SlotTable, "_evict", grow)
    assert "beyond its budget" in seen()


@pytest.mark.parametrize("name", ["left", "stored", "removed", "restart"])
def test_a_journal_that_leaves_something_out_is_seen(name, monkeypatch):
    monkeypatch.setattr(PrefixJournal, name, lambda *_: None)
    assert "what is told is not what is held" in seen()
