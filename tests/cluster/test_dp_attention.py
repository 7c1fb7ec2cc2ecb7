"""Real decode workers whose ranks share experts: a router sees each rank as a worker of its own."""

import json
import os
import re
import shutil
import signal
import threading

import httpx
import psutil
import pytest
from baton.tests.cluster.dp_planted import planted
from baton.tests.cluster.random_heads import random_head
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import (
    GreedyStream,
    at_once,
    complete,
    instances,
    random_ids,
    serving,
    status,
    wait_free,
    wait_until,
)
from baton.tests.embeds import embeds_text
from baton.tests.parity.toy_models import reference_greedy, reference_model
from safetensors.torch import load_file

VOCAB = 330
SETTINGS = {
    "kv_memory_mb": 32, "threads": 1, "dp_attention": 2, "ep": True, "watchdog_s": 10.0,
    "stall_timeout_s": 4.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory, toy_checkpoint):
    """Directories by family."""
    shape = {"num_hidden_layers": 3, "vocab_size": VOCAB, "max_position_embeddings": 1 << 12}
    made = {}
    for family in ("qwen3_moe", "deepseek_v3"):
        directory = tmp_path_factory.mktemp(family)
        shutil.copytree(toy_checkpoint(family, **shape), directory, dirs_exist_ok=True)
        made[family] = save_tokenizer(directory)
    return made


@pytest.fixture
def model(models):
    return models["qwen3_moe"]


def decode_workers(cluster):
    return [worker for worker in status(cluster)["workers"] if worker["role"] == "decode"]


def wait_all_answered(cluster):
    """Each rank had some of the requests, as the heartbeats tell."""

    def have_answered():
        return all(worker["counters"]["tokens"] > 0 for worker in decode_workers(cluster))

    wait_until(have_answered, 30, "tokens of every rank")


def check_answers(cluster, model, count=6):
    """Requests at once, which the router spreads over the ranks."""
    reference = reference_model(model)
    prompts = [random_ids(20 + 7 * at, VOCAB, seed=at) for at in range(count)]
    said = at_once([lambda ids=ids: complete(cluster, ids, max_tokens=10)[0] for ids in prompts], count)
    assert said == [reference_greedy(reference, ids, 10) for ids in prompts]


def test_both_ranks_answer_without_prefill_workers_and_leave_together(model):
    with serving(model, prefill=0, decode=1, aggregated=True, **SETTINGS) as cluster:
        assert len(instances(cluster)) == 2
        check_answers(cluster, model)
        wait_all_answered(cluster)
        wait_free(cluster)
        (child,) = [child for child in cluster.children if child.role == "decode"]
        ranks = [psutil.Process(child.pid), *psutil.Process(child.pid).children()]
        assert len(ranks) == 2
    assert not any(rank.is_running() for rank in ranks)
    assert "the worker ends" not in cluster.output.getvalue()
    assert not re.search("error|crashed|does not end", cluster.output.getvalue(), re.IGNORECASE)


@pytest.mark.slow
def test_schemas_and_prompt_embeddings_beside_plain_requests(model):
    """Ranks run eagerly what they must, and wait for grammars, while the others replay and go on."""
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    reference = reference_model(model)
    prompts = [random_ids(12 + at, VOCAB, seed=at) for at in range(4)]
    plain = [reference_greedy(reference, ids, 10) for ids in prompts]
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    settings = SETTINGS | {"graphs": "on", "prompt_embeds": True}
    with serving(model, "ngram", prefill=0, decode=1, aggregated=True, **settings) as cluster:
        jobs = []
        for ids in prompts:
            text = embeds_text(table[ids])
            jobs += [
                lambda ids=ids: complete(cluster, ids, max_tokens=10)[0],
                lambda text=text: complete(cluster, [], prompt="", prompt_embeds=text, max_tokens=10)[0],
                lambda ids=ids: complete(cluster, ids, max_tokens=60, ignore_eos=False, response_format=form)[
                    1
                ],
            ]
        said = at_once(jobs, len(jobs))
        assert said[0::3] == said[1::3] == plain
        assert all(set(json.loads(answer["choices"][0]["text"])) == {"a"} for answer in said[2::3])
        wait_all_answered(cluster)
        wait_free(cluster)


CHAINS, TREES = {"draft": "head"}, {"draft": "head", "spec_topk": 3, "spec_tokens": 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tp", "drafts"),
    [
        ("qwen3_moe", 1, {}),
        ("qwen3_moe", 2, TREES),
        ("deepseek_v3", 1, CHAINS),
        ("deepseek_v3", 2, {"draft": "ngram"}),
    ],
    ids=["plain", "trees, prefill of two ranks", "latents, chains", "latents, lookup, prefill of two ranks"],
)
def test_each_rank_gets_its_own_rooms_from_prefill_workers(models, tmp_path, family, tp, drafts):
    """With their features, where a head reads them."""
    path, settings = models[family], dict(drafts)
    if settings.get("draft") == "head":
        settings["draft"] = random_head(path, tmp_path / "head", 1, (0, 1, 2))
    with serving(path, prefill=1, decode=1, tp=tp, **SETTINGS, **settings) as cluster:
        assert len(instances(cluster)) == 3
        check_answers(cluster, path)
        workers = decode_workers(cluster)
        assert all(worker["counters"]["handoff_blocks"] > 0 for worker in workers)
        assert not any(worker["counters"]["local_prefills"] for worker in workers)
        assert bool(drafts) == any(worker["counters"]["drafted_tokens"] > 0 for worker in workers)
        wait_free(cluster)


LONG = 150


