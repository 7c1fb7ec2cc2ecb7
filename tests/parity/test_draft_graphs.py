"""The draft's own graphs at the edges of their buckets, their plans, and where their rows are written."""

import pytest
import torch
from baton.engine.attention.metadata import plan
from baton.engine.batch.forward_batch import CaptureHidden, ForwardBatch
from baton.engine.errors import LifecycleError
from baton.engine.graphs.breakable import Breaks
from baton.engine.graphs.bucketed_graphs import EAGER
from baton.engine.graphs.graph_pool import GraphKind, GraphPool
from baton.engine.graphs.tape.tape import KeptMemory, TapeBackend
from baton.engine.kv.page_table import build_page_table, pages_for, slots_for
from baton.engine.row_attention import RowPlan
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafters import loops
from baton.engine.speculative.step import fused_step
from baton.engine.speculative.step.fused_step import StepContext
from baton.tests.parity.eagle3_engine import PAGE_SIZE, Engine
from baton.tests.parity.graph_engine import MAX_TOKENS, arena, poison, with_graphs
from baton.tests.parity.toy_engine import random_ids

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
NUM_ROWS = 1 + Engine.steps


def batch_of(engine: Engine, *q_lens: int) -> ForwardBatch:
    """Rows of requests from their beginning on, each in pages of its own, with random ids and features."""
    pages = [[1 + 10 * i + j for j in range(pages_for(n, PAGE_SIZE))][::-1] for i, n in enumerate(q_lens)]
    count = sum(q_lens)
    return ForwardBatch(
        input_ids=torch.tensor(random_ids(count, seed=count)),
        positions=torch.cat([torch.arange(n) for n in q_lens]),
        slots=torch.cat([slots_for(mine, 0, n, PAGE_SIZE) for mine, n in zip(pages, q_lens, strict=True)]),
        page_table=build_page_table(pages),
        q_lens=list(q_lens),
        kv_lens=list(q_lens),
        capture_hidden=CaptureHidden.LAST,
        features=torch.randn(
            count, engine.drafter.feature_width, generator=torch.Generator().manual_seed(count)
        ),
    )


@pytest.fixture(scope="module")
def plain(target, head) -> Engine:
    return Engine(target, head)


@pytest.fixture(scope="module")
def graphed(target, head) -> Engine:
    engine = Engine(target, head)
    engine.graphs = with_graphs(engine, arena())
    return engine


def prefilled(engine: Engine, count: int) -> tuple[torch.Tensor, bool]:
    batch = batch_of(engine, count)
    out = engine.drafter.prefill_rows(batch)
    return engine.drafter.head.compute_logits(out), batch.decision.is_graph


@pytest.mark.parametrize("count", [1, 15, 16, 17, MAX_TOKENS, MAX_TOKENS + 1])
def test_m2_3_draft_prefills_at_bucket_edges_equal_eager(plain, graphed, count):
    reason = "graph_fallback_draft_prefill_tokens_over_max"
    before = graphed.graphs.counters().get(reason, 0)
    poison(graphed)
    logits, is_graph = prefilled(graphed, count)
    expected, _ = prefilled(plain, count)
    assert is_graph is (count <= MAX_TOKENS)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(graphed.drafter.pool.kv[1:], plain.drafter.pool.kv[1:], atol=1e-4, rtol=1e-4)
    assert graphed.graphs.counters().get(reason, 0) - before == (count > MAX_TOKENS)


# --- plans --------------------------------------------------------------------------------------------------


def padded(batch: ForwardBatch) -> None:
    for name in ("input_ids", "positions", "slots"):
        setattr(batch, name, torch.nn.functional.pad(getattr(batch, name), (0, 2)))


def reordered(batch: ForwardBatch) -> None:
    batch.page_table = batch.page_table.flip(0)


def without_a_request(batch: ForwardBatch) -> None:
    batch.q_lens.pop()
    batch.kv_lens.pop()


def with_another_slot(batch: ForwardBatch) -> None:
    batch.slots[0] = 77


def with_another_page(batch: ForwardBatch) -> None:
    batch.page_table[0, 0] = 17


@pytest.mark.parametrize(
    "change", [padded, reordered, without_a_request, with_another_slot, with_another_page]
)
@pytest.mark.parametrize("count", [NUM_ROWS, 1])
def test_m5_2_a_change_after_planning_is_refused_by_target_and_draft(plain, count, change):
    for attention in (plain.drafter._attention, plain.runner.attention):
        batch = batch_of(plain, count, count)
        metadata = plan(batch, PAGE_SIZE)
        attend = attention.bind(metadata)
        change(batch)
        with pytest.raises(LifecycleError, match="plan after the last change"):
            attention.bind(metadata)
        with pytest.raises(LifecycleError, match="plan after the last change"):
            attend(0, *(torch.zeros(2 * count, heads, 16) for heads in (4, 2, 2)))
        attention.bind(plan(batch, PAGE_SIZE)) if change is not without_a_request else None


