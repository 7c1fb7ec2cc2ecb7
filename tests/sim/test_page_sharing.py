"""Choices of a request share the prompt's pages on decode after one hand-off: same tokens, no page left.

Free pages hold NaN and are looked at after every turn, so a page that is freed too early, twice, or written
by another choice is found.
"""

import random

import pytest
from baton.cluster.protocol.messages import Cancel, Failed, Finished
from baton.decode.page_sharing import UNSHARED, PageSharing
from baton.decode.queues import DecodeState
from baton.engine.engine import Engine
from baton.tests.sim.worker_pair import D, P, Pair, name

pytestmark = pytest.mark.usefixtures("one_thread")

CHOICES = 4
DRAFTS = {"off": None, "chain": {}, "tree": {"spec_topk": 3, "spec_tokens": 8}}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.4, "logprobs": 2}
PROMPT = [7, 9, 11, 13, 5, 6] * 3
SIZE = len(PROMPT)
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]


def pair_of(target, head, drafts="off", **settings):
    shape = DRAFTS[drafts]
    more = {"pages": 96, "max_running": 6, **(shape or {}), **settings}
    return Pair(target, head if shape is not None else "", **more)


def ask(pair, prompt, *, shared=True, **sampling):
    """Sends the choices of one request, each with its seed; choice 0 gets the prompt."""
    for i in range(CHOICES):
        shares = name(0) if i and shared else None
        pair.send(name(i), prompt, shares=shares, **{"seed": 100 + i, **SAMPLED, **sampling})


@pytest.fixture(scope="module")
def alone(target, head):
    """The tokens of each choice where it is the only request, by drafts and length of the prompt."""
    known = {}

    def tokens(drafts, size=SIZE):
        if (drafts, size) not in known:
            pair = pair_of(target, head, drafts)
            for i in range(CHOICES):
                pair.send(name(i), PROMPT[:size], **{"seed": 100 + i, **SAMPLED})
                pair.run()
            known[drafts, size] = pair.tokens
        return known[drafts, size]

    return tokens


@pytest.mark.parametrize(
    ("drafts", "overlap", "size"),
    [
        ("off", "off", 18),
        ("chain", "on", 18),
        ("chain", "off", 16),
        ("off", "on", 1),
        pytest.param("tree", "off", 17, marks=pytest.mark.slow),
    ],
)
def test_each_choice_gives_the_tokens_that_it_gives_alone(target, head, alone, drafts, overlap, size):
    prompt = PROMPT[:size]
    pair = pair_of(target, head, drafts, overlap=overlap)
    ask(pair, prompt)
    pair.run()
    assert pair.tokens == alone(drafts, size)
    assert len({tuple(tokens) for tokens in pair.tokens.values()}) == CHOICES
    counters = pair.decode.stats().counters
    assert (counters["shared_prompts"], counters["unshared"], counters["local_prefills"]) == (3, 0, 0)
    assert counters["local_prefill_tokens"] == 3, "the last token of each choice but the first"
    pair.assert_nothing_is_held()


def test_four_choices_are_prefilled_and_handed_over_as_one(target, head):
    counted = {}
    for count in (1, CHOICES):
        pair = pair_of(target, head, "chain")
        for i in range(count):
            pair.send(name(i), PROMPT, shares=name(0) if i else None, seed=i, **SAMPLED)
        pair.run()
        decode, prefill = pair.decode.stats().counters, pair.prefill.stats().counters
        counted[count] = (decode["handoff_bytes"], decode["handoff_blocks"], prefill["prompt_tokens"])
    assert counted[1] == counted[CHOICES]
    assert counted[1][0] > 0


def test_admission_counts_shared_pages_once(target, head):
    pair = pair_of(target, head)
    free = pair.decode.stats().pages_free
    pair.send(name(0), PROMPT, max_new_tokens=4)
    of_one = free - pair.decode.stats().pages_free
    for i in range(1, CHOICES):
        pair.send(name(i), PROMPT, shares=name(0), max_new_tokens=4)
    shared = (len(PROMPT) - 1) // 4
    assert free - pair.decode.stats().pages_free == of_one + (CHOICES - 1) * (of_one - shared)
    pair.run()
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("drafts", ["off", "chain"])
def test_choices_share_a_prompt_that_decode_computes_itself(target, head, alone, drafts):
    pair = pair_of(target, head, drafts)
    pair.decode.local.budget = pair.decode.local.budget_alone = 5
    pair.send(name(50), PROMPT[:12], is_local=True)  # its pages take the place of those of choice 0
    for i in range(CHOICES):
        pair.send(name(i), PROMPT, is_local=True, shares=name(0) if i else None, seed=100 + i, **SAMPLED)
    pair.run()
    assert {room: pair.tokens[room] for room in map(name, range(CHOICES))} == alone(drafts)
    assert pair.decode.stats().counters["shared_prompts"] == CHOICES - 1
    pair.assert_nothing_is_held()


