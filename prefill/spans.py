"""The trace span of a prefill worker: from a prompt's arrival to token 1, or to its end without token 1."""

from ..cluster.telemetry.tracing import Span
from ..worker.spans import attempt_attributes, span_error
from .queues import PrefillRoom


def prefill_spans(room: PrefillRoom, now: float) -> list[Span]:
    """One span `prefill`: the wait for the first forward, then the computation.

    Times are monotonic seconds.
    """
    return [
        Span(
            name="prefill",
            parent=room.trace,
            start=room.arrived,
            end=room.finished or now,
            attributes=attempt_attributes(room)
            | {
                "baton.queue_ms": ((room.started or room.finished or now) - room.arrived) * 1000,
                "baton.prompt_tokens": room.request.num_prompt,
                "baton.cached_tokens": room.cached_tokens,
                "baton.chunks": room.chunks,
            },
            error=span_error(room, is_complete=bool(room.finished)),
        )
    ]
