"""MTP modules with and without graphs: the same hidden states, KV and drafts, whatever ran before.

The tests carry the numbers of the laws in docs/mechanisms.md: M4 asks for per-step hidden states and rows at
the accepted boundary, M5 for plans that belong to the batch which runs.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.errors import LifecycleError
from baton.engine.graphs.breakable import Breaks
from baton.engine.graphs.bucketed_graphs import EAGER
from baton.engine.graphs.graph_pool import GraphKind, GraphPool
from baton.engine.graphs.tape.tape import KeptMemory, TapeBackend
from baton.engine.request import Request
from baton.engine.row_attention import RowPlan
from baton.engine.speculative.drafters import loops, mtp_window
from baton.engine.speculative.drafters.mtp_head import MtpHead, MtpModule
from baton.engine.speculative.drafters.mtp_window import Window, plan_modules
from baton.engine.speculative.drafters.protocol import DraftPrefill
from baton.engine.speculative.step import fused_step
from baton.engine.speculative.step.fused_step import StepContext
from baton.kernels.kv_store import kv_rows
from baton.tests.parity.eagle3_engine import PAGE_SIZE
from baton.tests.parity.graph_engine import enable, poison, statics, with_graphs
from baton.tests.parity.mtp_laws import (
    DEEP,
    KINDS,
    PATHS,
    batch_of,
    check_accept_lens,
    check_alternation,
    check_prefill_graphs,
    check_sizes,
    graphed,
    greedy,
    served,
    write_kinds,
)
from baton.tests.parity.mtp_reference import reference_drafts
from baton.tests.parity.mtp_toys import MtpEngine
from baton.tests.parity.toy_engine import random_ids
from baton.tests.variants import witnesses

pytestmark = pytest.mark.usefixtures("one_thread")

# Independent modules run the code of chained ones, without the hidden state of the module before.
QUICK_KINDS = witnesses(KINDS, {"chained", "shared"})


@pytest.fixture(scope="session")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=2)


@pytest.fixture(scope="session")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_kinds(tmp_path_factory.mktemp("mtp"), target)


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_m4_1_batches_around_the_largest_graph_give_the_same_tokens(target, heads, kind):
    check_sizes(target, heads[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_m4_2_every_row_of_a_window_lies_in_its_requests_pages(target, heads, kind, monkeypatch):
    """What a memory checker proves on a device: no row of any pass is outside of the request's own pages."""
    seen: list[int] = []

    class Checked(RowPlan):
        def __init__(self, pool, rows, page_table, kv_lens, *masks, slots=None, **settings):
            super().__init__(pool, rows, page_table, kv_lens, *masks, **settings)
            held = rows.view(page_table.shape[0], -1)
            pages = held // (pool.num_layers * 2 * pool.page_size)
            offsets = held % (pool.num_layers * 2 * pool.page_size)
            assert bool((offsets < pool.page_size).all()), "a row is that of the keys of layer 0"
            assert bool(((held == 0) | (pages[:, :, None] == page_table[:, None]).any(-1)).all())
            assert bool((kv_lens <= page_table.shape[1] * pool.page_size).all())
            seen.append(held.shape[1])

    for module in (mtp_window, loops, fused_step):
        monkeypatch.setattr(module, "plan_rows", Checked)
    engine = MtpEngine(target, heads[kind])
    for count in (1, 4, 9):
        served(engine, count)
    assert len(seen) > 20


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_m4_3_poisoned_buffers_of_the_other_path_are_never_read(target, heads, kind):
    """NaN in every graph buffer before eager steps, and in what eager steps left before graph steps."""
    expected = served(MtpEngine(target, heads[kind]), 3)
    engine = graphed(target, heads[kind])
    for kinds in (*PATHS.values(), PATHS["graph"]):
        enable(engine, kinds)
        poison(engine)
        assert all(bool(static.isnan().all()) for static in statics(engine) if static.is_floating_point())
        assert served(engine, 3) == expected


@pytest.mark.parametrize("path", [None, *PATHS])
@pytest.mark.parametrize("kind", witnesses(DEEP, {"chained"}))
def test_m4_4_after_any_accept_length_each_modules_kv_is_that_of_scratch(target, heads, kind, path):
    check_accept_lens(target, heads[kind], kinds=None if path is None else PATHS[path])


@pytest.mark.parametrize("kind", KINDS)
def test_m4_5_each_modules_hidden_in_a_graph_equals_the_eager_one(target, heads, kind):
    check_prefill_graphs(target, heads[kind])


