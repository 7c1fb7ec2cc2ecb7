"""A router's own port: routers behind a shared port are scraped and watched one by one, even in a drain."""

import contextlib
import os
import resource
import socket
import ssl
import subprocess
import sys

import httpx
import pytest
from baton.cluster.config.roles import RouterConfig
from baton.cluster.errors import ConfigError, StartupError
from baton.cluster.protocol.messages import Reserve
from baton.deploy.cli import top
from baton.deploy.keys.api_keys import add
from baton.router.http import server
from baton.router.http.listeners import open_listeners
from baton.router.http.server import (
    OWN_CONNECTIONS,
    PROBE_CONNECTIONS,
    SPARE_DESCRIPTORS,
    SPARE_IN_HANDSHAKE,
    connections_allowed,
)
from baton.tests.cluster.certificates import Authority, pem
from baton.tests.cluster.router_fakes import BODY, assert_nothing_left, open_request, until
from baton.tests.ports import free_port
from prometheus_client.parser import text_string_to_metric_families

OK = ("baton_requests_total", "ok")
ANSWERED = ("baton_http_responses_total", "200")


@pytest.fixture
def start_own(start):
    """start_own(**settings) -> (a router with a port of its own, its script)"""
    return lambda **settings: start(own_port=free_port(), **settings)


def own(running):
    return running.router.own_url


def ask(url, **client):
    return httpx.post(f"{url}/v1/chat/completions", json=BODY, **client)


