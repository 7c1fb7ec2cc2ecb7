"""Many workers in one process for a router to see: each has a real control link and no engine.

python -m baton.tests.faults.crowd ENDPOINT COUNT      until stdin ends
"""

import secrets
import select
import sys
import time

import zmq
from baton.cluster.net.control_link import ControlLink
from baton.cluster.protocol.messages import PROTOCOL_MAJOR, Heartbeat, Hello, WorkerStats

TURN_S = 0.01
FINGERPRINT = "crowd"  # nobody else's, so that they get no request


def main() -> int:
    """Beat until nobody listens."""
    endpoint, count = sys.argv[1], int(sys.argv[2])
    context = zmq.Context()
    began = time.monotonic()
    links = [ControlLink(context, endpoint, hello(), began) for _ in range(count)]
    beats = [0.0] * count
    while not select.select([sys.stdin], [], [], TURN_S)[0]:
        for i, link in enumerate(links):
            now = time.monotonic()
            link.receive()
            if link.tick(now):
                beats[i] = 0.0
            if link.connected and now >= beats[i]:
                beats[i] = now + link.heartbeat_s
                link.send(
                    Heartbeat(
                        instance=link._machine.hello.instance, stats=WorkerStats(pages_total=8, pages_free=8)
                    )
                )
    for link in links:
        link.close()
    context.term()
    return 0


def hello() -> Hello:
    """Of a decode worker."""
    return Hello(
        role="decode", instance=secrets.token_hex(16), fingerprint=FINGERPRINT, model="crowd",
        protocol=PROTOCOL_MAJOR,
        pages_total=8, page_size=16, max_context=512, max_running=4, vocab_size=400,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
