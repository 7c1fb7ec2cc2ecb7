"""Sparse attention over pages gives what its definition over whole texts gives, on every path."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baton.cluster.errors import HandshakeRefused
from baton.engine.attention.registry import attention_for
from baton.engine.attention.sparse_attention import SparseAttention, check_faults
from baton.engine.errors import CheckpointError, LifecycleError
from baton.engine.invariance import check_invariance
from baton.engine.kv.pool import KVPool
from baton.engine.kv.sparse_layout import SparseLayout
from baton.engine.models.interface import CausalLM
from baton.engine.speculative.drafting.shape import DraftShape
from baton.engine.speculative.step.step_graphs import step_graphs
from baton.kernels.row_ops import INVARIANT
from baton.kvtransfer.protocol.layout import KVLayout, agree
from baton.tests.parity.answer_engine import CHAIN, TREE, Models, Way
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.sparse_engine import GREEDY, PROMPTS, WAYS, Expected, SparseEngine, check_way
from baton.tests.parity.sparse_toys import Reference, built, sparse_config, write_sparse_checkpoint
from baton.tests.parity.test_aggregated import NUM_TOKENS, check, worker_of
from baton.tests.parity.toy_engine import ToyEngine, random_ids
from baton.tests.sim.worker_pair import Pair, name
from baton.worker.identity import layout_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(sparse_config(), torch.float32, "cpu")


@pytest.fixture(scope="module")
def expected(models: Models) -> Expected:
    return Expected.of(models)


@pytest.fixture(scope="module")
def target(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse_checkpoint(tmp_path_factory.mktemp("sparse"), models.fastest)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(2, (0, 1, 3)), head_tensors())


@pytest.fixture(scope="module")
def reference(models: Models) -> Reference:
    return Reference(models.fastest)


# --- logits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [5, 16, 100])
def test_logits_of_any_chunks_are_those_of_the_definition(target: Path, reference: Reference, chunk: int):
    ids, toy = random_ids(100, seed=4), ToyEngine(target)
    logits = torch.cat([toy.run(("a", ids[i : i + chunk])).logits for i in range(0, 100, chunk)])
    torch.testing.assert_close(logits, reference.logits(ids), atol=2e-4, rtol=1e-4)


def test_logits_of_a_mixed_batch_are_those_of_the_definition(target: Path, reference: Reference):
    texts = {"a": random_ids(71, seed=1), "b": random_ids(9, seed=2), "c": random_ids(52, seed=3)}
    toy, rows = ToyEngine(target), {"a": 70, "b": 5, "c": 20}
    toy.run(*((each, texts[each][:count]) for each, count in rows.items()))
    logits = toy.run(*((each, texts[each][count:]) for each, count in rows.items())).logits
    wanted = [reference.logits(ids)[rows[each] :] for each, ids in texts.items()]
    torch.testing.assert_close(logits, torch.cat(wanted), atol=2e-4, rtol=1e-4)


def test_groups_of_128_tokens_are_read_behind_a_window_of_64(tmp_path: Path):
    """The defaults of config.json; the last rows see two compressed groups."""
    model = build(index_topk=8, compressed_block=128, window=64, num_layers=2)
    ids, toy = random_ids(340, seed=8), ToyEngine(write_sparse_checkpoint(tmp_path, model))
    logits = torch.cat([toy.run(("a", ids[i : i + 170])).logits for i in (0, 170)])
    wanted = Reference(model).logits(ids)
    torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=1e-4)
    far = Reference(build(index_topk=8, compressed_block=512, window=64, num_layers=2)).logits(ids)
    assert float((far[-1] - wanted[-1]).abs().max()) > 1e-2, "the groups matter"


def build(**changes: object) -> CausalLM:
    """A model of the toy's config with `changes`."""
    return built(sparse_config(**changes), torch.float32)


