"""A router's streams when scripted workers vanish: one answer without a seam, or an error frame."""

import json
import time
from dataclasses import replace

import httpx
import pytest
from baton.cluster.protocol.messages import Finished, Prefill, Reserve, TokenItem, Tokens
from baton.router.rooms.effects import Timeouts
from baton.tests.cluster.router_fakes import (
    ANSWER,
    BODY,
    RunningRouter,
    Script,
    assert_nothing_left,
    in_thread,
    post,
    until,
)
from baton.tests.cluster.router_fakes import PATIENCE as PATIENT

PATIENCE = replace(PATIENT, pair_s=30.0)
LONG = {"max_tokens": 200, "return_token_ids": True}


class Relay(Script):
    """Workers that take up an answer where its earlier attempts ended."""

    def prefill(self, worker, message):
        if isinstance(message, Prefill):
            Script(self.output[message.num_output :]).prefill(worker, message)
        else:
            super().prefill(worker, message)

    def stream(self, worker, reserve):
        Script(self.output[reserve.num_output :], self.step).stream(worker, reserve)


class Breaking(Relay):
    """Decode sends `num_tokens` more after token 1, and no end."""

    def __init__(self, output, num_tokens):
        super().__init__(output)
        self.num_tokens = num_tokens

    def stream(self, worker, reserve):
        ids = self.output[reserve.num_output + 1 :][: self.num_tokens]
        if ids:
            logprobs = self.logprobs(ids, reserve.sampling)
            item = TokenItem(room=reserve.room, epoch=reserve.epoch, seq=1, ids=ids, logprobs=logprobs)
            worker.send(Tokens(instance=worker.instance, items=[item]))


@pytest.fixture
def patience():
    return PATIENCE


@pytest.fixture
def running(tmp_path, model_dir, patience):
    router = RunningRouter(tmp_path, patience, model_dir=model_dir)
    yield router
    router.close()


def answer_of(running):
    return running.tokenizer.encode(ANSWER)


def begin(running, body):
    """A request in a thread: its JSON lines once it has ended."""

    def read():
        with httpx.stream(
            "POST", running.url + "/v1/chat/completions", json=BODY | body, timeout=60
        ) as reply:
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
            return reply.status_code, lines

    return in_thread(read)[1]


def chunks(lines):
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]


def text_of(documents):
    return "".join(c["delta"].get("content") or "" for d in documents for c in d["choices"])


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_replacing_a_lost_decode_leaves_no_seam_in_text_counts_or_logprobs(running, num_tokens):
    output = answer_of(running)
    breaking = Breaking(output, num_tokens)
    _, dying = running.pair(breaking)
    body = LONG | {
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 1,
    }
    results = begin(running, body)
    until(lambda: running.call(lambda: _output(running) == 1 + num_tokens), "the tokens are with the client")
    until(lambda: dying.of(Reserve), "the first token may come before it")
    heir = running.add("decode", Relay(output).decode)
    dying.close()
    status, lines = until(lambda: results, "an answer")[0]
    documents = chunks(lines)
    assert status == 200
    assert text_of(documents) == ANSWER
    assert [i for d in documents for c in d["choices"] for i in c.get("token_ids", [])] == output
    named = [
        t["token"]
        for d in documents
        for c in d["choices"]
        if c.get("logprobs")
        for t in c["logprobs"]["content"]
    ]
    assert len(named) == len(output)
    usage = next(d["usage"] for d in documents if d.get("usage"))
    reserve = dying.of(Reserve)[0]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(reserve.prompt_ids), len(output))
    again = heir.of(Reserve)[0]
    assert again.prompt_ids == reserve.prompt_ids + output[: 1 + num_tokens]
    assert (again.num_output, again.sampling.max_new_tokens) == (1 + num_tokens, 200 - 1 - num_tokens)
    assert again.sampling.seed == reserve.sampling.seed
    assert_nothing_left(running)


def until_heard(running, worker):
    """Until a heartbeat that it says after this has come."""
    num_beats = worker.num_beats
    until(lambda: worker.num_beats > num_beats, "it says one")
    said = running.call(lambda: running.router.dispatcher._clock())
    until(
        lambda: (
            running.call(lambda: running.router.dispatcher.registry.get(worker.instance).last_seen) > said
        ),
        "another",
    )


def _output(running):
    entries = running.router.dispatcher._entries.values()
    return max((entry.room.num_output for entry in entries), default=0)


