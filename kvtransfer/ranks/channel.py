"""The channel between the link threads of rank 0 and another rank: whole messages, in order, never blocking.

Both are processes of one worker, which inherited the two ends of a pair of unix sockets. The end of the
connection is the end of the other process.
"""

import socket
import struct
from collections.abc import Sequence
from typing import Protocol

HEADER = struct.Struct("!I")
MAX_MESSAGE = 64 << 20  # more than the pages of any room
PIECE_BYTES = 1 << 16  # a socket of packets takes no longer ones


class RankLost(Exception):
    """The process at the other end of a channel has ended."""


class Channel(Protocol):
    """One end of a channel."""

    def send(self, message: bytes) -> None:
        """Queues a message and sends what the connection takes. Raises RankLost."""

    def receive(self) -> list[bytes]:
        """The messages that have arrived. Raises RankLost behind the last one."""

    @property
    def fds(self) -> Sequence[int]:
        """Descriptors that are readable when messages have arrived."""

    @property
    def is_full(self) -> bool:
        """Whether messages wait; call `receive` again soon, which sends what the connection takes."""

    def close(self) -> None:
        """Ends the connection. Idempotent."""


class SocketChannel:
    """A channel over a connected unix socket, of a stream or of sequenced packets, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._out = bytearray()
        self._in = bytearray()
        self._is_lost = False

    def __repr__(self) -> str:
        return f"SocketChannel({'lost' if self._is_lost else 'open'}, waiting={len(self._out)})"

    @property
    def fds(self) -> Sequence[int]:
        """As `Channel.fds`."""
        return [] if self._is_lost else [self._connection.fileno()]

    @property
    def is_full(self) -> bool:
        """As `Channel.is_full`."""
        return bool(self._out) and not self._is_lost

    def send(self, message: bytes) -> None:
        """As `Channel.send`. Raises RankLost."""
        self._out += HEADER.pack(len(message)) + message
        self._flush()

    def receive(self) -> list[bytes]:
        """As `Channel.receive`. Raises RankLost."""
        self._flush()
        try:
            while data := self._connection.recv(PIECE_BYTES):
                self._in += data
            self._is_lost = True
        except BlockingIOError:
            pass
        except OSError:
            self._is_lost = True
        messages = self._whole()
        if self._is_lost and not messages:
            raise RankLost("its process has ended")
        return messages

    def close(self) -> None:
        """As `Channel.close`."""
        self._is_lost = True
        self._connection.close()

    def _whole(self) -> list[bytes]:
        messages = []
        while len(self._in) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._in)
            if size > MAX_MESSAGE:
                raise RankLost(f"its message of {size} bytes is none")
            end = HEADER.size + size
            if len(self._in) < end:
                break
            messages.append(bytes(self._in[HEADER.size : end]))
            del self._in[:end]
        return messages

    def _flush(self) -> None:
        if self._is_lost:
            raise RankLost("its process has ended")
        try:
            while self._out:
                del self._out[: self._connection.send(self._out[:PIECE_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            self._is_lost = True
            raise RankLost("its process has ended") from None
