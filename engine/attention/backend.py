"""The seam between models and attention kernels: plan a batch, bind the plan, and attend in every layer."""

from abc import ABC, abstractmethod
from functools import partial
from typing import Protocol

import torch

from ...kernels.kv_store import kv_rows
from ..batch.forward_batch import ForwardBatch
from ..kv.pool import KVPool
from ..models.layers import Attend
from .metadata import AttentionMetadata, plan


class AttentionBackend(Protocol):
    """Attention over the pages of one pool."""

    def plan(self, batch: ForwardBatch) -> AttentionMetadata:
        """Everything that all layers of a forward of `batch` share; planned on the final, padded batch."""

    def bind(self, metadata: AttentionMetadata) -> Attend:
        """The function that each layer of the forward calls: it stores k and v, then attends.

        Raises LifecycleError when the batch was changed after it was planned, here and at each call.
        """


class PagedAttention(ABC):
    """What the backends share: `pool`, `scale` of the scores (by default the layout's), plans, and batches without rows.

    `gathers`: whether the backend reads the context by slots, which the plan then holds.
    """

    gathers: bool

    def __init__(self, pool: KVPool, scale: float | None = None) -> None:
        self.pool = pool
        self.scale = pool.layout.scale if scale is None else scale

    def plan(self, batch: ForwardBatch) -> AttentionMetadata:
        return plan(batch, self.pool.page_size, gathers=self.gathers)

    def bind(self, metadata: AttentionMetadata) -> Attend:
        """Row numbers and masks are the same for every layer and are made here, once."""
        metadata.check(metadata.batch.num_tokens)
        if metadata.num_rows == 0:
            return partial(_attend_nothing, metadata)
        return self._bind_rows(metadata, kv_rows(metadata.batch.slots, self.pool.kv))

    def attend(
        self, metadata: AttentionMetadata, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """One layer alone: `q` `[T, N, D]`, `k`, `v` `[T, K, D]` -> `[T, N, D]`."""
        return self.bind(metadata)(layer, q, k, v)

    @abstractmethod
    def _bind_rows(self, metadata: AttentionMetadata, store_rows: torch.Tensor) -> Attend:
        """As `bind`, of a checked plan with rows; `store_rows`: where `store_kv` writes k and v."""


def _attend_nothing(
    metadata: AttentionMetadata, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    metadata.check(q.shape[0])
    return torch.empty_like(q)
