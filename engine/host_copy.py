"""Copies of small tensors from the host to a device."""

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of the host tensor `values` on `device`.

    The source is pinned, so the host waits neither for the copy nor for earlier work.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
