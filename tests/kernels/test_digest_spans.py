"""Spans of memory: digested where they lie, alike by the kernel and by its torch reference."""

import random

import pytest
import torch
from baton.kernels.digest_spans import digest_spans_reference, digest_spans_triton
from baton.kernels.move_spans import CHUNK, MODULUS, mixed, num_chunks
from baton.tests.kernels.test_move_spans import words


def digests(data: torch.Tensor, cuts: list[tuple[int, int, int]], launch=digest_spans_reference) -> list[int]:
    """Of spans of (word of `data`, number of words, number of the first)."""
    spans = torch.tensor([(data.data_ptr() + 4 * at, size, first) for at, size, first in cuts])
    sums = torch.full((len(cuts), num_chunks(max(size for _, size, _ in cuts))), 7)
    launch(spans, sums)
    return (sums.sum(dim=1) % MODULUS).tolist()


@pytest.mark.parametrize("size", [4, 60, 1024, CHUNK - 4, CHUNK + 8])
def test_the_kernel_digests_as_its_reference(interpreter, size: int):
    data = words(2 * size + 8, size)
    before = data.clone()
    cuts = [(size + 4, size, 0), (0, 4, 2 * size + 4), (4, size, 2**30)]
    expected = [mixed(data[at : at + num], first) for at, num, first in cuts]
    assert digests(data, cuts) == expected
    assert digests(data, cuts, digest_spans_triton) == expected
    assert torch.equal(data, before)


def test_spans_of_one_run_add_up_to_its_digest():
    data, rng = words(4096, 2), random.Random(3)
    for _ in range(20):
        cut = 4 * rng.randrange(1, 1024)
        parts = digests(data, [(0, cut, 0), (cut, 4096 - cut, cut)])
        assert sum(parts) % MODULUS == mixed(data, 0)


@pytest.mark.parametrize(
    ("spans", "sums"),
    [
        (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64)),
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64)),
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int64)),
    ],
)
def test_spans_of_another_shape_or_dtype_are_refused(spans: torch.Tensor, sums: torch.Tensor):
    with pytest.raises(ValueError, match="digest_spans"):
        digest_spans_reference(spans, sums)