def ranks_of(cluster):
    """Rank 0 and its other rank of each worker."""
    workers = [child.pid for child in cluster.children if child.role == "decode" and child.pid]
    return [(psutil.Process(pid), *psutil.Process(pid).children()) for pid in workers]


@pytest.mark.slow
def test_a_dead_and_a_stopped_rank_end_their_worker_and_all_streams_go_on(model):
    with serving(model, prefill=0, decode=2, aggregated=True, **SETTINGS) as cluster:
        prompts = [random_ids(30, VOCAB, seed=seed) for seed in range(6)]
        expected = [complete(cluster, ids, max_tokens=LONG)[0] for ids in prompts]
        every = {rank for ranks in ranks_of(cluster) for rank in ranks}
        for number, said in ((signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "is stopped")):
            lose_a_rank(cluster, number, said, prompts, expected)
            every |= {rank for ranks in ranks_of(cluster) for rank in ranks}
    assert not any(rank.is_running() for rank in every), "a rank outlived its worker"


@pytest.mark.slow
def test_a_worker_that_drains_ends_when_the_streams_of_all_ranks_have(model):
    """One rank goes on to take part in the steps of the other."""
    with serving(model, prefill=0, decode=1, aggregated=True, **SETTINGS) as cluster:
        lengths = (60, 200, 60, 200)
        prompts = [random_ids(20, VOCAB, seed=seed) for seed in range(len(lengths))]
        expected = [complete(cluster, ids, max_tokens=n)[0] for ids, n in zip(prompts, lengths, strict=True)]
        streams = [GreedyStream(cluster, ids, n) for ids, n in zip(prompts, lengths, strict=True)]
        wait_until(lambda: all(len(stream.ids) > 2 for stream in streams), 90, "all streams run")
        (ranks,) = ranks_of(cluster)
        os.kill(ranks[0].pid, signal.SIGTERM)
        for stream in streams:
            stream.join()
        assert [(stream.error, stream.ids) for stream in streams] == [(None, ids) for ids in expected]
        wait_until(lambda: not any(rank.is_running() for rank in ranks), 30, "both ranks have left")
        assert "the worker ends" not in cluster.output.getvalue()


@pytest.mark.slow
def test_a_rank_dies_with_a_killed_rank_0(model):
    with serving(model, prefill=0, decode=1, aggregated=True, **SETTINGS) as cluster:
        before = instances(cluster)
        ((rank_0, rank),) = ranks_of(cluster)
        rank_0.kill()
        wait_until(lambda: not rank.is_running(), 30, "the rank is gone")
        wait_until(lambda: len(instances(cluster) - before) == 2, 120, "a restart")
        assert complete(cluster, random_ids(9, VOCAB, seed=9), max_tokens=3)[0]


def lose_a_rank(cluster, number, said, prompts, expected):
    """Signal `number` to a rank under streams: those of both ranks go on elsewhere. The worker returns."""
    before = wait_until(lambda: len(instances(cluster)) == 4 and instances(cluster), 120, "four ranks")
    streams = [GreedyStream(cluster, ids, LONG) for ids in prompts]
    wait_until(lambda: all(len(stream.ids) > 2 for stream in streams), 90, "all streams run")
    rank_0, rank = ranks_of(cluster)[0]
    os.kill(rank.pid, number)
    for stream in streams:
        stream.join()
    assert [stream.error for stream in streams] == [None] * len(prompts)
    assert [stream.ids for stream in streams] == expected
    line = re.compile(rf"rank 1 \(pid {rank.pid}\) ({said}|ended with exit code -9)")
    wait_until(lambda: line.search(cluster.output.getvalue()), 30, "a line names the rank")
    wait_until(lambda: not (rank.is_running() or rank_0.is_running()), 30, "both are gone")
    wait_until(lambda: len(instances(cluster) - before) == 2, 120, "a restart")
    wait_free(cluster)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "plant", "said"),
    [
        (1, "pads no steps", r"rank 1 enters the experts with \d+ rows, and the ranks agreed on \d+"),
        (0, "pads no prompts", r"rank 0 enters the experts with \d+ rows, and the ranks agreed on \d+"),
        (1, "takes another graph", r"rank 1 enters the experts with \d+ rows, and the ranks agreed on \d+"),
        (1, "runs no idle steps", r"the worker ends: rank 0 .* hangs: no sign of life for 6 s"),
    ],
    ids=["a step", "a prompt", "a graph", "no check"],
)
def test_a_rank_that_would_pad_wrongly_ends_the_worker(model, rank, plant, said):
    """In production: nobody waits in a collective for ever, and no process is left."""
    settings = SETTINGS | {"graphs": "on" if "graph" in plant else "off", "graph_self_test": False}
    with serving(
        model, prefill=0, decode=1, aggregated=True, command_of=planted(rank, plant), **settings
    ) as cluster:
        ((rank_0, other),) = ranks_of(cluster)
        stopping = threading.Event()

        def ask():
            while not stopping.is_set():
                body = {"model": "m", "prompt": random_ids(9, VOCAB), "max_tokens": 4, "ignore_eos": True}
                try:
                    httpx.post(f"{cluster.url}/v1/completions", json=body | served(cluster), timeout=5)
                except httpx.HTTPError:
                    continue

        clients = [threading.Thread(target=ask) for _ in range(3)]
        for client in clients:
            client.start()
        try:
            wait_until(lambda: not (rank_0.is_running() or other.is_running()), 60, "the worker ended")
        finally:
            stopping.set()
            for client in clients:
                client.join()
        output = cluster.output.getvalue()
        assert re.search(said, output)
        if rank and "idle" not in plant:
            assert f"rank 1 (pid {other.pid}) ended with exit code 70" in output


def served(cluster):
    return {"model": cluster.config.model.rstrip("/").rsplit("/", 1)[-1]}
