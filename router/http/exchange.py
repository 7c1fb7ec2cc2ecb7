"""One HTTP request and its answer: the application's interface, and the bytes on the connection.

The application is called when the request is complete. Bytes that belong together go out in one write: the
head with the first part of the body, a part with its framing. An answer without a length is sent in chunks,
or to a client of HTTP/1.0 up to the end of the connection.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Protocol

from msgspec import Struct

from ..errors import ApiError, internal, worded_for
from .cors import Cors, is_foreign, is_simple
from .rate_limits import Caller
from .request_head import Fields, Target
from .request_ids import HEADER as REQUEST_ID
from .request_ids import given_id, headers_of, minted_id

logger = logging.getLogger(__name__)

STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
EVENTS = b"text/event-stream"
COMMENT = b": keep-alive\n\n"  # clients of server-sent events pass over comments
RawHeaders = list[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client left before the work for its request began."""


class Work(Struct, frozen=True, kw_only=True, gc=False):
    """What a request cost, as far as it is known, for the access log. Times are seconds."""

    room: str  # of its first choice
    outcome: str  # ok, cancelled, failed, ...
    num_prompt: int
    num_cached: int
    num_output: int
    ttft_s: float | None
    tpot_s: float | None
    accept_length: float | None
    prefill: str  # the workers of the last attempt of the first choice; "": none
    decode: str


class Connection(Protocol):
    """The connection under an exchange."""

    is_paused: bool  # the client does not read
    client: str  # its address
    cors: Cors | None

    def answered(self, status: int) -> bool: ...
    def write(self, data: bytes) -> None: ...
    def streamed(self) -> None: ...
    async def drained(self) -> None: ...
    def ended(self, *, is_reusable: bool) -> None: ...
    def broken(self) -> None: ...
    def served(self, exchange: "Exchange") -> None: ...


class AnswerSink(Protocol):
    """The destination of an answer: an exchange, or a recording."""

    def when_left(self, callback: Callable[[], None]) -> None:
        """Calls back when the answer has no reader any more; at once if it has none now."""

    async def start(self, status: int, headers: RawHeaders) -> None:
        """The status and header fields. They go out with the first part of the body."""

    async def write(self, data: bytes, *, is_last: bool) -> None:
        """A part of the body."""


