"""The interface between models and attention kernels: plan a batch, bind the plan, attend in every layer."""

from abc import ABC, abstractmethod
from functools import partial
from typing import Protocol

import torch

from ...kernels.attention_form import PLAIN_FORM, AttentionForm
from ...kernels.kv_store import kv_rows, store_kv
from ..batch.forward_batch import ForwardBatch
from ..graphs.errors import GraphError
from ..kv.pool import KVPool
from ..models.layers import Attend, More, Read
from .metadata import AttentionMetadata, plan
from .places import RequestPlaces


class AttentionBackend(Protocol):
    """Attention over the pages of one pool."""

    def plan(self, batch: ForwardBatch) -> AttentionMetadata:
        """The data shared by all layers of a forward. `batch` must be final and padded."""

    def bind(self, metadata: AttentionMetadata) -> Attend:
        """The function that each layer of the forward calls: it stores k and v, then attends.

        Raises LifecycleError, here and at each call, if the batch was changed after its plan was made.
        """

    def bind_reads(self, metadata: AttentionMetadata) -> Read:
        """As `bind`, for layers whose k and v are stored already."""

    @property
    def recordable_context(self) -> int:
        """Rows of context that a full graph can attend to; 0: it cannot hold this attention."""

    def recorded(self, places: RequestPlaces, slots: torch.Tensor) -> Attend:
        """The function that each layer of a captured graph calls.

        Each replay reads the contents of `places`, and of `slots` int64 `[T]`, where k and v are stored.
        Raises GraphError without `recordable_context`.
        """


class PagedAttention(ABC):
    """The common base of the backends: the pool, the plans, and batches without rows.

    `scale`: factor of the scores, by default the layout's. `max_context`: the longest context of a request,
    in tokens, by which a backend sizes buffers; 0: it has none. `gathers`: whether the backend reads the
    context by slots; its plans then hold them.
    """

    gathers: bool

    def __init__(self, pool: KVPool, scale: float | None = None, *, max_context: int = 0) -> None:
        self.pool = pool
        self.scale = pool.layout.scale if scale is None else scale
        self.max_context = max_context

    def plan(self, batch: ForwardBatch) -> AttentionMetadata:
        """As `AttentionBackend.plan`."""
        return plan(batch, self.pool.page_size, gathers=self.gathers, copies=self.copies(batch))

    def bind(self, metadata: AttentionMetadata) -> Attend:
        """As `AttentionBackend.bind`."""
        read, rows = self._reads(metadata), kv_rows(metadata.batch.slots, self.pool.kv)
        return partial(self._store_and_read, metadata, read, rows)

    def bind_reads(self, metadata: AttentionMetadata) -> Read:
        """As `AttentionBackend.bind_reads`."""
        return partial(_checked, metadata, self._reads(metadata))

    @property
    def recordable_context(self) -> int:
        """As `AttentionBackend.recordable_context`."""
        return 0

    def recorded(self, places: RequestPlaces, slots: torch.Tensor) -> Attend:
        """As `AttentionBackend.recorded`."""
        raise GraphError(f"{type(self).__name__} cannot be recorded; break the graph at attention")

    def copies(self, batch: ForwardBatch) -> bool:
        """Whether the context of `batch` is copied into contiguous buffers before each layer attends."""
        return False

    def attend(
        self,
        metadata: AttentionMetadata,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
    ) -> torch.Tensor:
        """One layer alone: `q` `[T, N, D]`, `k`, `v` `[T, K, D]` -> `[T, N, D]`."""
        return self.bind(metadata)(layer, q, k, v, form)

    def scale_of(self, form: AttentionForm) -> float:
        """The factor of the scores of a layer."""
        return form.scale or self.scale

    @abstractmethod
    def _bind_rows(self, metadata: AttentionMetadata) -> Read:
        """As `bind_reads`, for a checked plan with requests.

        Row numbers and masks are the same for every layer and are computed here, once. Rows of padding become
        zeros.
        """

    def beside(self, pool: KVPool) -> "PagedAttention":
        """The same backend over `pool`, for other layers of the same forwards, which run in turn."""
        return type(self)(pool, self.scale, max_context=self.max_context)

    def _reads(self, metadata: AttentionMetadata) -> Read:
        metadata.check(metadata.batch.num_tokens)
        read = self._bind_rows(metadata) if metadata.batch.num_requests else _only_padding
        if metadata.unread < 0 or not metadata.batch.num_requests:
            return read
        return partial(_but_unread, metadata.unread, read, self._bind_unread(metadata))

    def _bind_unread(self, metadata: AttentionMetadata) -> Read:
        """As `_bind_rows`, for the layer that is not read: what is due behind the stored keys and values."""
        return _nothing

    def _store_and_read(
        self,
        metadata: AttentionMetadata,
        read: Read,
        store_rows: torch.Tensor,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
    ) -> torch.Tensor:
        metadata.check(q.shape[0])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if metadata.num_rows:
            store_kv(self.pool.kv, layer, store_rows, k, v)
        read(layer, q, out, form)
        return out


def _checked(
    metadata: AttentionMetadata, read: Read, layer: int, q: torch.Tensor, out: torch.Tensor, *more: More
) -> None:
    metadata.check(q.shape[0])
    read(layer, q, out, *more)


def _but_unread(
    unread: int, read: Read, instead: Read, layer: int, q: torch.Tensor, out: torch.Tensor, *more: More
) -> None:
    (instead if layer == unread else read)(layer, q, out, *more)


def _only_padding(layer: int, q: torch.Tensor, out: torch.Tensor, *more: More) -> None:
    """What a batch without requests reads."""
    out.zero_()


def _nothing(layer: int, q: torch.Tensor, out: torch.Tensor, *more: More) -> None:
    """What a layer without readers reads."""
