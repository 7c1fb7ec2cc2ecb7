"""A proxy between two ZeroMQ peers that does to single messages what bad networks and bad peers do.

    with Proxies() as proxies:
        proxy = proxies.add("ipc:///dir/front", "ipc:///dir/server")   # clients dial the front
        proxy.down.rule(verb("Block"), flip(1, 0), times=1)            # down: what the server says
        proxy.up.freeze()                                              # a partition of one direction

Bytes of a frozen direction are held and connections stay open, ends of connections included, as behind a
firewall that drops silently; on `thaw` all of it arrives late. Rules see whole data messages; handshakes and
heartbeats pass them by, but not a freeze, delay, rate or cut. On a CURVE link messages are sealed, so that
only those four make sense there.
"""

import asyncio
import heapq
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from baton.tests.faults.zmtp_rules import Act, Emit, Rule, When, anything, passed
from baton.tests.faults.zmtp_wire import Message, Parser

READ_SIZE = 1 << 18
MAX_HELD = 64 << 20  # bytes per direction of a connection; then its sender feels the back-pressure
SLOW_HELD = 1 << 20  # of a way with a rate: a slow link is felt at once

# --- one direction ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Way:
    """One direction of all connections of a proxy. Settings may be changed at any time, from any thread."""

    name: str
    rng: random.Random
    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0  # 0: no limit
    held: list[Message] = field(default_factory=list)
    parked: list[Message] = field(default_factory=list)
    num_messages: int = 0
    num_bytes: int = 0
    _rules: list[Rule] = field(default_factory=list)
    _watches: list[Rule] = field(default_factory=list)
    _pipes: "set[_Pipe]" = field(default_factory=set)
    _is_frozen: bool = False
    faults: list[str] = field(default_factory=list)  # what rules raised, which is a mistake of the test

    def rule(self, when: When, do: Act, times: int | None = None) -> Rule:
        """Messages that match are treated so; the first rule that matches counts."""
        made = Rule(when, do, times)
        self._rules.append(made)
        return made

    def watch(self, when: When = anything) -> Rule:
        """Counts the messages that match, before any rule."""
        made = Rule(when, passed)
        self._watches.append(made)
        return made

    def clear(self) -> None:
        """No rules, watches, delay or limit; what is held goes nowhere."""
        self._rules, self._watches = [], []
        self.delay_s = self.jitter_s = self.bytes_per_s = 0.0
        self.held, self.parked = [], []

    @property
    def is_frozen(self) -> bool:
        return self._is_frozen

    def freeze(self) -> None:
        self._is_frozen = True

    def thaw(self) -> None:
        self._is_frozen = False
        self._each(lambda pipe: pipe.wake())

    def release(self) -> int:
        """What `hold` kept goes out now, on every connection that stands; returns how many messages."""
        held, self.held = self.held, []
        self.inject(*held)
        return len(held)

    def inject(self, *messages: Message | bytes) -> None:
        """Messages, or bytes that need not be any, from nowhere."""
        data = [m.wire() if isinstance(m, Message) else m for m in messages]
        self._each(lambda pipe: [pipe.put(Emit(one)) for one in data])

    def emissions(self, message: Message) -> list[Emit]:
        """What becomes of a message."""
        if message.is_command:
            return [Emit(message.wire())]
        self.num_messages += 1
        self.num_bytes += sum(map(len, message.frames))
        for watch in self._watches:
            watch.num_done += watch.when(message)
        behind, self.parked = self.parked, []
        emissions = list(self._act_on(message))
        return [*emissions, *(Emit(parked.wire()) for parked in behind)]

    def _act_on(self, message: Message) -> Sequence[Emit]:
        try:
            for rule in self._rules:
                if (rule.times is None or rule.num_done < rule.times) and rule.when(message):
                    rule.num_done += 1
                    return rule.do(self, message)
        except Exception as error:
            self.faults.append(repr(error))
        return passed(self, message)

    def _each(self, function: "Callable[[_Pipe], object]") -> None:
        for pipe in list(self._pipes):
            with suppress(RuntimeError):  # its loop is closed
                pipe.loop.call_soon_threadsafe(function, pipe)


