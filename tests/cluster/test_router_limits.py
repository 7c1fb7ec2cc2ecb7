"""The router's bounds: on time, on accounts that come late, and on what a client may leave unfinished."""

import contextlib
import json
import socket
import threading
import time
from dataclasses import replace

import httpx
import openai
import pytest
from baton.cluster.protocol.messages import DecodeTimeline, Failed, Gone, Reserve, TokenItem, Tokens
from baton.router.http import http_protocol
from baton.tests.cluster.http_time import seconds_left, standing_time
from baton.tests.cluster.router_fakes import (
    BODY,
    PATIENCE,
    assert_nothing_left,
    in_thread,
    open_request,
    post,
    until,
)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_over_its_time_limit_is_504_or_an_error_frame(start, is_stream):
    running, script = start(request_timeout_s=20.0)
    script.holds.set()
    _, decode = running.pair(script)
    _, replies = in_thread(lambda: post(running, stream=is_stream))
    until(
        lambda: decode.of(Reserve) and running.call(lambda: _num_output(running)) == 1,
        "the first token is there",
    )
    running.call(lambda: running.let_pass(21.0))
    reply = until(lambda: replies, "an answer")[0]
    last = reply.text.strip().splitlines()[-1].removeprefix("data: ")
    assert json.loads(last)["error"]["code"] == "deadline_exceeded"
    assert reply.status_code == (200 if is_stream else 504)  # a stream had begun
    assert 0 < decode.of(Reserve)[0].deadline_ms <= 20_000
    assert_nothing_left(running)


