"""Requests are refused before their text is parsed: by a caller's limits, a full queue, or a full parser."""

import threading

import httpx
import pytest
from baton.cluster.protocol.messages import Reserve
from baton.deploy.keys.api_keys import add
from baton.router.http import parse_limiter
from baton.tests.cluster.router_fakes import BODY, assert_nothing_left, in_thread, open_request, post, until

LONG = "word " * 800  # not read on the event loop


class Encoding:
    """Stands in for the tokenizer's `encode`: counts long texts and blocks them until `goes_on` is set."""

    def __init__(self, tokenizer):
        self._encode = tokenizer.encode
        self.num_long = 0
        self.goes_on = threading.Event()
        self.goes_on.set()
        tokenizer.encode = self

    def __call__(self, text, **more):
        if len(text) > 2000:
            self.num_long += 1
            assert self.goes_on.wait(60)
        return self._encode(text, **more)


def complete(running, prompt=LONG, secret="", **more):
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    body = {"model": BODY["model"], "prompt": prompt, "max_tokens": 4, **more}
    return httpx.post(running.url + "/v1/completions", json=body, headers=headers, timeout=60)


def code_of(reply):
    return reply.status_code, reply.json()["error"]["code"]


@pytest.fixture
def keyed(tmp_path, start):
    """(router, the worker's script, key file)"""
    path = tmp_path / "api.json"
    add(path, {"name": "alice"})
    running, script = start(api_keys=str(path))
    running.pair(script, max_context=100_000, pages_total=10_000)
    return running, script, path


def test_a_request_over_its_rate_is_refused_before_tokenising(keyed):
    running, _, path = keyed
    few, _ = add(path, {"name": "bob", "requests_per_minute": 1})
    until(lambda: complete(running, "a", few).status_code == 200, "the new key works")
    encoding = Encoding(running.tokenizer)
    assert code_of(complete(running, secret=few)) == (429, "rate_limit_exceeded")
    assert encoding.num_long == 0


def test_a_request_being_tokenised_counts_for_its_key(keyed):
    running, _, path = keyed
    one, _ = add(path, {"name": "bob", "max_requests": 1})
    until(lambda: complete(running, "a", one).status_code == 200, "the new key works")
    encoding = Encoding(running.tokenizer)
    encoding.goes_on.clear()
    thread, results = in_thread(lambda: complete(running, secret=one))
    until(lambda: encoding.num_long, "its text is read")
    for path in ("/v1/completions", "/tokenize"):
        body = {"model": BODY["model"], "prompt": "a"}
        reply = httpx.post(
            running.url + path, json=body, headers={"authorization": f"Bearer {one}"}, timeout=60
        )
        assert code_of(reply) == (429, "rate_limit_exceeded")
    encoding.goes_on.set()
    thread.join(60)
    assert results[0].status_code == 200
    assert_nothing_left(running)


