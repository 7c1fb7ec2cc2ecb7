"""Prefill's session joined to memory and the wire format. A transport adds only the movement of frames.

A transport implements `_transmit`, passes incoming messages to `_receive_frames`, and calls `_work` after
every possible event. An endpoint belongs to one thread.
"""

import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

from ...cluster.errors import LocalProtocolError, RemoteProtocolError
from ...cluster.net.transport_names import CUDA_SLAB, NIXL, SHM, ZMQ_BLOCKS
from ...cluster.protocol.codec import encode, encode_batch, kv_up_frames, unknown_messages
from ...cluster.protocol.kv_messages import BLOCK_BYTES
from ...cluster.protocol.messages import KVUp, KVWelcome, Layout, Release
from ...cluster.protocol.slab_messages import SlabBlock, SlabDenied, SlabGrant, SlabRequest, SlabUp
from ...cluster.security.ciphers import CRC32C
from ..memory.blocks import BlockReader
from ..memory.device import Device
from ..memory.span_cutter import SenderPages
from ..protocol.layout import Crc, KVLayout
from ..protocol.rank_pairs import WHOLE, Shard
from ..protocol.sender import SenderSession
from ..protocol.session import LEASE_S, Effect, FillEarly, Notify, Peer, SendBlock, SendMessage
from ..transport import Attached, Dropped, Offer, Planes, PullRequest, Released
from .cuda_slab import DEVICE_SLAB_BYTES, RUNS_PER_MOVE, SLAB_FLAG, DeviceLanes, device_of, host_id
from .endpoint import RETRY_S, Clock, Endpoint
from .nixl import NixlLanes
from .nixl_agent import OpenAgent, open_nixl
from .pending_reads import PendingReads
from .prepared_blocks import Key, PreparedBlocks, key_of
from .shm import SLAB_BYTES, SenderSlabs
from .slab_lanes import SlabCounters

SLOTS_PER_FRAME = 2  # with more, decode would wait for blocks that are ready
GPU_SLOTS_PER_FRAME = 4  # half a window: fewer thread switches, and each thread digests a block


