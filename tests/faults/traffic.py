"""Clients of a cluster: raw HTTP/1.1 over asyncio in a thread, and a record with times of all they received.

It shares no code with the cluster, nor with an HTTP library that would repeat or repair anything.
"""

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass, field

PATIENCE_S = 60.0  # of a client; longer is a hang
SAMPLED = {"temperature": 1.5}
GREEDY = {"temperature": 0}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One completion that a client wants. Equal (prompt, sampling) means equal tokens."""

    prompt: tuple[int, ...]
    max_tokens: int = 24
    sampling: tuple[tuple[str, float], ...] = (("temperature", 0),)
    stream: bool = True
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> tuple:
        return self.prompt, self.sampling

    def body(self, model: str) -> bytes:
        common = {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
        }
        return json.dumps(
            {**common, "stream": self.stream, "return_token_ids": True, **dict(self.sampling)}
        ).encode()


@dataclass(eq=False)
class Call:
    """What became of an Ask. `terminals` are its ends as the client saw them, in order; an honest call has
    one:

    finished   a finish reason, and for a stream [DONE] behind it
    error      an error frame in a stream, or an HTTP answer that is an error object (`status` tells)
    cancelled  the client left
    cut        the connection ended without any of these
    """

    ask: Ask
    started: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens so far)
    terminals: list[str] = field(default_factory=list)
    error: dict = field(default_factory=dict)
    timeline: dict = field(default_factory=dict)
    after_end: int = 0  # events behind the terminal one
    ended: float = 0.0
    has_finish: bool = False
    may_be_cut: bool = False  # its router was killed: a reset is the only end that it can have
    task: "Future | None" = None
    port: int = 0  # of its router

    @property
    def end(self) -> str:
        return self.terminals[-1] if self.terminals else "open"

    @property
    def ttft(self) -> float | None:
        return self.arrivals[0][0] - self.started if self.arrivals else None

    @property
    def attempts(self) -> int:
        return self.timeline.get("attempts", 0)

    def __repr__(self) -> str:
        return (
            f"Call({self.end} {self.status} {len(self.ids)}/{self.ask.max_tokens} ids, "
            f"{self.error.get('code', '')})"
        )


class Traffic:
    """Starts calls and waits for them; `history` keeps all."""

    def __init__(self, port: int, model: str, host: str = "127.0.0.1") -> None:
        self.port, self.model, self.host = port, model, host
        self.history: list[Call] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends what still runs and the thread."""
        self.cancel(*(call for call in self.history if not call.ended))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def start(
        self, *asks: Ask, leave_after: float | None = None, leave_at: int | None = None, port: int = 0
    ) -> list[Call]:
        """Sends the requests now, to `port` if given. A client may leave after a time or at its nth token."""
        calls = [Call(ask, time.monotonic(), port=port) for ask in asks]
        self.history += calls
        for call in calls:
            call.task = asyncio.run_coroutine_threadsafe(self._live(call, leave_after, leave_at), self._loop)
        return calls

    def cancel(self, *calls: Call) -> None:
        """The clients close their connections, and that is done when this returns."""
        for call in calls:
            if call.task is not None:
                call.task.cancel()
        self.wait(calls, 10)

    def wait(self, calls: list[Call], timeout: float = PATIENCE_S + 5) -> list[Call]:
        """Until every one has ended; a hang fails."""
        deadline = time.monotonic() + timeout
        for call in calls:
            while not call.ended and time.monotonic() < deadline:
                time.sleep(0.005)
        open_calls = [call for call in calls if not call.ended]
        assert not open_calls, f"{len(open_calls)} clients still wait after {timeout} s: {open_calls[:3]}"
        return calls

    def run(self, asks: list[Ask], *, width: int = 16) -> list[Call]:
        """All of them, `width` at a time."""
        queue, done = list(reversed(asks)), []

        async def worker() -> None:
            while queue:
                call = Call(queue.pop(), time.monotonic())
                self.history.append(call)
                done.append(call)
                await self._live(call, None, None)

        async def all_workers() -> None:
            await asyncio.gather(*(worker() for _ in range(width)))

        asyncio.run_coroutine_threadsafe(all_workers(), self._loop).result(PATIENCE_S * 10)
        return done

    # --- one call -------------------------------------------------------------------------------------------

    async def _live(self, call: Call, leave_after: float | None, leave_at: int | None) -> None:
        patience = PATIENCE_S if leave_after is None else leave_after
        try:
            await asyncio.wait_for(self._talk(call, leave_at), patience)
        except asyncio.TimeoutError:
            _ended(call, "cancelled" if leave_after is not None else "timeout")
        except asyncio.CancelledError:
            _ended(call, "cancelled")
        except (OSError, EOFError):
            _ended(call, "cut")
        finally:
            call.ended = time.monotonic()

    async def _talk(self, call: Call, leave_at: int | None) -> None:
        reader, writer = await asyncio.open_connection(self.host, call.port or self.port, limit=1 << 20)
        try:
            body = call.ask.body(self.model)
            extra = "".join(f"{name}: {value}\r\n" for name, value in call.ask.headers)
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: {self.host}\r\ncontent-type: "
                f"application/json\r\n{extra}x-baton-timeline: 1\r\nconnection: close\r\ncontent-length: "
                f"{len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
            await self._read_head(call, reader)
            if call.headers.get("content-type", "").startswith("text/event-stream"):
                await self._read_stream(call, reader, leave_at)
            else:
                await self._read_whole(call, reader)
            _ended(call, "cut")
        finally:
            writer.transport.abort()  # a client that leaves does not linger
            with contextlib.suppress(Exception):
                await writer.wait_closed()

    async def _read_head(self, call: Call, reader: asyncio.StreamReader) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        call.status = int(lines[0].split()[1])
        call.headers = {
            k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)
        }

    async def _read_whole(self, call: Call, reader: asyncio.StreamReader) -> None:
        """An answer that is no stream: it counts when all of it came."""
        if call.headers.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in _chunks(reader)])
        else:
            body = await reader.readexactly(int(call.headers["content-length"]))
        _take_whole(call, body)

    async def _read_stream(self, call: Call, reader: asyncio.StreamReader, leave_at: int | None) -> None:
        """Server-sent events, to the last chunk or the end of the connection."""
        buffer = b""
        is_chunked = (
            call.headers.get("transfer-encoding") == "chunked"
        )  # not where the whole answer was there at once
        async for chunk in (
            _chunks(reader) if is_chunked else _rest(reader, int(call.headers["content-length"]))
        ):
            buffer += chunk
            *events, buffer = buffer.split(b"\n\n")
            for event in [event for event in events if not event.startswith(b":")]:
                take_event(call, event.removeprefix(b"data: "))
            if leave_at is not None and len(call.ids) >= leave_at:
                raise asyncio.CancelledError


