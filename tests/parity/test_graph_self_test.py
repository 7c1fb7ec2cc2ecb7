"""The start-up self-test finds graphs that differ from the eager path; and what becomes of their batches."""

from pathlib import Path

import pytest
from baton.engine.config import EngineConfig
from baton.engine.graph_self_test import SelfTest
from baton.engine.loader import EngineLoader
from baton.engine.sampling_params import SamplingParams
from baton.engine.step_self_test import StepSelfTest
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.graph_engine import capture, with_graphs
from baton.tests.parity.overlap_engine import overlapped, run_ahead
from baton.tests.parity.toy_engine import ToyEngine, random_ids

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def target(deep_target: Path) -> Path:
    return deep_target


@pytest.fixture
def head(deep_head: Path) -> Path:
    return deep_head


IDS = (9, 1, 5)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)


def test_the_self_test_drops_graphs_with_exchanged_weights_and_tokens_hold(target, head, caplog):
    engine, plain = Engine(target, head), Engine(target, head)
    graphs = with_graphs(engine)
    assert SelfTest(engine.runner, engine.drafter, 256).run() == 0
    engine.runner.model.layers[7].mlp.down.weight = engine.runner.model.layers[7].mlp.down.weight * 3
    plain.runner.model.layers[7].mlp.down.weight = plain.runner.model.layers[7].mlp.down.weight * 3
    test = SelfTest(engine.runner, engine.drafter, 256)
    verify, prefill = engine.runner.graphs.verify.family, engine.runner.graphs.prefill.tokens.family
    assert len(verify.captured + prefill.captured) == 9
    assert test.run() == 9
    assert "target_verify 4 differs from the eager path" in caplog.text
    assert verify.captured == prefill.captured == ()
    assert graphs.counts()["draft_extend"] == 3
    assert engine.generate([[5, 9, 200], [17]], GREEDY) == plain.generate([[5, 9, 200], [17]], GREEDY)
    assert graphs.counters()["graph_fallback_target_verify_capture_failed"] > 3


@pytest.mark.parametrize("kind", ["extend", "loop", "prefill"])
def test_the_self_test_sees_a_broken_draft_graph(target, head, kind):
    engine = Engine(target, head)
    with_graphs(engine)
    draft = engine.drafter.graphs
    static = {"extend": draft.extend.rows.positions, "loop": draft.loop.hidden, "prefill": None}[kind]
    fresh = draft.prefill.tokens.inputs["features"].clone() if static is None else static.clone()
    if kind == "extend":  # what is loaded is no longer what the graph reads
        draft.extend.rows.positions = fresh
        static.fill_(200)
    elif kind == "loop":
        draft.loop.hidden = fresh
    else:
        draft.prefill.tokens.inputs["features"] = fresh
    families_of = {
        "extend": draft.extend.family,
        "loop": draft.loop.family,
        "prefill": draft.prefill.tokens.family,
    }
    dropped = SelfTest(engine.runner, engine.drafter, 256).run()
    assert dropped == len(families_of[kind].buckets)
    assert families_of[kind].captured == ()


def test_a_capture_that_fails_leaves_its_batches_to_the_eager_path(target, monkeypatch, caplog):
    toy = ToyEngine(target, aux=IDS)
    body = toy.model.body

    def refuses_eight(hidden, *rest):
        return body(hidden, *rest) if hidden.shape[0] != 8 else hidden.sum().item()

    monkeypatch.setattr(toy.model, "body", refuses_eight)
    toy.graphs = capture(toy.runner)
    monkeypatch.undo()
    assert toy.runner.graphs.prefill.tokens.family.captured == (1, 2, 4, 16, 24)
    assert "target_prefill 8 cannot be captured" in caplog.text
    assert toy.run(("a", random_ids(7))).path == "eager"
    assert toy.run(("b", random_ids(9))).path == "breakable"
    assert toy.graphs.counters()["graph_fallback_target_prefill_capture_failed"] == 1


def test_without_self_test_nothing_is_compared(target, monkeypatch):
    monkeypatch.setattr(SelfTest, "run", None)
    config = EngineConfig(
        model=str(target),
        device="cpu",
        dtype="float32",
        pages=8,
        graphs=True,
        max_running=2,
        graph_self_test=False,
    )
    loader = EngineLoader(config, has_drafter=True)
    for _, run in loader.phases():
        run()
    assert loader.engine().graph_counts["decode"] == 2


def test_a_pool_too_small_for_all_rows_is_tested_with_those_that_fit(target, head, caplog):
    config = EngineConfig(
        model=str(target), draft=str(head), device="cpu", dtype="float32", pages=1, page_size=2, max_context=4,
        graphs=True, max_running=2, overlap="on",
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=True)
    with caplog.at_level("INFO"):
        for _, run in loader.phases():
            run()
    assert "0 graphs dropped" in caplog.text
    assert "self-test: 0 replays" not in caplog.text


@pytest.mark.parametrize("shape", [(3, 1, 0), (2, 2, 7)], ids=["chain", "tree"])
def test_the_self_test_drops_step_graphs_that_differ_and_leaves_no_trace(target, head, shape, caplog):
    steps, topk, tokens = shape
    engines = [Engine(target, head, steps=steps, topk=topk, tokens=tokens) for _ in range(2)]
    decoder = overlapped(engines[0], graphs=True)
    states = engines[0].drafter.states
    test = StepSelfTest(decoder.steps)
    assert test.run() == 0
    assert test.num_compared > 8
    for pool in (engines[0].runner.pool, engines[0].drafter.pool):
        assert not pool.kv.any()
    assert (decoder.steps.body.state.num_open, states.num_open, bool(states.logits.any())) == (0, 0, False)
    for engine in engines:  # what the graphs read is no longer what the model has
        engine.runner.model.layers[7].mlp.down.weight = engine.runner.model.layers[7].mlp.down.weight * 3
    num_graphs = sum(len(family.captured) for family in decoder.steps.families.values())
    assert StepSelfTest(decoder.steps).run() == num_graphs > 8
    assert "decode_step 1 differs from the eager path" in caplog.text
    prompts = [[5, 9, 200], [17]]
    requests = [engines[0].prefill(prompt, GREEDY) for prompt in prompts]
    assert {result.path for result in run_ahead(engines[0], requests)} == {"eager"}
    assert [request.output_ids for request in requests] == engines[1].generate(prompts, GREEDY)
