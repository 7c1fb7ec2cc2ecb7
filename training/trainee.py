"""The interface between the training loop and a drafter that is trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from .frozen_target import TargetRows
from .samples import Batch


@dataclass(frozen=True)
class StepLosses:
    """Sums over the rows of a batch, by draft position: `loss`, `correct` and `count`, each float32 `[T]`."""

    loss: torch.Tensor
    correct: torch.Tensor
    count: torch.Tensor

    def mean(self, weights: torch.Tensor) -> torch.Tensor:
        """The loss to minimise: the mean over rows of each position, weighted by `weights` `[T]`."""
        return (weights.to(self.loss.device) * self.loss / self.count.clamp(min=1)).sum()


def accept_length(correct: torch.Tensor, count: torch.Tensor, steps: int) -> float:
    """Expected tokens of a greedy verify of chains of `steps` drafts, from `correct` and `count` `[T]`.

    It takes the acceptance of a position to be independent of the row, so it is an estimate; `evaluate`
    measures.
    """
    shares = (correct / count.clamp(min=1))[:steps].double()
    return 1.0 + float(shares.cumprod(0).sum())


class Trainee(Protocol):
    """A drafter with trainable weights, a `torch.nn.Module`."""

    @property
    def position_weights(self) -> torch.Tensor:
        """The weight of each draft position's loss, float32 `[T]`."""

    def __call__(self, batch: Batch, rows: TargetRows) -> StepLosses:
        """The losses of all draft positions over `batch`."""

    def checkpoint_tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors of a checkpoint of the drafter, by their published names."""
