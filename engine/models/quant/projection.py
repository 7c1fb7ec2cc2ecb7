"""The protocol of a projection, whatever the form of its weight.

Legend: T tokens, N outputs, H inputs.
"""

from collections.abc import Iterator
from typing import Protocol, TypeAlias

import torch

NamedTensors: TypeAlias = Iterator[tuple[str, torch.Tensor]]


class Projection(Protocol):
    """y = x W^T + b for merged matrices with the same input."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, H]` -> `[T, N]`."""

    def gated(self, x: torch.Tensor, is_gelu: bool = False) -> torch.Tensor:
        """silu of the first half of the outputs times the second half: `[T, H]` -> `[T, N/2]`.

        `is_gelu`: gelu by tanh instead of silu.
        """

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`, with the memory to copy each to."""


class MakeProjection(Protocol):
    """A class of projections, or a function that chooses one."""

    def __call__(
        self,
        in_size: int,
        parts: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Projection:
        """A projection of `in_size` inputs whose outputs are split into named `parts`, uninitialised."""


class StoredWeights(Protocol):
    """Weights that are loaded in the form of a checkpoint."""

    def finish(self) -> None:
        """Brings the loaded tensors into the form of the kernels.

        Raises CheckpointError for values that the form of the checkpoint does not allow.
        """


class StoredProjection(Projection, StoredWeights, Protocol):
    """A projection whose weight is loaded in the form of a checkpoint. `in_size`: H."""

    in_size: int

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """The values `[N, H]` of the finished weight."""


class StoredExperts(StoredWeights, Protocol):
    """The gated MLPs of all experts of a layer, whose weights are loaded in the form of a checkpoint.

    T rows, K experts of a row.
    """

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Rows `[T, H]` by `ids` int32 and `weights` float32 `[T, K]` -> their weighted sums `[T, H]`."""

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix` ("...experts."), with the memory to copy each to."""

    def parameters(self, prefix: str) -> NamedTensors:
        """The tensors that a call reads once finished, each of all experts, by names of their own."""
