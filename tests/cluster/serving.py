"""Helpers of tests that serve: a cluster of real processes, and requests to it from many threads."""

import contextlib
import io
import json
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from baton.cluster.config.roles import UpConfig
from baton.deploy.up.launcher import Cluster
from baton.tests.audit.watch import violations, watched_environment


@contextlib.contextmanager
def serving(
    model, draft="", env=None, *, device="cpu", is_watched=True, command_of=None, ready_s=120.0, **settings
) -> Iterator[Cluster]:
    """A ready cluster; what its children logged is in the failure when it does not get ready.

    The children run under the audit hook of `tests/audit`, and what it found fails the test; not
    `is_watched`: they do not, as they cannot on a GPU, where Triton compiles kernels whenever a shape is new.
    `command_of`: another command for a child's role and flags. `ready_s`: the longest start.
    """
    output = io.StringIO()
    settings.setdefault("kv_memory_mb", 256)
    settings.setdefault("canary_s", 0.0)  # what workers count is what tests sent
    config = UpConfig(model=str(model), draft=str(draft), device=device, dtype="float32", port=0, **settings)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "audit"
        environment = {**os.environ, **(env or {})}
        environment = watched_environment(report, environment) if is_watched else environment
        cluster = Cluster(config, env=environment, output=output, command_of=command_of)
        cluster.output, cluster.audit_report = output, report
        with _running(cluster, output, ready_s):
            yield cluster
        found = violations(report)
        assert found == [], found


@contextlib.contextmanager
def _running(cluster, output, ready_s):
    try:
        cluster.start()
        cluster.wait_ready(ready_s)
        yield
    except Exception as error:
        error.add_note(output.getvalue()[-4000:])
        raise
    finally:
        cluster.stop()


def complete(cluster, prompt_ids, *, max_tokens=64, timeout=120.0, **body):
    """One completion from token ids; returns (token ids, the whole answer)."""
    body = {
        "model": "m",
        "prompt": list(prompt_ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **body,
    }
    body["model"] = served_model(cluster)
    answer = httpx.post(
        f"{cluster.url}/v1/completions", json=body, timeout=timeout, headers={"x-baton-timeline": "1"}
    )
    assert answer.status_code == 200, answer.text
    document = answer.json()
    return document["choices"][0]["token_ids"], document


def served_model(cluster) -> str:
    return cluster.config.served_model or cluster.config.model.rstrip("/").rsplit("/", 1)[-1]


def at_once(jobs, width):
    """Run the jobs (callables) `width` at a time; results in order."""
    with ThreadPoolExecutor(width) as pool:
        return list(pool.map(lambda job: job(), jobs))


def status(cluster):
    return httpx.get(f"{cluster.url}/status", timeout=60).json()


def wait_until(predicate, timeout, what):
    """Poll a condition that real processes must reach; the last value is in the failure."""
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        time.sleep(0.05)


def pages_held(cluster):
    """Pages in use on any worker, and rooms on the router, from one status."""
    document = status(cluster)
    held = {
        f"{w['role']}-{w['instance'][:4]}": w["pages_total"] - w["pages_free"] for w in document["workers"]
    }
    return held, document["router"]["open_rooms"]


def random_ids(count, vocab_size, seed=None):
    generator = secrets.SystemRandom() if seed is None else __import__("random").Random(seed)
    return [generator.randrange(3, vocab_size) for _ in range(count)]


def sse_events(response) -> Iterator[dict]:
    """The JSON documents of a stream of server-sent events, up to [DONE]."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


class GreedyStream:
    """A greedy stream in a thread of its own."""

    def __init__(self, cluster, prompt_ids, max_tokens):
        self.ids, self.error = [], None
        self._url = f"{cluster.url}/v1/completions"
        self._body = {
            "model": served_model(cluster), "prompt": prompt_ids, "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        self.is_left = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        with httpx.stream("POST", self._url, json=self._body, timeout=120) as response:
            for event in sse_events(response):
                self.error = event.get("error") or self.error
                for choice in event.get("choices", []):
                    self.ids += choice.get("token_ids") or []
                if self.is_left:
                    return

    def leave(self):
        self.is_left = True
        self.join()

    def join(self):
        self._thread.join(120)
        assert not self._thread.is_alive()


def wait_free(cluster, timeout=60):
    """Wait until no worker holds a page and the router no room."""
    wait_until(lambda: not any((*pages_held(cluster)[0].values(), pages_held(cluster)[1])), timeout, "free")


def instances(cluster):
    """Of the workers that serve."""
    return {worker["instance"] for worker in status(cluster)["workers"] if worker["state"] == "serving"}
