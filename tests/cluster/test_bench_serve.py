"""`baton bench serve` as a command against scripted workers: figures, JSON, a picture, and clear ends."""

import json
import socket
import struct

import httpx
import pytest
from baton.bench.serve.bench import main
from baton.bench.serve.plot import cdf, ticks
from baton.tests.cluster.router_fakes import until
from baton.tests.ports import free_port


@pytest.fixture
def running(start):
    router, script = start()
    router.pair(script)
    return router


def test_a_closed_and_an_open_loop_end_with_figures_and_a_picture(running, tmp_path, capsys):
    common = ["--url", running.url, "--input", "16-40", "--output", "4", "--requests", "12", "--json"]
    for load in (["--concurrency", "1", "3"], ["--rate", "40"]):
        picture = tmp_path / "load.png"
        assert main([*common, *load, "--plot", str(picture), "--slo-ttft", "60000"]) == 0
        levels = json.loads(capsys.readouterr().out)["levels"]
        assert len(levels) == len(load) - 1
        for level in levels:
            assert (level["num_ok"], level["errors"]) == (12, {})
            assert 0 < level["ttft"]["p50"] <= level["ttft"]["p99"] <= level["e2e"]["p99"]
            assert level["goodput_per_s"] == level["requests_per_s"] > 0
            assert level["server"]["retries"] == 0
        head = picture.read_bytes()[:24]
        assert head.startswith(b"\x89PNG\r\n\x1a\n")
        assert struct.unpack(">II", head[16:24]) == (1280, 860)


def test_two_servers_are_compared_with_a_table_json_and_a_chart(start, tmp_path, capsys):
    servers = []
    for _ in range(2):
        router, script = start()
        router.pair(script)
        servers.append(router)
    urls = [router.url for router in servers]
    workload = tmp_path / "workload.jsonl"
    workload.write_text(
        '{"prompt_tokens": 20, "output_tokens": 4, "prefix": "a", "prefix_tokens": 16}\n'
        '{"turns": [{"prompt_tokens": 8, "output_tokens": 4}, {"prompt_tokens": 6, "output_tokens": 4}]}\n'
        '{"prompt": "hello", "max_tokens": 4}\n'
    )
    common = ["--compare", *urls, "--workload", str(workload), "--concurrency", "1", "3", "--requests", "8"]
    picture = tmp_path / "curve.png"
    assert main([*common, "--rounds", "2", "--json", "--curve", str(picture)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["compare"] == urls
    for level in document["levels"]:
        assert len(level["rounds"]) == 2
        for pair in level["rounds"]:
            assert [(side["num_ok"], side["errors"]) for side in pair.values()] == [(8, {}), (8, {})]
            assert pair["A"]["mean_prompt_tokens"] == pair["B"]["mean_prompt_tokens"] > 5
        ratio = level["ratios"]["TTFT p50"]
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    head = picture.read_bytes()[:24]
    assert struct.unpack(">II", head[16:24]) == (1280, 520)
    assert main([*common, "--rounds", "1", "--warmup", "0"]) == 0
    table = capsys.readouterr().out
    assert table.startswith(f"A: {urls[0]}\nB: {urls[1]}\n")
    assert table.count("| out tok/s |") == 2
    workload.write_text("{}\n")
    assert main(common) == 2
    assert f"--workload {workload}, line 1: " in capsys.readouterr().err
    assert main(["--compare", urls[0], "http://127.0.0.1:1"]) == 1
    assert "nothing listens at http://127.0.0.1:1" in capsys.readouterr().err


def test_metrics_of_routers_behind_one_port_are_read_at_their_own(start, capsys):
    shared = {"share_port": True}
    one, script = start(own_port=free_port(), **shared)
    one.pair(script)
    two, script = start(port=one.router.port, own_port=free_port(), **shared)
    two.pair(script)
    until(lambda: all(running.router._server._listening for running in (one, two)), "both listen")
    urls = f"{one.router.own_url},{two.router.own_url}"
    common = [
        "--url",
        one.url,
        "--input",
        "16",
        "--output",
        "4",
        "--warmup",
        "0",
        "--requests",
        "12",
        "--json",
    ]
    assert main([*common, "--metrics", urls]) == 0
    (level,) = json.loads(capsys.readouterr().out)["levels"]
    served = [
        httpx.get(f"{router.router.own_url}/requests?limit=100").json()["requests"] for router in (one, two)
    ]
    assert len(served[0]) + len(served[1]) == 12
    assert level["server"]["handoff_mb"] == pytest.approx(4096 / 1e6), "whichever served"
    for wrong, words in (
        (f"{urls},http://127.0.0.1:1", "shows no metrics of a router"),
        ("nowhere", "--metrics 'nowhere'"),
    ):
        assert main([*common, "--metrics", wrong]) > 0
        shown = capsys.readouterr().err
        assert words in shown
        assert shown.count("\n") == 1


def test_a_missing_server_is_one_line_and_exit_code_1(capsys):
    with socket.socket() as taken:  # and nobody listens
        taken.bind(("127.0.0.1", 0))
        assert main(["--url", f"http://127.0.0.1:{taken.getsockname()[1]}"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_model_that_is_not_served_is_told_before_anything_is_measured(running, capsys):
    assert main(["--url", running.url, "--model", "other"]) == 1
    assert "answers nothing: HTTP 404 model_not_found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("most", "expected"), [(0.0, [0, 1]), (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]), (37, [0, 10, 20, 30, 40])]
)
def test_ticks_are_round_and_reach_the_end(most, expected):
    assert ticks(most) == pytest.approx(expected)


def test_a_distribution_ends_before_its_worst_half_percent():
    assert cdf([3.0, 1.0, 2.0]) == [(1.0, 1 / 3), (2.0, 2 / 3), (3.0, 1.0)]
    assert cdf([*range(1000), 1e9])[-1][0] < 1000
    assert cdf([]) == []