async def _rest(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    """A body of known length."""
    yield await reader.readexactly(size)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The chunks of a body; EOFError when the connection ends before the last one."""
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        data = await reader.readexactly(size + 2)
        if size == 0:
            return
        yield data[:size]


def _ended(call: Call, how: str) -> None:
    """The connection is over; how tells what that means for a call that has not ended before."""
    if not call.terminals:
        call.terminals.append(how)


def take_event(call: Call, data: bytes) -> None:
    """What an event of a stream tells, for `call`."""
    call.after_end += bool(call.terminals)
    if data == b"[DONE]":
        call.terminals.append("finished" if call.has_finish else "done without a finish reason")
        return
    document = json.loads(data)
    if "error" in document:
        call.error = document["error"]
        call.terminals.append("error")
    call.timeline = document.get("timeline") or call.timeline
    for choice in document.get("choices", []):
        call.after_end += call.has_finish
        call.ids += choice.get("token_ids") or []
        call.text += choice.get("text") or ""
        if choice.get("token_ids"):
            call.arrivals.append((time.monotonic(), len(call.ids)))
        call.has_finish = call.has_finish or bool(choice.get("finish_reason"))


def _take_whole(call: Call, body: bytes) -> None:
    document = json.loads(body)
    if "error" in document:
        call.error = document["error"]
        call.terminals.append("error")
        return
    for choice in document["choices"]:
        call.ids += choice["token_ids"]
        call.text += choice["text"]
        call.has_finish = bool(choice["finish_reason"])
    call.timeline = document.get("timeline") or {}
    call.arrivals.append((time.monotonic(), len(call.ids)))
    call.terminals.append("finished" if call.has_finish else "done without a finish reason")


def workload(
    seed: int, count: int, *, prompt=(16, 300), max_tokens=(8, 32), stream: bool = True
) -> list[Ask]:
    """`count` random requests, greedy and sampled in turn; equal arguments give equal requests."""
    rng = random.Random(seed)
    asks = []
    for i in range(count):
        ids = tuple(rng.randrange(3, 330) for _ in range(rng.randint(*prompt)))
        sampling = GREEDY if i % 2 else {**SAMPLED, "seed": rng.randrange(2**31)}
        length = rng.randint(*max_tokens) if isinstance(max_tokens, tuple) else max_tokens
        asks.append(
            Ask(prompt=ids, max_tokens=length, sampling=tuple(sorted(sampling.items())), stream=stream)
        )
    return asks
