"""The trace spans of a decode worker: the hand-off of a room or its local prefill, then its decoding."""

from ..cluster.telemetry.tracing import Attribute, Span
from ..worker.spans import attempt_attributes, span_error
from .queues import DecodeRoom


def decode_spans(room: DecodeRoom, now: float) -> list[Span]:
    """`hand-off` (or `prefill`), and `decode` where the room joined the batch.

    Times are monotonic seconds.
    """
    error = span_error(room, is_complete=room.request.is_finished)
    ended = room.prefill_ended if room.is_local else room.landed_at
    first = Span(
        name="prefill" if room.is_local else "hand-off",
        parent=room.trace,
        start=room.arrived,
        end=ended or now,
        attributes=attempt_attributes(room) | (_local(room) if room.is_local else _handoff(room)),
        error="" if ended else error,
    )
    if not room.started_at:
        return [first]
    decode = Span(
        name="decode",
        parent=room.trace,
        start=room.started_at,
        end=now,
        attributes=attempt_attributes(room)
        | {
            "baton.output_tokens": room.request.num_output,
            "baton.verify_steps": room.verify_steps,
            "baton.drafted_tokens": room.drafted,
            "baton.accepted_tokens": room.accepted,
            "baton.draft_prefill_ms": room.draft_prefill_s * 1000,
        },
        error=error,
    )
    return [first, decode]


def _handoff(room: DecodeRoom) -> dict[str, Attribute]:
    return {
        "baton.handoff_ms": room.handoff_s * 1000,
        "baton.handoff_bytes": room.handoff_bytes,
        "baton.handoff_blocks": room.handoff_blocks,
        "baton.handoff_shm_blocks": room.handoff_shm_blocks,
        "baton.handoff_device_blocks": room.handoff_device_blocks,
        "baton.handoff_nixl_blocks": room.handoff_nixl_blocks,
        "baton.have_tokens": room.have,
    }


def _local(room: DecodeRoom) -> dict[str, Attribute]:
    return {
        "baton.prompt_tokens": room.request.num_prompt,
        "baton.cached_tokens": room.have,
        "baton.chunks": room.chunks,
    }
