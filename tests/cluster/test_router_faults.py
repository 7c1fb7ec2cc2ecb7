"""The router under faults: clients leave, workers refuse, fail or vanish; nothing hangs and nothing leaks."""

import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import msgspec
import openai
import pytest
from baton.cluster.protocol.messages import (
    Cancel,
    Failed,
    FirstToken,
    Goodbye,
    Prefill,
    Refused,
    Reserve,
    TokenItem,
    Tokens,
)
from baton.router import app
from baton.tests.cluster.router_fakes import (
    ANSWER,
    BODY,
    LITTLE_PATIENCE,
    MODEL,
    PATIENCE,
    assert_nothing_left,
    in_thread,
    open_request,
    post,
    until,
)
from baton.tests.cluster.test_router_failover import until_heard


def test_without_workers_it_is_alive_not_ready_and_answers_503(start):
    running, script = start()
    assert httpx.get(running.url + "/health").status_code == 200
    assert httpx.get(running.url + "/ready").status_code == 503
    reply = post(running)
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) > 0
    assert post(running, n=0).status_code == 400
    body = {
        "model": MODEL,
        "prompt": [399],
        "max_tokens": 1,
    }  # beyond the tokenizer, within the workers' vocabulary
    assert httpx.post(running.url + "/v1/completions", json=body).status_code == 503
    running.add("prefill", script.prefill)
    running.add("decode", script.decode, fingerprint="another")
    until(lambda: len(httpx.get(running.url + "/status").json()["workers"]) == 2, "both workers are known")
    assert "equal fingerprints" in until(lambda: _reason(running, "fingerprints"), "the reason is shown")
    assert post(running).status_code == 503


def _reason(running, word):
    reason = httpx.get(running.url + "/ready").json().get("reason", "")
    return reason if word in reason else ""


@pytest.mark.parametrize("is_stream", [False, True])
def test_client_that_leaves_is_cancelled_on_both_workers(start, is_stream):
    running, script = start()
    script.holds.set()
    prefill, decode = running.pair(script)
    connection = open_request(running, stream=is_stream)
    if is_stream:
        assert connection.getresponse().status == 200  # the first token
    until(lambda: decode.of(Reserve) and prefill.of(Prefill), "the room is placed")
    connection.close()
    room = decode.of(Reserve)[0].room
    for worker in (decode, prefill):  # again and again, until it says Gone
        until(lambda worker=worker: {c.room for c in worker.of(Cancel)} == {room}, f"{worker.role} was told")
    assert_nothing_left(running)


def test_a_client_that_leaves_the_queue_is_removed(start):
    running, script = start()
    script.holds.set()
    _, decode = running.pair(script, max_running=1)
    first = open_request(running)
    until(lambda: decode.of(Reserve), "the slot is taken")
    second = open_request(running)
    until(lambda: running.call(lambda: running.router.dispatcher.num_queued) == 1, "the second waits")
    second.close()
    until(lambda: running.call(lambda: running.router.dispatcher.num_queued) == 0, "the second is forgotten")
    assert len(decode.of(Reserve)) == 1
    first.close()
    assert_nothing_left(running)


def test_stop_string_cancels_a_running_room_on_both_workers(start):
    running, script = start()
    prefill, decode = running.pair(script)

    def endless(worker, message):
        if isinstance(message, Reserve):
            script.holds.set()
            script.decode(worker, message)
            item = TokenItem(room=message.room, epoch=0, seq=1, ids=script.output[1:20])
            worker.send(Tokens(instance=worker.instance, items=[item]))
        else:
            script.decode(worker, message)

    decode._script = endless
    reply = post(running, stop="wörld").json()
    assert reply["choices"][0]["message"]["content"] == "Hello "
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert_nothing_left(running)
    assert {c.room for c in decode.of(Cancel)} == {c.room for c in prefill.of(Cancel)} != set()


def test_wait_that_takes_too_long_is_429(start):
    running, script = start(queue_timeout_s=0.3)
    running.pair(script, pages_total=4)
    script.holds.set()
    holder = open_request(running)
    until(lambda: running.call(lambda: running.router.dispatcher.num_running) == 1, "the pages are taken")
    started, reply = time.monotonic(), post(running)
    assert time.monotonic() - started < PATIENCE.token_s
    assert (reply.status_code, int(reply.headers["retry-after"]) >= 10) == (429, True), (
        "one room a while is the pace"
    )
    holder.close()
    assert_nothing_left(running)


def test_a_request_too_large_for_every_decode_worker_is_400_with_numbers(start):
    running, script = start()
    running.add("prefill", script.prefill)
    running.add("decode", script.decode, pages_total=4)
    until(lambda: running.call(lambda: running.router.dispatcher.is_ready), "ready")
    reply = post(running, max_tokens=100)
    assert reply.status_code == 400
    assert "64" in reply.json()["error"]["message"]
    assert "100" in reply.json()["error"]["message"]