@pytest.mark.parametrize(("path", "more"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_rates_hold_also_for_requests_without_a_worker(keyed, path, more):
    running, _, keys = keyed
    few, _ = add(keys, {"name": "bob", "requests_per_minute": 3})

    def ask():
        return httpx.post(
            running.url + path, json=more, headers={"authorization": f"Bearer {few}"}, timeout=60
        )

    until(lambda: ask().status_code == 200, "the new key works")
    assert [ask().status_code for _ in range(3)] == [200, 200, 429]


def test_full_queue_is_429_and_a_freed_slot_serves_the_waiting(start):
    running, script = start(max_queue=1)
    script.holds.set()
    _, decode = running.pair(script, max_running=1)
    first, _ = in_thread(lambda: post(running))
    until(lambda: decode.of(Reserve), "the slot is taken")
    second, results = in_thread(lambda: post(running))
    until(lambda: running.call(lambda: running.router.dispatcher.num_queued) == 1, "the second waits")
    reply = post(running)
    assert reply.status_code == 429
    assert int(reply.headers["retry-after"]) > 0
    script.holds.clear()
    script.stream(decode, decode.of(Reserve)[0])
    first.join(60)
    second.join(60)
    assert results[0].status_code == 200
    assert_nothing_left(running)


def test_a_full_queue_refuses_untokenised_all_but_more_urgent_requests(start):
    running, script = start(max_queue=1)
    script.holds.set()
    _, decode = running.pair(script, max_running=1, max_context=100_000, pages_total=10_000)
    threads = [in_thread(lambda: post(running))]
    until(lambda: decode.of(Reserve), "the slot is taken")
    threads.append(in_thread(lambda: post(running)))
    until(lambda: running.call(lambda: running.router.dispatcher.num_queued) == 1, "the second waits")
    encoding = Encoding(running.tokenizer)
    assert complete(running).status_code == 429
    assert encoding.num_long == 0
    urgent, results = in_thread(lambda: complete(running, priority=-10))
    threads[1][0].join(60)
    assert threads[1][1][0].status_code == 429, "it was displaced"
    assert encoding.num_long == 1
    script.holds.clear()
    script.stream(decode, decode.of(Reserve)[0])
    urgent.join(60)
    assert results[0].status_code == 200
    threads[0][0].join(60)
    assert_nothing_left(running)


def test_concurrent_tokenising_is_bounded(start, monkeypatch):
    monkeypatch.setattr(parse_limiter, "MAX_READING", 2)
    running, script = start()
    running.pair(script, max_context=100_000, pages_total=10_000)
    encoding = Encoding(running.tokenizer)
    encoding.goes_on.clear()
    threads = [in_thread(lambda: complete(running)) for _ in range(2)]
    until(lambda: encoding.num_long == 2, "two texts are read")
    for path in ("/v1/completions", "/tokenize"):
        reply = httpx.post(running.url + path, json={"model": BODY["model"], "prompt": LONG}, timeout=60)
        assert reply.status_code == 429
    assert encoding.num_long == 2
    encoding.goes_on.set()
    for thread, results in threads:
        thread.join(60)
        assert results[0].status_code == 200
    assert_nothing_left(running)


def test_a_client_that_leaves_before_its_turn_is_not_tokenised(start):
    running, script = start()
    running.pair(script, max_context=100_000, pages_total=10_000)
    encoding = Encoding(running.tokenizer)
    encoding.goes_on.clear()
    readers = [in_thread(lambda: complete(running)) for _ in range(2)]  # both threads
    until(lambda: encoding.num_long == 2, "all threads read")
    room = running.router.dispatcher.admission.parse_limiter
    prompt = [{"role": "user", "content": LONG}]
    leaving = [open_request(running, messages=prompt), open_request(running, messages=prompt)]
    keyed = open_request(running, messages=prompt, headers={"idempotency-key": "again"})
    until(lambda: running.call(lambda: room.num_requests) == 5, "they wait for a thread")
    for connection in (*leaving, keyed):
        connection.close()
    until(lambda: running.call(lambda: len(running.router._server._connections)) == 2, "they have left")
    guarded = []
    guard = running.tokenizer.guard
    running.tokenizer.guard = lambda *args, **more: guarded.append(1) or guard(*args, **more)
    encoding.goes_on.set()
    until(lambda: running.call(lambda: room.num_requests) == 0, "nothing is read")
    assert guarded == [1], "that of the key"
    for thread, results in readers:
        thread.join(60)
        assert results[0].status_code == 200


def test_tokenize_checks_the_length_before_tokenising(start):
    running, script = start()
    running.pair(script)
    encoding = Encoding(running.tokenizer)
    for more in ({"prompt": "x" * 3_000_000}, {"messages": [{"role": "user", "content": "x" * 3_000_000}]}):
        assert code_of(httpx.post(running.url + "/tokenize", json=more, timeout=60)) == (
            400,
            "context_length_exceeded",
        )
    assert encoding.num_long == 0
    for messages in ([], [{"role": "user", "content": "a"}] * 20_000):
        reply = httpx.post(running.url + "/tokenize", json={"messages": messages}, timeout=60)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
