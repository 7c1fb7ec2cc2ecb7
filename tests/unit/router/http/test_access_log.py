"""Lines of the access log: their form, which requests have one, and a log that nobody reads."""

import json
import threading
from types import SimpleNamespace

import pytest
from baton.router.http import access_log
from baton.router.http.access_log import ATOMIC_BYTES, AccessLog
from baton.router.http.exchange import Work

WORK = Work(
    room="ab" * 16, outcome="ok", num_prompt=31, num_cached=16, num_output=40, ttft_s=0.0412, tpot_s=0.0061,
    accept_length=2.4, prefill="1f" * 16, decode="2e" * 16,
)  # fmt: skip


def exchange(path="/v1/models", status=200, method="GET", work=None, key="", request_id="req_1"):
    caller = SimpleNamespace(name=key)
    return SimpleNamespace(
        path=path, status=status, method=method, caller=caller, client="10.0.0.7",
        request_id=request_id, began=10.0, work=None if work is None else lambda: work,
    )  # fmt: skip


def lines_of(*exchanges, log_format="text", **options):
    written = []
    log = AccessLog(log_format, write=written.append, **options)
    for one in exchanges:
        log.served(one, 10.3)
    log._flush()
    return b"".join(written).decode().splitlines()


def test_a_line_of_words_names_who_asked_what_and_what_it_cost():
    asked = exchange("/v1/completions", method="POST", work=WORK, key="alice")
    (line,) = lines_of(asked)
    clock, level, role, message, *words = line.split()
    assert (len(clock), level, role, message) == (12, "INFO", "router", "request")
    assert words == [
        "room=abababab..", "request=req_1", "key=alice", "client=10.0.0.7", "method=POST",
        "path=/v1/completions", "status=200", "duration_ms=300.0", "outcome=ok",
        "prompt_tokens=31", "cached_tokens=16", "output_tokens=40",
        "ttft_ms=41.2", "tpot_ms=6.1", "accept_length=2.40", "prefill=1f1f1f1f", "decode=2e2e2e2e",
    ]  # fmt: skip


def test_a_json_line_has_the_same_and_is_one_object():
    (line,) = lines_of(exchange("/v1/completions", work=WORK, key="alice"), log_format="json")
    document = json.loads(line)
    assert document.pop("time").endswith("Z")
    assert document == {
        "level": "info", "role": "router", "instance": "", "logger": "baton.router.access",
        "message": "request", "room": "ab" * 16, "request": "req_1", "key": "alice", "client": "10.0.0.7",
        "method": "GET", "path": "/v1/completions", "status": 200, "duration_ms": 300.0,
        "outcome": "ok", "prompt_tokens": 31,
        "cached_tokens": 16, "output_tokens": 40, "ttft_ms": 41.2, "tpot_ms": 6.1, "accept_length": 2.4,
        "prefill": "1f" * 16, "decode": "2e" * 16,
    }  # fmt: skip


def test_a_path_cannot_imitate_a_line():
    (line,) = lines_of(exchange('/x\n12:00:00.000 INFO router request path="/y" status=200', 404))
    assert "\\n12:00:00.000 INFO" in line
    assert line.endswith("status=404 duration_ms=300.0")
    (line,) = lines_of(exchange("/" + "x" * 5000, 404))
    assert len(line) < 400


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/metrics", "/status", "/requests", "/requests/a", "/"]
)
def test_probes_and_watchers_are_logged_at_debug_only(path):
    assert lines_of(exchange(path)) == []
    (line,) = lines_of(exchange(path), logs_quiet=True)
    assert " DEBUG " in line


def test_a_refused_watcher_has_a_line_and_a_failed_probe_none():
    assert len(lines_of(exchange("/status", 401), exchange("/metrics", 403))) == 2
    assert lines_of(exchange("/ready", 503)) == []


def test_a_client_that_left_before_the_answer_has_status_499():
    (line,) = lines_of(exchange(status=0))
    assert "status=499" in line


def test_a_refusal_in_the_head_has_a_line_without_a_caller():
    written = []
    log = AccessLog("text", write=written.append)
    log.refused(431, "", "", "req_9", "::1")
    log._flush()
    assert b"request=req_9 client=::1 method=- path=" in written[0]
    assert b"status=431" in written[0]


def test_lines_go_out_whole_in_parts_that_a_pipe_takes_at_once():
    written = []
    log = AccessLog("text", write=written.append)
    for _ in range(200):
        log.served(exchange("/v1/completions", work=WORK), 10.3)
    log._flush()
    assert len(written) > 5
    assert all(len(part) <= ATOMIC_BYTES and part.endswith(b"\n") for part in written)
    assert b"".join(written).count(b"\n") == 200


def test_a_log_that_nobody_reads_delays_nothing_and_drops_lines(monkeypatch, caplog):
    monkeypatch.setattr(access_log, "FLUSH_S", 0.0)
    monkeypatch.setattr(access_log, "MAX_WAITING", 50)
    may_go_on, written = threading.Event(), []

    def slow(data):
        may_go_on.wait(30)
        written.append(data)

    log = AccessLog("text", write=slow)
    log.start()
    for _ in range(200):
        log.served(exchange(), 10.3)
    assert log.num_dropped >= 200 - 2 * 50 - 50
    may_go_on.set()
    log.close()
    assert b"".join(written).count(b"\n") == 200 - log.num_dropped
    assert "access lines dropped: the log is read too slowly" in caplog.text
