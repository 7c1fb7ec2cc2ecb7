"""What every answer carries: the request's id, CORS headers, and a line in the access log."""

import contextlib
import json
import logging
import socket

import httpx
import pytest
from baton.cluster.config.roles import RouterConfig
from baton.cluster.protocol.messages import Prefill, Reserve
from baton.deploy.keys.api_keys import add
from baton.router import app
from baton.router.http import http_protocol
from baton.router.http.access_log import AccessLog
from baton.tests.cluster.router_fakes import BODY, open_request, post, until
from baton.tests.ports import free_port

ORIGIN = "https://app.example.com"
CHAT = "/v1/chat/completions"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def raw(running, data):
    """The whole answer to the bytes `data`."""
    with socket.create_connection(("127.0.0.1", running.router.port)) as client:
        client.settimeout(30)
        client.sendall(data)
        return b"".join(iter(lambda: client.recv(1 << 16), b"")).decode("latin-1")


def head_of(answer):
    """Status and header fields of a raw answer."""
    lines = answer.partition("\r\n\r\n")[0].split("\r\n")
    return int(lines[0].split()[1]), dict(line.split(": ", 1) for line in lines[1:])


def test_the_id_of_a_request_is_in_its_answer_its_orders_and_its_history(start):
    running, script = start()
    prefill, decode = running.pair(script)
    given = {"x-request-id": "trace/42:a"}
    for stream in (False, True):
        answer = httpx.post(f"{running.url}{CHAT}", json=BODY | {"stream": stream}, headers=given)
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "trace/42:a")
    orders = [*prefill.of(Prefill), *decode.of(Reserve)]
    assert {order.request_id for order in orders} == {"trace/42:a"}
    view = httpx.get(f"{running.url}/requests/trace%2F42:a")
    assert view.json()["id"].startswith("chatcmpl-")
    own = post(running)
    assert own.headers["x-request-id"] == own.json()["id"], "the id of the answer, where none was given"


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", CHAT, b"{", 400),
        ("POST", CHAT, b'{"model": "other", "messages": [{"role": "user", "content": "a"}]}', 404),
        ("POST", CHAT, json.dumps(BODY).encode(), 503),
        ("GET", "/nowhere", None, 404),
        ("GET", CHAT, None, 405),
        ("POST", CHAT, b"x" * (2 << 20), 413),
        ("GET", "/health", None, 200),
        ("GET", "/ready", None, 503),
        ("GET", "/version", None, 200),
    ],
)
def test_every_answer_has_the_id_and_the_origin(start, method, path, content, status):
    running, _ = start(max_body_mb=1, allowed_origins=ORIGIN)
    headers = {"origin": ORIGIN, "x-request-id": "mine"}
    answer = httpx.request(method, f"{running.url}{path}", content=content, headers=headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine")
    is_open = path != "/nowhere"
    assert answer.headers.get("access-control-allow-origin") == (ORIGIN if is_open else None)
    minted = httpx.request(method, f"{running.url}{path}", content=content).headers["x-request-id"]
    assert minted.startswith("req_")


def test_answers_before_a_request_is_complete_have_the_id_as_well(start, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(http_protocol, "BODY_TIMEOUT_S", 0.3)
    running, _ = start(allowed_origins="*")
    begin = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: mine\r\norigin: https://a\r\n"
    cases = {
        408: begin,
        431: begin + b"x: " + b"a" * 17_000 + b"\r\n",
        417: begin + b"expect: all\r\n\r\n",
        415: begin + b"content-encoding: gzip\r\n\r\n",
        400: begin + b"host: b\r\n\r\n",
    }
    for status, data in cases.items():
        found, fields = head_of(raw(running, data))
        assert (found, fields["x-request-id"], fields["access-control-allow-origin"]) == (status, "mine", "*")
    status, fields = head_of(raw(running, b"\x00\r\n\r\n"))
    assert status == 400
    assert fields["x-request-id"].startswith("req_")


def test_an_id_cannot_add_a_header_or_be_endless(start):
    running, _ = start()
    for value in (b"a b", b"\xff", b"x" * 129):
        answer = raw(
            running,
            b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"x-request-id: " + value + b"\r\n\r\n",
        )
        assert head_of(answer)[1]["x-request-id"].startswith("req_")


def test_a_page_of_an_allowed_origin_may_ask_with_a_key_and_reads_errors(start, tmp_path):
    key = {"authorization": f"Bearer {add(tmp_path / 'api.json', {'name': 'alice'})[0]}"}
    running, script = start(api_keys=str(tmp_path / "api.json"), allowed_origins=ORIGIN)
    running.pair(script)
    permission = httpx.options(f"{running.url}{CHAT}", headers=PREFLIGHT)
    assert (permission.status_code, permission.content) == (204, b"")
    assert permission.headers["access-control-allow-origin"] == ORIGIN
    assert permission.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
    assert "content-length" not in permission.headers
    for headers, status in ((key, 200), ({}, 401)):
        for stream in (False, True):
            answer = httpx.post(
                f"{running.url}{CHAT}", json=BODY | {"stream": stream}, headers={"origin": ORIGIN, **headers}
            )
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert "access-control-allow-credentials" not in answer.headers
    other = httpx.options(f"{running.url}{CHAT}", headers=PREFLIGHT | {"origin": "https://evil.example.com"})
    assert [name for name in other.headers if name.startswith("access-control")] == []


def test_without_the_setting_no_page_of_another_origin_reads_anything(start):
    running, _ = start()
    assert httpx.options(f"{running.url}{CHAT}", headers=PREFLIGHT).status_code == 405
    answer = httpx.get(f"{running.url}/v1/models", headers={"origin": ORIGIN})
    assert [name for name in answer.headers if name.startswith("access-control") or name == "vary"] == []


@pytest.mark.parametrize("allowed", ["", "*", ORIGIN])
def test_no_page_of_another_origin_changes_the_cluster(start, allowed):
    running, _ = start(allowed_origins=allowed)
    order = {"instance": "1" * 32, "order": "2" * 32, "action": "check", "path": "/x"}
    simple = {"content-type": "text/plain"}  # a browser sends it without asking
    for headers in ({"origin": ORIGIN}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        answer = httpx.post(f"{running.url}/drafts", json=order, headers=simple | headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin")
        assert "access-control-allow-origin" not in answer.headers
    assert httpx.options(f"{running.url}/drafts", headers=PREFLIGHT).status_code == 405
    own = httpx.post(f"{running.url}/drafts", json=order, headers=simple | {"origin": running.url})
    assert own.json()["error"]["code"] == "worker_not_found", "its own page may, and so may programs"


SIMPLE = ("text/plain", "application/x-www-form-urlencoded", None)  # sent without a preflight


@pytest.mark.parametrize("kind", SIMPLE)
def test_a_page_that_is_not_allowed_starts_no_work_without_asking(start, kind):
    running, script = start(allowed_origins=ORIGIN)
    _, decode = running.pair(script)
    typed = {"content-type": kind} if kind else {}
    paths = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize")
    evil = {"origin": "https://evil.example.com"}
    for path in paths:
        for page in (evil, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
            answer = httpx.post(f"{running.url}{path}", content=json.dumps(BODY), headers=typed | page)
            assert answer.status_code == 403
            assert "foreign_origin" in answer.text
            assert "--allowed-origins" in answer.text
    assert decode.of(Reserve) == []
    for sender in ({"origin": ORIGIN}, {"origin": running.url}, {}):
        answer = httpx.post(f"{running.url}{CHAT}", content=json.dumps(BODY), headers=typed | sender)
        assert answer.status_code == 200, sender
    assert httpx.post(f"{running.url}{CHAT}", json=BODY, headers=evil).status_code == 200, "a preflight asked"


@pytest.mark.parametrize("path", [CHAT, "/drafts", "/roles"])
def test_s28_a_page_whose_name_leads_here_is_refused(start, path):
    """DNS rebinding: to the browser the router is the page's own origin."""
    running, script = start(own_port=free_port())
    _, decode = running.pair(script)
    order = {"instance": decode.instance, "order": "2" * 32, "action": "check", "path": "/x"}
    move = {"instance": decode.instance, "order": "2" * 32, "role": "prefill"}
    bodies = {CHAT: BODY, "/drafts": order, "/roles": move}
    port = running.router.port
    rebound = {"host": f"evil.example.com:{port}", "origin": f"http://evil.example.com:{port}"}
    for url in (running.url, running.router.own_url):
        refused = httpx.post(f"{url}{path}", json=bodies[path], headers=rebound)
        assert (refused.status_code, refused.headers["connection"]) == (421, "close")
        error = refused.json()["error"]
        assert error["code"] == "host_not_allowed"
        assert "'evil.example.com'" in error["message"]
        assert "--allowed-hosts" in error["message"]
        assert httpx.get(f"{url}/status", headers=rebound).status_code == 421
    assert decode.of(Reserve) == []
    assert httpx.post(f"{running.url}{CHAT}", json=BODY, headers={"host": "localhost"}).status_code == 200


def test_a_request_without_host_and_a_listed_one_are_served(start):
    running, _ = start(allowed_hosts="llm.example.com")
    old = raw(running, b"GET /health HTTP/1.0\r\n\r\n")
    assert head_of(old)[0] == 200
    named = {"host": "llm.example.com"}
    assert httpx.get(f"{running.url}/health", headers=named).status_code == 200
    assert httpx.get(f"{running.url}/health", headers={"host": "x"}).status_code == 421


def test_with_keys_a_router_answers_to_every_name_unless_told(start, tmp_path):
    add(tmp_path / "api.json", {"name": "alice"})
    named = {"host": "llm.example.com"}
    for allowed, status in (("", 200), ("other.example.com", 421)):
        running, _ = start(api_keys=str(tmp_path / "api.json"), allowed_hosts=allowed)
        assert httpx.get(f"{running.url}/health", headers=named).status_code == status


def test_streams_are_not_buffered_on_their_way(start):
    running, script = start()
    running.pair(script)
    answer = post(running, stream=True)
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-store"


def test_the_version_needs_no_key(start, tmp_path):
    add(tmp_path / "api.json", {"name": "alice"})
    running, _ = start(api_keys=str(tmp_path / "api.json"))
    assert httpx.get(f"{running.url}/version").json() == {"version": "0.1.0", "protocol": 1, "name": "baton"}


# --- the access log -----------------------------------------------------------------------------------------


@pytest.fixture
def lines(monkeypatch):
    """The JSON lines of the access log of routers that start later."""
    written = []
    monkeypatch.setattr(
        app, "access_log_of", lambda config: AccessLog("json", write=lambda data: written.append(data))
    )
    return lambda: [json.loads(line) for line in b"".join(written).splitlines()]


def test_each_request_has_one_line_with_its_cost(start, lines, tmp_path):
    key = add(tmp_path / "api.json", {"name": "alice"})[0]
    running, script = start(api_keys=str(tmp_path / "api.json"))
    prefill, decode = running.pair(script)
    named = {"authorization": f"Bearer {key}"}
    whole = httpx.post(f"{running.url}{CHAT}", json=BODY, headers=named)
    httpx.post(f"{running.url}{CHAT}", json=BODY | {"stream": True}, headers=named | {"x-request-id": "mine"})
    httpx.post(f"{running.url}{CHAT}", json=BODY)
    httpx.get(f"{running.url}/health")
    httpx.get(f"{running.url}/v1/models", headers=named)
    until(lambda: len(lines()) >= 4, "they are written")
    first, second, third, fourth = lines()
    usage = whole.json()["usage"]
    assert (first["key"], first["status"], first["outcome"], first["path"]) == ("alice", 200, "ok", CHAT)
    assert first["prompt_tokens"] == usage["prompt_tokens"]
    assert first["output_tokens"] == usage["completion_tokens"]
    assert first["cached_tokens"] == 16
    assert (first["prefill"], first["decode"]) == (prefill.instance, decode.instance)
    assert first["request"] == whole.json()["id"]
    assert 0 < first["ttft_ms"] <= first["duration_ms"]
    assert first["tpot_ms"] >= 0
    assert (second["request"], second["output_tokens"]) == ("mine", first["output_tokens"])
    assert (third["status"], third["key"]) == (401, "")
    assert {line["client"] for line in lines()} == {"127.0.0.1"}
    assert (fourth["path"], fourth["status"], "room" in fourth) == ("/v1/models", 200, False)
    assert key not in json.dumps(lines())


def test_clients_that_leave_and_answers_that_are_repeated_have_lines(start, lines):
    running, script = start()
    _, decode = running.pair(script)
    script.holds.set()
    with contextlib.closing(open_request(running)):
        until(lambda: decode.of(Reserve), "it runs")
    until(lambda: len(lines()) == 1, "it is written")
    script.holds.clear()
    again = {"idempotency-key": "k"}
    for _ in range(2):
        assert httpx.post(f"{running.url}{CHAT}", json=BODY, headers=again).status_code == 200
    until(lambda: len(lines()) == 3, "they are written")
    left, made, repeated = lines()
    assert (left["status"], left["outcome"], left["client"]) == (499, "cancelled", "127.0.0.1")
    assert left["request"] == decode.of(Reserve)[0].request_id
    assert httpx.get(f"{running.url}/requests/{left['request']}").status_code == 200
    assert (made["outcome"], repeated["outcome"]) == ("ok", "replayed")
    assert repeated["output_tokens"] == 0 < made["output_tokens"]
    assert repeated["room"] == made["room"]


def test_a_failure_and_its_log_line_name_the_request(start, lines, caplog):
    caplog.set_level(logging.WARNING)
    running, script = start(queue_timeout_s=0.2)
    running.pair(script)
    script.holds.set()
    with contextlib.closing(
        open_request(running, {"x-request-id": "mine", "x-baton-timeout-ms": "400"})
    ) as held:
        assert held.getresponse().status == 504
    until(lambda: lines(), "it is written")
    failed = next(record for record in caplog.records if record.getMessage() == "failed")
    assert failed.fields["request"] == "mine"
    assert (lines()[0]["status"], lines()[0]["outcome"], lines()[0]["request"]) == (504, "timeout", "mine")
    assert lines()[0]["room"] == failed.fields["room"]


def test_the_access_log_is_on_by_default_and_off_where_info_is():
    assert app.access_log_of(RouterConfig(model="m")) is not None
    assert app.access_log_of(RouterConfig(model="m", access_log=False)) is None
    assert app.access_log_of(RouterConfig(model="m", log_level="warning")) is None


# --- limits -------------------------------------------------------------------------------------------------


@pytest.fixture
def limited(start, tmp_path):
    """A router, its script, and the headers of a key with 6000 tokens and 600 requests per minute."""
    limits = {"name": "alice", "tokens_per_minute": 6000, "requests_per_minute": 600}
    key = {"authorization": f"Bearer {add(tmp_path / 'api.json', limits)[0]}"}
    running, script = start(api_keys=str(tmp_path / "api.json"))
    return running, script, key


def left(running, key, body, **more):
    """The answer, and the tokens that it says are left."""
    answer = httpx.post(f"{running.url}{CHAT}", json=BODY | body, headers=key | more, timeout=60)
    return answer, int(answer.headers["x-ratelimit-remaining-tokens"])


def bucket(running):
    """The level of the tokens of the only key with a limit."""
    gate = running.router.dispatcher.admission.gate
    return running.call(
        lambda: max(use.buckets["tokens"].level for use in gate._uses.values() if "tokens" in use.buckets)
    )


def test_what_was_not_generated_comes_back_and_headers_tell_it(limited):
    running, script, key = limited
    running.pair(script)
    answer, _ = left(running, key, {"max_tokens": 400})
    usage = answer.json()["usage"]
    assert usage["completion_tokens"] < 100
    assert answer.headers["x-ratelimit-limit-tokens"] == "6000"
    assert answer.headers["x-ratelimit-remaining-requests"] == "599"
    assert answer.headers["x-ratelimit-reset-requests"].endswith("ms")
    until(lambda: bucket(running) > 6000 - 2 * usage["total_tokens"], "the rest is back")
    assert bucket(running) <= 6000 - usage["total_tokens"] + 100 * 5, "100 tokens a second come back anyway"
    _, whole = left(running, key, {"max_tokens": 400})
    assert whole > 6000 - 400, "it has ended when its answer begins"
    script.holds.set()
    streamed = BODY | {"max_tokens": 400, "stream": True}
    with httpx.stream("POST", f"{running.url}{CHAT}", json=streamed, headers=key) as response:
        told = int(response.headers["x-ratelimit-remaining-tokens"])
        assert told <= 6000 - 400, "it is charged in full until its end"
    refused = httpx.post(f"{running.url}{CHAT}", content=b"{", headers=key)
    assert (refused.status_code, refused.headers["x-ratelimit-limit-requests"]) == (400, "600")


def test_a_request_that_is_cancelled_or_fails_gets_its_tokens_back(limited):
    running, script, key = limited
    assert left_over(running, key, 503) == []
    _, decode = running.pair(script)
    script.holds.set()
    with contextlib.closing(open_request(running, key, max_tokens=400)):
        until(lambda: decode.of(Reserve), "it runs")
        charged = bucket(running)
        assert charged <= 6000 - 400
    until(lambda: bucket(running) > charged + 350, "the client left")
    timed_out, _ = left(running, key, {"max_tokens": 400}, **{"x-baton-timeout-ms": "200"})
    assert timed_out.status_code == 504
    until(lambda: bucket(running) > 6000 - 100, "the rest is back")


def left_over(running, key, status):
    """Charges of a request that no worker ever had."""
    answer = httpx.post(f"{running.url}{CHAT}", json=BODY, headers=key)
    assert answer.status_code == status
    gate = running.router.dispatcher.admission.gate
    return running.call(
        lambda: [
            use
            for use in gate._uses.values()
            if "tokens" in use.buckets and use.buckets["tokens"].level < 6000
        ]
    )


def test_each_router_says_its_part_of_the_limits(start, tmp_path):
    key = {
        "authorization": f"Bearer {add(tmp_path / 'api.json', {'name': 'a', 'requests_per_minute': 2})[0]}"
    }
    watcher = {"authorization": f"Bearer {add(tmp_path / 'api.json', {'name': 'o', 'observer': True})[0]}"}
    running, script = start(api_keys=str(tmp_path / "api.json"), limit_parts=2)
    running.pair(script)
    answers = [httpx.post(f"{running.url}{CHAT}", json=BODY, headers=key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert "1 requests per minute at each of 2 routers" in answers[1].json()["error"]["message"]
    assert answers[1].headers["x-ratelimit-remaining-requests"] == "0"
    assert httpx.get(f"{running.url}/status", headers=watcher).json()["router"]["limit_parts"] == 2
