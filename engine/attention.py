"""Where the rows of a forward are stored and what they attend to: planned once per forward, bound to a pool, then
called by every layer. Legend: T rows, B requests, Q rows per request, S context rows, N/K/D heads as in `layers`.
"""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TypeAlias

import torch

from ..kernels.extend_attention import paged_extend
from ..kernels.kv_store import kv_rows, store_kv
from ..kernels.paged_attention import QUERY_BLOCK, batched_attention, causal_band, extend_attention, gather_kv
from ..kernels.verify_attention import paged_verify, visible_columns
from .batch.forward_batch import ForwardBatch
from .errors import LifecycleError
from .host_copy import to_device
from .kv.pool import KVPool
from .models.layers import Attend

# Requests of equally many rows, up to this many (a tree: any number), are attended as one padded batch; longer ones one
# by one.
MAX_UNIFORM_ROWS = 16

Contents: TypeAlias = tuple[tuple[int, ...], ...]  # rows and lengths of the requests, writes of the tensors


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The plan of one version of one batch. `contents`: what the batch held, to see what was changed in place.

    `kv_lens` `[B]` and `q_starts` `[B+1]`, int64 on the device, are what the kernels read: lengths, and the first row of
    each request. `context_slots` `[B, S]` int64 is what the CPU reads instead (S is 0 elsewhere): the slot of each
    context row, 0 (the sink, which reads as zeros) beyond a request's own length. `uniform_rows`: Q when every request
    has that many rows and no row is padding, else 0.
    """

    batch: ForwardBatch
    version: int
    contents: Contents
    num_rows: int
    uniform_rows: int
    kv_lens: torch.Tensor
    q_starts: torch.Tensor
    context_slots: torch.Tensor

    def check(self, num_rows: int) -> None:
        """LifecycleError unless the batch is still the one planned and has `num_rows` rows."""
        if self.version != self.batch.version:
            raise LifecycleError(
                f"attention was planned for version {self.version} of the batch, which is now at version "
                f"{self.batch.version}; plan after the last change"
            )
        if self.contents != contents_of(self.batch):
            raise LifecycleError(
                f"version {self.version} of the batch was changed in place behind its plan; plan after the last change"
            )
        if self.num_rows != num_rows:
            raise LifecycleError(f"attention was planned for {self.num_rows} rows and got {num_rows}")


def contents_of(batch: ForwardBatch) -> Contents:
    """The host's lengths, and how often each tensor that attention reads was written."""
    tensors = (batch.positions, batch.slots, batch.page_table, batch.tree_mask)
    written = tuple(0 if tensor is None else tensor._version for tensor in tensors)
    return tuple(batch.q_lens), tuple(batch.kv_lens), written


def plan(batch: ForwardBatch, page_size: int) -> AttentionMetadata:
    """Plan `batch` as it is now. Rows behind sum(q_lens) are padding: stored in the sink, attending to nothing."""
    real_rows, longest = sum(batch.q_lens), max(batch.kv_lens, default=0)
    pages, device = batch.page_table, batch.page_table.device
    assert real_rows <= batch.num_tokens, (real_rows, batch.num_tokens)
    assert pages.shape[0] == len(batch.kv_lens) == batch.num_requests, (
        pages.shape,
        batch.kv_lens,
        batch.q_lens,
    )
    assert longest <= pages.shape[1] * page_size, (longest, pages.shape, page_size)
    assert all(0 < q <= kv for q, kv in zip(batch.q_lens, batch.kv_lens, strict=True)), (
        batch.q_lens,
        batch.kv_lens,
    )
    lengths = to_device(torch.tensor(batch.kv_lens, dtype=torch.int64), device)
    first = batch.q_lens[0] if batch.q_lens else 0
    is_short = first <= MAX_UNIFORM_ROWS or batch.tree_mask is not None
    is_uniform = all(q == first for q in batch.q_lens) and is_short and real_rows == batch.num_tokens
    assert is_uniform or batch.tree_mask is None, "trees have equally many rows per request and no padding"
    return AttentionMetadata(
        batch=batch,
        version=batch.version,
        contents=contents_of(batch),
        num_rows=batch.num_tokens,
        uniform_rows=first if is_uniform else 0,
        kv_lens=lengths,
        q_starts=to_device(torch.tensor([0, *accumulate(batch.q_lens)], dtype=torch.int64), device),
        context_slots=_context_slots(pages, lengths, longest if device.type == "cpu" else 0, page_size),
    )


