"""Results of a device that the host reads later, without waiting for the work launched meanwhile."""

from collections.abc import Sequence

import torch


class HostCopies:
    """Copies of `tensors` of one device on the host, queued behind the work launched so far."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._copies = list(tensors)
        if any(tensor.is_cuda for tensor in tensors):
            self._copies = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in tensors
            ]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[torch.Tensor]:
        """The copies, in order. Waits for them, and for no later work."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies

    def __repr__(self) -> str:
        return f"<HostCopies of {len(self._copies)} tensors>"
