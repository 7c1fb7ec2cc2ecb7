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
digest. After any failure the pair continues with messages: prefill may answer every pull with a Block, and
decode sends SlabUnusable.
"""

import logging
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, fields

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
from ..memory.pinning import Bytes, Pin, no_pin
from ..memory.slab import MappedSlab, Slab, SlabDoor, SlabError, is_alive
from ..memory.slot_table import Slot, SlotTable
from ..protocol.layout import digest_seed
from ..protocol.session import Peer, SendBlock

logger = logging.getLogger(__name__)

SLAB_BYTES = 256 << 20  # limit of all slabs of a prefill worker together
SPARE_SLOTS = 2  # slots beyond the window, for blocks that are pulled again
MIN_SLOTS = 2
SWEEP_S = 0.5
ASK_AGAIN_S = 30.0


@dataclass
class SlabCounters:
    """Monotonic totals of one endpoint, except for the gauge `slabs`."""

    slabs: int = 0  # slabs in use now
    shm_blocks: int = 0
    shm_bytes: int = 0
    shm_full: int = 0  # blocks sent as messages because every slot was in use
    shm_fallbacks: int = 0  # pairs that were denied a slab or lost it

    def snapshot(self) -> dict[str, float]:
        """Totals by name, for heartbeats."""
        return {f.name: float(getattr(self, f.name)) for f in fields(self)}


@dataclass
class _Lane:
    """Prefill's records of one pair."""

    request: SlabRequest
    slab: Slab
    slots: SlotTable
    connection: socket.socket

    def close(self) -> None:
        self.slab.close()
        self.connection.close()


