"""Decode's moves of runs that prefill has planned, ready to start when their SlabBlocks come.

To cut a run into spans and to write the tables of its move takes as long as 30 MB over NVLink. Prefill names
the slots of a prompt's last runs while its forward runs (SlabPlan), so decode does this before it is waited
for. A plan is never trusted: a SlabBlock is checked as if there were none, and takes the prepared move only
if it names the same blocks of the same room in the same slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...cluster.protocol.slab_messages import SlabBlock
from ..memory.device import Move, Prepared
from ..protocol.layout import RoomStream
from ..protocol.session import ReceiverRoom


@dataclass(frozen=True)
class Run:
    """Blocks of a room in a slot, which is at address `slot`; `stream` is the room's with this peer."""

    block: SlabBlock
    room: ReceiverRoom
    stream: RoomStream
    slot: int

    def is_same(self, other: "Run") -> bool:
        """Whether both are the same bytes, in the same place, for the same pages."""
        return (
            self.stream is other.stream
            and self.room.request is other.room.request
            and (self.block.block, self.block.count, self.slot)
            == (other.block.block, other.block.count, other.slot)
        )


@dataclass(frozen=True)
class _Ready:
    run: Run
    pages: Sequence[int]
    move: Prepared


class PlannedLandings:
    """The prepared moves of open rooms."""

    def __init__(self) -> None:
        self._ready: dict[str, list[_Ready]] = {}

    def __repr__(self) -> str:
        return f"PlannedLandings({sum(map(len, self._ready.values()))} of {len(self._ready)} rooms)"

    def has(self, run: Run) -> bool:
        """Whether a move of the run is ready."""
        return any(one.run.is_same(run) for one in self._ready.get(run.room.request.room, ()))

    def add(self, run: Run, move: Prepared, pages: Sequence[int]) -> None:
        """Keeps a move of the run, which uses `pages`."""
        self._ready.setdefault(run.room.request.room, []).append(_Ready(run, pages, move))

    def start(self, run: Run) -> Move | None:
        """Starts the move of the run; None if none is ready."""
        ready = self._ready.get(run.room.request.room, [])
        for number, one in enumerate(ready):
            if one.run.is_same(run):
                del ready[number]
                return one.move.start(one.pages)
        return None

    def forget(self, room: str) -> None:
        """Discards the moves of a room that has ended."""
        for one in self._ready.pop(room, ()):
            one.move.discard()
