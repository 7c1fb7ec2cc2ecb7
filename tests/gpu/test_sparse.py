"""Sparse attention on a device: kernels, CUDA graphs, and plans of another batch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.attention.sparse_attention import check_faults
from baton.engine.errors import LifecycleError
from baton.engine.warmup.watch import COMPILATIONS
from baton.tests.gpu.test_engine_graphs import load, serve
from baton.tests.kernels.sparse_cases import sparse_cases
from baton.tests.parity.answer_engine import CHAIN, NOT_FINITE, Models, Way
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.sparse_engine import GREEDY, PROMPTS, WAYS, Expected, SparseEngine, check_way
from baton.tests.parity.sparse_toys import built, sparse_config, write_sparse_checkpoint
from baton.tests.parity.test_sparse_injected_bugs import planned_once, step_planned_before_padding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES = [pytest.param(*case, id=case[0].__name__[6:]) for case in sparse_cases()]


@pytest.fixture(autouse=True, scope="module")
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def models(full_precision: None) -> Models:
    return Models(sparse_config(), torch.float32, "cuda")


@pytest.fixture(scope="module")
def expected(models: Models) -> Expected:
    return Expected.of(models)


@pytest.mark.parametrize(("check", "arguments"), CASES)
def test_kernel_equals_its_definition(check: Callable[..., None], arguments: tuple[object, ...]):
    check("cuda", *arguments)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_gives_the_tokens_of_the_definition(models: Models, expected: Expected, way: Way):
    engine = check_way(models, way, expected.tokens)
    assert bool(engine.num_replays) == way.has_graphs
    check_faults(engine.runner.pool)


@pytest.mark.parametrize("has_graphs", [False, True])
def test_rows_of_idle_ranks_change_no_token_and_no_entry(
    models: Models, expected: Expected, has_graphs: bool
):
    way = Way(shape=CHAIN, batch=4, chunk=16, has_graphs=has_graphs)
    engine = check_way(models, way, expected.tokens, row_multiple=4)
    assert has_graphs == bool(engine.num_replays.get("decode_step"))
    check_faults(engine.runner.pool)


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("bug", [planned_once, step_planned_before_padding])
def test_a_step_with_another_batchs_plan_gives_nan_and_a_fault(
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
    has_graphs: bool,
):
    """A worker fails requests whose logits are not finite."""
    bug(monkeypatch)
    engine = SparseEngine(models, Way(batch=4, chunk=16, has_graphs=has_graphs), row_multiple=4)
    with pytest.raises(AssertionError, match=NOT_FINITE):
        engine.answer(PROMPTS, GREEDY)
    with pytest.raises(LifecycleError, match="a plan of other rows, requests or lengths"):
        check_faults(engine.runner.pool)


@pytest.mark.parametrize("settings", [{}, {"spec_topk": 3, "spec_tokens": 8}], ids=["chain", "tree"])
def test_an_engine_starts_with_graphs_and_compiles_nothing_later(
    tmp_path: Path, settings: dict[str, object], caplog: pytest.LogCaptureFixture
):
    target = write_sparse_checkpoint(tmp_path / "target", built(sparse_config(), torch.float32))
    head = write_head(tmp_path / "head", head_config(2, (0, 1, 3)), head_tensors())
    eager = load(target, head, graphs=False, **settings)
    graphed = load(target, head, graphs=True, **settings)
    assert "one by one" not in caplog.text, "the dry run failed"
    assert "differs from the eager path" not in caplog.text, "a graph was dropped"
    graphed.begin_watch()
    for size in (1, 3, 4):
        wanted, _ = serve(eager, size)
        tokens, paths = serve(graphed, size)
        assert tokens == wanted
        assert "graph" in paths
    assert graphed.watch is not None
    assert graphed.watch.counters[COMPILATIONS] == 0
    check_faults(graphed.pool)
