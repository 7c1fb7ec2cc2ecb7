"""Steps of the batch that were launched and not read, and the rooms in them."""

from collections import deque
from collections.abc import Sequence

from ..engine.speculative.step.async_decoder import Flight
from ..engine.speculative.step.result import StepResult
from .queues import Room, RoomState
from .step_decoder import LaunchingDecoder, StepDecoder


class Flights:
    """The flights of `decoder`, oldest first; of one that cannot launch ahead there are never any."""

    def __init__(self, decoder: StepDecoder) -> None:
        self._decoder = decoder if isinstance(decoder, LaunchingDecoder) else None
        self._waiting: deque[tuple[Sequence[Room], Flight]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def counters(self) -> dict[str, float]:
        return {} if self._decoder is None else dict(self._decoder.counters)

    def launch(self, rooms: Sequence[Room]) -> bool:
        """Begin a step of `rooms` if they can be stepped ahead; whether they can."""
        requests = [room.request for room in rooms]
        if self._decoder is None or not self._decoder.can_launch(requests):
            return False
        self._waiting.append((rooms, self._decoder.launch(requests)))
        for room in rooms:
            room.num_unread += 1
        return True

    def read(self) -> tuple[list[Room], StepResult, list[Room]]:
        """Wait for the oldest: its rooms that still run, what it gave them, and its rooms whose end waited for it."""
        assert self._decoder is not None
        rooms, flight = self._waiting.popleft()
        is_live = [room.state is RoomState.RUNNING for room in rooms]
        result = self._decoder.read(flight, is_live)
        for room in rooms:
            room.num_unread -= 1
        live = [room for room in rooms if room.state is RoomState.RUNNING]
        return live, result, [room for room in rooms if room.state is RoomState.SETTLING and room.is_settled]

    def __repr__(self) -> str:
        return f"<Flights {len(self)} unread>"