class _Pipe:
    """One direction of one connection: reads, lets the way decide, writes when it is due."""

    def __init__(
        self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes = b""
    ) -> None:
        """`head` was read already."""
        self._head = head
        self.way = way
        self.loop = asyncio.get_running_loop()
        self._reader, self._writer = reader, writer
        self._parser = Parser()
        self._due: list[tuple[float, int, Emit]] = []
        self._ids = itertools.count()
        self._last = 0.0
        self._num_held = 0
        self._changed = asyncio.Event()

    def wake(self) -> None:
        self._changed.set()

    def put(self, emit: Emit) -> None:
        """Queues bytes; a delay of the way keeps the order, an `after_s` does not."""
        now = self.loop.time()
        self._last = max(self._last, now + self.way.delay_s + self.way.rng.random() * self.way.jitter_s)
        heapq.heappush(self._due, (self._last + emit.after_s, next(self._ids), emit))
        self._num_held += len(emit.data)
        self._changed.set()

    async def run(self) -> None:
        """Until either end is gone."""
        self.way._pipes.add(self)
        writing = asyncio.create_task(self._write())
        try:
            await self._read()
            self.put(Emit(b"", ends=True))
            await writing
        finally:
            writing.cancel()
            self.way._pipes.discard(self)

    async def _read(self) -> None:
        with suppress(OSError):
            data = self._head or await self._reader.read(READ_SIZE)
            while data:
                for item in self._parser.feed(data):
                    for emit in self.way.emissions(item) if isinstance(item, Message) else [Emit(item)]:
                        self.put(emit)
                while self._num_held > (SLOW_HELD if self.way.bytes_per_s else MAX_HELD):
                    await asyncio.sleep(0.01)
                data = await self._reader.read(READ_SIZE)

    async def _write(self) -> None:
        with suppress(OSError):
            while True:
                await self._until_due()
                _, _, emit = heapq.heappop(self._due)
                self._num_held -= len(emit.data)
                self._writer.write(emit.data)
                if emit.ends:
                    self._writer.close()
                    return await self._writer.wait_closed()
                await self._writer.drain()
                if self.way.bytes_per_s:
                    await asyncio.sleep(len(emit.data) / self.way.bytes_per_s)

    async def _until_due(self) -> None:
        """Until there is something to write, its time has come and the way is not frozen."""
        while True:
            self._changed.clear()
            wait = self._due[0][0] - self.loop.time() if self._due and not self.way.is_frozen else None
            if wait is not None and wait <= 0:
                return
            with suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait)


# --- proxies ------------------------------------------------------------------------------------------------


class Proxy:
    """Listens at `endpoint` and dials `target` per connection. `up` is towards the target, `down` from it."""

    def __init__(self, endpoint: str, target: str, seed: int = 0) -> None:
        self.endpoint, self.target = endpoint, target
        self.up = Way("up", random.Random(seed))
        self.down = Way("down", random.Random(seed + 1))
        self.refuses = False  # new connections end at once
        self.num_connections = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[object]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def num_open(self) -> int:
        return len(self._tasks)

    def freeze(self) -> None:
        """A partition, both ways."""
        self.up.freeze()
        self.down.freeze()

    def thaw(self) -> None:
        self.up.thaw()
        self.down.thaw()

    def cut(self) -> None:
        """Every connection is reset."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._abort)

    def heal(self) -> None:
        """As new: no rules, nothing frozen or refused."""
        self.up.clear()
        self.down.clear()
        self.refuses = False
        self.thaw()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        scheme, _, address = self.endpoint.partition("://")
        if scheme == "ipc":
            self._server = await asyncio.start_unix_server(self._accept, address)
            return
        host, _, port = address.rpartition(":")
        self._server = await asyncio.start_server(self._accept, host, int(port))
        self.endpoint = f"tcp://{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self._abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.num_connections += 1
        with suppress(OSError, asyncio.CancelledError):
            await self._serve(reader, writer)
        writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            return
        head = b""
        while self.up.is_frozen or self.down.is_frozen:  # nobody connects through a partition
            with suppress(TimeoutError, asyncio.TimeoutError):
                data = await asyncio.wait_for(reader.read(READ_SIZE), 0.01)
                if not data:
                    return
                head += data
        far_reader, far_writer = await self._dial()
        ends = {writer, far_writer}
        self._open |= ends
        ways = [_Pipe(self.up, reader, far_writer, head), _Pipe(self.down, far_reader, writer)]
        try:
            tasks = [asyncio.create_task(pipe.run()) for pipe in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._open -= ends
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            far_writer.transport.abort()

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        scheme, _, address = self.target.partition("://")
        if scheme == "ipc":
            return await asyncio.open_unix_connection(address)
        host, _, port = address.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    def _abort(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()


class Proxies:
    """Proxies on a loop in a thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._all: list[Proxy] = []

    def __enter__(self) -> "Proxies":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self._all:
            self._run(proxy.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        faults = [fault for proxy in self._all for way in (proxy.up, proxy.down) for fault in way.faults]
        assert not faults, faults

    def add(self, endpoint: str, target: str, seed: int = 0) -> Proxy:
        """A running proxy; port 0 of its endpoint becomes a free one."""
        proxy = Proxy(endpoint, target, seed)
        self._run(proxy.start())
        self._all.append(proxy)
        return proxy

    def __iter__(self):
        return iter(self._all)

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)
