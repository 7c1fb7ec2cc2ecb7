"""The experts of each token in answers, as SGLang has them: `sgl_ext.routed_experts` of each choice."""

import base64
import json

import httpx
import numpy as np
import pytest
from baton.cluster.protocol.messages import Prefill, RoutedExperts, RoutedShape, TokenItem, Tokens
from baton.tests.cluster.router_fakes import BODY, MODEL, Script, assert_nothing_left

SHAPE = RoutedShape(layers=(1, 3), num_layers=4, top_k=2, id_bytes=1)


def row_of(number):
    """What a worker sends of row `number`: a number of its own in each place."""
    return bytes(16 * place + number % 16 for place in range(4))


def rows_of(first, end):
    return b"".join(row_of(number) for number in range(first, end))


class Routed(Script):
    """Prefill sends the experts of prompt rows in two parts; decode those behind which it chose tokens."""

    has_rows = True

    def prefill(self, worker, message):
        if isinstance(message, Prefill) and message.sampling.routed_experts >= 0:
            start, end = message.sampling.routed_experts, len(message.prompt_ids)
            one = {"room": message.room, "epoch": message.epoch, "instance": worker.instance}
            for first in range(start, end, 5):
                last = min(end, first + 5)
                ids = rows_of(first, last)
                worker.send(RoutedExperts(start=first, count=last - first, ids=ids, **one))
        super().prefill(worker, message)

    def stream(self, worker, reserve):
        real, num_prompt = worker.send, len(reserve.prompt_ids)

        def send(message):
            if isinstance(message, Tokens) and reserve.sampling.routed_experts >= 0 and self.has_rows:
                (item,) = message.items
                first = num_prompt + item.seq - 1
                rows = rows_of(first, first + len(item.ids))
                item = TokenItem(room=item.room, epoch=item.epoch, seq=item.seq, ids=item.ids, experts=rows)
                message = Tokens(instance=message.instance, items=[item])
            real(message)

        worker.send = send
        try:
            super().stream(worker, reserve)
        finally:
            del worker.send


@pytest.fixture
def served(start):
    running, script = start()
    routed = Routed(script.output)
    running.pair(routed, experts=SHAPE)
    return running, routed


def ask(running, path="completions", **body):
    return httpx.post(f"{running.url}/v1/{path}", json={"model": MODEL} | body, timeout=60)


def experts_in(choice):
    ids = np.frombuffer(base64.b64decode(choice["sgl_ext"]["routed_experts"]), "<i4")
    return ids.reshape(-1, SHAPE.num_layers, SHAPE.top_k)


def assert_are_rows(found, first, end):
    """Ids of rows [first, end) in layers with experts, and -1 in the others."""
    told = np.frombuffer(rows_of(first, end), np.uint8).reshape(-1, 2, 2)
    assert found.shape == (end - first, 4, 2)
    assert (found[:, [0, 2]] == -1).all()
    assert (found[:, [1, 3]] == told).all()


PROMPT = "hello world, this is it"


@pytest.mark.parametrize("first", [0, 3])
def test_each_choice_has_the_experts_of_all_rows_but_the_last(served, first):
    running, _ = served
    asked = {"return_routed_experts": True, "routed_experts_start_len": first, "return_token_ids": True}
    reply = ask(running, prompt=PROMPT, n=2, max_tokens=40, **asked).json()
    assert len(reply["choices"]) == 2
    for choice in reply["choices"]:
        num_tokens = len(reply["choices"][0]["prompt_token_ids"]) + len(choice["token_ids"])
        assert_are_rows(experts_in(choice), first, num_tokens - 1)
    assert_nothing_left(running)


def test_chats_and_streams_have_them_with_the_end_of_the_choice(served):
    running, _ = served
    chat = ask(running, "chat/completions", **BODY, return_routed_experts=True).json()
    usage, found = chat["usage"], experts_in(chat["choices"][0])
    assert_are_rows(found, 0, usage["total_tokens"] - 1)
    asked = BODY | {"return_routed_experts": True, "stream": True}
    lines = ask(running, "chat/completions", **asked).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    told = [chunk["choices"][0] for chunk in chunks if "sgl_ext" in chunk["choices"][0]]
    assert [choice["finish_reason"] for choice in told] == [chat["choices"][0]["finish_reason"]]
    assert (experts_in(told[0]) == found).all()


def test_a_stop_string_ends_them_with_its_last_token(served):
    running, _ = served
    asked = {"return_routed_experts": True, "return_token_ids": True}
    whole = ask(running, prompt=PROMPT, max_tokens=40, **asked).json()["choices"][0]
    stop = whole["text"][8:12]
    cut = ask(running, prompt=PROMPT, max_tokens=40, stop=stop, **asked).json()["choices"][0]
    assert len(cut["token_ids"]) < len(whole["token_ids"])
    num_prompt = len(cut["prompt_token_ids"])
    assert_are_rows(experts_in(cut), 0, num_prompt + len(cut["token_ids"]) - 1)


def test_nobody_gets_them_who_does_not_ask(served):
    running, _ = served
    assert "sgl_ext" not in ask(running, prompt=PROMPT, max_tokens=9).text


def test_rows_that_a_worker_does_not_send_fail_the_request(served):
    running, routed = served
    routed.has_rows = False
    reply = ask(running, prompt=PROMPT, max_tokens=9, return_routed_experts=True)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "worker_failed")
    assert_nothing_left(running)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"routed_experts_start_len": 1}, "routed_experts_start_len needs return_routed_experts: true"),
        (
            {"return_routed_experts": True, "routed_experts_start_len": 99},
            "routed_experts_start_len 99 is more than the prompt's",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(served, asked, said):
    running, _ = served
    reply = ask(running, prompt=PROMPT, max_tokens=9, **asked)
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]


def test_too_many_are_refused_with_the_numbers(served, monkeypatch):
    running, _ = served
    monkeypatch.setattr("baton.router.scheduling.request_limits.MAX_ROUTED_BYTES", 3 << 20)
    asked = {"return_routed_experts": True, "max_tokens": 400}
    assert ask(running, prompt=PROMPT, **asked).status_code == 200
    monkeypatch.setattr("baton.router.scheduling.request_limits.MAX_ROUTED_BYTES", 1 << 10)
    reply = ask(running, prompt=PROMPT, **asked)
    assert reply.status_code == 400
    assert "ask for fewer choices or tokens, or give routed_experts_start_len" in reply.text


def test_workers_that_keep_none_are_named(start):
    running, script = start()
    running.pair(script)
    reply = ask(running, prompt=PROMPT, max_tokens=9, return_routed_experts=True)
    assert reply.status_code == 400
    assert "its workers were started without --return-routed-experts" in reply.json()["error"]["message"]