class Exchange:
    """One request and its answer.

    The protocol creates it when the head is parsed, and runs it when the body is complete.
    """

    __slots__ = (
        "_body",
        "_connection",
        "_fields",
        "_head",
        "_is_chunked",
        "_is_events",
        "_is_head",
        "_is_old",
        "_is_reusable",
        "_on_leave",
        "_raw_path",
        "_request_id",
        "_status",
        "began",
        "caller",
        "given_id",
        "has_left",
        "is_over",
        "limits",
        "method",
        "path",
        "query",
        "status",
        "work",
    )

    def __init__(
        self,
        connection: Connection,
        target: Target,
        fields: Fields,
        caller: Caller,
        *,
        version: str,
        is_reusable: bool,
        now: float = 0.0,
    ) -> None:
        self.method, self.path, self.query = target.method, target.path, target.query
        self._raw_path = target.raw_path
        self.began = now  # monotonic seconds: its head was complete
        self.status = 0  # of the answer; 0: none has begun
        self.work: Callable[[], Work] | None = None  # of a request that needed workers
        self.limits: Callable[[], RawHeaders] | None = None  # headers about the caller's limits
        self.given_id = given_id(fields) if REQUEST_ID in fields else ""
        self._request_id = self.given_id
        self.caller = caller
        self._fields = fields
        self.is_over = False
        self._connection = connection
        self._body = b""
        self._is_reusable = is_reusable  # the connection may serve another request
        self._is_head = target.method == "HEAD"
        self._is_old = version == "1.0"
        self._is_chunked = False
        self._is_events = False  # its answer is a stream of events whose head has gone out
        self.has_left = False  # the connection has ended
        self._on_leave: Callable[[], None] | None = None
        self._status = 0  # 0: no answer has begun; -1: its head has gone out
        self._head: RawHeaders = []

    def __repr__(self) -> str:
        return f"Exchange({self.method} {self.path[:40]!r}{', over' if self.is_over else ''})"

    @property
    def request_id(self) -> str:
        """The client's id, else the one that the answer has, else a minted one."""
        if not self._request_id:
            self._request_id = minted_id()
        return self._request_id

    def take_id(self, request_id: str) -> None:
        """The id of the answer, which the access log needs although the client may leave before its head."""
        self._request_id = self._request_id or request_id

    @property
    def client(self) -> str:
        """The address of the connection's peer: the client, or the proxy in front."""
        return self._connection.client

    @property
    def is_foreign(self) -> bool:
        """Whether a browser sent it for a page of another origin."""
        return is_foreign(self._fields)

    @property
    def is_unasked(self) -> bool:
        """Whether a browser sent it without a preflight for a page of another origin that is not allowed."""
        if not is_foreign(self._fields) or not is_simple(self._fields):
            return False
        cors = self._connection.cors
        return cors is None or not cors.allows(self._fields)

    @property
    def preflight(self) -> RawHeaders | None:
        """The header fields that answer a CORS preflight request; None for any other request."""
        cors = self._connection.cors
        return None if cors is None else cors.preflight(self.method, self._raw_path, self._fields)

    def header(self, name: bytes) -> str | None:
        """The first value of a header field, by its name in lower case."""
        values = self._fields.get(name)
        return values[0].decode("latin-1") if values is not None else None

    def headers(self, name: bytes) -> list[str]:
        """All values of a header field, in order."""
        values = self._fields.get(name)
        return [value.decode("latin-1") for value in values] if values is not None else []

    def complete(self, body: bytes) -> None:
        """Sets the request's body."""
        self._body = body

    def take_body(self) -> bytes:
        """The request's body. A second call gives b"", so that large bodies are freed early."""
        body, self._body = self._body, b""
        return body

    async def run(self, app: "App") -> None:
        """Runs the application. Sends an error if it gives no answer."""
        try:
            await app(self)
        except Exception:
            logger.exception("request failed")
        if not self.is_over:
            await self._fail()
        self._connection.served(self)

    def when_left(self, callback: Callable[[], None]) -> None:
        """Calls back when the client leaves before its answer is over; at once if it has."""
        if self.has_left:
            callback()
        else:
            self._on_leave = callback

    def left(self) -> None:
        """The protocol reports that the connection is gone."""
        self.has_left = True
        on_leave, self._on_leave = self._on_leave, None  # it would keep alive all objects of the answer
        if on_leave is not None and not self.is_over:
            on_leave()

    async def start(self, status: int, headers: RawHeaders) -> None:
        """The status and header fields. They go out with the first part of the body."""
        self._status, self._head = status, [*headers]
        self.status = status

    async def write(self, data: bytes, *, is_last: bool) -> None:
        """A part of the body; waits while the client does not read.

        Does nothing after the client has left.
        """
        if self.has_left or self.is_over:
            return
        if self._status > 0 and not self._connection.answered(self._status):
            self._is_reusable = False
        opening = self._opening(data, is_last) if self._status > 0 else b""
        self._connection.write(opening + self._framed(data, is_last))
        if is_last:
            return self._end()
        if self._is_events:
            self._connection.streamed()
        if self._connection.is_paused:
            await self._connection.drained()

    @property
    def is_streaming(self) -> bool:
        """Whether a part of a stream of events has gone out, and not the last one."""
        return self._is_events and not self.is_over

    def comment(self) -> None:
        """Sends a comment between two events, so that no proxy on the way takes the connection for dead."""
        self._connection.write(self._framed(COMMENT, is_last=False))

    async def answer(self, error: ApiError) -> None:
        """Answers with an error object."""
        error = worded_for(self.path, error)
        await send(self, error.encode(), error.status, error.headers)

    def _opening(self, body: bytes, is_last: bool) -> bytes:
        """The bytes of the answer's head, which go out with the first part of its body."""
        has_length = False
        for name, value in self._head:
            has_length = has_length or name.lower() == b"content-length"
            self._is_events = self._is_events or (name == b"content-type" and value.startswith(EVENTS))
            if name == REQUEST_ID and not self._request_id:
                self._request_id = value.decode("latin-1")
        self._head = [pair for pair in self._head if pair[0] != REQUEST_ID]
        request_id = self.request_id.encode("latin-1")
        self._head += [(name, request_id) for name in headers_of(self.path)]
        if self.limits is not None:
            self._head += self.limits()
        if (cors := self._connection.cors) is not None:
            self._head += cors.headers(self._raw_path, self._fields)
        if not has_length and self._status not in (204, 304):
            if is_last:
                self._head.append((b"content-length", str(len(body)).encode()))
            elif self._is_old:
                self._is_reusable = False
            else:
                self._is_chunked = True
                self._head.append((b"transfer-encoding", b"chunked"))
        if (b"connection", b"close") in self._head:
            self._is_reusable = False
        elif not self._is_reusable:
            self._head.append((b"connection", b"close"))
        elif self._is_old:
            self._head.append((b"connection", b"keep-alive"))
        lines = b"".join([b"%b: %b\r\n" % pair for pair in self._head])
        status_line = STATUS_LINES.get(self._status) or b"HTTP/1.1 %d \r\n" % self._status
        self._status, self._head = -1, []
        return status_line + lines + b"\r\n"

    def _framed(self, body: bytes, is_last: bool) -> bytes:
        if self._is_head:
            return b""
        if not self._is_chunked:
            return body
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return chunk + b"0\r\n\r\n" if is_last else chunk

    def _end(self) -> None:
        self.is_over = True
        self._on_leave = None
        self._connection.ended(is_reusable=self._is_reusable)

    async def _fail(self) -> None:
        """Ends an exchange whose application gave no answer, or only a part, which must not look complete."""
        self._on_leave = None
        if self.has_left:
            return
        if self._status >= 0:
            self._status = 0
            await self.answer(internal())
        else:
            self.is_over = True
            self._connection.broken()


App = Callable[[Exchange], Awaitable[None]]


async def send(
    sink: AnswerSink, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """Writes a complete answer. Its content type is JSON unless the headers name another."""
    named = {"content-type": "application/json"} | dict(headers or {})
    await sink.start(status, [(name.encode(), value.encode()) for name, value in named.items()])
    await sink.write(body, is_last=True)
