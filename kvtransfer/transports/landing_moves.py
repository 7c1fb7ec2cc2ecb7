"""Decode's moves of runs of blocks from slots in device memory into the pages of their rooms.

What a move needs is made before it is waited for. When decode opens a room, the memory of all its blocks is
put into one table. When prefill names the slots of the prompt's last runs (SlabPlan), while its forward runs,
their moves are prepared. To cut a run into spans and to write the tables of its move takes as long as 30 MB
over NVLink.

A plan is never trusted: a SlabBlock is checked as if there were none, and takes a prepared move only if it
names the same blocks of the same room in the same slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...cluster.protocol.slab_messages import SlabBlock
from ..memory.device import Device, Move, Prepared, Spans
from ..memory.span_cutter import ReceiverPages, RunPlaces, pages_of_run
from ..protocol.layout import RoomStream
from ..protocol.session import Peer, ReceiverRoom
from ..transport import Planes

PLANNED_RUNS = 2  # of a room's part, prepared at a time: as many as prefill sends unasked


@dataclass(frozen=True)
class Run:
    """Blocks of a room in a slot, which is at address `slot`; `stream` is the room's with this peer."""

    block: SlabBlock
    room: ReceiverRoom
    stream: RoomStream
    slot: int

    @property
    def name(self) -> tuple[int, int, int]:
        """What the run is, within its stream, and where."""
        return self.block.block, self.block.count, self.slot


@dataclass
class _Part:
    """The blocks that one peer sends of a room: their memory, and the prepared moves with their pages."""

    stream: RoomStream
    places: RunPlaces
    prepared: dict[tuple[int, int, int], tuple[Prepared, Sequence[int]]] = field(default_factory=dict)

    def discard(self) -> None:
        """Discards the prepared moves."""
        for move, _ in self.prepared.values():
            move.discard()
        self.prepared.clear()


class LandingMoves:
    """The moves into the pages of open rooms."""

    def __init__(self, device: Device, planes: Planes) -> None:
        """Raises SlabError if the pages are not aligned."""
        self._device, self._pages = device, ReceiverPages(planes)
        self._parts: dict[str, dict[Peer, _Part]] = {}

    def __repr__(self) -> str:
        return f"LandingMoves({len(self._parts)} rooms)"

    def place(self, room: ReceiverRoom, stream: RoomStream) -> None:
        """Makes the table of a room's memory; without this call, the first run does."""
        self._part_of(room, stream)

    def plan(self, run: Run) -> bool:
        """Prepares the move of a run, if it is not. False: no more moves of this room can be prepared."""
        part = self._part_of(run.room, run.stream)
        if run.name in part.prepared:
            return True
        if len(part.prepared) >= PLANNED_RUNS:
            return False
        spans, pages = self._placed(run, part)
        move = self._device.prepare(spans, longest=part.places.longest)
        if move is not None:
            part.prepared[run.name] = move, pages
        return move is not None

    def start(self, runs: Sequence[Run]) -> Move:
        """Starts to write runs of one peer into their pages. Their rooms expect them."""
        parts = [self._part_of(run.room, run.stream) for run in runs]
        ready = [part.prepared.pop(run.name, None) for run, part in zip(runs, parts, strict=True)]
        if len(runs) == 1 and ready[0] is not None:
            move, pages = ready[0]
            return move.start(pages)
        for one in ready:  # a move of several runs has one table
            if one is not None:
                one[0].discard()
        spans, all_pages = list[Spans](), list[int]()
        for run, part in zip(runs, parts, strict=True):
            its_spans, its_pages = self._placed(run, part)
            spans.append(its_spans)
            all_pages += its_pages
        longest = max(part.places.longest for part in parts)
        return self._device.move(spans, all_pages, is_write=True, longest=longest)

    def forget(self, room: str) -> None:
        """A room has ended."""
        for part in self._parts.pop(room, {}).values():
            part.discard()

    def unplan(self, peer: Peer) -> None:
        """Discards the prepared moves of a peer: its slab is used no more."""
        for parts in self._parts.values():
            if peer in parts:
                parts[peer].discard()

    def _part_of(self, room: ReceiverRoom, stream: RoomStream) -> _Part:
        parts = self._parts.setdefault(room.request.room, {})
        known = parts.get(room.peer)
        if known is None or known.stream is not stream:
            if known is not None:
                known.discard()
            known = parts[room.peer] = _Part(stream, self._pages.places(stream, room.request))
        return known

    @staticmethod
    def _placed(run: Run, part: _Part) -> tuple[Spans, Sequence[int]]:
        """The spans of a run, and its pages."""
        block, stream = run.block, run.stream
        begin = block.block * stream.block_bytes
        spans = part.places.spans(begin, begin + block.size, run.slot)
        return spans, pages_of_run(stream, block.block, block.count, run.room.request.pages)
