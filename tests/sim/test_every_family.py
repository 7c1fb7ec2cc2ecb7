"""Each architecture over both workers of a hand-off: eager and on tapes, with drafts of each kind and none.

Two workers in one process, prompts in chunks and side by side, cold and behind cached prefixes. All tokens
are those of transformers. Nothing that is free is written, and nothing is held at the end.
"""

import random
from functools import cache

import pytest
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.test_latent_mtp import LAYERS, Toy
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import FAMILIES, reference_greedy, reference_model
from baton.tests.sim.worker_pair import Pair, name

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 16
SIZES = {"pages": 160, "max_context": 160, "max_running": 4}
GRAPHS = {"graphs": "on", "captured": {"chunk_size": 32, "max_running": 4}}
DRAFTS = {
    "plain": {"no_draft": True},
    "chain": {"spec_steps": 3},
    "tree": {"spec_steps": 3, "spec_topk": 2, "spec_tokens": 6},
    "lookup": {"draft": "ngram", "spec_steps": 3, "ngram_min": 1, "spec_adaptive": "off"},
}
MTP = {"spec_steps": 2}
CELLS = [
    pytest.param(family, drafts, graphs, marks=pytest.mark.slow)
    for family in FAMILIES
    for drafts in DRAFTS
    for graphs in ("", " graphs")
]


@pytest.fixture(scope="module")
def models(toy_checkpoint, tmp_path_factory):
    """(target, head) of a family."""
    head = write_head(tmp_path_factory.mktemp("head"), head_config(2, (0, 1, 2)), head_tensors())
    return cache(lambda family: (toy_checkpoint(family), head))


@pytest.fixture(scope="module")
def prompts():
    """Several pages and chunks; half of the longest repeats itself, so that lookup finds drafts."""
    half = random_ids(30, seed=1)
    return [random_ids(1, seed=2), random_ids(17, seed=3), half + half[:11]]


@pytest.fixture(scope="module")
def expected(prompts):
    """By transformers, of a checkpoint."""
    return cache(lambda path: [reference_greedy(reference_model(path), ids, NUM_TOKENS) for ids in prompts])


def assert_are_tokens(pair, prompts, wanted):
    """Cold in a random order of events, then with the prompts cached on both sides."""
    for first in (0, len(prompts)):
        for number, prompt in enumerate(prompts, first):
            pair.send(name(number), prompt, max_new_tokens=NUM_TOKENS)
        pair.run(random.Random(first), turns=2000)
        assert [pair.tokens[name(number)] for number in range(first, first + len(prompts))] == wanted
    counters = pair.decode.stats().counters, pair.prefill.stats().counters
    assert counters[0]["have_tokens"] > 0
    assert counters[1]["cached_tokens"] > 0
    pair.assert_nothing_is_held()


def replays(engine):
    """Of all its graphs."""
    return sum(count for name, count in engine.graph_counters.items() if name.startswith("graph_replays"))


def drafted(pair):
    return sum(end.timeline.drafted_tokens for end in pair.ends.values())


def assert_runs(pair, prompts, wanted, graphs):
    before = [replays(worker.engine) for worker in (pair.prefill, pair.decode)]
    assert_are_tokens(pair, prompts, wanted)
    after = [replays(worker.engine) for worker in (pair.prefill, pair.decode)]
    assert [ran > start for ran, start in zip(after, before, strict=True)] == [bool(graphs)] * 2


@pytest.mark.parametrize(("family", "drafts", "graphs"), CELLS)
def test_tokens_are_those_of_transformers(models, prompts, expected, family, drafts, graphs):
    target, head = models(family)
    settings = dict(DRAFTS[drafts]) | (GRAPHS if graphs else {})
    pair = Pair(target, settings.pop("draft", head), **SIZES, **settings)
    assert_runs(pair, prompts, expected(target), graphs)
    assert (drafted(pair) > 0) == (drafts != "plain")


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["", " graphs"])
def test_modules_of_a_family_draft_for_it(toy_checkpoint, tmp_path, prompts, expected, graphs):
    """DeepSeek-V3 with its own MTP modules, whose KV is latent, too."""
    whole = toy_checkpoint("deepseek_v3", num_hidden_layers=LAYERS + 2)
    toy = Toy.of(whole, tmp_path, 2)
    pair = Pair(toy.target, toy.draft, **SIZES, **MTP, **(GRAPHS if graphs else {}))
    assert_runs(pair, prompts, expected(toy.target), graphs)
    assert drafted(pair) > 0
