"""Rows in which clients take much and give little: connections without requests, answers read slowly."""

import contextlib
import resource
import selectors
import socket
import statistics
import threading
import time

import psutil
from baton.tests.faults.cluster import wait_until
from baton.tests.faults.history import Promise
from baton.tests.faults.rows import row
from baton.tests.faults.rows_clients import p99, usual_gap
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import Ask, Call, take_event, workload

BEGINNINGS = (
    b"",
    b"POST /v1/comp",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900\r\n\r\n{",
)


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
    "F18",
    "600 clients send the beginning of a head or of a body and then nothing",
    "each is closed within 10 s and a sweep; others complete, their first tokens come as before within 2 x "
    "and 50 ms",
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
    return (
        f"closed after {took:.1f} s; p99 first token {1000 * p99(calls):.0f} ms, {1000 * before:.0f} ms "
        "before"
    )


@row(
    "F36",
    "more connections than the router has descriptors for, while streams run",
    "new ones are refused or wait; running streams complete, tokens equal; new requests are served 5 s later "
    "at most",
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


class SlowReaders:
    """Clients in a thread that read this many bytes a second, until `hurry` lets them read at once."""

    def __init__(self, scene: Scene, ask: Ask, count: int, bytes_per_s: int) -> None:
        body = ask.body(scene.cluster.model).replace(
            b'"return_token_ids"', b'"logprobs": 20, "return_token_ids"'
        )
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.data: dict[socket.socket, bytearray] = {}
        self._rate, self._hurry, self._stop = bytes_per_s, threading.Event(), threading.Event()
        for _ in range(count):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", scene.cluster.port("router")))
            sock.sendall(head + body)
            sock.setblocking(False)
            self.data[sock] = bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def num_done(self) -> int:
        return sum(data.endswith(b"0\r\n\r\n") for data in self.data.values())

    def hurry(self) -> None:
        self._hurry.set()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        for sock in self.data:
            sock.close()

    def _read(self) -> None:
        step_s = 0.25
        while not self._stop.is_set():
            is_slow = not self._hurry.wait(step_s)
            with selectors.DefaultSelector() as selector:
                for sock in self.data:
                    selector.register(sock, selectors.EVENT_READ)
                for key, _ in selector.select(0.1):
                    with contextlib.suppress(BlockingIOError):
                        self.data[key.fileobj] += key.fileobj.recv(
                            int(self._rate * step_s) if is_slow else 1 << 16
                        )


ROOMY = {"router": {"max-queue": "256", "queue-timeout-s": "60"}, "decode": {"kv-memory-mb": "128"}}
PER_STREAM = 256 << 10  # bytes: 64 KiB that are written ahead, and the tokens that come behind them


@row(
    "F17", "100 clients read their streams at 1 KB/s for 20 s",
    "router grows <= 256 KiB for each; the others' tokens equal, 99 % of their gaps <= 1.2 x and 20 ms of "
    "those beside 100 "
    "that read; then the slow ones finish, whole", flags=ROOMY,
)  # fmt: skip
def f17(scene: Scene) -> str:
    slow = Ask(prompt=(9,) * 20, max_tokens=280)
    scene.known([slow])
    others = scene.known(workload(117, 4, prompt=(30, 100), max_tokens=250))
    crowd = scene.traffic.start(*[slow] * 100)
    beside = scene.traffic.wait(scene.traffic.start(*others))
    scene.traffic.wait(crowd)
    router = psutil.Process(scene.cluster.nodes["router"].pid)
    before = router.memory_info().rss
    readers = SlowReaders(scene, slow, 100, 1000)
    try:
        calls = scene.traffic.start(*others)
        began, peak = time.monotonic(), 0
        while time.monotonic() < began + 20.0 or not all(call.ended for call in calls):
            peak = max(peak, router.memory_info().rss - before)
            time.sleep(0.1)
        scene.traffic.wait(calls)
        assert not readers.num_done, "that was not slow"
        assert peak <= 100 * PER_STREAM, f"the router grew by {peak >> 20} MB"
        readers.hurry()
        wait_until(
            lambda: readers.num_done == 100, 20, lambda: f"{readers.num_done} of 100 slow clients have all"
        )
    finally:
        readers.close()
    expected = scene.bed.references[slow.key]
    for data in readers.data.values():
        assert tokens_in(bytes(data)) == expected[: slow.max_tokens]
    normal, after = usual_gap(beside), usual_gap(calls)
    gaps = f"99 % of the others' gaps <= {1000 * after:.0f} ms, {1000 * normal:.0f} ms beside fast readers"
    assert after <= 1.2 * normal + 0.02, gaps
    size = sum(map(len, readers.data.values())) / 100
    return f"router +{peak / 2**20:.1f} MB of {size / 2**10:.0f} KiB each, {gaps}; 100 of 100 whole"


def tokens_in(data: bytes) -> list[int]:
    """Of a whole chunked answer of server-sent events, headers included."""
    rest, body = data.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    call = Call(Ask(prompt=(0,)), 0.0)
    for event in body.split(b"\n\n"):
        if event.startswith(b"data: "):
            take_event(call, event.removeprefix(b"data: "))
    assert call.terminals == ["finished"], call
    return call.ids
