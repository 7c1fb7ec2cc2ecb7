"""Laws before, between and after replays: order, hidden modes, padding, ownership, plans, idle rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baton.engine.attention.metadata import plan
from baton.engine.batch.forward_batch import CaptureHidden, ForwardBatch
from baton.engine.capture.graph_set import CHECK_EVERY, GraphSet
from baton.engine.config import EngineConfig
from baton.engine.errors import LifecycleError
from baton.engine.graphs.bucketed_graphs import EAGER
from baton.engine.graphs.errors import GraphError, StaleGraph
from baton.engine.graphs.graph_pool import FallbackReason, GraphKind
from baton.engine.graphs.tape.tape import TapeBackend
from baton.engine.kv.page_table import build_page_table, slots_for
from baton.engine.loader import EngineLoader
from baton.engine.runner.lifecycle import Phase
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafters.eagle3_weights import load_eagle3
from baton.engine.speculative.drafters.prefill_graphs import DraftPrefillGraphs
from baton.engine.speculative.drafters.spec_config import load_draft_config
from baton.engine.speculative.step import step_graphs
from baton.tests.parity.eagle3_engine import MAX_REQUESTS, Engine
from baton.tests.parity.eagle3_toys import toy_target
from baton.tests.parity.graph_engine import arena, at, capture, with_graphs
from baton.tests.parity.toy_engine import PAGE_SIZE, ToyEngine, random_ids

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def target(deep_target: Path) -> Path:
    return deep_target


@pytest.fixture
def head(deep_head: Path) -> Path:
    return deep_head


IDS = (9, 1, 5)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)


class Captured(ToyEngine):
    """With its graphs, and what they had counted when the test began."""

    def __init__(self, target: Path) -> None:
        super().__init__(target, aux=IDS)
        self.graphs = capture(self.runner, memory=arena())
        self.before: dict[str, float] = {}

    def start(self) -> None:
        """As if no request had come."""
        self.pool.kv.zero_()
        self.free += [page for pages in self.pages.values() for page in pages]
        self.pages, self.lengths = {}, {}
        self.before = self.graphs.counters()

    def counted(self, name: str) -> float:
        return self.graphs.counters()[name] - self.before.get(name, 0)


@pytest.fixture(scope="module")
def captured(deep_target: Path, one_thread: None) -> Captured:
    """Prefill graphs of up to 24 tokens."""
    return Captured(deep_target)


@pytest.fixture
def toy(captured: Captured) -> Captured:
    captured.start()
    return captured


def batch_of(toy: ToyEngine, *chunks: tuple[str, list[int]]) -> ForwardBatch:
    batch = toy.batch(*chunks)
    batch.capture_hidden = CaptureHidden.FULL
    return batch


def fallbacks(graphs: GraphSet, before: dict[str, float] | None = None) -> dict[str, float]:
    counted = {key: count - (before or {}).get(key, 0) for key, count in graphs.counters().items()}
    return {key: count for key, count in counted.items() if "fallback" in key and count}


# --- M1: aux capture ----------------------------------------------------------------------------------------


def test_m1_5_capturing_before_the_pools_exist_names_both_states(target, head):
    engine = Engine(target, head)
    for phase in (Phase.LOADED, Phase.AUX_CONFIGURED, Phase.WEIGHTS_SHARED, Phase.CAPTURED, Phase.SERVING):
        graphs = GraphSet(TapeBackend(), at(phase))
        for capturing in (
            lambda graphs=graphs: graphs.capture_prefill(engine.runner, 8),
            lambda graphs=graphs: graphs.capture_draft(engine.drafter, 8),
            lambda graphs=graphs: graphs.capture_steps(engine.decoder.steps, 2),
        ):
            with pytest.raises(LifecycleError, match=f"POOLS_ALLOCATED.*{phase.name}"):
                capturing()
    assert engine.runner.graphs is None
    assert engine.drafter.graphs is None
    assert not engine.decoder.steps.families
    with pytest.raises(LifecycleError, match="already configured"):
        engine.runner.set_aux_layer_ids((9, 1, 5))


def test_m1_features_missing_from_graphs_run_eagerly_and_are_counted(target):
    toy = ToyEngine(target)
    toy.graphs = capture(toy.runner, memory=arena())
    plain = toy.run(("a", random_ids(6)))
    toy.runner.set_aux_layer_ids(IDS)
    batch = batch_of(toy, ("b", random_ids(6)))
    output = toy.runner.forward(batch)
    assert (plain.path, plain.hidden) == ("breakable", None)
    assert output.path == "eager"
    assert output.hidden.shape == (6, 3 * toy.config.hidden_size)
    assert fallbacks(toy.graphs) == {"graph_fallback_target_prefill_hidden_mode": 1}


# --- M2: which graphs exist, and what they are bound to -----------------------------------------------------


def load(model: Path, draft: Path | str = "", *, has_drafter: bool, **settings: object):
    config = EngineConfig(
        model=str(model), draft=str(draft), device="cpu", dtype="float32", page_size=4, pages=64,
        max_context=96,
        graphs="on", chunk_size=16, max_running=4, **settings,
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=has_drafter, backend=TapeBackend(arena()))
    for _, run in loader.phases():
        run()
    return loader.engine()


def test_m2_1_each_role_has_its_own_graphs_and_none_of_the_other(target, head):
    prefill = load(target, head, has_drafter=False)
    assert prefill.graphs.pool.report().num_decode_graphs == 0
    nothing = {"prefill": 0, "draft_prefill": 0, "decode": 0, "verify": 0}
    assert prefill.graph_counts == nothing | {"prefill": 5}
    decode = load(target, head, has_drafter=True)
    assert decode.graph_counts == nothing | {"draft_prefill": 13, "decode": 9, "verify": 9}, "of three kinds"
    plain = load(target, has_drafter=True)
    assert plain.graph_counts == nothing | {"decode": 9}
    assert all(not engine.graph_counters.get(f"graph_replays_{kind.value}", 0)
               for engine in (prefill, decode,
               plain) for kind in GraphKind), "the self-test serves nobody"  # fmt: skip
    for engine in (prefill, decode, plain):
        assert engine.pool.kv.count_nonzero() == 0
    assert decode.drafter.pool.kv.count_nonzero() == 0


def test_m2_2_a_draft_graph_before_the_weights_are_shared_is_refused(target, head):
    config = load_draft_config(head, toy_target(), dtype="float32")
    unshared = load_eagle3(config, dtype=torch.float32)
    toy = ToyEngine(target)
    with pytest.raises(LifecycleError, match="shared"):
        DraftPrefillGraphs(capture(toy.runner).pool, unshared, toy.pool, (8,))


@pytest.mark.parametrize("name", ["lm_head", "target_ids"])
def test_m2_2_exchanged_weights_are_found_at_replay(target, head, name):
    """Of the head, whose draft vocabulary is a parameter as its weights are."""
    engine = Engine(target, head, is_greedy=True)
    graphs = with_graphs(engine)
    graphs.pool.check_every = 1
    request = engine.prefill(random_ids(9), GREEDY)
    engine.decoder.step([request])
    setattr(engine.drafter.head, name, getattr(engine.drafter.head, name).clone())
    assert {stale.split()[0] for stale in graphs.pool.stale()} == {"draft_prefill", "decode_step"}
    with pytest.raises(StaleGraph, match=name):
        engine.decoder.step([request])


def test_m2_2_exchanged_weights_of_the_target_are_found_in_steps(target, head):
    engine = Engine(target, head, is_greedy=True)
    graphs = with_graphs(engine)
    norm = engine.runner.model.norm
    norm.weight = norm.weight.clone()
    assert "decode_step" in {stale.split()[0] for stale in graphs.pool.stale()}


def test_m2_2_in_production_every_nth_replay_checks_the_parameters(target):
    engine = Engine(target, is_greedy=True)
    graphs = with_graphs(engine)
    assert graphs.pool.check_every == CHECK_EVERY, "as GraphSet makes it, for any engine"
    request = engine.prefill(random_ids(9), GREEDY)
    engine.decoder.step([request])
    engine.runner.model.norm.weight = engine.runner.model.norm.weight.clone()
    graphs.pool.check_every = 3
    engine.decoder.step([request])
    with pytest.raises(StaleGraph, match="norm"):
        engine.decoder.step([request])


def test_m2_4_consecutive_draft_prefills_follow_their_features(target, head):
    engine, plain = Engine(target, head), Engine(target, head)
    with_graphs(engine, arena())
    outs = []
    for seed in (1, 2):
        features = torch.randn(8, engine.drafter.feature_width, generator=torch.Generator().manual_seed(seed))
        pair = []
        for each in (engine, plain):
            batch = draft_rows(features)
            pair.append(each.drafter.prefill_rows(batch))
            assert batch.decision.is_graph is (each is engine)
        torch.testing.assert_close(pair[0], pair[1], atol=1e-5, rtol=1e-5)
        outs.append(pair[0])
    assert not torch.allclose(outs[0], outs[1], atol=1e-2)


def draft_rows(features: torch.Tensor) -> ForwardBatch:
    """Rows of one request from its beginning on, or of none."""
    n = features.shape[0]
    pages, lens = ([[3, 5]], [n]) if n else ([], [])
    return ForwardBatch(
        input_ids=torch.arange(n),
        positions=torch.arange(n),
        slots=slots_for([3, 5], 0, n, 4),
        page_table=build_page_table(pages),
        q_lens=lens,
        kv_lens=lens,
        capture_hidden=CaptureHidden.LAST,
        features=features,
    )


@pytest.mark.parametrize("count", [1, 15, 16, 17, 24, 25])
def test_m2_3_prefill_at_bucket_edges_equals_eager_and_larger_is_counted(target, toy, count):
    ids = random_ids(count, seed=count)
    output = toy.runner.forward(batch_of(toy, ("a", ids)))
    expected = ToyEngine(target, aux=IDS).run(("a", ids), capture=CaptureHidden.FULL)
    torch.testing.assert_close(output.hidden, expected.hidden, atol=1e-4, rtol=1e-4)
    assert torch.equal(output.logits.argmax(-1), expected.logits.argmax(-1))
    assert output.path == ("breakable" if count <= 24 else "eager")
    assert fallbacks(toy.graphs, toy.before) == (
        {} if count <= 24 else {"graph_fallback_target_prefill_tokens_over_max": 1}
    )


def test_m2_8_padding_writes_to_the_sink_only(toy):
    for name, count in (("a", 5), ("b", 3), ("a", 2)):
        before = toy.pool.kv.clone()
        batch = batch_of(toy, (name, random_ids(count)))
        toy.runner.forward(batch)
        changed = (toy.pool.kv != before).flatten(4).any(-1).any(2).any(1).nonzero()
        slots = {int(page) * PAGE_SIZE + int(offset) for page, offset in changed}
        assert slots == set(batch.slots.tolist())
        assert toy.pool.kv[0].count_nonzero() == 0
    assert toy.counted("graph_pad_rows_target_prefill") == 4


# --- M3: idle rows and widths -------------------------------------------------------------------------------


@pytest.mark.parametrize("has_graphs", [True, False])
def test_m3_4_a_batch_of_no_rows_passes_through_every_forward(target, head, has_graphs):
    engine = Engine(target, head)
    graphs = with_graphs(engine) if has_graphs else None
    toy = ToyEngine(target, aux=(1, 5, 8))
    if has_graphs:
        toy.graphs = capture(toy.runner)
    output = toy.runner.forward(batch_of(toy))
    assert output.path == "eager"
    assert output.logits.shape == (0, toy.config.vocab_size)
    assert output.hidden.shape == (0, 3 * toy.config.hidden_size)
    width, hidden = engine.drafter.feature_width, engine.drafter.head.config.hidden_size
    out = engine.drafter.prefill_rows(draft_rows(torch.empty(0, width)))
    assert out.shape == (0, hidden)
    assert engine.decoder.step([]).tokens == []
    if graphs is not None:
        assert {key.rsplit("_", 2)[1:] == ["idle", "rank"] for key in fallbacks(graphs)} == {True}


def test_m3_5_a_wrong_width_or_dtype_raises_instead_of_replaying_old_data(target, head):
    engine = Engine(target, head)
    with_graphs(engine)
    width = engine.drafter.feature_width
    for features, named in [
        (torch.ones(8, width - 1), str(width - 1)),
        (torch.ones(8, width).double(), "float64"),
    ]:
        with pytest.raises(GraphError, match=f"features.*{named}"):
            engine.drafter.prefill_rows(draft_rows(features))
    eager = Engine(target, head)
    request = eager.prefill(random_ids(5), GREEDY)
    eager.runner.model.aux_layer_ids = (1, 5)
    with pytest.raises(ValueError, match=rf"\[4, 128\] torch.float32.*takes \[4, {width}\] torch.float32"):
        eager.decoder.step([request])


# --- M4: results --------------------------------------------------------------------------------------------


def test_m4_7_results_do_not_change_with_the_next_replay(toy):
    for count in (6, 2):
        first = toy.runner.forward(batch_of(toy, ("a", random_ids(count, seed=1))))
        logits, hidden = first.logits.clone(), first.hidden.clone()
        toy.runner.forward(batch_of(toy, ("b", random_ids(count, seed=2))))
        assert torch.equal(first.logits, logits)
        assert torch.equal(first.hidden, hidden)
        assert first.path == "breakable"


def test_m4_7_the_report_of_a_step_does_not_change_with_the_next_one(target, head):
    engine = Engine(target, head, is_greedy=True)
    with_graphs(engine)
    requests = [engine.prefill(random_ids(5 + i, seed=i), GREEDY) for i in range(2)]
    first = engine.decoder.launch(requests)
    rows = first.report.rows().copy()
    second = engine.decoder.launch(requests)
    assert (first.report.rows() == rows).all()
    assert (second.report.rows() != rows).any()
    assert first.report.path == second.report.path == "graph"


def test_m4_3_poisoned_graph_memory_does_not_reach_an_eager_step(target, head):
    engine, plain = Engine(target, head), Engine(target, head)
    with_graphs(engine, kinds=set())
    assert engine.generate([[5, 9, 200], [17]], GREEDY) == plain.generate([[5, 9, 200], [17]], GREEDY)
    assert {result.path for result in engine.results} == {"eager"}


# --- M5: plans ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 3])
def test_m5_1_a_batch_padded_to_a_multiple_equals_the_batch_alone(target, toy, requests):
    chunks = [(str(i), random_ids(2, seed=i)) for i in range(requests)]
    alone = ToyEngine(target, aux=IDS)
    expected = alone.runner.forward(batch_of(alone, *chunks))
    for runs_graph in (True, False):
        toy.lengths.clear()
        batch = batch_of(toy, *chunks)
        pad = 8 - batch.num_tokens
        for name in ("input_ids", "positions", "slots"):
            setattr(batch, name, torch.nn.functional.pad(getattr(batch, name), (0, pad)))
        if not runs_graph:
            batch.decision = EAGER
        output = toy.runner.forward(batch)
        assert output.path == ("breakable" if runs_graph else "eager")
        assert output.logits.shape[0] == output.hidden.shape[0] == 8
        real = slice(2 * requests)
        torch.testing.assert_close(output.hidden[real], expected.hidden, atol=1e-4, rtol=1e-4)
        assert torch.equal(output.logits[real].argmax(-1), expected.logits.argmax(-1))
        assert output.logits.isfinite().all()


@pytest.mark.parametrize("change", ["positions", "slots", "kv_lens", "page_table"])
def test_m5_2_a_batch_changed_after_it_was_planned_is_refused(toy, change):
    for count in (6, 30):
        batch = batch_of(toy, ("a", random_ids(count)))
        metadata = plan(batch, PAGE_SIZE)
        assert toy.runner.decide(batch).is_graph is (count == 6)
        value = getattr(batch, change)
        setattr(batch, change, value.clone() if isinstance(value, torch.Tensor) else list(value))
        assert batch.decision is None, "the path is decided for the batch as it is"
        with pytest.raises(LifecycleError, match="plan after the last change"):
            toy.runner.forward(batch, metadata)


def test_m5_3_a_graph_batch_forced_to_eager_is_planned_again(target, toy):
    batch = batch_of(toy, ("a", [1, 2]))
    assert toy.runner.decide(batch).is_graph
    batch.decision = EAGER
    output = toy.runner.forward(batch)
    alone = ToyEngine(target, aux=IDS)
    expected = alone.runner.forward(batch_of(alone, ("a", [1, 2])))
    assert output.path == "eager"
    assert torch.equal(output.hidden, expected.hidden)


def test_m5_6_an_idle_batch_leaves_nothing_ready_for_the_next(toy):
    toy.runner.forward(batch_of(toy))
    assert toy.runner.forward(batch_of(toy, ("a", [1, 2]))).path == "breakable"


def test_a_step_of_another_kind_than_captured_runs_eagerly(target, head):
    engine, plain = Engine(target, head, is_greedy=True), Engine(target, head)
    with_graphs(engine)
    ranked = SamplingParams(temperature=1.0, top_k=4, seed=3, max_new_tokens=12, ignore_eos=True)
    for params, path in ((GREEDY, "graph"), (ranked, "eager")):
        engine.results = []
        assert engine.generate([[5, 9]], params) == plain.generate([[5, 9]], params)
        assert {result.path for result in engine.results} == {path}


def test_more_requests_than_places_run_eagerly_and_are_counted(target, head):
    """The states move when they grow: graphs would read the old ones."""
    engine, plain = Engine(target, head, is_greedy=True), Engine(target, head)
    graphs = with_graphs(engine)
    prompts = [[i + 1, 9] for i in range(MAX_REQUESTS + 1)]
    assert engine.generate(prompts, GREEDY) == plain.generate(prompts, GREEDY)
    assert engine.generate([[5]], GREEDY) == plain.generate([[5]], GREEDY)
    assert {result.path for result in engine.results} == {"eager"}
    assert fallbacks(graphs)["graph_fallback_decode_step_batch_over_planned"] > 3


def test_more_biases_than_planned_take_the_graphs_of_edited_steps_alone(target, monkeypatch):
    monkeypatch.setattr(step_graphs, "EDIT_ENTRIES", 2)
    engine = Engine(target)
    with_graphs(engine)
    biased = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True, logit_bias={7: 1.0, 8: 2.0})
    wide = replace(biased, logit_bias={7: 1.0, 8: 2.0, 9: 3.0})
    for params, path in ((biased, "graph"), (wide, "eager"), (biased, "eager"), (GREEDY, "graph")):
        engine.results = []
        assert engine.generate([[5, 9]], params) == Engine(target).generate([[5, 9]], params)
        assert {result.path for result in engine.results} == {path}


def test_the_predicate_answers_once_per_batch_and_the_answer_travels(toy):
    batch = batch_of(toy, ("a", random_ids(30)))
    first = toy.runner.decide(batch)
    assert first.reason is FallbackReason.TOKENS_OVER_MAX
    toy.runner.forward(batch)
    assert batch.decision is first
    assert sum(fallbacks(toy.graphs, toy.before).values()) == 1