def test_m4_5_the_hidden_of_another_module_in_the_chain_is_seen(target, heads, monkeypatch):
    """Hidden states differ from module to module, and the last one's in place of each changes the drafts."""
    engine = MtpEngine(target, heads["chained"])
    request = engine.prefill(random_ids(9, seed=2), greedy(30))
    scratch = reference_drafts(target, heads["chained"], list(request.all_ids), 3)
    assert not torch.allclose(scratch.outputs[0][-1], scratch.outputs[1][-1], atol=1e-2)
    assert not torch.allclose(scratch.outputs[1][-1], scratch.outputs[2][-1], atol=1e-2)
    compute, run, logits, outputs = MtpHead.compute_logits, MtpModule.__call__, [], []
    monkeypatch.setattr(
        MtpHead, "compute_logits", lambda self, out, k=0: logits.append(compute(self, out, k)) or logits[-1]
    )
    monkeypatch.setattr(
        MtpModule, "__call__", lambda self, *parts: outputs.append(run(self, *parts)) or outputs[-1]
    )
    engine.drafter._draft_first([item_of(engine, request)])
    right, last = torch.cat(logits[-3:]), engine.drafter.head.feedback(outputs[-1], 2)
    torch.testing.assert_close(right, scratch.logits, atol=1e-3, rtol=1e-3)
    monkeypatch.setattr(MtpHead, "feedback", lambda self, out, k=0: last)
    engine.drafter._draft_first([item_of(engine, request)])
    assert torch.allclose(logits[-3], right[0], atol=1e-5), "the first module takes the target's"
    assert not torch.allclose(logits[-2], right[1:2], atol=1e-2)
    assert not torch.allclose(logits[-1], right[2:], atol=1e-2)


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_m4_6_graph_and_eager_steps_in_turns_equal_eager_ones(target, heads, kind):
    check_alternation(target, heads[kind])


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_m4_7_the_report_of_a_step_outlives_the_next_replay(target, heads, kind):
    """`check_prefill_graphs` holds the outputs of a prefill; here it is those of whole steps."""
    engine = graphed(target, heads[kind])
    enable(engine, PATHS["graph"])
    requests = [engine.prefill(random_ids(4 + i, seed=i), greedy(20)) for i in range(3)]
    held = engine.decoder.step(requests)
    assert held.path == "graph"
    before = [list(tokens) for tokens in held.tokens]
    states = [values.clone() for values in engine.drafter.anchors]
    engine.decoder.step(requests)
    assert held.tokens == before
    assert any(not torch.equal(*pair) for pair in zip(states, engine.drafter.anchors, strict=True))


# --- plans --------------------------------------------------------------------------------------------------


def plans_of(engine: MtpEngine, num_requests: int = 2, num_rows: int = 4) -> tuple[list, Window]:
    """The attention of each module over a window, with the tensors that it was planned from."""
    lens = torch.full((num_requests,), 7)
    table = 1 + torch.arange(num_requests * 2).view(num_requests, 2)
    slots = torch.arange(num_requests * num_rows).view(num_requests, -1) + PAGE_SIZE
    rows = kv_rows(slots, engine.drafter.pool.kv)
    nothing = torch.zeros(num_requests, num_rows, dtype=torch.int64)
    window = Window(torch.zeros(num_requests, num_rows, 64), nothing, nothing, rows, lens)
    modules = engine.drafter.head.num_modules
    return plan_modules(engine.drafter.pool, window, table, lens, modules, is_recorded=False), window


@pytest.mark.parametrize("module", range(3))
def test_m5_5_every_module_has_a_plan_of_as_many_rows_as_it_runs(target, heads, module):
    attends, _ = plans_of(MtpEngine(target, heads["chained"]))
    attends[module](0, *(torch.zeros(8, heads_, 16) for heads_ in (4, 2, 2)))
    with pytest.raises(LifecycleError, match="planned for 8 rows and got 6"):
        attends[module](0, *(torch.zeros(6, heads_, 16) for heads_ in (4, 2, 2)))


@pytest.mark.parametrize("module", range(3))
def test_m5_5_a_window_changed_after_planning_is_refused_by_every_module(target, heads, module):
    attends, window = plans_of(MtpEngine(target, heads["chained"]))
    parts = [torch.zeros(8, heads_, 16) for heads_ in (4, 2, 2)]
    attends[module](0, *parts)
    window.rows[:1] += 1
    with pytest.raises(LifecycleError, match="plan after the last change"):
        attends[module](0, *parts)


