"""Prompts that decode computes itself: the tokens of the road over prefill, while running streams go on.

With `overlap` a part of a prompt is launched before the one before it is read.
"""

import random

import pytest
from baton.cluster.protocol.messages import Failed, Finished
from baton.decode.chunk_budget import LEAST_TOKENS, ChunkBudget, Gap
from baton.decode.queues import DecodeState
from baton.tests.parity.eagle3_toys import write_oracle
from baton.tests.sim.test_workers import prompts, successors
from baton.tests.sim.worker_pair import Pair, name
from baton.tests.variants import witnesses

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "frequency_penalty": 0.4, "logprobs": 2}


@pytest.fixture(scope="module", params=[True, False], ids=["drafts", "no drafts"])
def models(request, tmp_path_factory, toy_checkpoint):
    if request.param:
        return write_oracle(tmp_path_factory.mktemp("oracle"))
    return toy_checkpoint("llama", num_hidden_layers=2), ""


def pair_of(models, budget, **settings):
    pair = Pair(*models, **{"pages": 96, "max_running": 4, **settings})
    pair.decode.local.budget = pair.decode.local.budget_alone = budget
    return pair


def tokens_of(pair, wanted, *, is_local, **sampling):
    start = len(pair.tokens)
    for i, prompt in enumerate(wanted):
        pair.send(name(start + i), prompt, is_local=is_local, **sampling)
    pair.run()
    return [pair.tokens[name(start + i)] for i in range(len(wanted))]


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_prompt_computed_on_decode_gives_the_same_tokens_as_via_prefill(models, sampling):
    wanted = [[token % 60 for token in prompt] for prompt in prompts(random.Random(3), 4)]
    expected = tokens_of(pair_of(models, 128), wanted, is_local=False, **sampling)
    for budget in (3, 128):
        pair = pair_of(models, budget)
        assert tokens_of(pair, wanted, is_local=True, **sampling) == expected, "cold"
        assert tokens_of(pair, wanted, is_local=True, **sampling) == expected, "cached"
        assert any(end.prefill.cached_tokens for end in list(pair.ends.values())[len(wanted) :])
        assert tokens_of(pair, wanted, is_local=False, **sampling) == expected, (
            "over prefill, behind what decode cached"
        )
        assert pair.decode.stats().counters["local_prefills"] == 2 * len(wanted)
        assert pair.prefill.stats().counters["requests"] == len(wanted)
        pair.assert_nothing_is_held()


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [3, 128])
def test_prompts_launched_ahead_give_the_tokens_of_awaited_ones(models, budget, sampling):
    wanted = [[token % 60 for token in prompt] for prompt in prompts(random.Random(5), 6)]
    expected = tokens_of(pair_of(models, 128, max_running=6), wanted, is_local=True, **sampling)
    pair = pair_of(models, budget, max_running=6, overlap="on")
    assert tokens_of(pair, wanted, is_local=True, **sampling) == expected, "cold"
    assert tokens_of(pair, wanted, is_local=True, **sampling) == expected, "cached"
    assert pair.decode.stats().counters["overlapped_steps"]
    pair.assert_nothing_is_held()


def test_a_part_launched_ahead_is_read_behind_the_next_launch(models):
    pair = pair_of(models, 5, overlap="on")
    pair.send(name(1), list(range(3, 23)), max_new_tokens=5, is_local=True)
    (room,) = pair.decode.queues.of(DecodeState.PREFILLING)
    computed = []
    while room.state is DecodeState.PREFILLING:
        pair.turn()
        computed.append((room.request.num_computed, room.chunks, room.num_unread))
    assert computed[:4] == [(5, 0, 1), (10, 1, 1), (15, 2, 1), (20, 3, 1)]
    assert computed[4][1] == 4
    pair.run()
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("end", ["cancel", "drop_rooms", "expire"])
def test_pages_of_a_prompt_wait_for_its_forward_under_way(models, end):
    pair = pair_of(models, 5, overlap="on")
    pair.send(name(1), list(range(3, 23)), is_local=True)
    pair.turn()
    (room,) = pair.decode.queues
    free = pair.decode.stats().pages_free
    if end == "cancel":
        pair.cancel(name(1))
    elif end == "drop_rooms":
        pair.decode.drop_rooms({name(1)}, "the router is gone")
    else:
        room.deadline = 0.0
        pair.decode.expire(pair.clock.now)
    assert (room.state, pair.decode.stats().pages_free) == (DecodeState.SETTLING, free)
    pair.turn()
    assert pair.decode.num_rooms == 0
    assert room.chunks == 1, "no further part was launched"
    assert name(1) not in pair.tokens
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_equal_prompts_that_come_together_are_computed_once(models, overlap):
    prompt = [7, 9, 11, 13] * 5
    once = pair_of(models, 128)
    expected = tokens_of(once, [prompt], is_local=True)
    pair = pair_of(models, 6, overlap=overlap)
    assert tokens_of(pair, [prompt] * 4, is_local=True) == expected * 4
    counters, page = pair.decode.stats().counters, 4
    assert counters["local_prefill_tokens"] == len(prompt) + 3 * page, "the last page of each is its own"
    assert counters["have_tokens"] == 3 * (len(prompt) - page)
    pair.assert_nothing_is_held()


def test_a_prompt_that_waited_for_another_goes_on_when_that_one_ends(models):
    prompt = [7, 9, 11, 13] * 5
    expected = tokens_of(pair_of(models, 128), [prompt], is_local=True)
    pair = pair_of(models, 6)
    for i in (1, 2):
        pair.send(name(i), prompt, is_local=True)
    pair.turn()
    pair.cancel(name(1))
    pair.run()
    assert [pair.tokens[name(2)]] == expected
    assert name(1) not in pair.tokens
    pair.assert_nothing_is_held()


