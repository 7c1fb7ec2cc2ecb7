"""The start-up self-test finds graphs that differ from the eager path; and what becomes of their batches."""

from dataclasses import replace
from pathlib import Path

import pytest
from baton.engine.capture.graph_self_test import SelfTest
from baton.engine.capture.graph_set import GraphSet
from baton.engine.capture.step_self_test import StepSelfTest
from baton.engine.config import EngineConfig
from baton.engine.graphs import breakable
from baton.engine.graphs.bucketed_graphs import GraphFamily
from baton.engine.graphs.tape.tape import KeptMemory, TapeBackend
from baton.engine.loader import EngineLoader
from baton.engine.runner.lifecycle import Phase
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.sampling.logprobs import pack_logprobs
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafting.shape import DraftShape
from baton.engine.speculative.step import fused_step
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.graph_engine import at, capture, with_graphs
from baton.tests.parity.overlap_engine import overlapped, run_ahead
from baton.tests.parity.test_adaptive_steps import Scripted
from baton.tests.parity.toy_engine import ToyEngine, random_ids
from baton.tests.variants import slow

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
    engine, plain = Engine(target, head, is_greedy=True), Engine(target, head)
    graphs = with_graphs(engine)
    assert SelfTest(engine.runner, engine.drafter, 256).run() == 0
    engine.runner.model.layers[7].mlp.down.weight = engine.runner.model.layers[7].mlp.down.weight * 3
    plain.runner.model.layers[7].mlp.down.weight = plain.runner.model.layers[7].mlp.down.weight * 3
    prefill = engine.runner.graphs.tokens.family
    (steps,) = engine.decoder.steps.families.values()
    assert (len(prefill.captured), len(steps.captured)) == (6, 3)
    assert SelfTest(engine.runner, engine.drafter, 256).run() == 6
    assert StepSelfTest(engine.decoder.steps).run() == 3
    assert "target_prefill 4 differs from the eager path" in caplog.text
    assert "decode_step 4 differs from the eager path" in caplog.text
    assert steps.captured == prefill.captured == ()
    assert graphs.counts()["draft_prefill"] == 6
    assert engine.generate([[5, 9, 200], [17]], GREEDY) == plain.generate([[5, 9, 200], [17]], GREEDY)
    assert graphs.counters()["graph_fallback_decode_step_capture_failed"] > 3


def test_a_brief_self_test_compares_one_graph_of_each_kind(target, head):
    engine = Engine(target, head, is_greedy=True)
    graphs = with_graphs(engine)
    steps = engine.decoder.steps
    parts = (engine.runner, engine.drafter, 256, steps)
    prefill = engine.runner.graphs
    num_kinds = 2 + (prefill.whole is not None) + len(steps.families)
    brief, brief_steps = SelfTest(*parts[:3], is_brief=True), StepSelfTest(steps, is_brief=True)
    assert (brief.run(), brief_steps.run()) == (0, 0)
    assert brief.num_compared + brief_steps.num_compared == num_kinds
    assert graphs.self_test(*parts, is_brief=True) == 0
    engine.runner.model.layers[7].mlp.down.weight = engine.runner.model.layers[7].mlp.down.weight * 3
    assert graphs.self_test(*parts, is_brief=True) == num_kinds - 1  # all but the draft's


@pytest.mark.parametrize("kind", ["steps", "prefill"])
def test_the_self_test_sees_a_broken_draft_graph(target, head, kind):
    engine = Engine(target, head, is_greedy=True)
    with_graphs(engine)
    if kind == "steps":  # what is loaded is no longer what the graph reads
        states = engine.drafter.states
        states.hidden = states.hidden.clone()
        family, test = next(iter(engine.decoder.steps.families.values())), StepSelfTest(engine.decoder.steps)
    else:
        tokens = engine.drafter.graphs.tokens
        tokens.inputs["features"] = tokens.inputs["features"].clone()
        family, test = tokens.family, SelfTest(engine.runner, engine.drafter, 256)
    assert test.run() == len(family.buckets) - len(family.captured) >= 2


