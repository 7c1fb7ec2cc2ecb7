"""The HTTP/1.1 client of `baton bench serve`: sends streamed completions and records the arrival of each
event.

It works on raw asyncio streams, since the load generator's cost enters the measurement. On 8 streams it takes
9 us of CPU per chunk, httpx takes 23 us, and the router itself takes about 40 us. Connections are reused. If
the server has closed a reused connection before the first byte of the answer, a new connection replaces it.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ...cluster.errors import BatonError, ConfigError
from ...cluster.net.endpoints import bracketed

LIMIT = 1 << 20  # bytes of one line of an answer
GET_S = 60.0  # longest wait for a list of models or for metrics
Connect = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Unexpected(BatonError):
    """The endpoint's answer is not valid HTTP."""


@dataclass(eq=False)
class TimedCall:
    """The record of one request. Times are seconds on the event loop's clock."""

    due: float
    """The scheduled begin, from which latencies count."""
    sent: float = 0.0
    ended: float = 0.0
    turn: int = 0
    """Turns before it in its conversation."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(time, number of tokens) of each event with tokens."""
    ids: list[int] = field(default_factory=list)
    """The answer's token ids, if the endpoint tells them."""
    num_prompt: int = 0
    num_output: int = 0
    """The number of tokens from the endpoint's usage, else counted from the events."""
    is_done: bool = False
    """Whether the stream ended with its end mark."""
    error: str = ""
    """The kind of failure; "": none."""
    timeline: dict[str, Any] = field(default_factory=dict)
    """The request's timeline, if the endpoint gives one."""


@dataclass(frozen=True)
class TargetUrl:
    """The parsed URL of the endpoint."""

    host: str
    port: int
    path: str
    is_tls: bool

    @property
    def authority(self) -> str:
        """Host and port as in a URL and in the Host header."""
        return f"{bracketed(self.host)}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.path}"


def endpoint_of(url: str, flag: str = "--url") -> TargetUrl:
    """The endpoint at `url`. Raises ConfigError naming `flag` for an invalid URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{flag} {url!r} is not a URL ({error}); write http://HOST:PORT") from None
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not url.isascii()
        or not url.isprintable()
    ):
        raise ConfigError(f"{flag} {url!r} is not a URL; write http://HOST:PORT")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return TargetUrl(
        parts.hostname, port or (443 if parts.scheme == "https" else 80), path, parts.scheme == "https"
    )


@dataclass(eq=False)
class HttpConnection:
    """One open connection with its reader and writer."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    num_requests: int = 0

    def close(self) -> None:
        self.writer.close()


@dataclass(eq=False)
class ResponseHead:
    """The parts of an answer's head that frame its body."""

    status: int
    headers: dict[str, str]

    @property
    def is_chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "")


