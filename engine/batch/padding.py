"""Adds idle rows to a batch: a kernel's tile, or a peer in lockstep, may need more rows than the batch has.

Padding comes before the choice of the path and the attention plan, because both count rows. Legend as in
`forward_batch`.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from .forward_batch import ForwardBatch


def pad_rows(batch: ForwardBatch, multiple: int) -> ForwardBatch:
    """`batch` with idle rows appended up to a multiple of `multiple`; `batch` itself if none are missing.

    Idle rows lie in the sink and attend to nothing. An empty batch gets `multiple` rows, unless that is 1.
    The batch's decision stays; metadata planned before becomes invalid. In a batch of trees, idle requests of
    equally many rows take the place of single rows.
    """
    rows = batch.num_tokens
    if multiple == 1 or (rows and rows % multiple == 0):
        return batch
    if batch.tree_mask is not None and batch.num_requests:
        return _pad_requests(batch, math.lcm(multiple, batch.q_lens[0]), batch.tree_mask)
    return replace(_longer(batch, max(-(-rows // multiple), 1) * multiple), tree_mask=None)


def _pad_requests(batch: ForwardBatch, multiple: int, mask: torch.Tensor) -> ForwardBatch:
    """Adds idle requests. Each of their rows sees the whole sink, which reads as zeros."""
    num_rows, width = mask.shape[1:]
    end = -(-batch.num_tokens // multiple) * multiple
    count = end // num_rows - batch.num_requests
    return replace(
        _longer(batch, end),
        page_table=_grown(batch.page_table, batch.num_requests + count),
        q_lens=batch.q_lens + [num_rows] * count,
        kv_lens=batch.kv_lens + [width] * count,
        tree_mask=torch.cat((mask, mask.new_ones((count, num_rows, width)))),
    )


def _longer(batch: ForwardBatch, end: int) -> ForwardBatch:
    return replace(
        batch,
        input_ids=_grown(batch.input_ids, end),
        positions=_grown(batch.positions, end),
        slots=_grown(batch.slots, end),
        features=None if batch.features is None else _grown(batch.features, end),
        input_embeds=None if batch.input_embeds is None else _grown(batch.input_embeds, end),
    )


def _grown(tensor: torch.Tensor, end: int) -> torch.Tensor:
    """`tensor` with zero rows appended, `end` rows in all."""
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, end - tensor.shape[0]))
