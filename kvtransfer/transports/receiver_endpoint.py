"""Decode's session joined to memory and the wire format. A transport adds only the movement of frames.

The rules of `sender_endpoint` apply here too.
"""

import time
from collections.abc import Sequence
from itertools import islice, takewhile

from ...cluster.errors import DigestMismatch, LocalProtocolError, RemoteProtocolError
from ...cluster.net.transport_names import SHM, ZMQ_BLOCKS
from ...cluster.protocol.codec import BATCHED, encode, encode_batch, kv_down_frames, unknown_messages
from ...cluster.protocol.kv_messages import PairDown
from ...cluster.protocol.messages import Block, KVWelcome, Layout, Release
from ...cluster.protocol.slab_messages import SlabBlock, SlabDown, SlabUp
from ...cluster.security.ciphers import CRC32C
from ..memory.blocks import Arrival, BlockWriter
from ..protocol.layout import Crc, KVLayout, Segment, block_digest, digest_seed
from ..protocol.receiver import ReceiverSession
from ..protocol.seal import TAG_BYTES, BlockName
from ..protocol.session import LEASE_S, WINDOW, CloseLink, Effect, Notify, Peer, ReceiverRoom, SendMessage
from ..transport import Offer, Planes, PullRequest
from .endpoint import Clock, Endpoint
from .shm import ReceiverSlabs


