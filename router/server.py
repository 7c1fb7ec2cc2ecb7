"""The HTTP server: its connections, their bounds together, and its end."""

import asyncio
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp

from .auth import Guard
from .exchange import Exchange
from .wire import HEAD_TIMEOUT_S, HttpProtocol

SWEEP_S = 0.1
MAX_BUFFERED = 256 << 20  # bytes of bodies that are being read, of all connections together
MAX_CONNECTIONS = 10_000
LAST_TURNS = 3  # of the loop, within which a closed server's descriptor is closed
SPARE_DESCRIPTORS = 124  # for workers, files and libraries


def connections_allowed(asked: int = 0) -> int:
    """How many connections there may be: `asked`, or MAX_CONNECTIONS, as far as this process may have descriptors.

    The soft limit on descriptors is raised as far as it may.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (asked or MAX_CONNECTIONS) + SPARE_DESCRIPTORS
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
            soft = min(wanted, hard)
    return min(asked or MAX_CONNECTIONS, max(16, soft - SPARE_DESCRIPTORS))


class HttpServer:
    """Serves `app` on a listening socket to those whom `guard` lets in."""

    def __init__(
        self,
        app: ASGIApp,
        guard: Guard,
        *,
        max_body: int,
        max_connections: int = 0,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.guard = guard
        self.max_body = max_body  # bytes
        self.max_connections = connections_allowed(max_connections)
        self.clock = clock
        self.is_draining = False
        self.responses: Counter[int] = Counter()  # answers that began, by status
        self._app = app
        self._tls = tls
        self._listening: asyncio.Server | None = None
        self._connections: set[HttpProtocol] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_buffered = 0  # bytes

    def __repr__(self) -> str:
        return f"HttpServer({len(self._connections)} connections, {len(self._tasks)} requests, {self._num_buffered} bytes)"

    async def serve(self, listener: socket.socket) -> None:
        """Until it is cancelled."""
        own = listener.dup()  # the loop closes it, at a moment of its own
        self._listening = await asyncio.get_running_loop().create_server(
            lambda: HttpProtocol(self), sock=own, ssl=self._tls, backlog=1024, ssl_handshake_timeout=self._tls_patience_s
        )
        try:
            while True:
                await asyncio.sleep(SWEEP_S)
                self._sweep()
        finally:
            self._listening.close()

    @property
    def _tls_patience_s(self) -> float | None:
        """With who has a descriptor and is no connection yet."""
        return HEAD_TIMEOUT_S if self._tls is not None else None

    async def hand_over(self, listener: socket.socket) -> None:
        """Leaves the port to others that listen there: closes `listener`, and each connection behind its next answer.

        Whom the kernel has put into this listener's queue is served: the queue is empty when it goes, but for who comes
        within the microseconds between. With net.ipv4.tcp_migrate_req these go to the others.
        """
        self.is_draining = True
        if self._listening is not None:
            self._listening.close()
            for _ in range(LAST_TURNS):  # the loop gives its descriptor back; from then on `listener` is the last
                await asyncio.sleep(0)
        waiting = []
        with suppress(OSError):  # nobody waits, or it never listened
            listener.setblocking(False)
            while True:
                waiting.append(listener.accept()[0])
        listener.close()
        for client in waiting:
            with suppress(OSError):  # it left
                client.setblocking(False)
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: HttpProtocol(self), client, ssl=self._tls, ssl_handshake_timeout=self._tls_patience_s
                )

    def drain(self) -> None:
        """Connections end with the answers that are under way; idle ones now."""
        self.is_draining = True
        for connection in list(self._connections):
            connection.close_if_idle()

    async def close(self, grace_s: float) -> None:
        """Waits for the last answers, at most so long, and cuts what is left."""
        self.drain()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        deadline = self.clock() + grace_s
        while self._connections and self.clock() < deadline:  # what is written must leave
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.abort()

    # --- what connections ask -----------------------------------------------------------------------------------------

    def joined(self, connection: HttpProtocol) -> bool:
        """False when there are too many."""
        self._connections.add(connection)
        return len(self._connections) <= self.max_connections

    def left(self, connection: HttpProtocol) -> None:
        """Idempotent."""
        self._connections.discard(connection)

    def may_buffer(self, num_bytes: int) -> bool:
        """Counts bytes of a body, unless all bodies together are too many."""
        if self._num_buffered + num_bytes > MAX_BUFFERED:
            return False
        self._num_buffered += num_bytes
        return True

    def unbuffer(self, num_bytes: int) -> None:
        self._num_buffered -= num_bytes

    def answered(self, status: int) -> None:
        self.responses[status] += 1

    def begin(self, exchange: Exchange) -> None:
        """The application answers."""
        task = asyncio.get_running_loop().create_task(exchange.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _sweep(self) -> None:
        now = self.clock()
        for connection in [one for one in self._connections if one.deadline <= now]:
            connection.on_deadline()
