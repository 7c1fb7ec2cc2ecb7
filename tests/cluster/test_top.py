"""`baton top` against a real router, and what it says when there is none."""

import http.server
import io
import json
import socket
import threading
from dataclasses import replace

import pytest
from baton.cluster.errors import ConfigError
from baton.cluster.protocol.messages import WorkerStats
from baton.deploy.cli import top
from baton.deploy.cli.client import KEY_VARIABLE
from baton.deploy.cli.top import Look, Rates, clients_of, main, render
from baton.deploy.keys.api_keys import add
from baton.tests.cluster.router_fakes import post, until
from msgspec import structs
from rich.console import Console

TENANT_S = {"url": "", "fault": "", "status": None, "requests": []}


@pytest.fixture
def running(start):
    running, script = start()
    _, decode = running.pair(script, card="1: NVIDIA H200")
    decode.stats = WorkerStats(pages_total=64, pages_free=40, accept_length=2.31, counters={"tokens": 7.0})
    assert post(running).status_code == 200
    until(lambda: looked(running).requests.requests[0].outcome == "ok", "the request ended")
    until(
        lambda: any(worker.accept_length for worker in looked(running).status.workers), "a heartbeat says so"
    )
    return running


def looked(running):
    [client] = clients_of(running.url)
    return top.look(client, 12)


@pytest.fixture
def free_url():
    """Where nobody listens, and nobody else can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def text_of(looks, rates=None, width=140):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(looks, rates or Rates()))
    return console.export_text()


def test_once_prints_workers_and_requests_of_every_router(running, capsys):
    assert main(["--url", f"{running.url},{running.url}/", "--once"]) == 0
    out = capsys.readouterr().out
    assert out.count("tiny at ") == 1, "one router, named twice"
    text = out
    decode = next(line for line in text.splitlines() if line.startswith("decode"))
    assert decode.split()[1:4] == [running.workers[1].instance[:8], "serving", "0"]
    assert "24/64" in decode
    assert "2.31" in decode
    assert decode.endswith("1: NVIDIA H200")
    request = next(line for line in text.splitlines() if " ok " in line)
    assert "4 KiB" in request
    assert f"{running.workers[0].instance[:8]} > {running.workers[1].instance[:8]}" in request
    assert "wörld" not in text


def test_json_is_one_document_that_scripts_read(running, free_url, capsys):
    assert main(["--url", f"{running.url},{free_url}", "--once", "--json"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    there, gone = json.loads(line)["routers"]
    assert {worker["role"] for worker in there["status"]["workers"]} == {"prefill", "decode"}
    assert (there["requests"][0]["outcome"], there["fault"]) == ("ok", "")
    assert (gone["status"], gone["requests"]) == (None, None)
    assert "nothing listens" in gone["fault"]


@pytest.mark.parametrize("flags", [["--once"], ["--once", "--json"], []])
def test_without_a_router_it_ends_with_one_line(flags, free_url, capsys):
    assert main(["--url", free_url, *flags]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("baton top: nothing listens at http://127.0.0.1:")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b'{"router": 1, "workers": 2}', b"no", b'{"router": {}, "workers": [{}]}']
)
def test_a_server_that_is_not_a_router_is_one_line(body, capsys):
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        assert main(["--url", f"http://127.0.0.1:{server.server_address[1]}", "--once"]) == 1
    finally:
        server.shutdown()
        server.server_close()
    assert capsys.readouterr().err.count("\n") == 1


def test_the_key_of_the_environment_is_sent_to_the_router(start, tmp_path, capsys, monkeypatch):
    path = tmp_path / "api.json"
    key = add(path, {"name": "eve", "operator": True})[0]
    running, script = start(api_keys=str(path))
    running.pair(script)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert main(["--url", running.url, "--once"]) == 1
    assert capsys.readouterr().err.endswith(f"put one into the environment variable {KEY_VARIABLE}\n")
    monkeypatch.setenv(KEY_VARIABLE, key)
    assert main(["--url", running.url, "--once"]) == 0
    monkeypatch.setenv(KEY_VARIABLE, add(path, {"name": "bob"})[0])

    until(lambda: main(["--url", running.url, "--once"]) == 0, "a tenant's key is known")
    assert "this key shows its own requests" in capsys.readouterr().out.replace("\n", " ")
    assert main(["--url", running.url, "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["routers"][0] | {"url": ""} == TENANT_S
    assert main(["--url", running.url, "--once", "--requests", "0"]) == 1
    assert "takes an operator's or an observer's key" in capsys.readouterr().err
    monkeypatch.setenv(KEY_VARIABLE, "bk-\n")
    assert main(["--url", running.url, "--once"]) == 2


def test_a_watched_router_that_leaves_is_reported_and_others_stay(running):
    text = text_of([Look(url="http://gone:1", fault="nobody there"), looked(running)])
    assert text.startswith("http://gone:1: nobody there")
    assert "tiny at " in text


def test_the_display_refreshes_until_interrupted(running, capsys, monkeypatch):
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", pause)
    assert main(["--url", running.url, "--every", "0.5", "--json"]) == 0
    assert pauses == [0.5] * 3
    assert len(capsys.readouterr().out.strip().splitlines()) == 3


def test_a_rate_covers_the_last_seconds_and_restarts_with_the_process():
    rates = Rates()
    found = [
        rates.of("x", total, now)
        for now, total in ((0.0, 10.0), (1.0, 30.0), (4.0, 90.0), (9.0, 90.0), (10.0, 5.0))
    ]
    assert found == [None, 20.0, 20.0, 0.0, None]


def test_routers_sharing_a_worker_compute_rates_from_their_own_heartbeats(running):
    seen, rates = looked(running), Rates()

    def look_at(url, at, tokens):
        workers = [structs.replace(worker, counters={"tokens": tokens}) for worker in seen.status.workers]
        return replace(seen, url=url, at=at, status=structs.replace(seen.status, workers=workers))

    text_of([look_at("http://a:1", 0.0, 1000.0), look_at("http://b:1", 0.0, 900.0)], rates)
    text = text_of([look_at("http://a:1", 1.0, 1200.0), look_at("http://b:1", 1.0, 1150.0)], rates)
    decodes = [line.split() for line in text.splitlines() if line.startswith("decode")]
    assert [line[7] for line in decodes] == ["200", "250"]


def test_addresses_that_name_no_router_are_refused():
    for urls in ("", ",", "nowhere", "http://a b"):
        with pytest.raises(ConfigError):
            clients_of(urls)