@pytest.fixture
def routed(toy_checkpoint) -> Path:
    """A target whose rows choose experts."""
    return toy_checkpoint("qwen3_moe", num_hidden_layers=4)


def rows_changed(monkeypatch, *, rows: slice, is_eager: bool, is_replayed: bool = True) -> None:
    """Forwards of the target on that path give other logits for `rows`."""
    forward = ModelRunner.forward

    def changed(runner, batch):
        output = forward(runner, batch)
        if batch.decision.is_graph is not is_eager and batch.decision.is_replayed is is_replayed:
            output.logits[rows] = output.logits[rows].roll(1, dims=-1)
        return output

    monkeypatch.setattr(ModelRunner, "forward", changed)


@pytest.mark.parametrize(
    ("rows", "is_eager", "is_replayed", "expected"),
    [
        (slice(1, None, 3), True, True, "some rows"),  # as where roundings changed their choices
        (slice(None), True, True, "all"),
        (slice(0, 1), False, True, "all"),
        (slice(0, 1), False, False, "all"),
    ],
    ids=["eager-some", "eager-all", "graph-one", "captured-one"],
)
def test_some_rows_may_differ_from_the_eager_path_where_rows_choose(
    target, routed, monkeypatch, rows, is_eager, is_replayed, expected
):
    """They are compared with what the graph was captured from, on as many rows."""
    dropped = {}
    for model in (target, routed):
        engine = Engine(model)
        with_graphs(engine)
        families = [engine.runner.graphs.tokens.family]
        if engine.runner.graphs.whole is not None:
            families.append(engine.runner.graphs.whole.family)
        with monkeypatch.context() as planting:
            rows_changed(planting, rows=rows, is_eager=is_eager, is_replayed=is_replayed)
            SelfTest(engine.runner, None, 256).run()
        dropped[model] = {b for family in families for b in family.buckets if b not in family.captured}
        kept = {b for family in families for b in family.captured}
    if expected == "all":
        assert not kept
        assert len(dropped[target]) == (0 if not is_eager and not is_replayed else len(dropped[routed]))
    else:
        assert not dropped[routed]
        assert dropped[target]


@pytest.mark.parametrize("family", ["gpt_oss", slow("qwen3_moe"), slow("deepseek_v3")])
def test_a_start_of_a_model_with_experts_in_bfloat16_keeps_its_graphs(toy_checkpoint, caplog, family):
    path = toy_checkpoint(family, num_hidden_layers=6)
    config = EngineConfig(
        model=str(path), device="cpu", dtype="bfloat16", pages=40, page_size=8, max_context=160,
        chunk_size=96, graphs="on",
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=False)
    with caplog.at_level("INFO"):
        for _, run in loader.phases():
            run()
    (told,) = (line for line in caplog.messages if line.startswith("graph self-test"))
    assert int(told.split()[2]) > 10
    assert " 0 graphs dropped" in told


@pytest.mark.parametrize("family", [None, "qwen3_moe"])
def test_the_self_test_sees_kv_that_no_output_depends_on(target, routed, monkeypatch, family):
    engine = Engine(target if family is None else routed)
    with_graphs(engine)
    pool, replay = engine.runner.pool, GraphFamily.replay

    def spilling(self, decision, context):
        output = replay(self, decision, context)
        if decision.is_replayed:
            pool.kv[1, ..., -1] += 9.0  # of a row behind those of short prompts, or of an early one
        return output

    assert SelfTest(engine.runner, None, 256).run() == 0
    monkeypatch.setattr(GraphFamily, "replay", spilling)
    prefill = engine.runner.graphs.tokens.family
    assert SelfTest(engine.runner, None, 256).run() >= len(prefill.buckets)
    assert prefill.captured == ()


def break_skipped(monkeypatch, state):
    monkeypatch.setattr(breakable._Break, "replay", lambda *_: None)


def logprobs_of_another_step(monkeypatch, state):
    monkeypatch.setattr(fused_step, "pack_logprobs", lambda values, ids: pack_logprobs(values + 1, ids))


