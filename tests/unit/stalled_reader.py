"""A process whose reader stalls while more comes than its queue takes, and whose peer leaves then: it must live.

`python -m baton.tests.unit.stalled_reader SIDE`: SIDE (dealer or router) stalls.
"""

import sys
import time

import zmq
from baton.cluster.sockets import CONTROL_HIGH_WATER, bind, connect, make_socket, recv_parts

MESSAGES = 40 * CONTROL_HIGH_WATER
PART = bytes(4096)
LEAST = 4 * CONTROL_HIGH_WATER  # the queues of both sides, and something on the way between
STUCK_S = 0.3  # nothing goes on for so long: every queue is full
STALL_S = 1.4  # longer than two intervals of heartbeats


def main(side):
    ours, theirs = zmq.Context(), zmq.Context()
    server = make_socket(ours if side == "router" else theirs, zmq.ROUTER)
    client = make_socket(theirs if side == "router" else ours, zmq.DEALER)
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
    got = 0
    until = time.monotonic() + 0.5
    patience = time.monotonic() + 30.0
    while time.monotonic() < (until if got >= CONTROL_HIGH_WATER - 1 else patience):
        if recv_parts(reader, 4, 1 << 20) is None:
            time.sleep(0.01)
        else:
            got += 1
            until = time.monotonic() + 0.5
    assert got >= CONTROL_HIGH_WATER - 1, got
    print(f"sent {sent}, read {got}, alive")
    ours.destroy(linger=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
