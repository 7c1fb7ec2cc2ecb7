"""Decode steps that were launched and not read yet, with their rooms."""

from collections import deque
from collections.abc import Sequence

from ..engine.speculative.step.async_decoder import Flight
from ..engine.speculative.step.result import StepResult
from .queues import DecodeRoom, DecodeState
from .step_decoder import LaunchingDecoder, StepDecoder


class StepsInFlight:
    """The unread steps of `decoder`, oldest first. A decoder that cannot launch ahead never has any."""

    def __init__(self, decoder: StepDecoder) -> None:
        self._decoder = decoder if isinstance(decoder, LaunchingDecoder) else None
        self._waiting: deque[tuple[Sequence[DecodeRoom], Flight]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def counters(self) -> dict[str, float]:
        """Totals of the decoder since the start, by name; empty when it cannot launch ahead."""
        return {} if self._decoder is None else dict(self._decoder.counters)

    def launch(self, rooms: Sequence[DecodeRoom]) -> bool:
        """Launch a step of `rooms`. False: the decoder cannot step them ahead, and nothing was launched."""
        requests = [room.request for room in rooms]
        if self._decoder is None or not self._decoder.can_launch(requests):
            return False
        self._waiting.append((rooms, self._decoder.launch(requests)))
        for room in rooms:
            room.num_unread += 1
        return True

    def read(self) -> tuple[list[DecodeRoom], StepResult, list[DecodeRoom]]:
        """Wait for the oldest step.

        Returns its rooms that still run, their result, and its rooms that waited to close.
        """
        assert self._decoder is not None
        rooms, flight = self._waiting.popleft()
        is_live = [room.state is DecodeState.RUNNING for room in rooms]
        result = self._decoder.read(flight, is_live)
        for room in rooms:
            room.num_unread -= 1
        live = [room for room in rooms if room.state is DecodeState.RUNNING]
        return (
            live,
            result,
            [room for room in rooms if room.state is DecodeState.SETTLING and room.is_settled],
        )

    def __repr__(self) -> str:
        return f"<StepsInFlight {len(self)} unread>"
