"""Attention whose rows have the same bits in every forward, on GPUs and CPUs."""

from functools import partial

import torch

from ...kernels.invariant_attention import Rows, invariant_attention
from ...kernels.kv_store import store_kv
from ..models.layers import Attend
from .backend import PagedAttention
from .metadata import AttentionMetadata


class InvariantAttention(PagedAttention):
    """The attention backend of deterministic engines."""

    gathers = False

    def _bind_rows(self, metadata: AttentionMetadata, store_rows: torch.Tensor) -> Attend:
        longest = max(metadata.batch.q_lens, default=0)
        if metadata.uniform_rows:
            mask = metadata.batch.tree_mask
            rows = Rows(metadata.kv_lens, uniform=metadata.uniform_rows, tree_mask=mask)
        else:
            rows = Rows(metadata.kv_lens, starts=metadata.q_starts, longest=longest)
        return partial(self._attend, metadata, store_rows, rows)

    def _attend(
        self,
        metadata: AttentionMetadata,
        store_rows: torch.Tensor,
        rows: Rows,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        metadata.check(q.shape[0])
        store_kv(self.pool.kv, layer, store_rows, k, v)
        return invariant_attention(q, self.pool.kv, layer, metadata.batch.page_table, rows, self.scale)
