"""KV blocks as ZeroMQ messages over tcp or ipc.

Prefill has a ROUTER socket, decode one DEALER per prefill endpoint.

A message is one frame; a Block is its header and its payload. Blocks that are one run of CPU memory are sent
without a copy, and their pages are reported free only after ZeroMQ has read them. The sockets belong to the
thread that polls. The owner may call `next_deadline()`, wait for `pollables()` in its own poller, and then
call `poll(0)`.

With keys, every link uses CURVE, and sealed blocks use a plain connection beside it; see `bulk`. Prefill's
address carries its public key (`tcp://10.0.0.2:7200#<hex>`). Decode connects only if that key is listed for a
prefill worker, and prefill accepts only keys of decode workers.
"""

import logging
import socket
import time
from collections.abc import Sequence

import msgspec
import zmq

from ...cluster.errors import ConfigError, PeerLost, RemoteProtocolError
from ...cluster.net.authenticator import Authenticator
from ...cluster.net.flood_guard import FloodGuard
from ...cluster.net.handshakes import HANDSHAKE_FAILURES, HandshakeMonitor, SocketMonitor, failure_text
from ...cluster.net.sockets import (
    BULK_FRAME_SLACK,
    BULK_HIGH_WATER,
    CONTROL_HIGH_WATER,
    TOO_LONG,
    Socket,
    bind,
    check_bind_address,
    connect,
    make_socket,
    recv_parts,
    try_send,
    wait_readable,
)
from ...cluster.net.transport_names import ZMQ_BLOCKS
from ...cluster.process.log import fields
from ...cluster.process.log_throttle import LogThrottle
from ...cluster.protocol.codec import KV_MAX_BYTES, MAX_BATCH, Decoder, decoder
from ...cluster.protocol.messages import Block, KVWelcome, Layout
from ...cluster.security.ciphers import CURVE, accepted
from ...cluster.security.keyring import Curve, Keyring, split_key, with_key
from ...cluster.security.tickets import Tickets
from ..memory.blocks import Payload
from ..memory.device import Device
from ..protocol.rank_pairs import WHOLE, Shard
from ..protocol.seal import TAG_BYTES
from ..protocol.session import LEASE_S, WINDOW, Peer, SendBlock, SendMessage
from ..transport import Lost, Planes, PullRequest
from .bulk import BulkLink, BulkLinks, BulkPort, bulk_lane
from .cuda_slab import DEVICE_SLAB_BYTES, SLAB_FLAG, SLOT_BYTES
from .endpoint import RETRY_S, Clock, Delivered, Delivery
from .nixl_agent import OpenAgent, open_nixl
from .polling import Polling, a_few
from .receiver_endpoint import ReceiverEndpoint
from .sender_endpoint import SenderEndpoint
from .shm import SLAB_BYTES
from .wire import sent

logger = logging.getLogger(__name__)

RECONNECT_MAX_MS = 200  # finds a restarted prefill worker before pulls count it as gone
MESSAGES_PER_FLUSH = 2  # messages read before their answers are sent together; on a GPU one frame has enough


