"""Chat templates as the router sees them: rendered by workers in processes of their own, which `template_lanes` directs."""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable

import msgspec

from ..cluster.log import fields
from .errors import ApiError, bad_request, template_failed, template_too_costly
from .nursery import NurseryHandle
from .rendering import READY, REFUSED, RENDERED, TOO_LARGE, Chat, Frames, Setup, framed
from .template_lanes import SLOW_S, Answered, Effect, End, Failed, Fork, Lanes, Rendering, Send, SetAside

logger = logging.getLogger(__name__)

WARM = Chat(messages=[{"role": "user", "content": "hi"}])
READ_BYTES = 1 << 18


class _Pipe:
    """The socket to one worker, on the event loop."""

    def __init__(self, number: int, end: socket.socket, on_data: Callable[[], None]) -> None:
        self.number = number
        self.frames = Frames()
        self._end = end
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, on_data)

    def __repr__(self) -> str:
        return f"_Pipe(worker {self.number}, {len(self._unsent)} bytes unsent)"

    def send(self, data: bytes) -> None:
        """With what else is sent in this turn of the loop, since each write wakes the worker; or when there is room."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += data

    def read(self) -> bytes | None:
        """What has come; None: nothing yet, b"": the worker is gone."""
        try:
            return self._end.recv(READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def close(self) -> None:
        self._unsent.clear()
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        self._end.close()

    def _flush(self) -> None:
        del self._unsent[: self._written(self._unsent)]
        if self._unsent:
            self._loop.add_writer(self._end, self._on_room)

    def _written(self, data: bytes | bytearray) -> int:
        """How much of it. Of a worker that is gone the reader hears."""
        try:
            return self._end.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _on_room(self) -> None:
        del self._unsent[: self._written(self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self._end)


class Templates:
    """Renders for one router, on one event loop. Workers are made when there is something to render."""

    def __init__(
        self, setup: Setup, nursery: NurseryHandle, clock: Callable[[], float], events: Counter[str] | None = None
    ) -> None:
        self._setup = framed(msgspec.json.encode(setup))
        self._nursery = nursery
        self._clock = clock
        self._events = Counter() if events is None else events
        self._lanes = Lanes()
        self._pipes: dict[int, _Pipe] = {}
        self._answers: dict[Rendering, asyncio.Future[bytes]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._reply = b""  # that a worker has just given
        self._warming: list[asyncio.Task[str]] = []

    def __repr__(self) -> str:
        return f"Templates({self._lanes}, {len(self._pipes)} workers)"

    def warm(self) -> None:
        """Has workers made and the template compiled before somebody waits for that."""
        encoded = msgspec.json.encode(WARM)
        for is_long in (False, True):
            task = asyncio.get_running_loop().create_task(self.render(encoded, is_long=is_long))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # some templates refuse such a chat
            self._warming.append(task)

    def close(self) -> None:
        """Ends all workers. Idempotent."""
        for task in self._warming:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for key in list(self._pipes):
            self._end(key, is_idle=False)

    async def render(self, chat: bytes, *, is_long: bool) -> str:
        """The text of an encoded Chat. Raises ApiError: what the template refuses, or takes too much for, is 400."""
        rendering = Rendering(chat, is_long)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[rendering] = answer
        self._do(self._lanes.submit(rendering, self._clock()))
        try:
            reply = await answer
        finally:
            rendering.is_dropped = True
            self._answers.pop(rendering, None)
        kind, text = reply[:1], reply[1:].decode()
        if kind == RENDERED:
            return text
        if kind == REFUSED:
            raise bad_request(f"the model's chat template refuses these messages: {text}", param="messages")
        raise self._too_costly()

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Fork(key):
                    self._fork(key)
                case Send(key, rendering):
                    if key in self._pipes:
                        self._pipes[key].send(framed(rendering.data))
                case SetAside(key):
                    self._nursery.set_aside(self._pipes[key].number)
                case End(key, is_idle):
                    self._end(key, is_idle=is_idle)
                case Answered(rendering):
                    self._settle(rendering, self._reply)
                case Failed(rendering, is_costly):
                    self._settle(rendering, self._too_costly() if is_costly else self._failed())
        if self._timer is None and self._lanes.num_open:
            self._timer = asyncio.get_running_loop().call_later(SLOW_S / 2, self._tick)

    def _fork(self, key: int) -> None:
        try:
            number, end = self._nursery.fork()
        except OSError as error:
            logger.warning("no template worker can be made", extra=fields(reason=str(error)))
            asyncio.get_running_loop().call_soon(self._on_end, key)
            return
        self._pipes[key] = _Pipe(number, end, lambda: self._on_data(key))
        self._pipes[key].send(self._setup)

    def _on_data(self, key: int) -> None:
        pipe = self._pipes[key]
        while data := pipe.read():
            for reply in pipe.frames.feed(data):
                self._on_reply(key, reply)
                if key not in self._pipes:
                    return
        if data is not None:
            self._end(key, is_idle=True)
            self._on_end(key)

    def _on_reply(self, key: int, reply: bytes) -> None:
        if reply == READY:
            self._lanes.ready(key, self._clock())
            return
        self._reply = reply
        self._do(self._lanes.answered(key, self._clock(), is_last=reply == TOO_LARGE))

    def _on_end(self, key: int) -> None:
        self._do(self._lanes.ended(key, self._clock()))

    def _tick(self) -> None:
        self._timer = None
        for key in list(self._pipes):  # a loop that was late shall not blame workers that were not
            if key in self._pipes:
                self._on_data(key)
        self._do(self._lanes.tick(self._clock()))

    def _end(self, key: int, *, is_idle: bool) -> None:
        pipe = self._pipes.pop(key, None)
        if pipe is None:  # it could not be made
            return
        if not is_idle:
            self._nursery.kill(pipe.number)
        pipe.close()

    def _settle(self, rendering: Rendering, outcome: bytes | ApiError) -> None:
        answer = self._answers.get(rendering)
        if answer is None or answer.done():
            return
        if isinstance(outcome, bytes):
            answer.set_result(outcome)
        else:
            answer.set_exception(outcome)

    def _too_costly(self) -> ApiError:
        self._events["template_cut"] += 1
        logger.warning("a chat template took too much time or memory")
        return template_too_costly()

    def _failed(self) -> ApiError:
        self._events["template_worker_lost"] += 1
        logger.error("template workers died of one chat, or could not be made")
        return template_failed()
