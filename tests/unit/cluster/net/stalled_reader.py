"""A process whose reader stalls behind a full queue while its peer leaves: the process must survive.

`python -m baton.tests.unit.cluster.net.stalled_reader SIDE`: SIDE (dealer or router) stalls; `pinged` is a
router whose peer has asked for a heartbeat behind its messages; `flooded` is one with more of them.
"""

import socket
import struct
import sys
import time

import zmq
from baton.cluster.net.sockets import CONTROL_HIGH_WATER, bind, connect, make_socket, recv_parts

MANY = 4096  # fills queues that have a bound
MESSAGES = 2 * MANY
PART = bytes(4096)
LEAST = MANY + 2 * CONTROL_HIGH_WATER  # the queues of both sides, and something on the way between
BURST = 4 * CONTROL_HIGH_WATER  # what a worker may say while its router gets no core
FLOOD = MANY + CONTROL_HIGH_WATER  # what no honest peer says meanwhile
STUCK_S = 0.3  # nothing goes on for so long: every queue is full
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)  # ZMTP 3.1
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
PING = b"\x04\x07\x04PING\0\x0f"
SHORT = b"\0\x01m"  # a message
STALL_S = 1.4  # longer than two intervals of heartbeats


def pinged(num_messages):
    """All of it comes as one piece, which the socket's own thread has read when the peer leaves; the PING is
    answered when the messages before it have found room."""
    context = zmq.Context()
    server = make_socket(context, zmq.ROUTER)
    port = int(bind(server, "tcp://127.0.0.1:0").rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(GREETING + READY)
        with client.makefile("rb") as answer:
            answer.read(len(GREETING))
            answer.read(answer.read(2)[1])  # its READY
        client.sendall(num_messages * SHORT + PING + SHORT)
        client.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # a reset, which is seen at once
        time.sleep(STUCK_S)
    time.sleep(STUCK_S)
    print(f"read {read_all(server, num_messages)}, alive")
    context.destroy(linger=0)


def read_all(reader, least):
    """How many messages come until none has for a while; at least so many."""
    got = 0
    patience, until = time.monotonic() + 30.0, 0.0
    while time.monotonic() < (until if got >= least else patience):
        if recv_parts(reader, 4, 1 << 20) is None:
            time.sleep(0.01)
        else:
            got += 1
            until = time.monotonic() + 0.5
    assert got >= least, got
    return got


def stalled(side):
    ours, theirs = zmq.Context(), zmq.Context()
    server = make_socket(ours if side == "router" else theirs, zmq.ROUTER)
    client = make_socket(theirs if side == "router" else ours, zmq.DEALER)
    if side == "router":
        client.setsockopt(zmq.HEARTBEAT_IVL, 0)  # what becomes of its PINGs is for `pinged`
    connect(client, bind(server, "tcp://127.0.0.1:0"))
    client.send(b"hello")
    identity = server.recv_multipart()[0]
    reader, writer, address = (server, client, []) if side == "router" else (client, server, [identity])
    sent = 0
    until = time.monotonic() + STUCK_S
    while sent < MESSAGES and (sent < LEAST or time.monotonic() < until):
        try:
            writer.send_multipart([*address, PART], zmq.NOBLOCK)
            sent += 1
            until = time.monotonic() + STUCK_S
        except zmq.ZMQError:
            time.sleep(0.01)
    theirs.destroy(linger=0)
    time.sleep(STALL_S)
    got = read_all(reader, (MANY if side == "router" else CONTROL_HIGH_WATER) - 1)
    print(f"sent {sent}, read {got}, alive")
    ours.destroy(linger=0)


if __name__ == "__main__":
    (side,) = sys.argv[1:]
    bursts = {"pinged": BURST, "flooded": FLOOD}
    pinged(bursts[side]) if side in bursts else stalled(side)