class ZmqBlocksSender(SenderEndpoint, Polling[SendMessage | SendBlock]):
    """Prefill's end. `endpoint`: the bound address, with the chosen port if port 0 was asked for."""

    max_batch = MAX_BATCH

    def __init__(
        self,
        bind_endpoint: str,
        instance: str,
        layout: Layout,
        planes: Planes,
        *,
        context: zmq.Context[Socket],
        trusted_network: bool = False,
        keyring: Keyring | None = None,
        ciphers: Sequence[str] = (),
        bulk_port: int = 0,
        lease_s: float = LEASE_S,
        stall_s: float = 0.0,
        transports: Sequence[str] = (ZMQ_BLOCKS,),
        slab_bytes: int = SLAB_BYTES,
        device_slab_bytes: int = DEVICE_SLAB_BYTES,
        slab_flag: str = SLAB_FLAG,
        device: Device | None = None,
        open_agent: OpenAgent = open_nixl,
        clock: Clock = time.monotonic,
        shard: Shard = WHOLE,
        peer_role: str = "decode",
        flag: str = "--kv-bind",
    ) -> None:
        """`ciphers`: names from `ciphers_of`, by default the best with or without a `keyring`.

        `bulk_port`: see `bulk`, 0: any. `peer_role`: the role of the keys that may connect. `flag`,
        `slab_flag`: the settings that name `bind_endpoint` and `device_slab_bytes`.

        Raises ConfigError for an address that may not be bound, StartupError if binding fails.
        """
        ciphers = accepted(ciphers, has_keys=keyring is not None)
        super().__init__(
            instance,
            layout,
            planes,
            lease_s=lease_s,
            stall_s=stall_s,
            ciphers=ciphers,
            transports=transports,
            slab_bytes=slab_bytes,
            device_slab_bytes=device_slab_bytes,
            slab_flag=slab_flag,
            device=device,
            open_agent=open_agent,
            clock=clock,
            shard=shard,
        )
        check_bind_address(
            bind_endpoint,
            trusted_network,
            has_keys=keyring is not None,
            named=f"{flag} {bind_endpoint}",
        )
        tickets = Tickets() if keyring is not None else None
        self.authenticator = (
            Authenticator(context, keyring.peers, (peer_role,), tickets) if keyring is not None else None
        )
        self._bulk: BulkPort | None = None
        self._socket = make_socket(
            context,
            zmq.ROUTER,
            max_frame=KV_MAX_BYTES,
            high_water=BULK_HIGH_WATER,
            curve=keyring.called() if keyring is not None else None,
        )
        self._flood_guard = FloodGuard()
        self._handshakes = HandshakeMonitor(self._socket)
        try:
            self.endpoint = bind(self._socket, bind_endpoint)
            if tickets is not None and any(cipher != CURVE for cipher in ciphers):
                self._bulk = BulkPort(context, self.endpoint, bulk_port, tickets)
        except BaseException:
            self._handshakes.close()
            self._socket.close(0)
            raise
        if keyring is not None:
            self.endpoint = with_key(self.endpoint, keyring.own.public)

    def __repr__(self) -> str:
        return f"ZmqBlocksSender({self.endpoint if self._is_open else 'closed'}, {self.session})"

    def next_deadline(self, now: float) -> float | None:
        """Latest monotonic time of the next `poll`; None: only a message makes it due."""
        return now if self.has_unread() else super().next_deadline(now)

    def _sockets(self) -> list[Socket]:
        if not self._is_open:
            return []
        return [
            self._socket,
            self._handshakes.socket,
            *(self._bulk.sockets() if self._bulk is not None else []),
        ]

    @property
    def counters(self) -> dict[str, float]:
        """Totals by name, for heartbeats."""
        counted = super().counters
        counted["handshakes_failed"] = self._handshakes.num_failed
        if self._bulk is not None:
            counted["handshakes_failed"] += self._bulk.num_failed
            counted["malformed"] += self._bulk.num_malformed
        return {**counted, **(self.authenticator.counters if self.authenticator is not None else {})}

    def close(self) -> None:
        """As `KVTransport.close`."""
        if self._is_open:
            self._perform(self.session.close(self._clock()))
            self._close_slabs()
            self._is_open = False
            self._handshakes.close()
            self._socket.close()
            if self._bulk is not None:
                self._bulk.close()

    def _turn(self) -> None:
        if not self._is_open:
            return
        self._read_wires()  # first: the other end waits for what follows from them
        self._handshakes.read()
        if self._bulk is not None:
            self._blocked.difference_update(bulk_lane(peer) for peer in self._bulk.read())
        for _ in a_few(self._clock):
            parts = recv_parts(self._socket, 3, 2 * KV_MAX_BYTES, self._flood_guard)
            if parts is None:
                break
            if not parts:
                self.session.counters.malformed += 1
                self._drop_log.say("", TOO_LONG)
                continue
            peer = parts[0].bytes.hex()
            # A message from decode means that it took blocks, so its queue has room. libzmq reports free
            # places in halves of a queue: with a window as long as the queue, waiting for the next retry
            # would cost a sleep per window.
            self._heard(peer)
            self._receive_frames(peer, [part.buffer for part in parts[1:]])
        self._work()

    def _wires(self) -> list[tuple[Peer, socket.socket]]:
        return [] if self._device_slabs is None else self._device_slabs.connections()

    def _take_frame(self, peer: Peer, frame: memoryview) -> None:
        assert self._device_slabs is not None, "there is a slab"
        if not frame:
            self._device_slabs.sweep_soon()
            return
        self._device_slabs.heard(peer)
        self._heard(peer)
        self._receive_frames(peer, [frame])

    def _admit(self, peer: Peer, welcome: KVWelcome) -> KVWelcome:
        if self._bulk is None or welcome.cipher == CURVE:
            return welcome
        return msgspec.structs.replace(
            welcome, bulk_port=self._bulk.port, bulk_ticket=self._bulk.ticket_for(peer)
        )

    def _lane(self, item: SendMessage | SendBlock) -> str:
        """The peer's lane. Blocks with a connection of their own have another lane, so they delay nothing
        else.
        """
        has_bulk = self._bulk is not None and self._bulk.serves(item.peer)
        return bulk_lane(item.peer) if has_bulk and isinstance(item, SendBlock) else item.peer

    def _heard(self, peer: Peer) -> None:
        """A message of a peer frees places of its queues."""
        self._blocked.difference_update((peer, bulk_lane(peer)))

    def _peer_lost(self, peer: Peer) -> None:
        super()._peer_lost(peer)
        self._outbox.pop(bulk_lane(peer), None)
        self._blocked.discard(bulk_lane(peer))
        if self._bulk is not None:
            self._bulk.forget(peer)

    def _transmit(self, peer: Peer, header: bytes, payload: Payload | None) -> Delivery | None:
        wire = None if payload or self._device_slabs is None else self._device_slabs.wire(peer)
        if wire is not None and sent(wire, header):
            return Delivered()
        routing_id = bytes.fromhex(peer)
        if payload is None:
            return Delivered() if try_send(self._socket, [routing_id, header]) else None
        frame = zmq.Frame(payload.data, track=True, copy=False)
        tracker = frame.tracker
        assert tracker is not None
        if self._bulk is not None and self._bulk.serves(peer):
            return tracker if self._bulk.send(peer, header, frame) else None
        return tracker if try_send(self._socket, [routing_id, header, frame]) else None


