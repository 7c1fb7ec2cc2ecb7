"""Compiled kernels on a GPU: the cases that run interpreted elsewhere, and those that need a device."""

from collections.abc import Callable

import pytest
import torch
from baton.kernels.expert_mlp import expert_mlp, expert_mlp_triton
from baton.kernels.fp8_many_rows import fp8_blocks_product
from baton.kernels.kv_store import kv_rows, store_kv
from baton.kernels.paged_attention import paged_attention_reference
from baton.kernels.route_experts import Routing
from baton.kernels.verify_attention import paged_verify
from baton.tests.kernels.attention_cases import attention_cases, check_context, tree_cases
from baton.tests.kernels.bench_kernels import registry
from baton.tests.kernels.cases import pool_cases, randn, rows_cases
from baton.tests.kernels.choice_cases import choice_cases
from baton.tests.kernels.expert_cases import choices, expert_cases
from baton.tests.kernels.few_row_cases import check_few_experts, few_row_cases
from baton.tests.kernels.latent_cases import latent_cases
from baton.tests.kernels.quant_cases import check_fp8_blocks, quant_cases
from baton.tests.kernels.quant_expert_cases import quant_expert_cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CASES = [
    *rows_cases(),
    *pool_cases(),
    *attention_cases(),
    *tree_cases(),
    *choice_cases(),
    *expert_cases(),
    *quant_cases(),
    *quant_expert_cases(),
    *latent_cases(),
    *few_row_cases(),
    # rows that are no multiple of what the library takes, and outputs and inputs that are none of a block
    *((check_fp8_blocks, (sizes, fp8_blocks_product)) for sizes in ((83, 576, 896), (128, 2736, 400))),
    # the sizes of Qwen3-30B-A3B and of DeepSeek-V2-Lite
    (
        check_few_experts,
        (1, (128, 2048, 768), 0, Routing(top_k=8, is_normalised=True), False, False, torch.bfloat16),
    ),
    (
        check_few_experts,
        (4, (128, 2048, 768), 0, Routing(top_k=8, is_normalised=True), False, False, torch.bfloat16),
    ),
    (
        check_few_experts,
        (1, (64, 2048, 1408), 2, Routing(top_k=6, is_normalised=False), False, True, torch.bfloat16),
    ),
]


@pytest.mark.parametrize(("check", "arguments"), CASES, ids=[check.__name__[6:] for check, _ in CASES])
def test_kernel_equals_its_definition(check: Callable[..., None], arguments: tuple[object, ...]):
    check("cuda", *arguments)


LONG = [(1, 1), (300, 300), (128, 513), (1, 1000), (33, 129), (256, 256), (40, 128)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [128, 256, 96])
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (8, 2), (8, 1), (16, 1)], ids=str)
def test_long_prompts_are_attended_as_defined(heads: tuple[int, int], head_dim: int, dtype: torch.dtype):
    """Ragged prompts of more tiles than the rings hold, by every kernel that a server may choose."""
    check_context("cuda", LONG, heads, head_dim, 16, dtype, 2)
    check_context("cuda", [(70, 71)] * 70, heads, head_dim, 16, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bits_of_an_experts_row_do_not_depend_on_the_rows_beside_it(dtype: torch.dtype):
    """Alone it is not grouped, in a batch it is, in small tiles or in those for prompts."""
    num_experts, top_k, hidden, inner = 16, 4, 256, 192
    x, ids = randn(1200, hidden, dtype=dtype).cuda(), choices(1200, num_experts, top_k).cuda()
    weights = torch.softmax(randn(1200, top_k, seed=3), -1).cuda()
    gate_up = randn(num_experts, 2 * inner, hidden, dtype=dtype, seed=1).cuda()
    down = randn(num_experts, hidden, inner, dtype=dtype, seed=2).cuda()
    alone = torch.cat(
        [expert_mlp(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], gate_up, down) for i in range(8)]
    )
    for count in (8, 100, 160, 1200):
        together = expert_mlp(x[:count], ids[:count], weights[:count], gate_up, down)
        assert torch.equal(together[:8], alone), count


