"""Both workers with steps launched ahead: the same answers, and no page with two owners.

Free pages hold NaN and are looked at after every turn. A step runs as late as a device could run it: when it
is read. So a page that is given back before the last step that may write to it was read is found written
while it is free.
"""

import random
from functools import partial

import pytest
import torch
from baton.cluster.protocol.messages import Finished, FirstToken
from baton.decode.queues import DecodeState
from baton.engine.speculative.step.step_graphs import step_graphs
from baton.tests.parity.overlap_engine import LateSteps
from baton.tests.sim.cluster_seams import hasty_close
from baton.tests.sim.test_workers import prompts
from baton.tests.sim.worker_pair import P, Pair, name

pytestmark = pytest.mark.usefixtures("one_thread")

DRAFTS = {"off": None, "chain": {}, "tree": {"spec_topk": 3, "spec_tokens": 8}}


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr("baton.engine.loader.step_graphs", partial(step_graphs, make=LateSteps))


def pair_of(target, head, drafts, overlap="on", **settings):
    shape = DRAFTS[drafts]
    return Pair(target, head if shape is not None else "", overlap=overlap, **{**(shape or {}), **settings})


def wanted_of(seed, count=6):
    rng = random.Random(seed)
    return [
        (prompt, {"temperature": float(i % 2), "seed": i, "max_new_tokens": rng.choice([1, 2, 9, 12])})
        for i, prompt in enumerate(prompts(rng, count))
    ]


def said_without(target, head, drafts, wanted, **changes):
    pair = pair_of(target, head, drafts, overlap="off", pages=96, max_running=8)
    for i, (prompt, sampling) in enumerate(wanted):
        pair.send(name(i), prompt, **{**sampling, **changes})
        pair.run(turns=2000)  # one at a time: none is refused
    return [pair.tokens[name(i)] for i in range(len(wanted))]


@pytest.mark.parametrize(
    ("drafts", "graphs"),
    [(drafts, False) for drafts in DRAFTS]
    + [
        pytest.param(drafts, True, marks=[pytest.mark.slow] if drafts != "chain" else []) for drafts in DRAFTS
    ],
)
def test_overlapped_steps_give_the_tokens_of_waiting_steps(target, head, late, drafts, graphs):
    wanted = wanted_of(1)
    pair = pair_of(
        target, head, drafts, pages=96, max_running=6, graphs="on" if graphs else "off", graph_self_test=False
    )
    for i, (prompt, sampling) in enumerate(wanted):
        pair.send(name(i), prompt, **sampling)
    pair.run(random.Random(3), turns=2000)
    assert [pair.tokens[name(i)] for i in range(len(wanted))] == said_without(target, head, drafts, wanted)
    assert all(isinstance(end, Finished) for end in pair.ends.values() if end != "length")
    counters = pair.decode.stats().counters
    assert counters["overlapped_steps"] >= counters["steps"] > 5, (
        "each step was launched ahead, and some in vain"
    )
    assert not any(key.startswith("overlap_fallback") for key in counters)
    assert bool(counters.get("graph_replays_decode_step")) is graphs
    pair.assert_nothing_is_held()


EDITED = (
    {"temperature": 0.0, "frequency_penalty": 1.5, "logprobs": 2},
    {"temperature": 1.0, "seed": 3, "logit_bias": {7: 4.0}, "repetition_penalty": 1.3},
    {"temperature": 0.0, "min_new_tokens": 8, "ignore_eos": False, "stop_token_ids": list(range(0, 256, 2))},
)


@pytest.mark.parametrize("drafts", DRAFTS)
def test_penalties_biases_logprobs_and_least_lengths_do_not_wait(target, head, late, drafts):
    found = []
    for overlap in ("off", "on"):
        pair = pair_of(target, head, drafts, overlap=overlap, pages=96, max_running=6)
        for i, sampling in enumerate(EDITED):
            pair.send(name(i), [5 + i, 7, 9, 7], **{"max_new_tokens": 14, **sampling})
        pair.run(turns=2000)
        found.append([pair.tokens[name(i)] for i in range(len(EDITED))])
        counters = pair.decode.stats().counters
        assert not any(key.startswith("overlap_fallback") for key in counters), counters
        assert bool(counters.get("overlapped_steps")) is (overlap == "on")
        pair.assert_nothing_is_held()
    assert found[0] == found[1]
    assert 8 <= len(found[0][2]) < 14, "stopped, and not too early"


def commands_of(pair, room):
    return [type(item).__name__ for item in pair.links[P].commands if item.room == room]


def test_prefill_publishes_a_forward_when_the_next_one_is_launched(target, head):
    pair = pair_of(target, head, "chain", chunk_size=8)
    pair.send(name(0), range(20), max_new_tokens=4)
    computed, ready, has_more = [], [], []
    for _ in range(4):
        has_more.append(pair.prefill.step())
        room = pair.prefill.queues.get(name(0), 0)
        computed.append(room.request.num_computed)
        ready.append(commands_of(pair, name(0)).count("Advance"))
    assert (computed, ready) == ([8, 16, 20, 20], [0, 1, 2, 3])
    assert has_more == [True, True, True, False], "nothing is left"
    assert [type(message) for message in pair.links[P].to_router] == [FirstToken]


