"""Clients that break the rules of HTTP or abuse them: each is answered or cut, and others are unaffected."""

import contextlib
import json
import re
import socket
import time

import httpx
import pytest
from baton.cluster.protocol.messages import Reserve, TokenItem, Tokens
from baton.deploy.keys.api_keys import add
from baton.router.answers.answer import Answer
from baton.router.http import http_protocol, server
from baton.router.scheduling import dispatcher, inbox
from baton.router.scheduling.request_state import Entry
from baton.router.text.tokenizer import load_tokenizer
from baton.tests.cluster.http_time import read_to_the_end, seconds_left, standing_time
from baton.tests.cluster.router_fakes import (
    BODY,
    assert_nothing_left,
    open_request,
    post,
    save_tokenizer,
    until,
    without_collector,
)
from baton.tests.corpora.corpus import data, http_requests
from baton.tests.judges.raw_http import without_own_id

CASES = http_requests()
ENDS_S = 30.0  # what comes to no end takes longer
INNER = re.compile(r"0x[0-9a-f]{4}|/(?:etc|tmp|work|root|home)/|Traceback|\.py|\d+\.\d+\.\d+\.\d+|:\d{4,5}\b")
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture
def keyed(tmp_path, start):
    """A router that asks for keys, and a key."""
    path = tmp_path / "api.json"
    secret, _ = add(path, {"name": "alice"})
    running, script = start(api_keys=str(path))
    running.pair(script)
    return running, secret


def connect(running):
    return socket.create_connection(("127.0.0.1", running.router.port), timeout=ENDS_S)


def told(running, sent):
    """All bytes received up to the end of a connection; time passes once the server has read everything."""
    with standing_time(running) as let_pass, connect(running) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        return read_to_the_end(running, connection, let_pass)


def statuses(answer):
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_s24_raw_requests_are_refused_or_parsed_correctly(keyed, case):
    running, _ = keyed
    sent = data(case)
    answer = told(running, sent)
    found = statuses(answer)
    assert all(400 <= status < 500 or status in (501, 505) for status in found), found
    if case.expect == "reject":
        assert not {401, 404}.intersection(found), "parsed, though its head is at fault"
        assert len(found) <= 1
    elif case.expect == "control":
        assert found == [401] if case.name != "control_two_pipelined" else found[0] == 401
    elif case.expect == "partial":
        assert found in ([], [408], [401])
    for body in re.findall(rb"\r\n\r\n(\{.*?\}\})", answer):
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert INNER.search(without_own_id(answer, sent).decode("latin-1")) is None
    assert httpx.get(running.url + "/health").status_code == 200


def test_pipelined_requests_are_answered_one_after_another_in_their_order(keyed):
    running, secret = keyed
    sent = b""
    for number in (3, 1, 2):
        body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": number}).encode()
        sent += (
            REQUEST + f"authorization: Bearer {secret}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )
    answer = told(running, sent)
    assert statuses(answer) == [200] * 3
    assert [int(n) for n in re.findall(rb'"completion_tokens":(\d+)', answer)] == [3, 1, 2]
    assert_nothing_left(running)


def test_a_client_that_does_not_read_has_few_answers_buffered(keyed, monkeypatch):
    monkeypatch.setattr(http_protocol, "WRITE_STALL_S", 0.5)
    running, _ = keyed
    seen = []

    def held():
        lines = [line for line in running.router._server._connections if line._transport is not None]
        seen.extend(line._transport.get_write_buffer_size() for line in lines)
        return len(lines)

    with connect(running) as connection:
        connection.settimeout(2)
        with contextlib.suppress(OSError):  # at last nothing is read, or the connection is cut
            for _ in range(2000):  # 46 MB of answers each
                connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50)
                running.call(held)
        until(lambda: running.call(held) == 0, "it is cut")
    assert max(seen) < http_protocol.WRITE_HIGH + (256 << 10)