def _num_output(running):
    return max((entry.room.num_output for entry in running.router.dispatcher._entries.values()), default=0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_clients_timeout_holds_even_when_workers_are_frozen(start, role):
    running, script = start()
    frozen = dict(zip(("prefill", "decode"), running.pair(script), strict=True))[role]
    frozen._script = lambda worker, message: None  # beats, and does nothing
    began = time.monotonic()
    headers = {"x-baton-timeout-ms": "300"}
    reply = httpx.post(running.url + "/v1/chat/completions", json=BODY, headers=headers, timeout=60)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert time.monotonic() - began < PATIENCE.token_s


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "soon", "86400001", "9" * 30])
def test_a_timeout_that_is_no_number_of_milliseconds_is_refused(start, value):
    running, _ = start()
    reply = httpx.post(
        running.url + "/v1/chat/completions", json=BODY, headers={"x-baton-timeout-ms": value}, timeout=60
    )
    assert (reply.status_code, "x-baton-timeout-ms" in reply.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("value", ["false", "1", ""])
def test_an_objection_to_recording_in_other_words_is_refused(start, value):
    running, _ = start()
    url, headers = running.url + "/v1/chat/completions", {"x-baton-record": value}
    reply = httpx.post(url, json=BODY, headers=headers, timeout=60)
    assert (reply.status_code, "x-baton-record" in reply.json()["error"]["message"]) == (400, True)


def test_a_deadline_reported_by_a_worker_ends_the_request(start):
    running, script = start()
    _, decode = running.pair(script)

    def late(worker, message):
        if isinstance(message, Reserve):
            told = {"kind": "DeadlineExceeded", "message": "late", "retryable": False}
            worker.send(Failed(room=message.room, epoch=message.epoch, instance=worker.instance, **told))
        else:
            script.decode(worker, message)

    decode._script = late
    assert post(running).status_code == 504


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("answers", [True, False])
def test_tokens_cut_by_a_stop_string_count_by_decodes_last_report(start, is_stream, answers):
    running, script = start(PATIENCE if answers else replace(PATIENCE, accounts_s=0.3))
    _, decode = running.pair(script)

    def endless(worker, message):
        if isinstance(message, Reserve):
            script.holds.set()
            script.decode(worker, message)
            item = TokenItem(room=message.room, epoch=0, seq=1, ids=script.output[1:20])
            worker.send(Tokens(instance=worker.instance, items=[item]))
        elif answers:
            account = DecodeTimeline(verify_steps=5, drafted_tokens=15, accepted_tokens=9, handoff_bytes=512)
            worker.send(
                Gone(room=message.room, epoch=message.epoch, instance=worker.instance, timeline=account)
            )

    decode._script = endless
    began = time.monotonic()
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        asked = BODY | {"stop": "wörld", "extra_headers": {"x-baton-timeline": "1"}}
        if is_stream:
            chunks = list(
                client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
            )
            text, last = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks[-1]
        else:
            last = client.chat.completions.create(**asked)
            text = last.choices[0].message.content
    assert text == "Hello "
    assert last.usage.draft_tokens_details["accepted_tokens"] == (9 if answers else 0)
    assert last.timeline["accept_length"] == (2.8 if answers else None)
    assert time.monotonic() - began < PATIENCE.accounts_s
    if answers:
        assert (
            'baton_accepted_tokens_total{model_name="tiny"} 9.0' in httpx.get(running.url + "/metrics").text
        )


def test_a_stream_without_accounts_ends_without_waiting_for_them(start):
    running, script = start()
    _, decode = running.pair(script)
    held = []

    def endless(worker, message):
        if isinstance(message, Reserve):
            script.holds.set()
            script.decode(worker, message)
            item = TokenItem(room=message.room, epoch=0, seq=1, ids=script.output[1:20])
            worker.send(Tokens(instance=worker.instance, items=[item]))
        else:
            held.append(message)

    decode._script = endless
    with httpx.stream(
        "POST", running.url + "/v1/chat/completions", json=BODY | {"stream": True, "stop": "wörld"}
    ) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    entries = running.call(lambda: list(running.router.dispatcher._entries.values()))
    assert [entry.room.is_settling for entry in entries] == [True]


def test_many_empty_messages_are_refused_or_tokenised_off_the_event_loop(start):
    running, script = start()
    running.pair(script)
    threads = []
    guard, encode = running.tokenizer.guard, running.tokenizer.encode_rendered

    def noted(work):
        def do(*args, **more):
            threads.append(threading.current_thread().name)
            return work(*args, **more)

        return do

    running.tokenizer.guard, running.tokenizer.encode_rendered = noted(guard), noted(encode)
    empty = {"role": "user", "content": ""}
    assert (
        post(running, messages=[empty] * 4000 + BODY["messages"]).status_code == 400
    )  # by their roles alone
    assert post(running, messages=[empty] * 80 + BODY["messages"]).status_code in (200, 400)
    assert post(running).status_code == 200
    assert [name.startswith("tokenize") for name in threads] == [True, True, False, False]


def connect(running):
    return socket.create_connection(("127.0.0.1", running.router.port), timeout=60)


def status_line(reply):
    return reply.split(b"\r\n")[0].decode()


def read_all(connection):
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            data += part
    return data


def test_an_idle_connection_is_closed_after_the_keep_alive_time(start):
    running, _ = start(keep_alive_s=90.0)
    with standing_time(running) as let_pass, connect(running) as connection:
        connection.sendall(HEAD + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        left = until(lambda: seconds_left(running, connection), "the next request is awaited")
        assert left == pytest.approx(90.0)
        let_pass(left)
        assert read_all(connection) == b""


def test_a_stream_that_pauses_gets_comments_and_stays_whole(start):
    running, script = start()
    _, decode = running.pair(script)
    script.holds.set()
    with standing_time(running) as let_pass, contextlib.closing(open_request(running, stream=True)) as client:
        response = client.getresponse()
        (reserve,) = until(lambda: decode.of(Reserve), "it runs")
        lines = iter(response.readline, b"")
        assert next(line for line in lines if line.startswith(b"data: "))
        for _ in range(2):
            let_pass(http_protocol.COMMENT_S)
            assert next(line for line in lines if line.startswith(b":")) == b": keep-alive\n"
        script.stream(decode, reserve)
        last = [line for line in lines if line.strip()][-1]
        assert last == b"data: [DONE]\n"


HEAD = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /hea", HEAD, HEAD + b"\r\n" + HEAD])
def test_a_request_head_that_is_not_complete_in_time_is_cut(start, sent):
    running, _ = start()
    with standing_time(running) as let_pass, connect(running) as connection:
        connection.sendall(sent)
        left = until(lambda: seconds_left(running, connection), "it is read, and the rest awaited")
        assert left == pytest.approx(http_protocol.HEAD_TIMEOUT_S)
        let_pass(left)
        reply = read_all(connection)
    if sent in (b"GET /hea", HEAD):
        assert status_line(reply).startswith("HTTP/1.1 408 ")
    assert httpx.get(running.url + "/health").status_code == 200


def test_a_slow_body_after_the_head_is_not_cut(start):
    running, script = start(queue_timeout_s=30)
    script.holds.set()
    _, decode = running.pair(script)
    with standing_time(running) as let_pass:
        _, results = in_thread(lambda: post(running))
        until(lambda: decode.of(Reserve), "placed")
        let_pass(10 * http_protocol.HEAD_TIMEOUT_S)
        running.call(running.router._server._sweep)
        script.stream(decode, decode.of(Reserve)[0])
        assert until(lambda: results, "an answer")[0].status_code == 200


@pytest.mark.parametrize(
    "lines",
    [
        b"x: " + b"a" * 17_000 + b"\r\n\r\n",
        b"x: " + b"a" * 17_000,  # and no end
        b"".join(b"x%d: a\r\n" % i for i in range(70)) + b"\r\n",
        b"".join(b"x%d: %s\r\n" % (i, b"a" * 1000) for i in range(20)),
    ],
)
def test_a_head_over_its_bounds_is_431(start, lines):
    running, _ = start()
    with connect(running) as connection:
        connection.sendall(HEAD + lines)
        reply = read_all(connection)
    assert status_line(reply).startswith("HTTP/1.1 431 ")
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_an_endless_target_is_431_and_bytes_that_are_no_http_are_400(start):
    running, _ = start()
    for sent, status in (
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", "431"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", "400"),
    ):
        with connect(running) as connection:
            connection.sendall(sent)
            assert status_line(read_all(connection)).split()[1] == status


def test_bodies_larger_than_the_head_limit_and_many_per_connection_work(start):
    running, script = start()
    running.pair(script)
    with httpx.Client() as client:
        for _ in range(3):
            padded = json.dumps(BODY).encode() + b" " * 100_000
            reply = client.post(running.url + "/v1/chat/completions", content=padded, timeout=60)
            assert reply.status_code == 200
            assert client.get(running.url + "/health", headers={"x": "y" * 9000}).status_code == 200


def test_connections_over_the_cap_are_503_and_make_room_when_they_close(start):
    running, _ = start(max_connections=2)
    idle = [connect(running) for _ in range(2)]
    until(lambda: status_line(_ask_health(running)).startswith("HTTP/1.1 503 "), "the cap is reached")
    for connection in idle:
        connection.close()
    until(lambda: status_line(_ask_health(running)).startswith("HTTP/1.1 200 "), "room again")


def _ask_health(running):
    with connect(running) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(HEAD + b"connection: close\r\n\r\n")
        return read_all(connection)


@pytest.mark.parametrize(
    ("chat_max_tokens", "grows", "expected"),
    [
        (7, True, 7), (100_000, True, None), (0, True, None), (0, False, None), (-1, True, None),
        (-1, False, 1024),
    ],
)  # fmt: skip
def test_a_chat_without_max_tokens_gets_the_default_or_the_rest(start, chat_max_tokens, grows, expected):
    running, script = start(chat_max_tokens=chat_max_tokens)
    _, decode = running.pair(script, max_context=3000, pages_total=1000, grows=grows)
    assert post(running, max_tokens=None).status_code == 200
    reserve = decode.of(Reserve)[0]
    assert reserve.sampling.max_new_tokens == (expected or 3000 - len(reserve.prompt_ids))