def test_shared_pages_of_a_prefix_hold_its_side_caches(target: Path, reference: Reference):
    """A request that begins with another's pages never computes their tokens."""
    prefix, rest, toy = random_ids(64, seed=5), random_ids(30, seed=6), ToyEngine(target)
    toy.run(("a", prefix))
    toy.pages["b"], toy.lengths["b"] = list(toy.pages["a"]), 64
    logits = toy.run(("b", rest)).logits
    torch.testing.assert_close(logits, reference.logits(prefix + rest)[64:], atol=2e-4, rtol=1e-4)


# --- tokens and side caches, on every path ------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_gives_the_tokens_of_the_definition(models: Models, expected: Expected, way: Way):
    engine = check_way(models, way, expected.tokens)
    replays = engine.num_replays
    if way.has_graphs:
        steps, prompts = ("edited_step", "prefill") if way.has_breaks else ("decode_step", "whole_prefill")
        assert replays.get(steps, 0) > 0, replays
        assert any(kind.endswith(prompts) for kind in replays), replays


def all_ways() -> Iterator[Way]:
    for shape in (DraftShape.of(0), CHAIN, TREE, DraftShape.of(6), DraftShape.of(5, 3, 16)):
        for graphs, breaks in ((False, False), (True, False), (True, True)):
            for batch, chunk in ((1, 16), (2, 7), (3, 1 << 20)):
                yield Way(shape=shape, batch=batch, chunk=chunk, has_graphs=graphs, has_breaks=breaks)


@pytest.mark.slow
@pytest.mark.parametrize("way", list(all_ways()), ids=str)
def test_all_ways_give_the_tokens_of_the_definition(models: Models, expected: Expected, way: Way):
    check_way(models, way, expected.tokens)


@pytest.mark.parametrize(
    "way", [Way(batch=3, chunk=16), Way(shape=TREE, batch=4, chunk=16, has_graphs=True)], ids=str
)
def test_rows_of_idle_ranks_change_no_token_and_no_entry(models: Models, expected: Expected, way: Way):
    """Every forward over prompts and every step is padded to a multiple of four, as a peer would ask."""
    engine = check_way(models, way, expected.tokens, row_multiple=4)
    assert way.has_graphs == bool(engine.num_replays.get("decode_step"))


def test_a_rank_without_rows_runs_as_many_as_its_peer(target: Path):
    toy = ToyEngine(target)
    toy.runner.row_multiple = 8
    before = toy.pool.kv.clone()
    assert toy.runner.forward(toy.batch()).logits.shape[0] == 0
    assert torch.equal(toy.pool.kv, before)
    metadata = toy.runner.attention.plan(toy.batch())
    assert metadata.rows.stamp.tolist() == [0, 0]


def test_sampled_answers_are_the_same_with_and_without_drafts(models: Models, expected: Expected):
    params = replace(GREEDY, temperature=1.0, seed=5)
    plain = SparseEngine(models, Way(batch=3)).answer(PROMPTS, params)
    tree = SparseEngine(models, Way(shape=TREE, batch=3)).answer(
        PROMPTS, params, [answer.tokens for answer in plain]
    )
    assert [answer.tokens for answer in tree] == [answer.tokens for answer in plain]


# --- workers ------------------------------------------------------------------------------------------------

Settings = dict[str, object]
SHAPES: dict[str, Settings | None] = {
    "no drafts": None,
    "chain": {},
    "tree": {"spec_topk": 3, "spec_tokens": 8},
}


@pytest.fixture(scope="module")
def answers(reference: Reference) -> dict[tuple[int, ...], list[int]]:
    prompts = [random_ids(length, seed=length) for length in (17, 60)]
    return {tuple(ids): reference.greedy(ids, NUM_TOKENS) for ids in prompts}


@pytest.mark.parametrize(
    "drafts", ["chain", *(pytest.param(each, marks=pytest.mark.slow) for each in ("no drafts", "tree"))]
)
def test_an_aggregated_worker_serves_cold_and_cached_prompts(target: Path, head: Path, answers, drafts: str):
    settings = SHAPES[drafts]
    worker = worker_of(target, None if settings is None else head, 16, overlap="on", **(settings or {}))
    check(worker, answers)