def _context_slots(pages: torch.Tensor, lengths: torch.Tensor, longest: int, page_size: int) -> torch.Tensor:
    columns = torch.arange(longest, device=pages.device)
    used = pages[:, : -(-longest // page_size)]
    slots = (used[:, :, None] * page_size + torch.arange(page_size, device=pages.device)).flatten(1)[
        :, :longest
    ]
    return slots.masked_fill(columns >= lengths[:, None], 0)


class PagedAttention:
    """Attention over a pool; `scale` of the scores defaults to the layout's.

    `uses_kernels`: by the paged kernels, which read pages and lengths themselves, as CUDA does; by default the CPU
    gathers the context once for all layers.
    """

    def __init__(self, pool: KVPool, scale: float | None = None, *, uses_kernels: bool | None = None) -> None:
        self.pool = pool
        self.uses_kernels = pool.device.type == "cuda" if uses_kernels is None else uses_kernels
        self.scale = pool.layout.scale if scale is None else scale

    def bind(self, metadata: AttentionMetadata) -> Attend:
        """The function that each layer of this forward calls: it stores k and v, then attends.

        Row numbers and masks are the same for every layer and are made here, once. Raises LifecycleError when the
        batch changed after it was planned, here and at each call.
        """
        metadata.check(metadata.batch.num_tokens)
        store_rows = kv_rows(metadata.batch.slots, self.pool.kv)
        if metadata.num_rows == 0:
            return partial(self._attend_nothing, metadata)
        if self.uses_kernels:
            return partial(self._attend_paged, metadata, store_rows)
        key_rows = kv_rows(metadata.context_slots, self.pool.kv)
        if metadata.uniform_rows:
            rows = torch.cat((key_rows.flatten(), key_rows.flatten() + self.pool.page_size))
            return partial(self._attend_uniform, metadata, store_rows, rows, self._uniform_mask(metadata))
        return partial(self._attend_ragged, metadata, store_rows, key_rows, self._band(metadata))

    def attend(
        self, metadata: AttentionMetadata, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """One layer alone: `q` `[T, N, D]`, `k`, `v` `[T, K, D]` -> `[T, N, D]`."""
        return self.bind(metadata)(layer, q, k, v)

    def _uniform_mask(self, metadata: AttentionMetadata) -> torch.Tensor:
        """`[B, 1, Q, S]`, added to the scores: 0 where a row sees a context row, -inf elsewhere."""
        rows, length = metadata.uniform_rows, metadata.context_slots.shape[1]
        visible = visible_columns(metadata.kv_lens, rows, length, metadata.batch.tree_mask)
        mask = torch.zeros(visible.shape, dtype=self.pool.dtype, device=visible.device)
        return mask.masked_fill_(~visible, float("-inf")).unsqueeze(1)

    def _band(self, metadata: AttentionMetadata) -> torch.Tensor:
        batch = metadata.batch
        block = min(max(batch.q_lens, default=0), QUERY_BLOCK)
        return causal_band(
            max(batch.kv_lens, default=0), block, self.pool.dtype, metadata.context_slots.device
        )

    def _attend_nothing(
        self, metadata: AttentionMetadata, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        metadata.check(q.shape[0])
        return torch.empty_like(q)

    def _attend_paged(
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
            lens, mask = metadata.kv_lens, batch.tree_mask
            return paged_verify(grouped, kv, layer, pages, lens, self.scale, mask).view(q.shape)
        longest = max(batch.q_lens, default=0)
        return paged_extend(q, kv, layer, pages, metadata.q_starts, metadata.kv_lens, longest, self.scale)

    def _attend_uniform(
        self,
        metadata: AttentionMetadata,
        store_rows: torch.Tensor,
        rows: torch.Tensor,
        mask: torch.Tensor,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        metadata.check(q.shape[0])
        store_kv(self.pool.kv, layer, store_rows, k, v)
        keys, values = gather_kv(self.pool.kv, layer, rows)
        shape = (metadata.batch.num_requests, -1)
        out = batched_attention(
            q.reshape(*shape, *q.shape[1:]),
            keys.view(*shape, *k.shape[1:]),
            values.view(*shape, *v.shape[1:]),
            mask,
            self.scale,
        )
        return out.reshape(q.shape)

    def _attend_ragged(
        self,
        metadata: AttentionMetadata,
        store_rows: torch.Tensor,
        key_rows: torch.Tensor,
        band: torch.Tensor,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        metadata.check(q.shape[0])
        store_kv(self.pool.kv, layer, store_rows, k, v)
        out = torch.zeros_like(q)
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
        return out
