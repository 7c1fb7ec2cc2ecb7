"""The timeline of a request, as clients and operators see it."""

from msgspec import Struct

from ...cluster.net.transport_names import path_taken
from ...cluster.protocol.messages import DecodeTimeline, PrefillTimeline
from .attempt_log import AttemptLog, AttemptTrace
from .effects import Pair
from .room import Room, Stamps


class Timeline(Struct, frozen=True, kw_only=True):
    """Times in milliseconds since the request was read; null where unknown.

    Times spent by workers are sums over all attempts that reported; a dead worker's report is lost. The
    instances are those of the last attempt.
    """

    queue_ms: float
    tokenize_ms: float
    prefill_queue_ms: float | None = None
    prefill_ms: float | None = None
    cached_tokens: int | None = None
    pulled_tokens: int | None = None
    pull_ms: float | None = None
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


class Account(Struct, frozen=True, kw_only=True):
    """A snapshot of a room at `now`, without its tokens. A timeline is computed from it on demand."""

    room: str
    phase: str
    num_prompt: int
    num_output: int
    cached_tokens: int
    epoch: int
    pair: Pair | None
    stamps: Stamps
    prefill: PrefillTimeline | None
    decode: DecodeTimeline | None
    arrived: float
    tokenize_s: float
    queued_s: float
    now: float
    trace: AttemptTrace

    def timeline(self) -> Timeline:
        """The timeline, as far as it is known."""
        stamps, prefill, decode, pair = self.stamps, self.prefill, self.decode, self.pair
        ended = stamps.ended if stamps.ended is not None else self.now
        return Timeline(
            queue_ms=_ms(self.queued_s),
            tokenize_ms=_ms(self.tokenize_s),
            prefill_queue_ms=round(prefill.queue_ms, 3) if prefill else None,
            prefill_ms=round(prefill.prefill_ms, 3) if prefill else None,
            cached_tokens=prefill.cached_tokens if prefill else None,
            pulled_tokens=prefill.pulled_tokens if prefill else None,
            pull_ms=round(prefill.pull_ms, 3) if prefill else None,
            ttft_ms=_ms(stamps.first_token - self.arrived) if stamps.first_token is not None else None,
            tpot_ms=_tpot_ms(stamps, self.num_output),
            handoff_ms=round(decode.handoff_ms, 3) if decode else None,
            handoff_bytes=decode.handoff_bytes if decode else None,
            handoff_blocks=decode.handoff_blocks if decode else None,
            handoff_transport=_path(decode) if decode else None,
            have_tokens=decode.have_tokens if decode else None,
            draft_prefill_ms=round(decode.draft_prefill_ms, 3) if decode else None,
            decode_queue_ms=round(decode.queue_ms, 3) if decode else None,
            decode_ms=round(decode.decode_ms, 3) if decode else None,
            verify_steps=decode.verify_steps if decode else None,
            drafted=decode.drafted_tokens if decode else None,
            accepted=decode.accepted_tokens if decode else None,
            accept_length=_accept_length(decode) if decode else None,
            e2e_ms=_ms(ended - self.arrived),
            attempts=self.epoch + 1,
            prefill_instance=pair.prefill if pair else None,
            decode_instance=pair.decode if pair else None,
            local_prefill=pair.is_local and not pair.shares if pair else None,
            attempt_log=[note.log(self.arrived) for note in self.trace.attempts],
        )


def account_of(
    room: Room, *, arrived: float, tokenize_s: float, queued_s: float, now: float, trace: AttemptTrace
) -> Account:
    """The account of a room at `now`; times are monotonic seconds."""
    return Account(
        room=room.room,
        phase=room.phase.value,
        num_prompt=room.num_prompt,
        num_output=room.num_output,
        cached_tokens=room.cached_tokens,
        epoch=room.epoch,
        pair=room.pair,
        stamps=room.stamps,
        prefill=room.prefill_timeline,
        decode=room.decode_timeline,
        arrived=arrived,
        tokenize_s=tokenize_s,
        queued_s=queued_s,
        now=now,
        trace=trace,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _tpot_ms(stamps: Stamps, num_output: int) -> float | None:
    """Mean time per token after the first."""
    first, last = stamps.first_token, stamps.last_token
    if first is None or last is None or num_output < 2:
        return None
    return _ms((last - first) / (num_output - 1))


def _path(decode: DecodeTimeline) -> str | None:
    return path_taken(
        decode.handoff_blocks,
        decode.handoff_shm_blocks,
        decode.handoff_device_blocks,
        decode.handoff_nixl_blocks,
    )


def _accept_length(decode: DecodeTimeline) -> float | None:
    """Tokens committed per verify: the accepted drafts and the target's own.

    Not the output over the steps: the last verify of a request may commit more than the client gets.
    """
    return round(1 + decode.accepted_tokens / decode.verify_steps, 4) if decode.verify_steps else None