@pytest.mark.parametrize("steps", [1, 3], ids=["first chunk", "last chunk"])
def test_a_room_that_ends_while_its_forward_runs_gets_nothing_of_it(target, head, steps):
    pair = pair_of(target, head, "chain", chunk_size=8)
    pair.send(name(0), range(20), max_new_tokens=4)
    pair.send(name(1), range(50, 53), max_new_tokens=4)
    for _ in range(steps):
        pair.prefill.step()
    before = commands_of(pair, name(0))
    pair.cancel(name(0))
    pair.prefill.step()
    assert commands_of(pair, name(0))[len(before) :] == ["Drop"]
    assert not any(m.room == name(0) for m in pair.links[P].to_router if isinstance(m, FirstToken))
    pair.run()
    assert len(pair.tokens[name(1)]) == 4, "its neighbour in the forward gets what is its own"
    assert name(0) not in pair.tokens
    pair.assert_nothing_is_held()


def cancelled_at_random(target, head, drafts, seed):
    """A pair after requests of which some were cancelled at any moment; the cancelled, and the expected."""
    rng = random.Random(seed)
    wanted = [(prompt, {**sampling, "ignore_eos": False}) for prompt, sampling in wanted_of(seed, 8)]
    pair = pair_of(
        target, head, drafts, pages=rng.choice([30, 48]), max_running=3, chunk_size=rng.choice([4, 8, 0])
    )
    cancelled = set()
    for i, (prompt, sampling) in enumerate(wanted):
        pair.send(name(i), prompt, **sampling)
        for _ in range(rng.randrange(5)):
            pair.turn(rng)
        if rng.random() < 0.4:
            room = name(rng.randrange(i + 1))
            cancelled.add(room)
            pair.cancel(room)
    for _ in range(200):
        pair.turn(rng)
    pair.clock.now += 10  # leases of rooms that one side refused
    pair.run(rng)
    return pair, cancelled, wanted


# A room ends while a step under way still writes into its pages.
TELLING_SEEDS = (32, 55)


@pytest.mark.parametrize(
    "seed", [*TELLING_SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8))]
)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_cancels_at_any_moment_leave_nothing_and_change_no_other_output(target, head, late, drafts, seed):
    pair, cancelled, wanted = cancelled_at_random(target, head, drafts, seed)
    for i, expected in enumerate(said_without(target, head, drafts, wanted, ignore_eos=False)):
        got = pair.tokens.get(name(i), [])
        assert got == expected[: len(got)], "what was said is right, also of a room that was cancelled"
        assert (
            len(got) == len(expected)
            or name(i) in cancelled
            or not isinstance(pair.ends.get(name(i)), Finished)
        )
    assert all(pair.gone[room] >= 2 for room in cancelled), "each cancel was answered by both"
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("drafts", DRAFTS)
def test_pages_given_back_before_the_last_step_was_read_are_found_written(target, head, late, drafts):
    """Switches off the defence above: the pages of an ended room do not wait for its steps under way."""

    def all_seeds():
        for seed in (*TELLING_SEEDS, *range(100)):
            cancelled_at_random(target, head, drafts, seed)

    with hasty_close(), pytest.raises(AssertionError, match="were written while they were free"):
        all_seeds()


def test_gone_is_sent_after_the_running_step_was_read(target, head, late):
    pair = pair_of(target, head, "chain", pages=96)
    pair.send(name(0), [5, 7, 9], max_new_tokens=40)
    pair.run(until=lambda: len(pair.tokens.get(name(0), [])) > 4)
    (room,) = pair.decode.queues.of(DecodeState.RUNNING)
    assert room.num_unread == 1
    free = pair.decode.stats().pages_free
    pair.cancel(name(0))
    assert room.state is DecodeState.SETTLING
    assert pair.decode.stats().pages_free == free, "the step under way may still write"
    pair._read()
    assert name(0) not in pair.gone or pair.gone[name(0)] == 1, "prefill's word alone"
    pair.run()
    assert pair.gone[name(0)] == 2
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("end", ["drop_rooms", "hand_back", "expire"])
def test_every_other_end_also_waits_for_the_running_step(target, head, late, end):
    pair = pair_of(target, head, "chain", pages=96)
    for i in range(3):
        pair.send(name(i), [5 + i, 7, 9], max_new_tokens=40)
    pair.run(until=lambda: len(pair.tokens) == 3 and all(len(ids) > 4 for ids in pair.tokens.values()))
    rooms = pair.decode.queues.of(DecodeState.RUNNING)
    if end == "drop_rooms":
        pair.decode.drop_rooms(pair.decode.queues.names(), "the router is gone")
    elif end == "hand_back":
        pair.decode.hand_back()
    else:
        for room in rooms:
            room.deadline = 0.0
        pair.decode.expire(pair.clock.now)
        pair.decode.expire(pair.clock.now)
    assert {room.state for room in rooms} == {DecodeState.SETTLING}
    assert pair.decode.num_rooms == 3
    pair.prefill.drop_rooms(pair.prefill.queues.names(), "the test ends")
    pair.run()
    if end == "expire":
        assert {pair.ends[name(i)].kind for i in range(3)} == {"DeadlineExceeded"}
    pair.assert_nothing_is_held()


def test_bad_logits_fail_their_room_and_its_kv_is_never_reused(target, late):
    pair = pair_of(target, "", "off", pages=96)
    pair.send(name(0), list(range(10, 40)), max_new_tokens=30)
    pair.run(until=lambda: len(pair.tokens.get(name(0), [])) > 2)
    norm = pair.decode.engine.model.norm.weight
    good = norm.clone()
    norm.fill_(float("nan"))
    pair.run()
    norm.copy_(good)
    assert pair.ends[name(0)].kind == "BadLogits"
    assert pair.decode.engine.cache.num_cached == 0
    assert not torch.isnan(norm).any()
    pair.assert_nothing_is_held()
