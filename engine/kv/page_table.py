"""Arithmetic of tokens, pages and slots."""

from collections.abc import Sequence

import numpy as np
import torch

from ..host_copy import to_device


def pages_for(num_tokens: int, page_size: int) -> int:
    """The number of pages that hold `num_tokens` tokens; 0 for none."""
    return -(-num_tokens // page_size)


def slots_for(pages: Sequence[int], start: int, end: int, page_size: int) -> torch.Tensor:
    """Slots, int64 `[end - start]` on the CPU, of tokens [start, end); token t lies in pages[t //
    page_size].
    """
    assert 0 <= start <= end <= len(pages) * page_size, (start, end, len(pages), page_size)
    if start == end:
        return torch.empty(0, dtype=torch.int64)
    if end - start <= 8:  # decode and verify: a list beats four tensor operations
        return torch.tensor([pages[t // page_size] * page_size + t % page_size for t in range(start, end)])
    first = start // page_size
    last = (end - 1) // page_size + 1
    bases = torch.tensor(pages[first:last], dtype=torch.int64) * page_size
    slots = (bases[:, None] + torch.arange(page_size)).flatten()
    return slots[start - first * page_size : end - first * page_size]


def build_page_table(pages: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> torch.Tensor:
    """The page table int64 `[B, P]`; P is the longest list, at least 1. Rows are padded with page 0."""
    width = max((len(row) for row in pages), default=0) or 1
    table = np.zeros((len(pages), width), dtype=np.int64)
    for row, listed in zip(table, pages, strict=True):
        row[: len(listed)] = listed
    return to_device(torch.tensor(table), torch.device(device))
