"""Copies of small tensors from the host to a device."""

import torch
from torch._subclasses.fake_tensor import is_fake


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of the host tensor `values` on `device`.

    The source is pinned, so the host waits neither for the copy nor for earlier work. The fake tensors of a
    dry run have no memory to pin.
    """
    if device.type != "cuda" or is_fake(values):
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
