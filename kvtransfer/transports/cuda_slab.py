"""Blocks in device memory, between workers of one host: prefill's lanes, and decode's landings.

The messages are those of `shm`. A slot holds a run of blocks, so a prompt needs few messages. Prefill gathers
the pages of a run into a slot and sends its SlabBlock after the move is done. Decode scatters the slot into
its own pages, digests what it stored, and frees the slot after the move is done. No device waits for the
other process: a dead peer leaves nothing behind on a stream.

Behind the last forward of a prompt, prefill also fills slots unasked, and sends their SlabBlocks before the
announcement. It tells decode of them while the forward runs (SlabPlan), and decode prepares its moves. These
slots are the last ones of the slab, which pulls never use: a run that finds none free is left to decode's
pull, and no pull waits for a run whose forward still runs.

Both ends start moves on a stream of their own. A move that is not held by a forward ends within a fraction
of a millisecond, and the link thread waits for it without the interpreter's lock; others are polled. A move
reads or writes the pages of rooms, so the end of a room waits for the room's moves; they wait for work of
their own process only.
"""

import logging
import math
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ...cluster.process.log import fields as log_fields
from ...cluster.protocol.codec import encode
from ...cluster.protocol.slab_messages import SlabBlock, SlabPlan, SlabRequest, SlabSoon, SlotFree
from ...kernels.move_spans import ALIGNMENT
from ..memory.cuda_device import CudaDevice
from ..memory.device import Device, Move
from ..memory.device_slab import DeviceSlab, reached
from ..memory.slab import SlabError
from ..memory.slab_slots import Holder, SlabSlots, Slot
from ..memory.slot_ranges import SlotRanges
from ..memory.span_cutter import RunPlaces, SenderPages, is_aligned, pages_of_run
from ..protocol.layout import KVLayout, RoomStream, device_digest
from ..protocol.session import Peer, SendBlock
from ..transport import Planes
from .slab_lanes import MIN_SLOTS, SlabCounters, SlabLanes, slots_that_fit
from .wire import sent

logger = logging.getLogger(__name__)

DEVICE_SLAB_BYTES = 1 << 30  # limit of all device slabs of a prefill worker together
SLAB_FLAG = "--device-slab-mb"
SLOT_BYTES = 64 << 20  # largest slot: 32 pages of a model with 128 KiB per token
DEVICE_WINDOW = 6  # slots that are filled or read at a time, so that neither end waits for the other
FIRST_SLOTS, WHOLE_SLOTS = 1, 3  # a longer run goes in two parts; decode reads the first during the second
EARLY_SLOTS = 4  # for what goes unasked: 256 MiB, of a prompt's last forward
RUNS_PER_MOVE = 2  # of prefill: decode reads these runs while the next ones are gathered
NEWS_S = 2e-5  # between two looks for messages while a move is under way
SPIN_S = 0.001  # a move takes less; one that waits for a forward is polled at this pace
SOON_S = 0.001  # longest wait of decode for a SlabBlock that was announced; it comes after some 0.1 ms


def device_of(planes: Planes, layout: KVLayout) -> Device | None:
    """The device of the pages, if slabs in its memory can be used, else None."""
    if not planes.kv.is_cuda or planes.order is None:
        return None
    try:
        if not is_aligned(layout):
            raise SlabError(f"pages of {layout.kv_page_bytes} bytes are not aligned")
        return CudaDevice(planes.kv.device, planes.order)
    except SlabError as error:
        logger.warning("no slabs in device memory", extra=log_fields(reason=str(error)))
        return None


def host_id() -> str:
    """The boot id of this host, which all its containers share; "" if it is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def slot_bytes_of(block_bytes: int, most: int = SLOT_BYTES) -> int:
    """The size of a slot for a run of whole blocks, at most `most` bytes, at least one block."""
    return max(1, most // block_bytes) * block_bytes


def next_poll(began: float, now: float) -> float:
    """Monotonic time at which to poll the oldest unfinished move, begun at `began`."""
    return now if now < began + SPIN_S else now + SPIN_S


@dataclass
class DeviceLane:
    """Prefill's records of one pair."""

    request: SlabRequest
    slab: DeviceSlab
    slots: SlabSlots
    early: SlotRanges  # the slots behind them, for runs that go unasked
    is_heard: bool = False  # decode has sent a frame over the slab's connection

    @property
    def is_used(self) -> bool:
        """Whether decode may have the slab mapped."""
        return self.slab.is_mapped


