"""Attention by plain torch, the backend of the CPU: the context is gathered by slots once per layer.

Legend: T rows, B requests, Q rows per request, S context rows, N/K/D heads as in `models.layers`.
"""

from functools import partial

import torch

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


class TorchAttention(PagedAttention):
    """The attention backend of the CPU.

    Requests of equally many rows form one padded batch; others run one by one.
    """

    gathers = True

    def _bind_rows(self, metadata: AttentionMetadata) -> Read:
        key_rows = kv_rows(metadata.context_slots, self.pool.kv)
        if metadata.uniform_rows:
            rows = torch.cat((key_rows.flatten(), key_rows.flatten() + self.pool.page_size))
            return partial(self._read_uniform, metadata, rows, self._uniform_mask(metadata))
        return partial(self._read_ragged, metadata, key_rows, self._band(metadata))

    def _uniform_mask(self, metadata: AttentionMetadata) -> torch.Tensor:
        """A mask `[B, 1, Q, S]` to add to the scores: 0 where a row sees a context row, -inf elsewhere."""
        rows, length = metadata.uniform_rows, metadata.context_slots.shape[1]
        visible = visible_columns(metadata.kv_lens, rows, length, None)
        mask = torch.zeros(visible.shape, dtype=self.pool.dtype, device=visible.device)
        return mask.masked_fill_(~visible, float("-inf")).unsqueeze(1)

    def _band(self, metadata: AttentionMetadata) -> torch.Tensor:
        batch = metadata.batch
        block = min(max(batch.q_lens, default=0), QUERY_BLOCK)
        return causal_band(
            max(batch.kv_lens, default=0), block, self.pool.dtype, metadata.context_slots.device
        )

    def _read_uniform(
        self,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
        mask: torch.Tensor,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        keys, values = gather_kv(self.pool.kv, layer, rows)
        shape = (metadata.batch.num_requests, -1)
        found = batched_attention(
            q.reshape(*shape, *q.shape[1:]),
            keys.view(*shape, *keys.shape[1:]),
            values.view(*shape, *values.shape[1:]),
            mask,
            self.scale,
        )
        out.copy_(found.reshape(q.shape))

    def _read_ragged(
        self,
        metadata: AttentionMetadata,
        key_rows: torch.Tensor,
        band: torch.Tensor,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        start = 0
        for request, (q_len, kv_len) in enumerate(
            zip(metadata.batch.q_lens, metadata.batch.kv_lens, strict=True)
        ):
            mine = key_rows[request, :kv_len]
            keys, values = gather_kv(self.pool.kv, layer, torch.cat((mine, mine + self.pool.page_size)))
            out[start : start + q_len] = extend_attention(
                q[start : start + q_len], keys, values, band, self.scale
            )
            start += q_len
        out[start:].zero_()
