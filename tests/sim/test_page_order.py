"""Both workers on a device whose work ends only when awaited: every page is copied in its order."""

import random

import pytest
from baton.tests.sim.late_copiers import attach_tiers
from baton.tests.sim.test_tiered_workers import drained, played
from baton.tests.sim.test_workers import prompts
from baton.tests.sim.worker_pair import Pair, name
from baton.tests.variants import second

pytestmark = pytest.mark.usefixtures("one_thread")


def checked(pair):
    for worker in (pair.prefill, pair.decode):
        worker.engine.pool.order.check_uses()
        watch_launches(worker.engine)
    return pair


def watch_launches(engine):
    """Asserts that launched work uses only pages that have an owner: a release stamps no later work."""
    order, use, refs = engine.pool.order, engine.pool.order.use, engine.cache.allocator.refs

    def watched(*, reads, writes):
        free = sorted({page for page in [*reads, *writes] if page and not refs(page)})
        assert not free, f"work on pages {free} is launched behind their release"
        use(reads=reads, writes=writes)

    order.use = watched


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("drafts", [None, {"spec_steps": 3}, {"spec_steps": 3, "spec_topk": 2}])
@pytest.mark.parametrize("chunk_size", [4, second(0)])
def test_no_block_is_copied_before_the_forwards_that_use_its_pages(target, head, chunk_size, drafts, overlap):
    pair = checked(
        Pair(
            target, "" if drafts is None else head, chunk_size=chunk_size, pages=48 if drafts is None else 72,
            overlap=overlap, **(drafts or {}),
        )
    )  # fmt: skip
    rng = random.Random(chunk_size)
    for i, prompt in enumerate(prompts(rng, 24)):  # more than the pools hold: pages change hands
        pair.send(name(i), prompt, max_new_tokens=4)
        pair.run(rng, until=lambda: pair.decode.num_rooms < 3)
    pair.run(rng)
    assert len(pair.ends) == 24
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("is_local", [False, True])
def test_no_page_of_a_tier_is_copied_before_the_forwards_that_use_it(target, head, is_local, overlap):
    pair, rng = checked(Pair(target, head, pages=24, overlap=overlap)), random.Random(7)
    for worker in (pair.prefill, pair.decode):
        attach_tiers(worker, lambda: pair.clock.now, rng, host_slots=60)
    played(pair, 7, is_local=is_local, rng=rng)
    tiers = pair.decode.tiers if is_local else pair.prefill.tiers
    assert tiers.counters["host_hit_tokens"] > 20, tiers.counters
    drained(pair)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("is_local", [False, True])
def test_a_page_that_its_owner_left_without_a_stamp_is_seen(target, head, is_local, monkeypatch):
    """The stamp of a release is what copies wait for."""
    pair, rng = checked(Pair(target, head, pages=24)), random.Random(7)
    for worker in (pair.prefill, pair.decode):
        allocator = worker.engine.cache.allocator
        monkeypatch.setattr(allocator, "_order", None)
        attach_tiers(worker, lambda: pair.clock.now, rng, host_slots=60)
    with pytest.raises(AssertionError, match="before launch"):
        played(pair, 7, is_local=is_local, rng=rng)


def test_work_launched_behind_the_release_of_its_pages_is_seen(target):
    """Steps of a room whose pages are given up while it is still in the batch."""
    pair = checked(Pair(target, pages=48, overlap="on"))
    pair.send(name(0), [5, 7, 9], max_new_tokens=20)
    pair.run(until=lambda: len(pair.tokens.get(name(0), [])) > 4)
    (room,) = pair.decode.queues
    pair.decode.engine.cache.allocator.release(room.request.pages)
    with pytest.raises(AssertionError, match="behind their release"):
        pair.run()
