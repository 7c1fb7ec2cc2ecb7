"""A real cluster as clients see it: a prefill and a decode process with SmolLM2, with and without drafts."""

import asyncio
import json
import os
import random
import re
import signal
import threading
import time
from functools import partial

import httpx
import openai
import pytest
from baton.tests.cluster.serving import at_once, complete, pages_held, serving, sse_events, status, wait_until

pytestmark = pytest.mark.smollm2

NO_DRAFT, DRAFT = "no draft", "draft"
FREE_S = 1.25  # a second, and a status is up to a heartbeat (0.25 s) old
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def clusters(smollm2_dir, eagle3_dir):
    with (
        serving(smollm2_dir, chunk_size=64) as plain,
        serving(smollm2_dir, eagle3_dir, chunk_size=64) as drafting,
    ):
        yield {NO_DRAFT: plain, DRAFT: drafting}


@pytest.fixture(scope="module")
def small(smollm2_dir):
    """A cluster of few pages that runs two requests at a time."""
    with serving(smollm2_dir, max_running=2, pages=20) as running:
        yield running


@pytest.fixture
def prompts(reference_greedy):
    return [r.prompt_ids for r in reference_greedy.values() if len(r.prompt_ids) < 200][:6]


def sampled(cluster, ids, seed, **body):
    body = {"temperature": 0.9, "top_p": 0.95, "seed": seed, "max_tokens": 24, **body}
    return complete(cluster, ids, **body)[0]


def test_a_fixed_seed_gives_the_same_tokens_batched_cached_and_drafted(clusters, prompts):
    plain, drafting, prompts = clusters[NO_DRAFT], clusters[DRAFT], prompts[:4]
    alone = [sampled(plain, ids, seed) for seed, ids in enumerate(prompts)]
    jobs = [partial(sampled, plain, ids, seed) for seed, ids in enumerate(prompts)]
    assert at_once(jobs, 4) == alone, "in a batch, after a prefix-cache hit"
    assert [sampled(drafting, ids, seed) for seed, ids in enumerate(prompts)] == alone, (
        "drafts never change a token"
    )
    others = [sampled(plain, ids, seed + 1000) for seed, ids in enumerate(prompts)]
    assert all(a != b for a, b in zip(alone, others, strict=True)), "another seed says something else"


@pytest.mark.parametrize(
    "body",
    [
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "temperature": 0},
        {"repetition_penalty": 1.3, "temperature": 0.7},
        {"top_k": 5, "min_p": 0.05},
        {"logit_bias": {"28": -100, "30": 20}, "temperature": 0.5},
    ],
    ids=["penalties", "repetition", "top-k and min-p", "bias"],
)
def test_every_sampling_knob_gives_the_same_tokens_with_and_without_drafts(clusters, prompts, body):
    plain, drafting = (sampled(clusters[kind], prompts[0], 5, **body) for kind in (NO_DRAFT, DRAFT))
    assert plain == drafting
    assert plain != sampled(clusters[NO_DRAFT], prompts[0], 5, temperature=body.get("temperature", 0.9))


@pytest.mark.parametrize("kind", [NO_DRAFT, DRAFT])
def test_the_openai_client_chats_and_completes_streaming_and_not(clusters, kind):
    cluster = clusters[kind]
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=32)
        assert whole.choices[0].message.content.startswith("The capital of France is Paris")
        assert whole.choices[0].finish_reason == "stop"
        assert (whole.usage.draft_tokens_details["drafted_tokens"] > 0) is (kind == DRAFT)
        stream = client.chat.completions.create(
            model=model,
            messages=QUESTION,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        common = {"model": model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 16}
        text = client.completions.create(**common, logprobs=2, n=2)
        assert text.choices[0].text == text.choices[1].text
        assert len(text.choices[0].logprobs.token_logprobs) == 16
        streamed = "".join(
            chunk.choices[0].text for chunk in client.completions.create(**common, stream=True)
        )
        assert streamed == text.choices[0].text
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="another", messages=QUESTION)


def test_logprobs_are_those_of_the_model_and_the_same_with_drafts(clusters, prompts):
    body = {"logprobs": 3, "max_tokens": 12}
    plain, drafting = (complete(clusters[kind], prompts[1], **body)[1] for kind in (NO_DRAFT, DRAFT))
    a, b = plain["choices"][0]["logprobs"], drafting["choices"][0]["logprobs"]
    assert a["tokens"] == b["tokens"]
    assert a["token_logprobs"] == pytest.approx(b["token_logprobs"], abs=1e-3)
    for chosen, top in zip(a["token_logprobs"], a["top_logprobs"], strict=True):
        assert chosen == pytest.approx(max(top.values())), "greedy takes the likeliest"


