"""Pages that grow make at least nine tenths of the tokens of an oracle that knows how long each answer gets.

The pool is full, so requests are retracted. Production's router and decode worker run in virtual time
(`pool_world`); the oracle holds the pages of exactly as many tokens as the answer has, from its start.
"""

import logging
from random import Random
from unittest.mock import patch

import pytest
from baton.router.scheduling.output_estimates import OutputEstimates
from baton.tests.sim.pool_world import PoolWorld, geometric, in_blocks, retractions

pytestmark = pytest.mark.usefixtures("one_thread")

SHARE = 0.9
LOADS = {
    "by chance": lambda n: (geometric(Random(1), n, 200), {"pages": 1500, "width": 96}),
    "alike": lambda n: ([200] * n, {"pages": 1500, "width": 96}),
    "even": lambda n: ([Random(5 + i).randint(100, 300) for i in range(n)], {"pages": 1500, "width": 96}),
    "in blocks": lambda n: (
        in_blocks(Random(1), n, 60, block=80, longer=500),
        {"pages": 1500, "width": 96},
    ),
    "short prompts": lambda n: (
        in_blocks(Random(2), n, 40, block=60, longer=300),
        {"pages": 1200, "width": 128, "prompt": 64},
    ),
    "few places": lambda n: (
        in_blocks(Random(3), n, 60, block=40, longer=150),
        {"pages": 300, "width": 40, "max_tokens": 4000},
    ),
}


@pytest.fixture(autouse=True)
def quiet():
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(level)


def ratio(lengths, **pool):
    """(throughput by that of the oracle, the world with pages that grow)"""
    oracle = PoolWorld(lengths, grows=False, knows=True, **pool).run()
    world = PoolWorld(lengths, **pool).run()
    for each in (oracle, world):
        assert each.failures == []
        assert [each.answers[number] for number in range(len(lengths))] == lengths
    assert sum(retractions(oracle).values()) == 0
    return world.tokens_per_s / oracle.tokens_per_s, world


@pytest.mark.parametrize(
    ("load", "num_requests"),
    [
        ("few places", 120),
        *(pytest.param(load, 400, marks=pytest.mark.slow) for load in LOADS),
    ],
)
def test_pages_that_grow_make_nine_tenths_of_an_oracle_s_tokens(load, num_requests):
    lengths, pool = LOADS[load](num_requests)
    share, world = ratio(lengths, **pool)
    found = retractions(world)["retractions_full_pool"]
    print(f"{load}: {share:.3f} of the oracle, pool {world.mean(world.used):.0%} full, {found} retractions")
    assert share >= SHARE
    assert world.mean(world.used) > 0.75
    if load != "by chance" and load != "even":
        assert found > 0, "the pool was never full, so this shows nothing"


@pytest.mark.parametrize("grows", [True, False])
def test_nine_chats_that_ask_for_4096_tokens_share_a_pool_of_6000(grows):
    world = PoolWorld(
        [80 + 3 * number for number in range(9)], pages=375, width=9, prompt=120, max_tokens=4096, grows=grows
    ).run()
    assert world.failures == []
    assert [world.answers[number] for number in range(9)] == [80 + 3 * number for number in range(9)]
    most = max(running for _, running in world.running)
    assert most >= 8 if grows else most == 1


@pytest.mark.slow
def test_whole_reservations_make_far_less():
    lengths = geometric(Random(1), 150, 200)
    pool = {"pages": 1500, "width": 32, "max_tokens": 8000}
    whole, grown = (PoolWorld(lengths, grows=grows, **pool).run() for grows in (False, True))
    assert grown.tokens_per_s > 5 * whole.tokens_per_s


@pytest.mark.slow
def test_a_margin_that_each_retraction_of_a_burst_raises_wastes_the_pool():
    def raised(estimates):
        estimates.margin = min(4.0, estimates.margin * 1.25)

    lengths, pool = LOADS["in blocks"](400)
    with patch.object(OutputEstimates, "retracted", raised):
        share, _ = ratio(lengths, **pool)
    assert share < SHARE
