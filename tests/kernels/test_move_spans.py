"""Spans of memory: copied and digested in one pass, alike by the kernel and by its torch reference."""

import itertools
import random

import pytest
import torch
from baton.kernels.move_spans import (
    CHUNK,
    GOLDEN,
    MODULUS,
    mixed,
    move_spans_reference,
    move_spans_triton,
    num_chunks,
)

WORDS = 4096


def words(num: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (num,), dtype=torch.int64, generator=generator).to(torch.int32)


def plain_mix(word: int, number: int) -> int:
    """`fmix32` in plain integers."""
    x = (word % MODULUS) ^ ((number + 1) * GOLDEN % MODULUS)
    x = (x ^ x >> 16) * 0x85EBCA6B % MODULUS
    x = (x ^ x >> 13) * 0xC2B2AE35 % MODULUS
    return x ^ x >> 16


def table(source: torch.Tensor, target: torch.Tensor, cuts: list[tuple[int, int, int]]) -> torch.Tensor:
    """Spans of (word of the source, word of the target, number of words), numbered by the target's words."""
    rows = [(source.data_ptr() + 4 * a, target.data_ptr() + 4 * b, n, b) for a, b, n in cuts]
    return torch.tensor(rows, dtype=torch.int64)


def moved(cuts: list[tuple[int, int, int]], source: torch.Tensor):
    target, sums = torch.zeros(WORDS, dtype=torch.int32), torch.full((1, 1), 7)
    move_spans_reference(table(source, target, cuts), torch.tensor([[0, len(cuts), 1, 0]]), sums)
    return target, int(sums) % MODULUS


def test_the_digest_is_the_sum_of_the_mixed_words():
    data = words(37, 1)
    expected = sum(plain_mix(word, number) for number, word in enumerate(data.tolist(), start=900)) % MODULUS
    assert mixed(data, 900) == expected


def test_any_cut_of_a_run_into_spans_has_the_same_digest():
    data, rng = words(WORDS, 2), random.Random(3)
    whole = mixed(data, 0)
    for _ in range(20):
        edges = sorted({0, WORDS, *(4 * rng.randrange(WORDS // 4) for _ in range(rng.randrange(12)))})
        cuts = [(a, a, b - a) for a, b in itertools.pairwise(edges)]
        rng.shuffle(cuts)
        target, digest = moved(cuts, data)
        assert torch.equal(target, data)
        assert digest == whole


def test_one_changed_byte_and_two_exchanged_words_change_the_digest():
    data, rng = words(WORDS, 4), random.Random(5)
    right = mixed(data, 0)
    for _ in range(200):
        wrong = data.clone()
        wrong.view(torch.uint8)[rng.randrange(4 * WORDS)] ^= 1 << rng.randrange(8)
        assert mixed(wrong, 0) != right
        a, b = rng.sample(range(WORDS), 2)
        wrong = data.clone()
        wrong[a], wrong[b] = data[b], data[a]
        assert mixed(wrong, 0) != right
    assert mixed(data, 4) != right, "the same words elsewhere in a run"
    assert mixed(torch.zeros(8, dtype=torch.int32), 0) != mixed(torch.zeros(12, dtype=torch.int32), 0)


@pytest.mark.parametrize("num_programs", [1, 2, 5])
@pytest.mark.parametrize("size", [4, 60, 1024, CHUNK - 4, CHUNK + 8])
def test_the_kernel_copies_and_digests_as_its_reference(interpreter, size: int, num_programs: int):
    source = words(2 * size + 8, size)
    made = []
    for launch in (move_spans_reference, move_spans_triton):
        target, sums = torch.zeros(3 * size + 8, dtype=torch.int32), torch.full((2, num_programs), 7)
        rows = [(size + 4, 0, size), (0, 2 * size + 4, 4), (4, size, size)]
        runs = torch.tensor([[0, 2, num_chunks(size), 0], [2, 1, num_chunks(size), 0]])
        launch(table(source, target, rows), runs, sums)
        made.append((target, (sums.sum(dim=1) % MODULUS).tolist()))
    assert torch.equal(made[0][0], made[1][0])
    assert made[0][1] == made[1][1]


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("launch", [move_spans_reference, move_spans_triton])
@pytest.mark.parametrize(
    "tables",
    [
        (zeros(2, 3), zeros(1, 4), zeros(1, 1)),
        (zeros(2, 4), zeros(1, 3), zeros(1, 1)),
        (zeros(2, 4), zeros(2, 4), zeros(1, 1)),
        (zeros(2, 4), zeros(1, 4), zeros(1)),
        (zeros(4, 2).T, zeros(1, 4), zeros(1, 1)),
        (zeros(2, 4, dtype=torch.int32), zeros(1, 4), zeros(1, 1)),
    ],
)
def test_tables_of_another_shape_or_dtype_are_refused(launch, tables: tuple[torch.Tensor, ...]):
    with pytest.raises(ValueError, match="move_spans"):
        launch(*tables)