def test_the_first_token_comes_before_the_rest_and_the_timeline_adds_up(clusters, prompts):
    cluster = clusters[DRAFT]
    ids, document = complete(cluster, prompts[2], max_tokens=32)
    timeline = document["timeline"]
    assert len(ids) == 32
    assert 0 < timeline["ttft_ms"] < timeline["e2e_ms"]
    assert timeline["handoff_bytes"] > 0
    # A verify commits what it accepted and one token more; a last single token is decoded without drafts.
    assert timeline["verify_steps"] + timeline["accepted"] in (30, 31)
    assert timeline["accept_length"] >= 1.0


def test_a_repeated_prompt_is_cached_on_both_sides(clusters, prompts):
    cluster, ids = clusters[DRAFT], prompts[3] * 2
    first = complete(cluster, ids, max_tokens=4)[1]
    again = complete(cluster, ids, max_tokens=4)[1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(ids) - 32
    assert again["timeline"]["have_tokens"] >= len(ids) - 48
    assert again["timeline"]["handoff_bytes"] < first["timeline"]["handoff_bytes"]


def test_a_multi_turn_chat_pulls_only_what_is_new(clusters, prompts):
    cluster = clusters[DRAFT]
    turn = list(prompts[4])
    answer, _ = complete(cluster, turn, max_tokens=40)
    follow = turn + answer + list(prompts[5])
    timeline = complete(cluster, follow, max_tokens=4)[1]["timeline"]
    assert timeline["have_tokens"] >= len(turn) + 40 - 32, "decode keeps the answer that it wrote"


async def storm(url, model, prompts, count, width, rng):
    """Start `count` requests and cut each off; returns how many got to their end.

    Streams are cut off at a random event, so that a fast host finishes no more of them; other requests at a
    random moment.
    """
    finished = 0
    gate = asyncio.Semaphore(width)

    async def one(client, i):
        nonlocal finished
        body = {
            "model": model,
            "prompt": rng.choice(prompts),
            "max_tokens": 64,
            "ignore_eos": True,
            "stream": i % 2 == 0,
        }
        num_events, patience_s = rng.randrange(1, 30), rng.expovariate(1 / 0.7)
        async with gate:
            if body["stream"]:
                async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                    lines = response.aiter_lines()
                    for _ in range(num_events):
                        await anext(lines, "")
                    return
            try:
                await asyncio.wait_for(client.post(f"{url}/v1/completions", json=body), patience_s)
                finished += 1
            except (TimeoutError, asyncio.TimeoutError):
                return

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        await asyncio.gather(*(one(client, i) for i in range(count)))
    return finished


@pytest.mark.parametrize("kind", [NO_DRAFT, DRAFT])
def test_200_requests_cancelled_at_random_free_every_page_within_1_s(clusters, kind, prompts):
    cluster = clusters[kind]
    rng = random.Random(7)
    model = httpx.get(f"{cluster.url}/v1/models").json()["data"][0]["id"]
    took = []
    while not took or (min(took) > FREE_S and len(took) < 3):  # a process may get no core just then
        finished = asyncio.run(storm(cluster.url, model, [list(ids) for ids in prompts], 200, 24, rng))
        began = time.monotonic()
        assert finished < 150, "most were cut off"
        wait_until(
            lambda: pages_held(cluster) == ({k: 0 for k in pages_held(cluster)[0]}, 0), 60, "every page free"
        )
        took.append(time.monotonic() - began)
    assert min(took) <= FREE_S, took
    workers = {worker["role"]: worker for worker in status(cluster)["workers"]}
    assert workers["decode"]["counters"]["cancelled"] > 0
    assert complete(cluster, prompts[0], max_tokens=4)[0], "and the cluster serves on"


def test_bad_input_is_one_error_object_and_every_process_lives(clusters):
    cluster = clusters[DRAFT]
    model = httpx.get(f"{cluster.url}/v1/models").json()["data"][0]["id"]
    before = {worker["pid"] for worker in status(cluster)["workers"]}
    good = {"model": model, "prompt": [1, 2, 3], "max_tokens": 4}
    cases = [
        (b"{not json", 400),
        (b'{"model": "%s", "prompt": [1], "temperature": NaN}' % model.encode(), 400),
        ({**good, "temperature": "hot"}, 400),
        ({**good, "prompt": ""}, 400),
        ({**good, "prompt": []}, 400),
        ({**good, "prompt": [1] * 9000}, 400),
        ({**good, "prompt": [49152]}, 400),
        ({**good, "prompt": [-1]}, 400),
        ({**good, "n": 0}, 400),
        ({**good, "max_tokens": 8191}, 400),
        ({**good, "model": "gpt-5"}, 404),
    ]
    for body, code in cases:
        content = body if isinstance(body, bytes) else None
        answer = httpx.post(
            f"{cluster.url}/v1/completions", content=content, json=None if content else body, timeout=20
        )
        assert answer.status_code == code, (body if content else str(body)[:100], answer.text)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    too_long = httpx.post(f"{cluster.url}/v1/completions", json={**good, "prompt": [1] * 9000}).json()[
        "error"
    ]["message"]
    assert "9000" in too_long
    assert "8192" in too_long
    assert {worker["pid"] for worker in status(cluster)["workers"]} == before


def test_a_request_that_no_pool_can_hold_is_a_400_naming_the_numbers(small):
    model = httpx.get(f"{small.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": [5] * 300, "max_tokens": 100}
    answer = httpx.post(f"{small.url}/v1/completions", json=body, timeout=20)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "400 tokens" in message
    assert "319" in message, "20 pages of 16, less the slot behind the last token"
    ids, _ = complete(small, [5] * 100, max_tokens=8)
    assert len(ids) == 8


def test_more_requests_than_places_queue_and_all_are_answered(small, prompts):
    answers = at_once([partial(complete, small, ids, max_tokens=6) for ids in prompts[:4] * 3], 12)
    assert [len(ids) for ids, _ in answers] == [6] * 12
    first = {tuple(ids) for ids, _ in answers}
    assert len(first) <= 4, "equal prompts, equal answers"


def test_status_and_metrics_describe_the_workers(clusters):
    cluster = clusters[DRAFT]
    document = status(cluster)
    roles = {worker["role"]: worker for worker in document["workers"]}
    assert set(roles) == {"prefill", "decode"}
    graphs = {"prefill", "draft_prefill", "decode", "verify", "draft", "draft_extend"}
    for worker in roles.values():
        assert set(worker["graphs"]) == graphs
        assert worker["state"] == "serving"
        assert worker["device"] == "cpu"
        assert worker["transport"]
    assert roles["prefill"]["graphs"]["decode"] == 0
    metrics = httpx.get(f"{cluster.url}/metrics").text
    assert "baton_" in metrics
    assert (
        httpx.get(f"{cluster.url}/health").status_code == httpx.get(f"{cluster.url}/ready").status_code == 200
    )


def test_a_stream_sends_its_first_token_before_the_others_exist(clusters, prompts):
    cluster = clusters[DRAFT]
    model = httpx.get(f"{cluster.url}/v1/models").json()["data"][0]["id"]
    body = {
        "model": model,
        "max_tokens": 48,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "temperature": 0,
    }
    for prompt in prompts[
        :3
    ]:  # a router that gets no core for as long as a step takes finds both of them waiting
        counts = []
        asked = body | {"prompt": list(prompt)}
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=asked, timeout=60) as response:
            for event in sse_events(response):
                counts += [len(choice.get("token_ids", [])) for choice in event["choices"]]
        assert sum(counts) == 48
        if counts[0] == 1:
            break
    assert counts[0] == 1, "prefill's token comes alone, before decode has anything"
    assert threading.active_count() < 50


