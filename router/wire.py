"""HTTP/1.1 as uvicorn speaks it, with bounds on what a client may leave unfinished before it has asked for anything.

    connection   the MAX_CONNECTIONS + 1st gets 503; one that sends no head within HEAD_TIMEOUT_S is closed
    head         at most MAX_HEAD_BYTES and MAX_HEADERS (431), complete within HEAD_TIMEOUT_S of its beginning (408)

The body has its own bounds in `http`, and a connection kept alive after an answer has uvicorn's timer.
"""

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError, head_too_large, head_too_slow, malformed, too_many_connections

HEAD_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 64
MAX_CONNECTIONS = 900  # below the 1024 descriptors that a process commonly may have


class HeadTooLarge(Exception):
    """Ends the parser's work on a head."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    _head_timer: asyncio.TimerHandle | None = None
    _is_in_head = True  # from the end of one request to the end of the next one's headers
    _num_heads = 0  # complete ones
    _num_pending = 0  # bytes of a head that is not complete, as they came
    _num_head_bytes = 0  # of a head as far as it is parsed
    _has_begun = False  # whether something of a head is here
    _is_too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(too_many_connections())
            return
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        was_in_head, num_heads = self._is_in_head, self._num_heads
        super().data_received(data)
        if self.transport.is_closing() or not self._is_in_head:
            return
        if was_in_head and self._num_heads == num_heads:  # else the chunk also held a body, or its end
            self._num_pending += len(data)
        if self._num_pending > MAX_HEAD_BYTES:  # also one endless header, which the parser keeps to itself
            self._refuse(head_too_large(MAX_HEAD_BYTES, MAX_HEADERS))
        elif self.cycle is None or self.cycle.response_complete:
            self._arm()

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        self._has_begun = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = self._has_begun = False
        self._num_heads += 1
        self._num_pending = 0
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._has_begun and not self.transport.is_closing():  # the next request's head came in part before
            self._arm()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what its parser refuses."""
        self._refuse(head_too_large(MAX_HEAD_BYTES, MAX_HEADERS) if self._is_too_large else malformed())

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            self._is_too_large = True
            raise HeadTooLarge

    def _arm(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_head_timeout)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self._has_begun:
            self._refuse(head_too_slow())
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answers outside of any request, and closes."""
        self._disarm()
        body = error.encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        lines = [f"{name}: {value}" for name, value in (headers | error.headers).items()]
        status = HTTPStatus(error.status)
        head = "\r\n".join([f"HTTP/1.1 {status.value} {status.phrase}", *lines, "", ""])
        if not self.transport.is_closing():
            self.transport.write(head.encode("ascii") + body)
            self.transport.close()
