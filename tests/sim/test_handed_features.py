"""Features that decode receives equal those that one process computes, row by row, and feed the drafter.

The real code cuts pages into blocks, sends, checks and lands them; the network is simulated.
"""

import pytest
import torch
from baton.cluster.errors import HandshakeRefused
from baton.engine import loader
from baton.engine.kv.page_table import slots_for
from baton.kvtransfer.protocol.layout import KVLayout, agree
from baton.tests.parity.eagle3_toys import ORACLE_IDS, head_config, head_tensors, write_head, write_oracle
from baton.tests.parity.feature_rows import FeatureRows
from baton.tests.parity.test_oracle_paths import QUICK, WRONG
from baton.tests.parity.toy_engine import random_ids
from baton.tests.sim.worker_pair import Pair, layout, name

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = random_ids(29, seed=3)
FULL_STEP = 4


@pytest.fixture(scope="module")
def random_pair(toy_checkpoint, tmp_path_factory):
    target = toy_checkpoint("llama", num_hidden_layers=6)
    return target, write_head(tmp_path_factory.mktemp("head"), head_config(2, (4, 1, 3)), head_tensors())


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    return write_oracle(tmp_path_factory.mktemp("oracle"))


class Watched:
    """A pair of which decode's drafter is watched, one room at a time."""

    def __init__(self, models, **settings):
        self.pair = Pair(*models, pages=96, captured={"chunk_size": 32, "max_running": 4}, **settings)
        self.engine = self.pair.decode.engine
        self.rows = FeatureRows(self.engine.drafter)
        self.num_rooms, self.drafts, self.accept_lens = 0, [], []
        decoder, drafter = self.pair.decode.decoder, self.engine.drafter
        step = decoder.step

        def watched_step(requests):
            (request,) = requests
            logits = drafter.states.logits[decoder.coverage.known[request].row]
            self.drafts.append(int(drafter.head.target_ids[logits.argmax()]))
            result = step(requests)
            self.accept_lens += result.accept_lens
            return result

        decoder.step = watched_step

    def serve(self, prompt, **how):
        """(features of the prompt by position, target and draft KV of it, accept lengths, the first draft of
        each step, tokens) of one more room."""
        self.rows.clear()
        self.drafts, self.accept_lens = [], []
        room, pair = name(self.num_rooms), self.pair
        self.num_rooms += 1
        pair.send(room, prompt, max_new_tokens=1 + 3 * FULL_STEP, **how)
        pair.run(until=lambda: room in pair.tokens and len(pair.tokens[room]) > 1)
        (running,) = pair.decode.queues
        page, pages = running.request.pages[0], list(running.request.pages)
        features = dict(self.rows.prefilled[page])
        slots = slots_for(pages, 0, len(prompt), self.engine.page_size)
        size = self.engine.page_size
        kv = [
            pool.kv[slots // size, :, :, slots % size]
            for pool in (self.engine.pool, self.engine.drafter.pool)
        ]
        pair.run()
        return features, kv, self.accept_lens, self.drafts, pair.tokens[room]


def stacked(features):
    return torch.stack([features[position] for position in sorted(features)])


# --- row by row ---------------------------------------------------------------------------------------------


def test_m1_8_received_features_equal_decodes_own_for_the_same_chunks(random_pair):
    handed, local = Watched(random_pair, chunk_size=0), Watched(random_pair, chunk_size=0)
    found, expected = handed.serve(PROMPT), local.serve(PROMPT, is_local=True)
    assert sorted(found[0]) == sorted(expected[0]) == list(range(len(PROMPT)))
    assert torch.equal(stacked(found[0]), stacked(expected[0]))
    assert torch.equal(found[1][0], expected[1][0])
    torch.testing.assert_close(found[1][1], expected[1][1], atol=1e-5, rtol=1e-5)
    assert found[2:] == expected[2:]


@pytest.mark.parametrize("has_graphs", [False, True])
def test_m1_8_features_of_any_chunking_equal_those_of_one_process(random_pair, has_graphs):
    local = Watched(random_pair, chunk_size=0).serve(PROMPT, is_local=True)
    watched = Watched(random_pair, chunk_size=8, graphs="on" if has_graphs else "off", graph_self_test=False)
    cold = watched.serve(PROMPT)
    watched.engine.cache.clear()  # decode has to pull what prefill has cached
    cached = watched.serve(PROMPT)
    assert watched.pair.ends[name(1)].timeline.have_tokens == 0
    num_cached = int(watched.pair.prefill.stats().counters["cached_tokens"])
    assert num_cached >= len(PROMPT) - watched.engine.page_size
    for features, kv, *results in (cold, cached):
        torch.testing.assert_close(stacked(features), stacked(local[0]), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(kv, local[1], atol=1e-4, rtol=1e-4)
        assert results == list(local[2:])
    assert torch.equal(stacked(cached[0])[:num_cached], stacked(cold[0])[:num_cached])
    held = watched.serve(PROMPT)  # and now decode holds its beginning
    have = watched.pair.ends[name(2)].timeline.have_tokens
    assert sorted(held[0]) == list(range(have, len(PROMPT)))
    assert have > 0
    torch.testing.assert_close(stacked(held[0]), stacked(local[0])[have:], atol=1e-4, rtol=1e-4)
    assert held[2:] == local[2:]


def test_m2_9_every_bucket_has_a_draft_prefill_graph_and_prompts_use_it(random_pair):
    eager = Watched(random_pair).serve(PROMPT)
    watched = Watched(random_pair, graphs="on", graph_self_test=False)
    family = watched.engine.drafter.graphs.tokens.family
    assert family.captured == family.buckets
    assert family.buckets[-1] >= len(PROMPT)
    for count in (1, 2):
        graphed = watched.serve(PROMPT)
        counters = watched.pair.decode.stats().counters
        assert counters["graph_replays_draft_prefill"] >= count
        assert not any(key.startswith("graph_fallback") for key in counters), counters
        torch.testing.assert_close(graphed[1], eager[1], atol=1e-4, rtol=1e-4)
        assert graphed[2:] == eager[2:]
        watched.engine.cache.clear()


@pytest.mark.parametrize(
    ("ids", "dtype"), [((6,), "float32"), ((9, 1, 5), "bfloat16"), ((7, 0, 10, 4, 2), "float32")]
)
def test_m3_2_feature_rows_on_the_wire_have_the_announced_width_and_dtype(
    toy_checkpoint, tmp_path, ids, dtype
):
    target = toy_checkpoint("llama", num_hidden_layers=12)
    head = write_head(tmp_path, head_config(2, ids), head_tensors(num_features=len(ids)))
    watched = Watched((target, head), dtype=dtype)
    wire, engine = layout(watched.pair.prefill.engine), watched.engine
    assert wire == layout(engine)
    assert (wire.feature_ids, wire.feature_width, wire.dtype) == (list(ids), len(ids) * 64, dtype)
    assert wire.feature_width == engine.drafter.head.fc.weight.shape[1]
    features, *_ = watched.serve(PROMPT)
    assert {(tuple(row.shape), str(row.dtype)) for row in features.values()} == {
        ((len(ids) * 64,), f"torch.{dtype}")
    }
    itemsize, num_pages = engine.pool.dtype.itemsize, -(-len(PROMPT) // engine.page_size)
    page_bytes = engine.page_size * len(ids) * 64 * itemsize
    assert KVLayout(wire).feature_page_bytes == page_bytes
    kv_bytes = engine.pool.kv[0].nbytes
    assert watched.pair.ends[name(0)].timeline.handoff_bytes == num_pages * (kv_bytes + page_bytes)


@pytest.mark.parametrize("differs", ["layers", "more", "dtype"])
def test_m1_8_a_pair_with_other_features_is_refused_and_both_serve_on(random_pair, tmp_path, differs):
    target, head = random_pair
    ids = {"layers": (4, 1, 2), "more": (4, 1, 3, 2)}.get(differs)
    other = write_head(tmp_path, head_config(2, ids), head_tensors(num_features=len(ids))) if ids else head
    theirs = {"draft": str(other), "dtype": "bfloat16" if differs == "dtype" else "float32"}
    pair = Pair(target, head, pages=96, theirs=theirs)
    wires = [layout(worker.engine) for worker in (pair.prefill, pair.decode)]
    with pytest.raises(HandshakeRefused):
        agree(*wires)
    pair.send(name(0), PROMPT)  # one that does
    pair.run(until=lambda: name(0) in pair.ends and name(0) in pair.tokens)
    pair.turn()
    pair.clock.now += 10  # nobody pulls: the lease of prefill's pages
    pair.run()
    assert (pair.ends[name(0)].kind, pair.ends[name(0)].retryable) == ("HandshakeRefused", True)
    said = pair.ends[name(0)].message
    assert all(
        part in said for part in (["bfloat16", "float32"] if ids is None else ["[4, 1, 3]", str(list(ids))])
    ), said
    pair.send(name(1), PROMPT, is_local=True)
    pair.run()
    assert len(pair.tokens[name(1)]) == 12
    assert pair.prefill.step() is False
    pair.assert_nothing_is_held()


# --- the oracle ---------------------------------------------------------------------------------------------


def chosen_by_side(monkeypatch, prefill_ids, decode_ids):
    """Plant: the two sides capture these layers, whatever the head's config says."""
    configure, left = loader.configure_aux_capture, [prefill_ids, decode_ids]
    monkeypatch.setattr(
        loader, "configure_aux_capture", lambda model, ids, **hook: configure(model, left.pop(0), **hook)
    )


def accepted(oracle, monkeypatch, prefill_ids, decode_ids, *, has_graphs=False):
    with monkeypatch.context() as planting:
        chosen_by_side(planting, prefill_ids, decode_ids)
        watched = Watched(oracle, chunk_size=8, graphs="on" if has_graphs else "off", graph_self_test=False)
    return watched.serve([3, 40, 7, 9, 11, 13, 15, 17, 19, 21, 23])[2]


@pytest.mark.parametrize("has_graphs", [False, True])
def test_received_features_of_the_right_layers_are_accepted_in_full(oracle, monkeypatch, has_graphs):
    assert accepted(oracle, monkeypatch, ORACLE_IDS, ORACLE_IDS, has_graphs=has_graphs) == [FULL_STEP] * 3


@pytest.mark.parametrize("has_graphs", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "ids", [pytest.param(i, id=str(i), marks=() if i in QUICK else pytest.mark.slow) for i in WRONG]
)
def test_received_features_and_decodes_own_are_judged_independently(oracle, monkeypatch, ids, has_graphs):
    found = accepted(oracle, monkeypatch, ids, ORACLE_IDS, has_graphs=has_graphs)
    assert found[:3] == [1, FULL_STEP, FULL_STEP]
    found = accepted(oracle, monkeypatch, ORACLE_IDS, ids, has_graphs=has_graphs)
    assert found[:3] == [FULL_STEP, 1, 1]
