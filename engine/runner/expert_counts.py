"""How many rows each expert computed, over all layers: counted inside of forwards, eager or in graphs.

A graph holds the addresses of these tensors, so they are made before any capture, and stay. Rows of padding
and of idle requests do not count; drafts that were rejected do, since the experts computed them.

Legend: T rows of a forward, K experts of a row, E experts.
"""

from collections.abc import Iterable

import torch

from ..errors import CheckpointError, LifecycleError
from ..models.moe import MixtureOfExperts
from .lifecycle import Phase

MAX_LABELS = 256  # more experts are counted together with their neighbours
NAME = "expert_rows_"


class ExpertCounts:
    """The counts of one model. `is_real` int64 `[max_rows]`: 1 for each row of the forward that counts."""

    def __init__(self, num_experts: int, max_rows: int, device: torch.device) -> None:
        self.num_experts = num_experts
        self.totals = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.is_real = torch.zeros(max_rows, dtype=torch.int64, device=device)
        is_cuda = device.type == "cuda"
        self._on_host = torch.zeros(num_experts, dtype=torch.int64, pin_memory=is_cuda)

    def begin(self, num_rows: int) -> None:
        """The first `num_rows` rows of the next forward count."""
        self.is_real[:num_rows].fill_(1)
        self.is_real[num_rows:].zero_()

    def begin_where(self, is_real: torch.Tensor) -> None:
        """The rows of the next forward count where `is_real`, bool `[T]`. A graph may hold this."""
        self.is_real[: is_real.shape[0]].copy_(is_real)

    def add(self, ids: torch.Tensor) -> None:
        """Counts the experts `ids` int32 `[T, K]` of a layer. A graph may hold this.

        Raises LifecycleError for more rows than `max_rows`.
        """
        rows = ids.shape[0]
        if rows > self.is_real.shape[0]:
            raise LifecycleError(f"experts of {rows} rows are counted, {self.is_real.shape[0]} at most")
        ones = self.is_real[:rows, None].expand(ids.shape).reshape(-1)
        self.totals.scatter_add_(0, ids.reshape(-1).to(torch.int64), ones)

    def reset(self) -> None:
        """Forgets what captures and rehearsals have counted."""
        self.totals.zero_()
        self._on_host.zero_()

    def read(self) -> dict[str, float]:
        """The counts by name, with at most MAX_LABELS names. On a GPU they are those of the call before, so
        that nobody waits for the device.
        """
        if self.totals.is_cuda:
            found = self._on_host.tolist()
            self._on_host.copy_(self.totals, non_blocking=True)
        else:
            found = self.totals.tolist()
        each = -(-self.num_experts // MAX_LABELS)
        return {
            f"{NAME}{first}": float(sum(found[first : first + each])) for first in range(0, len(found), each)
        }


def count_experts(layers: Iterable[object], max_rows: int, phase: Phase) -> ExpertCounts:
    """Makes the counts of a model with `layers`, whose forwards have at most `max_rows` rows.

    Raises CheckpointError for a model without experts, LifecycleError unless the engine is in LOADED: a graph
    that was captured before would not count.
    """
    if phase != Phase.LOADED:
        raise LifecycleError(
            f"experts are counted from before the capture of graphs on, not from {phase.name}"
        )
    parts = (getattr(layer, "mlp", None) for layer in layers)
    found = [part for part in parts if isinstance(part, MixtureOfExperts)]
    if not found:
        raise CheckpointError("count_experts: this model has no experts; leave --count-experts out")
    counts = ExpertCounts(found[0].config.num_experts, max_rows, found[0].router.weight.device)
    for experts in found:
        experts.counts = counts
    return counts
