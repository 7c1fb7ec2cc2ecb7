"""The router's handle of the fork server, a process that forks the sandboxed workers."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

from . import pool_worker
from .pool_worker import COMMAND, Command, run_fork_server

PROGRAM = (sys.executable, "-m", pool_worker.__name__)


class ForkServer:
    """Forks workers until it is closed. A fork server that died is replaced at the next fork."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._channel: socket.socket | None = None
        self._reap: Callable[[], object] = int  # waits for the process, which ends when the channel is closed

    def __repr__(self) -> str:
        return f"ForkServer({'not started' if self._channel is None else 'started'})"

    @classmethod
    def forked(cls) -> "ForkServer":
        """Forks the fork server from this process, which must have no threads yet.

        The server is ready at once.
        """
        made = cls()
        own, other = _channel()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            own.close()
            run_fork_server(other)
        other.close()
        made._channel, made._reap = own, partial(os.waitpid, pid, 0)
        return made

    def fork(self) -> tuple[int, socket.socket]:
        """Forks a worker.

        Returns its number and the socket to it. Raises OSError when none can be forked now.
        """
        own, other = socket.socketpair()
        own.setblocking(False)
        number = next(self._numbers)
        with other:
            try:
                self._order(Command.FORK, number, other)
            except OSError:
                own.close()
                raise
        return number, own

    def set_aside(self, number: int) -> None:
        """Lowers the worker's priority to the lowest."""
        with suppress(OSError):
            self._order(Command.SET_ASIDE, number)

    def kill(self, number: int) -> None:
        """Kills the worker. If the fork server has died, the worker's own deadline ends it."""
        with suppress(OSError):
            self._order(Command.KILL, number)

    def close(self) -> None:
        """Ends the fork server and all its workers. Idempotent."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            self._reap()

    def _order(self, command: Command, number: int, end: socket.socket | None = None) -> None:
        data = COMMAND.pack(command, number)
        descriptors = [] if end is None else [end.fileno()]
        if self._channel is not None:
            try:
                socket.send_fds(self._channel, [data], descriptors)
                return
            except ConnectionError:
                self.close()
        if end is not None:  # the other commands concern workers of the fork server that died
            self._channel = self._start()
            socket.send_fds(self._channel, [data], descriptors)

    def _start(self) -> socket.socket:
        """Starts a fork server as a new program, which needs about a second to load its libraries."""
        own, other = _channel()
        with other:
            number = other.fileno()
            process = subprocess.Popen(
                (*PROGRAM, str(number)), stdin=subprocess.DEVNULL, pass_fds=(number,), cwd="/"
            )
        self._reap = process.wait
        return own


def _channel() -> tuple[socket.socket, socket.socket]:
    """A socket pair: the router's end, which never blocks, and the fork server's end."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.setblocking(False)
    return own, other
