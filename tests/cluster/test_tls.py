"""HTTP over TLS: admission of clients, and the change to a new certificate."""

import json
import socket
import ssl

import httpx
import pytest
from baton.deploy.cli import chat, doctor, top
from baton.deploy.cli.findings import OK, WARN
from baton.deploy.keys.api_keys import add
from baton.deploy.packaging import alive
from baton.tests.cluster.certificates import DAY, Authority, pem
from baton.tests.cluster.router_fakes import BODY, until
from baton.tests.meta.kubernetes.secret_volume import SecretVolume


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture
def trusting(authority):
    made = ssl.create_default_context()
    made.load_verify_locations(cadata=pem(authority.certificate).decode())
    return made


@pytest.fixture
def files(tmp_path, authority):
    paths = tmp_path / "cert.pem", tmp_path / "key.pem"
    authority.write(*paths, "first")
    return paths


@pytest.fixture
def secured(start, files):
    """secured(**settings) -> (a router, its script)"""

    def make(**settings):
        return start(tls_cert=str(files[0]), tls_key=str(files[1]), **settings)

    return make


def connected(running):
    return socket.create_connection(("127.0.0.1", running.router.port))


def name_offered(running, trusting, **named):
    with (
        connected(running) as connection,
        trusting.wrap_socket(connection, server_hostname="127.0.0.1") as inside,
    ):
        assert inside.version() in ("TLSv1.2", "TLSv1.3")
        return dict(pair[0] for pair in inside.getpeercert()["subject"])["commonName"]


def is_healthy(inside):
    inside.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    return inside.recv(1000).startswith(b"HTTP/1.1 200 ")


def is_cut(client):
    client.settimeout(30)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_with_a_certificate_plain_http_is_told_to_use_tls(secured, trusting, capsys):
    running, script = secured()
    running.pair(script)
    assert running.url.startswith("https://")
    with httpx.Client(verify=trusting, base_url=running.url) as client:
        assert client.get("/ready").status_code == 200
        with client.stream("POST", "/v1/chat/completions", json=BODY | {"stream": True}) as response:
            events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
        assert events[-1]["choices"][0]["finish_reason"]
    plain = running.url.replace("https", "http")
    answer = httpx.get(f"{plain}/health")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "tls_wanted")
    with connected(running) as client:
        client.sendall(b"\x16\x03\x01\x00\x05hello")
        assert is_cut(client)
    until(lambda: running.router.dispatcher.event_totals.get("tls_failed") == 2, "both are counted")
    assert alive.main([f"{running.url}/health"]) == 0
    assert running.router._server._tls_listener.num_failed == 2, "a health check of https:// is no failure"
    assert alive.main([f"{plain}/health"]) == 0, "the image's health check asks over TLS then"
    assert capsys.readouterr().out.count(": 200 ") == 2


def test_new_connections_get_a_new_certificate_and_old_ones_stay(secured, files, authority, trusting):
    running, script = secured()
    running.pair(script)
    with (
        connected(running) as connection,
        trusting.wrap_socket(connection, server_hostname="127.0.0.1") as kept,
    ):
        assert is_healthy(kept)
        authority.write(*files, "second")
        until(lambda: name_offered(running, trusting) == "second", "the new one is offered")
        assert is_healthy(kept)


def test_a_router_follows_the_secret_that_its_pod_mounts(start, authority, trusting, tmp_path):
    volume = SecretVolume(tmp_path / "tls")

    def renew(name):
        certificate, key = authority.issue(name)
        volume.write({"tls.crt": pem(certificate), "tls.key": pem(key)})

    renew("first")
    running, _ = start(tls_cert=f"{volume.path}/tls.crt", tls_key=f"{volume.path}/tls.key")
    assert name_offered(running, trusting) == "first"
    renew("second")
    until(lambda: name_offered(running, trusting) == "second", "the new one is offered")


