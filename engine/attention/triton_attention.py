"""Attention by kernels that read lengths and pages on the device.

On the CPU their torch references run.

Which kernel attends:
- up to MAX_UNIFORM_ROWS rows of each request, equally many: the kernel of decode steps, which splits a long
  context among programs;
- otherwise, on a device with bulk copies and shared memory for the tiles (sm_90), for heads that `can_attend`
  names: the context is copied from its pages into contiguous rows, layer by layer, and attended there, if the
  buffers hold it. On an H200 this is faster from 64 new rows on 4096 (50 us instead of 102) to 2048 on 30720
  (2.06 ms instead of 3.03). A layer with a window reads its pages: the copy would cost more than it reads;
- otherwise: the paged kernel.
"""

from functools import partial

import torch

from ...kernels.attention_form import PLAIN_FORM, AttentionForm
from ...kernels.context_attention import SHARED_BYTES, ContextKV, can_attend, context_attention
from ...kernels.extend_attention import paged_extend
from ...kernels.gather_context import ROW_ALIGNMENT, context_rows, gather_context
from ...kernels.kv_store import kv_rows
from ...kernels.ops import recorded_context_attention, recorded_gather_context, recorded_store_kv
from ...kernels.rotate_store import HeadNorms, rotate_store
from ...kernels.skinny_linear import shared_bytes
from ...kernels.verify_attention import paged_verify
from ..batch.forward_batch import ForwardBatch
from ..kv.pool import KVPool
from ..models.layers import Attend, Read
from ..prompt_budget import BUFFER_CAPABILITY, buffer_rows
from .backend import PagedAttention
from .metadata import AttentionMetadata
from .places import RequestPlaces


class TritonAttention(PagedAttention):
    """The attention backend of GPUs."""

    gathers = False

    def __init__(self, pool: KVPool, scale: float | None = None, *, max_context: int = 0) -> None:
        super().__init__(pool, scale, max_context=max_context)
        self._buffers = context_buffers(pool, max_context) if max_context and _copies_pay(pool) else None

    def beside(self, pool: KVPool) -> PagedAttention:
        """As `PagedAttention.beside`, with the same context buffers."""
        other = TritonAttention(pool, self.scale)
        other._buffers = self._buffers
        return other

    def copies(self, batch: ForwardBatch) -> bool:
        """As `PagedAttention.copies`, by the rule of this module."""
        return self._buffers is not None and context_rows(batch.kv_lens)[-1] <= self._buffers.keys.shape[0]

    @property
    def recordable_context(self) -> int:
        """As `AttentionBackend.recordable_context`: the rows of the context buffers."""
        return 0 if self._buffers is None else self._buffers.keys.shape[0]

    def recorded(self, places: RequestPlaces, slots: torch.Tensor) -> Attend:
        """As `AttentionBackend.recorded`: over copied context, whatever its length.

        The requests of `places` may have as many rows together as the buffers.
        """
        if self._buffers is None:
            return super().recorded(places, slots)
        return _CopiedContextAttend(self, self._buffers, places, kv_rows(slots, self.pool.kv))

    def _bind_rows(self, metadata: AttentionMetadata) -> Read:
        if metadata.uniform_rows:
            return partial(self._read_uniform, metadata)
        if metadata.kv_starts is not None and self._buffers is not None:
            return partial(self._read_copied, metadata, self._buffers, metadata.kv_starts)
        return partial(self._read_pages, metadata)

    def _read_uniform(
        self,
        metadata: AttentionMetadata,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
    ) -> None:
        grouped = q.reshape(metadata.batch.num_requests, metadata.uniform_rows, *q.shape[1:])
        pages, scale = metadata.batch.page_table, self.scale_of(form)
        found = paged_verify(grouped, self.pool.kv, layer, pages, metadata.kv_lens, scale, None, form)
        out.copy_(found.view(q.shape))

    def _read_copied(
        self,
        metadata: AttentionMetadata,
        buffers: ContextKV,
        kv_starts: torch.Tensor,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
    ) -> None:
        if form.window:
            self._read_pages(metadata, layer, q, out, form)
            return
        keys, values, lens = buffers.keys, buffers.values, metadata.kv_lens
        gather_context(self.pool.kv, layer, metadata.batch.page_table, kv_starts, lens, keys, values)
        longest = max(metadata.batch.kv_lens)
        scale = self.scale_of(form)
        context_attention(q, buffers, metadata.q_starts, kv_starts, lens, scale, out, longest, form)

    def _read_pages(
        self,
        metadata: AttentionMetadata,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
    ) -> None:
        batch = metadata.batch
        out[sum(batch.q_lens) :].zero_()
        paged_extend(
            q,
            self.pool.kv,
            layer,
            batch.page_table,
            metadata.q_starts,
            metadata.kv_lens,
            max(batch.q_lens, default=0),
            self.scale_of(form),
            out,
            form,
        )


class _CopiedContextAttend:
    """The attention of a full graph, a `RotatingAttend` over copied context. `rows`: where keys and values
    are stored.
    """

    def __init__(
        self, attention: TritonAttention, buffers: ContextKV, places: RequestPlaces, rows: torch.Tensor
    ) -> None:
        self._attention = attention
        self._kv = attention.pool.kv
        self._buffers = buffers
        self._places = places
        self._rows = rows

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm = PLAIN_FORM
    ) -> torch.Tensor:
        recorded_store_kv(self._kv, layer, self._rows, k, v)
        return self._read(layer, q, form)

    def rotate_attend(
        self,
        layer: int,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """As `RotatingAttend.rotate_attend`."""
        return self._read(layer, rotate_store(self._kv, layer, self._rows, heads, cos, sin, norms), form)

    def _read(self, layer: int, q: torch.Tensor, form: AttentionForm) -> torch.Tensor:
        places, scale = self._places, self._attention.scale_of(form)
        starts, lens, context = places.kv_starts, places.kv_lens, self._buffers
        recorded_gather_context(
            self._kv, layer, places.page_table, starts, lens, context.keys, context.values
        )
        return recorded_context_attention(
            q, context.keys, context.values, places.q_starts, starts, lens, scale, form
        )


def context_buffers(pool: KVPool, max_context: int) -> ContextKV:
    """Buffers for a context of `max_context` tokens, or of all tokens of `pool`, if those are fewer.

    All layers use them in turn.
    """
    shape = (buffer_rows(max_context, pool.num_slots, ROW_ALIGNMENT), *pool.layout.page_shape[3:])
    made = ContextKV(*(torch.zeros(shape, dtype=pool.row_dtype, device=pool.device) for _ in range(2)))
    if pool.device.type == "cuda":
        made.prepare()
    return made


def _copies_pay(pool: KVPool) -> bool:
    """Whether a copied context can be attended faster than its pages. A CPU only stands for a device."""
    if pool.device.type != "cuda":
        return True
    has_bulk_copies = torch.cuda.get_device_capability(pool.device) >= BUFFER_CAPABILITY
    has_room = shared_bytes(pool.device) >= SHARED_BYTES
    return has_bulk_copies and has_room and can_attend(pool.layout.page_shape[-1])
