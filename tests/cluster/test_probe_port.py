"""The port of probes: it answers /health and /ready also when the clients' port is full, and nothing else."""

import contextlib
import socket
import ssl

import httpx
from baton.cluster.protocol.messages import Reserve
from baton.deploy.keys.api_keys import add
from baton.tests.cluster.certificates import Authority
from baton.tests.cluster.router_fakes import open_request, until
from baton.tests.ports import free_port


def probed(start, **settings):
    """A router with a port of probes, its script, and the URL of the port."""
    port = free_port()
    running, script = start(probe_port=port, **settings)
    return running, script, f"http://127.0.0.1:{port}"


def test_a_router_full_of_connections_answers_its_probes(start):
    running, script, url = probed(start, max_connections=2)
    running.pair(script)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            client = stack.enter_context(httpx.Client(base_url=running.url))
            assert client.get("/health").status_code == 200
        assert httpx.get(f"{running.url}/health").status_code == 503
        assert [httpx.get(f"{url}{path}").status_code for path in ("/health", "/ready")] == [200, 200]


def test_silent_connections_at_the_port_of_probes_shut_nobody_out(start):
    _, _, url = probed(start)
    port = int(url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(40)]
        assert httpx.get(f"{url}/health").status_code == 200
        silent[0].settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert silent[0].recv(1) == b"", "the oldest has been closed"


def test_probes_follow_the_router_to_its_end(start):
    running, script, url = probed(start)
    assert httpx.get(f"{url}/ready").status_code == 503
    _, decode = running.pair(script)
    assert httpx.get(f"{url}/ready").json() == {"status": "ready", "serving": {"prefill": 1, "decode": 1}}
    script.holds.set()
    with contextlib.closing(open_request(running)) as held:
        (reserve,) = until(lambda: decode.of(Reserve), "it runs")
        running.begin_drain()
        until(lambda: httpx.get(f"{url}/ready").status_code == 503, "it drains")
        assert httpx.get(f"{url}/health").status_code == 200
        script.stream(decode, reserve)
        assert held.getresponse().status == 200
        running.join()


def test_probes_need_no_key_and_no_tls_and_nothing_else_is_served(start, tmp_path):
    Authority().write(tmp_path / "cert.pem", tmp_path / "key.pem")
    add(tmp_path / "api.json", {"name": "alice"})
    running, _, url = probed(
        start,
        api_keys=str(tmp_path / "api.json"),
        tls_cert=str(tmp_path / "cert.pem"),
        tls_key=str(tmp_path / "key.pem"),
    )
    assert httpx.get(f"{url}/health").status_code == 200
    for path in ("/", "/status", "/metrics", "/v1/models", "/requests", "/docs"):
        assert httpx.get(f"{url}{path}").status_code == 404, path
    assert httpx.post(f"{url}/drafts", content=b"{}").status_code == 413, "no body is read"
    assert httpx.request("POST", f"{url}/health").status_code == 405
    with httpx.Client(verify=ssl._create_unverified_context()) as client:
        counted = running.call(lambda: dict(running.router._service.responses))
        assert client.get(f"{running.url}/health").status_code == 200
    assert counted == {}, "probes are no answers to clients"


def test_probes_may_come_from_other_hosts_without_a_trusted_network(start):
    running, _, url = probed(start, probe_host="0.0.0.0")
    assert httpx.get(f"{url}/health").status_code == 200
    assert running.url.startswith("http://127.0.0.1")
