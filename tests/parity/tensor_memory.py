"""The memory that named tensors see."""

from collections import Counter
from collections.abc import Iterable

import torch


def memory(named: Iterable[tuple[str, torch.Tensor]]) -> dict[int, int]:
    """The bytes of each storage that the tensors see, by its address."""
    seen: Counter[int] = Counter()
    for _, tensor in named:
        seen[tensor.untyped_storage().data_ptr()] += tensor.nbytes
    return dict(seen)