def test_answers_follow_the_constraints_of_vllm_and_sglang(clusters):
    url = f"{clusters[DRAFT].url}/v1"
    colours = ["red", "deep blue", "<green>"]
    number = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    for more, is_right in (
        ({"guided_choice": colours}, lambda text: text in colours),
        ({"guided_regex": "[a-f]{4}-\\d{2}"}, re.compile("[a-f]{4}-[0-9]{2}").fullmatch),
        ({"ebnf": 'root ::= "yes" | "no" [0-9]'}, re.compile("yes|no[0-9]").fullmatch),
        ({"structured_outputs": {"json": number}}, lambda text: set(json.loads(text)) == {"n"}),
    ):
        asked = {**more, "temperature": 1.5, "seed": 5}
        chat = httpx.post(f"{url}/chat/completions", json=asked | {"messages": QUESTION, "n": 2}, timeout=60)
        said = [choice["message"]["content"] for choice in chat.json()["choices"]]
        text = httpx.post(f"{url}/completions", json=asked | {"prompt": "Say:", "max_tokens": 60}, timeout=60)
        answer = httpx.post(f"{url}/responses", json=asked | {"input": "Say."}, timeout=60).json()
        said += [text.json()["choices"][0]["text"], answer["output"][0]["content"][0]["text"]]
        assert [word for word in said if not is_right(word)] == [], more


