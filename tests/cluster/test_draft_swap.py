"""Traffic of a running cluster becomes a head, and the head goes back into the cluster under load."""

import itertools
import os
import re
import signal
import stat
import threading

import httpx
import pytest
from baton.tests.cluster.random_heads import random_head
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import (
    at_once,
    complete,
    random_ids,
    served_model,
    serving,
    status,
    wait_until,
)
from baton.tests.parity.toy_models import write_toy_checkpoint
from baton.training.command import main
from baton.training.samples import read_samples

VOCAB, LAYERS, LENGTH = 330, (1, 2, 4), 24
NUM_CLIENTS, NUM_PROMPTS = 6, 48
TRAINING = [
    "--layers", "1,2,4", "--steps", "3", "--epochs", "30", "--max-tokens", "512", "--lr", "0.003",
    "--held-out", "0", "--device", "cpu", "--dtype", "float32",
]  # fmt: skip


class Load:
    """Clients that ask without a pause; `wrong` gathers every answer that is not as expected."""

    def __init__(self, cluster, answers):
        self._url, self._model = f"{cluster.url}/v1/completions", served_model(cluster)
        self._answers, self._stop = answers, threading.Event()
        self.num_done, self.wrong = 0, []
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, at):
        for i in itertools.count(at * 7):
            if self._stop.is_set():
                return
            prompt, expected = self._answers[i % len(self._answers)]
            body = {
                "model": self._model, "prompt": prompt, "max_tokens": LENGTH, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True,
            }  # fmt: skip
            try:
                reply = httpx.post(self._url, json=body, timeout=120)
                found = reply.json()["choices"][0]["token_ids"] if reply.status_code == 200 else reply.text
            except httpx.HTTPError as error:
                found = repr(error)
            self.num_done += 1
            if found != expected:
                self.wrong.append(found)


def heads(cluster):
    """The fingerprint of each serving decode worker's head, by pid."""
    workers = status(cluster)["workers"]
    return {
        worker["pid"]: worker["draft"]["fingerprint"]
        for worker in workers
        if worker["role"] == "decode" and worker["state"] == "serving"
    }


