"""Connection events of a socket: handshakes that failed, and connections that ended."""

import logging
import struct
from collections.abc import Sequence

import zmq

from ..process.log import fields
from ..process.log_throttle import LogThrottle
from .sockets import Socket, recv_parts

logger = logging.getLogger(__name__)

UNFINISHED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
HANDSHAKE_FAILURES = UNFINISHED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
MONITOR_PARTS, MONITOR_BYTES = 2, 1024
EVENTS_PER_TURN = 64
MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH


class SocketMonitor:
    """Reads the connection events of one socket; closed before that socket is."""

    def __init__(self, watched: Socket, events: int) -> None:
        self._watched = watched
        self.socket: Socket = watched.get_monitor_socket(events)

    def read(self) -> list[tuple[int, int]]:
        """The events as pairs (event, value), oldest first. A flood is cut off and left for the next call."""
        events = []
        for _ in range(EVENTS_PER_TURN):
            parts = recv_parts(self.socket, MONITOR_PARTS, MONITOR_BYTES)
            if not parts:
                break
            events.append(parse_event(parts))
        return events

    def close(self) -> None:
        """Idempotent."""
        if not self.socket.closed:
            self._watched.disable_monitor()
            self.socket.close(0)


class HandshakeMonitor:
    """Counts and logs failed handshakes of a server socket. `security.allowed_keys` logs refused keys.

    `num_left` counts established connections that ended, for instance because the peer process died.
    """

    def __init__(self, watched: Socket) -> None:
        self.num_failed = 0
        self.num_left = 0
        self._watch = SocketMonitor(watched, UNFINISHED | zmq.EVENT_DISCONNECTED)
        self._log_throttle = LogThrottle()

    @property
    def socket(self) -> Socket:
        """The monitor socket, readable when events wait."""
        return self._watch.socket

    def read(self) -> None:
        """Processes all waiting events."""
        for event, value in self._watch.read():
            self._count(event, value)

    def take(self, parts: Sequence[zmq.Frame]) -> None:
        """Processes one event that another reader of `socket` received."""
        self._count(*parse_event(parts))

    def _count(self, event: int, value: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            self.num_left += 1
            return
        self.num_failed += 1
        reason = failure_text(event, value)
        if self._log_throttle.is_due(reason):
            logger.warning("a connection failed before it began", extra=fields(reason=reason))

    def close(self) -> None:
        """Closes the monitor. To be called before the watched socket is closed. Idempotent."""
        self._watch.close()


def parse_event(parts: Sequence[zmq.Frame]) -> tuple[int, int]:
    """The pair (event, value) of a monitor's message."""
    event, value = struct.unpack("=HI", parts[0].bytes)
    return event, value


def failure_text(event: int, value: int) -> str:
    """The reason of a failed handshake, from the view of the end that reads the event."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "the peer refused our key"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == MISMATCH:
        return "one end uses keys and the other does not"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "the peer expects another key than ours"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return f"the peer does not follow ZMTP (0x{value:x})"
    return "the peer broke off"
