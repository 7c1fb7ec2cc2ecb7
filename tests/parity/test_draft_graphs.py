"""The draft's own graphs at the edges of their buckets, their plans, and where their rows are written."""

import pytest
import torch
from baton.engine.attention.metadata import plan
from baton.engine.batch.forward_batch import CaptureHidden, ForwardBatch, ForwardMode
from baton.engine.errors import LifecycleError
from baton.engine.graphs.bucketed_graphs import EAGER
from baton.engine.kv.page_table import build_page_table, pages_for, slots_for
from baton.engine.request import Request
from baton.engine.sampling_params import SamplingParams
from baton.engine.speculative import draft_loops, draft_worker
from baton.engine.speculative.chain import ChainPlan, plan_chain
from baton.kernels.kv_store import kv_rows
from baton.tests.parity.eagle3_engine import PAGE_SIZE, Engine
from baton.tests.parity.graph_engine import MAX_BATCH, MAX_TOKENS, arena, poison, with_graphs
from baton.tests.parity.toy_engine import random_ids

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
NUM_ROWS = 1 + Engine.steps


def batch_of(engine: Engine, mode: ForwardMode, *q_lens: int) -> ForwardBatch:
    """Rows of requests from their beginning on, each in pages of its own, with random ids and features."""
    pages = [[1 + 10 * i + j for j in range(pages_for(n, PAGE_SIZE))][::-1] for i, n in enumerate(q_lens)]
    count = sum(q_lens)
    return ForwardBatch(
        mode=mode,
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
    batch = batch_of(engine, ForwardMode.EXTEND, count)
    out = engine.drafter.prefill_rows(batch)
    return engine.drafter.head.compute_logits(out), batch.decision.is_graph


def extended(engine: Engine, count: int) -> tuple[torch.Tensor, bool]:
    batch = batch_of(engine, ForwardMode.DRAFT_EXTEND, *[NUM_ROWS] * count)
    _, logits = engine.drafter.extend_rows(batch, 1 + torch.arange(count) % NUM_ROWS)
    return logits, batch.decision.is_graph


EDGES = [
    *(
        (prefilled, n, MAX_TOKENS, "draft_prefill_tokens_over_max")
        for n in (1, 15, 16, 17, MAX_TOKENS, MAX_TOKENS + 1)
    ),
    *(
        (extended, n, MAX_BATCH, "draft_extend_batch_over_planned")
        for n in (1, 2, 3, MAX_BATCH, MAX_BATCH + 1)
    ),
]


@pytest.mark.parametrize(("run", "count", "most", "reason"), EDGES)
def test_m2_3_draft_forwards_at_bucket_edges_equal_eager_larger_counted(
    plain, graphed, run, count, most, reason
):
    before = graphed.graphs.counters().get(f"graph_fallback_{reason}", 0)
    poison(graphed)
    logits, is_graph = run(graphed, count)
    expected, _ = run(plain, count)
    assert is_graph is (count <= most)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(graphed.drafter.pool.kv[1:], plain.drafter.pool.kv[1:], atol=1e-4, rtol=1e-4)
    assert graphed.graphs.counters().get(f"graph_fallback_{reason}", 0) - before == (count > most)


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
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND, ForwardMode.DECODE])
def test_m5_2_a_change_after_planning_is_refused_by_target_and_draft(plain, mode, change):
    count = 1 if mode is ForwardMode.DECODE else NUM_ROWS
    for attention in (plain.drafter._attention, plain.runner.attention):
        batch = batch_of(plain, mode, count, count)
        metadata = plan(batch, PAGE_SIZE)
        attend = attention.bind(metadata)
        change(batch)
        with pytest.raises(LifecycleError, match="plan after the last change"):
            attention.bind(metadata)
        with pytest.raises(LifecycleError, match="plan after the last change"):
            attend(0, *(torch.zeros(2 * count, heads, 16) for heads in (4, 2, 2)))
        attention.bind(plan(batch, PAGE_SIZE)) if change is not without_a_request else None


def requests_of(engine: Engine, count: int) -> list[Request]:
    engine.next_page = 1
    return [engine.prefill(random_ids(5 + 3 * i, seed=i), GREEDY) for i in range(count)]


