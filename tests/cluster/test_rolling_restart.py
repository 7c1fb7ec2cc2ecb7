"""Every process of a cluster behind one port is restarted in turn, under load, and no client notices."""

import itertools
import os
import signal
import threading
import time

import httpx
import pytest
from baton.tests.cluster.serving import complete, random_ids, served_model, serving, status, wait_until

NUM_CLIENTS, NUM_PROMPTS, NUM_TOKENS = 8, 24, 12
LEAST = 500


class Load:
    """Clients of one address that retry nothing: half keep their connections, half open one per request."""

    def __init__(self, cluster, answers, *, num_tokens=NUM_TOKENS, num_clients=NUM_CLIENTS):
        self.cluster, self.answers, self.num_tokens = cluster, answers, num_tokens
        self.done, self.wrong = [], []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(num_clients)
        ]
        for thread in self._threads:
            thread.start()

    def close(self):
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads)

    def _run(self, at):
        keep = httpx.Limits(max_keepalive_connections=at % 2)
        with httpx.Client(timeout=60, limits=keep, trust_env=False) as client:
            for i in itertools.count(at * 5):
                if self._stop.is_set():
                    return
                prompt, expected = self.answers[i % len(self.answers)]
                self.done.append(time.monotonic())
                try:
                    found = self._ask(client, prompt)
                except httpx.HTTPError as error:
                    found = repr(error)
                if found != expected:
                    self.wrong.append((round(time.monotonic(), 2), "kept" if at % 2 else "new", found))

    def _ask(self, client, prompt):
        body = {
            "model": served_model(self.cluster), "prompt": prompt, "max_tokens": self.num_tokens,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        answer = client.post(f"{self.cluster.url}/v1/completions", json=body)
        return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else answer.text


def is_whole(cluster, seen):
    """Whether both routers answer, each with all the workers that run; `seen` gathers what they said."""
    document = status(cluster)
    router, workers = document["router"], document["workers"]
    seen[router["pid"]] = {worker["pid"] for worker in workers if worker["state"] == "serving"}
    wanted = {child.pid for child in cluster.children if child.role != "router"}
    return all(seen.get(child.pid) == wanted for child in cluster.children if child.role == "router")


@pytest.mark.slow
def test_a_rolling_restart_behind_one_port_fails_or_changes_no_request(served_dir):
    settings = {"routers": 2, "prefill": 2, "decode": 2, "kv_memory_mb": 16, "threads": 1, "canary_s": 10.0}
    with serving(served_dir, **settings) as cluster:
        prompts = [random_ids(20 + 5 * i, 330, seed=i) for i in range(NUM_PROMPTS)]
        answers = [(prompt, complete(cluster, prompt, max_tokens=NUM_TOKENS)[0]) for prompt in prompts]
        assert len(cluster.children) == 6
        load = Load(cluster, answers)
        try:
            for i in range(len(cluster.children)):
                before, seen = len(load.done), {}
                wait_until(lambda before=before: len(load.done) >= before + 60, 60, "requests pass")
                pid = cluster.children[i].pid
                os.kill(pid, signal.SIGTERM)
                wait_until(lambda i=i, pid=pid: cluster.children[i].pid not in (pid, None), 60, "it is back")
                wait_until(
                    lambda seen=seen: is_whole(cluster, seen), 60, lambda seen=seen: f"whole again: {seen}"
                )
            wait_until(lambda: len(load.done) >= LEAST, 60, f"{LEAST} requests")
        finally:
            load.close()
        assert load.wrong == []
        print(f"{len(load.done)} requests through {len(cluster.children)} restarts")
