"""Attention whose rows have the same bits in every forward, on GPUs and CPUs."""

from functools import partial

import torch

from ...kernels.attention_form import PLAIN_FORM, AttentionForm
from ...kernels.invariant_attention import Rows, invariant_attention
from ..models.layers import Read
from .backend import PagedAttention
from .metadata import AttentionMetadata


class InvariantAttention(PagedAttention):
    """The attention backend of deterministic engines."""

    gathers = False

    def _bind_rows(self, metadata: AttentionMetadata) -> Read:
        if metadata.uniform_rows:
            rows = Rows(metadata.kv_lens, uniform=metadata.uniform_rows)
        else:
            longest = max(metadata.batch.q_lens, default=0)
            rows = Rows(metadata.kv_lens, starts=metadata.q_starts, longest=longest)
        return partial(self._read, metadata, rows)

    def _read(
        self,
        metadata: AttentionMetadata,
        rows: Rows,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
    ) -> None:
        table, scale = metadata.batch.page_table, self.scale_of(form)
        out.copy_(invariant_attention(q, self.pool.kv, layer, table, rows, scale, form))
