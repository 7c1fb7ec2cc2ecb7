"""Blocks in shared memory: the slab records of prefill and decode, beside the sessions.

Rooms, pulls and releases work as in every transport and travel over ZeroMQ. Only the bytes of a block do not:
prefill copies them into a slot of the pair's slab and sends a SlabBlock; decode copies them out, checks the
copy and frees the slot.

    decode                              prefill
    SlabRequest(address, token)   ->    makes a slab, hands its descriptor over at the address
                                  <-    SlabGrant, or SlabDenied
    Pull                          ->    fills a slot
                                  <-    SlabBlock, or Block where no slot is free
    SlotFree                      ->    the slot can be filled again

A slot is reused after decode freed it, its room ended, or its lease ended; a late reader then finds another
digest. Prefill may answer every pull with Blocks. After a failure decode sends SlabUnusable and asks for a
slab of the next kind: first device memory (`cuda_slab`), then shared memory, then it takes messages.
"""

import logging
import os
import secrets
import socket
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ...cluster.net.transport_names import CUDA_SLAB, SHM
from ...cluster.process.log import fields as log_fields
from ...cluster.protocol.slab_messages import (
    SlabBlock,
    SlabDenied,
    SlabDown,
    SlabGrant,
    SlabRequest,
    SlabUnusable,
    SlabUp,
    SlotFree,
)
from ..memory.blocks import BlockReader, Filling
from ..memory.device import Device
from ..memory.device_slab import MappedDeviceSlab
from ..memory.pinning import Bytes, Pin, no_pin
from ..memory.slab import NO_FD, MappedSlab, Slab, SlabDoor, SlabError, is_alive
from ..memory.slab_slots import SlabSlots, Slot
from ..protocol.layout import digest_seed
from ..protocol.session import Peer, SendBlock
from .cuda_slab import DEVICE_WINDOW, EARLY_SLOTS, SLOT_BYTES, slot_bytes_of
from .slab_lanes import SWEEP_S, OwnedSlab, SlabCounters, SlabLane, SlabLanes, slots_that_fit

logger = logging.getLogger(__name__)

SLAB_BYTES = 256 << 20  # limit of all slabs of a prefill worker together
SPARE_SLOTS = 2  # slots of host memory beyond the window, for blocks that are pulled again
ASK_AGAIN_S = 30.0
_ARRIVING = {SHM: "blocks come through shared memory", CUDA_SLAB: "blocks come through device memory"}


@dataclass
class ShmLane:
    """Prefill's records of one pair."""

    request: SlabRequest
    slab: Slab
    slots: SlabSlots
    connection: socket.socket

    @property
    def is_used(self) -> bool:
        """Whether decode has the slab mapped."""
        return is_alive(self.connection)


class ShmSlab(OwnedSlab, Protocol):
    """Prefill's end of a slab in memory of the host."""

    @property
    def is_pinned(self) -> bool:
        """Whether a GPU may write the slots."""

    def slot(self, index: int) -> Bytes:
        """The bytes of a slot, uint8 `[slot_bytes]`."""


class HostLane(SlabLane, Protocol):
    """Prefill's records of one pair with a `ShmSlab`."""

    @property
    def slab(self) -> ShmSlab:
        """The pair's slab."""


H = TypeVar("H", bound=HostLane)


class HostLanes(SlabLanes[H]):
    """Prefill's slabs in memory of the host, together at most `max_bytes` bytes."""

    def __init__(
        self,
        instance: str,
        block_bytes: int,
        counters: SlabCounters,
        *,
        lease_s: float,
        max_bytes: int = SLAB_BYTES,
        pin: Pin = no_pin,
    ) -> None:
        """`block_bytes`: the largest slot that a peer may request. `pin` lets a GPU write slabs."""
        super().__init__(instance, counters, lease_s=lease_s)
        self._block_bytes, self._max_bytes, self._pin = block_bytes, max_bytes, pin

    def fill(self, items: Sequence[SendBlock], reader: BlockReader, now: float) -> list[SlabBlock]:
        """Copies the first blocks of `items`, all for one peer, into free slots.

        The others must be sent as messages.
        """
        lane = self._lanes.get(items[0].peer)
        if lane is None or not self.has(items[0].peer):
            return []
        slab, held = lane.slab, list[tuple[SendBlock, Slot]]()
        for item in items:
            slot = lane.slots.take((item.room, item.epoch, item.block), now + self._lease_s)
            if slot is None:
                break
            held.append((item, slot))
        self.counters.shm_full += not held
        fresh = [(item, slot) for item, slot in held if slot.header is None]
        fillings = [_filling(item, slab.slot(slot.index)) for item, slot in fresh]
        for (item, slot), digest in zip(fresh, reader.fill(fillings, is_pinned=slab.is_pinned), strict=True):
            slot.header = self._header(item, slab, slot, digest)
            self._count_block(item)
        return [slot.header for _, slot in held if slot.header is not None]

    @abstractmethod
    def _count_block(self, item: SendBlock) -> None:
        """Counts a filled block."""


