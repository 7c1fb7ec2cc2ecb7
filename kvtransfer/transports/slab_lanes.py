"""Prefill's slabs, one lane per pair, of whatever memory: requests, slots, and the end of a pair."""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Generic, Protocol, TypeVar

from ...cluster.process.log import fields as log_fields
from ...cluster.protocol.slab_messages import (
    SlabBlock,
    SlabDenied,
    SlabDown,
    SlabGrant,
    SlabRequest,
    SlabUp,
    SlotFree,
)
from ..memory.slab import SlabError
from ..memory.slab_slots import SlabSlots, Slot
from ..protocol.session import Peer, SendBlock

logger = logging.getLogger(__name__)

MIN_SLOTS = 2
SWEEP_S = 0.5


@dataclass
class SlabCounters:
    """Monotonic totals of one endpoint, except for the gauges `slabs`, `device_slabs` and `nixl_slabs`."""

    slabs: int = 0  # slabs of shared memory in use now
    shm_blocks: int = 0
    shm_bytes: int = 0
    shm_full: int = 0  # blocks sent as messages because every slot was in use
    shm_fallbacks: int = 0  # pairs that were denied a slab or lost it
    device_slabs: int = 0  # slabs of device memory that are allocated or mapped now
    device_blocks: int = 0
    device_bytes: int = 0
    nixl_slabs: int = 0  # slabs that peers may read through NIXL now, or whose reads go into memory here
    nixl_blocks: int = 0
    nixl_bytes: int = 0

    def snapshot(self) -> dict[str, float]:
        """Totals by name, for heartbeats."""
        return {f.name: float(getattr(self, f.name)) for f in fields(self)}


class OwnedSlab(Protocol):
    """Prefill's end of a slab."""

    id: str
    num_slots: int
    slot_bytes: int

    @property
    def handle(self) -> bytes:
        """What a SlabGrant carries to open the slab; empty if the slab's descriptor went another way."""

    has_wire: bool
    """Whether its connection carries frames, too."""


class SlabLane(Protocol):
    """Prefill's records of one pair."""

    @property
    def request(self) -> SlabRequest:
        """The request that the slab answers."""

    @property
    def slab(self) -> OwnedSlab:
        """The pair's slab."""

    @property
    def slots(self) -> SlabSlots:
        """The blocks in its slots."""

    @property
    def is_used(self) -> bool:
        """Whether decode's end of the slab still exists."""


L = TypeVar("L", bound=SlabLane)


