"""KV blocks as ZeroMQ messages, over tcp or ipc: a ROUTER on prefill, a DEALER per prefill endpoint on decode.

A message is one frame; a Block is its header and its payload. Blocks that are one run of CPU memory go out without a
copy, and their pages are reported free only when ZeroMQ no longer reads them. A socket belongs to the thread that polls;
the owner may wait for `pollables()` and `next_deadline()` in its own poller and then call `poll(0)`.

With keys every link is CURVE, blocks included. Prefill's address carries its public key (`tcp://10.0.0.2:7200#<hex>`);
decode calls it only if that key is listed as a prefill worker's, and prefill answers only keys of decode workers.
"""

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Sequence

import zmq

from ...cluster.codec import KV_MAX_BYTES
from ...cluster.errors import ConfigError, PeerLost
from ...cluster.keyring import Curve, Keyring, split_key, with_key
from ...cluster.log import fields
from ...cluster.messages import Layout
from ...cluster.security import HANDSHAKE_FAILURES, Authenticator, Doorway, Sparingly, Watch, failure_text
from ...cluster.sockets import (
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
)
from ...cluster.transports import ZMQ_BLOCKS
from ..endpoint import Clock, Delivered, Delivery, Endpoint, Queued
from ..endpoints import ReceiverEndpoint, SenderEndpoint
from ..memory import Payload
from ..session import LEASE_S, WINDOW, Peer, Send, SendBlock
from ..transport import Lost, Planes, PullRequest, TransportEvent
from .shm import SLAB_BYTES

logger = logging.getLogger(__name__)

MESSAGES_PER_SOCKET = 64  # read per turn, so that no peer keeps the others waiting


class _Polling(Endpoint[Queued]):
    """Waits for the transport's sockets, and for whatever else the owner registered."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._is_open = True
        self._poller = zmq.Poller()
        self._foreign: set[Socket | int] = set()

    @abstractmethod
    def next_deadline(self, now: float) -> float | None:
        """When `poll` must be called at the latest; None when only a message can bring news."""

    @abstractmethod
    def _turn(self) -> None:
        """Reads what is there and does what is due, without waiting."""

    def register(self, pollable: Socket | int) -> None:
        """Makes `poll` return when this other socket or file descriptor is readable."""
        self._poller.register(pollable, zmq.POLLIN)
        self._foreign.add(pollable)

    def poll(self, timeout: float) -> list[TransportEvent]:
        """Does the I/O that is due and waits at most `timeout` seconds for an event or a registered pollable."""
        end = self._clock() + timeout
        self._turn()
        while not self._events and self._is_open and (now := self._clock()) < end:
            deadline = self.next_deadline(now)
            seconds = (end if deadline is None else min(end, deadline)) - now
            ready = self._poller.poll(math.ceil(max(0.0, seconds) * 1000))
            self._turn()
            if any(pollable in self._foreign for pollable, _ in ready):
                break
        return self._take_events()


class ZmqBlocksSender(SenderEndpoint, _Polling[Send | SendBlock]):
    """Prefill's end. `endpoint` is where it answers, with the port that was chosen for port 0."""

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
        lease_s: float = LEASE_S,
        transports: Sequence[str] = (ZMQ_BLOCKS,),
        slab_bytes: int = SLAB_BYTES,
        clock: Clock = time.monotonic,
    ) -> None:
        """Raises ConfigError for an address that may not be bound, StartupError for one that cannot."""
        super().__init__(
            instance, layout, planes, lease_s=lease_s, transports=transports, slab_bytes=slab_bytes, clock=clock
        )
        check_bind_address(bind_endpoint, trusted_network, has_keys=keyring is not None)
        self.authenticator = Authenticator(context, keyring.peers, ("decode",)) if keyring is not None else None
        self._socket = make_socket(
            context,
            zmq.ROUTER,
            max_frame=KV_MAX_BYTES,
            high_water=BULK_HIGH_WATER,
            receive_high_water=CONTROL_HIGH_WATER,
            curve=keyring.called() if keyring is not None else None,
        )
        self._doorway = Doorway(self._socket)
        try:
            self.endpoint = bind(self._socket, bind_endpoint)
        except BaseException:
            self._doorway.close()
            self._socket.close(0)
            raise
        if keyring is not None:
            self.endpoint = with_key(self.endpoint, keyring.own.public)
        for pollable in self.pollables():
            self._poller.register(pollable, zmq.POLLIN)

    def __repr__(self) -> str:
        return f"ZmqBlocksSender({self.endpoint if self._is_open else 'closed'}, {self.session})"

    def pollables(self) -> list[Socket]:
        """The sockets whose readability means that `poll` has work."""
        return [self._socket, self._doorway.socket] if self._is_open else []

    @property
    def counters(self) -> dict[str, float]:
        """Name to total, for heartbeats."""
        refusals = self.authenticator.counters if self.authenticator is not None else {}
        return {**super().counters, "handshakes_failed": self._doorway.num_failed, **refusals}

    def close(self) -> None:
        if self._is_open:
            self._perform(self.session.close(self._clock()))
            self._slabs.close()
            self._is_open = False
            self._doorway.close()
            self._socket.close()

    def _turn(self) -> None:
        if not self._is_open:
            return
        self._doorway.read()
        for _ in range(MESSAGES_PER_SOCKET):
            parts = recv_parts(self._socket, 3, 2 * KV_MAX_BYTES)
            if parts is None:
                break
            if not parts:
                self.session.counters.malformed += 1
                self._drop_log.say("", TOO_LONG)
                continue
            self._receive_frames(parts[0].bytes.hex(), [part.buffer for part in parts[1:]])
        self._work()

    def _transmit(self, peer: Peer, header: bytes, payload: Payload | None) -> Delivery | None:
        routing_id = bytes.fromhex(peer)
        if payload is None:
            return Delivered() if try_send(self._socket, [routing_id, header]) else None
        frame = zmq.Frame(payload.data, track=True, copy=False)
        tracker = frame.tracker
        assert tracker is not None
        return tracker if try_send(self._socket, [routing_id, header, frame]) else None


