"""Accepts connections on a TLS port, up to the end of the handshake.

    silent      no byte came yet: the connection costs a socket and nothing else, for at most the patience
    handshake   the first byte begins a handshake: it has the rest of the patience
    plain       the first byte begins anything else: a plain HTTP request gets the error that this port needs
                TLS
    inside      the handshake is done: an HTTP connection like any other

Connections before the handshake count as connections, so they cannot use descriptors beyond the server's
bound.
"""

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from ...cluster.process.log import fields
from ..errors import tls_wanted
from .tls import Certificate

logger = logging.getLogger(__name__)

BACKLOG = 1024
AT_ONCE = 64  # connections accepted per turn of the loop
SHORTAGE_S = 0.1  # seconds without accepting when descriptors or memory are short
SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
HANDSHAKE = b"\x16"  # the content type of a handshake record, RFC 8446, 5.1
READ_BYTES = 1 << 16


class TlsListener:
    """Accepts connections for one server, on one event loop.

    `has_room(n)` is true if one more connection may come while `n` connections are before the end of their
    handshake.
    """

    def __init__(
        self,
        certificate: Certificate,
        make: Callable[[], asyncio.Protocol],
        has_room: Callable[[int], bool],
        *,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_failed = 0  # failed handshakes
        self._certificate, self._make, self._has_room = certificate, make, has_room
        self._patience_s, self._clock = patience_s, clock
        self._listener: socket.socket | None = None
        self._silent: dict[socket.socket, float] = {}  # end of the patience, in order of arrival
        self._handshakes: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"TlsListener({len(self._silent)} silent, {len(self._handshakes)} in a handshake)"

    def __len__(self) -> int:
        """The number of connections before the end of their handshake."""
        return len(self._silent) + len(self._handshakes)

    def open(self, listener: socket.socket) -> None:
        """Starts accepting from `listener`, and owns it from then on."""
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._listener = listener
        self._listen()

    def close(self) -> None:
        """Stops accepting connections. Handshakes in progress may finish. Idempotent."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def abort(self) -> None:
        """Stops accepting, and ends all handshakes."""
        self.close()
        for client in list(self._silent):
            self._forget(client)
            client.close()
        for task in self._handshakes:
            task.cancel()

    def sweep(self) -> None:
        """Closes connections that were silent for too long."""
        now = self._clock()
        for client, deadline in list(self._silent.items()):
            if deadline > now:
                break
            self._forget(client)
            client.close()

    def take(self, client: socket.socket) -> None:
        """Takes over an accepted connection."""
        if not self._has_room(len(self)):
            client.close()
            return
        client.setblocking(False)
        self._silent[client] = self._clock() + self._patience_s
        asyncio.get_running_loop().add_reader(client, self._on_first_byte, client)

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if self._listener is None:
                return
            try:
                client = self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in SHORTAGES:
                    loop = asyncio.get_running_loop()
                    loop.remove_reader(self._listener)
                    loop.call_later(SHORTAGE_S, self._listen)
                    return
                continue  # that client has left
            self.take(client)

    def _forget(self, client: socket.socket) -> float:
        asyncio.get_running_loop().remove_reader(client)
        return self._silent.pop(client)

    def _on_first_byte(self, client: socket.socket) -> None:
        deadline = self._forget(client)
        try:
            first = client.recv(1, socket.MSG_PEEK)
        except OSError:
            first = b""
        if first == HANDSHAKE:
            task = asyncio.get_running_loop().create_task(self._shake_hands(client, deadline - self._clock()))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)
            return
        with client:
            if first:
                self.num_failed += 1
                _refuse(client)

    async def _shake_hands(self, client: socket.socket, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                self._make, client, ssl=self._certificate.context, ssl_handshake_timeout=max(seconds, 0.1)
            )
        except OSError as error:  # includes ssl.SSLError
            self.num_failed += 1
            logger.debug("TLS handshake failed", extra=fields(reason=str(error) or type(error).__name__))
            client.close()


def _refuse(client: socket.socket) -> None:
    """Sends an error to a plain HTTP client.

    Its bytes are read first, since they would reset the connection.
    """
    with suppress(OSError):
        client.recv(READ_BYTES)
        client.send(tls_wanted().as_http())
        client.shutdown(socket.SHUT_WR)
