"""Attention by plain torch, the backend of the CPU: the context is gathered by slots once per layer.

Legend: T rows, B requests, Q rows per request, S context rows, N/K/D heads as in `models.layers`.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import TypeAlias

import torch

from ...kernels.attention_form import PLAIN_FORM, AttentionForm
from ...kernels.kv_store import kv_rows
from ...kernels.paged_attention import (
    QUERY_BLOCK,
    batched_attention,
    causal_band,
    extend_attention,
    gather_kv,
)
from ...kernels.verify_attention import visible_columns
from ..models.layers import Read
from .backend import PagedAttention
from .metadata import AttentionMetadata

MaskOf: TypeAlias = Callable[[int], torch.Tensor]  # of a window; made once for all layers that have it


class TorchAttention(PagedAttention):
    """The attention backend of the CPU.

    Requests of equally many rows form one padded batch; others run one by one.
    """

    gathers = True

    def _bind_rows(self, metadata: AttentionMetadata) -> Read:
        key_rows = kv_rows(metadata.context_slots, self.pool.kv)
        if metadata.uniform_rows:
            rows = torch.cat((key_rows.flatten(), key_rows.flatten() + self.pool.page_size))
            return partial(self._read_uniform, metadata, rows, cache(partial(self._uniform_mask, metadata)))
        return partial(self._read_ragged, metadata, key_rows, cache(partial(self._band, metadata)))

    def _uniform_mask(self, metadata: AttentionMetadata, window: int) -> torch.Tensor:
        """A mask `[B, 1, Q, S]` to add to the scores: 0 where a row sees a context row, -inf elsewhere."""
        rows, length = metadata.uniform_rows, metadata.context_slots.shape[1]
        visible = visible_columns(metadata.kv_lens, rows, length, None, window)
        mask = torch.zeros(visible.shape, dtype=self.pool.row_dtype, device=visible.device)
        return mask.masked_fill_(~visible, float("-inf")).unsqueeze(1)

    def _band(self, metadata: AttentionMetadata, window: int) -> torch.Tensor:
        batch, device = metadata.batch, metadata.context_slots.device
        block = min(max(batch.q_lens, default=0), QUERY_BLOCK)
        return causal_band(max(batch.kv_lens, default=0), block, self.pool.row_dtype, device, window)

    def _read_uniform(
        self,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
        mask_of: MaskOf,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
    ) -> None:
        keys, values = gather_kv(self.pool.kv, layer, rows, q.dtype)
        shape = (metadata.batch.num_requests, -1)
        found = batched_attention(
            q.reshape(*shape, *q.shape[1:]),
            keys.view(*shape, *keys.shape[1:]),
            values.view(*shape, *values.shape[1:]),
            mask_of(form.window),
            self.scale_of(form),
            form,
        )
        out.copy_(found.reshape(q.shape))

    def _read_ragged(
        self,
        metadata: AttentionMetadata,
        key_rows: torch.Tensor,
        band_of: MaskOf,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
    ) -> None:
        start, band, scale = 0, band_of(form.window), self.scale_of(form)
        for request, (q_len, kv_len) in enumerate(
            zip(metadata.batch.q_lens, metadata.batch.kv_lens, strict=True)
        ):
            mine = key_rows[request, :kv_len]
            columns = torch.cat((mine, mine + self.pool.page_size))
            keys, values = gather_kv(self.pool.kv, layer, columns, q.dtype)
            rows = slice(start, start + q_len)
            out[rows] = extend_attention(q[rows], keys, values, band, scale, form)
            start += q_len
        out[start:].zero_()
