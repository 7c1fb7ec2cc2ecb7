"""Notifications to the service manager: ready, alive, stopping (the sd_notify protocol).

    READY=1                    the role accepts work
    WATCHDOG=1                 the scheduler loop runs; sent by that loop, at most each eighth of the
                               manager's limit
    STOPPING=1                 the role drains or leaves
    STATUS=...                 one line for the manager's status display
    EXTEND_TIMEOUT_USEC=...    the role is not ready yet, but its loop runs, or a download does: wait longer

Each notification is one datagram to the socket named by $NOTIFY_SOCKET; without the variable nothing is sent.
Failed datagrams are dropped: an unresponsive manager must not stop a server.

Protocol: sd_notify(3) and sd_watchdog_enabled(3) of systemd.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from ..errors import ConfigError

logger = logging.getLogger(__name__)

SOCKET_VARIABLE = "NOTIFY_SOCKET"
LIMIT_VARIABLE = "WATCHDOG_USEC"
PID_VARIABLE = "WATCHDOG_PID"
VARIABLES = (SOCKET_VARIABLE, LIMIT_VARIABLE, PID_VARIABLE)  # valid for one process and not for its children
PINGS_PER_LIMIT = 8
WAIT_PACE_S = 5.0  # seconds between two requests for more time
WAIT_FOR_S = 30.0  # seconds that each request asks for
RETURN_S = 900.0  # the manager's longest wait for a process that starts again by itself
PATIENCE_S = 1.0  # longest wait for a slow manager, for notifications that are sent once


class Channel(Protocol):
    """A channel of datagrams to the service manager."""

    def send(self, data: bytes, patience_s: float) -> None:
        """Sends a datagram. Waits at most `patience_s` seconds for a slow manager. Never raises."""


class Silence:
    """The channel of a process without a service manager."""

    def send(self, data: bytes, patience_s: float) -> None:
        """Drops the datagram."""


class NotifySocket:
    """The channel to `address`: a path, or `@` and a name of Linux's abstract namespace."""

    def __init__(self, address: str) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._is_failing = False

    def send(self, data: bytes, patience_s: float) -> None:
        """Sends a datagram. Logs the first of consecutive failures."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sending:
                sending.settimeout(patience_s)
                sending.sendto(data, self._address)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                logger.warning(
                    "the service manager cannot be told of this process: %s", error.strerror or error
                )
            self._is_failing = True


class Notifier:
    """The notifications of one process.

    `limit_s` is the manager's longest wait for the next ping of a ready process, in seconds; 0 means no
    limit.
    """

    def __init__(self, channel: Channel | None = None, limit_s: float = 0.0) -> None:
        self.limit_s = limit_s
        self._channel = channel or Silence()
        self._is_ready = self._is_stopping = False
        self._pinged_at = self._waited_at = float("-inf")

    def __repr__(self) -> str:
        state = "stopping" if self._is_stopping else "ready" if self._is_ready else "starting"
        return f"Notifier({state}, {f'{self.limit_s:g} s' if self.limit_s else 'no watchdog'})"

    def ready(self, status: str) -> None:
        """Reports that the role accepts work. Idempotent."""
        if not self._is_ready:
            self._is_ready = True
            self._send("READY=1", f"STATUS={status}")

    def wait(self, now: float, status: str) -> None:
        """Reports at `now` (monotonic seconds) that the role is not ready yet, but its loop runs."""
        if not self._is_ready and not self._is_stopping and now - self._waited_at >= WAIT_PACE_S:
            self._waited_at = now
            self._send(f"EXTEND_TIMEOUT_USEC={int(WAIT_FOR_S * 1e6)}", f"STATUS={status}")

    def ping(self, now: float) -> None:
        """Reports at `now` (monotonic seconds) that the loop runs."""
        if self.limit_s and now - self._pinged_at >= self.limit_s / PINGS_PER_LIMIT:
            self._pinged_at = now
            self._channel.send(b"WATCHDOG=1", 0.0)  # the next one replaces a lost one

    def stopping(self, status: str) -> None:
        """Reports that the process drains or leaves. Idempotent."""
        if not self._is_stopping:
            self._is_stopping = True
            self._send("STOPPING=1", f"STATUS={status}")

    def returning(self, status: str) -> None:
        """Reports that the process leaves and comes back under the same PID. No ping is due meanwhile, nor
        before the next start is ready, for `RETURN_S` seconds.
        """
        limit = [f"WATCHDOG_USEC={int(RETURN_S * 1e6)}"] if self.limit_s else []
        self._is_stopping = True
        self._send(f"STATUS={status}", *limit)

    def _send(self, *lines: str) -> None:
        self._channel.send("\n".join(lines).encode(), PATIENCE_S)


@contextmanager
def waiting(notifier: Notifier, status: str) -> Iterator[None]:
    """Reports in the body, every WAIT_PACE_S seconds from a thread, that the role is not ready yet.

    For a body that blocks and bounds its own time, such as a download.
    """
    is_over = threading.Event()

    def report() -> None:
        while not is_over.is_set():
            notifier.wait(time.monotonic(), status)
            is_over.wait(WAIT_PACE_S)

    thread = threading.Thread(target=report, name="service manager", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def notifier_of(env: Mapping[str, str], pid: int | None = None) -> Notifier:
    """The notifier of this process. Raises ConfigError for an invalid address or limit."""
    address = env.get(SOCKET_VARIABLE, "")
    if not address:
        return Notifier()
    if address[0] not in "/@":
        raise ConfigError(
            f"{SOCKET_VARIABLE}={address} is neither a path nor @NAME; unset it, or let the manager set it"
        )
    return Notifier(NotifySocket(address), _limit_of(env, os.getpid() if pid is None else pid))


def without_manager(env: Mapping[str, str]) -> dict[str, str]:
    """`env` for a child process, without the variables of the service manager."""
    return {name: value for name, value in env.items() if name not in VARIABLES}


def _limit_of(env: Mapping[str, str], pid: int) -> float:
    """The manager's watchdog limit in seconds; 0 when it does not watch this process."""
    text = env.get(LIMIT_VARIABLE, "")
    if not text or env.get(PID_VARIABLE, str(pid)) != str(pid):
        return 0.0
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"{LIMIT_VARIABLE}={text} is no number of microseconds; unset it, or let the manager set it"
        )
    return int(text) / 1e6