def test_prompts_with_little_in_common_do_not_wait_for_each_other(models):
    pair = pair_of(models, 128)
    for i in range(3):
        pair.send(name(i), [5, 6, 7, 8, *range(20 + i, 44 + i)], is_local=True)
    pair.turn()
    assert not pair.decode.queues.count(DecodeState.PREFILLING), "all in one forward"
    pair.run()
    pair.assert_nothing_is_held()


def test_running_streams_get_a_step_between_any_two_parts_of_a_long_prompt(models):
    pair = pair_of(models, 5)
    pair.send(name(1), [5, 6, 7], max_new_tokens=60, is_local=True)
    pair.run(until=lambda: len(pair.tokens.get(name(1), [])) > 1)
    pair.send(name(2), list(range(3, 43)), is_local=True)
    for _ in range(7):
        before = len(pair.tokens[name(1)])
        pair.turn()
        assert len(pair.tokens[name(1)]) > before
        assert pair.decode.queues.count(DecodeState.PREFILLING) == 1
    pair.run()
    assert (pair.ends[name(2)].prefill.chunks, len(pair.tokens[name(2)])) == (8, 12)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_parts_shrink_beside_streams_where_a_bound_asks_for_it(models, overlap):
    prompt = [3 + i % 50 for i in range(60)]
    expected = tokens_of(pair_of(models, 128), [prompt], is_local=True)
    pair = pair_of(models, 128, overlap=overlap)
    pace = pair.decode.local.pace = ChunkBudget(128, 1e-9)
    for _ in range(4):  # every gap is longer
        pace.saw(Gap(seconds=1.0, num_tokens=64))
    pair.send(name(0), [5, 6, 7], max_new_tokens=60, is_local=True)
    pair.run(until=lambda: len(pair.tokens.get(name(0), [])) > 20)
    pair.send(name(1), prompt, is_local=True)
    pair.run()
    assert pair.ends[name(1)].prefill.chunks == len(prompt) // LEAST_TOKENS + 1
    assert [pair.tokens[name(1)]] == expected
    pair.assert_nothing_is_held()


def test_features_of_a_prompt_computed_here_reach_the_drafter(tmp_path):
    pair = pair_of(write_oracle(tmp_path), 7)
    prompt = [7, 9, 11, 13] * 5
    for i in range(2):  # cold, then cached
        pair.send(name(i), prompt, max_new_tokens=13, is_local=True)
        pair.run()
        assert pair.tokens[name(i)] == successors(prompt[-1], 13)
        timeline = pair.ends[name(i)].timeline
        assert (timeline.verify_steps, timeline.accepted_tokens) == (3, 9), f"round {i}"


def test_local_prefill_ends_one_token_and_already_complete_answers(models):
    pair = pair_of(models, 128)
    pair.send(name(1), [5, 6, 7], max_new_tokens=1, is_local=True)
    pair.send(name(2), [5, 6, 7], is_local=True, num_output=1, stop_token_ids=[7])
    pair.run()
    assert (len(pair.tokens[name(1)]), pair.ends[name(1)].output_tokens, pair.ends[name(1)].reason) == (
        1,
        1,
        "length",
    )
    assert (pair.ends[name(2)].output_tokens, pair.ends[name(2)].reason) == (0, "stop")
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("seed", witnesses(range(4), range(2)))
def test_random_cancels_on_either_prefill_path_leave_nothing(models, seed, overlap):
    rng = random.Random(seed)
    pages = rng.choice([24, 40])
    pair = pair_of(models, rng.choice([3, 9]), pages=pages, max_running=3, overlap=overlap)
    sent = []
    for i, prompt in enumerate(prompts(rng, 10)):
        sent.append(name(i))
        pair.send(name(i), [token % 60 for token in prompt], max_new_tokens=9, is_local=rng.random() < 0.7)
        for _ in range(rng.randrange(6)):
            pair.turn(rng)
        if rng.random() < 0.4:
            pair.cancel(rng.choice(sent))
    for _ in range(300):
        pair.turn(rng)
    pair.clock.now += 10  # leases of rooms that one side refused
    pair.run(rng)
    assert sum(isinstance(end, Finished) for end in pair.ends.values()) > 1
    assert not any(isinstance(end, Failed) and end.kind == "BadLogits" for end in pair.ends.values())
    pair.assert_nothing_is_held()


def test_a_request_that_ends_with_its_first_token_is_no_failure_of_decode(models, caplog):
    pair = pair_of(models, 128)
    pair.send(name(1), [5, 6, 7], max_new_tokens=1)
    pair.run()
    counters = pair.decode.stats().counters
    assert (counters["failed"], counters["handoffs_aborted"] + counters["cancelled"]) == (0, 1)
    assert "hand-off lost" not in caplog.text
    pair.assert_nothing_is_held()


def test_a_worker_that_leaves_hands_every_room_back_and_keeps_no_page(models):
    pair = pair_of(models, 5, chunk_size=4)
    pair.send(name(1), [5, 6, 7], max_new_tokens=60)
    pair.run(until=lambda: len(pair.tokens.get(name(1), [])) > 2)
    pair.send(name(2), list(range(3, 43)), is_local=True)
    pair.send(name(3), list(range(4, 44)))
    pair.turn()
    held = {room.request.room for worker in (pair.prefill, pair.decode) for room in worker.queues}
    for worker in (pair.prefill, pair.decode):
        worker.hand_back()
    pair.run()
    assert held == {name(1), name(2), name(3)}
    assert {room: (end.kind, end.retryable) for room, end in pair.ends.items()} == dict.fromkeys(
        held, ("Draining", True)
    )
    pair.assert_nothing_is_held()
