"""Helpers of tests that serve: a cluster of real processes, and requests to it from many threads."""

import contextlib
import io
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from baton.cluster.config.roles import UpConfig
from baton.deploy.up.launcher import Cluster
from baton.tests.audit.watch import violations, watched_environment


@contextlib.contextmanager
def serving(model, draft="", env=None, *, device="cpu", is_watched=True, **settings) -> Iterator[Cluster]:
    """A ready cluster; what its children logged is in the failure when it does not get ready.

    The children run under the audit hook of `tests/audit`, and what it found fails the test; not
    `is_watched`: they do not, as they cannot on a GPU, where Triton compiles kernels whenever a shape is new.
    """
    output = io.StringIO()
    settings.setdefault("kv_memory_mb", 256)
    settings.setdefault("canary_s", 0.0)  # what workers count is what tests sent
    config = UpConfig(model=str(model), draft=str(draft), device=device, dtype="float32", port=0, **settings)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "audit"
        environment = {**os.environ, **(env or {})}
        environment = watched_environment(report, environment) if is_watched else environment
        cluster = Cluster(config, env=environment, output=output)
        cluster.output, cluster.audit_report = output, report
        with _running(cluster, output):
            yield cluster
        found = violations(report)
        assert found == [], found


@contextlib.contextmanager
def _running(cluster, output):
    try:
        cluster.start()
        cluster.wait_ready(120)
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
