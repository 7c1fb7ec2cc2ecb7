"""Closes connections of peers that send faster than their messages are read.

The receive queues of a ROUTER have no bound, since libzmq aborts the process when a peer leaves behind a full
one (see `sockets.make_socket`). This guard bounds their memory: a peer that keeps a queue filled loses its
connection, and its queued messages are dropped unread.
"""

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import zmq

from ..process.log import fields
from ..process.log_throttle import LogThrottle

logger = logging.getLogger(__name__)

# what is read at a stretch before the senders are told apart, which costs a microsecond per message
CALM_MESSAGES = 1024
CALM_BYTES = 16 << 20
# Of one peer within WINDOW_S, while the queue is never empty. A worker sends at most 4096 messages in 15
# seconds, the longest time that this process may get no core.
MAX_MESSAGES = 16384
MAX_BYTES = 128 << 20
WINDOW_S = 10.0
SOURCE = "__fd"  # libzmq's name for the descriptor of the connection that a message came from


@dataclass
class _Sender:
    """A connection, and what came from it. `inode` tells it from a later one with the same descriptor."""

    fd: int
    inode: int
    num_messages: int = 0
    num_bytes: int = 0


class FloodGuard:
    """Counts the messages of one ROUTER socket. It belongs to the thread that reads the socket."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_cut = 0
        """Connections closed so far."""
        self._clock = clock
        self._num_messages = 0
        self._num_bytes = 0
        self._ends_at = 0.0
        self._senders: dict[bytes, _Sender] = {}  # by routing id
        self._refused: set[bytes] = set()  # routing ids whose queued messages are dropped
        self._log_throttle = LogThrottle(clock=clock)

    def __repr__(self) -> str:
        return f"FloodGuard(read={self._num_messages}, cut={self.num_cut})"

    def caught_up(self) -> None:
        """The queue is empty: what came before counts no more."""
        if self._num_messages:
            self._num_messages = self._num_bytes = 0
            self._ends_at = 0.0
            self._senders.clear()
            self._refused.clear()

    def refuses(self, sender: zmq.Frame, num_bytes: int) -> bool:
        """Counts a message, and returns whether to drop it. `sender` is its first part, the routing id."""
        self._num_messages += 1
        self._num_bytes += num_bytes
        if self._num_messages <= CALM_MESSAGES and self._num_bytes <= CALM_BYTES:
            return False
        routing_id = sender.bytes
        if routing_id in self._refused:
            return True
        now = self._clock()
        if now >= self._ends_at:
            self._senders.clear()
            self._ends_at = now + WINDOW_S
        one = self._senders.get(routing_id)
        if one is None:
            fd = _descriptor(sender)
            one = self._senders[routing_id] = _Sender(fd, _inode(fd))
        one.num_messages += 1
        one.num_bytes += num_bytes
        if one.num_messages <= MAX_MESSAGES and one.num_bytes <= MAX_BYTES:
            return False
        self._cut(routing_id, one)
        return True

    def _cut(self, routing_id: bytes, one: _Sender) -> None:
        self.num_cut += 1
        self._refused.add(routing_id)
        close_connection(one.fd, one.inode)
        if self._log_throttle.is_due("flood"):
            counted = fields(peer=routing_id.hex(), messages=one.num_messages, bytes=one.num_bytes)
            logger.warning("a peer sends faster than it is read; its connection is closed", extra=counted)


def close_connection(fd: int, inode: int) -> None:
    """Shuts down the connection `fd` of libzmq, which then closes it. Does nothing if `fd` is another file
    now."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        if _inode(connection.fileno()) == inode:
            connection.shutdown(socket.SHUT_RDWR)


def _descriptor(sender: zmq.Frame) -> int:
    """The descriptor of the connection that a frame came from; -1 for one within this process."""
    try:
        return int(sender.get(SOURCE))
    except zmq.ZMQError:
        return -1


def _inode(fd: int) -> int:
    """The number of the socket behind a descriptor; 0 if it is closed."""
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return 0
