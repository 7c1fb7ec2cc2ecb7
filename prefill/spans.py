"""The trace span of a prefill worker: from a prompt's arrival to token 1, or to its end without token 1."""

from ..cluster.tracing import Span
from ..worker.spans import error_of, identity_of
from .queues import PrefillRoom


def prefill_spans(room: PrefillRoom, now: float) -> list[Span]:
    """One span `prefill`: the wait for the first forward, then the computation. Times are monotonic seconds."""
    return [
        Span(
            name="prefill",
            parent=room.trace,
            start=room.arrived,
            end=room.finished or now,
            attributes=identity_of(room)
            | {
                "baton.queue_ms": ((room.started or room.finished or now) - room.arrived) * 1000,
                "baton.prompt_tokens": room.request.num_prompt,
                "baton.cached_tokens": room.cached_tokens,
                "baton.chunks": room.chunks,
            },
            error=error_of(room, is_complete=bool(room.finished)),
        )
    ]
