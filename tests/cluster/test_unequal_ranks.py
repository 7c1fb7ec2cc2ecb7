"""Real prefill and decode workers of 1 and 2 ranks: answers of transformers over all pairs; lost ranks."""

import re
import shutil

import psutil
import pytest
from baton.deploy.up.children import role_command
from baton.engine.parallel.rank_cards import VARIABLE as RANKS_PER_CARD
from baton.tests.cluster.random_heads import random_head
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import (
    GreedyStream,
    at_once,
    complete,
    instances,
    random_ids,
    serving,
    wait_free,
    wait_until,
)
from baton.tests.parity.toy_models import reference_greedy, reference_model

pytestmark = pytest.mark.slow

VOCAB = 330
SETTINGS = {
    "kv_memory_mb": 32,
    "threads": 1,
    "watchdog_s": 10.0,
    "stall_timeout_s": 4.0,
    "local_prefill": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory, toy_checkpoint):
    directory = tmp_path_factory.mktemp("ranks")
    path = toy_checkpoint("llama", num_hidden_layers=3, vocab_size=VOCAB, max_position_embeddings=1 << 12)
    shutil.copytree(path, directory, dirs_exist_ok=True)
    return save_tokenizer(directory)


@pytest.fixture(scope="module")
def head(model, tmp_path_factory):
    return random_head(model, tmp_path_factory.mktemp("head"), 3, (0, 1, 2))


def with_ranks(prefill: int, decode: int, victim: str = "", fault: str = "", cards=None):
    """The command of a child, with the number of ranks of its role.

    Rank 1 of the first worker of the role `victim` gets a `fault`. `cards`: the GPUs that a worker of each
    role sees, as CUDA_VISIBLE_DEVICES names them, which its ranks share if they are fewer; None: those that
    the cluster gives it.
    """
    ranks, armed = {"prefill": prefill, "decode": decode}, []

    def command_of(role, flags):
        if role not in ranks:
            return role_command(role, flags)
        command = role_command(role, [*flags, f"--tp={ranks[role]}"])
        if cards is not None:
            shared = -(-ranks[role] // len(cards[role].split(",")))
            seen = f"CUDA_VISIBLE_DEVICES={cards[role]}"
            command = ["env", seen, f"{RANKS_PER_CARD}={shared}", *command]
        if role != victim or armed:
            return command
        armed.append(role)
        return ["env", f"BATON_FAULT_RANK_1={fault}", "BATON_ALLOW_FAULTS=1", *command]

    return command_of


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_answers_are_those_of_transformers(model, head, prefill, decode, drafts):
    draft = head if drafts else ""
    with serving(
        model, draft, prefill=1, decode=1, command_of=with_ranks(prefill, decode), **SETTINGS
    ) as cluster:
        reference = reference_model(model)
        prompts = [random_ids(count, VOCAB, seed=count) for count in (1, 40, 333, 900)]
        answers = at_once([lambda ids=ids: complete(cluster, ids, max_tokens=24) for ids in prompts], 4)
        for prompt, (tokens, document) in zip(prompts, answers, strict=True):
            assert tokens == reference_greedy(reference, prompt, 24)
            assert not document["timeline"]["local_prefill"]
        wait_free(cluster)


@pytest.mark.parametrize(
    ("fault", "role"),
    [("sender:block:2", "prefill"), ("receiver:block:2", "decode"), ("receiver:release:2", "decode")],
    ids=["prefill's", "decode's", "decode's behind its last block"],
)
def test_a_rank_killed_in_a_hand_off_costs_no_stream_and_no_page(model, fault, role):
    """The worker ends with its rank, and another attempt serves its requests."""
    command_of = with_ranks(2, 2, role, fault)
    with serving(model, prefill=2, decode=2, command_of=command_of, is_watched=False, **SETTINGS) as cluster:
        wait_until(lambda: len(instances(cluster)) == 4, 90, "four workers")
        ranks = {rank.pid: rank.ppid() for rank in children_of(cluster, role)}
        assert len(ranks) == 2
        reference = reference_model(model)
        prompts = [random_ids(400, VOCAB, seed=seed) for seed in range(6)]
        streams = [GreedyStream(cluster, prompt, 16) for prompt in prompts]
        for stream, prompt in zip(streams, prompts, strict=True):
            stream.join()
            assert (stream.error, stream.ids) == (None, reference_greedy(reference, prompt, 16))
        ended = re.compile(r"rank 1 \(pid \d+\) (was killed|ended)")  # by the watch, or by a collective
        wait_until(lambda: ended.search(cluster.output.getvalue()), 60, "a line names the rank")
        wait_free(cluster)
        dead = [pid for pid in ranks if not psutil.pid_exists(pid)]
        assert len(dead) == 1, "rank 1 of one worker"
        assert not psutil.pid_exists(ranks[dead[0]]), "rank 0 outlived a rank"


def children_of(cluster, role):
    """The processes of ranks other than 0."""
    workers = [child.pid for child in cluster.children if child.role == role and child.pid]
    return [rank for pid in workers for rank in psutil.Process(pid).children()]
