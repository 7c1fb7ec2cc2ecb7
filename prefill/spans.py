"""The spans of a prefill server: each prompt that left, from its arrival to token 1 or to its end."""

from collections.abc import Callable

from ..cluster.telemetry.tracing import Span, Tracing
from .queues import Room


class PrefillSpans:
    """Takes every room that leaves the queues. `clock` tells monotonic seconds."""

    def __init__(self, tracing: Tracing, clock: Callable[[], float]) -> None:
        self._tracing, self._clock = tracing, clock

    def left(self, room: Room) -> None:
        """One room is gone."""
        if room.trace:
            self._tracing.record(span_of(room, self._clock()))


def span_of(room: Room, now: float) -> Span:
    """`prefill`: waiting for the first forward, then computing; an error where token 1 was never sampled."""
    request = room.request
    return Span(
        name="prefill",
        parent=room.trace,
        start=room.arrived,
        end=room.finished or now,
        attributes={
            "baton.room": request.room,
            "baton.epoch": request.epoch,
            "baton.queue_ms": ((room.started or room.finished or now) - room.arrived) * 1000,
            "baton.prompt_tokens": request.num_prompt,
            "baton.cached_tokens": room.cached_tokens,
            "baton.chunks": room.chunks,
        },
        error="" if room.finished else "cancelled" if room.gone_epoch >= 0 else "failed",
    )
