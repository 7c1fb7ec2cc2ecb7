"""The draft prefill over aux features as they land: a few rows between two steps of the batch.

A forward of few rows costs the host as much as one of many. Rows that land therefore wait for more. The last
rows of a prompt, as many as one forward takes, wait for the end of the hand-off.
"""

from collections.abc import Callable, Sequence

from ..engine.speculative.drafters.protocol import MAX_PREFILL_ROWS
from .queues import DecodeRoom, DecodeState
from .step_decoder import StepDecoder

WARM_ROWS_PER_STEP = MAX_PREFILL_ROWS
WORTH_ROWS = 128  # fewer rows wait for more to land


def prefill_drafts(decoder: StepDecoder, rooms: Sequence[DecodeRoom], clock: Callable[[], float]) -> bool:
    """Run the draft prefill over landed features of `rooms`, in order, at most WARM_ROWS_PER_STEP rows.

    Returns False if no rows were ready. `clock` returns monotonic seconds.
    """
    items, budget, started = [], WARM_ROWS_PER_STEP, clock()
    for room in rooms:
        # The last row needs the first output token, which comes with the end of the hand-off.
        ready = min(room.landed, room.request.num_tokens - 1)
        count = min(ready - room.warmed, budget)
        is_last_forward = room.request.num_prompt - room.warmed <= WARM_ROWS_PER_STEP
        is_worth = room.state is DecodeState.WARMING or (
            not is_last_forward and count >= min(WORTH_ROWS, budget)
        )
        if room.features is not None and count > 0 and is_worth:
            first = room.warmed - room.have
            rows = room.features.flatten(0, 1)[first : first + count]
            items.append((room, rows, room.warmed))
            budget -= count
    if items:
        decoder.draft_prefill_batch([(room.request, rows, start) for room, rows, start in items])
    for room, rows, _ in items:
        room.warmed += rows.shape[0]
        room.draft_prefill_s += (clock() - started) / len(items)
    return bool(items)