class ZmqBlocksReceiver(ReceiverEndpoint, Polling[SendMessage]):
    """Decode's end: one link per prefill endpoint, opened by the first pull, closed after some idle time."""

    max_batch = MAX_BATCH

    def __init__(
        self,
        instance: str,
        layout: Layout,
        planes: Planes,
        *,
        context: zmq.Context[Socket],
        keyring: Keyring | None = None,
        ciphers: Sequence[str] = (),
        window: int = WINDOW,
        lease_s: float = LEASE_S,
        transports: Sequence[str] = (ZMQ_BLOCKS,),
        device: Device | None = None,
        slot_bytes: int = SLOT_BYTES,
        open_agent: OpenAgent = open_nixl,
        clock: Clock = time.monotonic,
        shard: Shard = WHOLE,
        peer_role: str = "prefill",
    ) -> None:
        """`peer_role`: the role that the keys of peers must have."""
        super().__init__(
            instance,
            layout,
            planes,
            ciphers=accepted(ciphers, has_keys=keyring is not None),
            window=window,
            lease_s=lease_s,
            transports=transports,
            device=device,
            slot_bytes=slot_bytes,
            open_agent=open_agent,
            clock=clock,
            shard=shard,
        )
        self._context = context
        self._peer_role = peer_role
        self._messages_per_flush = 1 if planes.kv.is_cuda else MESSAGES_PER_FLUSH
        self._max_frame = layout.block_bytes + BULK_FRAME_SLACK
        self._links: dict[Peer, Socket] = {}
        self._watches: dict[
            Peer, SocketMonitor
        ] = {}  # report broken connections and failed handshakes of the links
        self._keyring = keyring
        self._bulk = BulkLinks(context, self._max_frame + TAG_BYTES, clock)
        self._block_decoder: Decoder[Block] = decoder(Block, KV_MAX_BYTES)
        self._log_throttle = LogThrottle(clock=clock)

    def __repr__(self) -> str:
        return f"ZmqBlocksReceiver(links={len(self._links)}, {self.session})"

    def pull(self, request: PullRequest) -> None:
        """As `KVTransport.pull`. A room with an unusable address is lost at once."""
        try:
            self._link(request.endpoint)
        except ConfigError as error:
            self._events.append(
                Lost(room=request.room, epoch=request.epoch, kind="PeerLost", reason=str(error))
            )
            return
        super().pull(request)

    def _sockets(self) -> list[Socket]:
        watches = [watch.socket for watch in self._watches.values()]
        return [*self._links.values(), *watches, *self._bulk.sockets()]

    def next_deadline(self, now: float) -> float | None:
        """Latest monotonic time of the next `poll`; None: only a message makes it due."""
        if self.has_unread():
            return now
        times = [
            super().next_deadline(now),
            self._bulk.join_by,
            now + RETRY_S if self._bulk.must_join else None,
        ]
        return min((at for at in times if at is not None), default=None)

    def _take_news(self) -> bool:
        self._read_wires()
        return self.has_unread()

    def _wires(self) -> list[tuple[Peer, socket.socket]]:
        return self._slabs.connections()

    def _take_frame(self, peer: Peer, frame: memoryview) -> None:
        if not frame:
            self._slabs.sweep_soon()
            return
        self._receive_frames(peer, [frame])
        self._flush(self._clock())

    def close(self) -> None:
        """As `KVTransport.close`."""
        if self._is_open:
            self._perform(self.session.close(self._clock()))
            self._close_slabs()
            self._is_open = False
            for peer in list(self._links):
                self._close_link(peer)

    def _turn(self) -> None:
        self._is_gathering = True
        self._read_wires()  # first: the device is idle until the next runs are launched
        self._await_run()
        for peer, link in list(self._links.items()):
            self._turn_link(peer, link)
        self._is_gathering = False
        for peer, watch in list(self._watches.items()):
            self._take_in(peer, watch.read())
        for peer, bulk in self._bulk.items():
            self._turn_bulk(peer, bulk)
        for peer in self._bulk.overdue():
            self._fall_back(peer)
        if self._is_open:
            self._work()

    def _await_run(self) -> None:
        """Waits for the run that prefill has announced, if it has."""
        while (left := self._soon_until - self._clock()) > 0:
            if wait_readable((wire.fileno() for _, wire in self._wires()), left):
                self._read_wires()
            else:
                self._soon_until = 0.0

    def _turn_link(self, peer: Peer, link: Socket) -> None:
        for number in a_few(self._clock):
            parts = recv_parts(link, 2, self._max_frame + KV_MAX_BYTES)
            if parts is None:
                break
            if not parts:
                self.session.counters.malformed += 1
                self._drop_log.say(peer, TOO_LONG)
                continue
            self._receive_frames(peer, [part.buffer for part in parts])
            if number % self._messages_per_flush == 0:
                self._flush(self._clock())

    def _take_in(self, peer: Peer, events: list[tuple[int, int]]) -> None:
        """Handles socket events of a link by closing it.

        libzmq may have given up on it for good, as after a refused handshake or bytes that are not ZMTP.
        """
        for event, value in events:
            if event == zmq.EVENT_DISCONNECTED:
                self._close_link(peer)
                self._perform(
                    self.session.link_lost(peer, self._clock())
                )  # opens a new link while rooms need it
                return
            reason = failure_text(event, value)
            if self._log_throttle.is_due(peer + reason):
                line = "no link to prefill" if self._peer_role == "prefill" else "no link to decode"
                logger.warning(line, extra=fields(endpoint=split_key(peer)[0], reason=reason))
            self._close_link(peer)  # the session's next request opens a new link
            return

    def _turn_bulk(self, peer: Peer, bulk: BulkLink) -> None:
        broken = bulk.read_events()
        for _ in a_few(self._clock):
            frames = bulk.read_block()
            if frames is None:
                break
            self._receive_bulk(peer, frames)
        if broken and self._bulk.has(peer, bulk) and self._bulk.lost(peer, broken):
            peer_link = self.session.link_of(peer)  # its next Welcome carries a new ticket
            self._perform([] if peer_link is None else [peer_link.hello(self._clock())])

    def _fall_back(self, peer: Peer) -> None:
        """Moves the peer to a new connection and handshake.

        Its blocks then travel as CURVE messages, or its rooms end.
        """
        self._close_link(peer)
        peer_link, now = self.session.link_of(peer), self._clock()
        if peer_link is not None:
            refusal = peer_link.fall_back()
            self._perform(
                self.session.receive(peer, refusal, now) if refusal else self.session.link_lost(peer, now)
            )

    def _receive_bulk(self, peer: Peer, frames: Sequence[memoryview]) -> None:
        """Handles an unauthenticated message. Only a block that was pulled is accepted."""
        try:
            if len(frames) != 2:
                raise RemoteProtocolError(f"{len(frames)} frames where a block has two")
            block = self._block_decoder.decode(frames[0])
        except RemoteProtocolError as error:
            self.session.counters.malformed += 1
            self._drop_log.say(peer, str(error))
            return
        self._perform(self._receive_block(peer, block, frames[1], self._clock()))

    def _admitted(self, peer: Peer, welcome: KVWelcome) -> None:
        self._bulk.open(peer, welcome)

    def _transmit(self, peer: Peer, header: bytes, payload: Payload | None) -> Delivery | None:
        assert payload is None, "decode sends no payloads"
        wire = self._slabs.wire(peer)
        if wire is not None and sent(wire, header):
            return Delivered()
        try:
            link = self._link(peer)
        except (
            ConfigError
        ) as error:  # the peer's key has been removed from the list since the room was opened
            raise PeerLost(str(error)) from None
        return Delivered() if try_send(link, [header]) else None

    def _link(self, peer: Peer) -> Socket:
        link = self._links.get(peer)
        if link is None:
            endpoint, curve = self._address(peer)
            link = make_socket(
                self._context,
                zmq.DEALER,
                max_frame=self._max_frame,
                high_water=CONTROL_HIGH_WATER,
                curve=curve,
                reconnect_max_ms=RECONNECT_MAX_MS,
            )
            watch = SocketMonitor(link, HANDSHAKE_FAILURES | zmq.EVENT_DISCONNECTED)
            try:
                connect(link, endpoint)
            except ConfigError:
                watch.close()
                link.close(0)
                raise
            self._links[peer], self._watches[peer] = link, watch
        return link

    def _address(self, peer: Peer) -> tuple[str, Curve | None]:
        """The peer's address, and the keys for it (None without keys).

        Raises ConfigError for a key that is not listed.
        """
        if self._keyring is None:
            return peer, None
        role, (endpoint, key) = self._peer_role, split_key(peer)
        if not key:
            raise ConfigError(f"{role} at {endpoint} uses no keys; start it with --keys")
        if self._keyring.peers.find(key, (role,)) is None:
            path = self._keyring.peers.path.parent
            raise ConfigError(
                f"{role} at {endpoint} has an unlisted key; `baton keys add {path} {key} --role {role}`"
            )
        return endpoint, self._keyring.calling(key)

    def _close_link(self, peer: Peer) -> None:
        super()._close_link(peer)
        self._bulk.forget(peer)
        link = self._links.pop(peer, None)
        if link is not None:
            watch = self._watches.pop(peer)
            watch.close()
            link.close()