def test_a_client_that_reads_late_gets_every_answer(start):
    running, _ = start()
    num_asked = 0

    def waits():
        lines = running.router._server._connections
        if any(line.is_paused for line in lines):
            return "paused"
        return any(line._num_heads == num_asked and line.is_idle for line in lines)

    with connect(running) as connection:
        while True:  # until no buffer takes more
            connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50)
            num_asked += 50
            if until(lambda: running.call(waits), "all is answered, or the answers wait") == "paused":
                break
        answer = b""
        while answer.count(b"HTTP/1.1 200 ") < num_asked or not answer.endswith(b"</html>\n"):
            part = connection.recv(1 << 20)
            assert part, "closed before the last answer"
            answer += part


def test_requests_that_come_before_an_answer_have_a_bound(keyed):
    running, secret = keyed
    body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2}).encode()
    first = REQUEST + b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b" % (
        secret.encode(),
        len(body),
        body,
    )
    answer = told(running, first + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500)
    assert statuses(answer) == [200] * (1 + http_protocol.MAX_PENDING) + [429]


def test_trailers_without_end_are_refused(keyed):
    running, _ = keyed
    chunked = b"GET / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: "
    assert statuses(told(running, chunked + b"a" * (1 << 20))) == [431]


def test_nothing_is_answered_after_a_closing_answer(keyed):
    running, _ = keyed
    last = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert statuses(told(running, last * 2)) == [200]


def test_a_trailer_is_no_header(keyed):
    running, secret = keyed
    body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2}).encode()
    head = REQUEST + b"authorization: Bearer %b\r\ntransfer-encoding: chunked\r\n\r\n" % secret.encode()
    answer = told(running, head + b"%x\r\n%b\r\n0\r\nx-baton-timeline: 1\r\n\r\n" % (len(body), body))
    assert statuses(answer) == [200]
    assert b'"timeline"' not in answer


