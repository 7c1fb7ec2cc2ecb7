"""`baton top` against a real router, and what it says when there is none."""

import fcntl
import http.server
import io
import json
import os
import pty
import re
import select
import socket
import struct
import subprocess
import sys
import termios
import threading
from dataclasses import replace

import pytest
from baton.cluster.errors import ConfigError
from baton.cluster.protocol.messages import WorkerStats
from baton.deploy.cli import top, top_view
from baton.deploy.cli.client import KEY_VARIABLE
from baton.deploy.cli.top import clients_of, main
from baton.deploy.cli.top_view import Look, Rates, View, render
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
    console.print(render(looks, rates or Rates(), View(width=width)))
    return console.export_text()


def test_once_prints_workers_and_requests_of_every_router(running, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "")
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


@pytest.mark.parametrize(("columns", "most"), [("72", 72), ("200", 200), ("", 140), ("0", 140)])
def test_a_pipe_is_as_wide_as_the_environment_says(columns, most, running, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["--url", running.url, "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= most
    heads = next(line for line in lines if line.startswith("role"))
    assert ("card" in heads) == (most >= 140), "the least important column"


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


def many_workers(seen, number=40):
    """The same look with so many workers of each role."""
    workers = [
        structs.replace(worker, instance=f"{i:08x}{worker.instance[8:]}", counters={"tokens": 100.0 * i})
        for worker in seen.status.workers
        for i in range(number)
    ]
    return replace(seen, status=structs.replace(seen.status, workers=workers))


@pytest.mark.parametrize("width", [140, 100, 80, 60, 40])
def test_every_cell_is_whole_at_any_width(running, width):
    seen = looked(running)
    text = text_of([seen], width=width)
    assert "…" not in text
    decode = next(line for line in text.splitlines() if line.startswith("decode"))
    assert seen.status.workers[1].instance[:8] in text
    heads = next(line for line in text.splitlines() if line.startswith("role")).split()
    assert heads[:2] == ["role", "worker"]
    if width >= 80:
        assert {"state", "run", "pages", "tok/s", "accept"} <= set(heads)
        assert "24/64" in decode
        assert "serving" in decode
        requests = next(line for line in text.splitlines() if line.startswith("request")).split()
        assert {"state", "age", "prompt", "output", "ttft", "tpot", "accept"} <= set(requests)


@pytest.mark.parametrize("height", [12, 24, 50])
def test_many_workers_fit_the_height_and_the_others_are_counted(running, height):
    seen = many_workers(looked(running))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render([seen], Rates(), View(width=80, height=height)))
    text = console.export_text()
    assert len(text.splitlines()) <= height
    shown = sum(line.startswith(("prefill", "decode")) for line in text.splitlines())
    assert shown >= 1
    assert f"... and {80 - shown} more workers" in text


def test_workers_are_sorted_by_the_key_of_choice(running):
    seen, rates = many_workers(looked(running), 3), Rates()

    def first(sort, at):
        console = Console(width=120, record=True, file=io.StringIO())
        console.print(render([replace(seen, at=at)], rates, View(width=120, sort=sort)))
        rows = [line for line in console.export_text().splitlines() if line.startswith(("prefill", "decode"))]
        return rows[0].split()[0]

    assert first("role", 0.0) == "prefill"
    assert first("accept", 1.0) == "decode", "prefill has no accept length"
    assert first("pages", 2.0) == "decode", "its pages are in use"


def test_retractions_have_a_column_once_there_are_some(running):
    seen = looked(running)
    assert "retracted" not in text_of([seen])
    counters = {"tokens": 7.0, "retractions": 31.0}
    workers = [structs.replace(worker, counters=counters) for worker in seen.status.workers]
    text = text_of([replace(seen, status=structs.replace(seen.status, workers=workers))])
    heads, row = (
        next(line for line in text.splitlines() if line.startswith(word)) for word in ("role", "decode")
    )
    end = heads.index("retracted") + len("retracted")
    assert row[:end].endswith(" 31")
    counters |= {"retractions_urgent_pages": 2.0, "retractions_urgent_place": 3.0}
    workers = [structs.replace(worker, counters=counters) for worker in seen.status.workers]
    text = text_of([replace(seen, status=structs.replace(seen.status, workers=workers))])
    assert " 31 (5 urgent)" in text


def test_classes_have_a_line_where_there_are_several(running):
    seen = looked(running)
    assert " run, " not in text_of([seen])
    classes = [
        top_view.ClassPart("high", 0, 2, 0.0, {}),
        top_view.ClassPart("low", 3, 1, 12.34, {"preempted": 4, "full pool": 1}),
    ]
    router = structs.replace(seen.status.router, classes=classes)
    text = text_of([replace(seen, status=structs.replace(seen.status, router=router))])
    assert "high 2 run, 0 queued" in text
    assert "low 1 run, 3 queued (12.3 s), 1 full pool, 4 preempted" in text


def test_tiers_below_the_pool_have_a_column_where_there_are_some(running):
    seen = looked(running)
    assert "below the pool" not in text_of([seen])
    tiers = [top_view.TierPart("host", 3 << 30), top_view.TierPart("disk", 20 << 30)]
    workers = [structs.replace(worker, tiers=tiers) for worker in seen.status.workers]
    text = text_of([replace(seen, status=structs.replace(seen.status, workers=workers))])
    assert "host 3 GiB, disk 20 GiB" in text


def test_sparklines_show_five_minutes_of_the_router_s_history(running):
    assert until(lambda: looked(running).history.router["ended"].count(1), "a point with the request")
    assert "ttft" in text_of([looked(running)], width=80)
    series = [None] * 60 + [0] * 30 + [100] * 60
    line = top_view.trend(series, 10)
    assert line == "    ▁▁████"
    assert top_view.trend([], 4) == "    "
    past = top_view.HistoryPart(0, 9, {"running": [1] * 10}, [])
    newer = top_view.HistoryPart(10, 11, {"running": [2, 2]}, [])
    assert top_view.joined(past, newer).router["running"] == [1] * 10 + [2, 2]
    after_a_gap = top_view.HistoryPart(20, 21, {"running": [3, 3]}, [])
    assert top_view.joined(past, after_a_gap).router["running"] == [3, 3]


def test_q_quits_and_s_changes_the_order(running):
    """In a terminal of 80 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "baton", "top", "--url", running.url, "--every", "30"]
    before = termios.tcgetattr(slave)
    child = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm-256color"}
    )
    try:
        screen = Screen(master)
        screen.read_until("q quit   s sort by role")
        os.write(master, b"s")
        screen.read_until("s sort by tok/s")
        os.write(master, b"q")
        assert child.wait(20) == 0
        assert termios.tcgetattr(slave) == before, "the terminal is as it was"
    finally:
        child.kill()
        child.wait()
        os.close(master)
        os.close(slave)


class Screen:
    """What a program wrote to a terminal."""

    def __init__(self, master):
        self._master, self._text = master, ""

    def read_until(self, words):
        def more():
            if select.select([self._master], [], [], 0.1)[0]:
                self._text += os.read(self._master, 1 << 16).decode(errors="replace")
            return words in re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", self._text)

        until(more, f"the terminal shows {words!r}", timeout=30.0)
