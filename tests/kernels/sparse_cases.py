"""Sparse attention against its definition, interpreted on the CPU or compiled on a GPU; see `cases`."""

from collections.abc import Callable, Iterator

import torch
from baton.kernels.sparse_attention import sparse_attention_reference, sparse_attention_triton
from baton.kernels.sparse_caches import (
    SparsePlan,
    SparseSizes,
    compress_reference,
    compress_triton,
    plan_commits,
    plan_rows,
)
from baton.tests.kernels.cases import BFLOAT16, FLOAT32, NAN, assert_close, randn

LAYER, NUM_LAYERS = 1, 2
PAIRS = ((3, 45), (1, 33), (6, 6), (5, 64))  # new rows and context rows of each request


def sizes_of(page_size: int, kv_heads: int, head_dim: int, dense_block: int) -> SparseSizes:
    """A window of 6 tokens, 3 picks of 4 tokens, 2 heads of the indexer, in 2 layers."""
    return SparseSizes(NUM_LAYERS, page_size, kv_heads, head_dim, 2, 4, dense_block, 3, 6)


def filled_pool(
    kv_lens: list[int], sizes: SparseSizes, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool with rows of LAYER, the entries that they complete, and a table of scattered pages; all else but
    the sink is NaN."""
    needed = [-(-length // sizes.page_size) for length in kv_lens]
    pages = (torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(7)) + 1).tolist()
    shape = (NUM_LAYERS + sizes.side_layers, 2, sizes.page_size, sizes.kv_heads, sizes.head_dim)
    kv = torch.full((len(pages) + 1, *shape), NAN, dtype=dtype)
    kv[0] = 0
    table = torch.zeros(len(kv_lens), max(needed) + 1, dtype=torch.int64)
    for request, length in enumerate(kv_lens):
        for index in range(needed[request]):
            table[request, index] = page = pages.pop()
            rows = min(sizes.page_size, length - index * sizes.page_size)
            kv[page, LAYER, :, :rows] = randn(2, rows, *shape[3:], dtype=dtype, seed=1000 * page + request)
    lens = torch.tensor(kv_lens, dtype=torch.int64)
    starts = torch.tensor([0, *kv_lens]).cumsum(0)
    plan = plan_rows(sizes, table, lens, int(starts[-1]), starts)
    compress_reference(kv, LAYER, 1, plan, table, lens, sizes)
    return kv, table


def check_sparse(
    device: str,
    pairs: tuple[tuple[int, int], ...],
    sizes: SparseSizes,
    group: int,
    dtype: torch.dtype,
    tree: torch.Tensor | None = None,
) -> None:
    """Requests of (new rows, context rows), of equally many rows with `tree`, else with padding rows of NaN
    behind. Output and pool are those of the definition."""
    q_lens, kv_lens = [q for q, _ in pairs], [kv for _, kv in pairs]
    kv, table = filled_pool(kv_lens, sizes, dtype)
    lens = torch.tensor(kv_lens, dtype=torch.int64)
    starts = None if tree is not None else torch.tensor([0, *q_lens]).cumsum(0)
    num_rows = sum(q_lens) + (0 if tree is not None else 3)
    plan = plan_rows(sizes, table, lens, num_rows, starts, tree)
    heads = sizes.kv_heads * group + sizes.index_heads
    q = randn(num_rows, heads + 1, sizes.head_dim, dtype=dtype, seed=5)
    q[sum(q_lens) :] = q[:, -1] = NAN
    expected_kv, made, faults = kv.clone(), kv.clone().to(device), torch.zeros(1, dtype=torch.int32)
    scale = sizes.head_dim**-0.5
    expected = sparse_attention_reference(
        q[:, :-1], expected_kv, LAYER, plan, table, lens, sizes, scale, tree
    )
    on_device = [x.to(device) for x in (*plan, table, lens, faults)]
    out = sparse_attention_triton(
        q.to(device)[:, :-1], made, LAYER, SparsePlan(*on_device[:2]), *on_device[2:4], sizes, scale,
        on_device[4], None if tree is None else tree.to(device),
    )  # fmt: skip
    assert_close(out, expected)
    assert torch.equal(torch.isnan(made.cpu()), torch.isnan(expected_kv))
    assert_close(made.nan_to_num(0.0), expected_kv.nan_to_num(0.0))
    assert not bool(on_device[4])
    assert not bool(expected[:, -sizes.index_heads :].any())


def check_sparse_prompts(device: str, page_size: int, dense_block: int, dtype: torch.dtype) -> None:
    check_sparse(device, PAIRS, sizes_of(page_size, 2, 16, dense_block), 3, dtype)


def check_sparse_steps(device: str, dtype: torch.dtype) -> None:
    """Equally many rows, one request of which is idle; its position and output are those of padding."""
    check_sparse(device, ((4, 61), (4, 36)), sizes_of(8, 1, 24, 16), 2, dtype)


def check_sparse_trees(device: str, dtype: torch.dtype) -> None:
    tree = torch.eye(4, dtype=torch.bool).repeat(2, 1, 1)
    tree[:, :, 0] = True
    tree[0, 2, 1] = tree[1, 3, 2] = True
    check_sparse(device, ((4, 61), (4, 36)), sizes_of(8, 2, 16, 16), 2, dtype, tree)


def check_sparse_commits(device: str, dtype: torch.dtype) -> None:
    """Entries of accepted branches, in every layer from the first on; an idle request completes none."""
    sizes = sizes_of(8, 2, 16, 16)
    kv, table = filled_pool([61, 36, 5], sizes, dtype)
    kv[:, 0] = randn(*kv[:, 0].shape, dtype=dtype, seed=3)
    kv[0] = 0
    table[2] = 0
    starts, counts = torch.tensor([44, 29, 0]), torch.tensor([5, 3, 1])
    plan = plan_commits(sizes, table, starts, counts, 5)
    assert sorted(plan.rows[2][plan.rows[2] >= 0].tolist()) == sorted(
        int(table[r, p // 8]) * 2 + p % 8 // 4 for r, p in ((0, 47), (1, 31))
    )
    expected, made, faults = kv.clone(), kv.clone().to(device), torch.zeros(1, dtype=torch.int32).to(device)
    compress_reference(expected, 0, NUM_LAYERS, plan, table, starts, sizes)
    on_device = [x.to(device) for x in (*plan, table, starts)]
    compress_triton(made, 0, NUM_LAYERS, SparsePlan(*on_device[:2]), *on_device[2:], sizes, faults)
    assert torch.equal(torch.isnan(made.cpu()), torch.isnan(expected))
    assert_close(made.nan_to_num(0.0), expected.nan_to_num(0.0))
    assert not bool(faults)


def check_sparse_faults(device: str) -> None:
    """A plan of fewer or more rows, of another number of requests, of other lengths or of other pages gives
    NaN and a flag, and writes no entry."""
    sizes = sizes_of(8, 1, 16, 16)
    kv, table = filled_pool([16, 24], sizes, FLOAT32)
    lens = torch.tensor([16, 24])
    right = plan_rows(sizes, table, lens, 4)
    wrong = (
        plan_rows(sizes, table[:1], lens[:1], 2),
        plan_rows(sizes, table, lens, 8),
        plan_rows(sizes, table.repeat(2, 1), lens.repeat(2), 4),
        plan_rows(sizes, table, lens - 1, 4),
        plan_rows(sizes, table.flip(0), lens, 4),
    )
    q, pool = randn(4, 4, 16).to(device), kv.to(device)
    table, lens = table.to(device), lens.to(device)
    for number, plan in enumerate((right, *wrong)):
        faults, before = torch.zeros(1, dtype=torch.int32).to(device), pool.clone()
        plan = SparsePlan(*(part.to(device) for part in plan))
        out = sparse_attention_triton(q, pool, LAYER, plan, table, lens, sizes, 0.25, faults)
        assert bool(faults) is (number > 0)
        if bool(faults):
            assert bool(out[:, :2].isnan().any())
            assert torch.equal(pool.nan_to_num(0.0), before.nan_to_num(0.0))
        else:
            assert not bool(out.isnan().any())


def sparse_cases() -> Iterator[tuple[Callable[..., None], tuple[object, ...]]]:
    for page_size, dense_block, dtype in ((8, 32, FLOAT32), (16, 8, BFLOAT16), (8, 8, FLOAT32)):
        yield check_sparse_prompts, (page_size, dense_block, dtype)
    for dtype in (FLOAT32, BFLOAT16):
        yield check_sparse_steps, (dtype,)
        yield check_sparse_trees, (dtype,)
    yield check_sparse_commits, (FLOAT32,)
    yield check_sparse_faults, ()
