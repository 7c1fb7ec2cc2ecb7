"""The processes of the sandbox: a fork server, and the workers that render chat templates or compile
grammars.

    fork server   has loaded the libraries and no template. On request of the router it forks a worker within
                  milliseconds, lowers its priority, or kills it. It ends with the router, and its workers end
                  with it.
    worker        does one job after the other. The kernel ends it when a job takes longer than DEADLINE_S,
                  also inside a C function. It cannot allocate more than MEMORY beyond its initial size.

The router sends the fork server datagrams: a Command and the number of a worker, with FORK also the worker's
socket.
"""

import contextlib
import gc
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import traceback
from enum import IntEnum

import msgspec

from ...cluster.process.process import SERVING
from .frames import READY, TOO_LARGE, Frames, framed
from .grammar_compiler import GRAMMARS, SandboxedCompiler
from .template_renderer import Setup, TemplateRenderer

DEADLINE_S = 2.0  # seconds for one job in a worker that is not starved
MEMORY = 512 << 20  # bytes of address space for rendering
GRAMMAR_MEMORY = 256 << 20  # bytes of address space for compiling a grammar
COMMAND = struct.Struct("<BQ")
LOWEST_PRIORITY = 19
READ_BYTES = 1 << 18


class Command(IntEnum):
    """The requests of the router to the fork server."""

    FORK = 1
    SET_ASIDE = 2
    KILL = 3


class ForkServerProcess:
    """The main loop of the fork server, which forks and reaps workers. One thread."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._children: dict[int, int] = {}  # pid by number
        self._wake, self._wakes = socket.socketpair()
        for end in (self._wake, self._wakes):
            end.setblocking(False)

    def __repr__(self) -> str:
        return f"ForkServerProcess({len(self._children)} workers)"

    def serve(self) -> None:
        """Serves until the router is gone. Forked workers do not return from here."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno())
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._wakes, selectors.EVENT_READ)
            while self._is_asked(selector):
                self._reap()
        signal.set_wakeup_fd(-1)  # the socket is closed soon, and no child is awaited any more
        for pid in self._children.values():
            os.kill(pid, signal.SIGKILL)

    def _is_asked(self, selector: selectors.BaseSelector) -> bool:
        """Waits for requests and carries them out. False when the router is gone."""
        for key, _ in selector.select():
            if key.fileobj is self._wakes:
                with contextlib.suppress(BlockingIOError):
                    self._wakes.recv(1 << 10)
                continue
            data, descriptors, _, _ = socket.recv_fds(self._channel, COMMAND.size, 1)
            if not data:
                return False
            command, number = COMMAND.unpack(data)
            self._obey(Command(command), number, descriptors)
        return True

    def _obey(self, command: Command, number: int, descriptors: list[int]) -> None:
        if command is Command.FORK:
            self._fork(number, socket.socket(fileno=descriptors[0]))
        elif number in self._children:  # not reaped yet, so the PID still belongs to this child
            pid = self._children[number]
            if command is Command.KILL:
                os.kill(pid, signal.SIGKILL)
            else:
                with contextlib.suppress(PermissionError):  # a system-call filter may deny it
                    os.setpriority(os.PRIO_PROCESS, pid, LOWEST_PRIORITY)

    def _fork(self, number: int, end: socket.socket) -> None:
        with end:
            try:
                pid = os.fork()
            except OSError:  # too many processes; the router sees the socket closed
                return
            if pid:
                self._children[number] = pid
                return
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                for unneeded in (self._channel, self._wake, self._wakes):
                    unneeded.close()
                _work(end)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def _reap(self) -> None:
        for number, pid in list(self._children.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._children[number]


def run_fork_server(channel: socket.socket) -> None:
    """Runs the fork server and exits the process."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # a draining router still needs templates
            signal.signal(number, signal.SIG_IGN)
        gc.collect()
        gc.freeze()
        ForkServerProcess(channel).serve()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _work(end: socket.socket) -> None:
    """Runs a worker until the router closes its socket, or until a job took too much memory."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the default action ends the process
    _limit(MEMORY)
    sys.audit(SERVING)
    frames = Frames()
    executor: TemplateRenderer | SandboxedCompiler | None = None
    with contextlib.suppress(ConnectionError):
        while data := end.recv(READ_BYTES):
            for frame in frames.feed(data):
                if executor is None:
                    executor = _executor_of(frame)
                    end.sendall(framed(READY))
                    continue
                signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
                reply = executor.answer(frame)
                signal.setitimer(signal.ITIMER_REAL, 0)
                end.sendall(framed(reply))
                if reply == TOO_LARGE:
                    return


def _executor_of(frame: bytes) -> TemplateRenderer | SandboxedCompiler:
    """The executor that the setup frame asks for."""
    if frame != GRAMMARS:
        return TemplateRenderer(msgspec.json.decode(frame, type=Setup))
    made = SandboxedCompiler()
    _limit(GRAMMAR_MEMORY)
    return made


def _limit(memory: int) -> None:
    """Bounds the address space of this process to `memory` bytes beyond its current size, and disables core
    files.

    A lower limit that the process has already stays: only a privileged process may raise one.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given = [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
    size = min([memory + _address_space(), *given])
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def missing_address_space() -> int:
    """The bytes of address space that a worker forked from this process lacks, because of this process's
    limit (`ulimit -v`). 0: it gets all of MEMORY."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return 0 if limit == resource.RLIM_INFINITY else max(0, MEMORY + _address_space() - limit)


def _address_space() -> int:
    """The address space of this process, in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    run_fork_server(socket.socket(fileno=int(sys.argv[1])))
