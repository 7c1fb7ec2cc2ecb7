"""The HTTP server: its connections, their common bounds, and its shutdown."""

import asyncio
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from .access_log import AccessLog
from .allowed_hosts import AllowedHosts
from .auth import Guard
from .cors import Cors
from .exchange import App, Exchange
from .http_protocol import HEAD_TIMEOUT_S, NEVER, HttpProtocol
from .tls import Certificate
from .tls_listener import TlsListener

SWEEP_S = 0.1
MAX_BUFFERED = 256 << 20  # bytes of bodies being read, over all connections
MAX_CONNECTIONS = 10_000
OWN_CONNECTIONS = 32  # connections of a router's own port, so that it answers when the clients' port is full
LAST_TURNS = 3  # turns of the loop within which a closed server's descriptor is closed
PROBE_CONNECTIONS = 16  # connections of the port of probes
SPARE_DESCRIPTORS = 124  # descriptors for workers, files and libraries
SPARE_IN_HANDSHAKE = (
    32  # descriptors of these for connections above the maximum, which get 503 after the handshake
)


@dataclass(eq=False)
class Counts:
    """Counters that all servers of a process share."""

    responses: Counter[int] = field(default_factory=Counter)
    """The number of answers that began, by status."""
    num_buffered: int = 0
    """Bytes of bodies being read."""


