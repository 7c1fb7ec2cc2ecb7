"""Batches without rows, or with idle ones only, pass through every forward and change nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.attention.triton_attention import TritonAttention
from baton.engine.batch.padding import idle_batch, pad_to
from baton.engine.engine import Engine
from baton.engine.graphs.breakable import Breaks
from baton.engine.kv.layouts import MLALayout
from baton.engine.runner.target_graphs import captured_mode
from baton.engine.speculative.drafting.shape import PLAIN, DraftShape
from baton.engine.speculative.step.fused_step import StepContext, StepKind
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.test_aggregated import worker_of

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = {"plain": PLAIN, "chain": DraftShape.of(3), "tree": DraftShape.of(3, 3, 8)}


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def engine(
    request: pytest.FixtureRequest,
    toy_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Engine:
    head = write_head(tmp_path_factory.mktemp("head"), head_config(2, (0, 1, 2)), head_tensors())
    settings = {"spec_topk": 3, "spec_tokens": 8, "graphs": "off"}
    return worker_of(toy_checkpoint(request.param), head, 16, **settings).engine


def held_by_others(engine: Engine) -> list[torch.Tensor]:
    """Target and draft KV behind the sink, and the states of all slots but the padding's."""
    pools = [engine.pool, engine.drafter.pool]
    pages = [pool.byte_view()[1:].clone() for pool in pools]
    return [*pages, engine.steps.step.state.integers[1:].clone()]


@pytest.mark.parametrize("num_idle", [0, 1, 5])
@pytest.mark.parametrize("name", SHAPES)
def test_a_step_of_idle_rows_changes_nothing(engine: Engine, name: str, num_idle: int):
    shape, before = SHAPES[name], held_by_others(engine)
    slots = torch.zeros(num_idle, dtype=torch.int64)
    report = engine.steps.step.run(slots, StepKind(shape=shape), Breaks(StepContext(num_rows=0)))
    assert report.shape[0] == num_idle
    for now, then in zip(held_by_others(engine), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("num_idle", [0, 1, 5])
def test_a_prompt_of_idle_rows_changes_nothing(engine: Engine, num_idle: int):
    before = held_by_others(engine)
    batch = idle_batch(engine.pool.device, captured_mode(engine.model))
    output = engine.runner.forward(pad_to(batch, num_idle))
    assert output.logits.shape == (0, engine.model_config.vocab_size)
    assert output.hidden.shape == (num_idle, engine.feature_width)
    for now, then in zip(held_by_others(engine), before, strict=True):
        assert torch.equal(now, then)


def test_the_attention_of_devices_reads_nothing_for_rows_of_no_request(engine: Engine):
    pool, runner = engine.pool, engine.runner
    if isinstance(pool.layout, MLALayout):
        pytest.skip("latents have one backend")
    before = runner.attention
    runner.attention = TritonAttention(pool, max_context=96)  # with buffers that it copies the context to
    try:
        batch = idle_batch(pool.device, captured_mode(engine.model))
        found = runner.forward(pad_to(batch, 5))
    finally:
        runner.attention = before
    assert torch.equal(found.hidden, runner.forward(pad_to(batch, 5)).hidden)
