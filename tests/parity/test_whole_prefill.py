"""Prefill graphs that hold attention give the eager rows, and leave to others what does not fit them."""

from pathlib import Path

import pytest
import torch
from baton.engine.attention import triton_attention
from baton.engine.attention.registry import attention_for
from baton.engine.batch.forward_batch import CaptureHidden, ForwardBatch, ForwardOutput
from baton.engine.capture.graph_self_test import SelfTest
from baton.engine.graphs.errors import GraphError
from baton.engine.runner import target_graphs
from baton.tests.parity.graph_engine import arena, capture
from baton.tests.parity.toy_engine import NUM_PAGES, PAGE_SIZE, ToyEngine, random_ids

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = (9, 1, 5)
MAX_REQUESTS, MAX_CONTEXT = 3, 384  # each request fills up its last 128 rows


class Paths:
    """One model on the eager, the breakable and the full path, fed the same rows."""

    def __init__(self, target: Path) -> None:
        self.toys = {name: ToyEngine(target, aux=IDS) for name in ("eager", "breakable", "graph")}
        for name, toy in self.toys.items():
            context = NUM_PAGES * PAGE_SIZE if name == "graph" else 0
            toy.runner.attention = attention_for(toy.pool, "triton", max_context=context)
        self.counters = {
            name: capture(self.toys[name].runner, memory=arena()).counters for name in ("breakable", "graph")
        }

    def run(self, *chunks: tuple[str, list[int]]) -> dict[str, ForwardOutput]:
        """The outputs by path, which must be equal; static inputs are poisoned before."""
        self.poison()
        outputs = {name: toy.runner.forward(self.batch(toy, *chunks)) for name, toy in self.toys.items()}
        for output in outputs.values():
            for found, wanted in ((output.hidden, "hidden"), (output.logits, "logits")):
                torch.testing.assert_close(found, getattr(outputs["eager"], wanted), atol=1e-4, rtol=1e-4)
        pools = [toy.pool.kv for toy in self.toys.values()]
        for kv in pools[1:]:
            torch.testing.assert_close(kv, pools[0], atol=1e-4, rtol=1e-4)
        assert not any(kv[0].count_nonzero() for kv in pools)
        return outputs

    def poison(self) -> None:
        whole = self.toys["graph"].runner.graphs.whole
        for static in (*whole.inputs.values(), whole.places.integers, whole.places.page_table):
            static.fill_(1 << 40)
        buffers = self.toys["graph"].runner.attention._buffers
        buffers.keys.fill_(float("nan"))
        buffers.values.fill_(float("nan"))

    @staticmethod
    def batch(toy: ToyEngine, *chunks: tuple[str, list[int]]) -> ForwardBatch:
        batch = toy.batch(*chunks)
        batch.capture_hidden = CaptureHidden.FULL
        return batch


@pytest.fixture
def paths(deep_target: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    monkeypatch.setattr(target_graphs, "MAX_WHOLE_REQUESTS", MAX_REQUESTS)
    monkeypatch.setattr(triton_attention, "buffer_rows", lambda *sizes: MAX_CONTEXT)
    return Paths(deep_target)


def names(outputs: dict[str, ForwardOutput]) -> list[str]:
    return [output.path for output in outputs.values()]


def test_rows_of_ragged_prompts_behind_prefixes_are_equal_on_every_path(paths):
    steps = (
        [("a", random_ids(24, seed=1))],
        [("b", random_ids(3, seed=2)), ("c", random_ids(17, seed=3))],
        [("c", random_ids(1, seed=4)), ("a", random_ids(20, seed=5)), ("d", random_ids(1, seed=6))],
        [("a", random_ids(7, seed=7))],
        [("b", random_ids(15, seed=8))],
    )
    for step in steps:
        assert names(paths.run(*step)) == ["eager", "breakable", "graph"]
    counters = paths.counters["graph"]()
    assert counters["graph_replays_whole_prefill"] == len(steps)
    assert counters["graph_pad_rows_whole_prefill"] == 24 * len(steps) - sum(
        len(ids) for step in steps for _, ids in step
    )
    assert "graph_replays_target_prefill" not in counters or counters["graph_replays_target_prefill"] == 0


def test_more_requests_than_places_take_a_breakable_graph(paths):
    chunks = [(str(i), random_ids(2 + i, seed=i)) for i in range(MAX_REQUESTS + 1)]
    assert names(paths.run(*chunks))[2] == "breakable"
    assert names(paths.run(*chunks[1:]))[2] == "graph"


def test_a_context_beyond_the_places_takes_a_breakable_graph(paths):
    for i in range(0, MAX_CONTEXT - 24, 24):
        paths.run(("long", random_ids(24, seed=i)))
    done = paths.toys["graph"].lengths["long"]
    assert names(paths.run(("long", random_ids(MAX_CONTEXT - done, seed=1))))[2] == "graph"
    assert names(paths.run(("long", random_ids(1, seed=2))))[2] == "breakable"
    assert not any("fallback" in key for key in paths.counters["graph"]()), "no forward was without a graph"


def test_the_self_test_drops_a_full_graph_that_differs(paths, monkeypatch):
    runner = paths.toys["graph"].runner
    whole = runner.graphs.whole
    assert SelfTest(runner, None, 128).run() == 0
    load = whole.places.load

    def one_row_less(batch: ForwardBatch) -> None:
        load(batch)
        whole.places.kv_lens[0] -= 1

    monkeypatch.setattr(type(whole.places), "load", lambda self, batch: one_row_less(batch))
    assert SelfTest(runner, None, 128).run() == len(whole.family.buckets)
    monkeypatch.undo()
    assert names(paths.run(("a", random_ids(9))))[2] == "breakable"


def test_attention_without_buffers_cannot_be_recorded(deep_target):
    toy = ToyEngine(deep_target)
    for name in ("torch", "triton"):
        attention = attention_for(toy.pool, name)
        assert attention.recordable_context == 0
        with pytest.raises(GraphError, match="cannot be recorded; break the graph at attention"):
            attention.recorded(None, None)
    toy.runner.attention = attention_for(toy.pool, "torch", max_context=64)
    capture(toy.runner)
    assert toy.runner.graphs.whole is None
