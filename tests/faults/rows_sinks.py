"""Rows in which the receivers of telemetry fail: collectors of traces, scrapers of metrics."""

import contextlib
import signal
import socket
import threading
import time

from baton.tests.faults.cluster import wait_until
from baton.tests.faults.rows import row
from baton.tests.faults.rows_clients import usual_gap
from baton.tests.faults.rows_drain import DRAINED
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import Ask, workload

ENDS_S = 6.0  # a process without rooms, told to


class BlackHole:
    """A collector that takes connections and never says a word."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._taken: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        for taken in self._taken:
            taken.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._taken.append(self._listener.accept()[0])


@contextlib.contextmanager
def deaf_scrapers(scene: Scene, count: int):
    """So many connections that ask for /metrics again and again and read nothing of it."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            sock = socket.socket()
            stack.enter_context(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", scene.cluster.port("router")))
            sock.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 8)
        yield


def dropped(scene: Scene) -> dict[str, float]:
    """Spans that the router and the workers say that they lost."""
    status = scene.cluster.status()
    found = {f"{w['role']} {w['pid']}": w["counters"].get("spans_dropped", 0) for w in status["workers"]}
    return {**found, "router": status["router"].get("events", {}).get("spans_dropped", 0)}


def least_gap(scene: Scene, asks: list[Ask]) -> float:
    """The usual gap of streams beside whatever else runs on this machine: the least of three."""
    return min(usual_gap(scene.traffic.wait(scene.traffic.start(*asks))) for _ in range(3))


@row(
    "F56", "the collector of traces takes connections and never answers, 20 scrapers of metrics never read",
    "99 % of the gaps in streams <= 1.2 x and 20 ms of those without; what is lost is counted; a process "
    "that is told to end does so within 6 s",
)  # fmt: skip
def f56(scene: Scene) -> str:
    asks = scene.known(workload(156, 6, prompt=(30, 100), max_tokens=300))
    normal = least_gap(scene, asks)
    hole = BlackHole()
    try:
        endpoint = f"http://127.0.0.1:{hole.port}"
        for node in scene.cluster.nodes.values():
            scene.victims.add(node.name)
            node.flags["otlp-endpoint"] = endpoint
            node.env |= {"OTEL_EXPORTER_OTLP_TIMEOUT": "2", "OTEL_BSP_SCHEDULE_DELAY": "100"}
        for name in scene.cluster.nodes:
            scene.cluster.restart(name)
        scene.cluster.wait_whole(30)
        scene.rebase(*scene.cluster.nodes)
        scene.traffic.run(asks, width=6)
        with deaf_scrapers(scene, 20):
            after = least_gap(scene, asks)
        wait_until(
            lambda: min(dropped(scene).values()) > 0, 20, lambda: f"losses are counted: {dropped(scene)}"
        )
        lost = dropped(scene)
        took = {}
        for name in ("decode-0", "prefill-0", "router"):
            began = time.monotonic()
            scene.cluster.signal(name, signal.SIGTERM)
            assert scene.cluster.wait_down(name, ENDS_S) == DRAINED
            took[name] = time.monotonic() - began
    finally:
        hole.close()
    for node in scene.cluster.nodes.values():
        node.flags.pop("otlp-endpoint")
        if node.is_up:
            scene.cluster.restart(node.name)
    scene.cluster.heal()
    scene.rebase(*scene.cluster.nodes)
    gaps = f"99 % of the gaps <= {1000 * after:.0f} ms, {1000 * normal:.0f} ms without"
    assert after <= 1.2 * normal + 0.02, gaps
    ends = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in took.items())
    return (
        f"{gaps}; {hole.num_taken} connections, {sum(lost.values()):g} spans lost and counted; ends: {ends}"
    )
