"""Builds the batch of a prefill forward: a range of tokens of each prompt, behind its computed tokens."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from ..host_copy import arrays_to_device
from ..kv.page_table import page_array, pages_for, slot_array
from ..prompt_logprobs import num_scored
from ..request import Request
from .forward_batch import CaptureHidden, ForwardBatch


def extend_batch(
    ranges: Sequence[tuple[Request, int, int]],
    *,
    page_size: int,
    device: torch.device,
    capture: CaptureHidden = CaptureHidden.NULL,
) -> ForwardBatch:
    """The rows of tokens [start, end) of each request, in order.

    Logits are those of the last row of each range that ends its prompt, then of the scored rows (see
    `prompt_logprobs`).
    """
    rows = [end - start for _, start, end in ranges]
    starts = [0, *accumulate(rows)]
    final = [starts[i + 1] - 1 for i, (request, _, end) in enumerate(ranges) if end == request.num_prompt]
    scored = [starts[i] + row for i, part in enumerate(ranges) for row in range(num_scored(*part))]
    ids = [token for request, start, end in ranges for token in request.prompt_ids[start:end]]
    host = (
        np.array(ids, dtype=np.int64),
        np.concatenate([np.arange(start, end, dtype=np.int64) for _, start, end in ranges]),
        np.concatenate([slot_array(r.pages, start, end, page_size) for r, start, end in ranges]),
        page_array([r.pages[: pages_for(end, page_size)] for r, _, end in ranges]),
        np.array([*final, *scored], dtype=np.int64),
    )
    input_ids, positions, slots, page_table, logit_rows = arrays_to_device(host, device)
    return ForwardBatch(
        input_ids=input_ids,
        positions=positions,
        slots=slots,
        page_table=page_table,
        q_lens=rows,
        kv_lens=[end for _, _, end in ranges],
        capture_hidden=capture,
        logit_rows=logit_rows,
    )
