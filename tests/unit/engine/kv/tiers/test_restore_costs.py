"""A restore is begun exactly where it is expected to be at least as soon as computing, and now and then
though it is not.
"""

from itertools import pairwise

import pytest
from baton.engine.kv.tiers.restore_costs import (
    HALF_LIFE_S,
    SIDE_BY_SIDE,
    TRY_AGAIN_S,
    FetchTime,
    LoadTime,
    RestoreCosts,
)
from hypothesis import given
from hypothesis import strategies as st

SECONDS = st.floats(0.0, 1.0)
PAGES = st.integers(SIDE_BY_SIDE, 500)
NOW = 1000.0


def measured(*, load_s, fetch_s, now=NOW):
    """Costs of which a page takes so many seconds, and whose tries were made at `now`."""
    costs = RestoreCosts()
    costs.load.ended(100, now, now + 100 * load_s)
    costs.fetch.ended(100, now, now + 100 * fetch_s)
    if load_s and fetch_s:
        for num_fetched in (0, 1):
            assert costs.is_sooner(num_fetched=num_fetched, num_loaded=1, compute_s=-1.0, now=now)
    return costs


@given(load_s=st.floats(1e-6, 1.0), fetch_s=st.floats(1e-6, 1.0), loaded=PAGES, fetched=PAGES, off=SECONDS)
def test_a_restore_is_begun_exactly_where_it_is_not_later_than_computing(
    load_s, fetch_s, loaded, fetched, off
):
    for num_fetched in (0, fetched):
        costs = measured(load_s=load_s, fetch_s=fetch_s)
        takes = num_fetched * fetch_s + loaded * load_s
        ask = {"num_fetched": num_fetched, "num_loaded": loaded, "now": NOW + 1.0}
        assert costs.is_sooner(**ask, compute_s=takes * 1.001 + off)
        assert not costs.is_sooner(**ask, compute_s=takes * 0.999 - off)


@given(num_fetched=PAGES, num_loaded=PAGES, compute_s=SECONDS)
def test_pages_of_which_nothing_was_measured_come_back(num_fetched, num_loaded, compute_s):
    costs = RestoreCosts()
    assert costs.is_sooner(num_fetched=num_fetched, num_loaded=num_loaded, compute_s=compute_s, now=NOW)


@given(steps=st.lists(st.floats(0.1, TRY_AGAIN_S), min_size=1, max_size=50))
def test_one_late_restore_is_tried_each_while_and_no_more(steps):
    costs, now, tried = measured(load_s=0.1, fetch_s=0.1), NOW, [NOW]
    for step in steps:
        now += step
        if costs.is_sooner(num_fetched=9, num_loaded=9, compute_s=0.1, now=now):
            tried.append(now)
        assert now - tried[-1] < TRY_AGAIN_S
    assert all(after - before >= TRY_AGAIN_S for before, after in pairwise(tried))


def test_a_try_of_one_tier_leaves_that_of_the_other():
    costs = measured(load_s=0.1, fetch_s=0.1)
    later = NOW + TRY_AGAIN_S
    assert costs.is_sooner(num_fetched=0, num_loaded=9, compute_s=0.1, now=later)
    assert costs.is_sooner(num_fetched=9, num_loaded=9, compute_s=0.1, now=later)
    assert not costs.is_sooner(num_fetched=0, num_loaded=9, compute_s=0.1, now=later)


@given(bad_s=st.floats(0.01, 2.0), samples=st.integers(1, 100))
def test_one_good_copy_behind_a_silence_takes_the_place_of_bad_ones(bad_s, samples):
    time, now = FetchTime(), NOW
    for _ in range(samples):
        time.ended(8, now, now + 8 * bad_s)
        now += 8 * bad_s
    assert time.of(100) == pytest.approx(100 * bad_s)
    now += TRY_AGAIN_S
    time.ended(100, now, now + 100 * 0.001)
    kept = 0.5 ** (TRY_AGAIN_S / HALF_LIFE_S)
    assert time.of(1000) <= 1000 * (0.001 + kept * 8 * samples * bad_s / 100)


@given(pages=st.lists(st.integers(SIDE_BY_SIDE, 64), min_size=1, max_size=20), page_s=st.floats(0.0001, 0.01))
def test_copies_that_are_wanted_together_share_the_time(pages, page_s):
    time, ended = FetchTime(), NOW
    for num_pages in pages:
        ended += num_pages * page_s
        time.ended(num_pages, NOW, ended)
    assert time.of(500) == pytest.approx(500 * page_s, rel=1e-2)


@given(waits=st.lists(st.floats(0.0, 0.2), min_size=1, max_size=50), page_s=st.floats(0.0001, 0.01))
def test_loads_that_waited_for_a_forward_do_not_make_the_next_seem_slow(waits, page_s):
    time, now = LoadTime(), NOW
    for wait in [0.0, *waits]:
        time.ended(20, now, now + wait + 20 * page_s)
        now += 0.5
    late = 0.5 * len(waits) + max(waits)
    assert page_s * 0.999 <= time.of(100) / 100 <= page_s * 2 ** (late / HALF_LIFE_S) * 1.001


@given(page_s=st.floats(0.0001, 0.01), factor=st.floats(1.0, 50.0))
def test_loads_that_became_slower_are_known_to_be(page_s, factor):
    time, now = LoadTime(), NOW
    for slower in [1.0] + [factor] * 20:
        time.ended(20, now, now + 20 * page_s * slower)
        now += HALF_LIFE_S
    assert time.of(100) == pytest.approx(100 * page_s * factor)


@pytest.mark.parametrize("kind", [FetchTime, LoadTime])
@given(latency_s=st.floats(0.001, 0.01), count=st.integers(1, 200))
def test_copies_of_few_pages_do_not_make_many_seem_slow(kind, latency_s, count):
    time, now = kind(), NOW
    for _ in range(count):
        time.ended(1, now, now + latency_s)
        now += 0.1
    assert time.of(1) == pytest.approx(latency_s)
    assert time.of(SIDE_BY_SIDE) == pytest.approx(latency_s)
    assert time.of(0) == 0.0
