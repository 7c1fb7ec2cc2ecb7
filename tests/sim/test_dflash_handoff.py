"""A DFLASH drafter over hand-offs: prefill ships features, decode projects them, and the tokens stay."""

import pytest
import torch
from baton.tests.parity.dflash_toys import (
    DISTANCE,
    chain,
    dflash_config,
    dflash_tensors,
    write_dflash,
    write_dflash_oracle,
)
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model
from baton.tests.sim.test_handed_features import chosen_by_side
from baton.tests.sim.worker_pair import Pair, name

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = (5, 1, 3, 4, 2)
PROMPTS = [random_ids(length, seed=length) for length in (3, 17, 29, 40)]
CHUNKS = {"16": 16, "64": 64, "whole": 0}
ORACLE = {"spec_steps": DISTANCE - 1, "max_running": 4}


@pytest.fixture(scope="module")
def random_pair(toy_checkpoint, tmp_path_factory):
    target = toy_checkpoint("llama", num_hidden_layers=6)
    draft = write_dflash(
        tmp_path_factory.mktemp("dflash"), dflash_config(IDS), dflash_tensors(num_features=len(IDS))
    )
    return target, draft


@pytest.fixture(scope="module")
def expected(random_pair):
    model = reference_model(random_pair[0])
    return [reference_greedy(model, prompt, 12) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    return write_dflash_oracle(tmp_path_factory.mktemp("dflash oracle"))


def served(pair, prompts, first, **how):
    """The tokens of `prompts`, sent at once as rooms from `first` on."""
    for i, prompt in enumerate(prompts):
        pair.send(name(first + i), prompt, **how)
    pair.run()
    return [pair.tokens[name(first + i)] for i in range(len(prompts))]


@pytest.mark.parametrize(
    ("chunk", "overlap"),
    [
        pytest.param(chunk, overlap, marks=() if (overlap == "off") is (chunk == "64") else pytest.mark.slow)
        for chunk in CHUNKS
        for overlap in ("off", "on")
    ],
)
def test_greedy_tokens_equal_those_of_transformers(random_pair, expected, chunk, overlap):
    pair = Pair(*random_pair, pages=120, chunk_size=CHUNKS[chunk], spec_steps=7, overlap=overlap)
    assert served(pair, PROMPTS, 0) == expected, "cold"
    pair.decode.engine.cache.clear()
    assert served(pair, PROMPTS, 10) == expected, "cached on prefill"
    assert pair.prefill.stats().counters["cached_tokens"] > 0
    assert served(pair, PROMPTS, 20) == expected, "held by decode"
    assert pair.ends[name(23)].timeline.have_tokens > 0
    assert served(pair, PROMPTS, 30, is_local=True) == expected, "without prefill"
    assert [served(pair, [p], 40 + i)[0] for i, p in enumerate(PROMPTS)] == expected, "one by one"
    pair.assert_nothing_is_held()


@pytest.mark.parametrize(
    "chunk", [pytest.param(chunk, marks=pytest.mark.slow) if chunk == "64" else chunk for chunk in CHUNKS]
)
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_received_features_are_accepted_in_full(oracle, chunk, graphs):
    captured = {"chunk_size": 32, "max_running": 4, "graphs": graphs, "graph_self_test": False}
    pair = Pair(*oracle, pages=96, chunk_size=CHUNKS[chunk], captured=captured, **ORACLE)
    prompts = [chain(40, 30), chain(3, 11)]
    for first, how in ((0, {}), (10, {}), (20, {"is_local": True})):
        assert served(pair, prompts, first, max_new_tokens=1 + 3 * DISTANCE, **how) == [
            chain(prompt[-1], 2 + 3 * DISTANCE)[1:] for prompt in prompts
        ]
        for room in (name(first), name(first + 1)):
            line = pair.ends[room].timeline
            assert (line.verify_steps, line.accepted_tokens) == (3, 3 * (DISTANCE - 1)), line
    if graphs == "on":
        counters = pair.decode.stats().counters
        assert counters["graph_replays_draft_prefill"] > 0
        assert counters["graph_replays_decode_step"] > 0
    pair.assert_nothing_is_held()


def test_features_of_other_layers_on_prefill_are_never_accepted_at_first(oracle, monkeypatch):
    with monkeypatch.context() as planting:
        chosen_by_side(planting, (1, 3, 4), (1, 3, 5))
        pair = Pair(*oracle, pages=96, chunk_size=8, **ORACLE)
    prompt = chain(40, 30)
    assert served(pair, [prompt], 0, max_new_tokens=DISTANCE) == [chain(prompt[-1], 1 + DISTANCE)[1:]]
    assert pair.ends[name(0)].timeline.accepted_tokens == 0


def test_decode_holds_the_whole_page_before_a_prompt_that_differs(oracle):
    """Draft KV depends on no later token, so no page is pulled again for the token behind it."""
    pair = Pair(*oracle, pages=96, chunk_size=0, **ORACLE)
    common = chain(40, 12)
    served(pair, [common + chain(common[-1], 6)[1:]], 0)
    served(pair, [[*common, 7, *chain(22, 6)]], 1)
    assert pair.ends[name(1)].timeline.have_tokens == 12
    have_kv = pair.decode.engine.drafter.pool.kv
    assert not bool(torch.isnan(have_kv).any())