@pytest.mark.parametrize(("num_rows", "dtype"), [(20, torch.float32), (600, torch.bfloat16)], ids=str)
def test_a_graph_of_experts_follows_the_choices_of_each_replay(num_rows: int, dtype: torch.dtype):
    """Of few rows, and of a prompt."""
    num_experts, top_k, hidden, inner = 16, 4, 256, 192
    gate_up = randn(num_experts, 2 * inner, hidden, dtype=dtype, seed=1).cuda()
    down = randn(num_experts, hidden, inner, dtype=dtype, seed=2).cuda()
    x, weights = randn(num_rows, hidden, dtype=dtype).cuda(), torch.full((num_rows, top_k), 0.25).cuda()
    ids = choices(num_rows, num_experts, top_k).cuda()
    expert_mlp(x, ids, weights, gate_up, down)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = expert_mlp(x, ids, weights, gate_up, down)
    for seed in (1, 2):
        ids.copy_(choices(num_rows, num_experts, top_k, seed))
        graph.replay()
        assert torch.equal(out, expert_mlp(x, ids, weights, gate_up, down)), seed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_for_prompts_have_the_bits_of_the_others(dtype: torch.dtype):
    """With the sizes of Qwen3-30B-A3B, and choices that leave some experts almost without rows."""
    num_rows, num_experts, top_k, hidden, inner = 2048, 128, 8, 2048, 768
    made = torch.Generator(device="cuda").manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, device="cuda", dtype=dtype)

    x, gate_up = drawn(num_rows, hidden), drawn(num_experts, 2 * inner, hidden) / hidden**0.5
    down = drawn(num_experts, hidden, inner) / inner**0.5
    popular = (drawn(num_rows, num_experts) + drawn(num_experts)).float()
    weights, ids = torch.softmax(popular, -1).topk(top_k)
    given = x, ids.int(), weights.contiguous(), gate_up, down
    chosen, prompt, small = (
        expert_mlp_triton(*given, is_prompt=is_prompt) for is_prompt in (None, True, False)
    )
    assert torch.equal(prompt, small)
    assert torch.equal(chosen, prompt)
    assert float(prompt.float().std()) > 0.01


def test_every_operation_runs_on_the_device():
    for bench in registry("cuda", is_small=True):
        bench.run()
    torch.cuda.synchronize()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 12 << 30,
    reason="needs 12 GiB of free device memory",
)
def test_pages_beyond_two_billion_values_are_reached():
    """Page 20000 of this pool begins at value 2.6e9: a 32-bit offset would wrap."""
    pool = torch.zeros(20001, 1, 2, 16, 32, 128, dtype=torch.bfloat16, device="cuda")
    assert pool[20000].storage_offset() > 2**31
    slots = torch.arange(20000 * 16, 20000 * 16 + 5, device="cuda")
    k, v = randn(5, 32, 128, dtype=torch.bfloat16), randn(5, 32, 128, dtype=torch.bfloat16, seed=1)
    store_kv(pool, 0, kv_rows(slots, pool), k.cuda(), v.cuda())
    assert torch.equal(pool[20000, 0, 0, :5].cpu(), k)
    assert torch.equal(pool[20000, 0, 1, :5].cpu(), v)
    q = randn(1, 1, 32, 128, dtype=torch.bfloat16, seed=2)
    table, lens = torch.tensor([[20000]], device="cuda"), torch.tensor([5], device="cuda")
    out = paged_verify(q.cuda(), pool, 0, table, lens, 0.1)
    expected = paged_attention_reference(q[0], pool[20000:].cpu(), 0, torch.tensor([0]), 5, 0.1)
    torch.testing.assert_close(out[0].cpu(), expected, atol=1.6e-2, rtol=1.6e-2)


def test_a_captured_verify_follows_lengths_and_pages_between_replays():
    pool = randn(9, 1, 2, 16, 2, 64, dtype=torch.bfloat16).cuda()
    q = randn(2, 4, 8, 64, dtype=torch.bfloat16, seed=1).cuda()
    table, lens = torch.tensor([[1, 2, 3], [4, 5, 6]]).cuda(), torch.tensor([20, 40]).cuda()
    paged_verify(q, pool, 0, table, lens, 0.1)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_verify(q, pool, 0, table, lens, 0.1)
    for kv_lens, pages in (((20, 40), [[1, 2, 3], [4, 5, 6]]), ((33, 5), [[7, 8, 1], [2, 3, 4]])):
        table.copy_(torch.tensor(pages))
        lens.copy_(torch.tensor(kv_lens))
        graph.replay()
        for request, kv_len in enumerate(kv_lens):
            expected = paged_attention_reference(
                q[request].cpu(), pool.cpu(), 0, torch.tensor(pages[request]), kv_len, 0.1
            )
            torch.testing.assert_close(out[request].cpu(), expected, atol=1.6e-2, rtol=1.6e-2)
