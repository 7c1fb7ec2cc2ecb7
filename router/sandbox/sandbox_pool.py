"""A pool of sandboxed processes on the event loop: jobs in, replies out. `PoolScheduler` decides; this file
does the I/O.

Chat templates and grammars have one pool each. One fork server forks the workers of both.
"""

import asyncio
import logging
import socket
from collections.abc import Callable

from ...cluster.errors import BatonError
from ...cluster.process.log import fields
from .fork_server import ForkServer
from .frames import READY, TOO_LARGE, Frames, framed
from .pool_scheduler import (
    SLOW_S,
    Answered,
    Assign,
    Effect,
    End,
    Fork,
    JobFailed,
    PoolScheduler,
    Reason,
    SandboxJob,
    SetAside,
)

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 18


class TooCostly(BatonError):
    """The job exceeded its time limit."""


class WorkerLost(BatonError):
    """The job killed its workers, or no worker could be started (NoWorker)."""


class NoWorker(WorkerLost):
    """No worker could be started. The job itself may be valid."""


class _Pipe:
    """The socket to one worker."""

    def __init__(self, number: int, end: socket.socket, on_data: Callable[[], None]) -> None:
        self.number = number  # the fork server's name for the worker
        self.frames = Frames()
        self._end = end
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, on_data)

    def __repr__(self) -> str:
        return f"_Pipe(worker {self.number}, {len(self._unsent)} bytes unsent)"

    def send(self, data: bytes) -> None:
        """Writes `data` together with other data of this turn of the loop, since each write wakes the
        worker."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += data

    def read(self) -> bytes | None:
        """The received bytes; None without any, b"" when the worker is gone."""
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
        self._write()
        if self._unsent:
            self._loop.add_writer(self._end, self._on_room)

    def _write(self) -> None:
        try:
            del self._unsent[: self._end.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the worker is gone; the reader handles that
            self._unsent.clear()

    def _on_room(self) -> None:
        self._write()
        if not self._unsent:
            self._loop.remove_writer(self._end)


class SandboxPool:
    """Does jobs for one router, on one event loop. Workers are started when there is a job.

    `setup` is the first frame that each worker gets. `kind` names the pool in the log.
    """

    def __init__(
        self,
        setup: bytes,
        fork_server: ForkServer,
        clock: Callable[[], float],
        scheduler: PoolScheduler | None = None,
        *,
        kind: str = "template",
    ) -> None:
        self._setup = framed(setup)
        self._kind = kind
        self._fork_server = fork_server
        self._clock = clock
        self._scheduler = scheduler or PoolScheduler()
        self._pipes: dict[int, _Pipe] = {}  # by the scheduler's key
        self._answers: dict[SandboxJob, asyncio.Future[bytes]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"SandboxPool({self._kind}, {self._scheduler})"

    def close(self) -> None:
        """Ends all workers. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        for key in list(self._pipes):
            self._end(key, must_kill=True)

    async def reply_to(self, data: bytes, *, is_long: bool) -> bytes:
        """A worker's reply to `data`. Raises TooCostly, WorkerLost or NoWorker."""
        job = SandboxJob(data, is_long)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[job] = answer
        self._do(self._scheduler.submit(job, self._clock()))
        try:
            return await answer
        finally:
            job.is_dropped = True
            self._answers.pop(job, None)

    def _do(self, effects: list[Effect], reply: bytes = b"") -> None:
        for effect in effects:
            match effect:
                case Assign(key, job):
                    self._pipes[key].send(framed(job.data))
                case Answered(job):
                    self._settle(job, reply)
                case Fork(key):
                    self._fork(key)
                case SetAside(key):
                    self._fork_server.set_aside(self._pipes[key].number)
                case End(key, must_kill):
                    self._end(key, must_kill=must_kill)
                case JobFailed(job, reason):
                    self._settle(job, _error_of(reason))
        if self._timer is None and self._scheduler.num_open:
            self._timer = asyncio.get_running_loop().call_later(SLOW_S / 2, self._tick)

    def _fork(self, key: int) -> None:
        try:
            number, end = self._fork_server.fork()
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
            self._end(key, must_kill=False)
            self._on_end(key)

    def _on_reply(self, key: int, reply: bytes) -> None:
        now = self._clock()
        if reply == READY:
            self._do(self._scheduler.ready(key, now))
        else:
            self._do(self._scheduler.answered(key, now, is_last=reply == TOO_LARGE), reply)

    def _on_end(self, key: int) -> None:
        self._do(self._scheduler.ended(key, self._clock()))

    def _tick(self) -> None:
        self._timer = None
        for key in list(self._pipes):  # replies first: workers are not slow because the event loop was late
            if key in self._pipes:
                self._on_data(key)
        self._do(self._scheduler.tick(self._clock()))

    def _end(self, key: int, *, must_kill: bool) -> None:
        pipe = self._pipes.pop(key, None)
        if pipe is None:  # the worker could not be started
            return
        if must_kill:
            self._fork_server.kill(pipe.number)
        pipe.close()

    def _settle(self, job: SandboxJob, outcome: bytes | BatonError) -> None:
        answer = self._answers.get(job)
        if answer is None or answer.done():
            return
        if isinstance(outcome, bytes):
            answer.set_result(outcome)
        else:
            answer.set_exception(outcome)


def _error_of(reason: Reason) -> BatonError:
    match reason:
        case Reason.COSTLY:
            return TooCostly()
        case Reason.LOST:
            return WorkerLost()
        case Reason.NO_WORKER:
            return NoWorker()
