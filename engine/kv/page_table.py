"""Arithmetic of tokens, pages and slots."""

from collections.abc import Sequence

import numpy as np
import torch

from ..host_copy import IntArray, to_device


def pages_for(num_tokens: int, page_size: int) -> int:
    """The number of pages that hold `num_tokens` tokens; 0 for none."""
    return -(-num_tokens // page_size)


def slots_for(pages: Sequence[int], start: int, end: int, page_size: int) -> torch.Tensor:
    """Slots, int64 `[end - start]` on the CPU, of tokens [start, end); token t lies in pages[t //
    page_size].
    """
    return torch.from_numpy(slot_array(pages, start, end, page_size))


def slot_array(pages: Sequence[int], start: int, end: int, page_size: int) -> IntArray:
    """As `slots_for`, as an array."""
    assert 0 <= start <= end <= len(pages) * page_size, (start, end, len(pages), page_size)
    if end - start <= 8:  # decode and verify: a list beats four operations
        few = [pages[t // page_size] * page_size + t % page_size for t in range(start, end)]
        return np.array(few, dtype=np.int64)
    first = start // page_size
    last = (end - 1) // page_size + 1
    bases = np.array(pages[first:last], dtype=np.int64) * page_size
    slots: IntArray = (bases[:, None] + np.arange(page_size, dtype=np.int64)).reshape(-1)
    return slots[start - first * page_size : end - first * page_size]


def row_arrays(
    spans: Sequence[tuple[Sequence[int], int, int]], page_size: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Positions `[T]` and slots `[T]` of the rows of all `spans`, and their page table `[B, P]`.

    A span is (pages, first, end): the rows [first, end) of a request. Each row of the table has the pages of
    the tokens before `end`.
    """
    return (
        np.concatenate([np.arange(first, end, dtype=np.int64) for _, first, end in spans]),
        np.concatenate([slot_array(pages, first, end, page_size) for pages, first, end in spans]),
        page_array([pages[: pages_for(end, page_size)] for pages, _, end in spans]),
    )


def build_page_table(pages: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> torch.Tensor:
    """The page table int64 `[B, P]`; P is the longest list, at least 1. Rows are padded with page 0."""
    return to_device(torch.from_numpy(page_array(pages)), torch.device(device))


def page_array(pages: Sequence[Sequence[int]]) -> IntArray:
    """As `build_page_table`, as an array."""
    width = max((len(row) for row in pages), default=0) or 1
    table = np.zeros((len(pages), width), dtype=np.int64)
    for number, row in enumerate(pages):
        table[number, : len(row)] = row
    return table