def step_plan(engine: Engine, num_requests: int = 2, *, num_rows: int = 3) -> RowPlan:
    """The plan of a step's rows, as a step makes it."""
    lens = torch.full((num_requests,), 7)
    table = 1 + torch.arange(num_requests * 2).view(num_requests, 2)
    rows = torch.arange(num_requests * num_rows) + PAGE_SIZE
    return RowPlan(engine.drafter.pool, rows, table, lens, is_recorded=False)


@pytest.mark.parametrize("part", ["rows", "page_table", "kv_lens"])
def test_m5_2_a_step_changed_after_its_plan_is_refused(plain, part):
    plan_of_step = step_plan(plain)
    parts = [torch.zeros(6, heads, 16) for heads in (4, 2, 2)]
    plan_of_step.attend(0, *parts)
    getattr(plan_of_step, part)[:1] += 1
    with pytest.raises(LifecycleError, match="plan after the last change"):
        plan_of_step.attend(0, *parts)


def test_m5_1_a_steps_plan_and_its_forward_have_the_same_rows(plain):
    with pytest.raises(LifecycleError, match="planned for 6 rows and got 8"):
        step_plan(plain).attend(0, *(torch.zeros(8, heads, 16) for heads in (4, 2, 2)))
    for table, lens in ((torch.ones(3, 2), torch.ones(2)), (torch.ones(4, 2), torch.ones(4))):
        with pytest.raises(LifecycleError, match="do not make equally many rows"):
            RowPlan(plain.drafter.pool, torch.arange(6), table.long(), lens.long(), is_recorded=False)


def test_m5_2_a_batch_of_an_older_state_is_gathered_anew(target, head):
    """The host's plan of a batch, its slots and who is drafted for, belongs to a version of the device
    state."""
    engine = Engine(target, head)
    request = engine.prefill([5, 9], GREEDY)
    engine.decoder.step([request])
    planned = engine.decoder._batch
    assert engine.decoder.step([request]).drafted == [Engine.steps]
    assert engine.decoder._batch is planned
    engine.decoder.forget(request)
    other = engine.prefill([6, 9], GREEDY)
    engine.decoder.step([other])
    engine.decoder._batch = planned  # as if the other one had not been stepped in between
    assert engine.decoder.step([request]).drafted == [0]
    assert engine.decoder._slots[request] != engine.decoder._slots[other]


def test_m5_3_a_draft_prefill_forced_to_eager_is_planned_anew(plain, graphed):
    outputs = []
    for engine in (graphed, plain):
        batch = batch_of(engine, 7)
        if engine is graphed:
            assert engine.drafter.graphs.decide(batch).is_graph
        batch.decision = EAGER
        outputs.append(engine.drafter.prefill_rows(batch))
    assert torch.equal(*outputs)


# --- where rows are written ---------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_m5_4_graph_and_eager_steps_get_the_same_slots_lengths_and_pages(
    target, head, monkeypatch, steps, topk
):
    """Of each forward of a step of three requests in a bucket of four: verify, the draft's levels, draft
    extend."""
    engine = Engine(target, head, steps=steps, topk=topk, is_greedy=True)
    graphs = with_graphs(engine, kinds=set())
    requests = [engine.prefill(random_ids(5 + 3 * i, seed=i), GREEDY) for i in range(3)]
    engine.decoder.step(requests)
    planned: list[tuple[torch.Tensor, ...]] = []

    class Spied(RowPlan):
        def __init__(
            self, pool: object, *parts: torch.Tensor, slots: object = None, **settings: bool
        ) -> None:
            planned.append(parts)
            super().__init__(pool, *parts, **settings)

    for module in (fused_step, loops):
        monkeypatch.setattr(module, "plan_rows", Spied)
    step_graphs, kind = engine.decoder.steps, engine.decoder.steps.kinds[0]
    graph = GraphPool(TapeBackend(KeptMemory()))
    context = StepContext(num_rows=3)
    states = (step_graphs.step.state.integers, *engine.drafter.anchors)
    before = [values.clone() for values in states]
    pooled = graph.capture(
        GraphKind.DECODE_STEP,
        4,
        lambda breaks: step_graphs.step.run(step_graphs.slots[:4], kind, breaks),
        context,
    )
    recorded, report = planned[:], pooled.graph.output.clone()
    planned.clear()
    assert graphs.pool.report().num_graphs
    for is_replay in (False, True):  # the replay writes what the recording planned
        for values, old in zip(states, before, strict=True):
            values.copy_(old)
        if is_replay:
            pooled.replay(context)
            assert torch.equal(pooled.graph.output, report)
        else:
            step_graphs.step.run(step_graphs.slots[:3], kind, Breaks(context))
    assert len(recorded) == len(planned) == 1 + steps
    for ours, theirs in zip(recorded, planned, strict=True):
        (rows, table, lens, *_), (eager_rows, eager_table, eager_lens, *_) = ours, theirs
        assert torch.equal(rows[: len(eager_rows)], eager_rows)
        assert torch.equal(lens[:3], eager_lens)
        assert torch.equal(table[:3], eager_table)
        assert not rows[len(eager_rows) :].any(), "idle rows lie in the sink"
        assert len(rows) * 3 == len(eager_rows) * 4
