"""Idempotency-Key over HTTP: one generation for a key, however often and however early it is asked again."""

import httpx
import pytest
from baton.cluster.protocol.messages import Cancel, Prefill, Reserve
from baton.router.endpoints import idempotency
from baton.tests.cluster.router_fakes import ANSWER, BODY, in_thread, open_request, until

KEY = {"idempotency-key": "order-17"}


def ask(running, headers=KEY, **more):
    return httpx.post(running.url + "/v1/chat/completions", json=BODY | more, headers=headers, timeout=60)


def ask_and_leave(running, decode, **more):
    """A client that leaves once its request is at the workers."""
    connection = open_request(running, headers=KEY, **more)
    until(lambda: decode.of(Reserve), "a Reserve")
    connection.close()


def events(running):
    return running.call(lambda: dict(running.router.dispatcher.events))


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_repeated_request_gets_the_same_bytes_without_a_worker(start, is_stream):
    running, script = start()
    prefill, _ = running.pair(script)
    first, second = ask(running, stream=is_stream), ask(running, stream=is_stream)
    assert (first.status_code, first.content) == (200, second.content)
    assert (
        first.text.endswith("[DONE]\n\n")
        if is_stream
        else ANSWER.startswith(first.json()["choices"][0]["message"]["content"])
    )
    assert second.headers["content-type"] == first.headers["content-type"]
    assert len(prefill.of(Prefill)) == 1
    assert events(running)["idempotent_replayed"] == 1
    assert ask(running, {"idempotency-key": "order-18"}, stream=is_stream).content != first.content
    assert len(prefill.of(Prefill)) == 2


@pytest.mark.parametrize("is_stream", [False, True])
def test_concurrent_repeats_share_a_generation_whose_first_client_left(start, is_stream):
    running, script = start()
    prefill, decode = running.pair(script)
    script.holds.set()
    ask_and_leave(running, decode, stream=is_stream)
    waiting = [in_thread(lambda: ask(running, stream=is_stream))[1] for _ in range(2)]
    until(lambda: events(running).get("idempotent_attached") == 2, "both wait")
    script.holds.clear()
    script.stream(decode, until(lambda: decode.of(Reserve), "a Reserve")[0])
    answers = [until(lambda results=results: results, "an answer")[0] for results in waiting]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].content == answers[1].content
    assert len(prefill.of(Prefill)) == 1


def test_another_body_under_a_known_key_is_an_error_that_names_the_key(start):
    running, script = start()
    running.pair(script)
    assert ask(running).status_code == 200
    answer = ask(running, max_tokens=3)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert "order-17" in answer.json()["error"]["message"]


@pytest.mark.parametrize("key", ["", "x" * 256, "caf\xe9"])
def test_an_invalid_idempotency_key_is_refused(start, key):
    running, _ = start()
    answer = ask(running, {"idempotency-key": key.encode("latin-1")})
    assert (answer.status_code, "Idempotency-Key" in answer.json()["error"]["message"]) == (400, True)


def test_a_failed_answer_is_not_stored(start):
    running, script = start()
    assert ask(running).status_code == 503
    running.pair(script)
    assert ask(running).status_code == 200


def test_the_seed_comes_from_key_and_body_unless_the_client_names_one(start):
    seeds = []
    for _ in range(2):  # the second router knows nothing of the first
        running, script = start()
        prefill, _ = running.pair(script)
        ask(running)
        ask(running, {"idempotency-key": "other"})
        ask(running, {"idempotency-key": "third"}, seed=5)
        seeds.append([message.sampling.seed for message in prefill.of(Prefill)])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    assert seeds[0][2] == 5


def test_a_generation_without_readers_is_cancelled_and_forgotten(start, monkeypatch):
    monkeypatch.setattr(idempotency, "ABANDONED_S", 0.1)
    running, script = start()
    prefill, decode = running.pair(script)
    script.holds.set()
    ask_and_leave(running, decode)
    until(lambda: decode.of(Cancel), "the Cancel")
    script.holds.clear()
    until(lambda: ask(running).status_code == 200, "a new generation")
    assert len(prefill.of(Prefill)) == 2


def test_stored_answers_are_bounded_in_age_and_number(start, monkeypatch):
    running, script = start()
    prefill, _ = running.pair(script)
    monkeypatch.setattr(idempotency, "MAX_KEPT", 2)
    for i in (0, 1, 2, 3, 0):
        ask(running, {"idempotency-key": str(i)})
    assert len(prefill.of(Prefill)) == 5
    monkeypatch.setattr(idempotency, "KEEP_S", 0.0)
    ask(running, {"idempotency-key": "0"})
    assert len(prefill.of(Prefill)) == 6