def chain_of(engine: Engine, count: int) -> tuple[ChainPlan, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Plan, draft slots and draft state of a step of `count` requests, which are then forgotten."""
    requests = requests_of(engine, count)
    chain = plan_chain(
        requests, engine.decoder.shape.spare_slots, page_size=PAGE_SIZE, max_context=256, device="cpu"
    )
    states, rows = (
        engine.drafter.states,
        torch.tensor([engine.decoder._warm[request].row for request in requests]),
    )
    state = states.hidden[rows].clone(), states.logits[rows].clone()
    for request in requests:
        engine.decoder.forget(request)
    return chain, chain.slots, state


def test_m5_3_a_graph_draft_forward_forced_to_eager_is_planned_again(plain, graphed):
    drafter = graphed.drafter
    for mode, lens in ((ForwardMode.EXTEND, (7,)), (ForwardMode.DRAFT_EXTEND, (NUM_ROWS,) * 3)):
        outputs = []
        for engine in (graphed, plain):
            batch, accept_len = batch_of(engine, mode, *lens), torch.full((len(lens),), 2)
            if engine is graphed and mode is ForwardMode.EXTEND:
                assert drafter.graphs.prefill.decide(batch).is_graph
            elif engine is graphed:
                drafter.graphs.extend.rows.plan(batch, drafter.graphs.extend.decide(batch).bucket)
            batch.decision = EAGER
            is_prefill = mode is ForwardMode.EXTEND
            outputs.append(
                engine.drafter.prefill_rows(batch)
                if is_prefill
                else engine.drafter.extend_rows(batch, accept_len)[1]
            )
        assert torch.equal(*outputs)
    drafts = []
    for engine in (graphed, plain):
        chain, slots, state = chain_of(engine, 3)
        if engine is graphed:
            drafter.graphs.loop.rows.plan_context(
                chain.page_table, chain.lens, drafter.graphs.loop.decide(chain).bucket
            )
        drafts.append(engine.drafter.draft_rows(chain, slots, state, [GREEDY] * 3, EAGER))
    assert torch.equal(*drafts)


# --- where rows are written ---------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_m5_4_graph_and_eager_draft_steps_get_equal_slots_and_lengths(target, head, monkeypatch, steps, topk):
    """Of each step, three requests in a bucket of four."""
    engine = Engine(target, head, steps=steps, topk=topk)
    captured, planned = [], []
    attend_rows = draft_loops.attend_rows
    monkeypatch.setattr(
        draft_loops, "attend_rows", lambda *args: captured.append(args[1:4]) or attend_rows(*args)
    )
    with_graphs(engine)
    chain, slots, state = chain_of(engine, 3)
    chain_batch = draft_worker.chain_batch
    monkeypatch.setattr(
        draft_worker,
        "chain_batch",
        lambda *args, **more: planned.append(chain_batch(*args, **more)) or planned[-1],
    )
    shape, drafter, params = engine.decoder.shape, engine.drafter, [GREEDY] * 3
    if topk == 1:
        loop = drafter.graphs.loop
        found = [drafter.draft_rows(chain, slots, state, params, decision) for decision in (None, EAGER)]
    else:
        loop = drafter.graphs.tree
        found = [
            drafter.tree_rows(shape, chain, slots, state, params, each).drafts
            for each in (loop.decide(chain), EAGER)
        ]
    assert torch.equal(*found)
    assert loop.family.pool.report().kinds[-1].replays == {MAX_BATCH: 1}
    of_bucket = [args for args in captured if args[1].shape[0] == MAX_BATCH][: steps - 1]
    assert len(of_bucket) == len(planned) == steps - 1
    for (graph_rows, table, lens), batch in zip(of_bucket, planned, strict=True):
        assert torch.equal(graph_rows[: 3 * topk], kv_rows(batch.slots, drafter.pool.kv))
        assert lens[:3].tolist() == batch.kv_lens
        width = batch.page_table.shape[1]
        for row, used in enumerate(pages_for(n, PAGE_SIZE) for n in batch.kv_lens):
            assert torch.equal(table[row, : min(used, width)], batch.page_table[row, :used])