def test_expect_continue_is_answered_only_when_the_request_is_accepted(keyed, monkeypatch):
    monkeypatch.setattr(http_protocol, "BODY_TIMEOUT_S", ENDS_S)
    running, secret = keyed
    body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2}).encode()
    head = REQUEST + b"expect: 100-continue\r\ncontent-length: %d\r\n" % len(body)
    with connect(running) as connection:
        connection.sendall(head + b"authorization: Bearer %b\r\n\r\n" % secret.encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    assert statuses(told(running, head + b"\r\n")) == [401]


def test_no_body_is_read_without_a_key_or_beyond_the_limit(keyed, monkeypatch):
    monkeypatch.setattr(http_protocol, "BODY_TIMEOUT_S", 2 * ENDS_S)
    running, secret = keyed
    head = REQUEST + b"content-length: 100000000\r\n"
    assert statuses(told(running, head + b"\r\n" + b"x" * 500_000)) == [413]
    small = REQUEST + b"content-length: 4000000\r\n\r\n"
    began = time.monotonic()
    assert statuses(told(running, small + b"x" * 100_000)) == [401]
    assert time.monotonic() - began < ENDS_S
    chunks = REQUEST + b"authorization: Bearer %b\r\ntransfer-encoding: chunked\r\n\r\n" % secret.encode()
    assert statuses(told(running, chunks + b"100000\r\n%b\r\n" % (b"x" * (1 << 20)) * 6)) == [413]


def test_bodies_of_all_clients_together_have_a_bound(start, monkeypatch):
    monkeypatch.setattr(server, "MAX_BUFFERED", 1 << 20)
    running, script = start()
    running.pair(script)
    head = REQUEST + b"content-length: 900000\r\n\r\n"
    with connect(running) as one, connect(running) as two:
        one.sendall(head + b"x" * 700_000)
        until(
            lambda: running.call(lambda: running.router._server._counts.num_buffered) == 700_000,
            "the first is there",
        )
        two.sendall(head)
        with contextlib.suppress(ConnectionError):
            two.sendall(b"x" * 700_000)
        first = two.recv(1 << 16)
        assert first.startswith(b"HTTP/1.1 503 ")
        assert b"too_many_bodies" in first
        assert post(running).status_code == 200
    until(
        lambda: running.call(lambda: running.router._server._counts.num_buffered) == 0,
        "nothing is counted for nobody",
    )


def test_slow_heads_and_bodies_are_cut_in_time_and_harm_nobody(keyed):
    running, secret = keyed
    body = REQUEST + b"authorization: Bearer %b\r\ncontent-length: 9\r\n\r\nx" % secret.encode()
    with contextlib.ExitStack() as stack:
        let_pass = stack.enter_context(standing_time(running))
        slow = []
        for number in range(150):
            slow.append(stack.enter_context(connect(running)))
            slow[-1].sendall((b"", b"POST /v1", body)[number % 3])
        check_slow(running, secret, slow, let_pass)


def check_slow(running, secret, slow, let_pass):
    headers = {"authorization": f"Bearer {secret}"}
    assert (
        httpx.post(
            running.url + "/v1/chat/completions", json=BODY, headers=headers, timeout=ENDS_S
        ).status_code
        == 200
    )
    for connection in slow:
        until(
            lambda connection=connection: seconds_left(running, connection) is not None,
            "all that it sent is read",
        )
    let_pass(max(http_protocol.HEAD_TIMEOUT_S, http_protocol.BODY_TIMEOUT_S))
    ends = [statuses(connection.recv(1 << 16)) for connection in slow]
    assert ends == [[], [408], [408]] * 50


def flood(worker, reserve, num_tokens):
    """Decode sends tokens without end, or nearly."""
    for seq in range(1, num_tokens, 1000):
        item = TokenItem(room=reserve.room, epoch=reserve.epoch, seq=seq, ids=[70] * 1000)
        worker.send(Tokens(instance=worker.instance, items=[item]))


@pytest.fixture
def uncollected():
    """uncollected(): what is held for requests, while no garbage collector looks for what holds itself."""
    with without_collector(http_protocol.HttpProtocol, Answer, Entry) as uncollected:
        yield uncollected


def test_a_closed_connection_frees_its_buffers(start, uncollected):
    running, script = start()
    running.pair(script)
    assert post(running).status_code == 200
    script.holds.set()
    for stream in (True, False):
        with contextlib.closing(open_request(running, stream=stream)):
            until(lambda: running.call(lambda: running.router.dispatcher.num_running) == 1, "it runs")
    until(lambda: uncollected() == [], "nothing is left of it")


@pytest.mark.parametrize("bound", ["time", "tokens"])
def test_f16_a_client_that_never_reads_is_cut_by_time_or_by_tokens(start, monkeypatch, bound, uncollected):
    if bound == "time":
        monkeypatch.setattr(dispatcher, "CLIENT_STALL_S", 0.5)
    else:
        monkeypatch.setattr(inbox, "MAX_UNREAD", 20_000)
    running, script = start(worker_timeout_s=20)
    _, decode = running.pair(script, max_context=4_000_000, pages_total=300_000)
    script.holds.set()
    connection = open_request(
        running, stream=True, max_tokens=3_000_000, ignore_eos=True, return_token_ids=True
    )
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    flood(decode, until(lambda: decode.of(Reserve), "it runs")[0], 2_900_000)
    with contextlib.closing(connection):
        until(
            lambda: running.call(lambda: running.router.dispatcher.events["client_stalled"]) == 1, "it is cut"
        )
        assert_nothing_left(running)
        until(
            lambda: running.call(lambda: len(running.router._server._connections)) == 0,
            "its connection is gone",
        )
    until(lambda: uncollected() == [], "and so is all that was held for it")
    script.holds.clear()
    assert post(running).status_code == 200


def test_s22_an_internal_error_is_one_sentence_of_the_catalogue(start, caplog):
    running, script = start()
    running.pair(script)

    def explode(*_, **__):
        raise RuntimeError("secret at 0xdeadbeef in /etc/passwd of 10.0.0.1:8000")

    running.tokenizer.guard = explode
    reply = post(running)
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "The server failed to handle the request."
    assert INNER.search(reply.text) is None
    assert "0xdeadbeef" in caplog.text, "the operator is told"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ x.y.z }}",
        "{% if %}",
        "{{ 1/0 }}",
    ],
)
def test_s19_a_hostile_or_broken_chat_template_is_refused(tmp_path, start, template):
    directory = save_tokenizer(tmp_path / "model", template=False)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    assert load_tokenizer(str(directory)).has_chat_template
    running, script = start(model_dir=str(directory))
    running.pair(script)
    reply = post(running)
    assert reply.status_code in (400, 500)
    assert INNER.search(reply.text) is None
    assert httpx.get(running.url + "/health").status_code == 200


