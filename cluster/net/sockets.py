"""Creates, binds, connects, reads and writes every ZeroMQ socket of baton.

All sockets share limits on memory (frame size, queued messages) and time (linger, handshake, sends). A
connection ends when its other process or host is gone. It stands while the other process is only stopped:
its kernel still acknowledges what it is sent. Users of a socket judge by their messages whether a process is
silent for too long. A socket belongs to one thread. With keys a link uses CURVE and
authenticates both ends. Without keys, a bind address beyond loopback requires `--trusted-network`.
"""

import asyncio
import errno
import ipaddress
import math
import os
import select
import socket as stdlib_socket
from collections.abc import Callable, Iterable, Sequence

import zmq

from ..errors import ConfigError, PeerLost, StartupError
from ..protocol.codec import CONTROL_MAX_FRAME
from ..security.allowed_keys import TICKET_DOMAIN, TICKET_USER, ZAP_DOMAIN
from ..security.keyring import Curve
from .endpoints import endpoint_fault, port_fault
from .flood_guard import FloodGuard

CONTROL_HIGH_WATER = 64
BULK_HIGH_WATER = 8
BULK_FRAME_SLACK = 4096  # a bulk socket's frames are one block or a small message
LINGER_MS = 200
RECONNECT_MAX_MS = 1000
HANDSHAKE_MS = 2000
PING_MS = 500  # between two heartbeats of the connecting side
UNACKED_MS = 1500  # until a connection ends whose other kernel acknowledges nothing: the host is gone
SILENCE_MS = 600_000  # without an answer or a heartbeat of a process, which may be stopped, until it ends
CURVE_FRAME_SLACK = 64  # an encrypted frame is 33 bytes longer than its content
IPC_PATH_LIMIT = 107
OVERSIZED_BYTES = 1 << 20  # the least that a message of too many parts or bytes counts for a FloodGuard
# the log's reason for a message that `recv_parts` drops
TOO_LONG = "a message of too many parts or bytes, or of a flood"
DISCARD_PARTS = 4096  # per call, which takes about as many microseconds
READABLE = int(zmq.POLLIN)
# flags of a part, joined once because that is slow
MORE, LAST = (int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK))
MESSAGES_PER_WAKE = 256  # an AsyncReceiver yields to the event loop after so many

Part = bytes | memoryview | zmq.Frame
Socket = zmq.Socket[bytes]


def make_socket(
    context: zmq.Context[Socket],
    kind: int,
    *,
    max_frame: int = CONTROL_MAX_FRAME,
    high_water: int = CONTROL_HIGH_WATER,
    linger_ms: int = LINGER_MS,
    curve: Curve | None = None,
    ticket: str | None = None,
    reconnect_max_ms: int = RECONNECT_MAX_MS,
) -> Socket:
    """A socket of type `kind` (zmq.ROUTER, zmq.DEALER, ...) with baton's settings; authenticated and
    encrypted by `curve`.

    Client sockets present `ticket` in the handshake. An empty ticket makes a server socket that requires one.

    A peer's frame of more than `max_frame` bytes closes its connection. At most `high_water` sent messages
    are queued per peer. Received ones are queued without a bound, so the reader of a ROUTER has a FloodGuard.
    A DEALER queues nothing for a peer that is not connected: `try_send` returns False until it is. It tries
    again after 100 ms, then twice as long and so on up to `reconnect_max_ms`.
    """
    socket: Socket = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame + (CURVE_FRAME_SLACK if curve is not None else 0))
    socket.setsockopt(zmq.SNDHWM, high_water)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.SNDTIMEO, 1000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, reconnect_max_ms)
    # libzmq 4.3 stops reading from a connection whose queue is full. When the peer of such a connection is
    # gone, a PING that falls due, or one that is answered, aborts the process (its issues 3937, 4364 and
    # 4767). Any peer that may connect can fill a queue of any length and leave. Therefore no receive queue
    # has a bound: the connecting side chose its peer, and the listening side has a FloodGuard. Only the
    # connecting side sends PINGs; the listening side answers them and notices silence by their TTL.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS if kind == zmq.DEALER else 0)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, SILENCE_MS)
    socket.setsockopt(zmq.TCP_MAXRT, UNACKED_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # detects a vanished host of a peer that sends no PINGs
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    if kind == zmq.DEALER:
        socket.setsockopt(zmq.IMMEDIATE, 1)
    if curve is not None:
        _set_keys(socket, curve)
    elif ticket is not None:
        _set_ticket(socket, ticket)
    return socket


def _set_keys(socket: Socket, curve: Curve) -> None:
    """Enforces the ZAP domain: by default libzmq admits every key when no ZAP handler answers."""
    socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)
    if curve.server is None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    else:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.public)
        socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server)


