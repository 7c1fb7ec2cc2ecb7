"""Measures a tape's saving in a decode step on CPU: `python tests/parity/bench_tape.py [context]`.

Random weights in the shape of SmolLM2-135M (float32), and a slim model of the same depth whose arithmetic is
next to nothing, so that the cost of Python and dispatch stands alone. All ways run in turn, so that load hits
each alike; the figure is the median of the ratios within a round. One thread.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from baton.engine.attention.metadata import plan
from baton.engine.attention.registry import attention_for
from baton.engine.batch.forward_batch import ForwardBatch
from baton.engine.graphs.breakable import BreakableGraph, Breaks, ReplayContext
from baton.engine.graphs.tape.arena import ArenaMemory
from baton.engine.graphs.tape.tape import KeptMemory, TapeBackend
from baton.engine.kv.pool import KVPool
from baton.engine.models.config import ModelConfig
from baton.engine.models.layers import Attend
from baton.engine.models.llama import LlamaForCausalLM
from baton.engine.models.rope import RopeConfig
from baton.kernels.attention_form import AttentionForm

ROUNDS, PAGE = 31, 16


@dataclass(frozen=True, kw_only=True)
class AttendContext(ReplayContext):
    attend: Attend


def attention(
    context: AttendContext, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
) -> None:
    n = context.num_rows
    out[:n] = context.attend(layer, q[:n], k[:n], v[:n])


def make_model(hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int) -> LlamaForCausalLM:
    config = ModelConfig(
        architecture="LlamaForCausalLM", hidden_size=hidden, intermediate_size=intermediate, num_layers=30,
        num_heads=heads,
        num_kv_heads=kv_heads, head_dim=hidden // heads, vocab_size=vocab, rms_norm_eps=1e-5,
        rope=RopeConfig(), max_position_embeddings=2048, tie_word_embeddings=True, attention_bias=False,
        mlp_bias=False, qk_norm=False, eos_token_ids=(2,), dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config, dtype=torch.float32)
    for _, tensor in model.tensors():
        tensor.normal_(0, 0.02)
    return model


def decode_batch(num_requests: int, context: int) -> ForwardBatch:
    """One row for each request, behind `context` tokens."""
    pages = torch.arange(1, 1 + num_requests * (context // PAGE + 1)).view(num_requests, -1)
    return ForwardBatch(
        input_ids=torch.arange(num_requests),
        positions=torch.full((num_requests,), context),
        slots=pages[:, -1] * PAGE + context % PAGE,
        page_table=pages,
        q_lens=[1] * num_requests,
        kv_lens=[context + 1] * num_requests,
    )


class Step:
    """One decode step, eager and in graphs: attention as a break, or with frozen metadata in the graph."""

    def __init__(self, model: LlamaForCausalLM, num_requests: int, context: int) -> None:
        batch = decode_batch(num_requests, context)
        pool = KVPool(int(batch.page_table.max()) + 1, model.kv_layout(PAGE))
        paged = attention_for(pool)
        fixed = paged.bind(plan(batch, PAGE))
        self.model, self.batch = model, batch
        self.context = lambda: AttendContext(num_rows=num_requests, attend=paged.bind(plan(batch, PAGE)))
        self.graphs = {
            "tape, breaks, kept": self._capture(TapeBackend(KeptMemory()), None),
            "tape, breaks, arena": self._capture(TapeBackend(ArenaMemory()), None),
            "tape, full, arena": self._capture(TapeBackend(ArenaMemory()), fixed),
        }
        self.ways: dict[str, Callable[[], torch.Tensor]] = {"eager": self.eager}
        for name, graph in self.graphs.items():
            self.ways[name] = lambda graph=graph: graph.replay(self.context())

    def _forward(self, attend: Attend) -> torch.Tensor:
        hidden, _ = self.model.body(self.model.embed(self.batch.input_ids), self.batch.positions, attend)
        return self.model.compute_logits(hidden)

    def _capture(
        self, backend: TapeBackend, fixed: Attend | None
    ) -> BreakableGraph[AttendContext, torch.Tensor]:
        def forward(breaks: Breaks[AttendContext]) -> torch.Tensor:
            attend_rows = breaks.graph_break(attention)

            def attend(
                layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm
            ) -> torch.Tensor:
                out = torch.empty_like(q)
                attend_rows(layer, q, k, v, out=out)
                return out

            return self._forward(fixed or attend)

        graph: BreakableGraph[AttendContext, torch.Tensor] = BreakableGraph(backend)
        graph.capture(forward, self.context())
        return graph

    @torch.no_grad()
    def eager(self) -> torch.Tensor:
        return self._forward(self.context().attend)


def measure(name: str, step: Step) -> None:
    expected = step.eager()
    times: dict[str, list[float]] = {way: [] for way in step.ways}
    for _ in range(ROUNDS):
        for way, run in step.ways.items():
            start = time.perf_counter()
            output = run()
            times[way].append(time.perf_counter() - start)
            torch.testing.assert_close(output, expected)
    print(f"{name}, batch {step.batch.num_requests}")
    for way, spent in times.items():
        ratio = statistics.median(one / base for one, base in zip(spent, times["eager"], strict=True))
        graph = step.graphs.get(way)
        memory = f"{(graph.num_bytes + graph.backend.pool_bytes()) / 1e6:7.1f} MB" if graph else ""
        print(f"  {way:20} {statistics.median(spent) * 1e3:7.2f} ms  {ratio:5.2f} of eager  {memory}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    context = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    with torch.no_grad():
        for name, shape in {"SmolLM2-135M": (576, 1536, 9, 3, 49152), "slim": (48, 96, 3, 1, 256)}.items():
            model = make_model(*shape)
            for num_requests in (1, 8):
                measure(name, Step(model, num_requests, context))
