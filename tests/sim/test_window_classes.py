"""Urgent requests get window pages from less urgent ones, which give the same tokens later."""

import pytest
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model
from baton.tests.sim.test_page_growth import Asked, played
from baton.tests.sim.worker_pair import Pair, name
from baton.worker.retractions import Reason

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"temperature": 0.0}
NEW_TOKENS = 30
SIZES = {"pages": 400, "max_context": 200, "max_running": 6, "no_draft": True}
URGENT_PAGES = Reason.URGENT_PAGES.value


@pytest.fixture(scope="module")
def mistral(toy_checkpoint):
    return toy_checkpoint("mistral")


@pytest.fixture(scope="module")
def expected(mistral):
    model = reference_model(mistral)
    return lambda prompt: reference_greedy(model, prompt, NEW_TOKENS)


def assert_are_tokens(pair, asked, prompts, expected):
    played(pair, asked)
    assert [each.told for each in asked] == [expected(prompt) for prompt in prompts]
    pair.assert_nothing_is_held()


def test_rooms_make_way_for_an_urgent_one_that_lacks_window_pages(mistral, expected):
    prompts = [random_ids(count, seed=count) for count in (9, 10, 11, 12)]
    pair = Pair(mistral, window_pages=14, **SIZES)
    pair.decode.growth.ahead_tokens = 0
    asked = [Asked(pair, i, ids, GREEDY, is_local=True, priority=1) for i, ids in enumerate(prompts[:3])]
    while pair.decode.stats().running < 3:
        pair.turn()
    asked.append(Asked(pair, 3, prompts[3], GREEDY, is_local=True))
    windows = pair.decode.engine.windows.pages
    assert pair.decode.engine.cache.num_available > 300, "pages are not what lacks"
    for _ in range(3):
        pair.turn()
    found = pair.decode.stats().counters
    assert found[URGENT_PAGES] >= 1, (windows, found)
    assert_are_tokens(pair, asked, prompts, expected)
    assert asked[3].retractions == 0


def test_an_urgent_prompt_takes_window_pages_on_prefill(mistral, expected):
    prompts = [random_ids(count, seed=count) for count in (60, 50)]
    pair = Pair(mistral, window_pages=100, ours={"window_pages": 14}, chunk_size=4, **SIZES)
    asked = [Asked(pair, 0, prompts[0], GREEDY, priority=1)]
    for _ in range(3):
        pair.turn()
    asked.append(Asked(pair, 1, prompts[1], GREEDY))
    for _ in range(4):
        pair.turn()
    assert pair.prefill.stats().counters[URGENT_PAGES] == 1
    assert_are_tokens(pair, asked, prompts, expected)
    assert [each.retractions for each in asked] == [1, 0]


@pytest.mark.parametrize("is_local", [False, True], ids=["handed over", "local"])
def test_an_objective_looks_at_cached_prefixes_and_holds_nothing_of_them(mistral, expected, is_local):
    prompts = [random_ids(count, seed=count) for count in (45, 20, 61)]
    pair = Pair(mistral, window_pages=140, slo_ttft_s=0.05, **SIZES)
    for start in (0, 10):  # cold, then behind cached prefixes
        for number, prompt in enumerate(prompts, start):
            pair.send(name(number), prompt, is_local=is_local, max_new_tokens=NEW_TOKENS)
        pair.run(turns=3000)
        found = [pair.tokens[name(number)] for number in range(start, start + len(prompts))]
        assert found == [expected(prompt) for prompt in prompts]
    pair.assert_nothing_is_held()
