"""Sessions joined to memory and to the wire format; a transport adds only the moving of frames.

`SenderEndpoint` is prefill's `KVTransport` and `ReceiverEndpoint` decode's. A transport implements `_transmit`, feeds
`_receive_frames`, and calls `_work` whenever something may have happened. One thread uses an endpoint.
"""

import time
from collections.abc import Sequence
from itertools import islice, takewhile

from ..cluster.ciphers import CRC32C
from ..cluster.codec import BATCHED, encode, encode_batch, kv_down_frames, kv_up_frames
from ..cluster.errors import DigestMismatch, LocalProtocolError, RemoteProtocolError
from ..cluster.messages import Block, KVDown, KVUp, KVWelcome, Layout, Release
from ..cluster.slab_messages import SlabBlock, SlabDown, SlabUp
from ..cluster.transports import SHM, ZMQ_BLOCKS
from .endpoint import RETRY_S, Clock, Endpoint
from .layout import Crc, KVLayout, Segment, block_digest, digest_seed
from .memory import BlockReader, BlockWriter
from .pending_reads import PendingReads
from .prepared import Key, PreparedBlocks, key_of
from .receiver import ReceiverSession
from .seal import TAG_BYTES, BlockName
from .sender import SenderSession
from .session import LEASE_S, WINDOW, CloseLink, Effect, Notify, Peer, ReceiverRoom, Send, SendBlock
from .transport import Dropped, Offer, Planes, PullRequest, Released
from .transports.shm import SLAB_BYTES, ReceiverSlabs, SenderSlabs

SLOTS_PER_FRAME = 2  # more would let decode wait for bytes that are there


