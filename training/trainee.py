"""The interface between the training loop and a drafter that is trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from .frozen_target import TargetRows
from .samples import Batch


@dataclass(frozen=True)
class StepLosses:
    """`objective`, a scalar, is what training minimises. The others have no gradients and one float32 per
    draft position: the mean `loss`, and `correct` of `count` drafts, summed over the rows of a batch.
    """

    objective: torch.Tensor
    loss: torch.Tensor
    correct: torch.Tensor
    count: torch.Tensor


def accept_length(correct: torch.Tensor, count: torch.Tensor) -> float:
    """Expected tokens of a greedy verify of chains of T drafts, from `correct` and `count` `[T]`.

    It takes the acceptance of a position to be independent of the row, so it is an estimate; `evaluate`
    measures.
    """
    shares = (correct / count.clamp(min=1)).double()
    return 1.0 + float(shares.cumprod(0).sum())


class Trainee(Protocol):
    """A drafter with trainable weights, a `torch.nn.Module`."""

    def __call__(self, batch: Batch, rows: TargetRows) -> StepLosses:
        """The losses of all draft positions over `batch`."""

    def checkpoint_tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors of a checkpoint of the drafter, by their published names."""
