"""Times the ways to attend a prompt's new rows: `python tests/kernels/bench_prompt_attention.py`.

Each way gets the same pool and pages. Printed are milliseconds, TFLOP/s of the visible scores, and the
largest error against float32. The ways over contiguous KV are given without and with the copy before them.
Triton kernels that a server cannot pick are variants of tile shapes.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from baton.kernels.context_attention import (
    NARROW_TILE,
    WIDE_TILE,
    ContextKV,
    ContextTile,
    context_attention_triton,
)
from baton.kernels.extend_attention import paged_extend
from baton.kernels.gather_context import context_rows, gather_context_triton
from baton.kernels.paged_tile import LOG2_E
from baton.kernels.wgmma_attention import can_run, wgmma_attention_triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

PAGE_SIZE, LAYERS = 16, 2
TILES = (
    WIDE_TILE,
    NARROW_TILE,
    ContextTile(128, 64, 8, 3),
    ContextTile(128, 64, 4, 2),
    ContextTile(64, 128, 4, 2),
)


@dataclass(frozen=True)
class Shape:
    """Requests of (new rows, context rows before them)."""

    name: str
    requests: Sequence[tuple[int, int]]
    num_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def num_flops(self) -> int:
        pairs = sum(new * prefix + new * (new + 1) // 2 for new, prefix in self.requests)
        return 4 * self.num_heads * self.head_dim * pairs


SHAPES = (
    Shape("1024 on 0", [(1024, 0)]),
    Shape("8192 on 0", [(8192, 0)]),
    Shape("2048 on 6144", [(2048, 6144)]),
    Shape("2048 on 30720", [(2048, 30720)]),
    Shape("8 x ~512", [(n, 0) for n in (512, 500, 480, 530, 512, 700, 350, 512)]),
    Shape("256 on 8192", [(256, 8192)]),
    Shape("64 on 4096", [(64, 4096)]),
    Shape("128 on 0", [(128, 0)]),
    Shape("SmolLM2 1024", [(1024, 0)], 9, 3, 64),
)


class Case:
    """The tensors of a shape."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape = shape
        self.q_lens = [new for new, _ in shape.requests]
        self.kv_lens = [new + prefix for new, prefix in shape.requests]
        self.scale = shape.head_dim**-0.5
        each = [-(-n // PAGE_SIZE) for n in self.kv_lens]
        order = (torch.randperm(sum(each)) + 1).tolist()
        table = torch.zeros(len(each), max(each), dtype=torch.int64)
        for request, (count, end) in enumerate(zip(each, accumulate(each), strict=True)):
            table[request, :count] = torch.tensor(order[end - count : end])
        plane = (shape.kv_heads, shape.head_dim)
        self.pool = torch.randn(
            sum(each) + 1, LAYERS, 2, PAGE_SIZE, *plane, dtype=torch.bfloat16, device=device
        )
        self.pool[0] = 0
        self.q = torch.randn(
            sum(self.q_lens), shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device=device
        )
        self.table = table.to(device)
        self.lens = torch.tensor(self.kv_lens, device=device)
        self.starts = torch.tensor([0, *accumulate(self.q_lens)], device=device)
        rows = context_rows(self.kv_lens)
        self.kv_starts = torch.tensor(rows, device=device)
        self.keys, self.values = (
            torch.zeros(rows[-1], *plane, dtype=torch.bfloat16, device=device) for _ in range(2)
        )
        self.gather()

    def gather(self) -> None:
        gather_context_triton(self.pool, 1, self.table, self.kv_starts, self.lens, self.keys, self.values)

    def paged(self) -> torch.Tensor:
        return paged_extend(
            self.q, self.pool, 1, self.table, self.starts, self.lens, max(self.q_lens), self.scale
        )

    def context(self, tile: ContextTile) -> torch.Tensor:
        return context_attention_triton(
            self.q,
            ContextKV(self.keys, self.values),
            self.starts,
            self.kv_starts,
            self.lens,
            self.scale,
            tile=tile,
        )

    def warp_groups(self) -> torch.Tensor:
        tiles = ContextKV(self.keys, self.values).tile_descriptors()
        places = self.starts, self.kv_starts, self.lens
        return wgmma_attention_triton(self.q, tiles, self.keys.shape[1], *places, self.scale * LOG2_E)

    def flash(self) -> torch.Tensor:
        starts, kv_starts, lens = (x.int() for x in (self.starts, self.kv_starts, self.lens))
        out: torch.Tensor = torch.ops.aten._flash_attention_forward(
            self.q, self.keys, self.values, starts, kv_starts, max(self.q_lens), max(self.kv_lens), 0.0,
            True, False, scale=self.scale, seqused_k=lens,
        )[0]  # fmt: skip
        return out

    def library(self, backend: SDPBackend) -> torch.Tensor:
        """One request alone, causal against its lower right corner."""
        q = self.q.transpose(0, 1)[None]
        keys, values = (x[: self.kv_lens[0]].transpose(0, 1)[None] for x in (self.keys, self.values))
        is_square = self.q_lens == self.kv_lens
        bias = None if is_square else causal_lower_right(self.q_lens[0], self.kv_lens[0])
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=bias, is_causal=is_square, scale=self.scale, enable_gqa=True
            )
        return out[0].transpose(0, 1)

    def cudnn_prefix_and_own(self) -> torch.Tensor:
        """The prefix without a mask, then the new rows, causal; merged by their log sums."""
        new, total = self.q_lens[0], self.kv_lens[0]
        group = self.shape.num_heads // self.shape.kv_heads
        q = self.q.transpose(0, 1)[None]
        parts = []
        for rows, is_causal in ((slice(0, total - new), False), (slice(total - new, total), True)):
            keys, values = (
                x[rows].transpose(0, 1)[None].repeat_interleave(group, 1) for x in (self.keys, self.values)
            )
            parts.append(
                torch.ops.aten._scaled_dot_product_cudnn_attention(
                    q, keys, values, None, True, 0.0, is_causal, False, scale=self.scale
                )[:2]
            )
        (a, lse_a), (b, lse_b) = parts
        share = torch.sigmoid(lse_a - lse_b).view(*a.shape[:3], 1)
        return (a * share + b * (1 - share)).to(a.dtype)[0].transpose(0, 1)

    def reference(self) -> torch.Tensor:
        out = torch.empty_like(self.q, dtype=torch.float32)
        group = self.shape.num_heads // self.shape.kv_heads
        for request, (new, total) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            first, at = int(self.kv_starts[request]), int(self.starts[request])
            for head in range(self.shape.num_heads):
                keys, values = (
                    x[first : first + total, head // group].float() for x in (self.keys, self.values)
                )
                for start in range(0, new, 1024):
                    rows = torch.arange(start, min(start + 1024, new), device=self.q.device)
                    scores = self.q[at + rows, head].float() @ keys.T * self.scale
                    hidden = torch.arange(total, device=rows.device) > (rows + total - new)[:, None]
                    out[at + rows, head] = scores.masked_fill_(hidden, float("-inf")).softmax(-1) @ values
        return out


def ways(case: Case) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "paged", case.paged
    yield "copy of pages", case.gather
    for tile in TILES:
        yield f"context {tuple(tile)}", lambda tile=tile: case.context(tile)
    if can_run(case.q.device, case.shape.head_dim, case.q.dtype):
        yield "warp groups", case.warp_groups
    yield "flash, ragged", case.flash
    if len(case.q_lens) == 1:
        yield "cudnn", lambda: case.library(SDPBackend.CUDNN_ATTENTION)
        if case.q_lens != case.kv_lens:
            yield "cudnn, prefix + own", case.cudnn_prefix_and_own


def milliseconds(run: Callable[[], object], budget_ms: float = 60.0) -> float:
    run()
    torch.cuda.synchronize()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    run()
    ended.record()
    torch.cuda.synchronize()
    repeats = max(3, min(200, int(budget_ms / max(began.elapsed_time(ended), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                run()
        launch: Callable[[], object] = graph.replay
    except RuntimeError:
        torch.cuda.synchronize()

        def launch() -> None:
            for _ in range(repeats):
                run()

    launch()
    torch.cuda.synchronize()
    began.record()
    launch()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / repeats


def main() -> int:
    torch.manual_seed(1)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    )
    for shape in SHAPES:
        case = Case(shape, "cuda")
        expected = case.reference()
        print(f"\n{shape.name}, {shape.num_flops / 1e9:.1f} GFLOP")
        for name, run in ways(case):
            try:
                began = time.perf_counter()
                out = run()
                torch.cuda.synchronize()
                first = time.perf_counter() - began
                error = (
                    float((out.float() - expected).abs().max())
                    if isinstance(out, torch.Tensor)
                    else float("nan")
                )
                spent = milliseconds(run)
            except Exception as failure:  # one way that cannot run must not hide the others
                print(f"  {name:28} {type(failure).__name__}: {str(failure)[:150]}")
                continue
            rate = shape.num_flops / spent / 1e9
            print(
                f"  {name:28} {spent:8.4f} ms {rate:7.1f} TFLOP/s, error {error:.4f}, first {first:.3f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