@pytest.mark.parametrize(
    "drafts", ["tree", *(pytest.param(each, marks=pytest.mark.slow) for each in ("no drafts", "chain"))]
)
def test_handed_over_pages_carry_the_side_caches(target: Path, head: Path, answers, drafts: str):
    """Prefill and decode workers with the real cut into blocks. Free pages hold NaN, and the second round
    finds its prompts cached on both sides."""
    settings = SHAPES[drafts]
    pair = Pair(target, head if settings is not None else "", pages=96, **(settings or {}))
    for number, (prompt, tokens) in enumerate(list(answers.items()) * 2):
        pair.send(name(number), prompt)
        pair.run()
        assert pair.tokens[name(number)] == tokens, f"round {number // len(answers)}"
    pair.assert_nothing_is_held()


# --- layouts and refusals -----------------------------------------------------------------------------------


def test_the_wire_moves_pages_with_their_side_caches(models: Models):
    layout = models.fastest.kv_layout(16)
    assert isinstance(layout, SparseLayout)
    assert (layout.token_layers, layout.num_layers) == (4, 4 + layout.sizes.side_layers)
    assert layout.sizes.side_layers * layout.sizes.layer_elements >= 4 * layout.sizes.side_elements
    wire = layout_of(KVPool(2, layout), model_fingerprint="f", feature_ids=[], feature_width=0)
    assert KVLayout(wire).kv_page_bytes == layout.page_bytes == 16 * layout.bytes_per_token
    other = build(compressed_block=4, num_layers=4).kv_layout(16)
    theirs = layout_of(KVPool(2, other), model_fingerprint="f", feature_ids=[], feature_width=0)
    with pytest.raises(HandshakeRefused, match="KV layouts differ"):
        agree(wire, theirs)


def test_sizes_that_do_not_fit_are_refused_with_the_remedy(models: Models):
    with pytest.raises(CheckpointError, match="page_size 6 is no multiple of the indexer's blocks of 4"):
        models.fastest.kv_layout(6)
    with pytest.raises(CheckpointError, match="page_size 12 neither divides the groups of 32"):
        models.fastest.kv_layout(12)
    with pytest.raises(ValueError, match="cannot be dealt to 2 ranks"):
        models.fastest.kv_layout(16).shard(2)
    with pytest.raises(CheckpointError, match="no batch-invariant attention; use --deterministic off"):
        check_invariance(models.invariant, INVARIANT)
    pool = KVPool(4, models.fastest.kv_layout(16))
    with pytest.raises(ValueError, match="'torch' writes no side caches"):
        attention_for(pool, "torch")
    engine = SparseEngine(models, Way(shape=CHAIN))
    with pytest.raises(CheckpointError, match=r"spec_steps 8: trees .* at most 7 steps deep"):
        step_graphs(
            engine.runner, engine.drafter, shapes=[DraftShape.of(8, 2, 20)], max_requests=1, max_context=64
        )


def test_a_plan_without_targets_or_of_a_changed_batch_is_refused(target: Path):
    toy = ToyEngine(target)
    assert isinstance(toy.runner.attention, SparseAttention)
    batch = toy.batch(("a", [1, 2, 3]))
    plain = super(SparseAttention, toy.runner.attention).plan(batch)
    with pytest.raises(LifecycleError, match="a plan without targets"):
        toy.runner.attention.bind(plain)
    metadata = toy.runner.attention.plan(batch)
    batch.q_lens = [3]
    with pytest.raises(LifecycleError, match="plan after the last change"):
        toy.runner.forward(batch, metadata)


def test_a_fault_of_a_device_is_reported_by_the_check(target: Path):
    pool = ToyEngine(target).pool
    check_faults(pool)
    pool.faults.fill_(1)
    with pytest.raises(LifecycleError, match="a plan of other rows, requests or lengths"):
        check_faults(pool)
