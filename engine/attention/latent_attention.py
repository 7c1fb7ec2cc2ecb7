"""Attention over pools of latents, on CPUs and GPUs.

A forward attends absorbed or expanded, as is cheaper for its lengths; see `kernels.expanded_attention`. The
keys and values of the whole context are made for as many heads at once as `EXPANDED_BYTES` holds.
"""

from functools import partial

import torch

from ...kernels.attention_form import PLAIN_FORM, AttentionForm
from ...kernels.expanded_attention import HeadSizes, expanded_attention, is_expansion_cheaper
from ...kernels.latent_attention import absorb, latent_extend, latent_verify, project_values
from ...kernels.latent_store import gather_latents, latent_slots, store_latent
from ..batch.forward_batch import ForwardBatch
from ..host_copy import to_device
from ..kv.layouts import MLALayout
from ..kv.pool import KVPool
from ..models.layers import Read
from .backend import PagedAttention
from .metadata import AttentionMetadata

EXPANDED_BYTES = 256 << 20


class LatentAttention(PagedAttention):
    """The attention backend of pools with an MLALayout."""

    gathers = False

    def __init__(self, pool: KVPool, scale: float | None = None, *, max_context: int = 0) -> None:
        super().__init__(pool, scale, max_context=max_context)
        assert isinstance(pool.layout, MLALayout), pool.layout
        self.layout = pool.layout

    def _bind_rows(self, metadata: AttentionMetadata) -> Read:
        return partial(self._read, metadata, {})

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
        """Stores the latents `k` and attends with the projection `v`, see `models.layers.Attend`."""
        metadata.check(q.shape[0])
        value_size = v.shape[1] - (q.shape[2] - self.layout.rope_size)
        out = torch.empty(*q.shape[:2], value_size, dtype=q.dtype, device=q.device)
        if metadata.num_rows:
            store_latent(self.pool.kv, layer, store_rows, k)
        read(layer, q, out, v)
        return out

    def _read(
        self,
        metadata: AttentionMetadata,
        context: dict[str, torch.Tensor],
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        up: torch.Tensor,
    ) -> None:
        """`context` keeps what all layers of the forward share."""
        batch, layout = metadata.batch, self.layout
        rows = sum(batch.q_lens)
        sizes = HeadSizes(q.shape[2] - layout.rope_size, layout.rope_size, out.shape[2], layout.rank)
        if is_expansion_cheaper(batch.q_lens, batch.kv_lens, sizes):
            self._read_expanded(metadata, context, layer, q, out, up)
        else:
            out.copy_(
                project_values(
                    self._read_absorbed(metadata, layer, absorb(q, up, sizes.rope)), up, sizes.value
                )
            )
        out[rows:].zero_()

    def _read_absorbed(self, metadata: AttentionMetadata, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Queries of latents `[T, N, R+P]` -> weighted sums of latents `[T, N, R]`."""
        batch, kv, rank = metadata.batch, self.pool.kv, self.layout.rank
        if metadata.uniform_rows:
            grouped = q.view(batch.num_requests, metadata.uniform_rows, *q.shape[1:])
            found = latent_verify(grouped, kv, layer, batch.page_table, metadata.kv_lens, self.scale, rank)
            return found.flatten(0, 1)
        longest = max(batch.q_lens, default=0)
        return latent_extend(
            q, kv, layer, batch.page_table, metadata.q_starts, metadata.kv_lens, longest, self.scale, rank
        )

    def _read_expanded(
        self,
        metadata: AttentionMetadata,
        context: dict[str, torch.Tensor],
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        up: torch.Tensor,
    ) -> None:
        if not context:
            context.update(self._context_rows(metadata.batch))
        rank, longest = self.layout.rank, max(metadata.batch.q_lens)
        latents = gather_latents(self.pool.kv, layer, context["rows"])
        head_bytes = latents.shape[0] * up.shape[1] * latents.element_size()
        step = max(1, min(up.shape[0], EXPANDED_BYTES // max(head_bytes, 1)))
        for first in range(0, up.shape[0], step):
            heads = slice(first, first + step)
            made = torch.mm(latents[:, :rank], up[heads].flatten(0, 1).t())
            expanded_attention(
                q[:, heads],
                made.view(latents.shape[0], -1, up.shape[1]),
                latents[:, rank:],
                metadata.q_starts,
                context["starts"],
                metadata.kv_lens,
                longest,
                self.scale,
                out[:, heads],
            )

    def _context_rows(self, batch: ForwardBatch) -> dict[str, torch.Tensor]:
        """The pool's rows of the context of all requests one behind the other, and where each begins."""
        slots = latent_slots(batch.page_table, self.pool.kv)
        rows = [slots[request, :length] for request, length in enumerate(batch.kv_lens)]
        starts = torch.tensor([0, *batch.kv_lens], dtype=torch.int64).cumsum(0)
        return {"rows": torch.cat(rows), "starts": to_device(starts, self.pool.device)}