def test_m5_5_every_module_stores_into_its_own_kv(target, heads):
    engine = MtpEngine(target, heads["chained"])
    attends, _ = plans_of(engine)
    for module, attend in enumerate(attends):
        attend(0, *(torch.full((8, heads_, 16), 1.0 + module) for heads_ in (4, 2, 2)))
    for module in range(3):
        kept = engine.drafter.pool.kv[1, module]
        assert bool((kept == 1.0 + module).all())


@pytest.mark.parametrize("kind", KINDS)
def test_m5_5_a_prefill_forced_to_eager_is_planned_anew(target, heads, kind):
    engine, plain = graphed(target, heads[kind]), MtpEngine(target, heads[kind])
    outputs = []
    for each in (engine, plain):
        batch = batch_of(each, 7)
        if each is engine:
            assert each.drafter.graphs.decide(batch).is_graph
        batch.decision = EAGER
        outputs.append(each.drafter.prefill_rows(batch))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_m5_5_idle_rows_pad_every_module_and_an_empty_prefill_runs(target, heads, kind):
    padded, plain = MtpEngine(target, heads[kind]), MtpEngine(target, heads[kind])
    padded.drafter.row_multiple = 8
    for count in (1, 7, 8, 9):
        ours, theirs = (each.drafter.prefill_rows(batch_of(each, count)) for each in (padded, plain))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert not bool(padded.drafter.pool.kv[0].any())
    before = padded.drafter.pool.kv.clone()
    padded.decoder.draft_prefill_batch([])
    assert torch.equal(padded.drafter.pool.kv, before)


@pytest.mark.parametrize("kind", KINDS)
def test_m5_5_graph_and_eager_steps_plan_the_same_rows(target, heads, kind, monkeypatch):
    """Of each pass of a step of three requests in a bucket of four: verify, the window, recycled steps."""
    engine = MtpEngine(target, heads[kind], is_greedy=True)
    with_graphs(engine, kinds=set())
    requests = [engine.prefill(random_ids(2 + 3 * i, seed=i), greedy(40)) for i in range(3)]
    engine.decoder.step(requests)
    planned: list[tuple[torch.Tensor, ...]] = []

    class Spied(RowPlan):
        def __init__(self, pool, *parts, slots=None, **settings):
            planned.append(parts)
            super().__init__(pool, *parts, **settings)

    for module in (fused_step, loops, mtp_window):
        monkeypatch.setattr(module, "plan_rows", Spied)
    steps, kind_of_step = engine.decoder.steps, engine.decoder.steps.kinds[0]
    context = StepContext(num_rows=3)
    states = (steps.step.state.integers, *engine.drafter.anchors)
    before = [values.clone() for values in states]
    pooled = GraphPool(TapeBackend(KeptMemory())).capture(
        GraphKind.DECODE_STEP,
        4,
        lambda breaks: steps.step.run(steps.slots[:4], kind_of_step, breaks),
        context,
    )
    recorded, report = planned[:], pooled.graph.output.clone()
    planned.clear()
    for is_replay in (False, True):
        for values, old in zip(states, before, strict=True):
            values.copy_(old)
        if is_replay:
            pooled.replay(context)
            assert torch.equal(pooled.graph.output, report)
        else:
            steps.step.run(steps.slots[:3], kind_of_step, Breaks(context))
    assert len(recorded) == len(planned) == (4 if kind == "shared" else 2)
    for (rows, table, lens, *_), (eager_rows, eager_table, eager_lens, *_) in zip(
        recorded, planned, strict=True
    ):
        assert torch.equal(rows[: len(eager_rows)], eager_rows)
        assert torch.equal(lens[:3], eager_lens)
        assert torch.equal(table[:3], eager_table)
        assert not rows[len(eager_rows) :].any(), "idle rows lie in the sink"


def item_of(engine: MtpEngine, request: Request) -> DraftPrefill:
    """The final prefill item of a request whose rows are written."""
    end = request.num_tokens - 1
    return DraftPrefill(
        pages=request.pages,
        start=end - 1,
        next_ids=request.all_ids[end:],
        features=torch.zeros(1, 64),
        state_row=engine.decoder.coverage.known[request].row,
        is_final=True,
        known_ids=request.all_ids,
    )