def test_refusal_puts_the_request_back_and_cancels_prefill(start):
    running, script = start()
    prefill, decode = running.pair(script)

    def refuse_once(worker, message):
        if isinstance(message, Reserve) and message.epoch == 0:
            worker.send(
                Refused(
                    room=message.room, epoch=0, instance=worker.instance, reason="full", retry_after_ms=50
                )
            )
        else:
            script.decode(worker, message)

    decode._script = refuse_once
    reply = post(running, max_tokens=200)
    assert reply.json()["choices"][0]["message"]["content"] == ANSWER
    assert [reserve.epoch for reserve in decode.of(Reserve)] == [0, 1]
    assert {cancel.epoch for cancel in prefill.of(Cancel)} == {0}
    assert_nothing_left(running)


def fail_with(worker, message, retryable):
    told = {"kind": "TransferTimeout", "message": "no progress at 10.0.0.7", "retryable": retryable}
    worker.send(Failed(room=message.room, epoch=message.epoch, instance=worker.instance, **told))


def test_failure_before_the_first_token_is_tried_once_more_on_another_pair(start):
    running, script = start()
    running.pair(script)
    other = running.add("decode", script.decode)
    until(lambda: len(running.call(lambda: list(running.router.dispatcher.registry))) == 3, "three workers")
    until(
        lambda: running.call(lambda: all(w.is_serving for w in running.router.dispatcher.registry)),
        "all serve",
    )

    def fail_first(worker, message):
        if isinstance(message, Reserve) and message.epoch == 0:
            fail_with(worker, message, retryable=True)
        else:
            script.decode(worker, message)

    for worker in running.workers[1:]:
        worker._script = fail_first
    assert post(running, max_tokens=200).json()["choices"][0]["message"]["content"] == ANSWER
    assert [len(worker.of(Reserve)) for worker in (running.workers[1], other)] == [1, 1]
    assert_nothing_left(running)


@pytest.mark.parametrize("retryable", [True, False])
def test_a_lasting_failure_is_an_error_without_the_workers_text(start, retryable):
    running, script = start()
    _, decode = running.pair(script)

    def fail_always(worker, message):
        if isinstance(message, Reserve):
            fail_with(worker, message, retryable)
        else:
            script.decode(worker, message)

    decode._script = fail_always
    reply = post(running)
    assert reply.status_code == 502
    assert "10.0.0.7" not in reply.text
    assert len(decode.of(Reserve)) == (3 if retryable else 1)
    assert_nothing_left(running)


def test_a_failure_after_the_first_token_sends_an_error_frame(start):
    running, script = start()
    script.holds.set()
    _, decode = running.pair(script)
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(stream=True, **BODY)
        first = next(iter(stream))
        assert first.choices[0].delta.role == "assistant"
        fail_with(decode, until(lambda: decode.of(Reserve), "decode has it, too")[0], False)
        with pytest.raises(openai.APIError, match="failed"):
            list(stream)
    assert len(decode.of(Reserve)) == 1
    assert_nothing_left(running)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_vanishes_before_any_token_hangs_no_request(start, role):
    running, script = start()
    mute = running.pair(script)[role == "decode"]
    mute._script = lambda worker, message: None
    _, results = in_thread(lambda: post(running))
    until(lambda: mute.of(Prefill if role == "prefill" else Reserve), "the room is placed")
    mute.close()
    reply = until(lambda: results, "an answer")[0]
    assert reply.status_code in (502, 503)
    assert reply.json()["error"]["message"]
    assert_nothing_left(running)
    assert httpx.get(running.url + "/ready").status_code == 503


def test_a_worker_whose_connection_ended_gets_no_new_requests(start, monkeypatch):
    running, script = start()
    _, decode = running.pair(script)
    other = running.add("decode", script.decode)
    dispatcher = running.router.dispatcher
    until(
        lambda: running.call(lambda: sum(worker.is_serving for worker in dispatcher.registry)) == 3,
        "all three serve",
    )
    stop_ticking(running, monkeypatch)  # its timers find nobody
    decode.close()
    gone = dispatcher.registry.get(decode.instance)
    until(lambda: running.call(lambda: gone.unreachable_since is not None), "its end is noticed")
    assert [post(running).status_code for _ in range(4)] == [200] * 4
    assert len(other.of(Reserve)) == 4


def stop_ticking(running, monkeypatch):
    """Stops the dispatcher's ticks after one more, which does nothing and runs on the router's own loop."""
    ticked = threading.Event()

    def tick(**_):
        monkeypatch.setattr(app, "TICK_S", 600.0)
        ticked.set()

    monkeypatch.setattr(running.router.dispatcher, "tick", tick)
    assert ticked.wait(60)


def test_queue_changes_trigger_one_worker_search_per_tick_at_most(start, monkeypatch):
    running, _ = start()
    probes = []
    monkeypatch.setattr(running.router.dispatcher, "probe", lambda: probes.append(1))
    stop_ticking(running, monkeypatch)
    probes.clear()
    for _ in range(50):
        running.call(running.router._on_left)
    until(lambda: probes, "they are looked for")
    running.call(lambda: None)
    assert probes == [1]


