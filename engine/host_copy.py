"""Copies of small tensors from the host to a device, for which the host waits neither for the copy nor for
earlier work.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch._subclasses.fake_tensor import is_fake

IntArray: TypeAlias = npt.NDArray[np.int64]

# Kernels are compiled for pointers at multiples of this, and once more for others.
ALIGNMENT = 16


def arrays_to_device(arrays: Sequence[IntArray], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Copies of int64 arrays of any shapes on `device`, by one transfer; parts of one allocation there.

    An array of a list of a thousand numbers takes 12 us, `torch.tensor` takes 100.
    """
    each = ALIGNMENT // np.dtype(np.int64).itemsize
    offsets = [0, *accumulate(-(-array.size // each) * each for array in arrays)]
    is_dry = is_fake(torch.empty(0))  # a dry run, whose tensors have no values
    packed = torch.empty(offsets[-1], dtype=torch.int64, pin_memory=device.type == "cuda" and not is_dry)
    if not is_dry:
        host = packed.numpy()
        for array, offset in zip(arrays, offsets, strict=False):
            host[offset : offset + array.size] = array.reshape(-1)
    there = packed.to(device, non_blocking=True)
    return tuple(
        there[offset : offset + array.size].view(array.shape)
        for array, offset in zip(arrays, offsets, strict=False)
    )


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of the host tensor `values` on `device`. The source is pinned, unless it is a fake tensor."""
    if device.type != "cuda" or is_fake(values):
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def all_to_device(values: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Copies of host tensors of any dtypes on `device`, by one transfer; parts of one allocation there."""
    if device.type != "cuda" or any(map(is_fake, values)):
        return tuple(value.to(device) for value in values)
    return unpacked(pack(values, pinned=True).to(device, non_blocking=True), values)


def pack(values: Sequence[torch.Tensor], *, pinned: bool = False) -> torch.Tensor:
    """The bytes of host tensors in one uint8 tensor, each at a multiple of ALIGNMENT."""
    packed = torch.empty(_offsets(values)[-1], dtype=torch.uint8, pin_memory=pinned)
    for target, value in zip(unpacked(packed, values), values, strict=True):
        target.copy_(value)
    return packed


def unpacked(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Views of `packed`, from `pack`, with the dtypes and shapes of the tensors `like`."""
    return tuple(
        packed[offset : offset + value.nbytes].view(value.dtype).view(value.shape)
        for value, offset in zip(like, _offsets(like), strict=False)
    )


def _offsets(values: Sequence[torch.Tensor]) -> list[int]:
    """The first byte of each tensor, and behind them the number of bytes of all."""
    offsets = [0]
    for value in values:
        offsets.append(offsets[-1] + -(-value.nbytes // ALIGNMENT) * ALIGNMENT)
    return offsets
