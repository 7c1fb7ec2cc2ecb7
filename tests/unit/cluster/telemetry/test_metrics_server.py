"""A worker's own /metrics over real HTTP."""

import http.client
import http.server
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest
from baton.cluster.config.roles import DecodeConfig
from baton.cluster.errors import ConfigError, StartupError
from baton.cluster.process.process import Shutdown
from baton.cluster.protocol.messages import Heartbeat, WorkerStats
from baton.cluster.telemetry import metrics_server
from baton.cluster.telemetry.metrics_server import MetricsServer, serve_metrics
from baton.tests.cluster.hostile import MIB, hostile_frames
from baton.tests.corpora import corpus
from baton.tests.ports import free_port
from baton.tests.unit.cluster.telemetry.test_metrics import FACTS, INSTANCE, MODEL, samples, value
from baton.tests.unit.worker.test_main_loop import FakeLink, FakeWorker
from baton.worker.main_loop import WorkerLoop

WHO = {"role": "decode", "worker": INSTANCE}
SETTINGS = {"role": "decode", "instance": INSTANCE, "model": MODEL, "trusted_network": False}


@pytest.fixture(scope="module")
def server():
    server = MetricsServer("127.0.0.1", 0, **SETTINGS)
    server.start()
    yield server
    server.close()


def get(server, path="/metrics", method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, path)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, body


def test_a_scrape_shows_the_latest_figures_of_the_loop(server):
    server.tell(WorkerStats(state="draining", pages_free=7, counters={"tokens": 3.0}))
    status, body = get(server)
    assert status == 200
    found = samples(body)
    assert value(found, "baton_worker_up", state="draining", **WHO) == 1
    assert value(found, "baton_worker_pages", kind="free", **WHO) == 7
    assert value(found, "baton_worker_events_total", event="tokens", **WHO) == 3
    assert any(name == "process_resident_memory_bytes" for name, _ in found)


def test_liveness_and_readiness_answer_differently():
    clock = [100.0]
    server = MetricsServer("127.0.0.1", 0, **SETTINGS, clock=lambda: clock[0])
    server.start()

    def probes():
        return [get(server, path)[0] for path in ("/health", "/ready")]

    try:
        clock[0] += 1000
        assert probes() == [200, 503]  # weights may take long to load
        server.tell(WorkerStats(state="serving"))
        assert probes() == [200, 200]
        server.tell(WorkerStats(state="draining"))
        assert probes() == [200, 503]
        server.tell(WorkerStats(state="serving"))
        clock[0] += 11
        assert probes() == [503, 503]
    finally:
        server.close()


def test_nothing_else_is_served(server):
    assert get(server, "/")[0] == 404
    assert get(server, "/metrics", "POST")[0] == 501


def test_a_silent_client_delays_the_next_for_a_bounded_time(server, monkeypatch):
    monkeypatch.setattr(metrics_server, "SCRAPE_TIMEOUT_S", 0.5)
    with socket.create_connection(("127.0.0.1", server.port)):
        assert get(server)[0] == 200


def test_a_trickling_client_delays_the_next_for_a_bounded_time(server, monkeypatch):
    begun = threading.Event()

    def tell(handler):
        begun.set()
        http.server.BaseHTTPRequestHandler.handle_one_request(handler)

    monkeypatch.setattr(metrics_server._Handler, "handle_one_request", tell, raising=False)
    monkeypatch.setattr(metrics_server, "SCRAPE_TIMEOUT_S", 0.3)
    slow = socket.create_connection(("127.0.0.1", server.port))
    with slow, ThreadPoolExecutor(1) as others, suppress(ConnectionError):
        slow.sendall(b"GET /")
        assert begun.wait(60)
        monkeypatch.setattr(
            metrics_server, "SCRAPE_TIMEOUT_S", 60.0
        )  # of the next one, whose thread may get no core
        scrape = others.submit(get, server)
        while not scrape.done():
            slow.sendall(b"x")
            time.sleep(0.05)
    assert scrape.result()[0] == 200


def test_s2_s29_hostile_bytes_leave_it_serving_and_small(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = [corpus.data(case) for case in (*corpus.load("zmtp_raw"), *corpus.http_requests())]
    hostile = [*hostile_frames(), *raw]
    process = psutil.Process()
    assert get(server)[0] == 200
    num_threads, resident = process.num_threads(), process.memory_info().rss
    for data in hostile:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger, suppress(OSError):
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):  # until it is done with this one: five connections wait at most
                pass
    assert get(server)[0] == 200
    assert process.memory_info().rss - resident <= 20 * MIB
    assert process.num_threads() <= num_threads + 1, "nobody is waited for"
    assert list(tmp_path.iterdir()) == [], "nobody loaded a pickle"


def test_a_port_in_use_and_an_open_address_are_refused_with_the_remedy(server):
    with pytest.raises(StartupError, match="choose another --metrics-port"):
        MetricsServer("127.0.0.1", server.port, **SETTINGS)
    with pytest.raises(ConfigError, match="--trusted-network"):
        MetricsServer("0.0.0.0", 0, **SETTINGS)


def test_a_requested_metrics_port_serves_the_figures_of_heartbeats():
    port = free_port()
    assert serve_metrics(DecodeConfig(model="m"), INSTANCE) is None
    server = serve_metrics(DecodeConfig(model="org/m", metrics_port=port), INSTANCE)
    server.describe(FACTS)
    clock, link = [100.0], FakeLink()
    worker = FakeWorker(clock)
    worker.stats = lambda: WorkerStats(pages_total=41)
    WorkerLoop(worker, link, Shutdown(), drain_timeout_s=1.0, clock=lambda: clock[0], tell=server.tell).beat()
    assert [type(message) for message in link.posted] == [Heartbeat]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        body = reply.read()
    server.close()
    assert value(samples(body), "baton_worker_pages", kind="total", **WHO) == 41
    assert b'model_name="m"' in body, "the name in the API, as a router has it"
    assert b'card="3: H200"' in body