class SenderSlabs:
    """Prefill's slabs, at most one per connection, together at most `max_bytes` bytes."""

    def __init__(
        self,
        instance: str,
        block_bytes: int,
        *,
        lease_s: float,
        max_bytes: int = SLAB_BYTES,
        pin: Pin = no_pin,
    ) -> None:
        """`block_bytes`: the largest slot that a peer may request.

        `lease_s`: seconds until an unfreed slot is reused. `pin` lets a GPU write slabs.
        """
        self.counters = SlabCounters()
        self._instance, self._block_bytes = instance, block_bytes
        self._lease_s, self._max_bytes, self._pin = lease_s, max_bytes, pin
        self._lanes: dict[Peer, _Lane] = {}
        self._sweep_at = 0.0

    def __repr__(self) -> str:
        return f"SenderSlabs({', '.join(repr(lane.slots) for lane in self._lanes.values())})"

    @property
    def slots(self) -> tuple[int, int]:
        """The slots in use and all slots, over the slabs of all peers."""
        tables = [lane.slots for lane in self._lanes.values()]
        return sum(table.num_held for table in tables), sum(table.num_slots for table in tables)

    def handle(self, peer: Peer, message: SlabUp) -> SlabDown | None:
        """Handles one message of a greeted peer; returns the answer, None if there is none."""
        if isinstance(message, SlabRequest):
            return self._grant(peer, message)
        lane = self._lanes.get(peer)
        if lane is not None and lane.slab.id == message.slab:
            if isinstance(message, SlotFree):
                lane.slots.free((message.room, message.epoch, message.block), message.slot)
            else:
                self._fall_back(peer, f"decode cannot read the slab: {message.reason[:200]}")
        return None

    def fill(self, items: Sequence[SendBlock], reader: BlockReader, now: float) -> list[SlabBlock]:
        """Copies the first blocks of `items`, all for one peer, into free slots.

        The others must be sent as messages.
        """
        lane = self._lanes.get(items[0].peer)
        if lane is None:
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
            self.counters.shm_blocks += 1
            self.counters.shm_bytes += item.size
        return [slot.header for _, slot in held if slot.header is not None]

    def _header(self, item: SendBlock, slab: Slab, slot: Slot, digest: int) -> SlabBlock:
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
        for peer, lane in list(self._lanes.items()):
            lane.slots.free_where(lambda _, ends_at: now >= ends_at)
            if not is_alive(lane.connection):
                self.drop(peer)

    def next_deadline(self) -> float | None:
        """Monotonic time of the next `sweep` with work; None without slabs."""
        return self._sweep_at if self._lanes else None

    def drop(self, peer: Peer) -> None:
        """Drops the slab of a closed connection."""
        lane = self._lanes.pop(peer, None)
        if lane is not None:
            lane.close()
        self.counters.slabs = len(self._lanes)

    def close(self) -> None:
        """Closes all slabs. Idempotent."""
        for peer in list(self._lanes):
            self.drop(peer)

    def _grant(self, peer: Peer, request: SlabRequest) -> SlabDown:
        lane = self._lanes.get(peer)
        if lane is not None and lane.request.token != request.token:
            self.drop(peer)  # decode lost the old slab
            lane = None
        try:
            lane = lane or self._open(request)
        except SlabError as error:
            self.counters.shm_fallbacks += 1
            logger.warning(
                "no shared memory for decode", extra=log_fields(decode=request.instance, reason=str(error))
            )
            return SlabDenied(instance=self._instance, token=request.token, reason=str(error))
        self._lanes[peer] = lane
        self.counters.slabs = len(self._lanes)
        return SlabGrant(
            instance=self._instance,
            token=request.token,
            slab=lane.slab.id,
            num_slots=lane.slab.num_slots,
            slot_bytes=lane.slab.slot_bytes,
        )

    def _open(self, request: SlabRequest) -> _Lane:
        if request.slot_bytes > self._block_bytes:
            raise SlabError(f"slots of {request.slot_bytes} bytes, at most {self._block_bytes} are allowed")
        left = self._max_bytes - sum(lane.slab.size for lane in self._lanes.values())
        num_slots = min(request.num_slots, left // request.slot_bytes)
        if num_slots < MIN_SLOTS:
            raise SlabError(f"all {self._max_bytes >> 20} MiB for slabs are in use; raise --slab-mb")
        slab = Slab(num_slots, request.slot_bytes)
        try:
            connection = slab.hand_over(request.address, request.token)
        except SlabError:
            slab.close()
            raise
        slab.pin(self._pin)
        return _Lane(request, slab, SlotTable(num_slots), connection)

    def _fall_back(self, peer: Peer, reason: str) -> None:
        self.counters.shm_fallbacks += 1
        logger.warning(
            "blocks go as messages",
            extra=log_fields(decode=self._lanes[peer].request.instance, reason=reason),
        )
        self.drop(peer)


def _filling(item: SendBlock, slot: Bytes) -> Filling:
    seed = digest_seed(item.room, item.epoch, item.block, item.size)
    return Filling(slot, item.segments, item.pages[item.first_page :], item.size, seed, item.columns)


@dataclass
class _Asked:
    """A slab request that this worker sent."""

    prefill: str  # instance
    token: str
    slot_bytes: int
    retry_at: float  # monotonic time of the next request
    slab: MappedSlab | None = None  # None until it is granted


class ReceiverSlabs:
    """Decode's slabs, at most one per prefill endpoint."""

    def __init__(self, instance: str, *, window: int, pin: Pin = no_pin) -> None:
        self._pin = pin  # lets a GPU read slabs
        self.counters = SlabCounters()
        self._instance = instance
        self._num_slots = window + SPARE_SLOTS
        self._door: SlabDoor | None = None  # opened by the first request
        self._asked: dict[Peer, _Asked] = {}
        self._sweep_at = 0.0

    def __repr__(self) -> str:
        return f"ReceiverSlabs({self.counters.slabs} of {len(self._asked)} peers)"

    def greet(self, peer: Peer, prefill: str, slot_bytes: int, now: float) -> SlabRequest | None:
        """The slab request after a handshake with process `prefill` that agreed on shared memory.

        Returns None if it was already sent.
        """
        asked = self._asked.get(peer)
        if (
            asked is not None
            and asked.prefill == prefill
            and (asked.slab is not None or now < asked.retry_at)
        ):
            return None
        self.drop(peer)
        try:
            self._door = self._door or SlabDoor()
        except SlabError as error:
            self._note_fallback(peer, str(error))
            return None
        asked = self._asked[peer] = _Asked(prefill, secrets.token_hex(16), slot_bytes, now + ASK_AGAIN_S)
        return SlabRequest(
            instance=self._instance,
            address=self._door.address,
            token=asked.token,
            num_slots=self._num_slots,
            slot_bytes=slot_bytes,
        )

    def ask_again(self, peer: Peer, now: float) -> SlabRequest | None:
        """The repeated request to a peer that denied the last one or never answered.

        Returns None until it is due.
        """
        asked = self._asked.get(peer)
        return None if asked is None else self.greet(peer, asked.prefill, asked.slot_bytes, now)

    def handle(self, peer: Peer, message: SlabDown) -> SlabUnusable | None:
        """Handles the answer to a request.

        Returns the message for prefill if the slab cannot be used, else None.
        """
        asked = self._asked.get(peer)
        if (
            asked is None
            or (asked.prefill, asked.token) != (message.instance, message.token)
            or asked.slab is not None
        ):
            return None
        if isinstance(message, SlabDenied):
            self._note_fallback(peer, message.reason[:200])
            return None
        try:
            asked.slab = self._map(asked, message)
        except SlabError as error:
            self._note_fallback(peer, str(error))
            return SlabUnusable(instance=self._instance, slab=message.slab, reason=str(error))
        self._count()
        logger.info(
            "blocks come through shared memory", extra=log_fields(endpoint=peer, slots=message.num_slots)
        )
        return None

    def is_pinned(self, peer: Peer) -> bool:
        """Whether a GPU may read the memory returned by `read`."""
        asked = self._asked.get(peer)
        return asked is not None and asked.slab is not None and asked.slab.is_pinned

    def read(self, peer: Peer, block: SlabBlock) -> Bytes | None:
        """The bytes of a block, which prefill may still change; None if no slot matches."""
        asked = self._asked.get(peer)
        if asked is None or asked.slab is None or asked.slab.id != block.slab:
            return None
        return asked.slab.block(block.slot, block.size)

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
        """The message after `read` refused a descriptor. The slab is no longer used."""
        asked = self._asked.get(peer)
        if asked is not None and asked.slab is not None and asked.slab.id == block.slab:
            self._note_fallback(peer, f"no slot {block.slot} with {block.size} bytes")
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

    def sweep(self, now: float) -> None:
        """Drops slabs that prefill no longer holds, mostly because it has gone. Call it periodically."""
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_S
        for asked in self._asked.values():
            if asked.slab is not None and not is_alive(asked.slab.connection):
                asked.slab.close()
                asked.slab, asked.retry_at = None, now
        self._count()

    def next_deadline(self) -> float | None:
        """Monotonic time of the next `sweep` with work; None without slabs."""
        return self._sweep_at if self.counters.slabs else None

    def close(self) -> None:
        """Closes all slabs and the listener. Idempotent."""
        for peer in list(self._asked):
            self.drop(peer)
        if self._door is not None:
            self._door.close()

    def _map(self, asked: _Asked, grant: SlabGrant) -> MappedSlab:
        if grant.num_slots > self._num_slots or grant.slot_bytes != asked.slot_bytes:
            raise SlabError(f"{grant.num_slots} slots of {grant.slot_bytes} bytes were not asked for")
        assert self._door is not None, "there is a request"
        expected = {asked.token for asked in self._asked.values() if asked.slab is None}
        arrived = self._door.take(grant.token, expected.__contains__)
        if arrived is None:
            raise SlabError("the slab's descriptor did not arrive")
        slab = MappedSlab(grant.slab, grant.num_slots, grant.slot_bytes, *arrived)
        slab.pin(self._pin)
        return slab

    def _note_fallback(self, peer: Peer, reason: str) -> None:
        self.counters.shm_fallbacks += 1
        logger.warning("blocks come as messages", extra=log_fields(endpoint=peer, reason=reason))

    def _count(self) -> None:
        self.counters.slabs = sum(asked.slab is not None for asked in self._asked.values())