def _set_ticket(socket: Socket, ticket: str) -> None:
    """Uses ZeroMQ's PLAIN mechanism: a peer without a valid ticket is refused before any message of it is
    read."""
    if ticket:
        socket.setsockopt(zmq.PLAIN_USERNAME, TICKET_USER)
        socket.setsockopt(zmq.PLAIN_PASSWORD, ticket.encode())
    else:
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, TICKET_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def bind(socket: Socket, endpoint: str) -> str:
    """Binds and returns the actual endpoint, with port 0 resolved.

    Raises StartupError naming endpoint and remedy.
    """
    _check_ipc_path(endpoint)
    if fault := port_fault(endpoint):
        raise StartupError(f"cannot listen: {endpoint} {fault}")
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise StartupError(f"cannot listen on {endpoint}: {_bind_remedy(error)}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect(socket: Socket, endpoint: str) -> None:
    """Connects in the background, with retries. Raises ConfigError for an invalid endpoint."""
    if fault := port_fault(endpoint):
        raise ConfigError(f"cannot connect: {endpoint!r} {fault}")
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot connect to {endpoint!r} ({error.strerror}): give tcp://HOST:PORT or ipc:///PATH"
        ) from None


def is_loopback(endpoint: str) -> bool:
    """Whether only this host can reach `endpoint`.

    Host names other than localhost count as reachable from outside.
    """
    scheme, _, address = endpoint.partition("://")
    if scheme in ("ipc", "inproc"):
        return True
    host = address.rpartition(":")[0].strip("[]").partition("%")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind_address(
    endpoint: str,
    trusted_network: bool,
    *,
    has_keys: bool | None = None,
    named: str = "",
    remedy: str = "",
) -> None:
    """Raises ConfigError for an endpoint that is malformed, or open to other hosts without keys and
    `trusted_network`.

    `has_keys` is None for a link that cannot have keys, such as HTTP. The error begins with `named`, the flag
    and its value, by default the endpoint. It says how to authenticate its clients: by `remedy`, "" for
    --keys where there can be keys.
    """
    if fault := endpoint_fault(endpoint):
        raise ConfigError(f"{endpoint!r} {fault}")
    if not has_keys and not trusted_network and not is_loopback(endpoint):
        remedy = remedy or ("" if has_keys is None else "authenticate them with --keys DIR")
        raise ConfigError(
            f"{named or endpoint}: other hosts can connect and are not authenticated; bind 127.0.0.1"
            f"{f', {remedy}' if remedy else ''}, or add --trusted-network if only trusted hosts can connect"
        )


def wait_readable(descriptors: Iterable[int], seconds: float) -> bool:
    """Waits up to `seconds`, in whole milliseconds, until one is readable. False: none is."""
    poller = select.poll()  # `select` takes no descriptors above 1023
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(max(0, math.ceil(seconds * 1000))))


def recv_parts(
    socket: Socket, max_parts: int, max_bytes: int, guard: FloodGuard | None = None
) -> list[zmq.Frame] | None:
    """The next message without waiting: None when there is none, [] when one was dropped: it was too long, or
    `guard` refused it.

    Reads part by part and keeps at most `max_parts` parts and `max_bytes` bytes, since MAXMSGSIZE bounds
    frames only. A call discards at most `DISCARD_PARTS` parts of an oversized message, since a million would
    take a second. While `is_discarding`, further calls return None and discard more.
    """
    try:
        if is_discarding(socket) and _discard(socket):
            return None
        frame = socket.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        if guard is not None:
            guard.caught_up()
        return None
    parts = [frame]
    size = len(frame)
    while frame.more and len(parts) <= max_parts and size <= max_bytes:
        frame = socket.recv(zmq.NOBLOCK, copy=False)  # a message arrives whole, so its parts are all here
        size += len(frame)
        parts.append(frame)
    if frame.more:
        _discard(socket)
    is_oversized = len(parts) > max_parts or size > max_bytes
    is_refused = guard is not None and guard.refuses(
        parts[0], max(size, OVERSIZED_BYTES) if is_oversized else size
    )
    return [] if is_oversized or is_refused else parts


