"""Hostile requests are refused: numbers, lists, media, tensors, names and texts made to hurt.

A router with scripted workers; each is refused by a 400 that names the field, or answered, and nothing
reaches a worker that should not.
"""

import contextlib
import json
import socket
import threading

import httpx
import pytest
from baton.cluster.protocol.messages import Prefill, Reserve
from baton.tests.cluster.router_fakes import BODY, MODEL, RunningRouter, Script, assert_nothing_left

ANSWER = [5, 6, 7, 8]
COMPLETION = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "seed",
    "max_tokens", "n", "min_tokens",
)  # fmt: skip
MEDIA = (
    {"type": "image_url", "image_url": {"url": "http://{bait}/x.png"}},
    {"type": "input_audio", "input_audio": {"data": "http://{bait}/", "format": "wav"}},
    {"type": "file", "file": {"file_data": "file:///etc/passwd"}},
    {"type": "video_url", "video_url": {"url": "http://{bait}/x.mp4"}},
)


@pytest.fixture(scope="module")
def served(tmp_path_factory, model_dir):
    running = RunningRouter(tmp_path_factory.mktemp("run"), model_dir=model_dir)
    running.pair(Script(ANSWER))
    with httpx.Client(
        base_url=running.url, timeout=60
    ) as running.client:  # a new one costs more than an answer
        yield running
    assert_nothing_left(running)
    running.close()


def ask(served, path, body):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return served.client.post(path, content=raw, headers={"content-type": "application/json"})


def is_refused(reply, *names):
    """A 400 in the form of the API, about one of these fields."""
    if reply.status_code != 400:
        return False
    error = reply.json()["error"]
    return error["type"] == "invalid_request_error" and (not names or error["param"] in names)


def num_asked(served):
    return sum(len(worker.of(kind)) for worker in served.workers for kind in (Reserve, Prefill))


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_s15_an_impossible_number_of_choices_is_refused_before_any_work(served, path):
    body = BODY if path == CHAT else COMPLETION
    before = num_asked(served)
    for n in (0, -1, 129, 2**31, 2**63, 2**64):
        assert is_refused(ask(served, path, body | {"n": n}), "n"), n
    for best_of in (0, 129, 2**31):
        assert is_refused(ask(served, COMPLETE, COMPLETION | {"best_of": best_of}), "best_of"), best_of
    assert is_refused(ask(served, COMPLETE, COMPLETION | {"prompt": ["a"] * 100, "n": 100}), "n")
    assert num_asked(served) == before


def test_s16_lists_and_ids_out_of_range_are_refused(served):
    before = num_asked(served)
    for more, param in (
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 2**31}, "logprobs"),
        ({"stop_token_ids": [400]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(100_000))}, "stop_token_ids"),
        ({"logit_bias": {"400": 1.0}}, "logit_bias"),
        ({"logit_bias": {str(i): 1.0 for i in range(100_000)}}, "logit_bias"),
        ({"logit_bias": {"-1": 1.0}}, "logit_bias"),
        ({"logit_bias": {"5": 101.0}}, "logit_bias"),
        ({"prompt": [400]}, "prompt"),
        ({"prompt": [2**63]}, "prompt"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": ["x" * 5000]}, "stop"),
    ):
        assert is_refused(ask(served, COMPLETE, COMPLETION | more), param), more.keys()
    assert is_refused(ask(served, CHAT, BODY | {"logprobs": True, "top_logprobs": 21}), "top_logprobs")
    assert num_asked(served) == before


@pytest.mark.parametrize("name", NUMBERS)
def test_s17_invalid_numbers_reach_no_worker(served, name):
    before = num_asked(served)
    for text in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", '"1"', "true", "[1]", "{}"):
        raw = json.dumps(COMPLETION).encode()[:-1] + f', "{name}": {text}}}'.encode()
        assert is_refused(ask(served, COMPLETE, raw)), text
    assert num_asked(served) == before
    raw = json.dumps({key: value for key, value in COMPLETION.items() if key != name}).encode()[:-1]
    reply = ask(served, COMPLETE, raw + f', "{name}": -0}}'.encode())
    assert reply.status_code == 200 or is_refused(reply, name), "minus zero is zero, which some may be"