def test_a_worker_that_reports_dropped_rooms_is_not_waited_for(start):
    running, script = start()
    script.holds.set()
    _, decode = running.pair(script)
    with httpx.stream(
        "POST", running.url + "/v1/chat/completions", json=BODY | {"stream": True}, timeout=60
    ) as reply:
        lines = reply.iter_lines()
        next(lines)
        began = time.monotonic()
        decode.send(msgspec.structs.replace(decode.hello, generation=1))
        again = until(lambda: decode.of(Reserve)[1:], "the room is placed again")[0]
        assert time.monotonic() - began < PATIENCE.token_s / 2
    assert (again.epoch, again.num_output) == (1, 1)
    assert_nothing_left(running)
    script.holds.clear()
    assert post(running).status_code == 200


def test_worker_whose_loop_hangs_is_lost_though_its_connection_lives(start):
    running, script = start(worker_timeout_s=60.0)
    prefill, decode = running.pair(script)
    decode.beats = False
    for _ in range(2):
        running.call(lambda: running.let_pass(40.0))
        until_heard(running, prefill)
    until(lambda: httpx.get(running.url + "/ready").status_code == 503, "not ready")
    assert post(running).status_code == 503
    decode.beats = True
    decode.send(decode.hello)
    until(lambda: httpx.get(running.url + "/ready").status_code == 200, "ready again")
    assert post(running).status_code == 200


def test_a_silent_worker_with_heartbeats_is_given_up_per_room(start):
    running, script = start(LITTLE_PATIENCE)
    _, decode = running.pair(script)
    decode._script = lambda worker, message: None
    started = time.monotonic()
    reply = post(running)
    assert reply.status_code == 502
    assert time.monotonic() - started < PATIENCE.reserve_s
    assert_nothing_left(running)


def test_tokens_of_a_room_that_is_over_are_answered_with_cancel(start):
    running, script = start()
    prefill, decode = running.pair(script)
    for _ in range(3):
        decode.send(
            Tokens(instance=decode.instance, items=[TokenItem(room="ab" * 16, epoch=0, seq=1, ids=[5])])
        )
    prefill.send(FirstToken(room="cd" * 16, epoch=0, instance=prefill.instance, token=5))
    until(lambda: decode.of(Cancel), "decode is told")
    until(lambda: prefill.of(Cancel), "prefill is told")
    assert post(running).status_code == 200
    assert len(decode.of(Cancel)) == 1


def test_a_draining_worker_gets_no_new_request(start):
    running, script = start()
    _, decode = running.pair(script)
    decode.send(Goodbye(instance=decode.instance))
    until(lambda: httpx.get(running.url + "/ready").status_code == 503, "not ready")
    assert post(running).status_code == 503
    assert decode.of(Reserve) == []


def test_drain_ends_running_streams_whole_and_takes_nothing_new(start):
    running, script = start()
    script.holds.set()
    _, decode = running.pair(script)
    with httpx.stream(
        "POST", running.url + "/v1/chat/completions", json=BODY | {"stream": True}, timeout=60
    ) as reply:
        lines = reply.iter_lines()
        next(lines)
        running.begin_drain()
        until(lambda: httpx.get(running.url + "/ready").status_code == 503, "not ready")
        assert post(running).status_code == 503
        script.stream(decode, until(lambda: decode.of(Reserve), "decode has it, too")[0])
        assert [line for line in lines if line][-1] == "data: [DONE]"
    running.join()


def test_drain_that_takes_too_long_ends_with_error_frames(start):
    running, script = start(drain_timeout_s=0.3)
    script.holds.set()
    _, decode = running.pair(script)
    with httpx.stream(
        "POST", running.url + "/v1/chat/completions", json=BODY | {"stream": True}, timeout=60
    ) as reply:
        lines = reply.iter_lines()
        next(lines)
        running.begin_drain()
        events = [line for line in lines if line]
    assert "shutting down" in events[-1]
    running.join()
    # the last word has a moment to leave, and a worker drops the rooms of a router whose connection ended
    until(lambda: decode.of(Cancel) or decode.lost.is_set(), "decode hears of it")


def test_forty_requests_at_once_are_all_answered(start):
    running, script = start()
    running.pair(script, max_running=8)
    asked = [in_thread(lambda: post(running, max_tokens=200)) for _ in range(40)]
    for thread, _ in asked:
        thread.join(60)
    texts = [results[0].json()["choices"][0]["message"]["content"] for _, results in asked]
    assert texts == [ANSWER] * 40
    assert_nothing_left(running)


def test_process_imports_no_torch_and_ends_with_0_on_sigterm(tmp_path, model_dir):
    probe = "import sys, baton.router.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd=tmp_path, timeout=60).returncode == 0
    command = [sys.executable, "-m", "baton.router", "--model", str(model_dir), "--port", "0"]
    command += ["--control-bind", f"ipc://{tmp_path}/c"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert any("router serves" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_port_in_use_is_one_line_and_exit_code_1(tmp_path, model_dir, start):
    running, _ = start()
    command = [sys.executable, "-m", "baton.router", "--model", str(model_dir)]
    command += ["--port", str(running.router.port), "--control-bind", f"ipc://{tmp_path}/c"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 1
    assert str(running.router.port) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
