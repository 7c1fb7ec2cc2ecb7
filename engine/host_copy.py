"""Copies of small tensors from the host to a device, for which the host waits neither for the copy nor for
earlier work.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch._subclasses.fake_tensor import is_fake

# Kernels are compiled for pointers at multiples of this, and once more for others.
ALIGNMENT = 16


def int64_tensor(values: Sequence[int]) -> torch.Tensor:
    """`values` `[n]` int64 on the host. For a thousand numbers it takes 12 us, `torch.tensor` 100."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


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
