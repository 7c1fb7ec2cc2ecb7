"""Inputs and outputs of a forward: the layers of either hook, embeddings, widths, hidden modes, idle rows."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import product

import pytest
import torch
from baton.engine.attention.metadata import AttentionMetadata, plan
from baton.engine.batch.forward_batch import CaptureHidden, ForwardBatch
from baton.engine.batch.padding import pad_rows
from baton.engine.errors import CheckpointError, LifecycleError, UnsupportedInput
from baton.engine.graphs import token_graphs
from baton.engine.graphs.breakable import ReplayContext
from baton.engine.graphs.bucketed_graphs import BatchShape, GraphFamily, GraphLimits
from baton.engine.graphs.graph_pool import GraphKind, GraphPool
from baton.engine.graphs.static import load_rows
from baton.engine.graphs.tape.tape import TapeBackend
from baton.engine.graphs.token_graphs import read_real_rows
from baton.engine.kv.pool import FeaturePlane, KVPool
from baton.engine.models.llama import LlamaForCausalLM
from baton.engine.row_attention import RowPlan
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafters.eagle3 import Eagle3Drafter
from baton.engine.speculative.drafters.eagle3_head import DraftPhase, Eagle3Head
from baton.engine.speculative.drafters.idle import idle_draft_batch
from baton.engine.speculative.drafters.prefill_graphs import DraftPrefillGraphs
from baton.engine.speculative.drafters.spec_config import load_draft_config
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.eagle3_toys import VOCAB, head_config, toy_target, write_head
from baton.tests.parity.graph_engine import FULL, arena, capture, families, kv_of, with_graphs
from baton.tests.parity.toy_engine import PAGE_SIZE, ToyEngine, random_ids
from baton.tests.parity.toy_models import reference_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def target(deep_target):
    return deep_target


@pytest.fixture
def head(deep_head):
    return deep_head


IDS = (9, 1, 5)
FIVE = (7, 0, 10, 4, 2)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)


def full(toy: ToyEngine, *chunks: tuple[str, list[int]]) -> ForwardBatch:
    batch = toy.batch(*chunks)
    batch.capture_hidden = CaptureHidden.FULL
    return batch


def assert_same(engine: Engine, plain: Engine, prompts: list[list[int]]) -> None:
    """Equal tokens, accept lengths and, of what is committed, KV."""
    tokens, kv = [], []
    for each in (engine, plain):
        requests = [each.prefill(prompt, GREEDY) for prompt in prompts]
        tokens.append(each.run(requests))
        kv.append([rows for request in requests for rows in kv_of(each, request)])
    assert tokens[0] == tokens[1]
    assert [r.accept_lens for r in engine.results] == [r.accept_lens for r in plain.results]
    torch.testing.assert_close(kv[0], kv[1], atol=2e-4, rtol=1e-4)


# --- captured layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("aux", [IDS, FIVE], ids=str)
def test_m1_1_any_layers_are_captured_in_their_order_on_every_path(target, aux):
    toy, plain, ids = ToyEngine(target), ToyEngine(target), random_ids(10, seed=1)
    for each in (toy, plain):
        each.runner.set_aux_layer_ids(aux)
    capture(toy.runner, memory=arena())
    with torch.no_grad():
        states = reference_model(target)(torch.tensor([ids]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer + 1][0] for layer in aux], dim=-1)
    outputs = [plain.runner.forward(full(plain, ("a", ids))), toy.runner.forward(full(toy, ("a", ids[:8])))]
    outputs.append(toy.runner.forward(full(toy, ("a", ids[8:]))))
    assert [output.path for output in outputs] == ["eager", "breakable", "breakable"]
    for output, rows in zip(outputs, (slice(None), slice(8), slice(8, None)), strict=True):
        torch.testing.assert_close(output.hidden, expected[rows], atol=1e-4, rtol=1e-4)
    other = torch.cat([states[layer + 1][0] for layer in sorted(aux)], dim=-1)
    assert not torch.allclose(outputs[-1].hidden, other[8:], atol=1e-2)
    with pytest.raises(LifecycleError, match="already configured"):
        toy.runner.set_aux_layer_ids(aux[::-1])


def test_m1_4_a_model_without_the_hook_of_its_drafter_is_named_with_it(target):
    class Hookless:
        aux_layer_ids = None

    with pytest.raises(CheckpointError, match=r"Hookless cannot capture layer outputs .it has no set_aux"):
        ModelRunner(Hookless(), ToyEngine(target).pool).set_aux_layer_ids((1, 5))


def drop_one_layer(runner: ModelRunner) -> None:
    """Plant: the last of the chosen layers is not captured."""
    trunk = runner.model.trunk
    runner.model.trunk = lambda hidden, positions, attend, aux=(): trunk(hidden, positions, attend, aux[:-1])


@pytest.mark.parametrize("has_graphs", [False, True])
def test_m1_7_fewer_captured_layers_than_chosen_raise_on_every_path(target, has_graphs):
    toy = ToyEngine(target, aux=IDS)
    drop_one_layer(toy.runner)
    if has_graphs:
        capture(toy.runner)
    batch = full(toy, ("a", [1, 2]))
    with pytest.raises(
        LifecycleError, match=r"\[9, 1, 5\] are \[2, 192\], but the forward captured \[2, 128\]"
    ):
        toy.runner.forward(batch)
    assert batch.decision.is_graph is has_graphs


def test_m1_7_the_draft_refuses_features_of_layers_other_than_the_heads(target, head):
    engine = Engine(target, head, aux_ids=(1, 5))
    with pytest.raises(ValueError, match=r"\[5, 128\] torch.float32.*takes \[5, 192\] torch.float32"):
        engine.prefill([1, 2, 3, 4, 5], GREEDY)


# --- embeddings ---------------------------------------------------------------------------------------------


def with_embeds(toy: ToyEngine, name: str, ids: list[int]) -> ForwardBatch:
    batch = full(toy, (name, ids))
    batch.input_embeds = toy.model.embed(batch.input_ids)
    return batch


def test_m2_5_embeddings_run_eagerly_and_counted_if_the_model_takes_them(target):
    toy, ids = ToyEngine(target, aux=IDS), random_ids(6)
    graphs = capture(toy.runner)
    given, looked_up = (
        toy.runner.forward(with_embeds(toy, "a", ids)),
        toy.runner.forward(full(toy, ("b", ids))),
    )
    assert (given.path, looked_up.path) == ("eager", "breakable")
    torch.testing.assert_close(given.logits, looked_up.logits, atol=1e-4, rtol=1e-4)
    assert graphs.counters()["graph_fallback_target_prefill_caller_embeds"] == 1
    batch = full(toy, ("c", ids))
    batch.input_embeds = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(toy.runner.forward(batch).logits, given.logits, atol=1e-2)
    for wrong in (torch.zeros(5, 64), torch.zeros(6, 63), torch.zeros(6, 64, dtype=torch.float64)):
        batch = full(toy, ("d", ids))
        batch.input_embeds = wrong
        with pytest.raises(UnsupportedInput, match=r"takes \[6, 64\] torch.float32"):
            toy.runner.forward(batch)


def test_m2_5_a_model_without_embeddings_refuses_them_and_serves_on(target, head):
    toy, ids = ToyEngine(target, aux=IDS), random_ids(6)
    toy.model.takes_input_embeds = False
    with pytest.raises(ValueError, match="LlamaForCausalLM takes no input_embeds; send token ids") as caught:
        toy.runner.forward(with_embeds(toy, "a", ids))
    assert caught.type is UnsupportedInput
    assert toy.runner.forward(full(toy, ("b", ids))).logits.isfinite().all()
    engine = Engine(target, head)
    batch = idle_draft_batch(engine.drafter.head.config.dims, DraftPhase.FROM_TARGET_FEATURES)
    batch.input_embeds = torch.zeros(0, 63)
    with pytest.raises(UnsupportedInput, match=r"\[0, 63\]: the draft head takes \[0, 64\]"):
        engine.drafter.prefill_rows(batch)


@pytest.mark.slow
def test_m2_5_without_asserts_the_refusal_is_the_same(target):
    script = """
        import sys, torch
        from pathlib import Path
        from baton.engine.errors import UnsupportedInput
        from baton.tests.parity.toy_engine import ToyEngine
        toy = ToyEngine(Path(sys.argv[1]))
        toy.model.takes_input_embeds = False
        batch = toy.batch(("a", [1, 2]))
        batch.input_embeds = torch.zeros(2, 64)
        try:
            toy.runner.forward(batch)
        except UnsupportedInput as error:
            print(error)
        print(__debug__, toy.run(("b", [3])).logits.shape)
    """
    command = [sys.executable, "-O", "-c", textwrap.dedent(script), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.splitlines() == [
        "LlamaForCausalLM takes no input_embeds; send token ids",
        f"False torch.Size([1, {VOCAB}])",
    ]


# --- hidden modes -------------------------------------------------------------------------------------------


def test_m2_7_graphs_capture_the_hidden_states_that_their_forwards_need(target, head):
    plain, drafting = Engine(target), Engine(target, head)
    modes = []
    for engine in (plain, drafting):
        with_graphs(engine)
        modes.append({family.kind: family.limits.hidden for family in families(engine)})
    null, last, every = CaptureHidden
    steps = [kind for kind in FULL if kind is not GraphKind.DRAFT_CATCH_UP]  # that one has an adaptive engine
    assert modes[0] == {GraphKind.TARGET_PREFILL: null} | dict.fromkeys(steps, null)
    assert modes[1] == {
        GraphKind.TARGET_PREFILL: every, GraphKind.DRAFT_PREFILL: last,
    } | dict.fromkeys(steps, every)  # fmt: skip


@pytest.mark.parametrize("captured", list(CaptureHidden))
@pytest.mark.parametrize("asked", list(CaptureHidden))
def test_m2_7_a_graph_serves_its_captured_hidden_states_or_fewer(captured, asked):
    limits = GraphLimits(is_by_token=True, hidden=captured)
    family = GraphFamily(GraphPool(TapeBackend()), GraphKind.TARGET_PREFILL, (4,), limits)
    family.capture(lambda bucket, _: torch.zeros(bucket), lambda bucket: ReplayContext(num_rows=bucket), list)
    decision = family.decide(BatchShape(size=4, hidden=asked))
    assert decision.is_graph is (captured >= asked)
    counted = [] if captured >= asked else [("hidden_mode", 1)]
    assert [item for kind in family.pool.kinds() for item in kind.fallbacks.items()] == counted


# --- padding ------------------------------------------------------------------------------------------------


def test_m2_8_nan_after_breaks_and_in_padded_features_reaches_no_real_row(target, head, monkeypatch):
    nan = float("nan")

    def leave_nan(context, layer, q, *more, out):
        read_real_rows(context, layer, q, *more, out=out)
        for tensor in (q, out):
            tensor[context.num_rows :] = nan

    def pad_with_nan(static, values, end, *, name):
        load_rows(static, values, end, name=name)
        if static.is_floating_point():
            static[values.shape[0] : end] = nan

    monkeypatch.setattr(token_graphs, "read_real_rows", leave_nan)
    monkeypatch.setattr(token_graphs, "load_rows", pad_with_nan)
    engine, plain = Engine(target, head), Engine(target, head)
    graphs = with_graphs(engine, arena())
    prompts = [random_ids(n, seed=n) for n in (5, 9, 13)]
    assert_same(engine, plain, prompts)
    assert engine.runner.pool.kv[0].count_nonzero() == engine.drafter.pool.kv[0].count_nonzero() == 0
    counters = graphs.counters()
    assert min(counters[f"graph_pad_rows_{kind}"] for kind in ("target_prefill", "draft_prefill")) > 0


@pytest.mark.parametrize(
    ("shape", "has_graphs"),
    [
        pytest.param({}, False, id="chain"),
        pytest.param({"steps": 2, "topk": 2, "tokens": 6}, False, id="tree"),
        pytest.param({}, True, id="chain-graphs"),
        pytest.param({"steps": 2, "topk": 2, "tokens": 6}, True, id="tree-graphs", marks=pytest.mark.slow),
    ],
)
def test_m5_5_forwards_padded_to_a_multiple_equal_unpadded_forwards(
    target, head, monkeypatch, shape, has_graphs
):
    """Draft prefill, draft decode, verify and draft extend, as beside a peer whose kernels want eight
    rows."""
    engine, plain = Engine(target, head, **shape), Engine(target, head, **shape)
    engine.runner.row_multiple = engine.drafter.row_multiple = 8
    if has_graphs:
        with_graphs(engine, arena(), max_batch=8)
    seen = []
    init = RowPlan.__init__

    def noted(self: RowPlan, pool: KVPool, rows: torch.Tensor, *rest: object, **more: object) -> None:
        seen.append(rows.shape[0])
        init(self, pool, rows, *rest, **more)

    monkeypatch.setattr(RowPlan, "__init__", noted)
    for runner in (engine.runner, engine.drafter):
        attention = runner._attention if runner is engine.drafter else runner.attention
        for name, bind in (("bind", attention.bind), ("bind_reads", attention.bind_reads)):

            def noting(metadata: AttentionMetadata, bind: Callable[..., object] = bind) -> object:
                seen.append(metadata.num_rows)
                return bind(metadata)

            monkeypatch.setattr(attention, name, noting)
    prompts = [random_ids(n, seed=n) for n in (1, 6, 11)]
    tokens = engine.generate(prompts, GREEDY)
    monkeypatch.undo()
    assert tokens == plain.generate(prompts, GREEDY)
    assert [r.accept_lens for r in engine.results] == [r.accept_lens for r in plain.results]
    assert seen
    assert {result.path for result in engine.results} == {"graph" if has_graphs else "eager"}
    assert all(rows % 8 == 0 for rows in seen), seen


def test_m3_4_idle_forwards_run_with_the_number_of_rows_of_their_peer(target, head):
    engine = Engine(target, head)
    engine.runner.row_multiple = engine.drafter.row_multiple = 8
    graphs = with_graphs(engine, arena())
    before = engine.runner.pool.kv.clone()
    batch = idle_draft_batch(engine.drafter.head.config.dims, DraftPhase.FROM_TARGET_FEATURES)
    batch.capture_hidden, batch.features = CaptureHidden.FULL, None
    output = engine.runner.forward(batch)
    assert (output.logits.shape[0], tuple(output.hidden.shape)) == (0, (0, engine.drafter.feature_width))
    assert output.path == "breakable"
    engine.drafter.prefill([])
    replays = {key: count for key, count in graphs.counters().items() if "replays" in key and count}
    assert replays == {f"graph_replays_{kind}": 1 for kind in ("target_prefill", "draft_prefill")}
    assert torch.equal(engine.runner.pool.kv, before)
    assert engine.drafter.pool.kv.count_nonzero() == 0


def test_m5_1_metadata_planned_before_padding_is_refused(target):
    toy = ToyEngine(target, aux=IDS)
    toy.runner.row_multiple = 8
    for count in (6, 2):
        batch = full(toy, ("a", random_ids(count)))
        with pytest.raises(LifecycleError, match=f"planned for {count} rows and got 8"):
            toy.runner.forward(batch, plan(batch, PAGE_SIZE))
    batch = full(toy, ("b", random_ids(6)))
    padded = pad_rows(batch, 8)
    assert (padded.num_tokens, padded.slots.tolist()[6:], pad_rows(batch, 1), pad_rows(padded, 8)) == (
        8, [0, 0], batch, padded,
    )  # fmt: skip


# --- widths and dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("target_hidden", [None, 96])
def test_m3_1_target_draft_and_wire_share_one_record_of_widths_and_dtype(tmp_path, target_hidden, dtype):
    config = toy_target(hidden_size=target_hidden or 64, dtype="float32")
    model = LlamaForCausalLM(config, dtype=dtype)
    for tensor in dict(model.tensors()).values():
        tensor.zero_()
    pool = KVPool(4, model.kv_layout(16))
    for use_aux, ids in product((None, True), (None, (6,), IDS, FIVE)):
        raw = head_config(2, ids or IDS, **({"target_hidden_size": target_hidden} if target_hidden else {}))
        if ids is None:
            del raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        if use_aux is None:
            del raw["eagle_config"]["use_aux_hidden_state"]
        path = write_head(tmp_path, raw, {})
        draft = load_draft_config(path, config, dtype=str(dtype).removeprefix("torch."))
        width = len(ids or IDS) * config.hidden_size
        head = share_own(Eagle3Head(draft, dtype=dtype), dtype)
        model.aux_layer_ids = None
        runner = ModelRunner(model, pool)
        runner.set_aux_layer_ids(draft.aux.ids)
        graphs = GraphPool(TapeBackend())
        prefill = DraftPrefillGraphs(graphs, head, pool, (4,))
        drafter = Eagle3Drafter(head, num_pages=4, page_size=16, dtype=dtype)
        idle = [idle_draft_batch(draft.dims, phase).features for phase in DraftPhase]
        output = runner.forward(one_row())
        fed = [output.hidden, idle[0], prefill.tokens.inputs["features"]]
        own = [idle[1], drafter.states.hidden]
        assert (
            {t.shape[1] for t in fed} == {width, head.fc.weight.shape[1]} == {draft.dims.target_feature_width}
        )
        assert {t.shape[1] for t in own} == {head.fc.weight.shape[0]} == {draft.dims.self_width}
        assert {t.dtype for t in (*fed, *own, head.fc.weight)} == {dtype}


def test_m3_1_a_head_without_aux_features_reads_the_last_layer(tmp_path):
    raw = head_config(2)
    raw["eagle_config"] = {"use_aux_hidden_state": False}
    config = load_draft_config(write_head(tmp_path, raw, {}), toy_target())
    assert config.aux.ids == (toy_target().num_layers - 1,)
    assert config.dims.target_feature_width == toy_target().hidden_size


def test_m3_3_a_head_or_draft_kv_in_another_dtype_than_resolved_is_refused(tmp_path):
    draft = load_draft_config(write_head(tmp_path, head_config(2), {}), toy_target(), dtype="bfloat16")
    for head_dtype, kv_dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        head = share_own(Eagle3Head(draft, dtype=head_dtype), head_dtype)
        with pytest.raises(CheckpointError, match=r"in torch.float32, but .* was resolved for bfloat16"):
            Eagle3Drafter(head, num_pages=4, page_size=4, dtype=kv_dtype)


def test_m3_5_a_row_of_another_width_or_dtype_never_reaches_the_wire(target, head):
    plane = FeaturePlane(4, 4, 8, torch.float32)
    for wrong in (torch.ones(2, 7), torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(3, 8)):
        with pytest.raises(ValueError, match=r"takes \[2, 8\] torch.float32"):
            plane.store(torch.tensor([4, 5]), wrong)
    assert plane.features.count_nonzero() == 0
    engine = Engine(target, head)
    idle = idle_draft_batch(engine.drafter.head.config.dims, DraftPhase.SELF_CHAIN)
    with pytest.raises(AssertionError, match="target_feature_width"):
        engine.drafter.prefill_rows(idle)


def share_own(head: Eagle3Head, dtype: torch.dtype) -> Eagle3Head:
    """An embedding and lm_head of the head's own width."""
    head.embed_tokens = torch.zeros(VOCAB, head.config.hidden_size, dtype=dtype)
    head.lm_head = torch.zeros(head.config.draft_vocab_size, head.config.hidden_size, dtype=dtype)
    head.share(head.embed_tokens, head.lm_head, 64)
    return head


def one_row() -> ForwardBatch:
    row = torch.zeros(1, dtype=torch.int64)
    return ForwardBatch(
        input_ids=row, positions=row, slots=row + 16, page_table=torch.ones((1, 1),
        dtype=torch.int64),
        q_lens=[1], kv_lens=[1], capture_hidden=CaptureHidden.FULL,
    )  # fmt: skip
