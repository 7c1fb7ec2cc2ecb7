"""Attention by the paged kernels, which read page tables and lengths on the device.

On the CPU their torch references run.
"""

from functools import partial

import torch

from ...kernels.extend_attention import paged_extend
from ...kernels.kv_store import store_kv
from ...kernels.verify_attention import paged_verify
from ..models.layers import Attend
from .backend import PagedAttention
from .metadata import AttentionMetadata


class TritonAttention(PagedAttention):
    """The attention backend of GPUs."""

    gathers = False

    def _bind_rows(self, metadata: AttentionMetadata, store_rows: torch.Tensor) -> Attend:
        return partial(self._attend, metadata, store_rows)

    def _attend(
        self,
        metadata: AttentionMetadata,
        store_rows: torch.Tensor,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        metadata.check(q.shape[0])
        kv, batch, pages = self.pool.kv, metadata.batch, metadata.batch.page_table
        store_kv(kv, layer, store_rows, k, v)
        if metadata.uniform_rows:
            grouped = q.reshape(batch.num_requests, metadata.uniform_rows, *q.shape[1:])
            return paged_verify(grouped, kv, layer, pages, metadata.kv_lens, self.scale).view(q.shape)
        longest = max(batch.q_lens, default=0)
        return paged_extend(q, kv, layer, pages, metadata.q_starts, metadata.kv_lens, longest, self.scale)