class ZmqBlocksReceiver(ReceiverEndpoint, _Polling[Send]):
    """Decode's end: a link per prefill endpoint, opened by its first pull and closed when it was idle for a while."""

    def __init__(
        self,
        instance: str,
        layout: Layout,
        planes: Planes,
        *,
        context: zmq.Context[Socket],
        keyring: Keyring | None = None,
        window: int = WINDOW,
        lease_s: float = LEASE_S,
        transports: Sequence[str] = (ZMQ_BLOCKS,),
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(
            instance, layout, planes, window=window, lease_s=lease_s, transports=transports, clock=clock
        )
        self._context = context
        self._max_frame = layout.block_bytes + BULK_FRAME_SLACK
        self._links: dict[Peer, Socket] = {}
        self._watches: dict[Peer, Watch] = {}  # each tells when its link's connection breaks or never begins
        self._keyring = keyring
        self._sparingly = Sparingly(clock=clock)

    def __repr__(self) -> str:
        return f"ZmqBlocksReceiver(links={len(self._links)}, {self.session})"

    def pull(self, request: PullRequest) -> None:
        """As `KVTransport.pull`; an endpoint that nobody can connect to loses the room at once."""
        try:
            self._link(request.endpoint)
        except ConfigError as error:
            self._events.append(Lost(room=request.room, epoch=request.epoch, kind="PeerLost", reason=str(error)))
            return
        super().pull(request)

    def pollables(self) -> list[Socket]:
        """The sockets whose readability means that `poll` has work; pulls and idle links change them."""
        return [*self._links.values(), *(watch.socket for watch in self._watches.values())]

    def close(self) -> None:
        if self._is_open:
            self._perform(self.session.close(self._clock()))
            self._slabs.close()
            self._is_open = False
            for peer in list(self._links):
                self._close_link(peer)

    def _turn(self) -> None:
        for peer, link in list(self._links.items()):
            for _ in range(MESSAGES_PER_SOCKET):
                parts = recv_parts(link, 2, self._max_frame + KV_MAX_BYTES)
                if parts is None:
                    break
                if not parts:
                    self.session.counters.malformed += 1
                    self._drop_log.say(peer, TOO_LONG)
                    continue
                self._receive_frames(peer, [part.buffer for part in parts])
        for peer, watch in list(self._watches.items()):
            self._take_in(peer, watch.read())
        if self._is_open:
            self._work()

    def _take_in(self, peer: Peer, events: list[tuple[int, int]]) -> None:
        """What happened to a link. It is closed, since libzmq may have given up on it for good: so it does after a refused
        handshake, and after bytes that are not ZMTP.
        """
        for event, value in events:
            if event == zmq.EVENT_DISCONNECTED:
                self._close_link(peer)
                self._perform(self.session.link_lost(peer, self._clock()))  # opens another while rooms need it
                return
            reason = failure_text(event, value)
            if self._sparingly.is_due(peer + reason):
                logger.warning("no link to prefill", extra=fields(endpoint=split_key(peer)[0], reason=reason))
            self._close_link(peer)  # the session asks again, which opens another
            return

    def _transmit(self, peer: Peer, header: bytes, payload: Payload | None) -> Delivery | None:
        assert payload is None, "decode sends no payloads"
        try:
            link = self._link(peer)
        except ConfigError as error:  # the peer's key was listed when the room was opened, and is not any more
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
                receive_high_water=BULK_HIGH_WATER,
                curve=curve,
            )
            watch = Watch(link, HANDSHAKE_FAILURES | zmq.EVENT_DISCONNECTED)
            try:
                connect(link, endpoint)
            except ConfigError:
                watch.close()
                link.close(0)
                raise
            self._links[peer], self._watches[peer] = link, watch
            self._poller.register(link, zmq.POLLIN)
            self._poller.register(watch.socket, zmq.POLLIN)
        return link

    def _address(self, peer: Peer) -> tuple[str, Curve | None]:
        """Where a peer answers and the keys to call it with. Raises ConfigError for a key that is not listed."""
        if self._keyring is None:
            return peer, None
        endpoint, key = split_key(peer)
        if not key:
            raise ConfigError(f"prefill at {endpoint} uses no keys; start it with --keys")
        if self._keyring.peers.find(key, ("prefill",)) is None:
            path = self._keyring.peers.path.parent
            raise ConfigError(f"prefill at {endpoint} has an unlisted key; `baton keys add {path} {key} --role prefill`")
        return endpoint, self._keyring.calling(key)

    def _close_link(self, peer: Peer) -> None:
        super()._close_link(peer)
        link = self._links.pop(peer, None)
        if link is not None:
            watch = self._watches.pop(peer)
            self._poller.unregister(link)
            self._poller.unregister(watch.socket)
            watch.close()
            link.close()
