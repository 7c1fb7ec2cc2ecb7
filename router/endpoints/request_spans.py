"""The router's trace spans: one for each request, and below it one for each wait for a pair of workers.

Request spans have the attributes of OpenTelemetry's conventions for generative AI. Further
attributes begin with `baton.`.
"""

from ...cluster.protocol.messages import Sampling
from ...cluster.telemetry.tracing import Attribute, Span, Tracing
from ..scheduling.request_state import ClientRequest, Entry

ROOT_ERRORS = ("failed", "timeout", "rejected")


def operation_of(reply_id: str) -> str:
    """`gen_ai.operation.name`, by the kind of an answer's id."""
    return "text_completion" if reply_id.startswith("cmpl-") else "chat"


def end_request(tracing: Tracing, request: ClientRequest, model: str, now: float) -> None:
    """Ends the span of a request when all its choices have ended."""
    for entry in request.entries:
        for span in waits_of(entry, now):
            tracing.record(span)
    outcome = request.outcome or "ok"
    request.tag.span.end(now, _attributes(request, model, outcome), outcome if outcome in ROOT_ERRORS else "")


def waits_of(entry: Entry, now: float) -> list[Span]:
    """One span for each time that a choice waited for a pair."""
    since, spans = entry.room.stamps.created, []
    for note in entry.trace.attempts:
        spans.append(_wait(entry, since, note.placed, note.epoch))
        since = note.ended if note.ended is not None else now
    if entry.room.pair is None:  # the room ended without a pair
        spans.append(_wait(entry, since, now, len(entry.trace.attempts)))
    return spans


def _wait(entry: Entry, start: float, end: float, epoch: int) -> Span:
    attributes: dict[str, Attribute] = {
        "baton.room": entry.room.room,
        "baton.epoch": epoch,
        "baton.choice": entry.index,
    }
    return Span(
        name="queue", parent=entry.request.tag.span.context, start=start, end=end, attributes=attributes
    )


def _attributes(request: ClientRequest, model: str, outcome: str) -> dict[str, Attribute]:
    rooms = [entry.room for entry in request.entries]
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": operation_of(request.tag.reply_id),
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request.tag.reply_id,
        "baton.request_id": request.tag.request_id,
        "gen_ai.usage.input_tokens": sum(room.num_prompt for room in rooms),
        "gen_ai.usage.output_tokens": sum(room.num_output for room in rooms),
        "gen_ai.usage.cache_read.input_tokens": sum(room.cached_tokens for room in rooms),
        "baton.outcome": outcome,
        "baton.attempts": sum(room.epoch + 1 for room in rooms),
        **_asked(rooms[0].sampling),
    }
    if len(rooms) > 1:
        attributes["gen_ai.request.choice.count"] = len(rooms)
    firsts = [room.stamps.first_token for room in rooms if room.stamps.first_token is not None]
    if firsts:
        attributes["baton.time_to_first_token"] = min(firsts) - request.arrived
    return attributes


def _asked(sampling: Sampling) -> dict[str, Attribute]:
    return {
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
