"""The router's hold on the process that forks template workers."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

from ..router import template_worker
from .template_worker import COMMAND, Command, run_nursery

PROGRAM = (sys.executable, "-m", template_worker.__name__)


class NurseryHandle:
    """Forks workers for as long as it is not closed. A nursery that died is replaced when it is needed next."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._channel: socket.socket | None = None
        self._reap: Callable[[], object] = int  # waits for the process, which ends when the channel is closed

    def __repr__(self) -> str:
        return f"NurseryHandle({'not started' if self._channel is None else 'started'})"

    @classmethod
    def forked(cls) -> "NurseryHandle":
        """A nursery forked from this process, which must have no thread of its own yet: it is there at once."""
        made = cls()
        own, other = _channel()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            own.close()
            run_nursery(other)
        other.close()
        made._channel, made._reap = own, partial(os.waitpid, pid, 0)
        return made

    def fork(self) -> tuple[int, socket.socket]:
        """A new worker: its number and the socket to it. Raises OSError when there can be none now."""
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
        """The worker goes on only where nobody else wants the processor."""
        with suppress(OSError):
            self._order(Command.SET_ASIDE, number)

    def kill(self, number: int) -> None:
        """Ends the worker; if the nursery died, its deadline does that."""
        with suppress(OSError):
            self._order(Command.KILL, number)

    def close(self) -> None:
        """Ends the nursery and all of its workers. Idempotent."""
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
        if end is not None:  # others are about workers of the nursery that died
            self._channel = self._start()
            socket.send_fds(self._channel, [data], descriptors)

    def _start(self) -> socket.socket:
        """A nursery as a program of its own: it loads the libraries anew, which takes it a second."""
        own, other = _channel()
        with other:
            number = other.fileno()
            process = subprocess.Popen(
                (*PROGRAM, str(number)), stdin=subprocess.DEVNULL, pass_fds=(number,), cwd="/"
            )
        self._reap = process.wait
        return own


def _channel() -> tuple[socket.socket, socket.socket]:
    """The router's end, which never waits, and the nursery's."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.setblocking(False)
    return own, other
