"""Sparse attention: the backend of pools with side caches, whose plan holds shapes and write targets.

The plan of a forward names, for each row of the padded batch, the entries of the side caches that the row
writes. Its kernels refuse a plan with other numbers of rows or requests, or other lengths, than they run on.
"""

from dataclasses import dataclass
from functools import partial

import torch

from ...kernels.attention_form import PLAIN_FORM, AttentionForm
from ...kernels.gather_context import ROW_ALIGNMENT
from ...kernels.kv_store import kv_rows
from ...kernels.ops import recorded_store_kv
from ...kernels.sparse_attention import sparse_attention
from ...kernels.sparse_caches import SparsePlan, compress, plan_rows
from ...kernels.sparse_ops import recorded_sparse_attention
from ..batch.forward_batch import ForwardBatch
from ..errors import LifecycleError
from ..kv.pool import KVPool
from ..kv.sparse_layout import SparseLayout
from ..models.layers import Attend, Read
from ..prompt_budget import buffer_rows
from .backend import PagedAttention
from .metadata import AttentionMetadata, plan
from .places import RequestPlaces


@dataclass(frozen=True, kw_only=True)
class SparseMetadata(AttentionMetadata):
    """An attention plan with `rows`, the plan of the side caches."""

    rows: SparsePlan


class SparseAttention(PagedAttention):
    """The attention backend of pools with a SparseLayout, on CPUs and GPUs.

    The last heads of q are queries of the indexer, see `kernels.sparse_attention`; their output is zeros.
    """

    gathers = False

    def __init__(self, pool: KVPool, scale: float | None = None, *, max_context: int = 0) -> None:
        super().__init__(pool, scale, max_context=max_context)
        assert isinstance(pool.layout, SparseLayout), pool.layout
        self.sizes = pool.layout.sizes

    def plan(self, batch: ForwardBatch) -> SparseMetadata:
        """As `AttentionBackend.plan`."""
        made = plan(batch, self.pool.page_size, gathers=False)
        rows = plan_rows(self.sizes, batch.page_table, made.kv_lens, batch.num_tokens, made.q_starts)
        return SparseMetadata(**vars(made), rows=rows)

    @property
    def recordable_context(self) -> int:
        """As `AttentionBackend.recordable_context`: `max_context`, rounded as rows of requests are."""
        return buffer_rows(self.max_context, self.pool.num_slots, ROW_ALIGNMENT) if self.max_context else 0

    def recorded(self, places: RequestPlaces, slots: torch.Tensor) -> Attend:
        """As `AttentionBackend.recorded`. The plan is part of the graph; each replay makes it anew."""
        rows = plan_rows(
            self.sizes, places.page_table, places.kv_lens, slots.shape[0], q_starts=places.q_starts
        )
        return partial(self._attend_recorded, places, rows, kv_rows(slots, self.pool.kv))

    def _bind_rows(self, metadata: AttentionMetadata) -> Read:
        return partial(self._read, _with_targets(metadata))

    def _bind_unread(self, metadata: AttentionMetadata) -> Read:
        """A layer that nothing reads now still completes entries, which later rows read."""
        return partial(self._compress, _with_targets(metadata))

    def _compress(
        self,
        metadata: SparseMetadata,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
    ) -> None:
        pool, pages = self.pool, metadata.batch.page_table
        compress(pool.kv, layer, 1, metadata.rows, pages, metadata.kv_lens, self.sizes, pool.faults)

    def _read(
        self,
        metadata: SparseMetadata,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
    ) -> None:
        pool, pages = self.pool, metadata.batch.page_table
        found = sparse_attention(
            q, pool.kv, layer, metadata.rows, pages, metadata.kv_lens, self.sizes, self.scale, pool.faults
        )
        out.copy_(found)

    def _attend_recorded(
        self,
        places: RequestPlaces,
        rows: SparsePlan,
        store_rows: torch.Tensor,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
    ) -> torch.Tensor:
        pool = self.pool
        recorded_store_kv(pool.kv, layer, store_rows, k, v)
        return recorded_sparse_attention(
            q, pool.kv, layer, rows, places.page_table, places.kv_lens, self.sizes, self.scale, pool.faults
        )


def _with_targets(metadata: AttentionMetadata) -> SparseMetadata:
    if not isinstance(metadata, SparseMetadata):
        raise LifecycleError(f"{metadata.num_rows} rows of sparse attention have a plan without targets")
    return metadata


def check_faults(pool: KVPool) -> None:
    """Waits for the device. Raises LifecycleError if a kernel was launched with another batch's plan."""
    if bool(pool.faults):
        raise LifecycleError(
            "sparse attention ran with a plan of other rows, requests or lengths; its output was NaN. Plan "
            "the padded batch, before each forward"
        )