def edits_moved(monkeypatch, state):
    monkeypatch.setattr(state, "_edits", replace(state.edits, values=state.edits.values.clone()))


@pytest.mark.parametrize("plant", [None, break_skipped, logprobs_of_another_step, edits_moved])
def test_the_self_test_sees_every_part_of_an_edited_step(target, head, monkeypatch, plant):
    made = Engine(target, head).decoder.steps
    made.kinds = tuple(kind for kind in made.kinds if kind.is_edited and kind.shape.steps)
    GraphSet(TapeBackend(KeptMemory()), at(Phase.POOLS_ALLOCATED)).capture_steps(made, 2)
    if plant is not None:
        plant(monkeypatch, made.step.state)
    assert StepSelfTest(made).run() == (0 if plant is None else 2)


def features_moved(late):
    late._features = late._features.clone()


def tokens_moved(late):
    late._tokens = late._tokens.clone()


@pytest.mark.parametrize("plant", [None, features_moved, tokens_moved])
def test_the_self_test_compares_a_drafter_that_catches_up(oracle, plant):
    """The planted graphs read late rows where nothing is written any more."""
    engine = Engine(*oracle, policy=Scripted([DraftShape.of(0), DraftShape.of(3)], []))
    with_graphs(engine)
    steps = engine.decoder.steps
    family, states = steps.catch_up_graphs, engine.drafter.states
    assert family.captured == (1, 2, 4)
    if plant is not None:
        plant(steps.step.late)
    assert StepSelfTest(steps).run() == (0 if plant is None else 3)
    assert family.captured == ((1, 2, 4) if plant is None else ())
    assert not any(values.any() for values in (*steps.step.late.anchors, states.hidden, states.logits))
    assert (steps.step.state.num_open, states.num_open) == (0, 0)


def test_a_capture_that_fails_leaves_its_batches_to_the_eager_path(target, monkeypatch, caplog):
    toy = ToyEngine(target, aux=IDS)
    trunk = toy.model.trunk

    def refuses_eight(hidden, *rest):
        return trunk(hidden, *rest) if hidden.shape[0] != 8 else hidden.sum().item()

    monkeypatch.setattr(toy.model, "trunk", refuses_eight)
    toy.graphs = capture(toy.runner)
    monkeypatch.undo()
    assert toy.runner.graphs.tokens.family.captured == (1, 2, 4, 16, 24)
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
        graphs="on",
        max_running=2,
        graph_self_test=False,
    )
    loader = EngineLoader(config, has_drafter=True)
    for _, run in loader.phases():
        run()
    assert loader.engine().graph_counts["decode"] == 2 * 3


def test_a_pool_too_small_for_all_rows_is_tested_with_those_that_fit(target, head, caplog):
    config = EngineConfig(
        model=str(target), draft=str(head), device="cpu", dtype="float32", pages=1, page_size=2,
        max_context=2,
        graphs="on", max_running=2, overlap="on",
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=True)
    with caplog.at_level("INFO"):
        for _, run in loader.phases():
            run()
    assert "0 graphs dropped" in caplog.text
    assert "self-test: 0 replays" not in caplog.text


@pytest.mark.parametrize(
    "shape", [(3, 1, 0), pytest.param((2, 2, 7), marks=pytest.mark.slow)], ids=["chain", "tree"]
)
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
    assert (decoder.steps.step.state.num_open, states.num_open, bool(states.logits.any())) == (0, 0, False)
    for engine in engines:  # what the graphs read is no longer what the model has
        engine.runner.model.layers[7].mlp.down.weight = engine.runner.model.layers[7].mlp.down.weight * 3
    num_graphs = sum(len(family.captured) for family in decoder.steps.families.values())
    assert StepSelfTest(decoder.steps).run() == num_graphs > 8
    assert "decode_step 1 differs from the eager path" in caplog.text
    prompts = [[5, 9, 200], [17]]
    requests = [engines[0].prefill(prompt, GREEDY) for prompt in prompts]
    assert {result.path for result in run_ahead(engines[0], requests)} == {"eager"}
    assert [request.output_ids for request in requests] == engines[1].generate(prompts, GREEDY)
