"""Both workers with tiers below small pools: the tokens of an undisturbed run, whatever the copies do.

Free pages hold NaN (`worker_pair`), and copies end at random turns.
"""

import random

import pytest
from baton.cluster.protocol.messages import Finished
from baton.tests.sim.late_copiers import attach_tiers
from baton.tests.sim.worker_pair import Pair, name

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS, TURNS, CHATS = 6, 3, 4


def played(pair, seed, *, is_local, rng=None):
    """The tokens of every turn of some conversations that take turns with each other."""
    draw = random.Random(seed)
    texts = [[draw.randrange(3, 250) for _ in range(draw.randrange(18, 26))] for _ in range(CHATS)]
    said = []
    for turn in range(TURNS):
        for chat in range(CHATS):
            room = name(100 * turn + chat)
            sampling = {"temperature": 1.0, "seed": chat} if chat % 2 else {}
            pair.send(room, texts[chat], is_local=is_local, max_new_tokens=NUM_TOKENS, **sampling)
            pair.run(rng, turns=2000)
            assert isinstance(pair.ends[room], Finished), pair.ends[room]
            said.append(pair.tokens[room])
            texts[chat] = texts[chat] + said[-1] + [draw.randrange(3, 250) for _ in range(4)]
    return said


def drained(pair):
    """Turns until no copy is under way."""
    for _ in range(500):
        if not any(worker.tiers.tiers.is_busy for worker in (pair.prefill, pair.decode)):
            return
        pair.turn()
    raise AssertionError("a copy does not end")


@pytest.mark.parametrize(
    ("drafts", "is_local", "disk_slots", "flips"),
    [
        (True, False, 0, 0.0),
        (False, True, 80, 0.3),
        pytest.param(True, True, 0, 0.0, marks=pytest.mark.slow),
        pytest.param(True, False, 80, 0.3, marks=pytest.mark.slow),
        pytest.param(False, False, 80, 0.0, marks=pytest.mark.slow),
    ],
)
def test_restored_prefixes_give_the_tokens_of_an_undisturbed_run(
    target, head, drafts, is_local, disk_slots, flips
):
    draft = head if drafts else ""
    expected = played(Pair(target, draft, pages=200), 5, is_local=is_local)
    pair, rng = Pair(target, draft, pages=24), random.Random(5)
    copiers = [
        attach_tiers(
            worker,
            lambda: pair.clock.now,
            rng,
            host_slots=12 if disk_slots else 60,
            disk_slots=disk_slots,
            flips=flips,
        )
        for worker in (pair.prefill, pair.decode)
    ]
    assert played(pair, 5, is_local=is_local, rng=rng) == expected
    for worker in [pair.decode] if is_local else [pair.prefill, pair.decode]:
        counters = worker.tiers.counters
        assert counters["host_hit_tokens"] + counters["disk_hit_tokens"] > 50, counters
        assert not disk_slots or counters["disk_hit_tokens"], counters
    counted = [worker.tiers.counters for worker in (pair.prefill, pair.decode)]
    found = sum(each["host_bad_pages"] + each["disk_bad_pages"] for each in counted)
    assert found == sum(each.num_flips for each in copiers)
    assert not flips or found
    drained(pair)
    pair.assert_nothing_is_held()


def test_requests_of_one_prefix_restore_it_once(target):
    pair = Pair(target, pages=40, max_running=4)
    attach_tiers(pair.decode, lambda: pair.clock.now, random.Random(1), host_slots=60)
    draw = random.Random(2)
    prompt, *others = [[draw.randrange(3, 250) for _ in range(24)] for _ in range(12)]
    for number, each in enumerate([prompt, *others]):  # the prompt leaves the pool
        pair.send(name(number), each, is_local=True, max_new_tokens=5)
        pair.run()
    for number in range(50, 53):
        pair.send(name(number), prompt, is_local=True, max_new_tokens=5)
    pair.run()
    counters = pair.decode.stats().counters
    assert counters["host_hit_tokens"] == 20
    assert [pair.ends[name(number)].prefill.cached_tokens for number in range(50, 53)] == [20, 20, 20]
    assert len({tuple(pair.tokens[name(number)]) for number in (0, 50, 51, 52)}) == 1


@pytest.mark.parametrize("is_local", [False, True])
def test_a_prompt_is_computed_where_a_restore_would_be_later(target, is_local):
    pair = Pair(target, pages=24)
    for worker in (pair.prefill, pair.decode):
        attach_tiers(worker, lambda: pair.clock.now, random.Random(1), host_slots=60)
        costs, now = worker.tiers.tiers.costs, pair.clock.now
        costs.load.ended(100, now, now + 1e6)
        costs.is_sooner(num_fetched=0, num_loaded=1, compute_s=-1.0, now=now)  # the next try is far off
    for tokens in (8, 16, 24) if not is_local else ():  # decode has computed other prompts
        pair.decode.local.forward_pace.saw(tokens, 0.001 * tokens)
    played(pair, 5, is_local=is_local)
    counters = {worker.role: worker.tiers.counters for worker in (pair.prefill, pair.decode)}
    computes, other = ("decode", "prefill") if is_local else ("prefill", "decode")
    assert counters[computes]["tier_declined_restores"] > 3
    early = counters[computes]["host_hit_tokens"]
    assert early < 60, "until three forwards were measured everything is restored"
    assert counters[other]["tier_declined_restores"] == 0
    assert is_local or counters["decode"]["host_hit_tokens"] > 50, "it does not compute, and restores"


def test_a_request_that_leaves_during_its_restore_takes_nothing_along(target):
    pair = Pair(target, pages=24)
    copiers = attach_tiers(pair.decode, lambda: pair.clock.now, random.Random(1), host_slots=60)
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 250) for _ in range(24)] for _ in range(6)]
    for number, each in enumerate(prompts):
        pair.send(name(number), each, is_local=True, max_new_tokens=5)
        pair.run()
    copiers.results = list  # no copy ends
    pair.send(name(50), prompts[0], is_local=True, max_new_tokens=5)
    pair.cancel(name(50))
    pair.turn()
    assert pair.gone[name(50)] == 2  # one answer of each worker
    assert pair.decode.num_rooms == 0
    assert pair.decode.engine.cache.allocator.num_used > pair.decode.engine.cache.num_cached
    del copiers.results
    for _ in range(50):
        pair.turn()
    assert pair.decode.engine.cache.allocator.num_used == pair.decode.engine.cache.num_cached


def test_no_page_is_copied_before_the_forwards_that_use_it(target):
    pair, rng = Pair(target, pages=24), random.Random(7)
    for worker in (pair.prefill, pair.decode):
        worker.engine.pool.order.check_uses()
        attach_tiers(worker, lambda: pair.clock.now, rng, host_slots=60)
    played(pair, 7, is_local=False, rng=rng)
    assert pair.prefill.tiers.counters["host_hit_tokens"] > 50
    assert pair.decode.tiers.counters["host_hit_tokens"] > 50
