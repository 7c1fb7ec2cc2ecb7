"""Clients and peers that the cluster does not trust: addresses, shapes, numbers, inner fields and ids."""

import asyncio
import itertools
import json
import socket
import threading

import httpx
import msgspec
import pytest
from baton.cluster.protocol.codec import encode
from baton.cluster.protocol.messages import Abort, Attach, Pull, Release
from baton.tests.cluster.hostile import MIB, ports
from baton.tests.cluster.keyed_peers import dealer, hello, say
from baton.tests.cluster.serving import at_once, complete, pages_held, served_model, wait_until

INNER_FIELDS = [
    "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank",
    "remote_host",
    "remote_port", "remote_block_ids", "block_hashes", "data_parallel_rank", "request_id",
    "rid", "room",
    "epoch", "instance", "prefill_endpoint", "prefill_instance", "deadline_ms", "num_output",
    "session_params",
    "prompt_embeds", "input_embeds", "mm_processor_kwargs", "lora_path", "custom_logit_processor",
    "vllm_xargs",
    "extra_args", "return_hidden_states", "shm_name", "addr", "slot",
]  # fmt: skip
EXTREME = (-1, 0, 2**31, 2**63 - 1)
NUMBERS = [
    "n", "seed", "top_k", "top_p", "min_p", "temperature", "frequency_penalty", "presence_penalty",
    "repetition_penalty",
    "max_tokens", "max_completion_tokens", "top_logprobs", "logprobs", "best_of", "stop_token_ids",
    "logit_bias", "prompt",
]  # fmt: skip
MOST_AT_ONCE = 850  # below the 1024 descriptors that this process commonly may have


@pytest.fixture(scope="module")
def client(plain_cluster):
    with httpx.Client(base_url=plain_cluster.url, timeout=60) as opened:
        yield opened


@pytest.fixture(scope="module")
def bodies(plain_cluster):
    """route -> a body that is answered."""
    common = {"model": served_model(plain_cluster), "max_tokens": 2}
    chat = {**common, "messages": [{"role": "user", "content": "hi"}]}
    return {"/v1/chat/completions": chat, "/v1/completions": {**common, "prompt": [7, 80, 33]}}


class Bait:
    """A listener that nobody has a reason to connect to."""

    def __init__(self):
        self.num_connects = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.num_connects += 1
            connection.close()

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)


@pytest.fixture
def bait():
    made = Bait()
    yield made
    made.close()


def is_error_object(answer):
    return answer.status_code == 400 and set(answer.json()["error"]) == {"message", "type", "param", "code"}


# --- clients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_s9_inner_fields_are_refused_at_the_public_port_by_name(client, bodies, route):
    assert client.post(route, json=bodies[route]).status_code == 200
    for field in INNER_FIELDS:
        for value in (None, {"remote_host": "127.0.0.1", "remote_port": 1}, "x", 1):
            if (route, field, value) == ("/v1/completions", "prompt_embeds", None):
                continue  # a public field there, and null leaves it out
            answer = client.post(route, json={**bodies[route], field: value})
            assert is_error_object(answer), (field, value, answer.text)
            assert field in answer.json()["error"]["message"]


def test_s3_an_address_in_a_request_is_never_connected_to(client, bodies, bait, plain_cluster):
    urls = [bait.address, f"tcp://{bait.address}", f"http://{bait.address}/x"]
    names = [
        "x-request-id",
        "x-forwarded-for",
        "x-forwarded-host",
        "forwarded",
        "referer",
        "x-baton-timeline",
    ]
    for url, (route, body) in itertools.product(urls, bodies.items()):
        headers = dict.fromkeys(names, url)
        answer = client.post(route, json={**body, "user": url}, headers=headers)
        assert answer.status_code == 200
        assert answer.headers.pop("x-request-id") == url, "it is given back, and nothing more"
        assert bait.address not in answer.text + str(answer.headers)
        for field in ("model", "kv_transfer_params", "remote_host", "image_url", "prefill_endpoint"):
            assert client.post(route, json={**body, field: url}, headers=headers).status_code in (400, 404)
    parts = [{"type": "image_url", "image_url": {"url": urls[2]}}]
    body = {**bodies["/v1/chat/completions"], "messages": [{"role": "user", "content": parts}]}
    assert is_error_object(client.post("/v1/chat/completions", json=body))
    assert bait.num_connects == 0