class SenderSlabs(HostLanes[ShmLane]):
    """Prefill's slabs of shared memory."""

    def _count_block(self, item: SendBlock) -> None:
        self.counters.shm_blocks += 1
        self.counters.shm_bytes += item.size

    def _open(self, request: SlabRequest) -> ShmLane:
        left = self._max_bytes - sum(lane.slab.size for lane in self._lanes.values())
        num_slots = slots_that_fit(request, self._block_bytes, left, self._max_bytes, "--slab-mb")
        slab = Slab(num_slots, request.slot_bytes)
        try:
            connection = slab.hand_over(request.address, request.token)
        except SlabError:
            slab.close()
            raise
        slab.pin(self._pin)
        return ShmLane(request, slab, SlabSlots(num_slots), connection)

    def _end(self, lane: ShmLane) -> None:
        lane.slab.close()
        lane.connection.close()

    def _count(self) -> None:
        self.counters.slabs = len(self._lanes)


def _filling(item: SendBlock, slot: Bytes) -> Filling:
    layout = item.stream.layout
    seed = digest_seed(item.room, item.epoch, item.block, item.size, layout.name)
    pages = item.pages
    return Filling(slot, item.segments, pages, item.size, seed, item.columns, layout.sender_rows)


@dataclass
class _Asked:
    """A slab request that this worker sent."""

    prefill: str  # instance
    token: str
    num_slots: int
    slot_bytes: int
    transport: str
    block_bytes: int
    transports: tuple[str, ...]  # kinds of slabs that the pair may use, best first
    retry_at: float  # monotonic time of the next request
    early_slots: int = 0
    slab: MappedSlab | MappedDeviceSlab | None = None  # None until it is granted
    has_wire: bool = False

    @property
    def num_pulled(self) -> int:
        """The slots of the granted slab that pulls use; those behind them are for early runs."""
        granted = 0 if self.slab is None else self.slab.num_slots
        return min(granted, self.num_slots - self.early_slots)


