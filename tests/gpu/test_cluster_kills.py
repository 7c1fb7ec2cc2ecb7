"""A served cluster on two GPUs under cancels and kills: every stream is whole and equals the undisturbed run.

Two prefill and two decode workers serve a small random model in float32, so each kill leaves one of either
role.
"""

import os
import random
import shutil
import signal
import threading
import time
from functools import partial

import pytest
import torch
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
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

VOCAB, AUX_IDS = 330, (0, 2, 4)  # the tokenizer's; layers that the head reads
NUM_TOKENS, NUM_CLIENTS, CANCEL_SHARE = 120, 8, 0.15
PROMPT_LENGTHS = (3, 17, 64, 150, 150, 300, 300, 500, 700, 900)
NUM_ROUNDS = 2  # of kills; each takes one worker of either role


class Client(threading.Thread):
    """Sends the prompts in random order until it is told to stop, and leaves some streams early."""

    def __init__(
        self, cluster, answers: dict[tuple[int, ...], list[int]], seed: int, stopping: threading.Event
    ):
        super().__init__()
        self.num_whole, self.num_left = 0, 0
        self.wrong: list[str] = []
        self._cluster, self._answers, self._stopping = cluster, answers, stopping
        self._random = random.Random(seed)

    def run(self) -> None:
        while not self._stopping.is_set():
            prompt = self._random.choice(list(self._answers))
            stream = GreedyStream(self._cluster, list(prompt), NUM_TOKENS)
            wanted = self._answers[prompt]
            if self._random.random() < CANCEL_SHARE:
                time.sleep(self._random.random() * 0.1)
                stream.leave()
                self.num_left += 1
                wanted = wanted[: len(stream.ids)]
            else:
                stream.join()
                self.num_whole += 1
            if stream.error or stream.ids != wanted:
                self.wrong.append(f"{len(prompt)} tokens: {stream.error}, {len(stream.ids)} of {len(wanted)}")


@pytest.fixture(scope="module")
def cluster(toy_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "toy"
    config = {"vocab_size": VOCAB, "num_hidden_layers": 6, "max_position_embeddings": 2048}
    shutil.copytree(toy_checkpoint("llama", **config), folder)
    tensors = {name: tensor for name, tensor in head_tensors().items() if name != "t2d"}
    head = write_head(tmp_path_factory.mktemp("head"), head_config(2, AUX_IDS, vocab_size=VOCAB), tensors)
    settings = {"chunk_size": 128, "max_running": 8, "graphs": "off"}  # a restart without captures is fast
    with serving(
        save_tokenizer(folder), head, device="cuda", prefill=2, decode=2, is_watched=False, **settings
    ) as running:
        wait_until(lambda: len(instances(running)) == 4, 120, "all workers")
        yield running


def are_replaced(cluster, before: set[str]) -> bool:
    now = instances(cluster)
    return len(now) == 4 and len(now - before) == 2


def test_streams_under_cancels_and_kills_equal_the_undisturbed_run(cluster):
    prompts = [tuple(random_ids(length, VOCAB, seed=n)) for n, length in enumerate(PROMPT_LENGTHS)]
    jobs = [partial(complete, cluster, ids, max_tokens=NUM_TOKENS) for ids in prompts]
    undisturbed = at_once(jobs, 2)
    answers = dict(zip(prompts, [tokens for tokens, _ in undisturbed], strict=True))
    paths = {document["timeline"]["handoff_transport"] for _, document in undisturbed}
    assert "cuda_slab" in paths, paths
    stopping = threading.Event()
    clients = [Client(cluster, answers, seed, stopping) for seed in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    try:
        for _ in range(NUM_ROUNDS):
            before = instances(cluster)
            for role in ("prefill", "decode"):
                time.sleep(1.0 + random.random())
                os.kill(next(child.pid for child in cluster.children if child.role == role), signal.SIGKILL)
            wait_until(partial(are_replaced, cluster, before), 120, "restarts")
    finally:
        stopping.set()
        for client in clients:
            client.join()
    assert [fault for client in clients for fault in client.wrong] == []
    assert sum(client.num_whole for client in clients) > 20
    assert sum(client.num_left for client in clients) > 5
    assert status(cluster)["router"]["events"]["resumed"] > 0, "no kill met a stream"
    wait_free(cluster)