def test_s6_every_shape_of_a_prompt_is_answered_or_refused(client, bodies):
    body = bodies["/v1/completions"]
    good = ["hi", ["hi"], ["hi", "ho"], [5, 6], [[5, 6]], [[5], [6, 7, 8]]]
    bad = [
        "",
        [],
        [[]],
        [""],
        ["hi", []],
        [[5], []],
        [[5], 6],
        ["hi", 5],
        [["hi"]],
        [[[5]]],
        None,
        5,
        {},
        [None],
        [5.5],
    ]
    for prompt in good:
        for n in (1, 2):
            answer = client.post("/v1/completions", json={**body, "prompt": prompt, "n": n})
            num_prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["choices"]) == num_prompts * n
    for prompt in bad:
        assert is_error_object(client.post("/v1/completions", json={**body, "prompt": prompt})), prompt


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_s7_extreme_integers_are_answered_or_refused_and_cost_no_memory(client, bodies, plain_cluster, route):
    everyone = {port.pid: port for port in ports(plain_cluster)}.values()
    before = [port.resident() for port in everyone]
    for field, number in itertools.product(NUMBERS, EXTREME):
        for value in (number, [number], [[number]], {str(number): number}):
            answer = client.post(route, json={**bodies[route], field: value})
            assert answer.status_code == 200 or is_error_object(answer), (field, value, answer.text)
    assert all(port.resident() - old <= 50 * MIB for port, old in zip(everyone, before, strict=True))


@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_s8_many_choices_of_many_prompts_leave_nothing(plain_cluster, client, bodies, rounds):
    body = {
        **bodies["/v1/completions"],
        "prompt": [[7, 8, 9, i] for i in range(4)],
        "n": 8,
        "temperature": 0.7,
    }

    def ask(i):
        answer = client.post("/v1/completions", json={**body, "seed": i})
        assert answer.status_code == 200, answer.text
        return len(answer.json()["choices"])

    assert at_once([lambda i=i: ask(i) for i in range(rounds)], 4) == [32] * rounds

    def is_at_rest():
        held, num_open = pages_held(plain_cluster)
        return not num_open and not any(held.values())

    wait_until(is_at_rest, 60, "every page is free")


def test_s10_a_thousand_requests_with_one_id_get_separate_answers(plain_cluster):
    prompts = [[7, 80, 33, 150, i] for i in range(8)]
    expected = [complete(plain_cluster, prompt, max_tokens=4)[0] for prompt in prompts]
    assert len({tuple(ids) for ids in expected}) > 4, "the answers differ, so that a mix-up shows"
    answers = asyncio.run(ask_together(plain_cluster, prompts, 1000))
    assert answers == [expected[i % len(prompts)] for i in range(1000)]


async def ask_together(cluster, prompts, count):
    """The tokens of `count` requests, all with one id, as many at once as the router takes connections."""
    host, _, port = cluster.url.removeprefix("http://").partition(":")
    gate = asyncio.Semaphore(MOST_AT_ONCE)
    body = {
        "model": served_model(cluster),
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    async def ask(i):
        document = json.dumps({**body, "prompt": prompts[i % len(prompts)], "user": "the same"}).encode()
        lines = [
            "POST /v1/completions HTTP/1.1", f"host: {host}:{port}", "content-type: application/json",
            "connection: close",
            "x-request-id: the-same", "idempotency-key: " + f"{i}", f"content-length: {len(document)}", "",
            "",
        ]  # fmt: skip
        async with gate:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write("\r\n".join(lines).encode() + document)
            answer = await reader.read()
            writer.close()
        head, _, text = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), answer[:500]
        document = text[text.index(b"{") : text.rindex(b"}") + 1]  # of its one chunk
        return json.loads(document)["choices"][0]["token_ids"]

    return await asyncio.gather(*(ask(i) for i in range(count)))


# --- peers --------------------------------------------------------------------------------------------------


def test_s3_only_paired_workers_connect_to_a_workers_address(plain_cluster, bait):
    control = next(port for port in ports(plain_cluster) if port.plane == "control")
    before = complete(plain_cluster, [7, 80, 33], max_tokens=4)[0]
    with dealer(control.endpoint) as stranger:
        of_another_model = hello("prefill")
        assert say(stranger, msgspec.structs.replace(of_another_model, kv_endpoint=f"tcp://{bait.address}"))
        assert complete(plain_cluster, [7, 80, 33], max_tokens=4)[0] == before
    assert bait.num_connects == 0


def test_s3_indices_of_unoffered_blocks_reach_no_memory(plain_cluster):
    kv = next(port for port in ports(plain_cluster) if port.plane == "kv")
    since = kv.counter("unknown_room") + kv.counter("unexpected") + kv.counter("refused_peers")
    one = {"room": "c" * 32, "epoch": 0, "instance": "b" * 32}
    messages = [Pull(block=block, **one) for block in (0, 1, 2**31, 2**48)]
    messages += [Attach(have=2**48, **one), Release(**one), Abort(**one)]
    with dealer(kv.endpoint) as stranger:
        assert say(stranger, *(encode(message) for message in messages))
        assert say(stranger, encode(messages[0]).replace(b"\xa5block\x00", b"\xa5block\xcf" + b"\xff" * 8))
        counted = ("unknown_room", "unexpected", "refused_peers", "malformed")
        wait_until(lambda: sum(kv.counter(name) for name in counted) > since, 60, "it is counted")
        assert stranger.poll(200) == 0, "no byte of memory comes back"
