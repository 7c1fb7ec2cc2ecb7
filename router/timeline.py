"""Where a request's time went, as the client may see it."""

from msgspec import Struct

from ..cluster.messages import DecodeTimeline
from ..cluster.transports import SHM, ZMQ_BLOCKS
from .rooms import Room
from .trace import AttemptLog, Trace


class Timeline(Struct, frozen=True, kw_only=True):
    """Times in milliseconds from the moment the request was read; null where it is not known.

    What workers spent is summed over all attempts that said it: a worker that died took its account with it. The
    instances are those of the last attempt.
    """

    queue_ms: float
    tokenize_ms: float
    prefill_queue_ms: float | None = None
    prefill_ms: float | None = None
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    handoff_ms: float | None = None
    handoff_bytes: int | None = None
    handoff_blocks: int | None = None
    handoff_transport: str | None = None
    have_tokens: int | None = None
    draft_prefill_ms: float | None = None
    decode_queue_ms: float | None = None
    decode_ms: float | None = None
    verify_steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    accept_length: float | None = None
    e2e_ms: float
    attempts: int
    prefill_instance: str | None = None
    decode_instance: str | None = None
    local_prefill: bool | None = None  # whether decode computed the prompt of the last attempt
    attempt_log: list[AttemptLog] = []


def timeline_of(
    room: Room, *, arrived: float, tokenize_s: float, queued_s: float, now: float, trace: Trace | None = None
) -> Timeline:
    """The timeline of a room as far as it is known at `now`; times are monotonic seconds."""
    stamps, prefill, decode = room.stamps, room.prefill_timeline, room.decode_timeline
    ended = stamps.ended if stamps.ended is not None else now
    return Timeline(
        queue_ms=_ms(queued_s),
        tokenize_ms=_ms(tokenize_s),
        prefill_queue_ms=round(prefill.queue_ms, 3) if prefill else None,
        prefill_ms=round(prefill.prefill_ms, 3) if prefill else None,
        cached_tokens=prefill.cached_tokens if prefill else None,
        ttft_ms=_ms(stamps.first_token - arrived) if stamps.first_token is not None else None,
        tpot_ms=_tpot_ms(room),
        handoff_ms=round(decode.handoff_ms, 3) if decode else None,
        handoff_bytes=decode.handoff_bytes if decode else None,
        handoff_blocks=decode.handoff_blocks if decode else None,
        handoff_transport=_transport(decode) if decode else None,
        have_tokens=decode.have_tokens if decode else None,
        draft_prefill_ms=round(decode.draft_prefill_ms, 3) if decode else None,
        decode_queue_ms=round(decode.queue_ms, 3) if decode else None,
        decode_ms=round(decode.decode_ms, 3) if decode else None,
        verify_steps=decode.verify_steps if decode else None,
        drafted=decode.drafted_tokens if decode else None,
        accepted=decode.accepted_tokens if decode else None,
        accept_length=_accept_length(room),
        e2e_ms=_ms(ended - arrived),
        attempts=room.epoch + 1,
        prefill_instance=room.pair.prefill if room.pair else None,
        decode_instance=room.pair.decode if room.pair else None,
        local_prefill=room.pair.is_local if room.pair else None,
        attempt_log=[note.log(arrived) for note in trace.attempts] if trace is not None else [],
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _tpot_ms(room: Room) -> float | None:
    """Mean time per token after the first."""
    first, last = room.stamps.first_token, room.stamps.last_token
    if first is None or last is None or room.num_output < 2:
        return None
    return _ms((last - first) / (room.num_output - 1))


def _transport(decode: DecodeTimeline) -> str | None:
    """How the blocks came; "shm+zmq_blocks" where shared memory failed on the way, None where nothing was pulled."""
    if not decode.handoff_blocks:
        return None
    if not decode.handoff_shm_blocks:
        return ZMQ_BLOCKS
    return SHM if decode.handoff_shm_blocks == decode.handoff_blocks else f"{SHM}+{ZMQ_BLOCKS}"


def _accept_length(room: Room) -> float | None:
    """Tokens committed per verify: the accepted drafts and the target's own.

    Not the output over the steps: the last verify of a request may commit more than the client gets.
    """
    decode = room.decode_timeline
    return round(1 + decode.accepted_tokens / decode.verify_steps, 4) if decode and decode.verify_steps else None
