"""HTTP/1.1 on one connection, with a bound on everything that a client may send, withhold or leave unread.

    connection   above the server's maximum number it gets 503. It is closed when no head comes within
                 HEAD_TIMEOUT_S, and after an answer when it is silent for the server's
                 `keep_alive_s`
    head         at most MAX_HEAD_BYTES and MAX_HEADERS (431), complete within HEAD_TIMEOUT_S of its first
                 byte (408), with exactly one Host, which is one of the server's if these are limited (421)
    key          checked before the body is read (401)
    body         at most the server's bound (413), complete within BODY_TIMEOUT_S (408). All bodies being read
                 share a bound (503). Trailers have the bounds of a head (431)
    pipelining   a request that arrives before the end of the last answer waits, and the connection is not
                 read meanwhile. Of requests that arrived together with it, MAX_PENDING are accepted (429)
    answer       a client that reads nothing for WRITE_STALL_S is cut off. Above WRITE_HIGH unsent bytes the
                 writer and further requests wait. A stream of events that pauses for COMMENT_S gets a comment
                 unless its client does not read

httptools (llhttp) parses; `request_head` refuses heads that it wrongly accepts. One sweep over all
connections checks the deadlines, instead of one timer each.
"""

import asyncio
from collections import deque
from typing import NoReturn, Protocol, cast

import httptools

from ..errors import (
    ApiError,
    body_too_large,
    body_too_slow,
    head_too_large,
    head_too_slow,
    host_not_allowed,
    malformed,
    too_many_bodies,
    too_many_connections,
    too_many_pending,
    unauthorized,
    worded_for,
)
from .allowed_hosts import AllowedHosts, name_of
from .auth import Guard
from .cors import Cors
from .exchange import Exchange
from .rate_limits import ANYONE, Caller
from .request_head import Fields, Target, fault_of, fields_of, head_of_body, target_of
from .request_ids import given_id, headers_of, minted_id

HEAD_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 10.0
COMMENT_S = 15.0  # proxies and load balancers end connections that are silent for a minute
WRITE_STALL_S = 35.0
LINGER_S = 1.0
MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 64
MAX_PENDING = 64
WRITE_HIGH, WRITE_LOW = 64 << 10, 16 << 10
NEVER = float("inf")


def client_of(peer: object) -> str:
    """The address in what a transport tells of its peer; "" if it does not know it any more."""
    return str(peer[0]) if isinstance(peer, tuple) and peer else ""


class RefusedRequest(Exception):
    """Stops the parser. `HttpProtocol` keeps the reason."""


class Host(Protocol):
    """The interface of the server to its connections."""

    guard: Guard
    cors: Cors | None
    hosts: AllowedHosts | None
    max_body: int
    keep_alive_s: float
    is_leaving: bool
    is_draining: bool

    def deadline_in(self, seconds: float) -> float: ...
    def joined(self, connection: "HttpProtocol") -> bool: ...
    def left(self, connection: "HttpProtocol") -> None: ...
    def may_buffer(self, num_bytes: int) -> bool: ...
    def unbuffer(self, num_bytes: int) -> None: ...
    def begin(self, exchange: Exchange) -> None: ...
    def answered(self, status: int) -> None: ...
    def served(self, exchange: Exchange) -> None: ...
    def refused(self, status: int, method: str, path: str, request_id: str, client: str) -> None: ...
    def clock(self) -> float: ...


