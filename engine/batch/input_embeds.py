"""Embeddings of a caller among those that a model looks up. Legend: T rows of a batch, H hidden size."""

from collections.abc import Sequence

import torch

from ..host_copy import to_device
from ..models.interface import CausalLM
from ..request import Request
from .forward_batch import ForwardBatch


def place_rows(looked_up: torch.Tensor, given: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """`looked_up` `[T, H]` with rows replaced in place. `given`: first row, and rows `[n, H]` on the host."""
    for first, rows in given:
        looked_up[first : first + len(rows)] = to_device(rows.to(looked_up.dtype), looked_up.device)
    return looked_up


@torch.no_grad()
def set_input_embeds(
    batch: ForwardBatch, ranges: Sequence[tuple[Request, int, int]], model: CausalLM
) -> None:
    """Sets `batch.input_embeds` if a row of `ranges`, of which `batch` was made, has an embedding of its own.

    The other rows get the embeddings of their ids.
    """
    given, row = [], 0
    for request, start, end in ranges:
        if (rows := request.embeds_of(start, end)) is not None:
            given.append((row, rows))
        row += end - start
    if given:
        batch.input_embeds = place_rows(model.embed(batch.input_ids), given)