@dataclass
class _Filling:
    """Slots of one pair that a move fills."""

    peer: Peer
    slab: DeviceSlab
    items: Sequence[tuple[SendBlock, Slot]]
    headers: Sequence[SlabBlock]  # without digests
    move: Move
    began: float
    is_wanted: bool = True  # False: the room has ended, and the slots are free once the move is done
    soon: bytes = b""  # the frame that precedes the headers of an early run, for a peer that knows it


@dataclass(frozen=True)
class _Places:
    """The memory of all blocks of a room's part, whose stream and pages these are."""

    stream: RoomStream
    pages: tuple[int, ...]
    places: RunPlaces


class DeviceLanes(SlabLanes[DeviceLane]):
    """Prefill's slabs in the memory of `device`, together at most `max_bytes` bytes."""

    def __init__(
        self,
        instance: str,
        counters: SlabCounters,
        device: Device,
        pages: SenderPages,
        *,
        lease_s: float,
        max_bytes: int = DEVICE_SLAB_BYTES,
        flag: str = SLAB_FLAG,
    ) -> None:
        """`flag`: the setting that names `max_bytes`."""
        super().__init__(instance, counters, lease_s=lease_s)
        self._device, self._pages, self._max_bytes, self._flag = device, pages, max_bytes, flag
        self._fillings: list[_Filling] = []
        self._early: list[_Filling] = []  # behind forwards, in the order of their launches
        self._ended: list[DeviceSlab] = []  # decode may still have them mapped
        self._places: dict[tuple[str, int, Peer], _Places] = {}  # of open rooms' parts

    def connections(self) -> list[tuple[Peer, socket.socket]]:
        """The connections of all slabs from which frames are read."""
        return [(peer, lane.slab.connection) for peer, lane in self._lanes.items() if lane.request.has_wire]

    def heard(self, peer: Peer) -> None:
        """Records a frame over the slab's connection: decode has mapped the slab, and reads frames too."""
        lane = self._lanes.get(peer)
        if lane is not None:
            lane.is_heard = True

    def wire(self, peer: Peer) -> socket.socket | None:
        """The connection over which frames reach decode; None if there is none."""
        lane = self._lanes.get(peer)
        return lane.slab.connection if lane is not None and lane.is_heard else None

    def begin(self, items: Sequence[SendBlock], now: float) -> tuple[int, list[SlabBlock]]:
        """Starts to fill slots with the first runs of `items`, all for one peer.

        Returns the number of runs that need no other transport, and the headers of those that are already in
        their slots.
        """
        lane = self._lanes.get(items[0].peer)
        if lane is None:
            return 0, []
        num_held, fresh, headers = 0, list[tuple[SendBlock, Slot]](), list[SlabBlock]()
        for item in items:
            header = self._early_header(lane, item)
            if header is None and item.size > lane.slab.slot_bytes:
                break
            if header is None:
                slot = lane.slots.take(holder_of(item), now + self._lease_s)
                if slot is None:
                    break
                header = slot.header
                if header is None and not slot.is_filling:
                    fresh.append((item, slot))
            num_held += 1
            headers += [] if header is None else [header]
        self.counters.shm_full += not num_held
        if fresh:
            self._fill(lane.slab, fresh, now)
        return num_held, headers

    def begin_early(self, run: SendBlock, now: float, *, is_late: bool) -> bool:
        """Starts to fill free slots for early runs with the leading blocks of `run`, behind its forward.

        False: there are none.

        `is_late`: later forwards may have been launched meanwhile. Moves run in order, so an unfinished one
        could then belong to such a forward, and the run is left to decode's pulls.
        """
        lane = self._lanes.get(run.peer)
        self._drop_done()
        run_blocks = 0 if lane is None else lane.slab.slot_bytes // run.stream.block_bytes
        if lane is None or not run_blocks:
            return False  # decode chose the size of the slots
        self._places_of(run)  # now, while the forward runs: pulls need them as well
        if is_late and self._early:
            return False
        left: SendBlock | None = run
        planned: list[SlabBlock] = []
        for num_slots in _early_parts(-(-run.count // run_blocks)):
            slots = None if left is None else lane.early.take(holder_of(left), num_slots, math.inf)
            if left is None or slots is None or slots.header is not None or slots.is_filling:
                break
            item, left = left.cut(slots.count * run_blocks)
            filling = self._filling(lane.slab, [(item, slots)], now, is_early=True)
            if lane.request.hears_soon and not planned:
                filling.soon = encode(SlabSoon(room=run.room, epoch=run.epoch, instance=self._instance))
            self._early.append(filling)
            planned += filling.headers
        self._tell_plan(lane, run.peer, planned)
        return bool(planned)

    def _tell_plan(self, lane: DeviceLane, peer: Peer, planned: list[SlabBlock]) -> None:
        """Tells decode of the early runs of a room, if it listens. A plan that does not arrive costs time."""
        wire = self.wire(peer) if planned and lane.request.hears_plan else None
        if wire is not None:
            sent(wire, encode(SlabPlan(blocks=planned)))

    def end_early(self, room: str, epoch: int, now: float) -> Iterator[tuple[SendBlock, SlabBlock]]:
        """The early runs of a room whose forward has ended, one by one, with their headers.

        Waits for the moves, which begin with the end of the forward and take a fraction of a millisecond.
        Meanwhile decode wakes up.
        """
        fillings = [one for one in self._early if one.is_wanted and _is_of(one, room, epoch)]
        for filling in fillings:
            wire = self.wire(filling.peer) if filling.soon else None
            if wire is not None:
                sent(wire, filling.soon)
        for filling in fillings:
            digests = filling.move.wait()
            self._early.remove(filling)
            for _, slot in filling.items:
                slot.ends_at = now + self._lease_s
            lane = self._lanes.get(filling.peer)
            if lane is not None and lane.slab is filling.slab:
                yield from self._headers(filling, digests)

    def cut(self, item: SendBlock) -> list[SendBlock]:
        """The run that decode pulls, in runs that fit a slot; as it is if early slots still hold it."""
        lane = self._lanes.get(item.peer)
        if lane is None or item.size <= lane.slab.slot_bytes or self._early_header(lane, item) is not None:
            return [item]
        return item.split(max(1, lane.slab.slot_bytes // item.stream.block_bytes))

    def _early_header(self, lane: DeviceLane, item: SendBlock) -> SlabBlock | None:
        """The header of a run that went unasked: decode may not have got it."""
        slots = lane.early.find(holder_of(item))
        header = None if slots is None else slots.header
        return header if header is not None and header.count == item.count else None

    def forget(self, room: str, epoch: int) -> None:
        """As `SlabLanes.forget`. A slot that a move still fills is free behind the move."""
        super().forget(room, epoch)
        for key in [key for key in self._places if key[0] == room and key[1] <= epoch]:
            del self._places[key]
        for filling in self._early:
            filling.is_wanted = filling.is_wanted and not _is_of(filling, room, epoch)
        for lane in self._lanes.values():
            lane.early.free_where(
                lambda holder, ends_at: holder[0] == room and holder[1] <= epoch and ends_at < math.inf
            )
        self._drop_done()

    def _drop_done(self) -> None:
        """Frees the slots of early runs that nobody wants any more, and whose moves are done."""
        for filling in [one for one in self._early if not one.is_wanted]:
            if filling.move.poll() is None:
                continue
            self._early.remove(filling)
            lane = self._lanes.get(filling.peer)
            for item, slot in filling.items:
                if lane is not None and lane.slab is filling.slab:
                    lane.early.free(holder_of(item), slot.index)

    def _free(self, lane: DeviceLane, message: SlotFree) -> None:
        holder = (message.room, message.epoch, message.block)
        if not lane.early.free(holder, message.slot):
            lane.slots.free(holder, message.slot)

    def _fill(self, slab: DeviceSlab, fresh: Sequence[tuple[SendBlock, Slot]], now: float) -> None:
        self._fillings.append(self._filling(slab, fresh, now))

    def _filling(
        self, slab: DeviceSlab, fresh: Sequence[tuple[SendBlock, Slot]], now: float, *, is_early: bool = False
    ) -> _Filling:
        runs, pages, longest = [], list[int](), 0
        for item, slot in fresh:
            slot.is_filling = True
            begin = item.block * item.stream.block_bytes
            places = self._places_of(item)
            runs.append(places.spans(begin, begin + item.size, slab.slot(slot.index)))
            pages += pages_of_run(item.stream, item.block, item.count, item.pages)
            longest = max(longest, places.longest)
        move = self._device.move(runs, pages, is_write=False, is_early=is_early, longest=longest)
        headers = [self._header(item, slab, slot) for item, slot in fresh]
        return _Filling(fresh[0][0].peer, slab, fresh, headers, move, now)

    def _places_of(self, item: SendBlock) -> RunPlaces:
        """The memory of all blocks of the item's room. A cut of it takes less than the runs one by one."""
        key = item.room, item.epoch, item.peer
        known = self._places.get(key)
        if known is None or known.stream is not item.stream or known.pages is not item.pages:
            known = self._places[key] = _Places(item.stream, item.pages, self._pages.places(item))
        return known.places

    def settle(self, *, waits: bool = True) -> list[tuple[SendBlock, SlabBlock]]:
        """The runs whose slots are filled now, with their headers.

        `waits`: for the first move, too, if it is not held. It takes less than another turn of the link
        thread.
        """
        filled: list[tuple[SendBlock, SlabBlock]] = []
        while self._fillings:
            filling = self._fillings[0]
            digests = filling.move.wait() if waits and not filling.move.is_held else filling.move.poll()
            waits = False
            if digests is None:
                break  # moves run in order
            del self._fillings[0]
            filled += self._headers(filling, digests)
        return filled

    def finish(self, room: str, epoch: int) -> None:
        """Returns when no pulled run is read from the pages of this room and its earlier attempts any more.

        An early run may wait for its forward for long. It goes on, and what it then reads is never sent.
        """
        for filling in self._fillings:
            if _is_of(filling, room, epoch):
                filling.move.wait()

    def poll_at(self, now: float) -> float | None:
        """Monotonic time of the next `settle` with work; None without moves."""
        return next_poll(self._fillings[0].began, now) if self._fillings else None

    def sweep(self, now: float) -> None:
        """As `SlabLanes.sweep`. Also frees ended slabs that decode has closed."""
        is_due = now >= self._sweep_at
        if is_due:
            self._drop_done()
            for lane in self._lanes.values():
                lane.early.free_where(lambda _, ends_at: now >= ends_at)
        super().sweep(now)
        if is_due:
            self._free_ended()

    def next_deadline(self) -> float | None:
        """As `SlabLanes.next_deadline`."""
        return self._sweep_at if self._lanes or self._ended else None

    def close(self) -> None:
        """As `SlabLanes.close`. Slabs that decode has not closed stay until this process ends."""
        super().close()
        self._free_ended()

    def _headers(self, filling: _Filling, digests: Sequence[int]) -> list[tuple[SendBlock, SlabBlock]]:
        filled = []
        for (item, slot), header, total in zip(filling.items, filling.headers, digests, strict=True):
            slot.is_filling = False
            name = item.stream.layout.name
            digest = device_digest(item.room, item.epoch, item.block, item.size, total, name)
            slot.header = replace(header, digest=digest)
            self.counters.device_blocks += item.count
            self.counters.device_bytes += item.size
            filled.append((item, slot.header))
        return filled

    def _open(self, request: SlabRequest) -> DeviceLane:
        if request.slot_bytes % ALIGNMENT:
            raise SlabError(f"slots of {request.slot_bytes} bytes are not aligned to {ALIGNMENT} bytes")
        self._free_ended()
        slabs = [*(lane.slab for lane in self._lanes.values()), *self._ended]
        left = self._max_bytes - sum(slab.size for slab in slabs)
        num_slots = slots_that_fit(request, SLOT_BYTES, left, self._max_bytes, self._flag)
        num_pulled = min(num_slots, max(MIN_SLOTS, request.num_slots - request.early_slots))
        # early runs only save time: they leave memory for the pulls of one more pair
        num_spare = max(0, left // request.slot_bytes - 2 * num_pulled)
        num_early = min(num_slots - num_pulled, num_spare)
        connection = reached(request.address, request.token)
        slab = DeviceSlab(self._device, num_pulled + num_early, request.slot_bytes, connection)
        return DeviceLane(request, slab, SlabSlots(num_pulled), SlotRanges(num_early, first=num_pulled))

    def _end(self, lane: DeviceLane) -> None:
        lane.slab.give_up()
        self._ended.append(lane.slab)
        self._free_ended()

    def _free_ended(self) -> None:
        mapped = []
        for slab in self._ended:
            if slab.is_mapped:
                mapped.append(slab)
            else:
                slab.free()
        self._ended = mapped
        self._count()

    def _count(self) -> None:
        self.counters.device_slabs = len(self._lanes) + len(self._ended)


def holder_of(item: SendBlock) -> Holder:
    """The name of a run in the tables of slots."""
    return (item.room, item.epoch, item.block)


def _early_parts(num_slots: int) -> tuple[int, ...]:
    """The slots of each part of an early run of `num_slots` slots."""
    return (num_slots,) if num_slots <= WHOLE_SLOTS else (FIRST_SLOTS, num_slots - FIRST_SLOTS)


def _is_of(filling: _Filling, room: str, epoch: int) -> bool:
    """Whether the move reads pages of this room, or of its earlier attempts."""
    return any(item.room == room and item.epoch <= epoch for item, _ in filling.items)
