"""Experts are counted row by row, in every path, and only for rows that are no padding."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.errors import CheckpointError, LifecycleError
from baton.engine.loader import EngineLoader
from baton.engine.runner.expert_counts import NAME, ExpertCounts, count_experts
from baton.engine.runner.lifecycle import Phase
from baton.engine.sampling.params import SamplingParams
from baton.tests.parity.eagle3_engine import Engine as StepEngine
from baton.tests.parity.graph_engine import arena, with_graphs
from baton.tests.parity.toy_engine import ToyEngine, random_ids
from baton.tests.parity.toy_models import reference_model

pytestmark = pytest.mark.usefixtures("one_thread")


GREEDY = SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True)


def counted(path: Path, ids: list[int]) -> torch.Tensor:
    """By transformers: the rows `[E]` of each expert over all layers."""
    model, found = reference_model(path), []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate") and hasattr(layer.mlp, "experts"):
            layer.mlp.gate.register_forward_hook(lambda module, args, out: found.append(out[2]))
    with torch.no_grad():
        model(torch.tensor([ids]))
    return torch.bincount(torch.cat([ids.flatten() for ids in found]), minlength=8)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_all_rows_of_a_forward_are_counted(toy_checkpoint: Callable[..., Path], family: str):
    path, prompt = toy_checkpoint(family), random_ids(50, seed=3)
    engine = ToyEngine(path)
    counts = count_experts(engine.model.layers, 64, Phase.LOADED)
    engine.runner.expert_counts, engine.runner.row_multiple = counts, 8  # idle rows do not count
    for start, end in ((0, 20), (20, 50)):
        engine.run(("all", prompt[start:end]))
    expected = counted(path, prompt)[: counts.num_experts]
    assert counts.totals.tolist() == expected.tolist()
    assert counts.read() == {f"{NAME}{i}": float(n) for i, n in enumerate(expected.tolist())}
    with pytest.raises(LifecycleError, match="72 rows are counted, 64 at most"):
        engine.run(("more", random_ids(65)))


@pytest.mark.parametrize("drafts", [False, True])
def test_steps_in_graphs_count_as_eager_ones(toy_checkpoint: Callable[..., Path], head: Path, drafts: bool):
    """With three requests in graphs for four, one of which is idle. Eager chains are cut at the end."""
    target, found = toy_checkpoint("deepseek_v3", num_hidden_layers=4), []
    prompts = [random_ids(n, seed=n) for n in (3, 9, 17)]
    for has_graphs in (False, True):
        engine = StepEngine(target, *([head] if drafts else []), is_greedy=True)
        counts = count_experts(engine.runner.model.layers, 64, Phase.LOADED)
        engine.runner.expert_counts = counts
        if has_graphs:
            with_graphs(engine, arena())
        counts.reset()
        tokens = engine.generate(prompts, GREEDY)
        found.append((tokens, counts.totals.tolist()))
    (eager_tokens, eager), (tokens, graphed) = found
    assert tokens == eager_tokens
    assert drafts or graphed == eager
    verified = sum(len(result.accept_lens) for result in engine.results) * (4 if drafts else 1)
    assert sum(graphed) == (3 + 9 + 17 + verified) * 3 * 3, "three layers of three experts a row"


def loaded(path: Path, **settings: object) -> Engine:
    config = EngineConfig(
        model=str(path), device="cpu", dtype="float32", pages=40, max_context=128, max_running=4, **settings
    )
    loader = EngineLoader(config, has_drafter=True)
    for _, run in loader.phases():
        run()
    engine = loader.engine()
    engine.begin_watch()
    return engine


def test_a_model_without_experts_and_a_late_start_are_refused(toy_checkpoint: Callable[..., Path]):
    with pytest.raises(CheckpointError, match="count_experts: this model has no experts"):
        loaded(toy_checkpoint("llama"), count_experts=True)
    engine = ToyEngine(toy_checkpoint("qwen3_moe"))
    with pytest.raises(LifecycleError, match="not from CAPTURED"):
        count_experts(engine.model.layers, 64, Phase.CAPTURED)


def test_many_experts_share_names():
    counts = ExpertCounts(600, 4, torch.device("cpu"))
    counts.begin(2)
    counts.add(torch.tensor([[0, 599], [1, 2], [3, 3]], dtype=torch.int32))
    found = counts.read()
    assert len(found) == 200
    assert (found[f"{NAME}0"], found[f"{NAME}597"], sum(found.values())) == (3.0, 1.0, 4.0)
    counts.reset()
    assert not any(counts.read().values())
