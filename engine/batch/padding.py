"""Adds idle rows to a batch: a kernel's tile, or a peer in lockstep, may need more rows than the batch has.

Padding comes before the choice of the path and the attention plan, because both count rows. Legend as in
`forward_batch`.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from .forward_batch import CaptureHidden, ForwardBatch


def pad_rows(batch: ForwardBatch, multiple: int) -> ForwardBatch:
    """`batch` with idle rows appended up to a multiple of `multiple`; `batch` itself if none are missing.

    Idle rows lie in the sink and attend to nothing. An empty batch gets `multiple` rows, unless that is 1.
    The batch's decision stays; metadata planned before becomes invalid.
    """
    rows = batch.num_tokens
    if multiple == 1 or (rows and rows % multiple == 0):
        return batch
    return pad_to(batch, max(-(-rows // multiple), 1) * multiple)


def pad_to(batch: ForwardBatch, end: int) -> ForwardBatch:
    """`batch` with idle rows appended up to `end` rows, as `pad_rows`."""
    assert end >= batch.num_tokens, (end, batch.num_tokens)
    if end == batch.num_tokens:
        return batch
    return replace(
        batch,
        input_ids=_grown(batch.input_ids, end),
        positions=_grown(batch.positions, end),
        slots=_grown(batch.slots, end),
        features=None if batch.features is None else _grown(batch.features, end),
        input_embeds=None if batch.input_embeds is None else _grown(batch.input_embeds, end),
    )


def idle_batch(device: torch.device, capture: CaptureHidden) -> ForwardBatch:
    """A batch of a target without rows, of a rank that only takes part in the forward of others."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return ForwardBatch(
        input_ids=nothing,
        positions=nothing,
        slots=nothing,
        page_table=torch.zeros((0, 1), dtype=torch.int64, device=device),
        q_lens=[],
        kv_lens=[],
        capture_hidden=capture,
        logit_rows=nothing,
    )


def _grown(tensor: torch.Tensor, end: int) -> torch.Tensor:
    """`tensor` with zero rows appended, `end` rows in all."""
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, end - tensor.shape[0]))