def connections_allowed(asked: int = 0, *, has_own_port: bool = False, has_probe_port: bool = False) -> int:
    """The maximum number of client connections: `asked` or MAX_CONNECTIONS, bounded by the limit on
    descriptors.

    Raises the soft limit on descriptors as far as allowed. The router's own port and the port of probes take
    some descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = SPARE_DESCRIPTORS + (OWN_CONNECTIONS + SPARE_IN_HANDSHAKE if has_own_port else 0)
    spare += PROBE_CONNECTIONS if has_probe_port else 0
    wanted = (asked or MAX_CONNECTIONS) + spare
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
            soft = min(wanted, hard)
    return min(asked or MAX_CONNECTIONS, max(16, soft - spare))


class HttpServer:
    """Serves `app` on one listening socket to the callers that `guard` accepts.

    A connection above the maximum gets 503. With `ends_oldest` it is served, and the oldest one ends: then
    clients that keep connections open cannot shut others out.
    """

    def __init__(
        self,
        app: App,
        guard: Guard,
        counts: Counts,
        *,
        max_body: int,
        max_connections: int,
        keep_alive_s: float,
        certificate: Certificate | None = None,
        ends_oldest: bool = False,
        cors: Cors | None = None,
        hosts: AllowedHosts | None = None,
        access_log: AccessLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.guard, self.cors, self.hosts = guard, cors, hosts
        self._access_log = access_log
        self.max_body = max_body  # bytes
        self.max_connections = max_connections
        self.keep_alive_s = keep_alive_s
        self.clock = clock
        self.is_leaving = False  # answers announce that their connection closes
        self.is_draining = False  # connections close after an answer, even if it did not announce so
        self._ends_oldest = ends_oldest
        self._app, self._counts = app, counts
        self._listening: asyncio.Server | TlsListener | None = None
        self._tls_listener = None if certificate is None else self._tls_listener_with(certificate)
        self._connections: dict[HttpProtocol, None] = {}  # in order of arrival
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_deadline = NEVER  # the earliest deadline of all connections

    def __repr__(self) -> str:
        num_bytes = self._counts.num_buffered
        return (
            f"HttpServer({len(self._connections)} connections, {len(self._tasks)} requests, "
            f"{num_bytes} bytes)"
        )

    async def serve(self, listener: socket.socket) -> None:
        """Serves until it is cancelled."""
        own = listener.dup()  # the loop closes this copy at a later time
        if self._tls_listener is not None:
            self._tls_listener.open(own)
            self._listening = self._tls_listener
        else:
            self._listening = await asyncio.get_running_loop().create_server(
                self._connection, sock=own, backlog=1024
            )
        try:
            while True:
                await asyncio.sleep(SWEEP_S)
                self._sweep()
        finally:
            self._listening.close()

    @property
    def num_tls_failed(self) -> int:
        """The number of failed TLS handshakes."""
        return 0 if self._tls_listener is None else self._tls_listener.num_failed

    def _connection(self) -> HttpProtocol:
        return HttpProtocol(self)

    def _tls_listener_with(self, certificate: Certificate) -> TlsListener:
        def has_room(num_in_handshake: int) -> bool:
            return num_in_handshake + len(self._connections) < self.max_connections + SPARE_IN_HANDSHAKE

        return TlsListener(
            certificate, self._connection, has_room, patience_s=HEAD_TIMEOUT_S, clock=self.clock
        )

    async def hand_over(self, listener: socket.socket) -> None:
        """Leaves the port to other listeners: closes `listener`, and each connection after an answer that
        announces it.

        An answer whose head has gone out, such as a stream's, cannot announce the close. Its connection stays
        open, since closing could hit the client's next request in transit. Connections in this listener's
        queue are served before it closes. Those that arrive in the microseconds between are lost, unless
        net.ipv4.tcp_migrate_req moves them to the other listeners.
        """
        self.is_leaving = True
        if self._listening is not None:
            self._listening.close()
            for _ in range(LAST_TURNS):  # wait until the loop has closed its copy and `listener` is the last
                await asyncio.sleep(0)
        waiting = []
        with suppress(OSError):  # the queue is empty, or the socket never listened
            listener.setblocking(False)
            while True:
                waiting.append(listener.accept()[0])
        listener.close()
        for client in waiting:
            if self._tls_listener is not None:
                self._tls_listener.take(client)
                continue
            with suppress(OSError):  # the client has left
                client.setblocking(False)
                await asyncio.get_running_loop().connect_accepted_socket(self._connection, client)

    def begin_drain(self) -> None:
        """Makes connections close after their running answer."""
        self.is_leaving = self.is_draining = True

    def drain(self) -> None:
        """As `begin_drain`, and closes idle connections now."""
        self.begin_drain()
        for connection in list(self._connections):
            connection.close_if_idle()

    async def close(self, grace_s: float) -> None:
        """Waits up to `grace_s` seconds for running answers, then cuts the rest off."""
        self.drain()
        if self._tls_listener is not None:
            self._tls_listener.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        deadline = self.clock() + grace_s
        while self._connections and self.clock() < deadline:  # let written bytes go out first
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.abort()

    # --- connections ----------------------------------------------------------------------------------------

    def joined(self, connection: HttpProtocol) -> bool:
        """Registers a connection. False when there are too many."""
        self._connections[connection] = None
        if len(self._connections) <= self.max_connections:
            return True
        if self._ends_oldest:
            next(iter(self._connections)).abort()
        return self._ends_oldest

    def left(self, connection: HttpProtocol) -> None:
        """Removes a connection. Idempotent."""
        self._connections.pop(connection, None)

    def may_buffer(self, num_bytes: int) -> bool:
        """Counts bytes of a body.

        False, without counting, when all bodies together would exceed the bound.
        """
        if self._counts.num_buffered + num_bytes > MAX_BUFFERED:
            return False
        self._counts.num_buffered += num_bytes
        return True

    def unbuffer(self, num_bytes: int) -> None:
        self._counts.num_buffered -= num_bytes

    def answered(self, status: int) -> None:
        self._counts.responses[status] += 1

    def served(self, exchange: Exchange) -> None:
        if self._access_log is not None:
            self._access_log.served(exchange, self.clock())

    def refused(self, status: int, method: str, path: str, request_id: str, client: str) -> None:
        if self._access_log is not None:
            self._access_log.refused(status, method, path, request_id, client)

    def deadline_in(self, seconds: float) -> float:
        """Schedules a deadline check of a connection; the deadline in monotonic seconds."""
        deadline = self.clock() + seconds
        self._next_deadline = min(self._next_deadline, deadline)
        return deadline

    def begin(self, exchange: Exchange) -> None:
        """Runs the application for an exchange, in a task."""
        task = asyncio.get_running_loop().create_task(exchange.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _sweep(self) -> None:
        if self._tls_listener is not None:
            self._tls_listener.sweep()
        now = self.clock()
        if now < self._next_deadline:
            return
        for connection in [one for one in self._connections if one.deadline <= now]:
            connection.on_deadline()
        self._next_deadline = min([one.deadline for one in self._connections], default=NEVER)
