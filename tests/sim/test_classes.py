"""Urgent requests take pages, places and forwards from less urgent ones, which give the same tokens later.

As in `test_page_growth`, free pages hold NaN.
"""

import random

import msgspec
import pytest
from baton.cluster.protocol.messages import Prefill, Refused, Sampling
from baton.decode.preemption import LONGEST_WAIT_S
from baton.decode.queues import DecodeState
from baton.tests.embeds import embeddings_of
from baton.tests.sim.test_page_growth import Asked, pair_of, played, undisturbed
from baton.tests.sim.test_workers import prompts
from baton.tests.sim.worker_pair import P, name
from baton.worker.retractions import Reason

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"temperature": 0.0}
SAMPLING = (GREEDY, {"temperature": 1.0, "seed": 5}, {"temperature": 0.0, "logprobs": 2})


def counters(worker):
    return worker.stats().counters


@pytest.mark.parametrize(
    ("drafts", "is_local"),
    [
        ("off", True),
        pytest.param("chain", False, marks=pytest.mark.slow),
        pytest.param("tree", False, marks=pytest.mark.slow),
        pytest.param("chain", True, marks=pytest.mark.slow),
    ],
)
def test_requests_that_made_way_give_the_tokens_of_an_undisturbed_run(target, head, drafts, is_local):
    rng = random.Random(f"{drafts}{is_local}")
    wanted = [(prompt, SAMPLING[i % len(SAMPLING)]) for i, prompt in enumerate(prompts(rng, 8))]
    pair = pair_of(target, head, drafts, overlap="on", pages=60, max_running=3)
    pair.decode.growth.ahead_tokens = 4
    asked = []
    for i, (prompt, sampling) in enumerate(wanted):
        asked.append(Asked(pair, i, prompt, sampling, is_local=is_local, priority=2 - i // 3))
        for _ in range(6):
            pair.turn()
            for each in asked:
                each.follow()
    played(pair, asked)
    found = counters(pair.decode)
    assert found[Reason.URGENT_PLACE.value] >= 2, found
    assert found["retractions"] == sum(each.retractions for each in asked)
    assert [each.retractions for each in asked[6:]] == [0, 0], "the most urgent ones"
    assert max(each.retractions for each in asked) <= 5
    assert [each.told for each in asked] == undisturbed(target, head, drafts, wanted)
    pair.assert_nothing_is_held()


def test_an_urgent_request_is_admitted_at_the_next_border(target, head):
    pair = pair_of(target, head, "off", pages=60, max_running=2)
    low = [Asked(pair, i, [7, 8, 9, i], GREEDY, priority=1, is_local=True) for i in range(2)]
    while pair.decode.stats().running < 2:
        pair.turn()
    urgent = Asked(pair, 5, [4, 5, 6], GREEDY, is_local=True)
    (room,) = pair.decode.queues.of(DecodeState.ADMITTING)
    assert room.request.pages == []
    assert pair.decode.stats().queued == 1
    pair.turn()
    assert room.state is not DecodeState.ADMITTING
    assert pair.decode.stats().counters[Reason.URGENT_PLACE.value] == 1
    played(pair, [*low, urgent])
    assert [each.retractions for each in low] == [0, 1], "the newer one"


@pytest.mark.parametrize("end", ["cancel", "drop_rooms", "expire", "drain"])
def test_a_room_that_waits_for_others_may_end(target, head, end):
    pair = pair_of(target, head, "off", overlap="on", pages=60, max_running=2)
    for i in range(2):
        Asked(pair, i, [7, 8, 9, i], GREEDY, priority=1, is_local=True)
    while pair.decode.stats().running < 2:
        pair.turn()
    urgent = Asked(pair, 5, [4, 5, 6], GREEDY, is_local=True)
    (room,) = pair.decode.queues.of(DecodeState.ADMITTING)
    if end == "cancel":
        pair.cancel(urgent.room)
    elif end == "drop_rooms":
        pair.decode.drop_rooms({urgent.room}, "the router is gone")
    elif end == "expire":
        room.deadline = 0.0
        pair.decode.expire(pair.clock.now)
    else:
        pair.decode.start_draining()
        pair.turn()
        assert [message.room for message in pair.refused] == [urgent.room]
    assert pair.decode.queues.get(*room.key) is None
    pair.run()
    assert pair.decode.stats().counters["retractions"] == 0
    assert urgent.room not in pair.tokens
    pair.assert_nothing_is_held()


def test_a_room_whose_features_do_not_fit_costs_nobody_its_place(target, head):
    pair = pair_of(target, head, "chain", pages=96, max_running=4)
    low = [Asked(pair, i, [i] * 40, GREEDY, priority=1) for i in range(4)]
    staged = [room for room in pair.decode.queues if room.features is not None]
    assert 1 < len(staged) < 4, "the others were refused"
    pair.decode.queues.max_running = len(staged)
    Asked(pair, 8, [9] * 90, GREEDY)
    assert not pair.decode.queues.of(DecodeState.ADMITTING)
    played(pair, low)
    assert pair.decode.stats().counters["retractions"] == 0


def test_a_room_waits_for_others_for_a_bounded_time(target, head):
    pair = pair_of(target, head, "off", overlap="on", pages=60, max_running=1)
    Asked(pair, 0, [7, 8, 9], GREEDY, priority=1, is_local=True)
    while not pair.decode.stats().running:
        pair.turn()
    urgent_since, urgent = pair.clock.now, Asked(pair, 5, [4, 5, 6], GREEDY, is_local=True)
    (low,) = pair.decode.queues.of(DecodeState.RUNNING)
    low.state = DecodeState.CLOSING  # and its last reader says nothing
    for _ in range(2):
        pair.turn()
    assert not pair.refused
    pair.decode.expire(urgent_since + LONGEST_WAIT_S)
    pair.turn()
    assert [(message.room, message.retry_after_ms > 0) for message in pair.refused] == [(urgent.room, True)]


def test_an_urgent_prompt_is_computed_before_the_next_part_of_another(target, head):
    pair = pair_of(target, head, "off", pages=60, chunk_size=4, max_running=4)
    pair.send(name(1), list(range(3, 43)))
    pair.prefill.queues.get(name(1), 0).priority = 1
    for _ in range(3):
        pair.turn()
    pair.send(name(2), list(range(60, 75)))
    while name(2) not in pair.tokens:
        pair.turn()
    assert name(1) not in pair.tokens
    assert pair.prefill.queues.get(name(1), 0).request.num_computed <= 13, "what the urgent one left over"
    pair.run()


def test_an_urgent_prompt_takes_the_pages_of_a_less_urgent_one_on_prefill(target, head):
    rng = random.Random(4)
    wanted = [([rng.randrange(3, 250) for _ in range(n)], GREEDY) for n in (60, 50, 40)]
    pair = pair_of(target, head, "off", ours={"pages": 24}, pages=80, chunk_size=4, max_running=4)
    asked = [Asked(pair, 0, *wanted[0], priority=1)]
    for _ in range(3):
        pair.turn()
    asked.append(Asked(pair, 1, *wanted[1]))  # its 13 pages are not free beside 15
    for _ in range(3):
        pair.turn()
    assert counters(pair.prefill)[Reason.URGENT_PAGES.value] == 1
    asked[0].follow()
    asked.append(Asked(pair, 2, *wanted[2], priority=-1))
    played(pair, asked)
    assert counters(pair.prefill)["retractions"] >= 1
    assert asked[0].retractions == 1, "it keeps its pages from then on"
    assert [each.told for each in asked] == undisturbed(target, head, "off", wanted)
    pair.assert_nothing_is_held()


def test_a_full_queue_of_prefill_makes_way(target, head):
    wanted = [([7 + i, 8, 9, 10, 11], GREEDY) for i in range(4)]
    pair = pair_of(target, head, "off", pages=80, max_running=4)
    pair.prefill.queues.max_queue = 2
    asked = [Asked(pair, i, prompt, sampling, priority=2 - i) for i, (prompt, sampling) in enumerate(wanted)]
    assert counters(pair.prefill)[Reason.URGENT_PLACE.value] == 2
    assert len(pair.prefill.queues) == 2
    played(pair, asked)
    assert [each.told for each in asked] == undisturbed(target, head, "off", wanted)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("fault", ["size", "draining", "embeds"])
def test_an_order_that_is_refused_anyway_leaves_the_full_queue_as_it_is(target, head, fault):
    pair = pair_of(target, head, "off", pages=80, max_running=4)
    pair.prefill.queues.max_queue = 1
    Asked(pair, 0, [7, 8, 9], GREEDY, priority=2)
    waiting = list(pair.prefill.queues)
    sampling = Sampling(max_new_tokens=4, temperature=0.0)
    prompt = [7] * (500 if fault == "size" else 5)
    order = Prefill(room=name(9), epoch=0, instance=P, prompt_ids=prompt, sampling=sampling, deadline_ms=0)
    if fault == "draining":
        pair.prefill.start_draining()
    if fault == "embeds":
        order = msgspec.structs.replace(order, embeds=embeddings_of([[0.5] * 8] * 2).rows)
    pair.prefill.handle(order, pair.clock.now)
    assert list(pair.prefill.queues) == waiting
    assert isinstance(pair.links[P].to_router[-1], Refused)
    assert counters(pair.prefill)["retractions"] == 0


@pytest.mark.parametrize(
    ("is_local", "chunk_size"),
    [
        (False, 8),
        pytest.param(False, 0, marks=pytest.mark.slow),
        pytest.param(True, 8, marks=pytest.mark.slow),
    ],
)
def test_prompts_in_the_order_of_the_objective_give_the_same_tokens(target, head, is_local, chunk_size):
    rng = random.Random(11)
    wanted = [(prompt, SAMPLING[i % 3]) for i, prompt in enumerate(prompts(rng, 10))]
    pair = pair_of(target, head, "off", pages=200, chunk_size=chunk_size, max_running=10, slo_ttft_s=0.05)
    if is_local:
        pair.decode.local.budget = pair.decode.local.budget_alone = chunk_size
    for i, (prompt, sampling) in enumerate(wanted):
        pair.send(name(i), prompt, is_local=is_local, max_new_tokens=30, **sampling)
        if i % 3 == 2:
            pair.turn()
    pair.run()
    expected = undisturbed(target, head, "off", wanted)
    assert [pair.tokens[name(i)] for i in range(10)] == expected
    found = counters(pair.decode if is_local else pair.prefill)
    assert found["ttft_met"] + found["ttft_missed"] == 10
    assert not chunk_size or found["ttft_missed"] > 0, "a turn takes 10 ms here"
    assert counters(pair.prefill if is_local else pair.decode)["ttft_met"] == 0
    pair.assert_nothing_is_held()


def test_a_short_prompt_on_decode_is_not_stuck_behind_a_long_one(target, head):
    pair = pair_of(target, head, "off", pages=200, max_running=4)
    pair.decode.local.budget = pair.decode.local.budget_alone = 8
    pair.send(name(1), list(range(3, 83)), is_local=True)
    pair.turn()
    pair.send(name(2), [9, 8, 7], is_local=True)
    pair.turn()
    assert name(2) in pair.tokens
    assert name(1) not in pair.tokens
    long = pair.decode.queues.get(name(1), 0).request
    assert long.num_computed >= 8 + 4, "it keeps half of each part"
    pair.run()