def test_a_prefill_that_vanishes_mid_stream_changes_no_stream(running):
    output = answer_of(running)
    script = Relay(output)
    script.holds.set()
    prefill, decode = running.pair(script)
    results = begin(running, LONG | {"stream": True})
    until(lambda: running.call(lambda: _output(running) == 1), "token 1 is with the client")
    prefill.close()
    until(lambda: running.call(lambda: len(running.router.dispatcher.registry)) == 1, "prefill is lost")
    script.stream(decode, until(lambda: decode.of(Reserve), "decode has it, too")[0])
    _, lines = until(lambda: results, "an answer")[0]
    assert [i for d in chunks(lines) for c in d["choices"] for i in c.get("token_ids", [])] == output
    assert len(decode.of(Reserve)) == 1
    assert_nothing_left(running)


@pytest.mark.parametrize("patience", [replace(PATIENCE, pair_s=0.8)])
def test_a_stream_without_any_pair_ends_with_an_error_in_bounded_time(running):
    _, decode = running.pair(Breaking(answer_of(running), 2))
    results = begin(running, LONG | {"stream": True})
    until(lambda: running.call(lambda: _output(running) == 3), "the stream has begun")
    began = time.monotonic()
    decode.close()
    status, lines = until(lambda: results, "an end")[0]
    assert status == 200
    assert json.loads(lines[-1])["error"]["code"] == "worker_lost"
    assert time.monotonic() - began < PATIENCE.token_s, "the loss is seen, and a pair awaited"
    assert_nothing_left(running)


def test_a_request_that_ended_three_workers_is_an_error_500(running):
    output = answer_of(running)
    _, first = running.pair(Breaking(output, 1))
    results = begin(running, LONG)
    until(lambda: running.call(lambda: _output(running) == 2), "the first has it")
    second = running.add("decode", Breaking(output, 1).decode)
    first.close()
    until(lambda: second.of(Reserve), "the second has it")
    third = running.add("decode", Breaking(output, 1).decode)
    until_heard(running, second)  # it has the request and lives
    second.close()
    until(lambda: third.of(Reserve), "the third has it")
    running.add("decode", Relay(output).decode)
    until_heard(running, third)
    third.close()
    status, lines = until(lambda: results, "an end")[0]
    assert status == 500
    assert json.loads(lines[0])["error"]["code"] == "request_quarantined"
    assert post(running, **LONG).json()["choices"][0]["token_ids"] == output
    assert_nothing_left(running)


def test_prefill_that_finds_the_answer_complete_ends_it(running):
    """Decode died after its last tokens and before it could say that they were the last."""
    output = answer_of(running)
    prefill, decode = running.pair(Breaking(output, 2))
    results = begin(running, LONG)
    until(lambda: running.call(lambda: _output(running) == 3), "all tokens are with the client")

    def complete(worker, message):
        if isinstance(message, Prefill):
            end = {"room": message.room, "epoch": message.epoch, "reason": "stop", "output_tokens": 0}
            worker.send(Finished(instance=worker.instance, **end))
        else:
            Relay(output).prefill(worker, message)

    prefill._script = complete
    running.add("decode", Relay(output).decode)
    decode.close()
    document = json.loads(until(lambda: results, "an answer")[0][1][0])
    assert document["choices"][0]["token_ids"] == output[:3]
    assert document["choices"][0]["finish_reason"] == "stop"
    assert_nothing_left(running)


def test_the_timeline_has_the_times_of_both_attempts(running):
    output = answer_of(running)
    _, decode = running.pair(Breaking(output, 3))
    headers = {"x-baton-timeline": "1"}
    _, results = in_thread(
        lambda: httpx.post(
            running.url + "/v1/chat/completions", json=BODY | LONG, headers=headers, timeout=60
        ).json()
    )
    until(lambda: running.call(lambda: _output(running) == 4), "it has begun")
    running.add("decode", Relay(output).decode)
    decode.close()
    document = until(lambda: results, "an answer")[0]
    timeline = document["timeline"]
    assert (timeline["attempts"], timeline["prefill_ms"], timeline["cached_tokens"]) == (2, 4.0, 32)
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] <= document["usage"]["prompt_tokens"]
    assert document["usage"]["completion_tokens"] == len(output)


def test_a_process_death_is_detected_by_its_closed_connection(tmp_path, model_dir):
    running = RunningRouter(tmp_path, Timeouts(), model_dir=model_dir)
    try:
        output = answer_of(running)
        _, dying = running.pair(Breaking(output, 1))
        results = begin(running, LONG | {"stream": True})
        until(lambda: running.call(lambda: _output(running) == 2), "the tokens are with the client")
        running.add("decode", Relay(output).decode)
        dying.close()
        assert text_of(chunks(until(lambda: results, "an answer")[0][1])) == ANSWER
    finally:
        running.close()
