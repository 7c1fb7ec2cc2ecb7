"""Times each kernel against its unavoidable bytes and operations: `python tests/kernels/bench_kernels.py`.

A registry of operations in the shapes of an 8B Llama, and a runner for a CUDA device. Ceilings (a copy for
bytes, a matrix product for operations) are measured in the same run, since a ratio to a data sheet says
little.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from baton.kernels.chain_verify import chain_verify
from baton.kernels.choose_ranked import Ranking, choose_ranked
from baton.kernels.choose_token import choose_token
from baton.kernels.compact_kv import compact_kv
from baton.kernels.context_attention import ContextKV, context_attention
from baton.kernels.expert_mlp import expert_mlp
from baton.kernels.extend_attention import paged_extend
from baton.kernels.gather_context import context_rows, gather_context
from baton.kernels.group_experts import group_experts
from baton.kernels.kv_store import kv_rows, store_kv
from baton.kernels.look_up_rows import Lookup, look_up_rows
from baton.kernels.match_ngrams import NgramSizes, match_ngrams
from baton.kernels.norm_pair import norm_pair
from baton.kernels.penalise_logits import RowEdits, penalise_logits
from baton.kernels.put_rows import Put, put_rows
from baton.kernels.rms_norm import NextNorm, add_rms_norm, rms_norm
from baton.kernels.rope import apply_rope
from baton.kernels.route_experts import Routing, route_experts
from baton.kernels.select_rows import select_last_rows
from baton.kernels.silu_mul import silu_mul
from baton.kernels.skinny_linear import gated_linear, linear
from baton.kernels.step_glue import PAGES, PlaceSizes, step_outcome, step_places
from baton.kernels.top_logprobs import top_logprobs
from baton.kernels.tree_verify import tree_verify
from baton.kernels.verify_attention import paged_verify

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LAYERS = 4096, 14336, 32, 8, 128, 16, 2
NGRAM_WINDOW = 8192
EXPERTS = 128, 8, 768, 2048  # experts, experts of a token, their intermediate size, hidden size
SMALL_EXPERTS = 8, 2, 32, 64


@dataclass(frozen=True)
class Bench:
    """One operation: `run` it; `num_bytes` it must move between memory and chip, `num_flops` it must compute
    (matrix products alone; 0: bound by memory)."""

    name: str
    run: Callable[[], object]
    num_bytes: int
    num_flops: int = 0


def size(*tensors: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def random(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=device)


def row_benches(tokens: int, device: str) -> Iterator[Bench]:
    """Everything that works row by row over `tokens` rows."""
    x, residual = random(tokens, HIDDEN, device=device), random(tokens, HIDDEN, device=device)
    weight = random(HIDDEN, device=device)
    yield Bench(f"rms_norm {tokens}", lambda: rms_norm(x, weight, 1e-5), size(x, x, weight))
    yield Bench(
        f"add_rms_norm {tokens}", lambda: add_rms_norm(x, residual, weight, 1e-5), 4 * size(x) + size(weight)
    )
    norm = NextNorm(weight, 1e-5)
    yield Bench(f"norm_pair {tokens}", lambda: norm_pair(x, norm, residual, norm), 5 * size(x))
    gate_up = random(tokens, 2 * INTERMEDIATE, device=device)
    yield Bench(f"silu_mul {tokens}", lambda: silu_mul(gate_up), size(gate_up) * 3 // 2)
    projected = random(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device=device)
    q, k, v = projected.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    cos, sin = random(tokens, HEAD_DIM, device=device), random(tokens, HEAD_DIM, device=device)
    pool = torch.zeros(
        tokens // PAGE_SIZE + 2, LAYERS, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device
    )
    ids = torch.arange(tokens, device=device)
    table, angles = Lookup(x, ids), (Lookup(cos, ids), Lookup(sin, ids))
    yield Bench(f"look_up_rows {tokens}", lambda: look_up_rows(table, *angles), 2 * size(x, cos, sin))
    state = Put(torch.zeros_like(x), residual)
    yield Bench(f"put_rows {tokens}", lambda: put_rows(ids, state), 2 * size(x))
    rows = kv_rows(ids + PAGE_SIZE, pool)
    yield Bench(f"apply_rope {tokens}", lambda: apply_rope(q, cos, sin), 2 * size(q) + size(cos, sin))
    yield Bench(f"store_kv {tokens}", lambda: store_kv(pool, 1, rows, k, v), 2 * size(k, v) + size(rows))


def linear_benches(tokens: int, device: str) -> Iterator[Bench]:
    """The projections of a layer, over `tokens` rows."""
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    for name, out, inner in (("qkv", qkv, HIDDEN), ("o", HIDDEN, HIDDEN), ("down", HIDDEN, INTERMEDIATE)):
        x, weight = random(tokens, inner, device=device), random(out, inner, device=device)
        flops = 2 * tokens * weight.numel()
        yield Bench(
            f"linear {name} {tokens}", lambda x=x, weight=weight: linear(x, weight), size(weight, x), flops
        )
    x, weight = random(tokens, HIDDEN, device=device), random(2 * INTERMEDIATE, HIDDEN, device=device)
    flops = 2 * tokens * weight.numel()
    yield Bench(f"gated_linear {tokens}", lambda: gated_linear(x, weight), size(weight, x), flops)


def expert_benches(
    tokens: int, device: str, num_experts: int, top_k: int, inner: int, hidden: int
) -> Iterator[Bench]:
    """A layer of experts, by default of Qwen3-30B-A3B; the bytes are those of all experts that `tokens` can
    use.
    """
    x, logits = random(tokens, hidden, device=device), random(tokens, num_experts, device=device)
    gate_up = random(num_experts, 2 * inner, hidden, device=device)
    down = random(num_experts, hidden, inner, device=device)
    shape = {"size": (tokens, top_k), "device": device}
    routing = Routing(top_k=top_k, is_normalised=True)
    ids = torch.randint(num_experts, dtype=torch.int32, **shape)
    weights = torch.rand(**shape)
    used = min(tokens * top_k, num_experts) * 3 * inner * hidden * 2
    flops = 2 * tokens * top_k * 3 * inner * hidden
    yield Bench(f"route_experts {tokens}", lambda: route_experts(logits, routing), size(logits, ids, weights))
    yield Bench(f"group_experts {tokens}", lambda: group_experts(ids, num_experts, 16), 2 * size(ids))
    yield Bench(
        f"expert_mlp {tokens}", lambda: expert_mlp(x, ids, weights, gate_up, down), used + 2 * size(x), flops
    )


def paged(batch: int, context: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pool, page table `[batch, pages]` with scattered pages, and lengths, all `context`."""
    each = -(-context // PAGE_SIZE)
    shape = batch * each + 1, LAYERS, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM
    table = (torch.randperm(batch * each, device=device) + 1).view(batch, each)
    return random(*shape, device=device), table, torch.full((batch,), context, device=device)


def attention_benches(batch: int, context: int, device: str) -> Iterator[Bench]:
    """Decode, verify of a chain and of a tree, and prefill of the whole context of one request."""
    pool, table, lens = paged(batch, context, device)
    scale = HEAD_DIM**-0.5
    context_bytes = batch * context * 2 * KV_HEADS * HEAD_DIM * 2
    for num_rows, kind in ((1, "decode"), (4, "chain"), (16, "tree")):
        q = random(batch, num_rows, HEADS, HEAD_DIM, device=device)
        mask = (
            torch.ones(batch, num_rows, num_rows, dtype=torch.bool, device=device).tril()
            if kind == "tree"
            else None
        )
        yield Bench(
            f"paged_verify {kind} {batch}x{context}",
            lambda q=q, mask=mask: paged_verify(q, pool, 1, table, lens, scale, mask),
            context_bytes + 2 * size(q) + (size(mask) if mask is not None else 0),
            4 * batch * num_rows * HEADS * HEAD_DIM * context,
        )
    q = random(context, HEADS, HEAD_DIM, device=device)
    starts = torch.tensor([0, context], device=device)
    one_table, one_len = table.narrow(0, 0, 1), lens.narrow(0, 0, 1)
    yield Bench(
        f"paged_extend 1x{context}",
        lambda: paged_extend(q, pool, 1, one_table, starts, one_len, context, scale),
        context_bytes // batch + 2 * size(q),
        4 * HEADS * HEAD_DIM * (context * (context + 1) // 2),
    )
    rows = context_rows([context])
    places = torch.tensor(rows, device=device), one_len
    keys, values = (
        torch.zeros(rows[-1], KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    yield Bench(
        f"gather_context 1x{context}",
        lambda: gather_context(pool, 1, one_table, *places, keys, values),
        2 * context_bytes // batch,
    )
    yield Bench(
        f"context_attention 1x{context}",
        lambda: context_attention(q, ContextKV(keys, values), starts, *places, scale, None, context),
        context_bytes // batch + 2 * size(q),
        4 * HEADS * HEAD_DIM * (context * (context + 1) // 2),
    )


def verdict_benches(batch: int, num_nodes: int, device: str) -> Iterator[Bench]:
    """What stands behind a verify step: the walk and the row to go on from. Launch-bound."""
    tokens = torch.zeros(batch, num_nodes, dtype=torch.int64, device=device)
    parents = (torch.arange(num_nodes, device=device) - 1).repeat(batch, 1)
    limits = torch.full((batch,), num_nodes, device=device)
    moved = 5 * size(tokens) + 2 * size(limits)
    yield Bench(
        f"tree_verify {batch}x{num_nodes}", lambda: tree_verify(tokens, parents, tokens, limits), moved
    )
    pool, _, _ = paged(batch, 64, device)
    slots = torch.arange(PAGE_SIZE, PAGE_SIZE + 4 * batch, device=device).view(batch, 4)
    kept = 2 * slots.numel() * pool.shape[1] * 2 * pool.shape[4] * pool.shape[5] * pool.element_size()
    yield Bench(f"compact_kv {batch}x4", lambda: compact_kv(pool, slots, slots), kept + 2 * size(slots))
    hidden = random(batch * num_nodes, HIDDEN, device=device)
    rows = 2 * batch * HIDDEN * 2 + size(limits)
    yield Bench(f"select_last_rows {batch}x{num_nodes}", lambda: select_last_rows(hidden, limits), rows)


def glue_benches(batch: int, device: str) -> Iterator[Bench]:
    """What stands around the forwards of a chain of 4. Launch-bound."""
    state = torch.ones((batch + 1, PAGES + 64), dtype=torch.int64, device=device)
    sizes = PlaceSizes(4, 4, 4, PAGE_SIZE, 1024, 2 * LAYERS * PAGE_SIZE, 2 * PAGE_SIZE)
    yield Bench(f"step_places {batch}", lambda: step_places(state, sizes), 8 * 20 * batch)
    tokens = torch.zeros((batch, 4), dtype=torch.int64, device=device)
    slots, flags = (
        torch.arange(1, batch + 1, device=device),
        torch.zeros(4 * batch, dtype=torch.bool, device=device),
    )
    yield Bench(
        f"chain_verify {batch}",
        lambda: chain_verify(tokens, tokens, slots),
        2 * size(tokens) + 2 * size(slots),
    )
    outcome = (slots, tokens, tokens, slots, flags, flags, slots)
    yield Bench(f"step_outcome {batch}", lambda: step_outcome(state, *outcome), 4 * size(tokens))
    rings = torch.zeros((batch + 1, NGRAM_WINDOW), dtype=torch.int32, device=device)
    lasts, ngrams = torch.full_like(slots, NGRAM_WINDOW - 1), NgramSizes(2, 5, 3)
    yield Bench(
        f"match_ngrams {batch}", lambda: match_ngrams(rings, slots, lasts, ngrams), 4 * batch * NGRAM_WINDOW
    )


def choice_benches(rows: int, vocab_size: int, device: str) -> Iterator[Bench]:
    """The likeliest token of each row, and one drawn."""
    logits = torch.randn(rows, vocab_size, device=device)
    seeds, ids = torch.arange(rows, device=device), torch.arange(vocab_size, device=device)
    warm, off = (
        torch.ones(rows, dtype=torch.float64, device=device),
        torch.zeros(rows, dtype=torch.float64, device=device),
    )
    for kind, is_drawn in (
        ("likeliest", torch.zeros_like(seeds).bool()),
        ("drawn", torch.ones_like(seeds).bool()),
    ):
        yield Bench(
            f"choose_token {kind} {rows}x{vocab_size}",
            lambda is_drawn=is_drawn: choose_token(logits, seeds, seeds, warm, off, is_drawn, ids),
            size(logits),
        )


def limited_benches(rows: int, vocab_size: int, device: str) -> Iterator[Bench]:
    """One token of each row among those that top-k and top-p leave, and penalties."""
    logits, seeds = torch.randn(rows, vocab_size, device=device), torch.arange(rows, device=device)
    one, is_bad = torch.ones(rows, dtype=torch.float64, device=device), torch.zeros_like(seeds).bool()
    for name, top_k, top_p in (("top-k", 20, 0.8), ("top-p", vocab_size, 0.9)):
        limits = torch.full_like(seeds, min(top_k, vocab_size)), torch.full_like(one, top_p)
        ranking = Ranking(seeds, one, *limits, torch.zeros_like(one), torch.ones_like(seeds).bool())
        yield Bench(
            f"choose_ranked {name} {rows}x{vocab_size}",
            lambda ranking=ranking: choose_ranked(logits, seeds, ranking, seeds, is_bad, 1024),
            size(logits),
        )
    for name, wanted in (("asked", torch.full_like(seeds, 1)), ("not asked", torch.full_like(seeds, -1))):
        yield Bench(
            f"top_logprobs {name} {rows}x{vocab_size}",
            lambda wanted=wanted: top_logprobs(logits, seeds, wanted, 20),
            size(logits),
        )
    seen = torch.zeros((rows, vocab_size), dtype=torch.int32, device=device)
    slots = torch.arange(rows, device=device)
    penalties = torch.full((rows, 3), 1.05, device=device)
    drafts = torch.empty((rows, 0), dtype=torch.int64, device=device)
    yield Bench(
        f"penalise_logits {rows}x{vocab_size}",
        lambda: penalise_logits(logits, RowEdits(slots, penalties, seen, drafts)),
        2 * size(logits) + size(seen),
    )


def registry(device: str, *, is_small: bool) -> Iterator[Bench]:
    """Every operation; small: a few rows, to see that each entry runs."""
    for tokens in (3,) if is_small else (1, 64, 8192):
        yield from row_benches(tokens, device)
    for tokens in (3,) if is_small else (1, 4, 32):
        yield from linear_benches(tokens, device)
    for tokens in (3,) if is_small else (1, 4, 128, 2048):
        yield from expert_benches(tokens, device, *(SMALL_EXPERTS if is_small else EXPERTS))
    for batch, context in ((2, 40),) if is_small else ((1, 1024), (1, 8192), (8, 8192), (64, 4096)):
        yield from attention_benches(batch, context, device)
    yield from verdict_benches(2 if is_small else 64, 16, device)
    yield from glue_benches(2 if is_small else 64, device)
    for rows, vocab_size in ((2, 40),) if is_small else ((1, 49152), (4, 128256), (256, 128256)):
        yield from choice_benches(rows, vocab_size, device)
        yield from limited_benches(rows, vocab_size, device)


def main() -> None:
    """One line per operation: microseconds, GB/s, TFLOP/s, and the share of the nearer ceiling."""
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: a kernel's time is only known where it runs")
    from triton.testing import do_bench

    def milliseconds(run: Callable[[], object]) -> float:
        return float(do_bench(run, warmup=25, rep=100, return_mode="median"))

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * size(source) / milliseconds(lambda: target.copy_(source)) * 1e3
    a, b = random(8192, 8192, device="cuda"), random(8192, 8192, device="cuda")
    rate = 2 * 8192**3 / milliseconds(lambda: a @ b) * 1e3
    print(
        f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e9:.0f} GB/s, matmul {rate / 1e12:.0f} TFLOP/s"
    )
    print(f"{'operation':36} {'us':>9} {'GB/s':>7} {'TFLOP/s':>8} {'floor':>6}")
    for bench in registry("cuda", is_small=False):
        seconds = milliseconds(bench.run) / 1e3
        floor = max(bench.num_bytes / bandwidth, bench.num_flops / rate)
        moved, computed = bench.num_bytes / seconds / 1e9, bench.num_flops / seconds / 1e12
        print(f"{bench.name:36} {seconds * 1e6:9.1f} {moved:7.0f} {computed:8.1f} {floor / seconds:6.0%}")


if __name__ == "__main__":
    main()