class SenderEndpoint(Endpoint["Send | SendBlock"]):
    """Prefill's end of a transport, without the moving of frames."""

    def __init__(
        self,
        instance: str,
        layout: Layout,
        planes: Planes,
        *,
        lease_s: float = LEASE_S,
        ciphers: Sequence[str] = (CRC32C,),
        transports: Sequence[str] = (ZMQ_BLOCKS,),
        slab_bytes: int = SLAB_BYTES,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self.session = SenderSession(instance, layout, lease_s=lease_s, ciphers=ciphers, transports=transports)
        if self.session.layout.has_features != (planes.features is not None):
            raise LocalProtocolError("a layout has features exactly when the planes have them")
        self._lease_s = lease_s
        self._reader = BlockReader(self.session.layout, planes)
        self._decoder = kv_up_frames()
        self._reads = PendingReads(self._reader.recycle)
        self._prepared = PreparedBlocks(instance, layout.fingerprint, self._reader)  # what a full connection did not take
        self._slabs = SenderSlabs(instance, layout.block_bytes, lease_s=lease_s, max_bytes=slab_bytes)
        self._waiting: set[Key] = set()  # the blocks in the outbox

    def offer(self, offer: Offer) -> None:
        self._perform(self.session.offer(offer, self._clock()))

    def advance(self, room: str, epoch: int, tokens_ready: int, first_token: int | None = None) -> None:
        self._perform(self.session.advance(room, epoch, tokens_ready, first_token, self._clock()))

    def release(self, room: str, epoch: int, reason: str) -> None:
        self._perform(self.session.release(room, epoch, reason, self._clock()))
        self._slabs.forget(room, epoch)
        self._reads.forget(room, epoch)
        self._forget_events(room, epoch)

    def pull(self, request: PullRequest) -> None:
        raise LocalProtocolError(f"prefill does not pull (room {request.room})")

    @property
    def counters(self) -> dict[str, float]:
        """Name to total, for heartbeats."""
        return {**self.session.counters.snapshot(), **self._slabs.counters.snapshot()}

    def next_deadline(self, now: float) -> float | None:
        """When `poll` must be called at the latest; None when only a message can bring news."""
        times = [self.session.next_deadline(), self._slabs.next_deadline(), self._retry_at if self._outbox else None]
        if self._reads.is_waiting:
            times.append(now + RETRY_S)
        return min((t for t in times if t is not None), default=None)

    def _receive_frames(self, peer: Peer, frames: Sequence[memoryview]) -> None:
        """One message of `peer`: a single frame."""
        try:
            if len(frames) != 1:
                raise RemoteProtocolError(f"{len(frames)} frames where one is expected")
            message = self._decoder.decode(frames[0])
        except RemoteProtocolError as error:
            self.session.counters.malformed += 1
            self._drop_log.say(peer, str(error))
            return
        now = self._clock()
        effects: list[Effect] = []
        for one in message if isinstance(message, tuple) else (message,):
            effects += self._receive(peer, one, now)
        self._perform(effects)

    def _receive(self, peer: Peer, message: KVUp, now: float) -> list[Effect]:
        if isinstance(message, SlabUp):
            return self._receive_slab(peer, message)
        if isinstance(message, Release):
            self.reach("sender:release")
        return self.session.receive(peer, message, now)

    def use_crc(self, crc: Crc) -> None:
        """Replaces crc32c, for benchmarks; the other end must use the same."""
        self._reader.crc = crc

    def _receive_slab(self, peer: Peer, message: SlabUp) -> list[Effect]:
        """A message about shared memory, which only peers send that were told to use it."""
        if not self.session.speaks(peer, message.instance, SHM):
            self.session.counters.unexpected += 1
            return []
        answer = self._slabs.handle(peer, message)
        return [] if answer is None else [Send(peer, answer)]

    def _work(self) -> None:
        now = self._clock()
        self._slabs.sweep(now)
        self._perform(self.session.tick(now))
        self._flush(now)
        self._settle(now)

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send | SendBlock):
                self._post(effect)
            elif isinstance(effect, Notify):
                assert isinstance(effect.event, Released | Dropped)
                self._slabs.forget(effect.event.room, effect.event.epoch)
                # reads that a hung peer never ends do not hold pages for ever; its digests would not match
                self._reads.hold(effect.event, self._clock() + self._lease_s)
        self._flush(self._clock())
        self._settle(self._clock())

    def _send_some(self, waiting: "Sequence[Send | SendBlock]") -> int:
        item = waiting[0]
        if isinstance(item, Send):
            message = item.message
            if isinstance(message, KVWelcome):
                message = self._admit(item.peer, message)
            return int(self._transmit(item.peer, encode(message), None) is not None)
        if not self.session.is_open(item.room, item.epoch):  # its pages may be others' by now
            self._forget(item)
            return 1
        filled = self._fill_slots(waiting)
        if filled:
            is_sent = self._transmit(item.peer, encode_batch([header for _, header in filled]), None) is not None
        else:
            is_sent = self._send_payload(item)
        if not is_sent:
            return 0
        for block in [block for block, _ in filled] or [item]:
            self._forget(block)
            self.session.counters.blocks += 1
            self.session.counters.bytes += block.size
        return max(1, len(filled))

    def _fill_slots(self, waiting: "Sequence[Send | SendBlock]") -> list[tuple[SendBlock, SlabBlock]]:
        """The first few blocks that wait, in slots of the slab; none when the first must go as a message."""
        filled: list[tuple[SendBlock, SlabBlock]] = []
        for item in islice(waiting, min(self.max_batch, SLOTS_PER_FRAME)):
            if isinstance(item, Send) or item in self._prepared or not self.session.is_open(item.room, item.epoch):
                break
            header = self._slabs.fill(item, self._reader, self._clock())
            if header is None:
                break
            self.reach("sender:block")
            filled.append((item, header))
        return filled

    def _send_payload(self, item: SendBlock) -> bool:
        self.reach("sender:block")
        header, payload = self._prepared.get(item)
        delivery = self._transmit(item.peer, encode(header), payload)
        if delivery is None:
            return False
        self._prepared.sent(item)
        self._reads.add(item.room, item.epoch, payload, delivery)
        return True

    def _forget(self, item: SendBlock) -> None:
        """The block waits no more."""
        self._waiting.discard(key_of(item))
        self._prepared.drop(key_of(item))

    def _admit(self, peer: Peer, welcome: KVWelcome) -> KVWelcome:
        """A Welcome on its way out, with what the peer needs to know of this transport."""
        return welcome

    def _post(self, item: "Send | SendBlock") -> bool:
        """As for every endpoint, but a block waits only once: whoever asks again for it gets the one that waits."""
        if not isinstance(item, SendBlock):
            return super()._post(item)
        if key_of(item) in self._waiting:
            return True
        is_queued = super()._post(item)
        if is_queued:
            self._waiting.add(key_of(item))
        return is_queued

    def _peer_lost(self, peer: Peer) -> None:
        self._waiting = {key for key in self._waiting if key[0] != peer}
        self._prepared.drop_peer(peer)
        self._slabs.drop(peer)
        self.session.peer_gone(peer)

    def _settle(self, now: float) -> None:
        self._events += self._reads.settle(now)