class HttpProtocol(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: Host) -> None:
        self._server = server
        self.cors = server.cors
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self.client = ""  # the address of the peer
        self.deadline = NEVER  # monotonic seconds by which the awaited event must come
        self._fault: ApiError | None = None  # the reason why reading has stopped
        self._is_discarding = False  # an error was sent, and further input is discarded
        self._is_last = False  # the current request is the last one that is read
        self._rest: bytes | None = None  # a head for the body of a request that asks for another protocol
        self._is_resuming = False  # the parser is reading that head
        self.is_paused = False  # the client does not read
        self._resumed: asyncio.Future[None] | None = None
        self._exchange: Exchange | None = None  # the exchange being answered
        self._pending: deque[Exchange] = deque()
        self._incoming: Exchange | None = None  # the exchange whose body is being read
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._num_body = 0
        self._num_heads = 0  # number of complete heads
        self._num_pending = 0  # received bytes of an incomplete head or of incomplete trailers
        self._num_head = 0  # parsed bytes of the head
        self._has_begun = False  # the first byte of a head has arrived

    def __repr__(self) -> str:
        return f"HttpProtocol({self._exchange or ('reads' if self._has_begun or self._incoming else 'idle')})"

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read or answered."""
        return self._exchange is None and self._incoming is None and not self._has_begun

    # --- the transport's side -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are not of asyncio's class
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(WRITE_HIGH, WRITE_LOW)
        self.client = client_of(transport.get_extra_info("peername"))
        self._await(HEAD_TIMEOUT_S)
        if not self._server.joined(self):
            self._refuse(too_many_connections())

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.left(self)
        self._forget_body()
        self._resume_writers()
        exchanges = [self._exchange, *self._pending]
        self._exchange, self._incoming = None, None
        self._pending.clear()
        del self._parser  # the parser holds bound methods: a reference cycle
        for exchange in exchanges:
            if exchange is not None:
                exchange.left()

    def eof_received(self) -> bool:
        return False  # a client that stops sending has left

    def pause_writing(self) -> None:
        self.is_paused = True
        self._await(WRITE_STALL_S)

    def resume_writing(self) -> None:
        self.is_paused = False
        self._resume_writers()
        assert self._transport is not None
        if self._transport.is_closing():
            self._await(WRITE_STALL_S)
        elif self._exchange is not None:
            self._await(COMMENT_S if self._exchange.is_streaming else None)
        elif not self._is_discarding:
            self._go_on()

    def data_received(self, data: bytes) -> None:
        if self._is_discarding or self._is_last or self._fault is not None:
            return
        incoming, num_heads, num_body, rest = self._incoming, self._num_heads, self._num_body, data
        while rest:
            try:
                self._parser.feed_data(rest)
                break
            except httptools.HttpParserUpgrade as upgrade:
                rest = self._read_on(rest[upgrade.args[0] :])
            except httptools.HttpParserError:
                return self._refuse(self._fault or malformed())
        # otherwise the chunk also held a body or its end
        if self._incoming is incoming and self._num_heads == num_heads:
            self._num_pending = self._num_pending + len(data) if self._num_body == num_body else 0
        if self._num_pending > MAX_HEAD_BYTES:  # also for one endless header, which the parser buffers itself
            self._refuse(head_too_large(MAX_HEAD_BYTES, MAX_HEADERS))

    def _read_on(self, data: bytes) -> bytes:
        """The bytes still to be parsed after a head that asks for another protocol, which the parser would
        not read.

        No other protocol is offered: that request's body or the next request follows. After CONNECT anything
        may follow.
        """
        if self._parser.get_method() == b"CONNECT":
            self._is_last = True
            return b""
        self._parser = httptools.HttpRequestParser(self)
        if self._rest:
            self._is_resuming = True
            self._parser.feed_data(self._rest)
            self._is_resuming = False
        self._rest = None
        return data

    # --- the parser's side ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_resuming:
            return
        self._url, self._headers, self._num_head, self._has_begun = b"", [], 0, True
        if self._exchange is None:
            self._await(HEAD_TIMEOUT_S)

    def on_url(self, url: bytes) -> None:
        if self._is_resuming:
            return
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_resuming:
            return
        if self._incoming is None:  # trailers must not change the headers' decisions
            self._headers.append((name.lower(), value))
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        if self._is_resuming:
            return
        self._has_begun, self._num_pending = False, 0
        self._num_heads += 1
        version, fields = self._parser.get_http_version(), fields_of(self._headers)
        target = target_of(self._url, self._parser.get_method())
        fault = fault_of(fields, version, self._server.max_body) or self._misdirected(fields)
        if fault is not None:
            self._stop(worded_for(target.path, fault))
        caller = self._caller_of(target, fields)
        if caller is None:
            self._stop(worded_for(target.path, unauthorized()))
        is_reusable, now = self._parser.should_keep_alive(), self._server.clock()
        exchange = Exchange(self, target, fields, caller, version=version, is_reusable=is_reusable, now=now)
        self._incoming = exchange
        if self._parser.should_upgrade():
            self._rest = head_of_body(fields)
        if self._exchange is None:
            self._await(BODY_TIMEOUT_S)
            if b"expect" in fields:
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _misdirected(self, fields: Fields) -> ApiError | None:
        """The error for a Host that is none of the server's; None also without Host, as HTTP/1.0 allows."""
        hosts, given = self._server.hosts, fields.get(b"host")
        if hosts is None or given is None or hosts.admits(given[0]):
            return None
        host = given[0].decode("latin-1")
        return host_not_allowed(name_of(host) or host)

    def _caller_of(self, target: Target, fields: Fields) -> Caller | None:
        """None without a valid key, which a browser's preflight does not need."""
        caller = self._server.guard.caller_of(target.raw_path, fields)
        if caller is None and self.cors is not None:
            is_preflight = self.cors.preflight(target.method, target.raw_path, fields) is not None
            return ANYONE if is_preflight else None
        return caller

    def on_body(self, body: bytes) -> None:
        self._num_body += len(body)
        if self._num_body > self._server.max_body:
            self._stop(self._worded(body_too_large(self._server.max_body)))
        if not self._server.may_buffer(len(body)):
            self._num_body -= len(body)
            self._stop(self._worded(too_many_bodies()))
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._rest:  # the parser does not expect the body
            return
        exchange, self._incoming = self._incoming, None
        self._num_pending = 0
        assert exchange is not None
        exchange.complete(b"".join(self._body))
        self._forget_body()
        if self._exchange is None:
            self._begin(exchange)
        elif len(self._pending) == MAX_PENDING:
            self._stop(too_many_pending(MAX_PENDING))
        else:
            self._pending.append(exchange)
            assert self._transport is not None
            self._transport.pause_reading()

    def _count(self, num_bytes: int) -> None:
        self._num_head += num_bytes
        if self._num_head > MAX_HEAD_BYTES or len(self._headers) > MAX_HEADERS:
            self._stop(head_too_large(MAX_HEAD_BYTES, MAX_HEADERS))

    def _worded(self, error: ApiError) -> ApiError:
        """An error about the body that is being read, in the words of its API."""
        return error if self._incoming is None else worded_for(self._incoming.path, error)

    def _stop(self, fault: ApiError) -> NoReturn:
        self._fault = fault
        raise RefusedRequest

    # --- the exchange's side --------------------------------------------------------------------------------

    def answered(self, status: int) -> bool:
        """Counts an answer. False when its head must announce that the connection closes after it."""
        self._server.answered(status)
        return not self._server.is_leaving

    def write(self, data: bytes) -> None:
        """Writes without waiting."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def streamed(self) -> None:
        """Handles a part of a stream of events: the next one should come within COMMENT_S."""
        if not self.is_paused:
            self._await(COMMENT_S)

    async def drained(self) -> None:
        """Waits until the client has read enough of the written bytes."""
        if not self.is_paused or self._transport is None or self._transport.is_closing():
            return
        if self._resumed is None:
            self._resumed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._resumed)

    def ended(self, *, is_reusable: bool) -> None:
        """Handles the end of an answer: continues with the next request, or closes the connection."""
        self._exchange = None
        assert self._transport is not None
        if self._fault is not None and not self._pending and is_reusable:
            return self._refuse(self._fault)
        if not is_reusable or self._is_last or self._server.is_draining:
            return self._close()
        # answers to a client that does not read would accumulate
        if self.is_paused and not self._transport.is_closing():
            self._transport.pause_reading()
            self._await(WRITE_STALL_S)
        elif not self.is_paused:
            self._go_on()

    def _go_on(self) -> None:
        """Answers the waiting request, or resumes reading."""
        assert self._transport is not None
        if self._pending:
            return self._begin(self._pending.popleft())
        self._transport.resume_reading()
        idle_s = HEAD_TIMEOUT_S if self._has_begun else self._server.keep_alive_s
        self._await(BODY_TIMEOUT_S if self._incoming else idle_s)

    def broken(self) -> None:
        """Handles an answer that was cut off: closes the connection, now if the client does not read."""
        self._exchange = None
        if self.is_paused:
            self.abort()
        else:
            self._close()

    def served(self, exchange: Exchange) -> None:
        """Handles the end of an exchange, whether its answer was sent or not."""
        self._server.served(exchange)

    def _begin(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._await(WRITE_STALL_S if self.is_paused else None)
        self._server.begin(exchange)

    # --- ends -----------------------------------------------------------------------------------------------

    def on_deadline(self) -> None:
        """Handles a passed deadline: refuses the request, closes or aborts the connection, or keeps a stream
        alive."""
        assert self._transport is not None
        self._await(None)
        if self.is_paused or self._is_discarding or self._transport.is_closing():
            self._transport.abort()
        elif self._exchange is not None:
            self._await(COMMENT_S)
            self._exchange.comment()
        elif self._incoming is not None:
            self._refuse(self._worded(body_too_slow()))
        elif self._has_begun:
            self._refuse(head_too_slow())
        else:
            self._close()

    def close_if_idle(self) -> None:
        if self.is_idle:
            self._close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Sends an error outside of any request and closes, after a running answer is complete."""
        self._fault = error
        self._forget_body()
        self._incoming, self._has_begun = None, False
        if self._exchange is not None or self._transport is None:
            return
        self._server.answered(error.status)
        self.write(error.as_http(self._headers_of_refusal(error)))
        self._linger()

    def _headers_of_refusal(self, error: ApiError) -> list[tuple[bytes, bytes]]:
        """The id and the CORS headers for the request that is refused, as far as its head was read."""
        fields = fields_of(self._headers)
        raw_path = self._url.partition(b"?")[0]
        request_id = given_id(fields) or minted_id()
        path = raw_path.decode("latin-1")
        method = self._parser.get_method().decode("ascii") if raw_path else ""
        self._server.refused(error.status, method, path, request_id, self.client)
        named = [(name, request_id.encode("ascii")) for name in headers_of(path)]
        return named + (self.cors.headers(raw_path, fields) if self.cors is not None else [])

    def _linger(self) -> None:
        """Half-closes for LINGER_S.

        Closing with unread bytes would reset the connection and could lose the answer.
        """
        transport = self._transport
        assert transport is not None
        if transport.is_closing() or not transport.can_write_eof():
            return self._close()
        self._is_discarding = True
        self._await(LINGER_S)
        transport.resume_reading()
        transport.write_eof()

    def _close(self) -> None:
        assert self._transport is not None
        self._transport.close()
        self._await(WRITE_STALL_S)  # then unsent bytes are dropped with the connection

    def _forget_body(self) -> None:
        self._server.unbuffer(self._num_body)
        self._body, self._num_body = [], 0

    def _await(self, seconds: float | None) -> None:
        self.deadline = NEVER if seconds is None else self._server.deadline_in(seconds)

    def _resume_writers(self) -> None:
        if self._resumed is not None:
            if not self._resumed.done():
                self._resumed.set_result(None)
            self._resumed = None