class LoadClient:
    """Sends requests to one endpoint. `clock` gives the times of calls in seconds."""

    def __init__(
        self,
        endpoint: TargetUrl,
        clock: Callable[[], float],
        *,
        api_key: str = "",
        timeout_s: float = 600.0,
        connect: Connect = asyncio.open_connection,
    ) -> None:
        self.endpoint = endpoint
        self._clock, self._connect, self._timeout_s = clock, connect, timeout_s
        self._authorization = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._tls = ssl.create_default_context() if endpoint.is_tls else None
        self._idle: list[HttpConnection] = []

    def __repr__(self) -> str:
        return f"Client({self.endpoint}, {len(self._idle)} idle connections)"

    def close(self) -> None:
        """Closes all idle connections."""
        for line in self._idle:
            line.close()
        self._idle.clear()

    async def ask(self, path: str, body: dict[str, Any], due: float) -> TimedCall:
        """Sends one streamed completion that is due at `due` seconds.

        Faults of the endpoint are recorded in the call and never raised.
        """
        call = TimedCall(due=due, sent=self._clock())
        try:
            await asyncio.wait_for(self._stream(call, path, msgspec.json.encode(body)), self._timeout_s)
        except asyncio.TimeoutError:
            call.error = call.error or f"no end within {self._timeout_s:g} s"
        except (OSError, EOFError, Unexpected) as error:
            call.error = call.error or _kind_of(error, call)
        call.ended = self._clock()
        return call

    async def get(self, path: str) -> tuple[int, bytes]:
        """GETs `path`. Returns (status, body). Raises OSError, EOFError or Unexpected, also after GET_S."""
        limit = min(GET_S, self._timeout_s)
        try:
            return await asyncio.wait_for(self._get(path), limit)
        except asyncio.TimeoutError:
            raise Unexpected(f"no answer to GET {path} within {limit:g} s") from None

    async def _get(self, path: str) -> tuple[int, bytes]:
        line, head = await self._exchange("GET", path, b"")
        try:
            body = b"".join([part async for part in _body(head, line.reader)])
        except BaseException:
            line.close()
            raise
        self._done_with(line, head)
        return head.status, body

    async def _stream(self, call: TimedCall, path: str, body: bytes) -> None:
        line, head = await self._exchange("POST", path, body)
        is_whole = False
        try:
            if head.status != 200:
                content = b"".join([part async for part in _body(head, line.reader)])
                call.error = f"HTTP {head.status} {_code_of(content)}".rstrip()
                is_whole = True
                return
            if not head.headers.get("content-type", "").startswith("text/event-stream"):
                call.error = "no event stream"
                return
            async for data in _events(_body(head, line.reader)):
                self._take(call, data)
            is_whole = True
            if not call.error and not call.is_done:
                call.error = "the stream ended early"
        finally:
            if is_whole:
                self._done_with(line, head)
            else:
                line.close()

    def _take(self, call: TimedCall, data: bytes) -> None:
        now = self._clock()
        if data == b"[DONE]":
            call.is_done = True
            return
        event = _json(data)
        if "error" in event:
            call.error = f"error frame {_code_of(data)}".rstrip()
            return
        choices = event.get("choices") or []
        num_tokens = sum(_num_tokens(choice) for choice in choices)
        call.ids += [int(token) for choice in choices for token in choice.get("token_ids") or ()]
        if num_tokens:
            call.arrivals.append((now, num_tokens))
            call.num_output += num_tokens
        usage = event.get("usage")
        if usage:
            call.num_prompt, call.num_output = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        call.timeline |= event.get("timeline") or {}

    async def _exchange(self, method: str, path: str, body: bytes) -> tuple[HttpConnection, ResponseHead]:
        """Sends a request. Returns its connection and the head of the answer."""
        head = (
            f"{method} {self.endpoint.path}{path} HTTP/1.1\r\nhost: "
            f"{self.endpoint.authority}\r\n{self._authorization}"
            f"content-type: application/json\r\nx-baton-timeline: 1\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode()
        while True:
            line = self._idle.pop() if self._idle else await self._dial()
            line.num_requests += 1
            try:
                line.writer.write(head + body)
                await line.writer.drain()
                return line, await _read_head(line.reader)
            except (OSError, EOFError):
                line.close()
                if line.num_requests == 1:
                    raise
            except BaseException:
                line.close()
                raise

    async def _dial(self) -> HttpConnection:
        reader, writer = await self._connect(
            self.endpoint.host, self.endpoint.port, ssl=self._tls, limit=LIMIT
        )
        return HttpConnection(reader, writer)

    def _done_with(self, line: HttpConnection, head: ResponseHead) -> None:
        has_end = head.is_chunked or "content-length" in head.headers
        if has_end and head.headers.get("connection", "").lower() != "close":
            self._idle.append(line)
        else:
            line.close()


async def _read_head(reader: asyncio.StreamReader) -> ResponseHead:
    try:
        raw = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError:
        raise Unexpected("an answer without an end of its head") from None
    first, *lines = raw.split("\r\n")
    words = first.split(None, 2)
    if len(words) < 2 or not words[1].isdigit():
        raise Unexpected(f"no HTTP answer: {first[:60]!r}")
    pairs = (line.partition(":") for line in lines if line)
    return ResponseHead(int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs})


async def _body(head: ResponseHead, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The parts of the body as they arrive."""
    if head.is_chunked:
        while size := _size_of(await reader.readuntil(b"\r\n")):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif "content-length" in head.headers:
        left = int(head.headers["content-length"])
        while left:
            part = await reader.read(min(left, 1 << 16))
            if not part:
                raise EOFError
            left -= len(part)
            yield part
    else:
        while part := await reader.read(1 << 16):
            yield part


def _size_of(line: bytes) -> int:
    try:
        return int(line.split(b";")[0], 16)
    except ValueError:
        raise Unexpected(f"no size of a chunk: {line[:40]!r}") from None


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events. Each event of a completion has one data line."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _num_tokens(choice: dict[str, Any]) -> int:
    """The number of tokens in an event: the listed ids if there are any, else one if it has text."""
    ids = choice.get("token_ids")
    if ids is not None:
        return len(ids)
    delta = choice.get("delta") or choice
    words = (delta.get("content"), delta.get("text"), delta.get("reasoning_content"), delta.get("tool_calls"))
    return int(any(words))


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise Unexpected(f"an event that is no JSON: {data[:60]!r}") from None
    if not isinstance(value, dict):
        raise Unexpected(f"an event that is no object: {data[:60]!r}")
    return value


def _code_of(data: bytes) -> str:
    """The code of an OpenAI error object; "" for any other data."""
    try:
        error = json.loads(data)["error"]
        return str(error.get("code") or error.get("type") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def _kind_of(error: Exception, call: TimedCall) -> str:
    if isinstance(error, Unexpected):
        return str(error)
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return "broken off" if call.arrivals else "connection lost before the first token"
