"""Drafts by lookup on the real engine: the drafts that a plain search finds, and the target's own tokens."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafters.ngram import NgramConfig
from baton.engine.speculative.drafting.shape import DraftShape
from baton.tests.parity.eagle3_engine import Engine, record_drafts
from baton.tests.parity.eagle3_toys import ORACLE_VOCAB, successor
from baton.tests.parity.graph_engine import BREAKABLE, FULL, arena, with_graphs
from baton.tests.parity.ngram_search import SETTINGS, NgramEngine, lookup
from baton.tests.parity.overlap_engine import overlapped, run_ahead
from baton.tests.parity.test_adaptive_steps import Scripted
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, COUNT = 4, 24
# Some repeat themselves, one is a token alone, one is longer than the window.
PROMPTS = (
    [5, 9, 200, 31, 7, 7, 90, 18, 3, 200, 31],
    [17],
    [250, 3] * 6,
    random_ids(90, seed=3, vocab_size=5),
)
PATHS: dict[str, set | None] = {"eager": None, "breakable": BREAKABLE, "full": FULL}


def greedy(count: int = COUNT, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True, **changes)


def engine_of(target: Path, config: NgramConfig = SETTINGS, **changes: object) -> Engine:
    return NgramEngine(target, config=config, **changes)


@pytest.fixture(scope="module")
def answers(target: Path) -> list[list[int]]:
    return [reference_greedy(reference_model(target), prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("batch", [1, len(PROMPTS)])
@pytest.mark.parametrize("path", ["eager", pytest.param("breakable", marks=pytest.mark.slow), "full"])
def test_greedy_tokens_are_those_of_transformers_on_every_path(
    target: Path, answers: list[list[int]], path: str, batch: int
) -> None:
    engine = engine_of(target)
    if path != "eager":
        with_graphs(engine, arena(), PATHS[path])
    found = []
    for first in range(0, len(PROMPTS), batch):
        found += engine.generate(PROMPTS[first : first + batch], greedy())
    assert found == answers
    assert {result.path for result in engine.results} == ({"graph"} if path == "full" else {"eager"})
    assert sum(map(sum, (result.drafted for result in engine.results))) > 0, "something was found"


def test_steps_launched_ahead_give_the_same_tokens(target: Path, answers: list[list[int]]) -> None:
    engine = engine_of(target)
    overlapped(engine, graphs=True)
    requests = [engine.prefill(prompt, greedy()) for prompt in PROMPTS]
    run_ahead(engine, requests)
    assert [request.output_ids for request in requests] == answers


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=11, max_new_tokens=COUNT, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=5, seed=2**63 + 5, max_new_tokens=COUNT, ignore_eos=True),
        SamplingParams(
            temperature=1.0, top_p=0.8, repetition_penalty=1.2, seed=1, max_new_tokens=COUNT, ignore_eos=True
        ),
    ],
)
def test_sampled_tokens_with_a_seed_are_those_without_drafts(target: Path, params: SamplingParams) -> None:
    assert engine_of(target).generate(PROMPTS, params) == Engine(target).generate(PROMPTS, params)


# --- the drafts themselves ----------------------------------------------------------------------------------


class Searched:
    """Compares the drafts of every step of `engine` with those of a plain search."""

    def __init__(self, engine: Engine, requests: Sequence) -> None:
        self.engine = engine
        self.requests = requests

    def steps(self) -> set[int]:
        """Steps until a request ends; returns the accept lengths."""
        seen: set[int] = set()
        while not any(request.is_finished for request in self.requests):
            seen |= set(self.step())
        return seen

    def step(self) -> list[int]:
        """One step of all requests; returns its accept lengths."""
        seen, propose = [], self.engine.drafter.propose

        def spy(*args: object) -> object:
            seen.append(propose(*args))
            return seen[-1]

        self.engine.drafter.propose = spy
        texts = [request.all_ids for request in self.requests]
        result = self.engine.decoder.step(self.requests)
        self.engine.drafter.propose = propose
        for proposal in seen:
            count, config = proposal.drafts.shape[1], self.engine.drafter.config
            wanted = [lookup(text, config, count) for text in texts]
            assert proposal.drafts.tolist() == [
                found or text[-1:] * count for found, text in zip(wanted, texts, strict=True)
            ]
            assert proposal.found.tolist() == [len(found) for found in wanted]
        return result.accept_lens


def test_drafts_are_those_of_a_plain_search_whatever_was_accepted(target: Path) -> None:
    """The biased target says few tokens, so matches come and go."""
    engine = engine_of(target, steps=3)
    bias = dict.fromkeys(range(4), 30.0)
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=200, ignore_eos=True, logit_bias=bias)
    requests = [engine.prefill(random_ids(20 + i, seed=i, vocab_size=4), params) for i in range(3)]
    seen = Searched(engine, requests).steps()
    assert seen >= {1, 2, 3}, "drafts were refused at several levels"
    assert min(request.num_tokens for request in requests) > 2 * SETTINGS.window, "the ring went round"


def test_a_repeating_text_is_accepted_in_full(oracle: tuple[Path, Path]) -> None:
    """The oracle target goes round through all its tokens: from the second round on every draft is right."""
    prompt = [3]
    while len(prompt) < ORACLE_VOCAB + 6:
        prompt.append(successor(prompt[-1]))
    engine = engine_of(oracle[0], NgramConfig(shortest=2, longest=4, window=128, dtype="float32"))
    (tokens,) = engine.generate([prompt], greedy(1 + 8 * (1 + STEPS)))
    assert tokens == [successor(token) for token in [prompt[-1], *tokens[:-1]]]
    assert [result.accept_lens for result in engine.results] == [[1 + STEPS]] * 8
    assert [result.drafted for result in engine.results] == [[STEPS]] * 8


@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_text_without_repetition_is_not_drafted(oracle: tuple[Path, Path], has_graphs: bool) -> None:
    engine = engine_of(oracle[0])
    if has_graphs:
        with_graphs(engine, arena())
    engine.generate([[3], [40, 41]], greedy(20))
    assert {n for result in engine.results for n in result.drafted} == {0}
    assert {n for result in engine.results for n in result.accept_lens} == {1}


def test_a_late_request_on_a_used_row_drafts_from_its_own_text(target: Path) -> None:
    engine = engine_of(target)
    first = engine.prefill(PROMPTS[2], greedy(40))
    for _ in range(3):
        engine.decoder.step([first])
    engine.decoder.forget(first)  # cancelled
    second, third = (engine.prefill(prompt, greedy(40)) for prompt in PROMPTS[:2])
    Searched(engine, [second]).step()
    Searched(engine, [second, third]).steps()
    assert engine.drafter.states.num_open == 2


def test_unused_proposals_are_watched_and_match_only_where_one_was_found(
    oracle: tuple[Path, Path],
) -> None:
    chains = [DraftShape.of(steps) for steps in (0, STEPS)]
    policy = Scripted(chains, [0] * 70)
    engine = engine_of(
        oracle[0], NgramConfig(shortest=1, longest=2, window=256, dtype="float32"), policy=policy
    )
    engine.generate([[0]], greedy(70))
    round_trip = ORACLE_VOCAB - 1
    assert policy.heard == [(0, 1)] * (round_trip - 1) + [(1, 1)] * (69 - round_trip + 1)


# --- planted bugs -------------------------------------------------------------------------------------------


def shifted_by_one(engine: Engine) -> None:
    """The emitted tokens are stored one place early."""
    append = engine.drafter.states.append
    engine.drafter.states.append = lambda rows, tokens, starts, counts: append(
        rows, tokens, starts - 1, counts
    )


def text_of_another_request(engine: Engine) -> None:
    """All requests share one row."""
    engine.drafter.states.open = lambda: 1


def nothing_appended(engine: Engine) -> None:
    engine.drafter.observe = lambda *args: None


@pytest.mark.parametrize("plant", [shifted_by_one, text_of_another_request, nothing_appended])
def test_a_wrong_history_is_detected_and_changes_no_token(target: Path, plant: object) -> None:
    engine = engine_of(target, steps=3)
    plant(engine)
    prompts = (PROMPTS[2], PROMPTS[3])
    requests = [engine.prefill(prompt, greedy(60)) for prompt in prompts]
    with pytest.raises(AssertionError):
        Searched(engine, requests).steps()
    again = engine_of(target, steps=3)
    plant(again)
    requests = [again.prefill(prompt, greedy(60)) for prompt in prompts]
    while live := [request for request in requests if not request.is_finished]:
        again.decoder.step(live)
    assert [request.output_ids for request in requests] == Engine(target).generate(prompts, greedy(60))


def test_random_texts_of_any_length_are_searched_as_a_plain_search_does(target: Path) -> None:
    """Histories around the window's edge, and repetitions of one token."""
    draws = random.Random(5)
    config = NgramConfig(shortest=1, longest=3, window=8, dtype="float32")
    for _ in range(12):
        engine = engine_of(target, config, steps=draws.randint(1, 6))
        prompt = [draws.randrange(3) for _ in range(draws.randint(1, 30))]
        request = engine.prefill(prompt, greedy(12))
        text = request.all_ids
        drafts = record_drafts(engine, request)
        wanted = lookup(text, config, engine.steps) or text[-1:] * engine.steps
        assert drafts == wanted