class ReceiverEndpoint(Endpoint[Send]):
    """Decode's end of a transport, without the moving of frames."""

    def __init__(
        self,
        instance: str,
        layout: Layout,
        planes: Planes,
        *,
        window: int = WINDOW,
        lease_s: float = LEASE_S,
        ciphers: Sequence[str] = (CRC32C,),
        transports: Sequence[str] = (ZMQ_BLOCKS,),
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self.session = ReceiverSession(
            instance, layout, ciphers=ciphers, window=window, lease_s=lease_s, transports=transports
        )
        self._writer = BlockWriter(KVLayout(layout), planes)
        self._decoder = kv_down_frames()
        self._is_gathering = False  # what is to be sent waits for more of it
        self._slabs = ReceiverSlabs(instance, window=window)

    def offer(self, offer: Offer) -> None:
        raise LocalProtocolError(f"decode does not offer (room {offer.room})")

    def advance(self, room: str, epoch: int, tokens_ready: int, first_token: int | None = None) -> None:
        raise LocalProtocolError(f"decode does not advance (room {room})")

    def pull(self, request: PullRequest) -> None:
        self._perform(self.session.pull(request, self._clock()))
        self._tell(request.endpoint, self._slabs.ask_again(request.endpoint, self._clock()))

    def release(self, room: str, epoch: int, reason: str) -> None:
        self._perform(self.session.release(room, epoch, reason, self._clock()))
        self._forget_events(room, epoch)

    @property
    def counters(self) -> dict[str, float]:
        """Name to total, for heartbeats."""
        return {**self.session.counters.snapshot(), **self._slabs.counters.snapshot()}

    def next_deadline(self, now: float) -> float | None:
        """When `poll` must be called at the latest; None when only a message can bring news."""
        times = [self.session.next_deadline(), self._slabs.next_deadline(), self._retry_at if self._outbox else None]
        return min((t for t in times if t is not None), default=None)

    def _close_link(self, peer: Peer) -> None:
        """Forgets a peer that is not needed any more, or a connection that broke; prefill forgets what belonged to it."""
        self._outbox.pop(peer, None)
        self._slabs.drop(peer)

    def _receive_frames(self, peer: Peer, frames: Sequence[memoryview]) -> None:
        """One message of `peer`: a frame, and for a block its bytes."""
        now = self._clock()
        try:
            if not 1 <= len(frames) <= 2:
                raise RemoteProtocolError(f"{len(frames)} frames where one or two are expected")
            message = self._decoder.decode(frames[0])
            if isinstance(message, Block) != (len(frames) == 2):
                raise RemoteProtocolError("a payload goes with a block, and with nothing else")
        except RemoteProtocolError as error:
            self.session.counters.malformed += 1
            self._drop_log.say(peer, str(error))
            return
        effects: list[Effect] = []
        for one in message if isinstance(message, tuple) else (message,):
            effects += self._receive(peer, one, frames, now)
        self._perform(effects)

    def _receive(self, peer: Peer, message: KVDown, frames: Sequence[memoryview], now: float) -> list[Effect]:
        if isinstance(message, Block):
            return self._receive_block(peer, message, frames[1], now)
        if isinstance(message, SlabBlock):
            return self._receive_slab_block(peer, message, now)
        if isinstance(message, SlabDown):
            self._tell(peer, self._slabs.handle(peer, message))
            return []
        if isinstance(message, KVWelcome) and message.transport == SHM:
            self._tell(peer, self._slabs.greet(peer, message.instance, message.layout.block_bytes, now))
        effects = self.session.receive(peer, message, now)
        pair = self.session.pair_of(peer)
        if isinstance(message, KVWelcome) and pair is not None and pair.is_greeted(message.instance):
            self._perform(effects)
            self._admitted(peer, message)
            return []
        return effects

    def _admitted(self, peer: Peer, welcome: KVWelcome) -> None:
        """A Welcome that the session agreed to: what it says of the transport is taken up here."""

    def use_crc(self, crc: Crc) -> None:
        """Replaces crc32c, for benchmarks; the other end must use the same."""
        self._writer.crc = crc

    def _tell(self, peer: Peer, message: SlabUp | None) -> None:
        if message is not None:
            self._perform([Send(peer, message)])

    def _receive_slab_block(self, peer: Peer, block: SlabBlock, now: float) -> list[Effect]:
        """The copy is checked, not the slot, which prefill could change in between."""
        data = self._slabs.read(peer, block)
        if data is None:
            self.session.counters.unexpected += 1
            return [Send(peer, self._slabs.unusable(peer, block))]
        segments = self.session.expect(peer, block, block.size)
        freed = Send(peer, self._slabs.freed(block))
        if segments is None:
            return [freed]
        pair = self.session.pair_of(peer)
        assert pair is not None, "it expects the block"
        request = pair.rooms[block.room].request
        seed = digest_seed(block.room, block.epoch, block.block, block.size)
        is_right = self._writer.copy(data, segments, request, seed=seed, digest=block.digest)
        if not is_right or (self._clock() - now) * 1000 >= block.lease_ms:
            return [freed, *self.session.corrupt(peer, block, now)]
        self._slabs.counters.shm_blocks += 1
        self._slabs.counters.shm_bytes += block.size
        self.reach("receiver:block")
        return [freed, *self.session.landed(peer, block, now)]

    def _receive_block(self, peer: Peer, block: Block, payload: memoryview, now: float) -> list[Effect]:
        pair = self.session.pair_of(peer)
        is_sealed = pair is not None and pair.is_sealing
        segments = self.session.expect(peer, block, payload.nbytes - (TAG_BYTES if is_sealed else 0))
        if segments is None or pair is None:
            return []
        room = pair.rooms[block.room]
        try:
            if is_sealed:
                self._open(block, payload, segments, room)
            elif block_digest(block.room, block.epoch, block.block, payload, self._writer.crc) != block.digest:
                raise DigestMismatch(f"block {block.block} of room {block.room} has not the digest of its header")
            else:
                self._writer.write(payload, segments, room.request)
        except DigestMismatch:
            return self.session.corrupt(peer, block, now)
        self.reach("receiver:block")
        return self.session.landed(peer, block, now)

    def _open(self, block: Block, payload: memoryview, segments: Sequence[Segment], room: ReceiverRoom) -> None:
        """Lands a sealed block. Raises DigestMismatch when it is not authentic."""
        opener = room.opener
        if opener is None:
            raise DigestMismatch(f"there is no key for block {block.block} of room {block.room}")
        name = BlockName(block.room, block.epoch, block.block, block.size, self.session.layout.wire.fingerprint)
        self._writer.open(
            lambda plain: opener.open(name, block.attempt, payload, plain), block.size, segments, room.request
        )

    def _work(self) -> None:
        now = self._clock()
        self._slabs.sweep(now)
        self._perform(self.session.tick(now))
        self._flush(now)

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._post(effect)
            elif isinstance(effect, Notify):
                self._events.append(effect.event)
            elif isinstance(effect, CloseLink):
                self._close_link(effect.peer)
        if not self._is_gathering:
            self._flush(self._clock())

    def _send_some(self, waiting: Sequence[Send]) -> int:
        first = waiting[0]
        if isinstance(first.message, Release):
            self.reach("receiver:release")
        if not isinstance(first.message, BATCHED):
            return int(self._transmit(first.peer, encode(first.message), None) is not None)
        leading = takewhile(lambda item: isinstance(item.message, BATCHED), islice(waiting, self.max_batch))
        batch = [item.message for item in leading]
        return len(batch) if self._transmit(first.peer, encode_batch(batch), None) is not None else 0

    def _peer_lost(self, peer: Peer) -> None:
        """A DEALER has one peer and keeps connecting to it."""
