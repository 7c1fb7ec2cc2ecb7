"""Real processes die by SIGKILL under real streams: the client's tokens are those of a run without faults."""

import os
import random
import signal
import threading
import time
from functools import partial

import httpx
import pytest
from baton.tests.cluster.serving import (
    at_once,
    pages_held,
    served_model,
    serving,
    sse_events,
    status,
    wait_until,
)

pytestmark = pytest.mark.smollm2

LEASE_S = 5.0
NUM_TOKENS = 32
HEARTBEAT_S = 1.0  # a status is at most so old
TRIES = 3  # a client that gets no core may kill a worker that has done all its work
WAYS = [
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 0.8, "seed": 12, "repetition_penalty": 1.2},
    {"temperature": 0},
    {"temperature": 1.0, "seed": 13},
]


@pytest.fixture(scope="module")
def cluster(smollm2_dir, eagle3_dir):
    with (
        serving(smollm2_dir, eagle3_dir, prefill=2, decode=2, chunk_size=64) as running,
        httpx.Client(timeout=120) as made,
    ):
        running.client = made  # one for all: to make one takes longer than a short answer
        yield running


@pytest.fixture(scope="module")
def prompts(reference_greedy):
    return [list(r.prompt_ids) for r in reference_greedy.values() if len(r.prompt_ids) < 120][: len(WAYS)]


@pytest.fixture(scope="module")
def whole(cluster, prompts):
    """What the streams say when nobody dies."""
    return run_all(streams(cluster, prompts))


class Stream:
    """One streamed completion at its client: `ids` grow while it runs, `error` is that of an error frame."""

    def __init__(self, cluster, prompt_ids, *, max_tokens=NUM_TOKENS, **body):
        self.ids, self.error, self.usage, self.timeline = [], None, None, None
        self.on_tokens = lambda stream: None
        self._client, self._url = cluster.client, f"{cluster.url}/v1/completions"
        self._body = {
            "model": served_model(cluster), "prompt": prompt_ids, "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}, **body,
        }  # fmt: skip

    def run(self):
        with self._client.stream(
            "POST", self._url, json=self._body, headers={"x-baton-timeline": "1"}
        ) as response:
            assert response.status_code == 200, response.read()
            for event in sse_events(response):
                self.error = event.get("error") or self.error
                self.usage = event.get("usage") or self.usage
                self.timeline = event.get("timeline") or self.timeline
                for choice in event.get("choices", []):
                    self.ids += choice.get("token_ids") or []
                self.on_tokens(self)
        return self


def streams(cluster, prompts, **more):
    return [Stream(cluster, ids, **{**way, **more}) for ids, way in zip(prompts, WAYS, strict=True)]


def run_all(many):
    return at_once([stream.run for stream in many], len(many))


def kill(cluster, *names):
    for child in cluster.children:
        if child.name in names:
            os.kill(child.pid, signal.SIGKILL)


def assert_pages_come_back(cluster):
    def is_free():
        held, num_open = pages_held(cluster)
        return not any(held.values()) and num_open == 0

    wait_until(is_free, LEASE_S + HEARTBEAT_S + 30.0, "every page of the live workers free")


def until_whole(cluster):
    """Until every child has registered anew."""

    def is_whole():
        pids = {child.pid for child in cluster.children[1:]}
        workers = status(cluster)["workers"]
        return {w["pid"] for w in workers} == pids and all(w["state"] == "serving" for w in workers)

    wait_until(is_whole, 120, "every worker is back")


def streams_over_a_kill(cluster, prompts, moment):
    """Streams under which a decode worker is killed when one has `moment` tokens."""
    many, victims = streams(cluster, prompts), ["decode-0"]

    def kill_in_time(stream):
        """Before any stream has more."""
        if len(stream.ids) >= moment and victims:
            kill(cluster, victims.pop())

    for stream in many:
        stream.on_tokens = kill_in_time
    threads = [threading.Thread(target=stream.run) for stream in many]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not victims
    return many


def test_a_killed_decode_worker_costs_no_stream_a_token(cluster, prompts, whole):
    rng = random.Random(os.getpid())
    for _ in range(TRIES):
        until_whole(cluster)
        moment = rng.randrange(2, NUM_TOKENS - 8)
        many = streams_over_a_kill(cluster, prompts, moment)
        assert [stream.error for stream in many] == [None] * len(many), f"killed at token {moment}"
        assert [stream.ids for stream in many] == [stream.ids for stream in whole], (
            f"killed at token {moment}"
        )
        assert [stream.usage["completion_tokens"] for stream in many] == [NUM_TOKENS] * len(many)
        assert [s.usage["prompt_tokens"] for s in many] == [len(ids) for ids in prompts]
        if any(stream.timeline["attempts"] == 2 for stream in many):
            break
    assert any(stream.timeline["attempts"] == 2 for stream in many), "somebody was on it"
    assert status(cluster)["router"]["events"]["resumed"] > 0
    assert_pages_come_back(cluster)  # whoever died is back before the last test


def test_prompts_that_queue_at_a_killed_prefill_worker_are_answered(cluster):
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 49000) for _ in range(160)] for _ in range(8)]
    many = [Stream(cluster, ids, temperature=0, max_tokens=16) for ids in prompts]
    until_whole(cluster)
    victim = next(child.pid for child in cluster.children if child.name == "prefill-0")
    os.kill(victim, signal.SIGSTOP)  # so that they queue
    threads = [threading.Thread(target=stream.run) for stream in many]
    for thread in threads:
        thread.start()

    def have_come() -> bool:
        """Or it has been given up by now, and they have been placed again."""
        return all(worker["placed"] for worker in status(cluster)["workers"] if worker["pid"] == victim)

    wait_until(have_come, 60, "prompts queue there")
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert [stream.error for stream in many] == [None] * len(many)
    again = at_once([partial(Stream(cluster, ids, temperature=0, max_tokens=16).run) for ids in prompts], 4)
    assert [stream.ids for stream in many] == [stream.ids for stream in again]
    assert any(stream.timeline["attempts"] > 1 for stream in many), "somebody queued there"
    assert_pages_come_back(cluster)


def test_streams_resume_or_report_an_error_when_all_decode_workers_die(cluster, prompts, whole):
    until_whole(cluster)
    many = streams(cluster, prompts)
    threads = [threading.Thread(target=stream.run) for stream in many]
    for thread in threads:
        thread.start()
    wait_until(lambda: min(len(stream.ids) for stream in many) >= 2, 60, "the streams run")
    began = time.monotonic()
    kill(cluster, "decode-0", "decode-1")
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), f"a hang, {time.monotonic() - began:.0f} s after"
    for stream, reference in zip(many, whole, strict=True):
        assert stream.ids == reference.ids[: len(stream.ids)]
        assert (len(stream.ids) == len(reference.ids)) == (stream.error is None), stream.error
    until_whole(cluster)
    assert_pages_come_back(cluster)
    assert Stream(cluster, prompts[0], temperature=0).run().ids == whole[0].ids, "and the cluster serves on"