def test_a_message_is_continued_exactly_where_it_ends(clusters):
    cluster = clusters[DRAFT]
    chat = {"messages": [*QUESTION, {"role": "assistant", "content": "It is the city of"}]}
    chat |= {"continue_final_message": True}
    ids = httpx.post(f"{cluster.url}/tokenize", json=chat).json()["tokens"]
    asked = chat | {"temperature": 0, "max_tokens": 12, "return_token_ids": True}
    reply = httpx.post(f"{cluster.url}/v1/chat/completions", json=asked, timeout=60).json()
    choice = reply["choices"][0]
    assert reply["prompt_token_ids"] == ids
    assert choice["token_ids"] == complete(cluster, ids, max_tokens=12, temperature=0)[0]
    assert choice["message"]["content"].startswith(" Paris")
    echoed = httpx.post(f"{cluster.url}/v1/chat/completions", json=asked | {"echo": True}, timeout=60).json()
    assert echoed["choices"][0]["message"]["content"].startswith("It is the city of Paris")


def test_min_tokens_and_salts_hold(clusters):
    url = f"{clusters[NO_DRAFT].url}/v1/chat/completions"
    asked = {"messages": [{"role": "user", "content": "Say hi. " * 12}], "temperature": 0, "max_tokens": 90}
    short = httpx.post(url, json=asked, timeout=60).json()["usage"]["completion_tokens"]
    assert short < 90, "the model ends by itself"
    longer = httpx.post(url, json=asked | {"min_tokens": short + 5}, timeout=60).json()["usage"]
    assert longer["completion_tokens"] >= short + 5

    def num_cached(salt):
        more = {"cache_salt": salt, "max_tokens": 1}
        usage = httpx.post(url, json=asked | more, timeout=60).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert num_cached("one") == 0, "the prompt is cached, but not under this salt"
    assert num_cached("one") > 0
    assert num_cached("two") == 0


def prefill_workers(cluster):
    return [worker for worker in status(cluster)["workers"] if worker["role"] == "prefill"]


def test_decode_serves_prompts_alone_until_prefill_is_back(clusters, reference_greedy):
    """Every prefill worker is dead: decode computes the prompts, and the client's tokens do not change."""
    cluster = clusters[DRAFT]
    references = [r for r in reference_greedy.values() if 64 < len(r.prompt_ids) < 200][:2]
    assert len(references) == 2, "prompts of several chunks that are quickly computed"
    expected = [complete(cluster, r.prompt_ids, max_tokens=24)[0] for r in references[:1]]
    running = []
    stream = threading.Thread(
        target=lambda: running.append(complete(cluster, references[0].prompt_ids, max_tokens=200)[0])
    )
    stream.start()
    wait_until(lambda: status(cluster)["router"]["running"], 60, "the stream runs")
    old = prefill_workers(cluster)[0]["instance"]
    os.kill(next(child.pid for child in cluster.children if child.role == "prefill"), signal.SIGKILL)
    wait_until(lambda: not prefill_workers(cluster), 60, "the death is seen")
    answers = [complete(cluster, r.prompt_ids, max_tokens=24) for r in references]
    stream.join()
    assert [ids for ids, _ in answers][:1] == expected
    assert [ids for ids, _ in answers] == [list(r.output_ids[:24]) for r in references]
    assert running[0][:24] == expected[0]
    local = [document["timeline"]["local_prefill"] for _, document in answers]
    assert local[0], "the first one at least found no prefill worker"
    assert status(cluster)["router"]["events"]["local_prefill"] >= sum(local)
    back = wait_until(
        lambda: [w for w in prefill_workers(cluster) if w["state"] == "serving"], 120, "a restart"
    )
    assert back[0]["instance"] != old
    assert not complete(cluster, references[1].prompt_ids, max_tokens=4)[1]["timeline"]["local_prefill"]