COMMANDS = {
    "chat": lambda url: chat.main([f"--url={url}", "--once=hello"]),
    "doctor": lambda url: doctor.main([f"--url={url}"]),
    "top": lambda url: top.main([f"--url={url}", "--once"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_refused_names_the_remedy(name, secured, authority, tmp_path, capsys, monkeypatch):
    add(tmp_path / "api.json", {"name": "alice"})
    (tmp_path / "ca.pem").write_bytes(pem(authority.certificate))
    running, _ = secured(api_keys=str(tmp_path / "api.json"))
    remedies = {
        "write https://": running.url.replace("https", "http"),
        "SSL_CERT_FILE": running.url,
        "BATON_API_KEY": running.url,
    }
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    for remedy, url in remedies.items():
        assert COMMANDS[name](url) == 1
        said = "".join(capsys.readouterr())
        assert {other for other in remedies if other in said} == {remedy}, said
        if remedy == "SSL_CERT_FILE":
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))


HELLO = b"\x16\x03\x01\x02\x00"  # the beginning of one of 512 bytes


@pytest.mark.parametrize(("ends_in", "level"), [(2 * DAY, WARN), (30 * DAY, OK)])
def test_the_doctor_tells_when_a_router_s_certificate_ends(
    secured, authority, files, tmp_path, monkeypatch, capsys, ends_in, level
):
    authority.write(*files, ends_in=ends_in)
    (tmp_path / "ca.pem").write_bytes(pem(authority.certificate))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    running, script = secured()
    running.pair(script)
    doctor.main([f"--url={running.url}", "--json"])
    (told,) = (finding for finding in json.loads(capsys.readouterr().out) if finding["check"] == "tls")
    assert (told["level"], bool(told["remedy"])) == (level, level != OK)
    assert f"{ends_in.days - 1}.9 days" in told["text"] or f"{ends_in.days}.0 days" in told["text"]


def test_an_unfinished_handshake_counts_as_a_connection_and_is_cut(secured, trusting, monkeypatch):
    monkeypatch.setattr("baton.router.http.server.HEAD_TIMEOUT_S", 600.0)
    monkeypatch.setattr("baton.router.http.server.SPARE_IN_HANDSHAKE", 4)
    running, _ = secured(max_connections=16)
    tls_listener = running.router._server._tls_listener
    clients = [connected(running) for _ in range(20)]
    for client in clients[::2]:
        client.sendall(HELLO)
    until(
        lambda: (len(tls_listener._silent), len(tls_listener._handshakes)) == (10, 10),
        "all 20 are in a handshake",
    )
    with connected(running) as beyond:
        assert is_cut(beyond)
        assert len(tls_listener) == 20, "and nobody else yet"
    for client in clients[::2]:
        client.close()
    until(lambda: len(tls_listener) == 10, "they left")
    tls_listener._patience_s = 0.3  # of who comes from now on
    clients[::2] = [connected(running), connected(running)] * 5
    for client in clients[:4:2]:
        client.sendall(HELLO)
    clock = tls_listener._clock
    tls_listener._clock = lambda: clock() + 600.0
    assert all(is_cut(client) for client in clients)
    until(lambda: len(tls_listener) == 0, "the tls_listener is empty")
    assert name_offered(running, trusting) == "first"
    for client in clients:
        client.close()


@pytest.mark.slow
def test_a_connection_waiting_at_a_shared_port_survives_a_leaving_router(secured, trusting, monkeypatch):
    monkeypatch.setattr("baton.router.app.HAND_OVER_S", 0.4)
    running, script = secured(share_port=True)
    running.pair(script)
    until(lambda: running.router._server._tls_listener._listener is not None, "it listens")
    with connected(running) as waiting:
        running.begin_drain()
        until(lambda: running.router._listeners.clients.fileno() == -1, "its listener is closed")
        with trusting.wrap_socket(waiting, server_hostname="127.0.0.1") as inside:
            assert is_healthy(inside)
    running.join()