class ReceiverEndpoint(Endpoint[SendMessage]):
    """Decode's end of a transport, without the movement of frames."""

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
        self._is_gathering = False  # outgoing messages wait, to share a frame
        self._slabs = ReceiverSlabs(instance, window=window, pin=self._writer.pin)

    def offer(self, offer: Offer) -> None:
        """Raises LocalProtocolError: decode does not offer."""
        raise LocalProtocolError(f"decode does not offer (room {offer.room})")

    def advance(self, room: str, epoch: int, tokens_ready: int, first_token: int | None = None) -> None:
        """Raises LocalProtocolError: decode does not advance."""
        raise LocalProtocolError(f"decode does not advance (room {room})")

    def pull(self, request: PullRequest) -> None:
        """As `KVTransport.pull`. Raises LocalProtocolError as `ReceiverSession.pull`."""
        self._perform(self.session.pull(request, self._clock()))
        self._tell(request.endpoint, self._slabs.ask_again(request.endpoint, self._clock()))

    def release(self, room: str, epoch: int, reason: str) -> None:
        """As `KVTransport.release`."""
        self._perform(self.session.release(room, epoch, reason, self._clock()))
        self._forget_events(room, epoch)

    @property
    def counters(self) -> dict[str, float]:
        """Totals by name, for heartbeats."""
        return {**self.session.counters.snapshot(), **self._slabs.counters.snapshot()}

    def next_deadline(self, now: float) -> float | None:
        """Latest monotonic time of the next `poll`; None: only a message makes it due."""
        times = [
            self.session.next_deadline(),
            self._slabs.next_deadline(),
            self._retry_at if self._outbox else None,
        ]
        return min((t for t in times if t is not None), default=None)

    def _close_link(self, peer: Peer) -> None:
        """Closes the connection to a peer without rooms, or a broken connection.

        Prefill then drops its records of it.
        """
        self._outbox.pop(peer, None)
        self._slabs.drop(peer)

    def _receive_frames(self, peer: Peer, frames: Sequence[memoryview]) -> None:
        """Handles one message of `peer`: a frame, and for a block its bytes."""
        now = self._clock()
        try:
            if not 1 <= len(frames) <= 2:
                raise RemoteProtocolError(f"{len(frames)} frames where one or two are expected")
            messages, num_unknown = self._decoder.messages(frames[0])
            blocks = [message for message in messages if isinstance(message, SlabBlock)]
            alone = messages[0] if messages and not blocks else None
            if isinstance(alone, Block) != (len(frames) == 2):
                raise RemoteProtocolError("a payload goes with a block, and with nothing else")
        except RemoteProtocolError as error:
            self._drop(peer, 1, str(error))
            return
        if num_unknown:
            self._drop(peer, num_unknown, unknown_messages(num_unknown))
        if alone is None or isinstance(alone, SlabBlock):
            self._perform(self._receive_slab_blocks(peer, blocks, now))
        else:
            self._perform(self._receive(peer, alone, frames, now))

    def _drop(self, peer: Peer, num: int, reason: str) -> None:
        self.session.counters.malformed += num
        self._drop_log.say(peer, reason)

    def _receive(
        self, peer: Peer, message: Block | SlabDown | PairDown, frames: Sequence[memoryview], now: float
    ) -> list[Effect]:
        if isinstance(message, Block):
            return self._receive_block(peer, message, frames[1], now)
        if isinstance(message, SlabDown):
            self._tell(peer, self._slabs.handle(peer, message))
            return []
        if isinstance(message, KVWelcome) and message.transport == SHM:
            self._tell(peer, self._slabs.greet(peer, message.instance, message.layout.block_bytes, now))
        effects = self.session.receive(peer, message, now)
        link = self.session.link_of(peer)
        if isinstance(message, KVWelcome) and link is not None and link.is_greeted(message.instance):
            self._perform(effects)
            self._admitted(peer, message)
            return []
        return effects

    def _admitted(self, peer: Peer, welcome: KVWelcome) -> None:
        """Hook for a Welcome that the session accepted: a transport reads its own fields here."""

    def use_crc(self, crc: Crc) -> None:
        """Replaces crc32c, for benchmarks. The other end must use the same function."""
        self._writer.crc = crc

    def _tell(self, peer: Peer, message: SlabUp | None) -> None:
        if message is not None:
            self._perform([SendMessage(peer, message)])

    def _receive_slab_blocks(self, peer: Peer, blocks: Sequence[SlabBlock], now: float) -> list[Effect]:
        """Handles all blocks of a frame together.

        Checks the copies, because prefill could still change the slots.
        """
        effects: list[Effect] = []
        expected: list[tuple[SlabBlock, Arrival]] = []
        for block in blocks:
            data = self._slabs.read(peer, block)
            if data is None:
                self.session.counters.unexpected += 1
                effects.append(SendMessage(peer, self._slabs.unusable(peer, block)))
                continue
            segments, link = self.session.expect(peer, block, block.size), self.session.link_of(peer)
            if segments is None or link is None:
                effects.append(SendMessage(peer, self._slabs.freed(block)))
                continue
            seed = digest_seed(block.room, block.epoch, block.block, block.size)
            expected.append(
                (block, Arrival(data, segments, link.rooms[block.room].request, seed, block.digest))
            )
        are_right = self._writer.land([one for _, one in expected], is_pinned=self._slabs.is_pinned(peer))
        for (block, _), is_right in zip(expected, are_right, strict=True):
            effects += [
                SendMessage(peer, self._slabs.freed(block)),
                *self._settle_slab_block(peer, block, is_right, now),
            ]
        return effects

    def _settle_slab_block(self, peer: Peer, block: SlabBlock, is_right: bool, now: float) -> list[Effect]:
        if self.session.expect(peer, block, block.size) is None:
            return []  # a repeated block in one frame, or a block of a room that an earlier one ended
        if not is_right or (self._clock() - now) * 1000 >= block.lease_ms:
            return self.session.corrupt(peer, block, now)
        self._slabs.counters.shm_blocks += 1
        self._slabs.counters.shm_bytes += block.size
        self.reach("receiver:block")
        return self.session.landed(peer, block, now)

    def _receive_block(self, peer: Peer, block: Block, payload: memoryview, now: float) -> list[Effect]:
        link = self.session.link_of(peer)
        is_sealed = link is not None and link.is_sealing
        segments = self.session.expect(peer, block, payload.nbytes - (TAG_BYTES if is_sealed else 0))
        if segments is None or link is None:
            return []
        room = link.rooms[block.room]
        try:
            if is_sealed:
                self._open(block, payload, segments, room)
            elif (
                block_digest(block.room, block.epoch, block.block, payload, self._writer.crc) != block.digest
            ):
                raise DigestMismatch(
                    f"block {block.block} of room {block.room} has not the digest of its header"
                )
            else:
                self._writer.write(payload, segments, room.request)
        except DigestMismatch:
            return self.session.corrupt(peer, block, now)
        self.reach("receiver:block")
        return self.session.landed(peer, block, now)

    def _open(
        self, block: Block, payload: memoryview, segments: Sequence[Segment], room: ReceiverRoom
    ) -> None:
        """Lands a sealed block. Raises DigestMismatch when it is not authentic."""
        opener = room.opener
        if opener is None:
            raise DigestMismatch(f"there is no key for block {block.block} of room {block.room}")
        name = BlockName(
            block.room, block.epoch, block.block, block.size, self.session.layout.wire.fingerprint
        )
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
            if isinstance(effect, SendMessage):
                self._post(effect)
            elif isinstance(effect, Notify):
                self._events.append(effect.event)
            elif isinstance(effect, CloseLink):
                self._close_link(effect.peer)
        if not self._is_gathering:
            self._flush(self._clock())

    def _send_some(self, waiting: Sequence[SendMessage]) -> int:
        first = waiting[0]
        if isinstance(first.message, Release):
            self.reach("receiver:release")
        if not isinstance(first.message, BATCHED):
            return int(self._transmit(first.peer, encode(first.message), None) is not None)
        leading = takewhile(lambda item: isinstance(item.message, BATCHED), islice(waiting, self.max_batch))
        batch = [item.message for item in leading]
        return len(batch) if self._transmit(first.peer, encode_batch(batch), None) is not None else 0

    def _peer_lost(self, peer: Peer) -> None:
        """No-op: a DEALER has one peer and keeps connecting to it."""