def count(running, series):
    """A counter of its /metrics with one label."""
    name, label = series
    families = text_string_to_metric_families(httpx.get(f"{own(running)}/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name and label in sample.labels.values())


def test_each_router_behind_a_shared_port_reports_itself_at_its_own_port(start_own, capsys):
    one, script = start_own(share_port=True)
    assert httpx.get(f"{own(one)}/health").status_code == 200, "before a pair has shown itself"
    assert httpx.get(f"{own(one)}/ready").status_code == 503
    one.pair(script)
    two, script = start_own(share_port=True, port=one.router.port)
    two.pair(script)
    assert [httpx.get(f"{own(router)}/status").json()["router"]["instance"] for router in (one, two)] == [
        one.router.instance, two.router.instance
    ]  # fmt: skip
    answered = ask(own(two)).json()["id"]
    assert [httpx.get(f"{own(router)}/requests/{answered}").status_code for router in (one, two)] == [
        404,
        200,
    ]
    assert [count(router, OK) for router in (one, two)] == [0, 1]
    seen = set()
    until(
        lambda: seen.add(httpx.get(f"{one.url}/status").json()["router"]["instance"]) or len(seen) == 2,
        "both answer",
    )
    answered = [ask(one.url).json()["id"] for _ in range(8)]
    found = [
        [httpx.get(f"{own(router)}/requests/{id}").status_code for router in (one, two)] for id in answered
    ]
    assert all(sorted(statuses) == [200, 404] for statuses in found)
    of_each = [[statuses[i] for statuses in found].count(200) for i in (0, 1)]
    assert [count(one, OK), count(two, OK)] == [of_each[0], of_each[1] + 1]
    assert top.main([f"--url={own(one)},{own(two)}", "--once"]) == 0
    shown = capsys.readouterr().out
    assert all(f"at {own(router)} " in shown for router in (one, two))


def test_answers_of_both_ports_are_counted_together(start_own):
    running, script = start_own()
    running.pair(script)
    before = count(running, ANSWERED)
    assert (ask(running.url).status_code, ask(own(running)).status_code) == (200, 200)
    assert count(running, ANSWERED) == before + 3, "and the scrape before"


def test_a_router_that_drains_is_watched_at_its_own_port_to_the_end(start_own):
    running, script = start_own(share_port=True)
    _, decode = running.pair(script)
    until(lambda: _connects(running.router.port), "it listens")
    script.holds.set()
    with contextlib.closing(open_request(running)) as held, httpx.Client(base_url=own(running)) as watcher:
        (reserve,) = until(lambda: decode.of(Reserve), "it runs")
        assert watcher.get("/ready").status_code == 200
        running.begin_drain()
        until(lambda: watcher.get("/ready").status_code == 503, "it drains")
        assert not _connects(running.router.port), "clients go to others"
        shown = watcher.get("/status")
        assert (shown.json()["router"]["state"], shown.headers.get("connection")) == ("draining", None)
        assert httpx.get(f"{own(running)}/health").status_code == 200, "and new watchers come in"
        assert ask(own(running)).status_code == 503
        script.stream(decode, reserve)
        assert held.getresponse().status == 200
        running.join()
    assert not _connects(running.router._config.own_port)


def test_the_own_port_has_the_certificate_and_asks_for_keys(start_own, tmp_path):
    authority = Authority()
    authority.write(tmp_path / "cert.pem", tmp_path / "key.pem")
    trusting = ssl.create_default_context(cadata=pem(authority.certificate).decode())
    scraper = {
        "authorization": f"Bearer {add(tmp_path / 'api.json', {'name': 'scraper', 'observer': True})[0]}"
    }
    tenant = {"authorization": f"Bearer {add(tmp_path / 'api.json', {'name': 'alice'})[0]}"}
    running, script = start_own(
        api_keys=str(tmp_path / "api.json"),
        tls_cert=str(tmp_path / "cert.pem"),
        tls_key=str(tmp_path / "key.pem"),
    )
    running.pair(script)
    assert own(running).startswith("https://")
    answer = httpx.get(f"{own(running).replace('https', 'http')}/metrics")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "tls_wanted")
    until(lambda: running.router.dispatcher.event_totals.get("tls_failed") == 1, "it is counted")
    with httpx.Client(verify=trusting, base_url=own(running)) as client:
        assert [client.get(path).status_code for path in ("/health", "/", "/metrics", "/status")] == [
            200,
            200,
            401,
            401,
        ]
        assert [client.get("/metrics", headers=key).status_code for key in (tenant, scraper)] == [403, 200]
        assert client.post("/v1/chat/completions", json=BODY, headers=tenant).status_code == 200


def test_clients_take_no_connection_of_the_own_port_and_it_has_a_bound_too(start_own, monkeypatch):
    monkeypatch.setattr("baton.router.app.OWN_CONNECTIONS", 2)
    running, _ = start_own(max_connections=3)
    with contextlib.ExitStack() as stack:
        for num, url in ((3, running.url), (2, own(running))):
            assert httpx.get(f"{own(running)}/health").status_code == 200
            clients = [stack.enter_context(httpx.Client(base_url=url)) for _ in range(num)]
            assert {client.get("/health").status_code for client in clients} == {200}
            assert httpx.get(f"{url}/health").status_code == 503


def test_bodies_at_both_ports_have_one_bound(start_own, monkeypatch):
    monkeypatch.setattr(server, "MAX_BUFFERED", 1 << 20)
    running, script = start_own()
    running.pair(script)
    with socket.create_connection(("127.0.0.1", running.router.port)) as client:
        client.sendall(
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900000\r\n\r\n" + b"x" * 700_000
        )
        until(
            lambda: running.call(lambda: running.router._server._counts.num_buffered) == 700_000,
            "it is there",
        )
        large = httpx.post(f"{own(running)}/tokenize", content=b"x" * 700_000)
        assert (large.status_code, large.json()["error"]["code"]) == (503, "too_many_bodies")
        assert ask(own(running)).status_code == 200
    assert_nothing_left(running)


def test_descriptors_of_the_own_port_are_kept_free(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    assert connections_allowed() == 1024 - SPARE_DESCRIPTORS
    assert (
        connections_allowed(has_own_port=True)
        == 1024 - SPARE_DESCRIPTORS - OWN_CONNECTIONS - SPARE_IN_HANDSHAKE
    )
    assert connections_allowed(has_probe_port=True) == 1024 - SPARE_DESCRIPTORS - PROBE_CONNECTIONS
    assert connections_allowed(100, has_own_port=True) == 100


def test_an_own_port_is_exclusive_and_loopback_unless_trusted():
    port = free_port()
    config = RouterConfig(model="m", port=0, own_port=port, share_port=True)
    listeners = open_listeners(config, trusted_network=False)
    try:
        with pytest.raises(
            StartupError, match=rf"127\.0\.0\.1 port {port}: .* in use.*; choose another --own-port$"
        ):
            open_listeners(config, trusted_network=False)
        with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
            open_listeners(RouterConfig(model="m", host="0.0.0.0", own_port=port), trusted_network=False)
    finally:
        listeners.close()


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (
            ["--port=8123", "--own-port=8123"],
            2,
            "--own-port 8123 is the --port of the clients; choose another --own-port",
        ),
        (["--own-port=70000"], 2, "--own-port: 70000 is above the largest allowed, 65535"),
        (["--own-port=x"], 2, "--own-port: 'x' is not a whole number"),
        (["--own-port={taken}"], 1, "cannot listen on 127.0.0.1 port {taken}: Address already in use"),
    ],
    ids=["the port of the clients", "no port", "no number", "taken"],
)
def test_an_invalid_own_port_is_one_line(flags, code, words, model_dir, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-P", "-m", "baton.router", f"--model={model_dir}", "--port=0"]
        command += [f"--control-bind=ipc://{tmp_path}/c", *(flag.format(taken=port) for flag in flags)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=os.environ, cwd="/", check=False
        )
    said = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert (done.returncode, len(said)) == (code, 1), done.stderr
    assert said[0].startswith(f"baton router: {words.format(taken=port)}")
    assert "--own-port" in said[0]


def _connects(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
