"""Blocks that decode reads out of prefill's memory through NIXL, mostly between hosts.

The messages are those of `shm`. Only the way to the bytes differs: the slab is memory of prefill that its
agent has registered for one pair, and decode's agent reads slots of it into a landing slab of its own.

    decode                                  prefill
    opens its agent
    SlabRequest(transport="nixl")     ->    opens its agent, registers a slab
                                      <-    SlabGrant(agent, metadata, base), or SlabDenied
    prepares one list of descriptors for both slabs
    Pull                              ->    fills a slot
                                      <-    SlabBlock, or Block where no slot is free
    reads the slot by its index
    SlotFree                          ->    the slot can be filled again

The block is then copied from the landing slot into its pages and digested on the way, as from shared memory.
NIXL never has the address of a page: a read that is under way when its room ends writes a landing slot, which
stays taken until the read has ended. Prefill keeps the memory of a slab that has ended for the next pair,
because over tcp a late read of memory that is gone would end its process.

Until the pair is connected, and after a failure, blocks are messages. A lane whose reads all stand still for
STUCK_S is given up, so that a fabric that swallows packets costs no room.
"""

import logging
import mmap
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...cluster.net.transport_names import NIXL
from ...cluster.process.log import fields as log_fields
from ...cluster.protocol.message_parts import AGENT_BYTES
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
from ..memory.blocks import BlockReader
from ..memory.pinning import Bytes, Pin, Unpin, no_pin
from ..memory.slab import SlabError
from ..memory.slab_slots import SlabSlots
from ..protocol.session import Peer, SendBlock
from .nixl_agent import OpenAgent
from .nixl_thread import (
    Connect,
    Connected,
    Failed,
    Leave,
    Left,
    NixlThread,
    Open,
    Opened,
    Read,
    ReadEnded,
    Share,
    Shared,
    Slots,
    address_of,
)
from .shm import ASK_AGAIN_S, SPARE_SLOTS, HostLanes
from .slab_lanes import MIN_SLOTS, SlabCounters, slots_that_fit

logger = logging.getLogger(__name__)

PROBE_S = 2.0  # quiet lanes of prefill are offered again at this pace, which fails where decode has gone
MAX_ENDED = 2  # lanes of a peer whose reads have not ended; with as many, decode asks for no other one
STUCK_S = 1.5  # of reads without progress, or of a connection that is not made; less than two repeated pulls


