"""Kernels of sparse attention: each equals its definition, refuses what does not fit, and compiles."""

from collections.abc import Callable

import pytest
import torch
from baton.kernels.sparse_attention import sparse_attention, sparse_attention_triton
from baton.kernels.sparse_caches import PlanMismatch, SparseSizes, compress, plan_rows
from baton.tests.kernels.cases import randn
from baton.tests.kernels.sparse_cases import filled_pool, sizes_of, sparse_cases

QUICK = (2, 4, 5, 7, 8)  # each kernel in one form; the interpreter is slow
CASES = [
    pytest.param(*case, id=case[0].__name__[6:], marks=[] if number in QUICK else pytest.mark.slow)
    for number, case in enumerate(sparse_cases())
]


@pytest.mark.parametrize(("check", "arguments"), CASES)
def test_kernel_equals_its_definition(
    check: Callable[..., None], arguments: tuple[object, ...], interpreter: None
):
    check("cpu", *arguments)


SIZES = sizes_of(8, 1, 16, 16)
FAULTS = torch.zeros(1, dtype=torch.int32)


def planned(lens: list[int], num_rows: int):
    kv, table = filled_pool(lens, SIZES, torch.float32)
    kv_lens = torch.tensor(lens)
    return kv, table, kv_lens, plan_rows(SIZES, table, kv_lens, num_rows)


@pytest.mark.parametrize(
    ("change", "num_rows"),
    [("rows", 3), ("rows", 6), ("requests", 4), ("lengths", 4)],
)
def test_a_plan_of_another_batch_is_refused_on_the_cpu(change: str, num_rows: int):
    kv, table, lens, plan = planned([16, 24], 4)
    if change == "requests":
        table, lens = table[:1], lens[:1]
    if change == "lengths":
        lens = lens + 1
    with pytest.raises(PlanMismatch, match="planned for 4 rows of 2"):
        sparse_attention(randn(num_rows, 4, 16), kv, 1, plan, table, lens, SIZES, 0.25, FAULTS)


def test_a_plan_of_other_lengths_compresses_nothing_on_the_cpu():
    kv, table, lens, plan = planned([16, 24], 4)
    before = kv.clone()
    with pytest.raises(PlanMismatch):
        compress(kv, 0, 2, plan, table, lens + 1, SIZES, FAULTS)
    assert torch.equal(kv.nan_to_num(), before.nan_to_num())


def test_operands_that_do_not_fit_are_refused_by_name():
    kv, table, lens, plan = planned([16, 24], 4)
    rest = (SIZES, 0.25, FAULTS)
    with pytest.raises(ValueError, match=r"q \(4, 4, 8\)"):
        sparse_attention(randn(4, 4, 8), kv, 1, plan, table, lens, *rest)
    with pytest.raises(ValueError, match="tree mask"):
        sparse_attention(randn(4, 4, 16), kv, 1, plan, table, lens, *rest, torch.ones(2, 2, 1))
    with pytest.raises(ValueError, match="dense int64"):
        sparse_attention(randn(4, 4, 16), kv, 1, plan, table.int(), lens, *rest)
    with pytest.raises(ValueError, match="a pool of pages"):
        sparse_attention(randn(4, 4, 16), kv[:, :2].contiguous(), 1, plan, table, lens, *rest)


def test_idle_requests_and_no_requests_write_and_see_nothing():
    kv, table, lens, _ = planned([16, 24], 4)
    lens[1] = 0
    plan = plan_rows(SIZES, table, lens, 4)
    assert plan.rows[1].tolist() == [14, 15, -1, -1]
    assert plan.rows[2].tolist() == [-1, int(table[0, 1]) * 2 + 1, -1, -1]
    assert plan.rows[3].tolist() == [-1, int(table[0, 1]), -1, -1]
    out = sparse_attention(randn(4, 4, 16), kv, 1, plan, table, lens, SIZES, 0.25, FAULTS)
    assert bool(out[:2].any())
    assert not bool(out[2:].any())
    none = plan_rows(SIZES, table[:0], lens[:0], 2, torch.zeros(1, dtype=torch.int64))
    out = sparse_attention(randn(2, 4, 16), kv, 1, none, table[:0], lens[:0], SIZES, 0.25, FAULTS)
    assert not bool(out.any())


def test_blocks_of_equal_scores_are_taken_from_the_newest():
    """Zero queries make every score zero. The last picked block then holds the only large value."""
    sizes = SparseSizes(1, 8, 1, 16, 1, 4, 64, 2, 4)
    kv = torch.zeros(5, 1 + sizes.side_layers, 2, 8, 1, 16)
    table, lens = torch.tensor([[1, 2, 3]]), torch.tensor([24])
    for block in range(5):
        kv[1 + block // 2, 0, 1, block % 2 * 4 : block % 2 * 4 + 4] = float(10**block)
    plan = plan_rows(sizes, table, lens, 1)
    out = sparse_attention(torch.zeros(1, 2, 16), kv, 0, plan, table, lens, sizes, 0.25, FAULTS)
    # the window are tokens 20 to 23, behind blocks 0 to 4; blocks 4 and 3 are picked
    assert float(out[0, 0, 0]) == pytest.approx(4 * (10**4 + 10**3) / 12)


@pytest.mark.slow
def test_every_kernel_compiles_for_an_h200(compiled_for_h200: list[tuple[str, object]]):
    sizes = SparseSizes(2, 16, 8, 128, 4, 4, 128, 32, 128)
    shape = (2 + sizes.side_layers, 2, 16, 8, 128)
    kv, table = torch.zeros(3, *shape, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.int64)
    lens, q = torch.tensor([20, 32]), torch.zeros(4, 36, 128, dtype=torch.bfloat16)
    for tree in (None, torch.ones(2, 2, 2, dtype=torch.bool)):
        plan = plan_rows(sizes, table, lens, 4, tree_mask=tree)
        sparse_attention_triton(q, kv, 1, plan, table, lens, sizes, 0.1, FAULTS, tree)
    names = {name for name, _ in compiled_for_h200}
    assert names == {"_compress_kernel", "_score_blocks_kernel", "_pick_blocks_kernel", "_sparse_kernel"}
    assert all(kernel.asm["cubin"] for _, kernel in compiled_for_h200)
