"""The bulk connection of a pair with keys: sealed blocks alone, from prefill to decode, over plain ZeroMQ.

CURVE would encrypt every block again, at several times the cost of AES-GCM. With keys, the blocks therefore
leave the CURVE link, which carries all commands: greetings, announcements, keys, pulls, releases. Decode
connects to prefill here too, because a prefill worker needs no outgoing connections and a decode worker no
open port.

A client presents a ticket in ZeroMQ's handshake. Prefill issues the ticket over CURVE; it works once and
names the peer. A client without a ticket is disconnected before any of its messages is read. Decode then
sends one empty message, from which prefill learns the routing id. Every other message from decode is dropped
and counted. Decode reads only blocks here, and the seal of each block authenticates it.
"""

import logging
from collections import OrderedDict

import zmq

from ...cluster.errors import ConfigError, PeerLost
from ...cluster.net.authenticator import user_of
from ...cluster.net.drop_log import DropLog
from ...cluster.net.flood_guard import FloodGuard
from ...cluster.net.handshakes import HANDSHAKE_FAILURES, HandshakeMonitor, SocketMonitor, failure_text
from ...cluster.net.sockets import (
    BULK_HIGH_WATER,
    CONTROL_HIGH_WATER,
    Socket,
    bind,
    connect,
    make_socket,
    recv_parts,
    try_send,
)
from ...cluster.process.log import fields
from ...cluster.process.log_throttle import LogThrottle
from ...cluster.protocol.codec import KV_MAX_BYTES
from ...cluster.protocol.messages import KVWelcome
from ...cluster.security.keyring import split_key
from ...cluster.security.tickets import Tickets
from ..protocol.session import Peer
from .endpoint import Clock

logger = logging.getLogger(__name__)

MAX_FRAME = 1024  # bytes of a frame from decode: ZeroMQ's handshake, and an empty message
MAX_PEERS = 1024
MESSAGES_PER_TURN = 64
JOIN = b""
JOIN_S = 2.0  # limit from the ticket to the joined connection; as long as a handshake may take


def bulk_endpoint(endpoint: str, port: int) -> str:
    """The address of the block port that belongs to `endpoint`: the same host with `port`, or a neighbouring
    ipc path.
    """
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.bulk"
    return f"{endpoint.rpartition(':')[0]}:{port}"


def bulk_lane(peer: Peer) -> str:
    """The lane of a peer's blocks when they have a connection of their own."""
    return f"{peer}.bulk"


class BulkPort:
    """Prefill's end of the bulk connections. `port`: the port announced to decode workers, 0 for ipc."""

    def __init__(self, context: zmq.Context[Socket], endpoint: str, port: int, tickets: Tickets) -> None:
        """`endpoint`: the bound address of the CURVE socket.

        Raises StartupError if the block port cannot be bound.
        """
        self.num_malformed = 0
        self._tickets = tickets
        self._ways: OrderedDict[Peer, bytes | None] = (
            OrderedDict()
        )  # peer with a ticket -> its routing id, None until the ticket was used
        self._socket = make_socket(
            context,
            zmq.ROUTER,
            max_frame=MAX_FRAME,
            high_water=BULK_HIGH_WATER,
            ticket="",
        )
        self._flood_guard = FloodGuard()
        self._handshakes = HandshakeMonitor(self._socket)
        self._drop_log = DropLog("KV message dropped")
        try:
            bound = bind(self._socket, bulk_endpoint(endpoint, port))
        except BaseException:
            self.close()
            raise
        self.port = 0 if bound.startswith("ipc://") else int(bound.rpartition(":")[2])

    def __repr__(self) -> str:
        joined = sum(way is not None for way in self._ways.values())
        return f"BulkPort(port={self.port}, joined={joined}/{len(self._ways)})"

    @property
    def num_failed(self) -> int:
        """Connections that ended during their handshake."""
        return self._handshakes.num_failed

    def sockets(self) -> list[Socket]:
        """The sockets that `read` reads."""
        return [self._socket, self._handshakes.socket]

    def ticket_for(self, peer: Peer) -> str:
        """A new ticket. From now on the peer's blocks go over its bulk connection, or wait for it."""
        self._ways.setdefault(peer, None)
        self._ways.move_to_end(peer)
        while len(self._ways) > MAX_PEERS:
            self._ways.popitem(last=False)
        return self._tickets.issue(peer)

    def serves(self, peer: Peer) -> bool:
        """Whether the peer has a ticket."""
        return peer in self._ways

    def forget(self, peer: Peer) -> None:
        """Forgets a peer that has gone."""
        self._ways.pop(peer, None)

    def read(self) -> list[Peer]:
        """Reads the sockets; returns the peers that have joined."""
        self._handshakes.read()
        joined = []
        for _ in range(MESSAGES_PER_TURN):
            parts = recv_parts(self._socket, 2, 2 * MAX_FRAME, self._flood_guard)
            if parts is None:
                break
            peer = user_of(parts[1]) if len(parts) == 2 else ""
            if peer not in self._ways or parts[1].bytes != JOIN:
                self.num_malformed += 1
                self._drop_log.say(peer, "something is said where decode only has to come")
                continue
            self._ways[peer] = parts[0].bytes
            joined.append(peer)
        return joined

    def send(self, peer: Peer, header: bytes, payload: zmq.Frame) -> bool:
        """Sends a block. False if the peer has not joined or its queue is full."""
        way = self._ways.get(peer)
        if way is None:
            return False
        try:
            return try_send(self._socket, [way, header, payload])
        except PeerLost:
            self._ways[peer] = None  # it joins again with another ticket
            return False

    def close(self) -> None:
        """Closes the sockets. Idempotent."""
        self._handshakes.close()
        self._socket.close()


