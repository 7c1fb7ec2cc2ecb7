"""The interface between models and attention kernels: plan a batch, bind the plan, attend in every layer."""

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
        """The data shared by all layers of a forward. `batch` must be final and padded."""

    def bind(self, metadata: AttentionMetadata) -> Attend:
        """The function that each layer of the forward calls: it stores k and v, then attends.

        Raises LifecycleError, here and at each call, if the batch was changed after its plan was made.
        """


class PagedAttention(ABC):
    """The common base of the backends: the pool, the plans, and batches without rows.

    `scale`: factor of the scores, by default the layout's. `gathers`: whether the backend reads the context
    by slots; its plans then hold them.
    """

    gathers: bool

    def __init__(self, pool: KVPool, scale: float | None = None) -> None:
        self.pool = pool
        self.scale = pool.layout.scale if scale is None else scale

    def plan(self, batch: ForwardBatch) -> AttentionMetadata:
        """As `AttentionBackend.plan`."""
        return plan(batch, self.pool.page_size, gathers=self.gathers)

    def bind(self, metadata: AttentionMetadata) -> Attend:
        """As `AttentionBackend.bind`.

        Row numbers and masks are the same for every layer and are computed here, once.
        """
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
        """As `bind`, for a checked plan with rows.

        `store_rows`: the rows into which `store_kv` writes k and v.
        """


def _attend_nothing(
    metadata: AttentionMetadata, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    metadata.check(q.shape[0])
    return torch.empty_like(q)