def is_discarding(socket: Socket) -> bool:
    """Whether the rest of a dropped message waits to be discarded by `recv_parts`."""
    return bool(socket.getsockopt(zmq.RCVMORE))


def _discard(socket: Socket) -> bool:
    """Discards further parts of a message. Returns whether more follow."""
    return all(socket.recv(zmq.NOBLOCK, copy=False).more for _ in range(DISCARD_PARTS))


def try_send(socket: Socket, parts: Sequence[Part]) -> bool:
    """Sends a message without waiting; False when the peer's queue is full or it is not connected (nothing
    was sent).

    Raises PeerLost when a ROUTER has no such peer.
    """
    last = len(parts) - 1
    try:
        for i, part in enumerate(parts):
            socket.send(part, MORE if i < last else LAST)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == errno.EHOSTUNREACH:
            raise PeerLost("the peer is not connected") from None
        raise
    return True


class AsyncReceiver:
    """Feeds a socket's messages to `on_message` on an asyncio or uvloop event loop.

    The socket's descriptor is edge-triggered and covers sending too: it is drained on every wake and after
    every send. Messages longer than `max_parts` or `max_bytes`, and those that `guard` refuses, are dropped
    and counted in `num_dropped`, and `on_dropped` is called.
    """

    def __init__(
        self,
        socket: Socket,
        on_message: Callable[[list[zmq.Frame]], None],
        *,
        max_parts: int = 4,
        max_bytes: int = CONTROL_MAX_FRAME,
        on_dropped: Callable[[], None] | None = None,
        guard: FloodGuard | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.num_dropped = 0
        self._socket = socket
        self._on_message = on_message
        self._max_parts = max_parts
        self._max_bytes = max_bytes
        self._on_dropped = on_dropped
        self._guard = guard
        self._loop = loop or asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._is_open = True
        self._drain_is_due = False
        self._loop.add_reader(self._fd, self._drain)
        self._drain_soon()  # messages from before the reader was added raise no edge

    def __repr__(self) -> str:
        return f"AsyncReceiver({'open' if self._is_open else 'closed'}, dropped={self.num_dropped})"

    def send(self, parts: Sequence[Part]) -> bool:
        """`try_send` on the socket, from the loop's thread."""
        try:
            return try_send(self._socket, parts)
        finally:
            # sending may have taken the descriptor's edge
            if int(self._socket.getsockopt(zmq.EVENTS)) & READABLE:
                self._drain_soon()

    def close(self) -> None:
        """Stops reading; the socket stays open for its owner to close. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._fd)

    def _drain_soon(self) -> None:
        if self._is_open and not self._drain_is_due:
            self._drain_is_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_is_due = False
        for _ in range(MESSAGES_PER_WAKE):
            if not self._is_open:
                return
            parts = recv_parts(self._socket, self._max_parts, self._max_bytes, self._guard)
            if parts is None:
                if is_discarding(self._socket):  # the rest of a message raises no edge
                    self._drain_soon()
                return
            if not parts:
                self.num_dropped += 1
                if self._on_dropped is not None:
                    self._on_dropped()
                continue
            try:
                self._on_message(parts)
            except BaseException:
                self._drain_soon()  # queued messages raise no new edge
                raise
        self._drain_soon()


def _check_ipc_path(endpoint: str) -> None:
    """Raises StartupError for an ipc path that is too long, in a missing directory, or in use.

    libzmq would unlink any file at the path, even a running server's socket.
    """
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc" or path in ("", "*") or path.startswith("@"):
        return
    if len(os.fsencode(path)) > IPC_PATH_LIMIT:
        raise StartupError(
            f"cannot listen on {endpoint}: an ipc path has at most {IPC_PATH_LIMIT} bytes, shorten it"
        )
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise StartupError(f"cannot listen on {endpoint}: its directory does not exist, create it")
    with stdlib_socket.socket(stdlib_socket.AF_UNIX, stdlib_socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(path)
        except OSError:
            return
    raise StartupError(
        f"cannot listen on {endpoint}: address in use, stop the process that has it or choose another"
    )


def _bind_remedy(error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "address in use, stop the process that has it or choose another"
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return "no interface of this host has that address, use 127.0.0.1 or one of its own"
    if error.errno == errno.EACCES:
        return "permission denied, use a port above 1023 or a path that this user can write"
    return f"{error.strerror}, give tcp://HOST:PORT or ipc:///PATH"
