"""Real processes without a prefill worker: aggregated decode workers answer everything, also over deaths."""

import os
import shutil
import signal

import httpx
import pytest
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import (
    GreedyStream,
    at_once,
    complete,
    instances,
    random_ids,
    served_model,
    serving,
    status,
    wait_free,
    wait_until,
)

VOCAB = 330
LONG = 600  # output tokens of a stream that outlasts what a test does meanwhile


@pytest.fixture(scope="module")
def model(tmp_path_factory, toy_checkpoint):
    directory = tmp_path_factory.mktemp("aggregated")
    shutil.copytree(
        toy_checkpoint("llama", vocab_size=VOCAB, max_position_embeddings=1 << 13),
        directory,
        dirs_exist_ok=True,
    )
    return save_tokenizer(directory)


@pytest.fixture(scope="module")
def cluster(model):
    settings = {"aggregated": True, "kv_memory_mb": 32, "threads": 1, "canary_s": 2.0}
    with serving(model, prefill=0, decode=2, **settings) as running:
        yield running


def test_it_is_ready_and_answers_chats_streams_and_long_prompts(cluster):
    assert httpx.get(f"{cluster.url}/ready").status_code == 200
    assert {worker["role"] for worker in status(cluster)["workers"]} == {"decode"}
    chat = {
        "model": served_model(cluster), "max_tokens": 8, "n": 2, "temperature": 0.8, "seed": 3,
        "messages": [{"role": "user", "content": "hello"}],
    }  # fmt: skip
    answers = [httpx.post(f"{cluster.url}/v1/chat/completions", json=chat, timeout=60) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]
    prompt = random_ids(3000, VOCAB, seed=1)  # of many parts
    tokens, document = complete(cluster, prompt, max_tokens=9)
    assert document["timeline"]["local_prefill"]
    stream = GreedyStream(cluster, prompt, 9)
    stream.join()
    assert (stream.ids, stream.error) == (tokens, None)


def test_a_second_prompt_finds_the_first_in_the_prefix_cache(cluster):
    prompt = random_ids(200, VOCAB, seed=2)
    first, _ = complete(cluster, prompt, max_tokens=5)
    second, document = complete(cluster, prompt, max_tokens=5)
    assert second == first
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] >= 190


def test_a_stream_that_is_left_gives_its_pages_back(cluster):
    stream = GreedyStream(cluster, random_ids(20, VOCAB, seed=3), 8000)
    wait_until(lambda: len(stream.ids) > 3, 60, "the stream runs")
    stream.leave()
    wait_free(cluster)


def test_streams_of_a_killed_worker_go_on_at_the_other_with_equal_tokens(cluster):
    prompts = [random_ids(300, VOCAB, seed=seed) for seed in range(10, 14)]
    expected = at_once([lambda ids=ids: complete(cluster, ids, max_tokens=LONG)[0] for ids in prompts], 4)
    before = wait_until(lambda: len(instances(cluster)) == 2 and instances(cluster), 60, "two workers")
    streams = [GreedyStream(cluster, ids, LONG) for ids in prompts]
    wait_until(lambda: all(len(stream.ids) > 2 for stream in streams), 60, "all streams run")
    os.kill(next(child.pid for child in cluster.children if child.role == "decode"), signal.SIGKILL)
    for stream in streams:
        stream.join()
    assert [stream.error for stream in streams] == [None] * 4
    assert [stream.ids for stream in streams] == expected
    assert status(cluster)["router"]["events"]["resumed"] > 0
    wait_until(lambda: len(instances(cluster) - before) == 1, 120, "a restart")
    wait_free(cluster)


def test_a_lone_worker_that_is_killed_and_restarted_serves_again(model):
    settings = {"aggregated": True, "kv_memory_mb": 32, "threads": 1}
    with serving(model, prefill=0, decode=1, **settings) as cluster:
        prompt = random_ids(40, VOCAB, seed=5)
        expected = complete(cluster, prompt, max_tokens=6)[0]
        (before,) = instances(cluster)
        os.kill(next(child.pid for child in cluster.children if child.role == "decode"), signal.SIGKILL)
        wait_until(lambda: instances(cluster) not in (set(), {before}), 120, "a restart")
        assert complete(cluster, prompt, max_tokens=6)[0] == expected
        wait_free(cluster)