def parted(sent):
    """A request in one piece, in two, and byte by byte, as far as its head ends."""
    cut = sent.index(b"\r\n\r\n") + 4
    return [(sent,), (sent[:cut], sent[cut:]), (sent[: cut - 2], sent[cut - 2 : cut + 3], sent[cut + 3 :])]


@pytest.mark.parametrize("pieces", range(3))
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_protocol_upgrade_offer_is_ignored_and_the_connection_kept(keyed, is_chunked, pieces):
    """As Java's client does with every first request over plain HTTP."""
    running, secret = keyed
    body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2}).encode()
    framed = b"%x\r\n%b\r\n0\r\nx: y\r\n\r\n" % (len(body), body) if is_chunked else body
    length = b"transfer-encoding: chunked" if is_chunked else b"content-length: %d" % len(body)
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    head = REQUEST + upgrade + b"authorization: Bearer %b\r\n%b\r\n\r\n" % (secret.encode(), length)
    read = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + upgrade + b"\r\n"
    with connect(running) as connection:
        for piece in parted(head + framed)[pieces]:
            connection.sendall(piece)
            time.sleep(0.01)  # that they do not come together
        connection.sendall(read + head + framed + read)
        answer = b""
        while len(statuses(answer)) < 4 or not answer.endswith(b"}"):
            part = connection.recv(1 << 16)
            assert part, (answer, "closed before the last answer")
            answer += part
    assert statuses(answer) == [200] * 4
    assert answer.count(b'"text_completion"') == answer.count(b'{"status":"ok"}') == 2


def test_a_body_after_an_upgrade_offer_has_the_usual_bounds(keyed):
    running, secret = keyed
    offer = b"connection: upgrade\r\nupgrade: websocket\r\n"
    head = REQUEST + offer + b"authorization: Bearer %b\r\n" % secret.encode()
    assert statuses(told(running, head + b"content-length: 100000000\r\n\r\n")) == [413]
    assert statuses(told(running, head + b"content-length: 10\r\n\r\n{")) == [408]
    assert statuses(told(running, REQUEST + offer + b"content-length: 2\r\n\r\n{}")) == [401]
    chunks = head + b"transfer-encoding: chunked\r\n\r\n"
    assert statuses(told(running, chunks + b"100000\r\n%b\r\n" % (b"x" * (1 << 20)) * 6)) == [413]
    assert statuses(told(running, chunks + b"0\r\nx: " + b"a" * (1 << 20))) == [431]
    many = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + offer + b"\r\n"
    assert set(statuses(told(running, many * 2000))) <= {200, 429}
    assert httpx.get(running.url + "/health").status_code == 200


@pytest.mark.parametrize("offer", [b"", b"connection: upgrade\r\nupgrade: h2c\r\n"])
def test_blanks_after_a_content_length_are_ignored(keyed, offer):
    running, secret = keyed
    read = b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0 \t\r\n" + offer + b"\r\n"
    last = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert statuses(told(running, read + last)) == [200, 200]
    head = REQUEST + offer + b"authorization: Bearer %b\r\n" % secret.encode()
    assert statuses(told(running, head + b"content-length: 100000000 \r\n\r\n")) == [413]


def test_encoded_bodies_and_incomplete_urls_are_refused_with_a_remedy(keyed):
    running, secret = keyed
    headers = {"authorization": f"Bearer {secret}"}
    packed = httpx.post(
        running.url + "/v1/completions", content=b"x", headers=headers | {"content-encoding": "gzip"}
    )
    assert (packed.status_code, "'gzip'" in packed.json()["error"]["message"]) == (415, True)
    for path in ("/chat/completions", "/v1/v1/models", "/v1/chat/completions/"):
        reply = httpx.post(running.url + path, headers=headers)
        assert reply.status_code == 404
        assert "base URL ends with /v1" in reply.json()["error"]["message"]
    assert "base URL" not in httpx.post(running.url + "/v1/embeddings", headers=headers).text
