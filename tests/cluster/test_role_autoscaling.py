"""`--autoscale-roles` under load: workers move to the role that lacks them, and no request fails or changes.

Long answers for more clients than decode has places, then long prompts. The thresholds are production's, so
two moves take two minutes.
"""

import itertools
import sys
import time

import pytest
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import at_once, complete, random_ids, serving, status, wait_until
from baton.tests.cluster.test_role_change import served
from baton.tests.cluster.test_rolling_restart import Load
from baton.tests.parity.toy_models import write_toy_checkpoint

VOCAB, CLIENTS, PLACES = 330, 24, 4
LONG_ANSWERS, LONG_PROMPTS = (20, 250), (3000, 4)  # tokens in, tokens out
SETTINGS = {
    "prefill": 2, "decode": 2, "threads": 1, "max_running": PLACES, "chunk_size": 256, "canary_s": 10.0,
    "kv_memory_mb": 128, "prefix_cache": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("roles") / "model"
    write_toy_checkpoint(path, "llama", vocab_size=VOCAB, max_position_embeddings=4096, seed=5)
    return save_tokenizer(path)


def split(cluster):
    """The numbers of serving workers: (prefill, decode)."""
    roles = served(cluster)
    return len(roles["prefill"]), len(roles["decode"])


@pytest.mark.slow
def test_roles_follow_a_load_that_shifts_and_no_request_fails(model):
    with serving(model, autoscale_roles=True, **SETTINGS) as cluster:
        before = set(itertools.chain(*served(cluster).values()))
        for (size, num_tokens), wanted in ((LONG_ANSWERS, (1, 3)), (LONG_PROMPTS, (2, 2))):
            prompts = [random_ids(size, VOCAB, seed=1000 * size + i) for i in range(12)]
            jobs = [lambda p=p, n=num_tokens: complete(cluster, p, max_tokens=n)[0] for p in prompts]
            answers = list(zip(prompts, at_once(jobs, 2), strict=True))
            load = Load(cluster, answers, num_tokens=num_tokens, num_clients=CLIENTS)
            started = time.monotonic()
            try:
                wait_until(lambda wanted=wanted: split(cluster) == wanted, 180, f"{wanted}")
                moved, done = time.monotonic() - started, len(load.done)
                least = done + CLIENTS
                wait_until(lambda load=load, n=least: len(load.done) >= n, 120, "requests pass")
            finally:
                load.close()
            assert load.wrong == []
            print(
                f"{size} tokens in, {num_tokens} out: {wanted} after {moved:.0f} s, ",
                f"{len(load.done)} requests", sep="", file=sys.stderr, flush=True,
            )  # fmt: skip
        router = status(cluster)["router"]
        assert [move["state"] for move in router["role_changes"]] == ["done"] * 2
        assert router["events"].get("worker_lost", 0) == 0
        assert router["open_rooms"] == 0
        assert set(itertools.chain(*served(cluster).values())) == before, "the same processes"