class BulkLink:
    """Decode's end of the bulk connection to one prefill worker."""

    def __init__(self, context: zmq.Context[Socket], endpoint: str, ticket: str, max_frame: int) -> None:
        """`max_frame`: bytes of the largest block. Raises ConfigError for an invalid address."""
        self.is_joined = False
        self.is_connected = False
        self._max_bytes = max_frame + KV_MAX_BYTES
        self.socket = make_socket(
            context,
            zmq.DEALER,
            max_frame=max_frame,
            high_water=CONTROL_HIGH_WATER,
            ticket=ticket,
        )
        self.watch = SocketMonitor(
            self.socket, HANDSHAKE_FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        try:
            connect(self.socket, endpoint)
        except ConfigError:
            self.close()
            raise

    def __repr__(self) -> str:
        return (
            f"BulkLink({'joined' if self.is_joined else 'connected' if self.is_connected else 'connecting'})"
        )

    def sockets(self) -> list[Socket]:
        """The sockets that `read_events` and `read_block` read."""
        return [self.socket, self.watch.socket]

    @property
    def must_join(self) -> bool:
        """Whether the connection stands and its join message is not sent yet."""
        return self.is_connected and not self.is_joined

    def read_events(self) -> list[tuple[int, int]]:
        """The (event, value) pairs of failures. Sends the join message once the connection stands."""
        broken = []
        for event, value in self.watch.read():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected = True
            else:
                broken.append((event, value))
        if self.must_join:
            self.is_joined = try_send(self.socket, [JOIN])
        return broken

    def read_block(self) -> list[memoryview] | None:
        """The frames of the next message; None without a message, [] for a message dropped as too long."""
        parts = recv_parts(self.socket, 2, self._max_bytes)
        return None if parts is None else [part.buffer for part in parts]

    def close(self) -> None:
        """Closes the sockets. Idempotent."""
        self.watch.close()
        self.socket.close()


class BulkLinks:
    """Decode's ends: one per prefill endpoint that issued a ticket."""

    def __init__(self, context: zmq.Context[Socket], max_frame: int, clock: Clock) -> None:
        """`max_frame`: bytes of the largest block on the wire."""
        self._context = context
        self._max_frame = max_frame
        self._log_throttle = LogThrottle(clock=clock)
        self._clock = clock
        self._awaited: dict[Peer, float] = {}  # peer -> latest time to have joined
        self._links: dict[Peer, BulkLink] = {}

    def __repr__(self) -> str:
        return f"BulkLinks({self._links})"

    def items(self) -> list[tuple[Peer, BulkLink]]:
        """A copy of the present (endpoint, link) pairs, safe against changes during iteration."""
        return list(self._links.items())

    def has(self, peer: Peer, link: BulkLink) -> bool:
        """Whether `link` is still the peer's link."""
        return self._links.get(peer) is link

    def sockets(self) -> list[Socket]:
        """The sockets of all links."""
        return [socket for link in self._links.values() for socket in link.sockets()]

    @property
    def must_join(self) -> bool:
        """Whether the join message of a link still has to be sent."""
        return any(link.must_join for link in self._links.values())

    @property
    def join_by(self) -> float | None:
        """Monotonic time at which `overdue` returns the next peer, unless that peer joins before."""
        return min(self._awaited.values(), default=None)

    def overdue(self) -> list[Peer]:
        """Peers that did not join within `JOIN_S` seconds; each is returned once."""
        now = self._clock()
        for peer in [peer for peer in self._awaited if peer in self._links and self._links[peer].is_joined]:
            del self._awaited[peer]
        late = [peer for peer, by in self._awaited.items() if now >= by]
        for peer in late:
            del self._awaited[peer]
            endpoint = split_key(peer)[0]
            logger.warning(
                "the port for blocks does not answer", extra=fields(endpoint=endpoint, waited_s=JOIN_S)
            )
        return late

    def open(self, peer: Peer, welcome: KVWelcome) -> None:
        """Opens a link with the Welcome's ticket. No-op without a ticket or with an open link."""
        if not welcome.bulk_ticket or peer in self._links:
            return
        endpoint = bulk_endpoint(split_key(peer)[0], welcome.bulk_port)
        try:
            link = BulkLink(self._context, endpoint, welcome.bulk_ticket, self._max_frame)
        except ConfigError as error:
            logger.warning("no link for blocks", extra=fields(endpoint=endpoint, reason=str(error)))
            return
        self._links[peer] = link
        self._awaited.setdefault(peer, self._clock() + JOIN_S)
        logger.info("kv link opened", extra=fields(endpoint=endpoint, cipher=welcome.cipher))

    def lost(self, peer: Peer, events: list[tuple[int, int]]) -> bool:
        """Closes a broken link.

        Returns whether to ask for a new ticket now; a refused link waits for the peer's silence.
        """
        self.close(peer)
        event, value = events[0]
        if event != zmq.EVENT_DISCONNECTED and self._log_throttle.is_due(peer):
            reason = failure_text(event, value)
            logger.warning("no link for blocks", extra=fields(endpoint=split_key(peer)[0], reason=reason))
        return event == zmq.EVENT_DISCONNECTED

    def forget(self, peer: Peer) -> None:
        """Closes the peer's link and stops waiting for it. Idempotent."""
        self._awaited.pop(peer, None)
        self.close(peer)

    def close(self, peer: Peer) -> None:
        """Closes the peer's link. Idempotent."""
        link = self._links.pop(peer, None)
        if link is not None:
            link.close()
