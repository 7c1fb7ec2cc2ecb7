"""The attention plan of one forward: made once per batch on its final rows, checked by every layer.

Legend: T rows, B requests, Q rows per request, S context rows.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch

from ...kernels.gather_context import context_rows
from ..batch.forward_batch import ForwardBatch
from ..errors import LifecycleError
from ..host_copy import all_to_device

# Requests of equally many rows, up to this number, are attended as one padded batch. Longer ones are attended
# one by one.
MAX_UNIFORM_ROWS = 16

Contents: TypeAlias = tuple[tuple[int, ...], ...]  # rows and lengths of the requests, writes of the tensors


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The plan of one version of one batch.

    `contents`: a summary of the batch, to detect changes in place. `kv_lens` `[B]` and `q_starts` `[B+1]`,
    int64 on the device: context lengths, and the first row of each request, for paged kernels.
    `context_slots` `[B, S]` int64: the slot of each context row, 0 (the sink, which reads as zeros) beyond a
    request's length; S is 0 unless the backend gathers the context. `uniform_rows`: Q if every request has Q
    rows and no row is padding, else 0. `kv_starts` `[B+1]`, int64 on the device: the first row of each
    request in the backend's context buffers; None if the context is read from its pages. `unread`: the layer
    that only stores its keys and values, because nothing reads what its rows attend to; -1: none.
    """

    batch: ForwardBatch
    version: int
    contents: Contents
    num_rows: int
    uniform_rows: int
    kv_lens: torch.Tensor
    q_starts: torch.Tensor
    context_slots: torch.Tensor
    kv_starts: torch.Tensor | None = None
    unread: int = -1

    def check(self, num_rows: int) -> None:
        """Raises LifecycleError unless the batch is still the planned one and has `num_rows` rows."""
        if self.version != self.batch.version:
            raise LifecycleError(
                f"attention was planned for version {self.version} of the batch, which is now at version "
                f"{self.batch.version}; plan after the last change"
            )
        if self.contents != contents_of(self.batch):
            raise LifecycleError(
                f"version {self.version} of the batch was changed in place behind its plan; plan after the "
                "last change"
            )
        if self.num_rows != num_rows:
            raise LifecycleError(f"attention was planned for {self.num_rows} rows and got {num_rows}")


def contents_of(batch: ForwardBatch) -> Contents:
    """The host's lengths, and the write count of each tensor that attention reads."""
    tensors = (batch.positions, batch.slots, batch.page_table)
    written = tuple(tensor._version for tensor in tensors)
    return tuple(batch.q_lens), tuple(batch.kv_lens), written


def plan(
    batch: ForwardBatch, page_size: int, *, gathers: bool = True, copies: bool = False
) -> AttentionMetadata:
    """The plan of `batch` as it is now.

    Rows from sum(q_lens) on are padding, stored in the sink without attention.

    `gathers`: whether to compute `context_slots`. `copies`: whether to compute `kv_starts`.
    """
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
    first = batch.q_lens[0] if batch.q_lens else 0
    is_uniform = (
        first <= MAX_UNIFORM_ROWS and all(q == first for q in batch.q_lens) and real_rows == batch.num_tokens
    )
    numbers = [batch.kv_lens, [0, *accumulate(batch.q_lens)]] + [context_rows(batch.kv_lens)] * copies
    host = [torch.tensor(values, dtype=torch.int64) for values in numbers]
    lengths, q_starts, *kv_starts = all_to_device(host, device)
    return AttentionMetadata(
        batch=batch,
        version=batch.version,
        contents=contents_of(batch),
        num_rows=batch.num_tokens,
        uniform_rows=first if is_uniform else 0,
        kv_lens=lengths,
        q_starts=q_starts,
        kv_starts=kv_starts[0] if kv_starts else None,
        context_slots=context_slots(pages, lengths, longest if gathers else 0, page_size),
    )


def context_slots(pages: torch.Tensor, lengths: torch.Tensor, longest: int, page_size: int) -> torch.Tensor:
    """The slots `[B, longest]` of the first `longest` rows of requests with `pages` `[B, P]`; 0 from
    `lengths` `[B]` on.
    """
    columns = torch.arange(longest, device=pages.device)
    used = pages[:, : -(-longest // page_size)]
    slots = (used[:, :, None] * page_size + torch.arange(page_size, device=pages.device)).flatten(1)[
        :, :longest
    ]
    return slots.masked_fill(columns >= lengths[:, None], 0)
