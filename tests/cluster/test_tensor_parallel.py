"""Real workers of two ranks: answers of transformers; a rank that dies or stops takes its worker along."""

import os
import re
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import (
    GreedyStream,
    complete,
    instances,
    random_ids,
    serving,
    status,
    wait_free,
    wait_until,
)
from baton.tests.parity.toy_models import reference_greedy, reference_model

VOCAB, LONG = 330, 120
SETTINGS = {
    "aggregated": True, "kv_memory_mb": 32, "threads": 1, "tp": 2, "watchdog_s": 10.0, "stall_timeout_s": 4.0,
}  # fmt: skip
LOSSES = ((signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "is stopped"))  # and a line's words


@pytest.fixture(scope="module")
def model(tmp_path_factory, toy_checkpoint):
    directory = tmp_path_factory.mktemp("tp")
    path = toy_checkpoint("llama", num_hidden_layers=2, vocab_size=VOCAB, max_position_embeddings=1 << 12)
    shutil.copytree(path, directory, dirs_exist_ok=True)
    return save_tokenizer(directory)


def ranks_of(cluster):
    """The processes of other ranks, by the pid of rank 0."""
    workers = [child.pid for child in cluster.children if child.role == "decode" and child.pid]
    return {pid: _ranks_under(pid) for pid in workers if psutil.pid_exists(pid)}


def _ranks_under(pid):
    """A worker may have other children, such as compilers of kernels."""
    children = psutil.Process(pid).children()
    return [child for child in children if "baton.worker.rank_process" in child.cmdline()]


@pytest.mark.slow
def test_a_dead_and_a_stopped_rank_end_their_worker_and_its_streams_go_on(model):
    check_losses(model, "", LONG, **SETTINGS)


def check_losses(model, head, num_tokens, **settings):
    """Two workers of two ranks: one loses a rank that is killed, then one a rank that is stopped."""
    reference = reference_model(model)
    with serving(model, head, prefill=0, decode=2, **settings) as cluster:
        wait_until(lambda: len(instances(cluster)) == 2, 90, "two workers")
        prompt = random_ids(50, VOCAB, seed=1)
        assert complete(cluster, prompt, max_tokens=8)[0] == reference_greedy(reference, prompt, 8)
        prompts = [random_ids(40, VOCAB, seed=seed) for seed in (2, 3, 4)]
        expected = [complete(cluster, ids, max_tokens=num_tokens)[0] for ids in prompts]
        every = {rank.pid for ranks in ranks_of(cluster).values() for rank in ranks}
        workers = {child.pid for child in cluster.children if child.pid}
        assert len(every) == 2
        for number, said in LOSSES:
            lose_a_rank(cluster, number, said, prompts, expected)
            every |= {rank.pid for ranks in ranks_of(cluster).values() for rank in ranks}
            workers |= {child.pid for child in cluster.children if child.pid}
        assert len(every) == 4, "each worker that lost a rank came back with a new one"
    assert not any(map(is_alive, every | workers)), "a rank or its worker outlived the cluster"


def num_resumed(cluster):
    """How often a stream went on elsewhere so far."""
    return status(cluster)["router"]["events"].get("resumed", 0)


def lose_a_rank(cluster, number, said, prompts, expected):
    """Signal `number` to a rank under streams: they go on elsewhere, and its worker comes back.

    `expected`: the tokens of each prompt. There are two workers of two ranks.
    """
    resumed = num_resumed(cluster)
    before = wait_until(lambda: len(instances(cluster)) == 2 and instances(cluster), 90, "two workers")
    streams = [GreedyStream(cluster, ids, len(tokens)) for ids, tokens in zip(prompts, expected, strict=True)]
    wait_until(lambda: all(len(stream.ids) > 2 for stream in streams), 60, "all streams run")
    busiest = max(status(cluster)["workers"], key=lambda worker: worker["placed"])
    rank_0 = busiest["pid"]  # the other worker may have no stream
    (rank,) = ranks_of(cluster)[rank_0]
    os.kill(rank.pid, number)
    for stream in streams:
        stream.join()
    assert [stream.error for stream in streams] == [None] * len(streams)
    assert [stream.ids for stream in streams] == expected
    assert num_resumed(cluster) > resumed, "the rank was lost under no stream"
    line = re.compile(rf"the worker ends: rank 1 \(pid {rank.pid}\) {said}")
    wait_until(lambda: line.search(cluster.output.getvalue()), 30, "a line names the rank")
    wait_until(lambda: not is_alive(rank.pid) and not is_alive(rank_0), 30, "rank and worker are gone")
    wait_until(lambda: len(instances(cluster) - before) == 1, 120, "a restart")
    wait_free(cluster)


@pytest.mark.slow
def test_a_rank_dies_with_a_killed_rank_0(model):
    with serving(model, prefill=0, decode=1, **SETTINGS) as cluster:
        (before,) = instances(cluster)
        rank_0, (rank,) = next(iter(ranks_of(cluster).items()))
        os.kill(rank_0, signal.SIGKILL)
        wait_until(lambda: not is_alive(rank.pid), 30, "the rank is gone")
        wait_until(lambda: instances(cluster) not in (set(), {before}), 120, "a restart")
        assert complete(cluster, random_ids(9, VOCAB, seed=9), max_tokens=3)[0]


@pytest.mark.parametrize(
    ("role", "flags", "said"),
    [
        ("decode", ["--aggregated", "--tp=3"], "4 attention heads, which 3 does not divide; use tp 1, 2, 4"),
        ("decode", ["--aggregated", "--tp=2", "--deterministic"], "which --deterministic asks for"),
        (
            "decode",
            ["--aggregated", "--tp=2", "--host-cache-gib=1"],
            "--host-cache-gib keeps the pages of one",
        ),
        ("decode", ["--aggregated", "--tp=0"], "is below the smallest allowed, 1"),
        ("decode", ["--pp=2"], "pipeline parallelism is not supported: --tp N runs a model on N GPUs"),
    ],
    ids=["heads", "deterministic", "tiers", "none", "pipeline"],
)
def test_what_several_ranks_cannot_do_is_refused_in_one_line(model, role, flags, said):
    command = [sys.executable, "-m", f"baton.{role}", f"--model={model}", "--device=cpu", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    (line,) = [each for each in ended.stderr.splitlines() if each.startswith("baton")]
    assert said in line
    assert ended.returncode in (1, 2)


def is_alive(pid):
    """Whether the process runs, or is stopped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