def test_s20_no_endpoint_takes_tensors_or_files(served):
    for path in (
        "/v1/embeddings",
        "/v1/files",
        "/v1/uploads",
        "/v1/images/generations",
        "/v1/audio/speech",
        "/generate",
    ):
        assert ask(served, path, {"model": MODEL, "input": "x"}).status_code == 404, path
    for field in ("prompt_embeds", "input_embeds", "pixel_values", "file"):
        assert is_refused(ask(served, COMPLETE, COMPLETION | {field: "gASVAA=="}), field), field


def test_s21_media_are_refused_and_no_address_is_fetched(served):
    calls = []
    with socket.create_server(("127.0.0.1", 0)) as bait:
        bait.settimeout(0.05)
        address = f"127.0.0.1:{bait.getsockname()[1]}"
        for part in MEDIA:
            told = json.loads(json.dumps(part).replace("{bait}", address))
            messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, told]}]
            assert is_refused(ask(served, CHAT, BODY | {"messages": messages}), "messages"), part["type"]
        with contextlib.suppress(TimeoutError):
            calls.append(bait.accept())
    assert not calls


def test_s23_long_and_odd_prompts_are_measured_before_they_are_tokenised(served):
    encode, texts = served.tokenizer.encode, []
    served.tokenizer.encode = lambda text, **more: texts.append(len(text)) or encode(text, **more)
    try:
        long = ask(served, COMPLETE, COMPLETION | {"prompt": "x" * 3_000_000})
        assert is_refused(long, "prompt")
        assert long.json()["error"]["code"] == "context_length_exceeded"
        assert not texts, "it was not tokenised"
        assert ask(served, COMPLETE, COMPLETION | {"prompt": "x" * 5_000_000}).status_code == 413
    finally:
        served.tokenizer.encode = encode
    for text in (
        "\0" * 50,
        "\u202e\u200d" * 20,
        "e\u0301" * 100,
        "\U0001f469\u200d" * 30,
        "\ufeff",
        " " * 200,
    ):
        assert ask(served, COMPLETE, COMPLETION | {"prompt": text}).status_code == 200, ascii(text)
    for path, body in (
        (COMPLETE, rb'{"model":"tiny","prompt":"\ud800"}'),
        (COMPLETE, b'{"model":"tiny","prompt":"\xff"}'),
    ):
        assert is_refused(ask(served, path, body))


def test_s25_invalid_json_is_refused_and_deep_json_costs_nothing(served):
    deep = b"[" * 100_000
    for raw in (
        b"", b"nul", b"{", b'{"a":1,}', b"[1,]", b"{'a':1}", b'{"a":01}', b'{"a":1}{', b"\xef\xbb\xbf{}",
        b'{"a":+1}', deep,
        b'{"model":' * 50_000, b'{"model":"tiny","prompt":' + deep + b"]" * 100_000 + b"}", b'"\\x"', b"\x00",
        b"1", b"null",
    ):  # fmt: skip
        for path in (CHAT, COMPLETE, "/v1/responses", "/tokenize", "/detokenize"):
            assert is_refused(ask(served, path, raw)), raw[:20]


def test_s27_names_in_a_request_reach_no_path(served, tmp_path):
    for name in (
        "../../etc/passwd",
        "/etc/passwd",
        str(tmp_path),
        "tiny\0",
        "tiny/../tiny",
        "%2e%2e",
        "",
        "x" * 10_000,
    ):
        for path, body in ((CHAT, BODY), (COMPLETE, COMPLETION)):
            reply = ask(served, path, body | {"model": name})
            assert reply.status_code == 404, name[:20]
            assert reply.json()["error"]["code"] == "model_not_found"
    for field in ("lora_path", "adapter", "guided_grammar_file"):
        assert is_refused(ask(served, COMPLETE, COMPLETION | {field: "/etc/passwd"}), field)
    answers = [
        served.client.get(path).status_code for path in ("/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/x")
    ]
    assert answers == [404, 404]


def test_refused_requests_change_no_other_request(served):
    replies = []
    steady = threading.Thread(
        target=lambda: replies.extend(ask(served, COMPLETE, COMPLETION) for _ in range(20))
    )
    steady.start()
    for _ in range(20):
        ask(served, COMPLETE, COMPLETION | {"logprobs": 10**9})
        ask(served, COMPLETE, b"[" * 10_000)
    steady.join(30)
    assert [reply.status_code for reply in replies] == [200] * 20
    assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1
