"""Decode's session joined to memory and the wire format. A transport adds only the movement of frames.

The rules of `sender_endpoint` apply here too.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from ...cluster.errors import DigestMismatch, LocalProtocolError, RemoteProtocolError
from ...cluster.net.transport_names import CUDA_SLAB, LOCAL, NIXL, ZMQ_BLOCKS
from ...cluster.protocol.codec import BATCHED, encode, encode_batch, kv_down_frames, unknown_messages
from ...cluster.protocol.kv_messages import PairDown
from ...cluster.protocol.messages import Block, KVWelcome, Layout, Release
from ...cluster.protocol.slab_messages import SlabBlock, SlabDown, SlabPlan, SlabSoon, SlabUp
from ...cluster.security.ciphers import CRC32C
from ..memory.blocks import Arrival, BlockWriter
from ..memory.device import Device, Move
from ..memory.pinning import Bytes
from ..protocol.layout import Crc, KVLayout, Segment, block_digest, device_digest, digest_seed
from ..protocol.peer_link import PeerLink
from ..protocol.rank_pairs import WHOLE, Shard
from ..protocol.receiver import ReceiverSession, count_of
from ..protocol.seal import TAG_BYTES, BlockName
from ..protocol.session import LEASE_S, WINDOW, CloseLink, Effect, Notify, Peer, ReceiverRoom, SendMessage
from ..transport import Complete, Lost, Offer, Planes, PullRequest
from .cuda_slab import NEWS_S, SLOT_BYTES, SOON_S, SPIN_S, device_of, host_id, next_poll
from .endpoint import Clock, Endpoint
from .landing_moves import LandingMoves, Run
from .nixl import Arrived, PairReads
from .nixl_agent import OpenAgent, open_nixl
from .path_rates import PathRates
from .shm import ReceiverSlabs
from .slab_lanes import SlabCounters


@dataclass(frozen=True)
class Landing:
    """Runs of blocks of one peer that a move writes into their pages, since `began` (monotonic seconds).

    `requests` keep the feature rows of rooms that end meanwhile.
    """

    peer: Peer
    blocks: Sequence[SlabBlock]
    requests: Sequence[PullRequest]
    move: Move
    began: float


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
        device: Device | None = None,
        slot_bytes: int = SLOT_BYTES,
        open_agent: OpenAgent = open_nixl,
        clock: Clock = time.monotonic,
        shard: Shard = WHOLE,
    ) -> None:
        """`shard`: this rank of the worker, to whose pages `planes` belong.

        `device`: another device than that of the planes, for tests without a GPU. `slot_bytes`: the
        largest slot in a device's memory. `open_agent`: NIXL.
        """
        super().__init__(clock)
        own = KVLayout.of_rank(layout, shard)
        if CUDA_SLAB in transports and device is None:
            device = device_of(planes, own)
        self._transports = tuple(name for name in transports if name != CUDA_SLAB or device is not None)
        self.session = ReceiverSession(
            instance,
            layout,
            ciphers=ciphers,
            window=window,
            lease_s=lease_s,
            transports=self._transports,
            host=host_id(),
            shard=shard,
        )
        self._writer = BlockWriter(own, planes)
        self._decoder = kv_down_frames()
        self._is_gathering = False  # outgoing messages wait, to share a frame
        self._owes_turn = False  # the end of a room went to the owner before the rest of a turn
        self._moves = None if device is None else LandingMoves(device, planes)
        self._landings: list[Landing] = []
        self._soon_until = 0.0  # until then, decode waits for a run that prefill has announced
        self._paths = PathRates()
        self._slabs = ReceiverSlabs(
            instance,
            SlabCounters(),
            window=window,
            pin=self._writer.pin,
            device=device,
            slot_bytes=slot_bytes,
        )
        self._nixl: PairReads | None = None
        if NIXL in self._transports:
            self._nixl = PairReads(
                instance, self._slabs.counters, open_agent, window=window, pin=self._writer.pin
            )

    def offer(self, offer: Offer) -> None:
        """Raises LocalProtocolError: decode does not offer."""
        raise LocalProtocolError(f"decode does not offer (room {offer.room})")

    def launched(self, room: str, epoch: int, start: int, tokens: int) -> None:
        """Raises LocalProtocolError: decode launches no forward for an offer."""
        raise LocalProtocolError(f"decode does not offer (room {room})")

    def advance(
        self,
        room: str,
        epoch: int,
        tokens_ready: int,
        first_token: int | None = None,
        ready_at: float | None = None,
    ) -> None:
        """Raises LocalProtocolError: decode does not advance."""
        raise LocalProtocolError(f"decode does not advance (room {room})")

    def pull(self, request: PullRequest) -> None:
        """As `KVTransport.pull`. Raises LocalProtocolError as `ReceiverSession.pull`."""
        self._perform(self.session.pull(request, self._clock()))
        for room in self.session.parts_of(request.room):
            _, slots = self._slabs.run_of(room.peer)
            stream = room.stream if room.request is request else None
            if self._moves is not None and slots is not None and stream is not None and stream.num_blocks:
                self._moves.place(room, stream)  # now, while prefill computes
            self._tell(room.peer, self._slabs.ask_again(room.peer, self._clock()))
            if self._nixl is not None:
                self._nixl.ask_again(room.peer, self._clock())

    def release(self, room: str, epoch: int, reason: str) -> None:
        """As `KVTransport.release`."""
        self._perform(self.session.release(room, epoch, reason, self._clock()))
        self._finish_landings(room, epoch)
        if self._moves is not None and not self.session.parts_of(room):
            self._moves.forget(room)
        self._forget_events(room, epoch)

    @property
    def counters(self) -> dict[str, float]:
        """Totals by name, for heartbeats."""
        return {
            **self.session.counters.snapshot(),
            **self._slabs.counters.snapshot(),
            **self._paths.counters(),
        }

    def next_deadline(self, now: float) -> float | None:
        """Latest monotonic time of the next `poll`; None: only a message makes it due."""
        times = [
            self.session.next_deadline(),
            self._slabs.next_deadline(),
            self._retry_at if self._outbox else None,
            next_poll(self._landings[0].began, now) if self._landings else None,
            self._nixl.next_deadline() if self._nixl is not None else None,
            now if self._owes_turn else None,
        ]
        return min((t for t in times if t is not None), default=None)

    @property
    def wake_fds(self) -> list[int]:
        """Descriptors of other threads that have something for `poll`."""
        return [] if self._nixl is None else self._nixl.thread.wake_fds

    def _close_link(self, peer: Peer) -> None:
        """Closes the connection to a peer without rooms, or a broken connection.

        Prefill then drops its records of it.
        """
        self._outbox.pop(peer, None)
        self._slabs.drop(peer)
        if self._nixl is not None:
            self._nixl.drop(peer)
        self._set_runs(peer)

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
        self,
        peer: Peer,
        message: Block | SlabPlan | SlabSoon | SlabDown | PairDown,
        frames: Sequence[memoryview],
        now: float,
    ) -> list[Effect]:
        if isinstance(message, Block):
            return self._receive_block(peer, message, frames[1], now)
        if isinstance(message, SlabSoon):
            if self.session.comes_soon(peer, message):
                self._soon_until = now + SOON_S
            return []
        if isinstance(message, SlabPlan):
            if self._moves is not None:
                self._plan(self._moves, peer, message)
            return []
        if isinstance(message, SlabDown):
            answers = self._slabs.handle(peer, message)
            if self._nixl is not None:
                answers += self._nixl.handle(peer, message, now)
            self._set_runs(peer)
            self._tell(peer, *answers)
            return []
        if isinstance(message, KVWelcome) and message.transport in LOCAL:
            kinds = LOCAL[LOCAL.index(message.transport) :]
            mine = [name for name in kinds if name in self._transports]
            if mine:
                block_bytes = message.layout.block_bytes
                self._tell(peer, self._slabs.greet(peer, message.instance, block_bytes, now, mine))
                self._set_runs(peer)  # the slab of an earlier process is dropped
        if isinstance(message, KVWelcome) and self._nixl is not None and message.transport == NIXL:
            self._nixl.greet(peer, message.instance, message.layout.block_bytes, now)
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

    def _tell(self, peer: Peer, *messages: SlabUp | None) -> None:
        self._perform([SendMessage(peer, message) for message in messages if message is not None])

    def _set_runs(self, peer: Peer) -> None:
        """Pulls over the link ask for as many blocks as a slot of the pair's slab holds."""
        link, (run_blocks, slots) = self.session.link_of(peer), self._slabs.run_of(peer)
        if link is not None:
            link.pull_runs(run_blocks, slots)
        if slots is None and self._moves is not None:
            self._moves.unplan(peer)

    def _close_slabs(self) -> None:
        for landing in self._landings:
            landing.move.wait()
        self._slabs.close()
        if self._nixl is not None:
            self._nixl.close()

    def _receive_slab_blocks(self, peer: Peer, blocks: Sequence[SlabBlock], now: float) -> list[Effect]:
        """Handles all blocks of a frame together.

        Checks the copies, because prefill could still change the slots.
        """
        effects: list[Effect] = []
        on_device = [block for block in blocks if self._slabs.is_on_device(peer, block)]
        if on_device:
            effects += self._begin_landing(peer, on_device, now)
            blocks = [block for block in blocks if block not in on_device]
        if self._nixl is not None:
            remote = [block for block in blocks if self._nixl.has(peer, block)]
            effects += self._begin_reads(self._nixl, peer, remote, now)
            blocks = [block for block in blocks if block not in remote]
        expected: list[tuple[SlabBlock, Arrival]] = []
        for block in blocks:
            data = self._slabs.read(peer, block)
            if data is None:
                self.session.counters.unexpected += 1
                effects.append(SendMessage(peer, self._slabs.unusable(peer, block)))
                continue
            segments, link = self._expect(peer, block, block.size), self.session.link_of(peer)
            if segments is None or link is None:
                effects.append(SendMessage(peer, self._slabs.freed(block)))
                continue
            expected.append((block, _arrival(data, segments, block, link.rooms[block.room])))
        are_right = self._writer.land([one for _, one in expected], is_pinned=self._slabs.is_pinned(peer))
        for (block, _), is_right in zip(expected, are_right, strict=True):
            effects += [
                SendMessage(peer, self._slabs.freed(block)),
                *self._settle_slab_block(peer, block, is_right, now),
            ]
        return effects

    def _begin_reads(
        self, nixl: PairReads, peer: Peer, blocks: Sequence[SlabBlock], now: float
    ) -> list[Effect]:
        """Starts to read blocks through NIXL; `_settle_reads` goes on."""
        effects: list[Effect] = []
        for block in blocks:
            if nixl.is_reading(peer, block):
                self.session.counters.duplicate_blocks += 1
            elif self.session.expect(peer, block, block.size) is None:
                effects.append(SendMessage(peer, nixl.freed(block)))
            elif nixl.has(peer, block) and nixl.begin(peer, block, now):
                self.reach("receiver:read")
            else:
                self.session.counters.unexpected += 1
                effects += [SendMessage(*one) for one in nixl.unusable(peer, block, now)]
        return effects

    def _settle_reads(self, nixl: PairReads) -> None:
        """Lands the blocks whose reads have ended."""
        arrived, messages = nixl.settle(self._clock())
        effects: list[Effect] = [SendMessage(*one) for one in messages]
        for one in arrived:
            is_right = self._land(one)
            effects.append(SendMessage(one.peer, nixl.landed(one)))
            if is_right is not None:
                effects += self._settle_read(one, is_right)
        if effects:
            self._perform(effects)

    def _land(self, one: Arrived) -> bool | None:
        """Whether the block has its digest and is in its pages; None if nobody wants it any more."""
        block = one.block
        segments, link = self._expect(one.peer, block, block.size), self.session.link_of(one.peer)
        if segments is None or link is None:
            return None
        arrival = _arrival(one.data, segments, block, link.rooms[block.room])
        return self._writer.land([arrival], is_pinned=one.is_pinned)[0]

    def _settle_read(self, one: Arrived, is_right: bool) -> list[Effect]:
        block, now = one.block, self._clock()
        if not is_right or (now - one.began) * 1000 >= block.lease_ms:
            return self.session.corrupt(one.peer, block, now)
        self._slabs.counters.nixl_blocks += 1
        self._slabs.counters.nixl_bytes += block.size
        self.reach("receiver:block")
        return self.session.landed(one.peer, block, now, is_nixl=True)

    def _begin_landing(self, peer: Peer, blocks: Sequence[SlabBlock], now: float) -> list[Effect]:
        """Starts to write runs from device memory into their pages; `_settle_landings` goes on."""
        assert self._moves is not None, "the slab was mapped"
        effects: list[Effect] = []
        begun: list[Run] = []
        for block in blocks:
            slot = self._slabs.slot(peer, block)
            if slot is None:
                self.session.counters.unexpected += 1
                effects.append(SendMessage(peer, self._slabs.unusable(peer, block)))
                self._set_runs(peer)
                continue
            if self._is_landing(peer, block) or any(shares_blocks(one.block, block) for one in begun):
                # a second move could end after the room did, and read a slot that holds another run by then
                self.session.counters.duplicate_blocks += 1
                continue
            if self._slabs.is_early(peer, block):
                self.session.came_unasked(peer, block, now)
            stream, link = self.session.expect_run(peer, block, block.size), self.session.link_of(peer)
            if stream is None or link is None:
                effects.append(SendMessage(peer, self._slabs.freed(block)))
                continue
            begun.append(Run(block, link.rooms[block.room], stream, slot))
        if begun:
            self._soon_until = 0.0
            move = self._moves.start(begun)
            requests = [run.room.request for run in begun]
            self._landings.append(Landing(peer, [run.block for run in begun], requests, move, now))
            for _ in begun:
                self.reach("receiver:scatter")
        return effects

    def _plan(self, moves: LandingMoves, peer: Peer, plan: SlabPlan) -> None:
        """Prepares the moves of the runs that come behind the forward under way."""
        for block in plan.blocks:
            room, slot = self.session.attached_room(peer, block), self._slabs.slot(peer, block)
            stream = None if room is None else room.stream
            if room is None or stream is None or slot is None:
                return
            fits = block.block + block.count <= stream.num_blocks
            if not fits or block.size != stream.block_size(block.block, block.count):
                return
            if not moves.plan(Run(block, room, stream, slot)):
                return

    def _is_landing(self, peer: Peer, block: Block | SlabBlock) -> bool:
        """Whether moves write some of these blocks into their pages now."""
        landings = [one for one in self._landings if one.peer == peer]
        return any(shares_blocks(other, block) for one in landings for other in one.blocks)

    def _expect(self, peer: Peer, block: Block | SlabBlock, size: int) -> tuple[Segment, ...] | None:
        """As `ReceiverSession.expect`, but also None for a block that a move writes into its pages.

        Its room would end here, and the move could then write what another room has put into the slot.
        """
        if self._is_landing(peer, block):
            self.session.counters.duplicate_blocks += 1
            return None
        return self.session.expect(peer, block, size)

    def _settle_landings(self) -> None:
        """Handles the runs that are in their pages by now, and waits for the first if it is not held."""
        is_first = True
        while self._landings:
            landing = self._landings[0]
            totals = landing.move.poll()
            if totals is None and is_first and not landing.move.is_held:
                totals = self._end_of(landing)
            is_first = False
            if totals is None:
                return  # moves run in order
            del self._landings[0]
            effects: list[Effect] = []
            for block, total in zip(landing.blocks, totals, strict=True):
                pair = self._pair_name(landing.peer)
                found = device_digest(block.room, block.epoch, block.block, block.size, total, pair)
                effects += [
                    SendMessage(landing.peer, self._slabs.freed(block)),
                    *self._settle_run(landing, block, found == block.digest),
                ]
            self._perform(effects)

    def _pair_name(self, peer: Peer) -> str:
        """The name of this pair of ranks in digests; "" without a handshake, when no room wants a block."""
        link = self.session.link_of(peer)
        return "" if link is None or link.layout is None else link.layout.name

    def _end_of(self, landing: Landing) -> list[int] | None:
        """The digests of a move that ends soon; None if a message came before that takes another turn.

        The next runs must be launched while this move is under way, or the device is idle between them.
        """
        until = time.monotonic() + SPIN_S
        while not self._has_launched_all(landing):
            if (totals := landing.move.poll()) is not None:
                return totals
            if self._take_news() or time.monotonic() >= until:
                return None
            time.sleep(NEWS_S)
        return landing.move.wait()

    def _has_launched_all(self, landing: Landing) -> bool:
        """Whether every block that comes for the landing's rooms is in its place, or in a move."""
        link = self.session.link_of(landing.peer)
        num_landing = sum(block.count for one in self._landings for block in one.blocks)
        return link is None or (link.num_in_flight <= num_landing and not _is_in_part(link, landing))

    def _take_news(self) -> bool:
        """Takes in descriptors of further runs that have come. True: another message waits to be read."""
        return False

    def _settle_run(self, landing: Landing, block: SlabBlock, is_right: bool) -> list[Effect]:
        peer, now = landing.peer, self._clock()
        if self.session.expect_run(peer, block, block.size) is None:
            return []  # the room ended meanwhile
        if not is_right or (now - landing.began) * 1000 >= block.lease_ms:
            return self.session.corrupt(peer, block, now)
        self._slabs.counters.device_blocks += block.count
        self._slabs.counters.device_bytes += block.size
        self.reach("receiver:block")
        return self.session.landed(peer, block, now, is_device=True)

    def _finish_landings(self, room: str, epoch: int) -> None:
        """Returns when no move writes into the pages of this room and its earlier attempts any more."""
        for landing in self._landings:
            if any(block.room == room and block.epoch <= epoch for block in landing.blocks):
                landing.move.wait()

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
        segments = self._expect(peer, block, payload.nbytes - (TAG_BYTES if is_sealed else 0))
        if segments is None or link is None:
            return []
        room = link.rooms[block.room]
        try:
            if is_sealed:
                self._open(block, payload, segments, room)
            else:
                self._write(block, payload, segments, room)
        except DigestMismatch:
            return self.session.corrupt(peer, block, now)
        self.reach("receiver:block")
        return self.session.landed(peer, block, now)

    def _write(
        self, block: Block, payload: memoryview, segments: Sequence[Segment], room: ReceiverRoom
    ) -> None:
        """Lands a block in the clear. Raises DigestMismatch when it has another digest."""
        layout = _layout_of(room)
        name, crc = (block.room, block.epoch, block.block), self._writer.crc
        if block_digest(*name, payload, crc, layout.name) != block.digest:
            raise DigestMismatch(f"block {block.block} of room {block.room} has not the digest of its header")
        self._writer.write(payload, segments, room.request, layout.receiver_rows)

    def _open(
        self, block: Block, payload: memoryview, segments: Sequence[Segment], room: ReceiverRoom
    ) -> None:
        """Lands a sealed block. Raises DigestMismatch when it is not authentic."""
        opener = room.opener
        if opener is None:
            raise DigestMismatch(f"there is no key for block {block.block} of room {block.room}")
        layout = _layout_of(room)
        place = self.session.layout.wire.fingerprint + layout.name
        name = BlockName(block.room, block.epoch, block.block, block.size, place)
        self._writer.open(
            lambda plain: opener.open(name, block.attempt, payload, plain),
            block.size,
            segments,
            room.request,
            layout.receiver_rows,
        )

    def _work(self) -> None:
        now = self._clock()
        for peer in self._slabs.sweep(now):
            self._set_runs(peer)
        if self._settles_before_sending():
            return
        if self._nixl is not None:
            self._settle_reads(self._nixl)
        self._perform(self.session.tick(now))
        self._flush(now)

    def _settles_before_sending(self) -> bool:
        """Settles landings. True: the owner hears first that a room is complete, and the rest comes next.

        Decode's batch waits for the end of a hand-off, while prefill has time for what is said about it.
        Nobody waits for a part of a room, and the rest of its turn fits beside the next move.
        """
        num_events, was_sending = len(self._events), not self._is_gathering
        self._is_gathering = True
        self._settle_landings()
        self._is_gathering = not was_sending
        has_ended = any(isinstance(event, Complete) for event in self._events[num_events:])
        self._owes_turn = not self._owes_turn and has_ended
        return self._owes_turn

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendMessage):
                self._post(effect)
            elif isinstance(effect, Notify):
                if isinstance(effect.event, Complete):
                    self._paths.add(effect.event)
                if isinstance(effect.event, Lost):
                    self._finish_landings(effect.event.room, effect.event.epoch)
                if isinstance(effect.event, Lost | Complete) and self._moves is not None:
                    self._moves.forget(effect.event.room)
                self._events.append(effect.event)
            elif isinstance(effect, CloseLink):
                self._close_link(effect.peer)
        if not self._is_gathering:
            self._flush(self._clock())

    def _send_some(self, waiting: deque[SendMessage]) -> int:
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


def _layout_of(room: ReceiverRoom) -> KVLayout:
    """The layout of the room's pair of ranks. The room must be attached."""
    assert room.stream is not None
    return room.stream.layout


def _arrival(data: Bytes, segments: Sequence[Segment], block: SlabBlock, room: ReceiverRoom) -> Arrival:
    layout = _layout_of(room)
    seed = digest_seed(block.room, block.epoch, block.block, block.size, layout.name)
    return Arrival(data, segments, room.request, seed, block.digest, layout.receiver_rows)


def _is_in_part(link: PeerLink, landing: Landing) -> bool:
    """Whether more blocks of the landing's rooms come than are pulled."""
    rooms = [link.rooms.get(block.room) for block in landing.blocks]
    return any(
        room is not None and room.stream is not None and room.next_block < room.stream.num_blocks
        for room in rooms
    )


def shares_blocks(run: SlabBlock, other: Block | SlabBlock) -> bool:
    """Whether two headers of one peer stand for a block of the same number, room and attempt."""
    return (
        run.block < other.block + count_of(other)
        and other.block < run.block + run.count
        and (run.room, run.epoch) == (other.room, other.epoch)
    )