def restarted(cluster, pid, number, whose):
    """Ends a decode worker and waits until `baton up` has another one in its place."""
    os.kill(pid, number)
    wait_until(
        lambda: len(found := heads(cluster)) == whose and pid not in found, 120, f"another worker for {pid}"
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("draft swap") / "target"
    write_toy_checkpoint(directory, "llama", num_hidden_layers=6, vocab_size=VOCAB, hidden_size=32)
    return save_tokenizer(directory)


def asked(options, capsys):
    code = main(["swap", *map(str, options)])
    said = capsys.readouterr()
    return code, said.out + said.err


def accept_lengths(capsys, model, samples, *found):
    """The accept length of each head on prompts of the samples, through the engine."""
    assert main([
        "evaluate", "--model", str(model), "--draft", *map(str, found), "--samples", str(samples),
        "--prompts", "24", "--steps", "3", "--tokens", str(LENGTH), "--device", "cpu", "--dtype", "float32",
    ]) == 0  # fmt: skip
    return [float(length) for length in re.findall(r"accept length ([\d.]+)", capsys.readouterr().out)]


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    base = tmp_path_factory.mktemp("recording")
    first = random_head(model, base / "first", 1, LAYERS)
    settings = {
        "prefill": 1, "decode": 2, "kv_memory_mb": 32, "threads": 1, "feature_layers": "0,1,2,4",
        "record_drafts": str(base / "samples"), "decode_policy": "round-robin",
    }  # fmt: skip
    link = base / "current"
    link.symlink_to(first)
    with serving(model, link, **settings) as running:
        running.samples, running.heads, running.link = base / "samples", base, link
        yield running


@pytest.fixture(scope="module")
def answers(cluster):
    prompts = [random_ids(6 + i % 5, VOCAB, seed=i) for i in range(NUM_PROMPTS)]
    jobs = [lambda ids=ids: (ids, complete(cluster, ids, max_tokens=LENGTH)[0]) for ids in prompts]
    return at_once(jobs, NUM_CLIENTS)


def test_recorded_traffic_trains_a_head_that_is_swapped_in_under_load(cluster, model, answers, capsys):
    url = ["--url", cluster.url]
    jobs = [lambda ids=ids: complete(cluster, ids, max_tokens=LENGTH) for ids, _ in answers]
    unrecorded = {"prompt": [7] * 9, "max_tokens": LENGTH, "model": served_model(cluster)}
    headers = {"x-baton-record": "0"}
    assert httpx.post(f"{cluster.url}/v1/completions", json=unrecorded, headers=headers).status_code == 200
    at_once(jobs, NUM_CLIENTS)
    before = heads(cluster)
    for pid in before:  # a worker that leaves writes what it holds
        restarted(cluster, pid, signal.SIGTERM, 2)
    samples = read_samples([cluster.samples], VOCAB)
    assert len(samples) == 2 * NUM_PROMPTS
    found = {tuple(samples.sample(i).tokens): samples.sample(i).mask for i in range(len(samples))}
    wanted = {(*ids, *tokens): [0] * len(ids) + [1] * len(tokens) for ids, tokens in answers}
    assert found == wanted, "prompts and answers as they were served, the one with the header left out"
    assert {stat.S_IMODE(path.stat().st_mode) for path in cluster.samples.iterdir()} == {0o600}
    recordings = [worker["recording"] for worker in status(cluster)["workers"]]
    assert [one and one["is_on"] for one in recordings if one is not None] == [True, True]

    first, out = cluster.heads / "first", cluster.heads / "out"
    train = ["train", "--model", str(model), "--samples", str(cluster.samples), "--out", str(out), *TRAINING]
    assert main(train) == 0
    capsys.readouterr()
    old, new = accept_lengths(capsys, model, cluster.samples, first, out / "head")
    assert new > old + 0.3, (old, new)

    with Load(cluster, answers) as load:
        code, said = asked([out / "head", *url, "--verifies", "150"], capsys)
        assert code == 0, said
        wait_until(lambda: load.num_done > 100, 120, "requests")
    assert load.wrong == []
    trained = set(heads(cluster).values())
    assert len(trained) == 1
    assert trained.isdisjoint(before.values())
    assert said.count(" verifies, ") == 2
    assert asked([out / "head", *url], capsys)[1].startswith("every decode worker has")

    bad = random_head(model, cluster.heads / "bad", 2, LAYERS)
    with Load(cluster, answers) as load:
        code, said = asked([bad, *url, "--verifies", "150"], capsys)
    assert (code, load.wrong) == (1, []), said
    assert "the old head is back" in said
    assert set(heads(cluster).values()) == trained

    with Load(cluster, answers) as load:  # the worker under judgement is killed
        result = []
        rollout = threading.Thread(
            target=lambda: result.append(main(["swap", str(bad), *url, "--verifies", "99999"]))
        )
        rollout.start()
        changed = wait_until(
            lambda: [pid for pid, head in heads(cluster).items() if head not in trained], 60, "a swap"
        )
        restarted(cluster, changed[0], signal.SIGKILL, 2)
        rollout.join(120)
    assert (result, load.wrong) == ([1], [])
    assert "was lost" in capsys.readouterr().err
    now = heads(cluster)
    assert set(now.values()) == trained | set(before.values()), (
        "a worker that restarts has the head of --draft"
    )
    assert asked([out / "head", *url, "--verifies", "0"], capsys)[0] == 0
    assert set(heads(cluster).values()) == trained


def test_a_head_of_other_layers_comes_by_restarts_without_a_lost_request(cluster, model, answers, capsys):
    url, link = ["--url", cluster.url, "--verifies", "0"], ["--link", cluster.link]
    other = random_head(model, cluster.heads / "other", 3, (0, 1, 4))
    before = heads(cluster)
    code, said = asked([other, *url], capsys)
    assert (code, "reads the layers 0,1,4, the head in use 1,2,4" in said) == (1, True), said
    assert "baton draft swap --restart --link LINK" in said
    assert heads(cluster) == before
    with Load(cluster, answers) as load:
        code, said = asked([other, *url, *link, "--restart"], capsys)
        wait_until(lambda: load.num_done > 50, 120, "requests")
    assert (code, load.wrong) == (0, []), said
    assert said.count("drafts with") == 2
    assert len(set(heads(cluster).values())) == 1
    assert heads(cluster).keys().isdisjoint(before)
    assert cluster.link.resolve() == other.resolve()
    workers = [worker for worker in status(cluster)["workers"] if worker["role"] == "decode"]
    assert [worker["feature_ids"] for worker in workers] == [[0, 1, 4]] * 2
