"""The rows that a layer's experts compute, where several ranks share the experts.

Tensor parallel ranks have the same rows, and sum their partial results. With data-parallel attention each
rank has rows of its own, as many as every other one: all rows are gathered, each rank computes its part of
the experts for all of them, and each gets the sums for its own rows back. A rank with another number of rows
would leave the others waiting in the collective for ever, so `LockstepRows` knows the numbers that all agreed
on, and raises before the collective.

Shape legend: T rows of a rank, C columns, W ranks.
"""

import torch

from ...kernels.collectives import gather_rows, scatter_sums
from ..errors import LifecycleError
from .group import TensorGroup


class SummedRows:
    """The rows of tensor parallel ranks, which all have the same."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """As `ExpertRows.gather`."""
        return x

    def collect(self, parts: torch.Tensor) -> torch.Tensor:
        """As `ExpertRows.collect`."""
        return self._group.sum(parts)

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """As `ExpertRows.own`."""
        return rows


class LockstepRows:
    """Rows of ranks that have their own, in forwards that all run at once.

    `expected`: the number of rows with which all ranks have agreed to enter a layer; None while all of them
    run the same forwards without agreements, before they serve.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self.expected: int | None = None

    def check(self, num_rows: int) -> None:
        """Raises LifecycleError for another number of rows than was agreed on."""
        if self.expected is not None and num_rows != self.expected:
            raise LifecycleError(
                f"rank {self.group.rank} enters the experts with {num_rows} rows, and the ranks agreed on "
                f"{self.expected}; a batch is padded to the agreed size before it is planned"
            )

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """As `ExpertRows.gather`. Raises LifecycleError as `check`."""
        self.check(x.shape[0])
        return gather_rows(x, self.group.size, self.group.name)

    def collect(self, parts: torch.Tensor) -> torch.Tensor:
        """As `ExpertRows.collect`."""
        return scatter_sums(parts, self.group.size, self.group.name)

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """As `ExpertRows.own`."""
        count = rows.shape[0] // self.group.size
        return rows[self.group.rank * count : (self.group.rank + 1) * count]

    def __repr__(self) -> str:
        return f"<LockstepRows {self.group!r}, expects {self.expected}>"
