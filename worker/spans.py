"""Trace spans of a worker: recorded when a room leaves."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ..cluster.telemetry.tracing import Attribute, Span, Tracing
from .room import WorkerRoom

R = TypeVar("R", bound=WorkerRoom)
SpansOf = Callable[[R, float], Sequence[Span]]


class RoomSpans(Generic[R]):
    """Records `spans_of(room, now)` for every traced room that leaves the table.

    `clock` tells monotonic seconds.
    """

    def __init__(self, tracing: Tracing, clock: Callable[[], float], spans_of: SpansOf[R]) -> None:
        self._tracing, self._clock, self._spans_of = tracing, clock, spans_of

    def left(self, room: R) -> None:
        """Record the spans of a room that has left."""
        if room.trace:
            for span in self._spans_of(room, self._clock()):
                self._tracing.record(span)


def attempt_attributes(room: WorkerRoom) -> dict[str, Attribute]:
    """The attributes that name the attempt."""
    return {"baton.room": room.request.room, "baton.epoch": room.request.epoch}


def span_error(room: WorkerRoom, *, is_complete: bool) -> str:
    """The error of a span: "" when its work is complete, else "cancelled" or "failed"."""
    return "" if is_complete else "cancelled" if room.gone_epoch >= 0 else "failed"
