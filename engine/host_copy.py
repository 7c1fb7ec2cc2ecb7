"""Small tensors on their way from the host to a device."""

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` of the host on `device`. The host does not wait for the copy, and so for nothing that was launched before:
    from memory that is not pinned it would.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
