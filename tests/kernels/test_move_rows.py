"""Rows of memory: parts of pages copied and digested, alike by the kernel, its reference and `move_spans`."""

import pytest
import torch
from baton.kernels.move_rows import move_rows_reference, move_rows_triton
from baton.kernels.move_spans import CHUNK, MODULUS, mixed, num_chunks

LAUNCHES = [move_rows_reference, move_rows_triton]
SHAPES = [(1, 4, 4), (3, 4, 12), (16, 12, 60), (33, 256, 1024), (CHUNK // 256 + 5, 256, 512)]


def words(*shape: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(9)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=noise).to(torch.int32)


def moved(launch: object, source: torch.Tensor, target: torch.Tensor, first: int) -> tuple[torch.Tensor, int]:
    """Moves strided rows `[n, w]` into strided rows; returns the digest."""
    num, width = source.shape
    numbers = [source.data_ptr(), target.data_ptr(), num * width, first, width]
    spans = torch.tensor([[*numbers, source.stride(0), target.stride(0)]], dtype=torch.int64)
    sums = torch.full((1, 3), 7)
    launch(spans, torch.tensor([[0, 1, num_chunks(num * width), 0]]), sums)
    return target, int(sums.sum()) % MODULUS


@pytest.mark.parametrize("launch", LAUNCHES, ids=["reference", "triton"])
@pytest.mark.parametrize(("num", "width", "row"), SHAPES)
def test_rows_move_both_ways_and_have_the_digest_of_their_words(
    interpreter, launch: object, num: int, width: int, row: int
) -> None:
    pages, first, at = words(num, row), 40, (row - width) // 8 * 4
    part = pages[:, at : at + width]
    slot, digest = moved(launch, part, torch.zeros(num, width, dtype=torch.int32), first)
    assert torch.equal(slot, part)
    assert digest == mixed(part.reshape(-1), first)
    other = torch.full((num, row), 5, dtype=torch.int32)
    landed, again = moved(launch, slot, other[:, at : at + width], first)
    assert torch.equal(landed, part)
    assert again == digest
    other[:, at : at + width] = 5
    assert (other == 5).all(), "words beside the rows"


def test_tables_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"int64 \[n, 7\]"):
        move_rows_triton(*(torch.zeros(1, width, dtype=torch.int64) for width in (4, 4, 1)))
