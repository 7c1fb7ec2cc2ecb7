"""Messages over the unix connection of a slab, past ZeroMQ.

A message over ZeroMQ wakes three threads on its way: an I/O thread of either process, and the receiving link
thread. Over this connection it wakes one. Each packet is one frame of the KV plane. Only messages without a
payload go this way; where the connection is full or broken, they go over ZeroMQ.

The connection is between processes of one user of one host, which both ends have verified. So frames are not
encrypted, as the slab is not.
"""

import socket
from collections.abc import Iterator

from ...cluster.protocol.codec import KV_MAX_BYTES

FRAMES_PER_TURN = 64


def sent(connection: socket.socket, frame: bytes) -> bool:
    """Sends one frame without waiting. False: it was not sent."""
    try:
        return connection.send(frame) == len(frame)
    except OSError:
        return False


def received(connection: socket.socket) -> Iterator[memoryview]:
    """The frames that have arrived, at most `FRAMES_PER_TURN`. An empty one is the end of the connection."""
    for _ in range(FRAMES_PER_TURN):
        try:
            frame = connection.recv(KV_MAX_BYTES)
        except BlockingIOError:
            return
        except OSError:
            frame = b""
        yield memoryview(frame)
        if not frame:
            return
