"""Rows in which strangers take connections and give nothing for them."""

import contextlib
import resource
import socket
import statistics
import time

import psutil
from baton.tests.faults.bed import Scene
from baton.tests.faults.cluster import wait_until
from baton.tests.faults.history import Promise
from baton.tests.faults.rows import row
from baton.tests.faults.rows_clients import p99
from baton.tests.faults.traffic import workload

BEGINNINGS = (b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n{")


@contextlib.contextmanager
def connections(scene: Scene, count: int):
    """So many, each with the beginning of a request or nothing."""
    with contextlib.ExitStack() as stack:
        opened = []
        for number in range(count):
            made = socket.create_connection(("127.0.0.1", scene.cluster.port("router")), timeout=20)
            connection = stack.enter_context(made)
            with contextlib.suppress(ConnectionError):
                connection.sendall(BEGINNINGS[number % 3])
            opened.append(connection)
        yield opened


def is_over(connection: socket.socket) -> bool:
    """Whether the other side has closed."""
    connection.setblocking(False)
    with contextlib.suppress(ConnectionError):
        try:
            while connection.recv(1 << 16):
                pass
        except BlockingIOError:
            return False
    return True


@row(
    "F18", "600 clients send the beginning of a head or of a body and then nothing",
    "each is closed within 10 s and a sweep; others complete, their first tokens come as before within 2 x and 50 ms",
)
def f18(scene: Scene) -> str:
    asks = scene.known(workload(118, 40, prompt=(16, 60), max_tokens=12))
    before = p99(scene.traffic.run(asks, width=4))
    with connections(scene, 600) as slow:
        began = time.monotonic()
        calls = scene.traffic.run(asks, width=4)
        wait_until(lambda: all(is_over(one) for one in slow), 14, "every slow client is closed")
        took = time.monotonic() - began
    assert all(call.end == "finished" for call in calls), calls
    assert p99(calls) <= 2 * before + 0.05, (before, p99(calls))
    return f"closed after {took:.1f} s; p99 first token {1000 * p99(calls):.0f} ms, {1000 * before:.0f} ms before"


@row(
    "F36", "more connections than the router has descriptors for, while streams run",
    "new ones are refused or wait; running streams complete, tokens equal; new requests are served 5 s later at most",
)
def f36(scene: Scene) -> str:
    asks = scene.known(workload(136, 6, prompt=(16, 60), max_tokens=300))
    router = psutil.Process(scene.cluster.nodes["router"].pid)
    scene.promise = Promise(statuses=(503,))
    calls = scene.traffic.start(*asks)
    wait_until(lambda: all(call.ids for call in calls), 10, "the streams run")
    limits = router.rlimit(resource.RLIMIT_NOFILE)
    router.rlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        with connections(scene, 700):
            scene.traffic.wait(calls)
        began = time.monotonic()
        wait_until(lambda: scene.traffic.run(asks[:1])[0].end == "finished", 5, "it serves again")
        took = time.monotonic() - began
    finally:
        router.rlimit(resource.RLIMIT_NOFILE, limits)
    assert all(call.end == "finished" for call in calls), calls
    gaps = [b[0] - a[0] for call in calls for a, b in zip(call.arrivals, call.arrivals[1:], strict=False)]
    usual = f"longest gap {max(gaps):.2f} s, median {1000 * statistics.median(gaps):.0f} ms"
    return f"6 of 6 complete, {usual}; back after {took:.1f} s"