def test_a_choice_that_comes_late_shares_the_pages_of_a_running_one(target, head, alone):
    pair = pair_of(target, head, "chain")
    pair.send(name(0), PROMPT, seed=100, **SAMPLED)
    pair.run(until=lambda: len(pair.tokens.get(name(0), ())) > 3)
    for i in range(1, CHOICES):
        pair.send(name(i), PROMPT, shares=name(0), seed=100 + i, **SAMPLED)
    pair.run()
    assert pair.tokens == alone("chain")
    pair.assert_nothing_is_held()


def test_the_first_choice_may_end_before_the_others_have_begun(target, head):
    pair = pair_of(target, head, "chain")
    ask(pair, PROMPT, max_new_tokens=1)
    pair.run()
    ends = [pair.ends[name(i)] for i in range(1, CHOICES)]
    for i, end in enumerate(ends, 1):
        assert (isinstance(end, Finished) and len(pair.tokens[name(i)]) == 1) or end.kind == UNSHARED
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("turns", [0, 2, 4, 6])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_cancelled_choice_leaves_the_others_right(target, head, alone, turns, victim):
    pair = pair_of(target, head, "chain")
    ask(pair, PROMPT)
    for _ in range(turns):
        pair.turn()
    pair.cancel(name(victim))
    pair.run()
    expected = alone("chain")
    for i in set(range(CHOICES)) - {victim}:
        end = pair.ends[name(i)]
        if isinstance(end, Failed):
            assert (victim, end.kind, end.retryable) == (0, UNSHARED, True)
            assert name(i) not in pair.tokens
        else:
            assert pair.tokens[name(i)] == expected[name(i)]
    pair.assert_nothing_is_held()


def test_choices_of_an_unknown_room_or_another_prompt_share_nothing(target, head):
    pair = pair_of(target, head)
    pair.send(name(0), PROMPT)
    pair.send(name(1), PROMPT, shares=name(9))
    pair.send(name(2), [*PROMPT[:-1], 3], shares=name(0))
    pair.run()
    assert [pair.ends[name(i)].kind for i in (1, 2)] == [UNSHARED] * 2
    assert isinstance(pair.ends[name(0)], Finished)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("drafts", ["off", "chain"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_cancels_of_choices_leave_nothing_and_change_no_token(target, head, alone, drafts, seed):
    rng = random.Random(seed)
    pair = pair_of(target, head, drafts, overlap=rng.choice(["on", "off"]), pages=rng.choice([30, 60]))
    ask(pair, PROMPT)
    cancelled = set()
    for _ in range(30):
        pair.turn(rng)
        if rng.random() < 0.12:
            victim = rng.randrange(CHOICES)
            cancelled.add(victim)
            worker = rng.choice([pair.decode, pair.prefill])
            instance = D if worker is pair.decode else P
            worker.handle(Cancel(room=name(victim), epoch=0, instance=instance), pair.clock.now)
    pair.clock.now += 10  # leases of rooms that one side gave up
    pair.run(rng)
    expected = alone(drafts)
    for i in set(range(CHOICES)) - cancelled:
        if isinstance(pair.ends.get(name(i)), Finished):
            assert pair.tokens[name(i)] == expected[name(i)]
    pair.assert_nothing_is_held()


def test_without_a_copy_of_the_common_page_tokens_differ(target, head, alone, monkeypatch):
    monkeypatch.setattr(Engine, "copy_page", lambda *_: None)
    pair = pair_of(target, head)
    ask(pair, PROMPT)
    pair.run()
    assert pair.tokens != alone("off")


def test_a_prompt_shared_before_it_is_complete_gives_other_tokens(target, head, alone, monkeypatch):
    monkeypatch.setattr(PageSharing, "is_complete", lambda self, leader: True)
    pair = pair_of(target, head)
    ask(pair, PROMPT)
    pair.turn()
    assert not pair.decode.queues.count(DecodeState.SHARING)
    pair.run()
    assert pair.tokens != alone("off")
