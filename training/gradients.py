"""Types for functions with a gradient of their own (`torch.autograd.Function`)."""

from typing import Any, Protocol

import torch


class GradientContext(Protocol):
    """What `torch.autograd.Function` passes to forward and backward; `rest` is free for values that are no
    tensors.
    """

    rest: Any
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...
