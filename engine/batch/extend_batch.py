"""Builds the batch of a prefill forward: a range of tokens of each prompt, behind its computed tokens."""

from collections.abc import Sequence

import torch

from ..host_copy import all_to_device, int64_tensor
from ..kv.page_table import build_page_table, pages_for, slots_for
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
    ends = torch.tensor(rows, dtype=torch.int64).cumsum(0) - 1
    starts = [0, *ends.tolist()]
    scored = [starts[i] + bool(i) + row for i, part in enumerate(ranges) for row in range(num_scored(*part))]
    final = [i for i, (request, _, end) in enumerate(ranges) if end == request.num_prompt]
    ids = [token for request, start, end in ranges for token in request.prompt_ids[start:end]]
    host = (
        int64_tensor(ids),
        torch.cat([torch.arange(start, end) for _, start, end in ranges]),
        torch.cat([slots_for(r.pages, start, end, page_size) for r, start, end in ranges]),
        build_page_table([r.pages[: pages_for(end, page_size)] for r, _, end in ranges]),
        torch.cat((ends[final], torch.tensor(scored, dtype=torch.int64))),
    )
    input_ids, positions, slots, page_table, logit_rows = all_to_device(host, device)
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
