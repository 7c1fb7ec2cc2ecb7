"""Kernels of the deterministic mode: a row's bits do not depend on the other rows of a launch."""

import pytest
import torch
from baton.kernels.invariant_attention import Rows, invariant_attention
from baton.kernels.invariant_linear import invariant_linear, invariant_logits
from baton.kernels.rms_norm import add_rms_norm, rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("outputs", "inputs"), [(1536, 1024), (6144, 4096), (4096, 14336), (32000, 1024)])
def test_a_row_of_a_product_has_the_same_bits_in_any_number(outputs: int, inputs: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(outputs, inputs, device="cuda", generator=generator).bfloat16() * inputs**-0.5
    x = torch.randn(2100, inputs, device="cuda", generator=generator).bfloat16()
    whole, logits = invariant_linear(x, weight), invariant_logits(x[:300], weight)
    for count in (1, 2, 4, 16, 17, 33, 64, 65, 100, 129, 256, 257, 1024):
        assert torch.equal(invariant_linear(x[:count], weight), whole[:count]), count
        assert torch.equal(invariant_logits(x[:count], weight)[:300], logits[:count]), count
    assert torch.equal(invariant_linear(x.flip(0), weight), whole.flip(0))
    torch.testing.assert_close(logits, x[:300].float() @ weight.float().T, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("width", [64, 576, 1024, 4096])
def test_a_row_of_a_norm_has_the_same_bits_in_any_number(width: int) -> None:
    x, residual = torch.randn(2, 300, width, device="cuda").bfloat16()
    weight = torch.randn(width, device="cuda").bfloat16()
    whole, summed = rms_norm(x, weight, 1e-5), add_rms_norm(x, residual, weight, 1e-5)
    for count in (1, 2, 3, 5, 17, 64):
        assert torch.equal(rms_norm(x[-count:], weight, 1e-5), whole[-count:])
        for got, wanted in zip(
            add_rms_norm(x[-count:], residual[-count:], weight, 1e-5), summed, strict=True
        ):
            assert torch.equal(got, wanted[-count:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("length", "table_pages"), [(90, 8), (1300, 83), (1300, 600), (9000, 600)])
def test_a_row_of_attention_has_the_same_bits_in_every_forward(
    dtype: torch.dtype, length: int, table_pages: int
) -> None:
    """80 rows in one prefill, in ragged chunks, and as decode and verify rows of one request and of many."""
    heads, kv_heads, dim, count = (32, 8, 128, 80) if dtype == torch.bfloat16 else (9, 3, 64, 80)
    generator = torch.Generator("cuda").manual_seed(2)
    pool = torch.randn(table_pages + 2, 2, 2, 16, kv_heads, dim, device="cuda", generator=generator).to(dtype)
    table = (torch.randperm(table_pages, device="cuda", generator=generator) + 1)[None]
    q = torch.randn(count, heads, dim, device="cuda", generator=generator).to(dtype)

    def lens(*values: int) -> torch.Tensor:
        return torch.tensor(values, device="cuda")

    def attend(rows: torch.Tensor, pages: torch.Tensor, how: Rows) -> torch.Tensor:
        return invariant_attention(rows, pool, 1, pages, how, dim**-0.5)

    whole = attend(q, table, Rows(lens(length), starts=lens(0, count), longest=count))
    for chunk in (1, 7, 33):
        for start in range(0, count, chunk):
            end = min(start + chunk, count)
            how = Rows(lens(length - count + end), starts=lens(0, end - start), longest=end - start)
            assert torch.equal(attend(q[start:end], table, how), whole[start:end])
    for uniform in (1, 4, 5, 8):
        some = count // uniform
        ends = length - count + uniform * torch.arange(1, some + 1, device="cuda")
        many = attend(q[: some * uniform], table.expand(some, -1).contiguous(), Rows(ends, uniform=uniform))
        assert torch.equal(many, whole[: some * uniform])
        alone = attend(q[uniform : 2 * uniform], table, Rows(ends[1:2], uniform=uniform))
        assert torch.equal(alone, whole[uniform : 2 * uniform])


@pytest.mark.parametrize("length", [90, 1300, 9000])
@pytest.mark.parametrize("num_requests", [1, 40])
def test_a_branch_of_a_tree_has_the_bits_of_a_chain(length: int, num_requests: int) -> None:
    heads, kv_heads, dim, num_nodes = 32, 8, 128, 8
    branch = [0, 2, 3, 6]  # of the nodes; the others hold other keys and values
    num_pages = length // 16 + 3
    pool = torch.randn(num_pages + 2, 1, 2, 16, kv_heads, dim, device="cuda").bfloat16()
    table = (torch.randperm(num_pages, device="cuda") + 1)[None]
    q = torch.randn(len(branch), heads, dim, device="cuda").bfloat16()
    chain_lens = torch.tensor([length + len(branch)], device="cuda")
    chain = invariant_attention(q, pool, 0, table, Rows(chain_lens, uniform=len(branch)), 0.1)
    moved = pool.clone()
    for node in range(num_nodes):
        source = length + branch.index(node) if node in branch else length + 20
        page, offset = int(table[0, (length + node) // 16]), (length + node) % 16
        moved[page, :, :, offset] = pool[int(table[0, source // 16]), :, :, source % 16]
    mask = torch.eye(num_nodes, dtype=torch.bool, device="cuda")
    for depth, node in enumerate(branch):
        mask[node, branch[: depth + 1]] = True
    nodes = torch.randn(num_nodes, heads, dim, device="cuda").bfloat16()
    nodes[branch] = q
    how = Rows(
        torch.full((num_requests,), length + num_nodes, device="cuda"),
        uniform=num_nodes,
        tree_mask=mask.expand(num_requests, -1, -1).contiguous(),
    )
    pages = table.expand(num_requests, -1).contiguous()
    out = invariant_attention(nodes.repeat(num_requests, 1, 1), moved, 0, pages, how, 0.1)
    for found in out.view(num_requests, num_nodes, heads, dim)[:, branch]:
        assert torch.equal(found, chain)