class ReceiverSlabs:
    """Decode's slabs, at most one per prefill endpoint."""

    def __init__(
        self,
        instance: str,
        counters: SlabCounters,
        *,
        window: int,
        pin: Pin = no_pin,
        device: Device | None = None,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """`device`: the device of the pages, if its memory may be shared. `slot_bytes`: of its slots."""
        self._pin = pin  # lets a GPU read slabs
        self.counters = counters
        self._instance = instance
        self._window = window
        self._device, self._slot_bytes = device, slot_bytes
        self._door: SlabDoor | None = None  # opened by the first request
        self._asked: dict[Peer, _Asked] = {}
        self._sweep_at = 0.0

    def __repr__(self) -> str:
        return f"ReceiverSlabs({self.counters.slabs} of {len(self._asked)} peers)"

    def greet(
        self, peer: Peer, prefill: str, block_bytes: int, now: float, transports: Sequence[str] = (SHM,)
    ) -> SlabRequest | None:
        """The slab request after a handshake with process `prefill` that agreed on one of `transports`.

        `transports`: the kinds of slabs that the pair may use, best first. Returns None if the request was
        already sent.
        """
        asked = self._asked.get(peer)
        if (
            asked is not None
            and asked.prefill == prefill
            and (asked.slab is not None or now < asked.retry_at)
        ):
            return None
        self.drop(peer)
        return self._ask(peer, prefill, block_bytes, now + ASK_AGAIN_S, tuple(transports), tuple(transports))

    def ask_again(self, peer: Peer, now: float) -> SlabRequest | None:
        """The repeated request to a peer that denied the last one or never answered.

        Returns None until it is due.
        """
        asked = self._asked.get(peer)
        if asked is None:
            return None
        return self.greet(peer, asked.prefill, asked.block_bytes, now, asked.transports)

    def handle(self, peer: Peer, message: SlabDown) -> list[SlabUp]:
        """Handles the answer to a request.

        Returns the messages for prefill: where the slab cannot be used, the reason and the request for a slab
        of the next kind.
        """
        asked = self._asked.get(peer)
        if (
            asked is None
            or (asked.prefill, asked.token) != (message.instance, message.token)
            or asked.slab is not None
        ):
            return []
        answers: list[SlabUp] = []
        try:
            if isinstance(message, SlabDenied):
                raise SlabError(message.reason[:200])
            asked.slab = self._map(asked, message)
            asked.has_wire = message.has_wire and asked.transport == CUDA_SLAB
        except SlabError as error:
            if isinstance(message, SlabGrant):
                answers.append(
                    SlabUnusable(instance=self._instance, slab=message.slab, reason=str(error)[:1024])
                )
            answers += self._next(peer, asked, str(error))
            return answers
        self._count()
        logger.info(_ARRIVING[asked.transport], extra=log_fields(endpoint=peer, slots=message.num_slots))
        return answers

    def connections(self) -> list[tuple[Peer, socket.socket]]:
        """The connections of slabs that carry frames."""
        wires = [(peer, self.wire(peer)) for peer in self._asked]
        return [(peer, wire) for peer, wire in wires if wire is not None]

    def wire(self, peer: Peer) -> socket.socket | None:
        """The connection over which frames reach prefill; None if there is none."""
        asked = self._asked.get(peer)
        if asked is None or asked.slab is None or not asked.has_wire:
            return None
        return asked.slab.connection

    def sweep_soon(self) -> None:
        """Makes the next `sweep` due, because a connection has ended."""
        self._sweep_at = 0.0

    def is_pinned(self, peer: Peer) -> bool:
        """Whether a GPU may read the memory returned by `read`."""
        asked = self._asked.get(peer)
        return asked is not None and asked.slab is not None and asked.slab.is_pinned

    def run_of(self, peer: Peer) -> tuple[int, int | None]:
        """The largest number of blocks in a slot, and the number of slots to have in flight.

        (1, None) unless the slab is in device memory.
        """
        asked = self._asked.get(peer)
        if asked is None or not isinstance(asked.slab, MappedDeviceSlab):
            return 1, None
        slab = asked.slab
        return slab.slot_bytes // asked.block_bytes, asked.num_pulled

    def is_early(self, peer: Peer, block: SlabBlock) -> bool:
        """Whether the run is in slots for what prefill sends before it is pulled."""
        asked = self._asked.get(peer)
        return asked is not None and self._slab_of(peer, block) is not None and block.slot >= asked.num_pulled

    def read(self, peer: Peer, block: SlabBlock) -> Bytes | None:
        """The bytes of a block, which prefill may still change; None if no slot of shared memory matches."""
        slab = self._slab_of(peer, block)
        return slab.block(block.slot, block.size) if isinstance(slab, MappedSlab) else None

    def slot(self, peer: Peer, block: SlabBlock) -> int | None:
        """The address of a run of blocks; None if no slot of device memory matches."""
        slab = self._slab_of(peer, block)
        if not isinstance(slab, MappedDeviceSlab):
            return None
        fits = block.size <= slab.slot_bytes or self.is_early(peer, block)
        return slab.slot(block.slot, block.size) if fits else None

    def is_on_device(self, peer: Peer, block: SlabBlock) -> bool:
        """Whether the block is in a slab of device memory."""
        return isinstance(self._slab_of(peer, block), MappedDeviceSlab)

    def freed(self, block: SlabBlock) -> SlotFree:
        """The message that frees the slot after the block was copied."""
        return SlotFree(
            room=block.room,
            epoch=block.epoch,
            instance=self._instance,
            block=block.block,
            slab=block.slab,
            slot=block.slot,
        )

    def unusable(self, peer: Peer, block: SlabBlock) -> SlabUnusable:
        """The message after `read` or `slot` refused a descriptor. The slab is no longer used."""
        asked = self._asked.get(peer)
        if asked is not None and asked.slab is not None and asked.slab.id == block.slab:
            self._note_fallback(peer, asked.transport, f"no slot {block.slot} with {block.size} bytes")
            asked.slab.close()
            asked.slab = None
            self._count()
        return SlabUnusable(instance=self._instance, slab=block.slab, reason="no such slab or slot")

    def drop(self, peer: Peer) -> None:
        """Drops the peer's slab after its link closed or another process took the endpoint."""
        asked = self._asked.pop(peer, None)
        if asked is not None and asked.slab is not None:
            asked.slab.close()
        self._count()

    def sweep(self, now: float) -> list[Peer]:
        """Drops slabs that prefill no longer holds, mostly because it has gone. Call it periodically.

        Returns the peers whose slab was dropped.
        """
        if now < self._sweep_at:
            return []
        self._sweep_at = now + SWEEP_S
        lost: list[Peer] = []
        for peer, asked in self._asked.items():
            if asked.slab is not None and not is_alive(asked.slab.connection):
                asked.slab.close()
                asked.slab, asked.retry_at = None, now
                lost.append(peer)
        if self._door is not None:
            self._door.sweep(*self._awaited())  # the grant of a slab may be lost
        self._count()
        return lost

    def next_deadline(self) -> float | None:
        """Monotonic time of the next `sweep` with work; None before the first request."""
        return self._sweep_at if self._door is not None else None

    def close(self) -> None:
        """Closes all slabs and the listener. Idempotent."""
        for peer in list(self._asked):
            self.drop(peer)
        if self._door is not None:
            self._door.close()

    def _ask(
        self,
        peer: Peer,
        prefill: str,
        block_bytes: int,
        retry_at: float,
        transports: tuple[str, ...],
        left: tuple[str, ...],
    ) -> SlabRequest | None:
        """The request for a slab of the first kind of `left`."""
        transport = left[0]
        try:
            self._door = self._door or SlabDoor()
        except SlabError as error:
            self._note_fallback(peer, transport, str(error))
            return None
        num_slots, slot_bytes, early_slots = self._window + SPARE_SLOTS, block_bytes, 0
        if transport == CUDA_SLAB:
            early_slots = EARLY_SLOTS
            # none to spare: decode frees a slot before it pulls into it, in the same frame or an earlier one
            num_slots = min(self._window, DEVICE_WINDOW) + early_slots
            slot_bytes = slot_bytes_of(block_bytes, self._slot_bytes)
        asked = self._asked[peer] = _Asked(
            prefill,
            secrets.token_hex(16),
            num_slots,
            slot_bytes,
            transport,
            block_bytes,
            transports,
            retry_at,
            early_slots,
        )
        return SlabRequest(
            instance=self._instance,
            address=self._door.address,
            token=asked.token,
            num_slots=num_slots,
            slot_bytes=slot_bytes,
            transport=transport,
            early_slots=early_slots,
            has_wire=transport == CUDA_SLAB,
            hears_soon=transport == CUDA_SLAB,
            hears_plan=transport == CUDA_SLAB,
        )

    def _next(self, peer: Peer, asked: _Asked, reason: str) -> list[SlabUp]:
        """The request for the next kind of slab, if there is one."""
        self._note_fallback(peer, asked.transport, reason)
        left = asked.transports[asked.transports.index(asked.transport) + 1 :]
        if not left:
            return []
        request = self._ask(peer, asked.prefill, asked.block_bytes, asked.retry_at, asked.transports, left)
        return [] if request is None else [request]

    def _slab_of(self, peer: Peer, block: SlabBlock) -> MappedSlab | MappedDeviceSlab | None:
        asked = self._asked.get(peer)
        if asked is None or asked.slab is None or asked.slab.id != block.slab:
            return None
        return asked.slab

    def _map(self, asked: _Asked, grant: SlabGrant) -> MappedSlab | MappedDeviceSlab:
        assert self._door is not None, "there is a request"
        arrived = self._door.take(grant.token, *self._awaited())
        if arrived is None:
            raise SlabError("the slab's descriptor did not arrive")
        fd, connection = arrived
        if grant.num_slots > asked.num_slots or grant.slot_bytes != asked.slot_bytes:
            connection.close()
            if fd != NO_FD:
                os.close(fd)
            raise SlabError(f"{grant.num_slots} slots of {grant.slot_bytes} bytes were not asked for")
        if asked.transport == CUDA_SLAB:
            assert self._device is not None, "device memory was asked for"
            return MappedDeviceSlab(
                self._device, grant.slab, grant.num_slots, grant.slot_bytes, grant.handle, connection
            )
        slab = MappedSlab(grant.slab, grant.num_slots, grant.slot_bytes, fd, connection)
        slab.pin(self._pin)
        return slab

    def _awaited(self) -> tuple[Callable[[str], bool], Callable[[str], bool]]:
        """Whether a token is expected at the door, and whether it comes without a descriptor."""
        awaited = [asked for asked in self._asked.values() if asked.slab is None]
        alone = {asked.token for asked in awaited if asked.transport == CUDA_SLAB}
        return {asked.token for asked in awaited}.__contains__, alone.__contains__

    def _note_fallback(self, peer: Peer, transport: str, reason: str) -> None:
        self.counters.shm_fallbacks += 1
        logger.warning(
            "blocks take another way", extra=log_fields(endpoint=peer, transport=transport, reason=reason)
        )

    def _count(self) -> None:
        slabs = [asked.slab for asked in self._asked.values() if asked.slab is not None]
        self.counters.device_slabs = sum(isinstance(slab, MappedDeviceSlab) for slab in slabs)
        self.counters.slabs = len(slabs) - self.counters.device_slabs