class SlabLanes(ABC, Generic[L]):
    """Prefill's slabs of one kind of memory, at most one per connection."""

    def __init__(self, instance: str, counters: SlabCounters, *, lease_s: float) -> None:
        """`lease_s`: seconds until an unfreed slot is reused."""
        self.counters = counters
        self._instance, self._lease_s = instance, lease_s
        self._lanes: dict[Peer, L] = {}
        self._granted: set[Peer] = set()  # whose grant has been sent
        self._sweep_at = 0.0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(repr(lane.slots) for lane in self._lanes.values())})"

    @property
    def slots(self) -> tuple[int, int]:
        """The slots in use and all slots, over the slabs of all peers."""
        tables = [lane.slots for lane in self._lanes.values()]
        return sum(table.num_held for table in tables), sum(table.num_slots for table in tables)

    def has(self, peer: Peer) -> bool:
        """Whether the pair has a slab whose grant has been sent."""
        return peer in self._granted

    def granted(self, peer: Peer, slab: str) -> None:
        """Records that the grant of a slab has been sent. Blocks in the slab follow it: decode refuses a slab
        that it does not know.
        """
        lane = self._lanes.get(peer)
        if lane is not None and lane.slab.id == slab:
            self._granted.add(peer)

    @abstractmethod
    def _open(self, request: SlabRequest) -> L:
        """Makes a slab and hands it over. Raises SlabError."""

    @abstractmethod
    def _end(self, lane: L) -> None:
        """Ends a lane that is no longer in the records."""

    @abstractmethod
    def _count(self) -> None:
        """Sets the gauge of the counters."""

    def handle(self, peer: Peer, message: SlabUp) -> SlabDown | None:
        """Handles one message of a greeted peer; returns the answer, None if there is none."""
        if isinstance(message, SlabRequest):
            return self._grant(peer, message)
        lane = self._lanes.get(peer)
        if lane is not None and lane.slab.id == message.slab:
            if isinstance(message, SlotFree):
                self._free(lane, message)
            else:
                self._fall_back(peer, f"decode cannot read the slab: {message.reason[:200]}")
        return None

    def _free(self, lane: L, message: SlotFree) -> None:
        """Frees the slot of a run that decode has read."""
        lane.slots.free((message.room, message.epoch, message.block), message.slot)

    def _header(self, item: SendBlock, slab: OwnedSlab, slot: Slot, digest: int = 0) -> SlabBlock:
        """The header of blocks in a slot; without `digest` it is a plan."""
        return SlabBlock(
            room=item.room,
            epoch=item.epoch,
            instance=self._instance,
            block=item.block,
            size=item.size,
            digest=digest,
            slab=slab.id,
            slot=slot.index,
            lease_ms=int(self._lease_s * 1000),
            count=item.count,
        )

    def forget(self, room: str, epoch: int) -> None:
        """Frees the slots of a room that ended."""
        for lane in self._lanes.values():
            lane.slots.free_where(lambda holder, _: holder[0] == room and holder[1] <= epoch)

    def sweep(self, now: float) -> None:
        """Drops slabs of processes that have gone and frees slots whose lease ended. Call it periodically."""
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_S
        for lane in self._lanes.values():
            lane.slots.free_where(lambda _, ends_at: now >= ends_at)
        self._drop_unused()

    def sweep_soon(self) -> None:
        """Makes the next `sweep` due, because a connection has ended."""
        self._sweep_at = 0.0

    def next_deadline(self) -> float | None:
        """Monotonic time of the next `sweep` with work; None without slabs."""
        return self._sweep_at if self._lanes else None

    def drop(self, peer: Peer) -> None:
        """Drops the slab of a closed connection."""
        lane = self._lanes.pop(peer, None)
        self._granted.discard(peer)
        if lane is not None:
            self._end(lane)
        self._count()

    def close(self) -> None:
        """Closes all slabs. Idempotent."""
        for peer in list(self._lanes):
            self.drop(peer)

    def _grant(self, peer: Peer, request: SlabRequest) -> SlabDown:
        lane = self._lanes.get(peer)
        if lane is not None and lane.request.token != request.token:
            self.drop(peer)  # decode lost the old slab
            lane = None
        if lane is None:
            self._drop_unused()  # a decode worker that connects again needs the memory of its last slab
        try:
            lane = lane or self._open(request)
        except SlabError as error:
            self.counters.shm_fallbacks += 1
            logger.warning(
                "no slab for decode",
                extra=log_fields(decode=request.instance, transport=request.transport, reason=str(error)),
            )
            return SlabDenied(instance=self._instance, token=request.token, reason=str(error)[:1024])
        self._lanes[peer] = lane
        self._count()
        return SlabGrant(
            instance=self._instance,
            token=request.token,
            slab=lane.slab.id,
            num_slots=lane.slab.num_slots,
            slot_bytes=lane.slab.slot_bytes,
            handle=lane.slab.handle,
            has_wire=lane.slab.has_wire,
        )

    def _drop_unused(self) -> None:
        for peer, lane in list(self._lanes.items()):
            if not lane.is_used:
                self.drop(peer)

    def _fall_back(self, peer: Peer, reason: str) -> None:
        self.counters.shm_fallbacks += 1
        logger.warning(
            "decode left its slab",
            extra=log_fields(decode=self._lanes[peer].request.instance, reason=reason),
        )
        self.drop(peer)


def slots_that_fit(request: SlabRequest, max_slot_bytes: int, left: int, max_bytes: int, flag: str) -> int:
    """The number of slots for a request, of `left` of `max_bytes` bytes.

    Raises SlabError if the slots are larger than `max_slot_bytes`, or fewer than `MIN_SLOTS` fit.
    """
    if request.slot_bytes > max_slot_bytes:
        raise SlabError(f"slots of {request.slot_bytes} bytes, at most {max_slot_bytes} are allowed")
    num_slots = min(request.num_slots, left // request.slot_bytes)
    if num_slots < MIN_SLOTS:
        raise SlabError(f"all {max_bytes >> 20} MiB for slabs are in use; raise {flag}")
    return num_slots
