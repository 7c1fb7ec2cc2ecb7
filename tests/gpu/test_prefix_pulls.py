"""Prefixes that prefill pulls from decode on a device: the tokens of a run without pulls on the CPU."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import pages_held, serving, status, wait_until
from baton.tests.cluster.test_prefix_pulls import (
    FOLLOWING,
    TOY,
    assert_turns_are_pulled,
    conversation,
    pulled,
)
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.toy_models import reference_greedy, reference_model
from baton.tests.sim.pull_pair import PullPair
from baton.tests.sim.test_prefix_pulls import CHAIN, TREE, always, played
from baton.tests.sim.worker_pair import Pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB = 330


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(2, (0, 1, 3)), head_tensors())


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize(
    ("drafts", "shape"), [(True, CHAIN), (True, TREE), (False, CHAIN)], ids=["chain", "tree", "plain"]
)
def test_turns_behind_pulled_prefixes_say_and_draft_the_same(
    target: Path, head: Path, drafts: bool, shape: dict[str, int], graphs: str
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    draft = head if drafts else ""
    there = {"device": "cuda", "graphs": graphs, "graph_self_test": False, "pages": 200, **shape}
    there["spec_adaptive"] = "off"  # measured costs would decide whether there are drafts to compare
    pair = PullPair(target, draft, **there)
    said, accepted = played(pair, pulls=always, rng=random.Random(3))
    assert pair.counter("pulled_tokens") > 0
    pair.assert_nothing_is_held()
    assert said == played(Pair(target, draft, pages=200, **shape))[0], "on the CPU, without pulls"
    assert accepted == played(Pair(target, draft, **there))[1], "on the device, without pulls"


def device_blocks(cluster: object) -> float:
    """Blocks of prefixes that prefill has read from device memory."""
    (prefill,) = (worker for worker in status(cluster)["workers"] if worker["role"] == "prefill")
    return float(prefill["counters"].get("prefix_device_blocks", 0))


@pytest.mark.parametrize(
    ("transports", "slab_mb"), [("auto", 0), ("auto", 256), ("shm,zmq_blocks", 0), ("zmq_blocks", 0)]
)
def test_a_cluster_on_a_device_pulls_over_each_transport(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, transports: str, slab_mb: int
) -> None:
    """With `auto` hand-offs take device memory, and prefixes too where decode has some for them."""
    model = save_tokenizer(
        shutil.copytree(toy_checkpoint("llama", vocab_size=VOCAB, num_hidden_layers=4), tmp_path / "toy")
    )
    head = write_head(
        tmp_path / "head",
        head_config(2, (0, 1, 3), vocab_size=VOCAB),
        {name: tensor for name, tensor in head_tensors().items() if name != "t2d"},
    )
    settings = {"transports": transports, "max_running": 4, "kv_memory_mb": 64, "local_prefill_tokens": 0}
    settings |= {"prefill": 1, "decode": 1}  # one card would get one aggregated worker
    settings |= {"prefix_slab_mb": slab_mb}
    with serving(model, head, device="cuda", is_watched=False, prefix_pulls="always", **settings) as cluster:
        turns = conversation(cluster, TOY)
        assert_turns_are_pulled(turns)
        wait_until(lambda: pulled(cluster)[0] > 0, 10, "the heartbeat counts what was pulled")
        assert pulled(cluster)[2] == 0
        if slab_mb:
            wait_until(lambda: device_blocks(cluster) > 0, 10, "the link's counters come later than those")
        else:
            assert device_blocks(cluster) == 0
        wait_until(
            lambda: pages_held(cluster) == (dict.fromkeys(pages_held(cluster)[0], 0), 0), 10, "all free"
        )
    reference, ids = reference_model(model), list(TOY)
    for answer, document in turns:
        assert document["usage"]["prompt_tokens"] == len(ids)
        assert answer == reference_greedy(reference, ids, len(answer))
        ids += [*answer, *FOLLOWING]
