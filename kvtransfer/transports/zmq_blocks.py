"""KV blocks as ZeroMQ messages, over tcp or ipc: a ROUTER on prefill, a DEALER per prefill endpoint on decode.

A message is one frame; a Block is its header and its payload. Blocks that are one run of CPU memory go out without a
copy, and their pages are reported free only when ZeroMQ no longer reads them. A socket belongs to the thread that polls;
the owner may wait for `pollables()` and `next_deadline()` in its own poller and then call `poll(0)`.
"""

import math
import time
from abc import abstractmethod

import zmq

from ...cluster.codec import KV_MAX_BYTES
from ...cluster.errors import ConfigError
from ...cluster.messages import Layout
from ...cluster.sockets import (
    BULK_FRAME_SLACK,
    BULK_HIGH_WATER,
    CONTROL_HIGH_WATER,
    Socket,
    bind,
    check_bind_address,
    connect,
    make_socket,
    recv_parts,
    try_send,
)
from ..endpoints import Clock, Delivered, Delivery, Endpoint, Queued, ReceiverEndpoint, SenderEndpoint
from ..memory import Payload
from ..session import LEASE_S, WINDOW, Peer, Send, SendBlock
from ..transport import Lost, Planes, PullRequest, TransportEvent

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
        lease_s: float = LEASE_S,
        clock: Clock = time.monotonic,
    ) -> None:
        """Raises ConfigError for an address that may not be bound, StartupError for one that cannot."""
        super().__init__(instance, layout, planes, lease_s=lease_s, clock=clock)
        check_bind_address(bind_endpoint, trusted_network)
        self._socket = make_socket(
            context,
            zmq.ROUTER,
            max_frame=KV_MAX_BYTES,
            high_water=BULK_HIGH_WATER,
            receive_high_water=CONTROL_HIGH_WATER,
        )
        try:
            self.endpoint = bind(self._socket, bind_endpoint)
        except BaseException:
            self._socket.close(0)
            raise
        self._poller.register(self._socket, zmq.POLLIN)

    def __repr__(self) -> str:
        return f"ZmqBlocksSender({self.endpoint if self._is_open else 'closed'}, {self.session})"

    def pollables(self) -> list[Socket]:
        """The sockets whose readability means that `poll` has work."""
        return [self._socket] if self._is_open else []

    def close(self) -> None:
        if self._is_open:
            self._perform(self.session.close(self._clock()))
            self._is_open = False
            self._socket.close()

    def _turn(self) -> None:
        if not self._is_open:
            return
        for _ in range(MESSAGES_PER_SOCKET):
            parts = recv_parts(self._socket, 3, 2 * KV_MAX_BYTES)
            if parts is None:
                break
            if not parts:
                self.session.counters.malformed += 1
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
        window: int = WINDOW,
        lease_s: float = LEASE_S,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(instance, layout, planes, window=window, lease_s=lease_s, clock=clock)
        self._context = context
        self._max_frame = layout.block_bytes + BULK_FRAME_SLACK
        self._links: dict[Peer, Socket] = {}
        self._monitors: dict[Peer, Socket] = {}  # each tells when its link's connection breaks

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
        return [*self._links.values(), *self._monitors.values()]

    def close(self) -> None:
        if self._is_open:
            self._perform(self.session.close(self._clock()))
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
                    continue
                self._receive_frames(peer, [part.buffer for part in parts])
        for peer, monitor in list(self._monitors.items()):
            while recv_parts(monitor, 2, 1024):
                self._perform(self.session.link_lost(peer, self._clock()))
        if self._is_open:
            self._work()

    def _transmit(self, peer: Peer, header: bytes, payload: Payload | None) -> Delivery | None:
        assert payload is None, "decode sends no payloads"
        return Delivered() if try_send(self._link(peer), [header]) else None

    def _link(self, peer: Peer) -> Socket:
        link = self._links.get(peer)
        if link is None:
            link = make_socket(
                self._context,
                zmq.DEALER,
                max_frame=self._max_frame,
                high_water=CONTROL_HIGH_WATER,
                receive_high_water=BULK_HIGH_WATER,
            )
            try:
                connect(link, peer)
            except ConfigError:
                link.close(0)
                raise
            self._links[peer] = link
            self._monitors[peer] = link.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._poller.register(link, zmq.POLLIN)
            self._poller.register(self._monitors[peer], zmq.POLLIN)
        return link

    def _close_link(self, peer: Peer) -> None:
        super()._close_link(peer)
        link = self._links.pop(peer, None)
        if link is not None:
            self._poller.unregister(link)
            self._poller.unregister(self._monitors.pop(peer))
            link.disable_monitor()
            link.close()
