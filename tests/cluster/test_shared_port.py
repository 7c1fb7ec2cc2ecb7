"""Several routers behind one port: each serves, and one that dies takes nothing of the others."""

import contextlib
import http.client
import os
import signal
import socket
import threading

import httpx
import pytest
from baton.cluster.protocol.messages import Reserve
from baton.tests.cluster.router_fakes import open_request, until
from baton.tests.cluster.serving import complete, random_ids, serving, status, wait_until


def routers(cluster):
    return [child for child in cluster.children if child.role == "router"]


def pid_at(url):
    return httpx.get(f"{url}/status").json()["router"]["pid"]


@pytest.mark.slow
def test_two_routers_share_port_and_workers_and_one_may_die(served_dir):
    with serving(served_dir, prefill=1, decode=1, kv_memory_mb=8, threads=1, routers=2) as cluster:
        pids = {child.pid for child in routers(cluster)}
        assert [pid_at(url) for url in cluster.own_urls] == [child.pid for child in routers(cluster)]
        seen = set()
        wait_until(lambda: seen.add(status(cluster)["router"]["pid"]) or seen == pids, 30, "both answer")
        prompt = random_ids(40, 330, seed=3)
        texts, documents = zip(*(complete(cluster, prompt, max_tokens=8) for _ in range(12)), strict=True)
        assert len(set(map(tuple, texts))) == 1
        for document in documents:
            told = [httpx.get(f"{url}/requests/{document['id']}").status_code for url in cluster.own_urls]
            assert sorted(told) == [200, 404], "one router has it, and says so"
        victim = routers(cluster)[1].pid
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: routers(cluster)[1].pid != victim, 30, "the death is seen")
        for _ in range(8):
            assert httpx.get(f"{cluster.url}/health", timeout=10).status_code == 200
        assert complete(cluster, prompt, max_tokens=8)[0] in texts
        wait_until(
            lambda: seen.add(status(cluster)["router"]["pid"]) or len(seen) == 3, 60, "another one answers"
        )
        assert [pid_at(url) for url in cluster.own_urls] == [child.pid for child in routers(cluster)], (
            "where it was before"
        )


def instance(client, url):
    answer = client.get(f"{url}/status")
    return answer.json()["router"]["instance"], answer.headers.get("connection", "")


class Listener:
    """A router's: nobody connects, under `gate`, between its last look for who waits and its end. The kernel
    would refuse who came within these microseconds, which are as long as the router's thread gets no core.
    """

    def __init__(self, listener, gate):
        self._listener, self._gate, self._is_last = listener, gate, False
        self.fileno, self.setblocking = listener.fileno, listener.setblocking

    def accept(self):
        try:
            return self._listener.accept()
        except BlockingIOError:
            if self._is_last:
                raise
            self._is_last = self._gate.acquire()
            return self._listener.accept()

    def close(self):
        self._listener.close()
        if self._is_last:
            self._is_last = False
            self._gate.release()


def ask_once(port, gate):
    """The status that a new connection gets."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        with gate:
            connection.connect()
        connection.request("GET", "/health")
        return connection.getresponse().status


def test_a_router_joins_a_shared_port_when_ready_and_leaves_it_cleanly(start, monkeypatch):
    monkeypatch.setattr("baton.router.app.HAND_OVER_S", 60.0)
    leaving, script = start(share_port=True)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", leaving.router.port)), "no pair, no listener"
    leaving.pair(script)
    until(lambda: _answers(leaving.url), "it listens")
    with httpx.Client() as kept:
        assert instance(kept, leaving.url) == (leaving.router.instance, "")
        staying, script = start(share_port=True, port=leaving.router.port)
        staying.pair(script)
        until(lambda: instance(httpx, leaving.url)[0] == staying.router.instance, "the other one listens too")
        statuses, is_over, gate = [], threading.Event(), threading.Lock()
        leaving.router._listeners.clients = Listener(leaving.router._listeners.clients, gate)

        def ask():
            while not is_over.is_set():
                statuses.append(ask_once(leaving.router.port, gate))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        leaving.begin_drain()
        until(lambda: leaving.router._listeners.clients.fileno() == -1, "its listener is closed")
        assert instance(kept, leaving.url) == (leaving.router.instance, "close"), (
            "a kept connection is served once more"
        )
        assert instance(kept, leaving.url) == (staying.router.instance, "")
        leaving.begin_stop()
        leaving.join()
        is_over.set()
        for thread in threads:
            thread.join()
    assert set(statuses) == {200}
    assert instance(httpx, leaving.url)[0] == staying.router.instance


def test_a_router_leaving_a_shared_port_announces_the_end_of_connections(start, monkeypatch):
    monkeypatch.setattr("baton.router.app.HAND_OVER_S", 60.0)
    leaving, script = start(share_port=True)
    _, decode = leaving.pair(script)
    until(lambda: _answers(leaving.url), "it listens")
    script.holds.set()
    streaming, whole = open_request(leaving, stream=True), open_request(leaving)
    reserves = until(lambda: found if len(found := decode.of(Reserve)) == 2 else None, "both run")
    stream = streaming.getresponse()  # its head comes with prefill's token
    leaving.begin_drain()
    until(lambda: leaving.router._listeners.clients.fileno() == -1, "its listener is closed")
    for reserve in reserves:
        script.stream(decode, reserve)
    answer = whole.getresponse()
    assert (answer.status, answer.headers["connection"]) == (200, "close"), "said while it still could be"
    assert stream.headers["connection"] is None
    assert stream.read().endswith(b"data: [DONE]\n\n")
    streaming.request("GET", "/health")
    answer = streaming.getresponse()
    assert (answer.status, answer.headers["connection"]) == (200, "close"), (
        "too late to say it: one request more"
    )
    streaming.close()
    whole.close()
    leaving.begin_stop()
    leaving.join()


def _answers(url):
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.ConnectError:
        return False
