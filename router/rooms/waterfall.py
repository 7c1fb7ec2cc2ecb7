"""The parts of a request on one time line: what happened when, on the router and on both workers. Pure.

Offsets are milliseconds since the request was read, on the router's clock. Workers report durations, and the
router knows when the message that ended each part arrived. So a worker's part ends at that arrival and starts
its duration earlier. The error is the delay of one message. A part without an end runs now, and its start is
the last event that the router knows of.
"""

from collections.abc import Iterator

from msgspec import Struct

from .attempt_log import AttemptNote
from .timeline import Account

ROUTER, PREFILL, HANDOFF, DECODE = "router", "prefill", "hand-off", "decode"


class WaterfallPart(Struct, frozen=True, kw_only=True):
    """One bar of the waterfall."""

    lane: str
    """router, prefill, hand-off or decode."""
    name: str
    attempt: int
    """Number of the attempt, from 0."""
    start_ms: float
    end_ms: float | None
    """Null while it runs."""


def waterfall_of(account: Account) -> list[WaterfallPart]:
    """The parts of a room, attempt by attempt, each in the order of a request's life."""
    arrived, since = account.arrived, account.stamps.created
    parts: list[tuple[int, str, str, float, float | None]] = [
        (0, ROUTER, "read and tokenize", arrived, since)
    ]
    for number, note in enumerate(account.trace.attempts):
        parts.append((number, ROUTER, "queue", since, note.placed))
        parts += ((number, *part) for part in _parts_of(note))
        since = note.ended if note.ended is not None else account.now
    if account.pair is None:  # it waits for another pair, or ended without one
        parts.append((len(account.trace.attempts), ROUTER, "queue", since, account.stamps.ended))
    return [
        WaterfallPart(
            lane=lane,
            name=name,
            attempt=attempt,
            start_ms=_ms(start - arrived),
            end_ms=None if end is None else _ms(max(start, end) - arrived),
        )
        for attempt, lane, name, start, end in parts
    ]


def _parts_of(note: AttemptNote) -> Iterator[tuple[str, str, float, float | None]]:
    """(lane, name, start, end) of one attempt's work at the workers, in monotonic seconds."""
    is_local = note.prefill == note.decode
    computed = note.first_token if is_local else note.prefilled
    lane, report = DECODE if is_local else PREFILL, note.prefill_report
    if computed is None:  # the prompt is being computed, or never was
        yield lane, "prompt", note.placed, note.ended
        return
    if report is None:
        yield lane, "prompt", note.placed, computed
    else:
        started = max(note.placed, computed - report.prefill_ms / 1000)
        queued = max(note.placed, started - report.queue_ms / 1000)
        if report.queue_ms:
            yield lane, "queue", queued, started
        yield lane, "prompt", started, computed
    yield from _decode_parts(note, computed, is_local=is_local)


def _decode_parts(
    note: AttemptNote, computed: float, *, is_local: bool
) -> Iterator[tuple[str, str, float, float | None]]:
    """The hand-off and the decode of an attempt whose prompt was computed at `computed`."""
    report = note.decode_report
    if report is None:  # it runs, or its worker was lost
        started = computed if is_local else note.next_tokens
        if not is_local:
            yield HANDOFF, "hand-off", computed, started if started is not None else note.ended
        if started is not None:
            yield DECODE, "tokens", started, note.ended
        return
    if note.ended is not None and not (report.decode_ms or report.handoff_ms or report.handoff_bytes):
        return  # the first token was the whole answer
    landed = computed
    if not is_local:
        landed = computed + report.handoff_ms / 1000
        yield HANDOFF, "hand-off", computed, landed
    end = note.ended if note.ended is not None else landed + (report.queue_ms + report.decode_ms) / 1000
    started = max(landed, end - report.decode_ms / 1000)
    if report.draft_prefill_ms:
        yield DECODE, "draft prefill", landed, min(started, landed + report.draft_prefill_ms / 1000)
    if report.decode_ms:
        yield DECODE, "tokens", started, end


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
