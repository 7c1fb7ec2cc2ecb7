"""Decode workers that draft by lookup, beside a prefill worker that knows nothing of drafts, and alone."""

import itertools
import random

import pytest
from baton.engine.config import EngineConfig
from baton.engine.errors import CheckpointError
from baton.engine.hub import NGRAM
from baton.engine.loader import EngineLoader
from baton.tests.sim.worker_pair import D, Pair, name

pytestmark = pytest.mark.usefixtures("one_thread")

SHARED = [7, 8, 9, 7, 8, 9, 7, 8] * 3
PROMPTS = [SHARED, [*SHARED, 5, 6], [4], [1, 2, 3] * 7, [250, 3, 17, 250, 3], [*SHARED, 5, 6, 9]]
SETTINGS = {"ngram_min": 1, "ngram_max": 3, "ngram_window": 32, "spec_steps": 4, "pages": 300,
            "spec_adaptive": "off", "max_running": 6}  # fmt: skip


def pair_of(target, draft=NGRAM, **settings):
    """Prefill was started without any draft."""
    return Pair(target, ours={"draft": ""}, theirs={"draft": draft}, **(SETTINGS | settings))


def said(pair, *, is_local=False, times=1, turns=2000, **sampling):
    """Tokens of all prompts, sent together; several choices of each with seeds of their own."""
    rooms = []
    for number in range(times * len(PROMPTS)):
        rooms.append(name(len(pair.tokens) + len(rooms)))
        pair.send(
            rooms[-1],
            PROMPTS[number % len(PROMPTS)],
            is_local=is_local,
            seed=number,
            max_new_tokens=20,
            **sampling,
        )
    pair.run(turns=turns)
    return [pair.tokens[room] for room in rooms]


@pytest.fixture(scope="module")
def answers(target):
    pair = pair_of(target, draft="", max_running=16)
    return {t: said(pair, times=2, temperature=t) for t in (0.0, 1.0)}


WAYS = list(itertools.product(("off", "on"), (False, True), ("off", "auto")))
QUICK_WAYS = [("off", False, "off"), ("on", True, "off"), ("on", False, "auto"), ("off", True, "auto")]


@pytest.mark.parametrize(
    ("overlap", "is_local", "adaptive"),
    [
        pytest.param(
            *way,
            id=f"overlap {way[0]}, {'local' if way[1] else 'handed over'}, adaptive {way[2]}",
            marks=() if way in QUICK_WAYS else pytest.mark.slow,
        )
        for way in WAYS
    ],
)
def test_answers_are_those_without_drafts_cold_and_cached(target, answers, overlap, is_local, adaptive):
    pair = pair_of(target, overlap=overlap, spec_adaptive=adaptive, max_running=16)
    for temperature, wanted in answers.items():
        for _ in ("cold", "cached"):
            assert said(pair, is_local=is_local, times=2, temperature=temperature) == wanted
    counters = pair.decode.stats().counters
    assert 0 < counters["accepted_tokens"] <= counters["drafted_tokens"]
    assert counters["have_tokens"] > 0
    pair.assert_nothing_is_held()


def test_a_plain_prefill_worker_hands_over_kv_alone(target):
    pair, plain = pair_of(target), pair_of(target, draft="")
    assert pair.prefill.engine.features is None
    assert pair.decode.engine.feature_width == 0
    assert said(pair) == said(plain)
    for room, end in pair.ends.items():
        assert end.timeline.handoff_bytes == plain.ends[room].timeline.handoff_bytes
        assert end.timeline.draft_prefill_ms == 0
    assert sum(end.timeline.accepted_tokens for end in pair.ends.values()) > 0
    both = Pair(target, NGRAM, **SETTINGS)  # named on both workers, as `up` does
    assert both.prefill.engine.features is None
    assert said(both) == said(plain)


def test_the_prefix_cache_keeps_whole_pages_as_without_drafts(target):
    """No row waits for the token behind it, since there is no draft KV."""
    found = []
    for draft in (NGRAM, ""):
        pair = pair_of(target, draft=draft)
        for number in range(2):
            pair.send(name(number), [*range(1, 25), 30 + number], max_new_tokens=2 + 4 * number)
            pair.run()
        found.append(pair.decode.stats().counters["have_tokens"])
        assert pair.decode.engine.cache.lookahead == 0
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("seed", range(3))
def test_cancelled_requests_leave_nothing_and_disturb_nobody(target, answers, seed):
    pair, rng = pair_of(target, overlap="on", max_running=16), random.Random(seed)
    for number, prompt in enumerate(PROMPTS * 2):
        pair.send(name(number), prompt, seed=number, max_new_tokens=20)
    cancelled = set(rng.sample(range(len(PROMPTS) * 2), 5))
    for number in sorted(cancelled):
        for _ in range(rng.randrange(4)):
            pair.turn(rng)
        pair.cancel(name(number))
    pair.run(rng, turns=2000)
    for number, wanted in enumerate(answers[0.0]):
        got = pair.tokens.get(name(number), [])
        assert got == wanted[: len(got)]
        assert number in cancelled or len(got) == len(wanted)
    pair.assert_nothing_is_held()


def test_a_resumed_request_looks_up_its_earlier_output_too(target, answers):
    """A retry begins with the output of the attempt before as part of its prompt."""
    pair, whole = pair_of(target), answers[0.0][0]
    pair.send(name(0), PROMPTS[0] + whole[:9], num_output=9, max_new_tokens=20 - 9)
    pair.run()
    assert pair.tokens[name(0)] == whole[9:]


def test_graphs_of_steps_are_captured_compared_and_run(target, answers):
    pair = pair_of(target, overlap="on", graphs="on")
    assert said(pair) == answers[0.0][: len(PROMPTS)]
    counters = pair.decode.stats().counters
    assert counters["graph_replays_decode_step"] > 5
    assert pair.decode.engine.graph_counts.get("draft_prefill", 0) == 0


def load(config):
    for _, run in EngineLoader(config, has_drafter=True).phases():
        run()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"spec_topk": 2}, ["spec_topk 2", "1"]),
        ({"ngram_min": 4}, ["ngram_min 4", "ngram_max 3"]),
        ({"ngram_min": 0}, ["ngram_min 0"]),
        ({"ngram_window": 5}, ["ngram_window 5", "6"]),
    ],
)
def test_settings_that_contradict_each_other_are_refused(target, settings, words):
    config = EngineConfig(
        model=str(target), draft=NGRAM, device="cpu", dtype="float32", max_context=96, **(SETTINGS | settings)
    )
    with pytest.raises(CheckpointError) as refused:
        load(config)
    assert all(word in str(refused.value) for word in words)


def test_a_hello_tells_the_steps_of_lookup_and_no_features(target):
    pair = pair_of(target)
    assert pair.decode.engine.draft_config is not None
    assert pair.decode.engine.draft_config.aux.ids == ()
    assert pair.decodes[D].engine.spec_steps == SETTINGS["spec_steps"]
