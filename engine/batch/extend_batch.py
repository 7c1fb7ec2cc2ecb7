"""Builds the batch of a prefill forward: a range of tokens of each prompt, behind its computed tokens."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from ..host_copy import arrays_to_device
from ..kv.page_table import pages_for, row_arrays
from ..parallel.plan_messages import PromptPart, PromptPlan
from ..prompt_logprobs import num_scored
from ..request import Request
from .forward_batch import CaptureHidden, ForwardBatch


def extend_plan(
    ranges: Sequence[tuple[Request, int, int]], *, page_size: int, has_features: bool = False
) -> PromptPlan:
    """The plan of a forward over tokens [start, end) of each request, in order.

    Logits are those of the last row of each range that ends its prompt, then of the scored rows (see
    `prompt_logprobs`).
    """
    starts = [0, *accumulate(end - start for _, start, end in ranges)]
    final = [starts[i + 1] - 1 for i, (request, _, end) in enumerate(ranges) if end == request.num_prompt]
    scored = [starts[i] + row for i, part in enumerate(ranges) for row in range(num_scored(*part))]
    parts = [
        PromptPart(
            ids=list(request.prompt_ids[start:end]),
            start=start,
            pages=request.pages[: pages_for(end, page_size)],
        )
        for request, start, end in ranges
    ]
    return PromptPlan(parts=parts, logit_rows=[*final, *scored], has_features=has_features)


def planned_batch(plan: PromptPlan, *, page_size: int, device: torch.device) -> ForwardBatch:
    """The batch of `plan`."""
    parts = plan.parts
    ends = [part.start + len(part.ids) for part in parts]
    spans = [(part.pages, part.start, end) for part, end in zip(parts, ends, strict=True)]
    host = (
        np.array([token for part in parts for token in part.ids], dtype=np.int64),
        *row_arrays(spans, page_size),
        np.array(plan.logit_rows, dtype=np.int64),
    )
    input_ids, positions, slots, page_table, logit_rows = arrays_to_device(host, device)
    return ForwardBatch(
        input_ids=input_ids,
        positions=positions,
        slots=slots,
        page_table=page_table,
        q_lens=[len(part.ids) for part in parts],
        kv_lens=ends,
        capture_hidden=CaptureHidden.FULL if plan.has_features else CaptureHidden.NULL,
        logit_rows=logit_rows,
    )


def written_pages(plan: PromptPlan, page_size: int) -> list[int]:
    """The pages that the forward of `plan` writes."""
    return [page for part in plan.parts for page in part.pages[part.start // page_size :]]


def extend_batch(
    ranges: Sequence[tuple[Request, int, int]],
    *,
    page_size: int,
    device: torch.device,
    capture: CaptureHidden = CaptureHidden.NULL,
) -> ForwardBatch:
    """The batch of `extend_plan`, with hidden rows as `capture` says."""
    plan = extend_plan(ranges, page_size=page_size)
    batch = planned_batch(plan, page_size=page_size, device=device)
    batch.capture_hidden = capture
    return batch
