"""Work that a client's words make costly, done by processes that can be killed, which `template_lanes` directs.

Chat templates and grammars are such: one Workshop each, with processes of its own from the router's one nursery.
"""

import asyncio
import logging
import socket
from collections.abc import Callable

from ...cluster.errors import BatonError
from ...cluster.log import fields
from .fork_server import NurseryHandle
from .pool_scheduler import SLOW_S, Answered, Effect, End, Failed, Fork, Lanes, Rendering, Send, SetAside
from .rendering import READY, TOO_LARGE, Frames, framed

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 18


class TooCostly(BatonError):
    """The work took more time than it may."""


class WorkerLost(BatonError):
    """Processes died of the work, or could not be made."""


class NoWorker(WorkerLost):
    """None could be made, which says nothing of the work."""


class _Pipe:
    """The socket to one worker, on the event loop."""

    def __init__(self, number: int, end: socket.socket, on_data: Callable[[], None]) -> None:
        self.number = number
        self.frames = Frames()
        self.is_up = False  # it has said that it is ready
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


class Workshop:
    """Has work done for one router, on one event loop. Processes are made when there is something to do.

    `setup` is the first frame that each of them gets; of `lanes` every workshop has its own. `kind` is for the log.
    """

    def __init__(
        self,
        setup: bytes,
        nursery: NurseryHandle,
        clock: Callable[[], float],
        lanes: Lanes | None = None,
        *,
        kind: str = "template",
    ) -> None:
        self._setup = framed(setup)
        self._kind = kind
        self._nursery = nursery
        self._clock = clock
        self._lanes = lanes or Lanes()
        self._pipes: dict[int, _Pipe] = {}
        self._answers: dict[Rendering, asyncio.Future[bytes]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._reply = b""  # that a worker has just given
        self._is_barren = False  # whoever was lost last had not come up

    def __repr__(self) -> str:
        return f"Workshop({self._lanes}, {len(self._pipes)} {self._kind} workers)"

    def close(self) -> None:
        """Ends all workers. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        for key in list(self._pipes):
            self._end(key, is_idle=False)

    async def reply_to(self, data: bytes, *, is_long: bool) -> bytes:
        """A worker's reply. Raises TooCostly, and WorkerLost or its NoWorker."""
        rendering = Rendering(data, is_long)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[rendering] = answer
        self._do(self._lanes.submit(rendering, self._clock()))
        try:
            return await answer
        finally:
            rendering.is_dropped = True
            self._answers.pop(rendering, None)

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
                    lost = NoWorker() if self._is_barren else WorkerLost()
                    self._settle(rendering, TooCostly() if is_costly else lost)
        if self._timer is None and self._lanes.num_open:
            self._timer = asyncio.get_running_loop().call_later(SLOW_S / 2, self._tick)

    def _fork(self, key: int) -> None:
        try:
            number, end = self._nursery.fork()
        except OSError as error:
            logger.warning("no %s worker can be made", self._kind, extra=fields(reason=str(error)))
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
            self._on_end(key, was_up=pipe.is_up)

    def _on_reply(self, key: int, reply: bytes) -> None:
        if reply == READY:
            self._pipes[key].is_up = True
            self._lanes.ready(key, self._clock())
            return
        self._reply = reply
        self._do(self._lanes.answered(key, self._clock(), is_last=reply == TOO_LARGE))

    def _on_end(self, key: int, *, was_up: bool = False) -> None:
        self._is_barren = not was_up
        self._do(self._lanes.ended(key, self._clock()))

    def _tick(self) -> None:
        self._timer = None
        for key in list(self._pipes):  # a loop that was late shall not blame workers that were not
            if key in self._pipes:
                self._on_data(key)
        self._is_barren = True  # whom it finds lost did not come up
        self._do(self._lanes.tick(self._clock()))

    def _end(self, key: int, *, is_idle: bool) -> None:
        pipe = self._pipes.pop(key, None)
        if pipe is None:  # it could not be made
            return
        if not is_idle:
            self._nursery.kill(pipe.number)
        pipe.close()

    def _settle(self, rendering: Rendering, outcome: bytes | BatonError) -> None:
        answer = self._answers.get(rendering)
        if answer is None or answer.done():
            return
        if isinstance(outcome, bytes):
            answer.set_result(outcome)
        else:
            answer.set_exception(outcome)