class SenderEndpoint(Endpoint["SendMessage | SendBlock"]):
    """Prefill's end of a transport, without the movement of frames.

    Raises LocalProtocolError if only one of layout and planes has features.
    """

    def __init__(
        self,
        instance: str,
        layout: Layout,
        planes: Planes,
        *,
        lease_s: float = LEASE_S,
        stall_s: float = 0.0,
        ciphers: Sequence[str] = (CRC32C,),
        transports: Sequence[str] = (ZMQ_BLOCKS,),
        slab_bytes: int = SLAB_BYTES,
        device_slab_bytes: int = DEVICE_SLAB_BYTES,
        slab_flag: str = SLAB_FLAG,
        device: Device | None = None,
        open_agent: OpenAgent = open_nixl,
        clock: Clock = time.monotonic,
        shard: Shard = WHOLE,
    ) -> None:
        """`shard`: this rank of the worker, to whose pages `planes` belong.

        `slab_bytes`, `device_slab_bytes`: limits of all slabs in memory of the host and of the device, and
        the first also of the slabs for NIXL. `slab_flag`: the setting that names the second. `stall_s`: as in
        `SenderSession`.

        `device`: another device than that of the planes, for tests without a GPU. `open_agent`: NIXL.
        """
        super().__init__(clock)
        if CUDA_SLAB in transports and device is None:
            device = device_of(planes, KVLayout.of_rank(layout, shard))
        names = [name for name in transports if name != CUDA_SLAB or device is not None]
        self.session = SenderSession(
            instance,
            layout,
            lease_s=lease_s,
            stall_s=stall_s,
            ciphers=ciphers,
            transports=names,
            host=host_id(),
            shard=shard,
        )
        if self.session.layout.has_features != (planes.features is not None):
            raise LocalProtocolError("a layout has features exactly when the planes have them")
        self._lease_s = lease_s
        self._reader = BlockReader(self.session.layout, planes)
        self._decoder = kv_up_frames()
        self._reads = PendingReads(self._reader.recycle)
        self._prepared = PreparedBlocks(
            instance, layout.fingerprint, self._reader
        )  # blocks that a full connection did not take
        pin, self._slab_counters = self._reader.pin, SlabCounters()
        self._slabs = SenderSlabs(
            instance,
            layout.block_bytes,
            self._slab_counters,
            lease_s=lease_s,
            max_bytes=slab_bytes,
            pin=pin,
        )
        self._device_slabs: DeviceLanes | None = None
        if device is not None:
            self._device_slabs = DeviceLanes(
                instance,
                self._slab_counters,
                device,
                SenderPages(self.session.layout, planes),
                lease_s=lease_s,
                max_bytes=device_slab_bytes,
                flag=slab_flag,
            )
        self._nixl: NixlLanes | None = None
        if NIXL in names:
            self._nixl = NixlLanes(
                instance,
                layout.block_bytes,
                self._slab_counters,
                open_agent,
                lease_s=lease_s,
                max_bytes=slab_bytes,
                pin=pin,
            )
        self._waiting: set[Key] = set()  # the blocks in the outbox
        self._slots_per_frame = _slots_per_frame(layout, planes)

    def offer(self, offer: Offer) -> None:
        """As `KVTransport.offer`. Raises LocalProtocolError as `SenderSession.offer`."""
        self._perform(self.session.offer(offer, self._clock()))

    def launched(self, room: str, epoch: int, start: int, tokens: int) -> None:
        """As `KVTransport.launched`: fills slots for early runs behind the prompt's last forward."""
        if self._device_slabs is not None:
            self._perform(self.session.launched(room, epoch, start, tokens))

    def advance(
        self,
        room: str,
        epoch: int,
        tokens_ready: int,
        first_token: int | None = None,
        ready_at: float | None = None,
    ) -> None:
        """As `KVTransport.advance`. Raises LocalProtocolError as `SenderSession.advance`."""
        if self._device_slabs is not None and self.session.is_underway(room, epoch, tokens_ready):
            ready_at = self._clock() if ready_at is None else ready_at
            self._send_early(self._device_slabs, room, epoch)
        self._perform(self.session.advance(room, epoch, tokens_ready, first_token, self._clock(), ready_at))

    def release(self, room: str, epoch: int, reason: str) -> None:
        """As `KVTransport.release`."""
        self._perform(self.session.release(room, epoch, reason, self._clock()))
        self._forget_slots(room, epoch)
        self._reads.forget(room, epoch)
        self._forget_events(room, epoch)

    def pull(self, request: PullRequest) -> None:
        """Raises LocalProtocolError: prefill does not pull."""
        raise LocalProtocolError(f"prefill does not pull (room {request.room})")

    def name_ranks(self, endpoints: Sequence[str]) -> None:
        """As `ListeningTransport.name_ranks`."""
        self.session.rank_endpoints = tuple(endpoints)

    @property
    def slots(self) -> tuple[int, int]:
        """The slots of shared memory and of slabs for NIXL in use, and all of them."""
        used, total = self._slabs.slots
        others = (0, 0) if self._nixl is None else self._nixl.slots
        return used + others[0], total + others[1]

    @property
    def wake_fds(self) -> list[int]:
        """Descriptors of other threads that have something for `poll`."""
        return [] if self._nixl is None else self._nixl.thread.wake_fds

    @property
    def counters(self) -> dict[str, float]:
        """Totals by name, for heartbeats."""
        return {**self.session.counters.snapshot(), **self._slab_counters.snapshot()}

    def next_deadline(self, now: float) -> float | None:
        """Latest monotonic time of the next `poll`; None: only a message makes it due."""
        times = [
            self.session.next_deadline(),
            self._slabs.next_deadline(),
            self._retry_at if self._outbox else None,
        ]
        if self._reads.is_waiting:
            times.append(now + RETRY_S)
        if self._device_slabs is not None:
            times += [self._device_slabs.next_deadline(), self._device_slabs.poll_at(now)]
        if self._nixl is not None:
            times.append(self._nixl.next_deadline())
        return min((t for t in times if t is not None), default=None)

    def _receive_frames(self, peer: Peer, frames: Sequence[memoryview]) -> None:
        """Handles one message of `peer`, which must be a single frame."""
        try:
            if len(frames) != 1:
                raise RemoteProtocolError(f"{len(frames)} frames where one is expected")
            messages, num_unknown = self._decoder.messages(frames[0])
        except RemoteProtocolError as error:
            self._drop(peer, 1, str(error))
            return
        if num_unknown:
            self._drop(peer, num_unknown, unknown_messages(num_unknown))
        now = self._clock()
        effects: list[Effect] = []
        for message in messages:
            effects += self._receive(peer, message, now)
        self._perform(effects)

    def _drop(self, peer: Peer, num: int, reason: str) -> None:
        self.session.counters.malformed += num
        self._drop_log.say(peer, reason)

    def _receive(self, peer: Peer, message: KVUp, now: float) -> list[Effect]:
        if isinstance(message, SlabUp):
            return self._receive_slab(peer, message)
        if isinstance(message, Release):
            self.reach("sender:release")
        return self.session.receive(peer, message, now)

    def use_crc(self, crc: Crc) -> None:
        """Replaces crc32c, for benchmarks. The other end must use the same function."""
        self._reader.crc = crc

    def _receive_slab(self, peer: Peer, message: SlabUp) -> list[Effect]:
        """Handles a message about slabs.

        Messages of peers without that agreement are dropped and counted.
        """
        kinds = ((CUDA_SLAB, self._device_slabs), (SHM, self._slabs), (NIXL, self._nixl))
        speaks = [name for name, _ in kinds if self.session.speaks(peer, message.instance, name)]
        if not speaks:
            self.session.counters.unexpected += 1
            return []
        if isinstance(message, SlabRequest) and message.transport not in speaks:
            reason = f"transport {message.transport!r} was not agreed on"
            denial = SlabDenied(instance=self.session.instance, token=message.token, reason=reason)
            return [SendMessage(peer, denial)]
        answers = [
            slabs.handle(peer, message)
            for name, slabs in kinds
            if slabs is not None and (not isinstance(message, SlabRequest) or message.transport == name)
        ]
        return [SendMessage(peer, answer) for answer in answers if answer is not None]

    def _granted(self, peer: Peer, slab: str) -> None:
        for slabs in (self._device_slabs, self._slabs, self._nixl):
            if slabs is not None:
                slabs.granted(peer, slab)

    def _forget_slots(self, room: str, epoch: int) -> None:
        """Frees the slots of an ended room. Returns when no move reads its pages for a slot that is sent."""
        self._slabs.forget(room, epoch)
        if self._nixl is not None:
            self._nixl.forget(room, epoch)
        if self._device_slabs is not None:
            self._device_slabs.finish(room, epoch)
            self._device_slabs.forget(room, epoch)

    def _close_slabs(self) -> None:
        self._slabs.close()
        if self._nixl is not None:
            self._nixl.close()
        if self._device_slabs is not None:
            self._device_slabs.close()

    def _work(self) -> None:
        now = self._clock()
        self._slabs.sweep(now)
        if self._device_slabs is not None:
            self._device_slabs.sweep(now)
            self._send_filled(self._device_slabs)
        if self._nixl is not None:
            self._nixl.sweep(now)
            for peer, answer in self._nixl.answers(now):
                self._post(SendMessage(peer, answer))
        self._perform(self.session.tick(now))
        self._flush(now)
        self._settle(now)

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendMessage | SendBlock):
                self._post(effect)
            elif isinstance(effect, FillEarly) and self._device_slabs is not None:
                if self._device_slabs.begin_early(effect.run, self._clock(), is_late=effect.is_late):
                    self.reach("sender:gather")
            elif isinstance(effect, Notify) and isinstance(effect.event, Attached):
                self._events.append(effect.event)
            elif isinstance(effect, Notify):
                assert isinstance(effect.event, Released | Dropped)
                self._forget_slots(effect.event.room, effect.event.epoch)
                # a hung peer must not hold pages forever; if it reads on, its digests will not match
                self._reads.hold(effect.event, self._clock() + self._lease_s)
        self._flush(self._clock())
        self._settle(self._clock())

    def _send_filled(self, device_slabs: DeviceLanes) -> None:
        """Sends the headers of the runs that are in their slots by now, move by move."""
        while filled := device_slabs.settle():
            for message in self._headers_of(filled):
                self._post(message)
            self._flush(self._clock())

    def _headers_of(self, filled: Sequence[tuple[SendBlock, SlabBlock]]) -> list[SendMessage]:
        """The headers of those runs whose rooms are open."""
        return [self._header(*run) for run in filled if self.session.is_open(run[0].room, run[0].epoch)]

    def _send_early(self, device_slabs: DeviceLanes, room: str, epoch: int) -> None:
        """Sends the headers of a room's early runs, before the announcement lets decode pull the rest."""
        for item, header in device_slabs.end_early(room, epoch, self._clock()):
            if self.session.wants(item):
                self._post(self._header(item, header))
                self._flush(self._clock())

    def _header(self, item: SendBlock, header: SlabBlock) -> SendMessage:
        self.reach("sender:block")
        self.session.counters.blocks += item.count
        self.session.counters.bytes += item.size
        return SendMessage(item.peer, header)

    def _send_some(self, waiting: "deque[SendMessage | SendBlock]") -> int:
        item = waiting[0]
        if isinstance(item, SendMessage):
            message = item.message
            if isinstance(message, SlabBlock):
                return self._send_headers(waiting)
            if isinstance(message, KVWelcome):
                message = self._admit(item.peer, message)
            is_sent = self._transmit(item.peer, encode(message), None) is not None
            if is_sent and isinstance(message, SlabGrant):
                self._granted(item.peer, message.slab)
            return int(is_sent)
        if not self.session.is_open(item.room, item.epoch):  # its pages may belong to another room by now
            self._forget(item)
            return 1
        if self._device_slabs is not None and self._device_slabs.has(item.peer):
            self._replace(waiting, self._device_slabs.cut(item))
            num_begun = self._begin_runs(self._device_slabs, waiting)
            if num_begun:
                return num_begun
        assert isinstance(waiting[0], SendBlock)
        self._replace(waiting, waiting[0].split())  # the pair has no slab for runs any more, or no free slot
        filled = self._fill_slots(waiting)
        item = waiting[0]
        assert isinstance(item, SendBlock)
        if filled:
            is_sent = (
                self._transmit(item.peer, encode_batch([header for _, header in filled]), None) is not None
            )
        else:
            is_sent = self._send_payload(item)
        if not is_sent:
            return 0
        for block in [block for block, _ in filled] or [item]:
            self._forget(block)
            self.session.counters.blocks += 1
            self.session.counters.bytes += block.size
        return max(1, len(filled))

    def _replace(self, waiting: "deque[SendMessage | SendBlock]", runs: list[SendBlock]) -> None:
        """Puts the parts of the first waiting run into its place."""
        item = waiting[0]
        if len(runs) > 1 and isinstance(item, SendBlock):
            self._forget(item)
            waiting.popleft()
            waiting.extendleft(reversed(runs))
            self._waiting.update(map(key_of, runs))

    def _send_headers(self, waiting: "deque[SendMessage | SendBlock]") -> int:
        """Sends the leading headers of filled slots in one frame."""
        headers: list[SlabBlock] = []
        for item in islice(waiting, self.max_batch):
            if not (isinstance(item, SendMessage) and isinstance(item.message, SlabBlock)):
                break
            headers.append(item.message)
        is_sent = self._transmit(waiting[0].peer, encode_batch(headers), None) is not None
        return len(headers) if is_sent else 0

    def _begin_runs(self, device_slabs: DeviceLanes, waiting: "deque[SendMessage | SendBlock]") -> int:
        """Starts to fill slots with the leading runs. Returns the number of runs that leave the queue."""
        items: list[SendBlock] = []
        for item in islice(waiting, min(RUNS_PER_MOVE, self.max_batch)):
            if isinstance(item, SendMessage) or not self.session.is_open(item.room, item.epoch):
                break
            items.append(item)
        num_begun, headers = device_slabs.begin(items, self._clock())
        for item in items[:num_begun]:
            self._forget(item)
            self.reach("sender:gather")
        messages = [SendMessage(items[0].peer, header) for header in headers]
        if num_begun:
            # the next runs are launched while these are gathered; the end of the turn waits for the last ones
            messages += self._headers_of(device_slabs.settle(waits=False))
        own = [message for message in messages if message.peer == items[0].peer]
        headers = [message.message for message in own if isinstance(message.message, SlabBlock)]
        for message in messages:  # first those of other peers: this one may be lost
            if message not in own:
                self._post(message)
        if headers and self._transmit(items[0].peer, encode_batch(headers), None) is None:
            waiting.extend(own)
        return num_begun

    def _fill_slots(self, waiting: "Sequence[SendMessage | SendBlock]") -> list[tuple[SendBlock, SlabBlock]]:
        """The first waiting blocks, copied into slots of the slab; empty if the first must be sent as a
        message.
        """
        items: list[SendBlock] = []
        for item in islice(waiting, min(self.max_batch, self._slots_per_frame)):
            if (
                isinstance(item, SendMessage)
                or item in self._prepared
                or not self.session.is_open(item.room, item.epoch)
                or item.count > 1  # cut for a device slab that is gone; these slots hold single blocks
            ):
                break
            items.append(item)
        lanes: NixlLanes | SenderSlabs = self._slabs
        if self._nixl is not None and items and self._nixl.has(items[0].peer):
            lanes = self._nixl
        headers = lanes.fill(items, self._reader, self._clock()) if items else []
        for _ in headers:
            self.reach("sender:block")
        return list(zip(items, headers, strict=False))

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
        """Removes the block from the records of waiting blocks."""
        self._waiting.discard(key_of(item))
        self._prepared.drop(key_of(item))

    def _admit(self, peer: Peer, welcome: KVWelcome) -> KVWelcome:
        """The outgoing Welcome, to which a transport may add its own fields."""
        return welcome

    def _post(self, item: "SendMessage | SendBlock") -> bool:
        """As `Endpoint._post`, but a block is queued once: the queued block also answers a repeated pull."""
        if not isinstance(item, SendBlock):
            return super()._post(item)
        if key_of(item) in self._waiting:
            return True
        is_queued = super()._post(item)
        if is_queued:
            self._waiting.add(key_of(item))
        return is_queued

    def _peer_lost(self, peer: Peer) -> None:
        if self._device_slabs is not None:
            self._device_slabs.drop(peer)
        self._waiting = {key for key in self._waiting if key[0] != peer}
        self._prepared.drop_peer(peer)
        self._slabs.drop(peer)
        if self._nixl is not None:
            self._nixl.drop(peer)
        self.session.peer_gone(peer)

    def _settle(self, now: float) -> None:
        self._events += self._reads.settle(now)


def _slots_per_frame(layout: Layout, planes: Planes) -> int:
    if planes.kv.is_cuda:
        return GPU_SLOTS_PER_FRAME
    return SLOTS_PER_FRAME if layout.block_bytes <= BLOCK_BYTES else 1
