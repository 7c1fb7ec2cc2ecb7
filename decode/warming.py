"""The draft prefill of rooms whose features land, some rows between two steps of the batch."""

from collections.abc import Callable, Sequence

from ..engine.speculative.drafters.protocol import MAX_PREFILL_ROWS
from .queues import Room, RoomState
from .step_decoder import StepDecoder

WARM_ROWS_PER_STEP = MAX_PREFILL_ROWS
WORTH_ROWS = 128  # fewer wait for more to land: a forward of few rows costs one of many


def warm(decoder: StepDecoder, rooms: Sequence[Room], clock: Callable[[], float]) -> bool:
    """Run the draft prefill over features of `rooms` that landed, those of the first first; False: nothing to do."""
    items, budget, started = [], WARM_ROWS_PER_STEP, clock()
    for room in rooms:
        # The last row needs the first output token, which comes with the end of the hand-off.
        ready = min(room.landed, room.request.num_tokens - 1)
        count = min(ready - room.warmed, budget)
        is_worth = room.state is RoomState.WARMING or count >= min(WORTH_ROWS, budget)
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
