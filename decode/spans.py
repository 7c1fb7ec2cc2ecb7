"""The spans of a decode server: of each room that left, its hand-off, or the prompt computed here, and its decoding."""

from collections.abc import Callable

from ..cluster.telemetry.tracing import Attribute, Span, Tracing
from .queues import Room


class DecodeSpans:
    """Takes every room that leaves the queues. `clock` tells monotonic seconds."""

    def __init__(self, tracing: Tracing, clock: Callable[[], float]) -> None:
        self._tracing, self._clock = tracing, clock

    def left(self, room: Room) -> None:
        """One room is gone."""
        if room.trace:
            for span in spans_of(room, self._clock()):
                self._tracing.record(span)


def spans_of(room: Room, now: float) -> list[Span]:
    """What the room came to: `hand-off` (or `prefill`), and `decode` where it joined the batch."""
    request = room.request
    error = "" if request.is_finished else "cancelled" if room.gone_epoch >= 0 else "failed"
    who: dict[str, Attribute] = {"baton.room": request.room, "baton.epoch": request.epoch}
    ended = room.prefill_ended if room.is_local else room.landed_at
    first = Span(
        name="prefill" if room.is_local else "hand-off",
        parent=room.trace,
        start=room.arrived,
        end=ended or now,
        attributes=who | (_local(room) if room.is_local else _handoff(room)),
        error="" if ended else error,
    )
    if not room.started_at:
        return [first]
    decode = Span(
        name="decode",
        parent=room.trace,
        start=room.started_at,
        end=now,
        attributes=who
        | {
            "baton.output_tokens": request.num_output,
            "baton.verify_steps": room.verify_steps,
            "baton.drafted_tokens": room.drafted,
            "baton.accepted_tokens": room.accepted,
            "baton.draft_prefill_ms": room.draft_prefill_s * 1000,
        },
        error=error,
    )
    return [first, decode]


def _handoff(room: Room) -> dict[str, Attribute]:
    return {
        "baton.handoff_ms": room.handoff_s * 1000,
        "baton.handoff_bytes": room.handoff_bytes,
        "baton.handoff_blocks": room.handoff_blocks,
        "baton.handoff_shm_blocks": room.handoff_shm_blocks,
        "baton.have_tokens": room.have,
    }


def _local(room: Room) -> dict[str, Attribute]:
    return {
        "baton.prompt_tokens": room.request.num_prompt,
        "baton.cached_tokens": room.have,
        "baton.chunks": room.chunks,
    }
