"""Tensors that cross a break must be held; the real model with attention as a break equals eager."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from baton.engine.attention.metadata import plan
from baton.engine.batch.forward_batch import ForwardBatch
from baton.engine.graphs import breakable
from baton.engine.graphs.breakable import BreakableGraph, Breaks, ReplayContext
from baton.engine.graphs.graph_pool import GraphKind, GraphPool, PooledGraph
from baton.engine.graphs.pytree import map_items, own
from baton.engine.graphs.tape.arena import ArenaMemory
from baton.engine.graphs.tape.tape import KeptMemory, TapeBackend, TapeMemory
from baton.engine.models.layers import Attend
from baton.kernels.attention_form import AttentionForm
from baton.tests.parity.graph_laws import big_small_churn_and_back
from baton.tests.parity.graph_toys import ToyBucket, ToyDecoder, context_of
from baton.tests.parity.toy_engine import PAGE_SIZE, ToyEngine, random_ids

# --- references across a break ------------------------------------------------------------------------------


def forget(monkeypatch: pytest.MonkeyPatch, memory: ArenaMemory, *, arguments: bool, results: bool) -> None:
    """Plant: breaks keep addresses instead of tensors, of their arguments or of their results."""

    def weak(nest: object) -> object:
        return memory.bind(nest) if isinstance(nest, torch.Tensor) else map_items(nest, weak)

    class Forgetful(breakable._Break):
        def run(self, context: ReplayContext) -> object:
            result = super().run(context)
            if arguments:
                self.args = weak(self.args)
                self.kwargs = {name: weak(value) for name, value in self.kwargs.items()}
            return result

        def __setattr__(self, name: str, value: object) -> None:
            object.__setattr__(self, name, weak(value) if results and name == "result" else value)

    monkeypatch.setattr(breakable, "_Break", Forgetful)


def test_with_strong_references_replays_survive_captures_and_churn():
    big_small_churn_and_back(TapeBackend(ArenaMemory(1 << 14, poison=True)), "cpu")


def test_one_strong_reference_of_either_side_is_enough(monkeypatch: pytest.MonkeyPatch):
    for arguments, results in [(True, False), (False, True)]:
        memory = ArenaMemory(1 << 14, poison=True)
        forget(monkeypatch, memory, arguments=arguments, results=results)
        big_small_churn_and_back(TapeBackend(memory), "cpu")


def test_a_break_input_without_a_reference_gives_wrong_numbers(monkeypatch: pytest.MonkeyPatch):
    memory = ArenaMemory(1 << 14, poison=True)
    forget(monkeypatch, memory, arguments=True, results=True)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        big_small_churn_and_back(TapeBackend(memory), "cpu")


def test_without_an_arena_a_missing_reference_goes_unnoticed(monkeypatch: pytest.MonkeyPatch):
    forget(monkeypatch, ArenaMemory(1 << 14, poison=True), arguments=True, results=True)
    big_small_churn_and_back(TapeBackend(KeptMemory()), "cpu")


def test_a_released_graph_gives_its_memory_back():
    memory = ArenaMemory(1 << 14, poison=True)
    backend, model = TapeBackend(memory), ToyDecoder()
    toys = [ToyBucket(backend, model, bucket) for bucket in (16, 8)]
    held = memory.pool.num_used
    toys[0].graph.release()
    assert 0 < memory.pool.num_used < held
    toys[1].check(1, 5)
    toys[1].graph.release()
    assert (memory.pool.num_used, memory.ordinary.num_used) == (0, 0)


def test_small_buckets_reuse_the_memory_of_large_ones():
    memory = ArenaMemory(1 << 10)
    backend, model = TapeBackend(memory), ToyDecoder()
    toys = [ToyBucket(backend, model, 64)]
    after_large = backend.pool_bytes()
    toys += [ToyBucket(backend, model, bucket) for bucket in (8, 4, 2)]
    assert backend.pool_bytes() <= 1.3 * after_large
    for seed, toy in enumerate(toys):
        toy.check(seed, 2)
    assert toys[0].run(torch.ones(3, 32), context_of(3))[0].shape == (3, 32)


# --- the real model -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttendContext(ReplayContext):
    """`attend`: bound to the live batch, without its padding."""

    attend: Attend


def attention(
    context: AttendContext, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
) -> None:
    n = context.num_rows
    out[:n] = context.attend(layer, q[:n], k[:n], v[:n])


class BucketedModel:
    """The body of a real model by token bucket; logits of the real rows eagerly behind it."""

    def __init__(self, path: Path, memory: TapeMemory, buckets: tuple[int, ...]) -> None:
        self.engine = ToyEngine(path)
        self.pool = GraphPool(TapeBackend(memory))
        self.ids = torch.zeros(max(buckets), dtype=torch.int64)
        self.positions = torch.zeros(max(buckets), dtype=torch.int64)
        self.graphs = {bucket: self._capture(bucket) for bucket in sorted(buckets, reverse=True)}

    def _capture(self, bucket: int) -> PooledGraph[AttendContext, tuple[torch.Tensor, torch.Tensor | None]]:
        model, ids, positions = self.engine.model, self.ids[:bucket], self.positions[:bucket]

        def forward(breaks: Breaks[AttendContext]) -> tuple[torch.Tensor, torch.Tensor | None]:
            attend_rows = breaks.graph_break(attention)

            def attend(
                layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm
            ) -> torch.Tensor:
                out = torch.empty_like(q)
                attend_rows(layer, q, k, v, out=out)
                return out

            return model.body(model.embed(ids), positions, attend, (2, 0))

        context = AttendContext(num_rows=bucket, attend=lambda layer, q, k, v: q)
        return self.pool.capture(
            GraphKind.TARGET_PREFILL, bucket, forward, context, parameters=lambda: model.tensors()
        )

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        n = batch.num_tokens
        bucket = min(size for size in self.graphs if size >= n)
        self.ids.fill_(255)  # pad rows: any valid id will do
        self.positions.fill_(511)
        self.ids[:n], self.positions[:n] = batch.input_ids, batch.positions
        context = AttendContext(num_rows=n, attend=self.engine.runner.attention.bind(plan(batch, PAGE_SIZE)))
        hidden, aux = own(self.graphs[bucket].replay(context), n)
        return self.engine.model.compute_logits(hidden), aux


@pytest.mark.parametrize("memory", [KeptMemory, lambda: ArenaMemory(poison=True)], ids=["kept", "arena"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_real_model_by_token_bucket_equals_eager(
    toy_checkpoint: Callable[..., Path], family: str, memory: Callable[[], TapeMemory]
):
    path = toy_checkpoint(family)
    eager, graphed = ToyEngine(path), BucketedModel(path, memory(), (32, 8, 1))
    eager.runner.set_aux_layer_ids((2, 0))
    steps = [
        [("a", 8)], [("b", 31)], [("a", 9), ("c", 5)], [("a", 1)], [("a", 1), ("b", 1), ("c", 1)],
        [("b", 4), ("c", 4)], [("d", 32)], [("d", 7)],
    ]  # fmt: skip
    for seed, step in enumerate(steps):
        chunks = [(name, random_ids(count, seed=seed)) for name, count in step]
        batch = eager.batch(*chunks)
        batch.capture_hidden = 2
        expected = eager.runner.forward(batch)
        logits, aux = graphed.run(graphed.engine.batch(*chunks))
        torch.testing.assert_close(logits, expected.logits, atol=5e-5, rtol=0)
        torch.testing.assert_close(aux, expected.hidden, atol=5e-5, rtol=0)
        assert torch.equal(logits.argmax(-1), expected.logits.argmax(-1))
    torch.testing.assert_close(graphed.engine.pool.kv, eager.pool.kv, atol=5e-5, rtol=0)
    report = graphed.pool.report()
    assert report.kinds[0].replays == {1: 1, 8: 4, 32: 3}
    assert report.kinds[0].num_breaks == 3
    assert graphed.pool.stale() == {}
    graphed.engine.model.embed_tokens = graphed.engine.model.embed_tokens.clone()
    assert graphed.pool.stale().keys() == {f"target_prefill {bucket}" for bucket in (1, 8, 32)}


def test_a_graph_without_its_caller_keeps_inputs_and_weights_alive():
    def build() -> BreakableGraph[ReplayContext, torch.Tensor]:
        graph: BreakableGraph[ReplayContext, torch.Tensor] = BreakableGraph(
            TapeBackend(ArenaMemory(1 << 14, poison=True))
        )
        model, static = ToyDecoder(), torch.ones(4, 32)
        graph.capture(lambda breaks: model.forward(breaks, static)[0], context_of(4))
        return graph

    graph = build()
    first = graph.output.clone()
    torch.testing.assert_close(graph.replay(context_of(4)), first)