class NixlSlab:
    """Prefill's end of a slab."""

    handle = b""
    has_wire = False

    def __init__(self, num_slots: int, slot_bytes: int, memory: Bytes, pin: Pin) -> None:
        """`memory`: zeroed, at least as long as the slots."""
        self.id = secrets.token_hex(16)
        self.num_slots, self.slot_bytes, self.memory = num_slots, slot_bytes, memory
        self._unpin: Unpin | None = pin(memory)

    def __repr__(self) -> str:
        return f"NixlSlab({self.id[:8]}, {self.num_slots} x {self.slot_bytes})"

    @property
    def is_pinned(self) -> bool:
        """Whether a GPU may write the slots."""
        return self._unpin is not None

    def slot(self, index: int) -> Bytes:
        """The bytes of a slot, uint8 `[slot_bytes]`."""
        return self.memory[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def unpin(self) -> None:
        """Ends the registration with the GPU's driver. Idempotent."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None


@dataclass
class NixlLane:
    """Prefill's records of one pair."""

    request: SlabRequest
    slab: NixlSlab
    slots: SlabSlots
    grant: SlabGrant
    probe_at: float

    is_used = True  # until the connection to decode is lost


class NixlLanes(HostLanes[NixlLane]):
    """Prefill's slabs for reads through NIXL. A request is answered after its slab is registered."""

    def __init__(
        self,
        instance: str,
        block_bytes: int,
        counters: SlabCounters,
        open_agent: OpenAgent,
        *,
        lease_s: float,
        max_bytes: int,
        pin: Pin = no_pin,
    ) -> None:
        super().__init__(instance, block_bytes, counters, lease_s=lease_s, max_bytes=max_bytes, pin=pin)
        self.thread = NixlThread(open_agent, instance)
        self._asked: dict[str, tuple[Peer, SlabRequest, NixlSlab]] = {}  # slab -> who waits for it
        self._waiting: dict[Peer, SlabRequest] = {}  # for the memory of a slab whose pair has just ended
        self._used: dict[str, NixlSlab] = {}  # every slab whose memory is registered, or is about to be
        self._spare: list[Bytes] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs, those that wait for the next pair too."""
        return sum(slab.memory.size for slab in self._used.values()) + sum(m.size for m in self._spare)

    def handle(self, peer: Peer, message: SlabUp) -> SlabDown | None:
        """As `SlabLanes.handle`; a request may be answered by `answers` later."""
        if not isinstance(message, SlabRequest):
            return super().handle(peer, message)
        lane = self._lanes.get(peer)
        if lane is not None and lane.request.token == message.token:
            return lane.grant
        asked = [*(request for _, request, _ in self._asked.values()), *self._waiting.values()]
        if any(request.token == message.token for request in asked):
            return None
        self.drop(peer)  # decode lost the old slab
        return self._ask(peer, message)

    def answers(self, now: float) -> list[tuple[Peer, SlabDown]]:
        """Answers to requests, and repeated grants to peers that have been quiet; they are lost on none."""
        found: list[tuple[Peer, SlabDown]] = []
        is_freed = False
        for outcome in self.thread.outcomes():
            asked = self._asked.pop(outcome.lane, None)  # None: it was dropped meanwhile
            if isinstance(outcome, Left | Failed):
                slab = self._used.pop(outcome.lane)
                slab.unpin()
                self._spare.append(slab.memory)
                is_freed = True
            if asked is not None and isinstance(outcome, Shared | Failed):
                found.append((asked[0], self._answer(*asked, outcome, now)))
        if is_freed:
            waiting, self._waiting = self._waiting, {}
            later = [(peer, self._ask(peer, request)) for peer, request in waiting.items()]
            found += [(peer, answer) for peer, answer in later if answer is not None]
        for peer, lane in self._lanes.items():
            if now >= lane.probe_at:
                lane.probe_at = now + PROBE_S
                found.append((peer, lane.grant))
        self.thread.serve(is_serving=any(lane.slots.num_held for lane in self._lanes.values()))
        return found

    def fill(self, items: Sequence[SendBlock], reader: BlockReader, now: float) -> list[SlabBlock]:
        """As `HostLanes.fill`; from now on the thread serves the reads that the headers bring."""
        headers = super().fill(items, reader, now)
        if headers:
            self.thread.serve(is_serving=True)
        return headers

    def next_deadline(self) -> float | None:
        """As `SlabLanes.next_deadline`."""
        times = [self._sweep_at, *(lane.probe_at for lane in self._lanes.values())]
        return min(times) if self._lanes else None

    def drop(self, peer: Peer) -> None:
        """As `SlabLanes.drop`; also of a request that is not answered yet."""
        self._waiting.pop(peer, None)
        for name, (asker, _, slab) in list(self._asked.items()):
            if asker == peer:
                del self._asked[name]
                self.thread.order(Leave(slab.id))
        super().drop(peer)

    def close(self) -> None:
        """As `SlabLanes.close`."""
        super().close()
        self.thread.close()

    def _ask(self, peer: Peer, request: SlabRequest) -> SlabDown | None:
        """Has a slab registered. Returns the answer if that is not possible."""
        try:
            slab = self._allocate(request)
        except SlabError as error:
            known = {lane.slab.id for lane in self._lanes.values()} | set(self._asked)
            if set(self._used) <= known:
                return self._denied(request, str(error))
            self._waiting[peer] = request
            return None
        self._asked[slab.id] = peer, request, slab
        self._used[slab.id] = slab
        self.thread.order(Share(slab.id, slab.memory))
        return None

    def _answer(
        self, peer: Peer, request: SlabRequest, slab: NixlSlab, outcome: Shared | Failed, now: float
    ) -> SlabDown:
        if isinstance(outcome, Failed):
            return self._denied(request, outcome.reason)
        if len(outcome.metadata) > AGENT_BYTES:
            self.thread.order(Leave(slab.id))
            return self._denied(request, f"the agent's metadata has {len(outcome.metadata)} bytes")
        grant = SlabGrant(
            instance=self._instance,
            token=request.token,
            slab=slab.id,
            num_slots=slab.num_slots,
            slot_bytes=slab.slot_bytes,
            agent=outcome.agent,
            metadata=outcome.metadata,
            base=address_of(slab.memory),
        )
        self._lanes[peer] = NixlLane(request, slab, SlabSlots(slab.num_slots), grant, now + PROBE_S)
        self._count()
        return grant

    def _denied(self, request: SlabRequest, reason: str) -> SlabDenied:
        self.counters.shm_fallbacks += 1
        logger.warning(
            "no slab for decode",
            extra=log_fields(decode=request.instance, transport=NIXL, reason=reason),
        )
        return SlabDenied(instance=self._instance, token=request.token, reason=reason[:1024])

    def _allocate(self, request: SlabRequest) -> NixlSlab:
        """A slab of spare memory, or of new memory if none of it is long enough and more slots fit there."""
        wanted, left = request.num_slots * request.slot_bytes, self._max_bytes - self.num_bytes
        if self._spare and request.slot_bytes <= self._block_bytes:
            fitting = [memory for memory in self._spare if memory.size >= wanted]
            memory = min(fitting or [max(self._spare, key=_size_of)], key=_size_of)
            num_slots = min(request.num_slots, memory.size // request.slot_bytes)
            if fitting or num_slots >= max(MIN_SLOTS, left // request.slot_bytes):
                self._spare = [one for one in self._spare if one is not memory]
                return NixlSlab(num_slots, request.slot_bytes, memory, self._pin)
        num_slots = slots_that_fit(request, self._block_bytes, left, self._max_bytes, "--slab-mb")
        memory = _memory_of(num_slots * request.slot_bytes)
        return NixlSlab(num_slots, request.slot_bytes, memory, self._pin)

    def _open(self, request: SlabRequest) -> NixlLane:
        raise AssertionError("slabs are opened by `answers`")

    def _end(self, lane: NixlLane) -> None:
        self.thread.order(Leave(lane.slab.id))

    def _count(self) -> None:
        self.counters.nixl_slabs = len(self._lanes)

    def _count_block(self, item: SendBlock) -> None:
        self.counters.nixl_blocks += 1
        self.counters.nixl_bytes += item.size


# --- decode -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrived:
    """A block in a landing slot."""

    peer: Peer
    block: SlabBlock
    data: Bytes  # the block's bytes, valid until `PairReads.landed`
    began: float  # monotonic time of its SlabBlock
    is_pinned: bool


@dataclass
class _Pair:
    """Decode's records of one prefill endpoint."""

    prefill: str  # instance
    token: str
    block_bytes: int
    retry_at: float
    lane: "_Landings | None" = None


@dataclass
class _Landings:
    """A lane of decode: the landing slab, and the blocks on their way into it."""

    peer: Peer
    slab: str
    num_slots: int
    slot_bytes: int
    memory: Bytes
    unpin: Unpin | None
    moved_at: float  # of the last progress
    free: list[int]
    is_connected: bool = False
    waiting: deque[tuple[SlabBlock, float]] = field(default_factory=deque)
    reading: dict[int, tuple[SlabBlock, float]] = field(default_factory=dict)  # by landing slot

    def bytes_of(self, landing: int, size: int) -> Bytes:
        return self.memory[landing * self.slot_bytes : landing * self.slot_bytes + size]

    @property
    def is_waiting(self) -> bool:
        return not self.is_connected or bool(self.reading)


class PairReads:
    """Decode's lanes, at most one per prefill endpoint."""

    def __init__(
        self, instance: str, counters: SlabCounters, open_agent: OpenAgent, *, window: int, pin: Pin = no_pin
    ) -> None:
        """`window`: blocks in flight per endpoint."""
        self.counters = counters
        self.thread = NixlThread(open_agent, instance)
        self._instance, self._window, self._pin = instance, window, pin
        self._pairs: dict[Peer, _Pair] = {}
        self._ended: dict[str, _Landings] = {}  # their memory may still be written

    def __repr__(self) -> str:
        return f"PairReads({self.counters.nixl_slabs} of {len(self._pairs)} peers, ended={len(self._ended)})"

    def greet(self, peer: Peer, prefill: str, block_bytes: int, now: float) -> None:
        """Asks process `prefill`, which agreed on this transport, for a slab once the agent is open."""
        pair = self._pairs.get(peer)
        if pair is not None and pair.prefill == prefill and (pair.lane is not None or now < pair.retry_at):
            return
        self.drop(peer)
        self._pairs[peer] = pair = _Pair(prefill, secrets.token_hex(16), block_bytes, now + ASK_AGAIN_S)
        # where reads never end, each new lane would keep more memory
        if sum(lane.peer == peer for lane in self._ended.values()) < MAX_ENDED:
            self.thread.order(Open(pair.token))

    def ask_again(self, peer: Peer, now: float) -> None:
        """Repeats the request to a peer that denied it or never answered, when it is due."""
        pair = self._pairs.get(peer)
        if pair is not None:
            self.greet(peer, pair.prefill, pair.block_bytes, now)

    def handle(self, peer: Peer, message: SlabDown, now: float) -> list[SlabUp]:
        """Handles the answer to a request. Returns the messages for prefill."""
        pair = self._pairs.get(peer)
        if pair is None or (pair.prefill, pair.token) != (message.instance, message.token) or pair.lane:
            return []
        if isinstance(message, SlabDenied):
            self._note_fallback(peer, message.reason[:200])
            return []
        if message.num_slots > self._window + SPARE_SLOTS or message.slot_bytes != pair.block_bytes:
            reason = f"{message.num_slots} slots of {message.slot_bytes} bytes were not asked for"
            self._note_fallback(peer, reason)
            return [SlabUnusable(instance=self._instance, slab=message.slab, reason=reason)]
        remote = Slots(message.base, message.num_slots, message.slot_bytes)
        try:
            memory = _memory_of(message.num_slots * message.slot_bytes)
        except SlabError as error:
            self._note_fallback(peer, str(error))
            return [SlabUnusable(instance=self._instance, slab=message.slab, reason=str(error))]
        pair.lane = _Landings(
            peer,
            message.slab,
            message.num_slots,
            message.slot_bytes,
            memory,
            self._pin(memory),
            moved_at=now,
            free=list(range(message.num_slots)),
        )
        self.thread.order(Connect(message.slab, message.agent, message.metadata, remote, memory))
        self._count()
        return []

    def has(self, peer: Peer, block: SlabBlock) -> bool:
        """Whether the block lies in the slab of this pair."""
        pair = self._pairs.get(peer)
        return pair is not None and pair.lane is not None and pair.lane.slab == block.slab

    def is_reading(self, peer: Peer, block: SlabBlock) -> bool:
        """Whether this block is on its way already."""
        pair = self._pairs.get(peer)
        if pair is None or pair.lane is None:
            return False
        name, lane = _name(block), pair.lane
        return any(_name(one) == name for one, _ in (*lane.waiting, *lane.reading.values()))

    def begin(self, peer: Peer, block: SlabBlock, now: float) -> bool:
        """Reads the block, as soon as the pair is connected and a landing slot is free.

        False if there is no such slot.
        """
        lane = self._pairs[peer].lane
        assert lane is not None, "`has` was asked"
        if block.slot >= lane.num_slots or block.size > lane.slot_bytes or block.count != 1:
            return False
        if not lane.is_waiting:
            lane.moved_at = now  # it begins to wait
        lane.waiting.append((block, now))
        self._fill(lane)
        return True

    def settle(self, now: float) -> tuple[list[Arrived], list[tuple[Peer, SlabUp]]]:
        """The blocks that have arrived, and messages for prefill: requests, freed slots, slabs given up."""
        arrived: list[Arrived] = []
        messages: list[tuple[Peer, SlabUp]] = []
        by_slab = {pair.lane.slab: peer for peer, pair in self._pairs.items() if pair.lane is not None}
        by_token = {pair.token: peer for peer, pair in self._pairs.items()}
        for outcome in self.thread.outcomes():
            if isinstance(outcome, Left):
                self._free(outcome.lane)
                continue
            peer = by_slab.get(outcome.lane) or by_token.get(outcome.lane)
            pair = self._pairs.get(peer) if peer is not None else None
            if peer is None or pair is None:
                if isinstance(outcome, Failed):
                    self._free(outcome.lane)  # it was never connected
                continue
            if isinstance(outcome, Opened):
                messages.append((peer, self._request(pair)))
            elif isinstance(outcome, Connected) and pair.lane is not None:
                pair.lane.is_connected, pair.lane.moved_at = True, now
                logger.info(
                    "blocks are read through NIXL", extra=log_fields(endpoint=peer, slots=pair.lane.num_slots)
                )
                self._fill(pair.lane)
            elif isinstance(outcome, ReadEnded) and pair.lane is not None:
                self._ended_read(peer, pair.lane, outcome, arrived, messages, now)
            elif isinstance(outcome, Failed):
                messages += self._give_up(peer, outcome.reason, now)
                self._free(outcome.lane)
        for peer, pair in self._pairs.items():
            if pair.lane is not None and pair.lane.is_waiting and now >= pair.lane.moved_at + STUCK_S:
                messages += self._give_up(peer, f"nothing arrived for {STUCK_S:g} s", now)
        return arrived, messages

    def landed(self, arrived: Arrived) -> SlotFree:
        """Frees the landing slot of a block that was copied. Returns the message that frees prefill's."""
        pair = self._pairs.get(arrived.peer)
        if pair is not None and pair.lane is not None and pair.lane.slab == arrived.block.slab:
            offset = address_of(arrived.data) - address_of(pair.lane.memory)
            pair.lane.free.append(offset // pair.lane.slot_bytes)
            self._fill(pair.lane)
        return self.freed(arrived.block)

    def freed(self, block: SlabBlock) -> SlotFree:
        """The message that frees prefill's slot."""
        return SlotFree(
            room=block.room,
            epoch=block.epoch,
            instance=self._instance,
            block=block.block,
            slab=block.slab,
            slot=block.slot,
        )

    def unusable(self, peer: Peer, block: SlabBlock, now: float) -> list[tuple[Peer, SlabUp]]:
        """The messages after `begin` refused a block. The slab is no longer used."""
        return self._give_up(peer, f"no slot {block.slot} with {block.size} bytes", now)

    def drop(self, peer: Peer) -> None:
        """Ends the lane after the peer's link closed or another process took the endpoint."""
        pair = self._pairs.pop(peer, None)
        if pair is not None and pair.lane is not None:
            self._leave(pair.lane)
        self._count()

    def next_deadline(self) -> float | None:
        """Monotonic time of the next `settle` with work that no descriptor announces; None without."""
        lanes = [pair.lane for pair in self._pairs.values() if pair.lane is not None]
        return min((lane.moved_at + STUCK_S for lane in lanes if lane.is_waiting), default=None)

    def close(self) -> None:
        """Ends all lanes and the thread. Idempotent."""
        for peer in list(self._pairs):
            self.drop(peer)
        self.thread.close()

    def _request(self, pair: _Pair) -> SlabRequest:
        return SlabRequest(
            instance=self._instance,
            address=pair.token,
            token=pair.token,
            num_slots=self._window + SPARE_SLOTS,
            slot_bytes=pair.block_bytes,
            transport=NIXL,
        )

    def _fill(self, lane: _Landings) -> None:
        """Begins the reads that wait for a landing slot."""
        while lane.is_connected and lane.waiting and lane.free:
            block, began = lane.waiting.popleft()
            landing = lane.free.pop()
            lane.reading[landing] = block, began
            self.thread.order(Read(lane.slab, block.slot, landing, block.size))

    def _ended_read(
        self,
        peer: Peer,
        lane: _Landings,
        ended: ReadEnded,
        arrived: list[Arrived],
        messages: list[tuple[Peer, SlabUp]],
        now: float,
    ) -> None:
        block, began = lane.reading.pop(ended.landing)
        lane.moved_at = now
        if ended.reason:
            messages += self._give_up(peer, ended.reason, now)
            return
        data = lane.bytes_of(ended.landing, block.size)
        arrived.append(Arrived(peer, block, data, began, lane.unpin is not None))

    def _give_up(self, peer: Peer, reason: str, now: float) -> list[tuple[Peer, SlabUp]]:
        """From now on blocks are messages; those of the slab are pulled again."""
        pair = self._pairs[peer]
        self._note_fallback(peer, reason)
        lane, pair.lane = pair.lane, None
        pair.token, pair.retry_at = "", now + ASK_AGAIN_S  # a grant on its way is void
        if lane is None:
            return []
        self._leave(lane)
        self._count()
        return [(peer, SlabUnusable(instance=self._instance, slab=lane.slab, reason=reason[:1024]))]

    def _leave(self, lane: _Landings) -> None:
        lane.waiting.clear()
        self._ended[lane.slab] = lane
        self.thread.order(Leave(lane.slab))

    def _free(self, slab: str) -> None:
        """Gives back the memory of an ended lane that nothing writes any more."""
        lane = self._ended.pop(slab, None)
        if lane is not None and lane.unpin is not None:
            lane.unpin()

    def _note_fallback(self, peer: Peer, reason: str) -> None:
        self.counters.shm_fallbacks += 1
        logger.warning(
            "blocks take another way", extra=log_fields(endpoint=peer, transport=NIXL, reason=reason)
        )

    def _count(self) -> None:
        self.counters.nixl_slabs = sum(pair.lane is not None for pair in self._pairs.values())


def _memory_of(num_bytes: int) -> Bytes:
    """Zeroed memory in pages of its own, uint8 `[num_bytes]`; they go back to the system with the array.

    Raises SlabError if there is none.
    """
    try:
        return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    except OSError as error:
        raise SlabError(f"no memory for {num_bytes >> 20} MiB of slots ({error.strerror})") from None


def _size_of(memory: Bytes) -> int:
    return memory.size


def _name(block: SlabBlock) -> tuple[str, int, int]:
    return block.room, block.epoch, block.block
