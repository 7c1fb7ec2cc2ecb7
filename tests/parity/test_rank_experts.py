"""The experts that ranks report and count are those of transformers' routers, and of one rank.

Every rank routes all rows, whether it has a part of each expert or whole ones. Rank 0 tells what it kept.
"""

import secrets
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from baton.cluster.protocol.messages import Reserve, RoutedExperts, Sampling, Tokens
from baton.decode.worker import DecodeWorker
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.rank_cases import RankCases
from baton.tests.parity.test_aggregated import worker_of
from baton.tests.parity.test_sampled_law import D
from baton.tests.parity.toy_engine import random_ids
from baton.tests.sim.test_routed_experts import FAMILIES, NEW_TOKENS, by_transformers, ordered

pytestmark = pytest.mark.usefixtures("one_thread")

HALF = random_ids(20, seed=1)
PROMPTS = (HALF + HALF[:11], random_ids(5, seed=2), random_ids(41, seed=3))
KEPT = {"return_routed_experts": True, "count_experts": True, "max_running": len(PROMPTS)}
EVEN = {"mixtral": {"num_local_experts": 4}}  # the others have an even number
CHAIN, TREE = {"spec_steps": 3}, {"spec_steps": 3, "spec_topk": 2, "spec_tokens": 6}
WAYS = {
    "plain": {"graphs": "off", "draft": ""},
    "chain": {"graphs": "off", "draft": "head"} | CHAIN,
    "lookup graphs": {"graphs": "on", "draft": "ngram"},
    "chain ahead graphs": {"graphs": "on", "draft": "head", "overlap": "on"} | CHAIN,
    "tree graphs": {"graphs": "on", "draft": "head"} | TREE,
}
QUICK = {("qwen3_moe", "chain")}

Rows = list[list[list[int]]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankCases]:
    cases = RankCases(2)
    yield cases
    cases.close()


@pytest.fixture(scope="module")
def models(
    toy_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path]]:
    """(target, head) of a family."""
    head = write_head(tmp_path_factory.mktemp("head"), head_config(2, (0, 1, 2)), head_tensors())
    return cache(lambda family: (toy_checkpoint(family, **EVEN.get(family, {})), head))


@pytest.fixture(scope="module")
def expected(models: Callable[[str], tuple[Path, Path]]) -> Callable[..., tuple[list[int], Rows]]:
    return by_transformers(models)


def told(
    worker: DecodeWorker, prompts: tuple[list[int], ...], first: int = 0
) -> list[tuple[list[int], Rows]]:
    """The tokens behind prompts that come together, and the experts of their rows from `first` on."""
    sampling = Sampling(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True, routed_experts=first)
    rooms = [secrets.token_hex(16) for _ in prompts]
    for room, ids in zip(rooms, prompts, strict=True):
        order = Reserve(room=room, epoch=0, instance=D, prompt_ids=ids, sampling=sampling, deadline_ms=0)
        worker.handle(order, now=0.0)
    for _ in range(5000):
        worker.step()
        if not worker.num_rooms:
            break
    said: dict[str, list[int]] = {room: [] for room in rooms}
    rows: dict[str, Rows] = {room: [] for room in rooms}
    shape = worker.engine.expert_shape
    assert shape is not None

    def split(ids: bytes) -> Rows:
        found = np.frombuffer(ids, f"<u{shape.id_bytes}")
        return found.reshape(-1, len(shape.layers), shape.top_k).tolist()

    for message in worker.link.heard:
        if isinstance(message, RoutedExperts):
            assert message.start == first + len(rows[message.room]), "rows come in order"
            rows[message.room] += split(message.ids)
        for item in message.items if isinstance(message, Tokens) else ():
            said[item.room] += item.ids
            rows[item.room] += split(item.experts or b"")
    worker.link.heard.clear()
    return [(said[room], rows[room]) for room in rooms]


def counted(worker: DecodeWorker) -> dict[str, float]:
    """Rows by expert, as /metrics has them."""
    return {name: count for name, count in worker.stats().counters.items() if name.startswith("expert_rows_")}


@pytest.mark.parametrize("ep", [False, True], ids=["cut", "whole"])
@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, marks=[] if (family, way) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for way in WAYS
    ],
)
def test_two_ranks_report_and_count_what_one_does(
    ranks: RankCases,
    models: Callable[[str], tuple[Path, Path]],
    expected: Callable[..., tuple[list[int], Rows]],
    family: str,
    way: str,
    ep: bool,
):
    target, head = models(family)
    settings = dict(WAYS[way]) | KEPT
    named = settings.pop("draft")
    draft = head if named == "head" else named
    alone = worker_of(target, draft, 16, **settings)
    alone.engine.begin_watch()  # forgets the rows of captures
    of_one = told(alone, PROMPTS)
    for prompt, (tokens, rows) in zip(PROMPTS, of_one, strict=True):
        assert (tokens, ordered(rows)) == expected(family, prompt)
    with ranks.worker(target, draft, ep=ep, **settings) as worker:
        worker.engine.begin_watch()
        assert told(worker, PROMPTS) == of_one
        assert counted(worker) == counted(alone)
        assert told(worker, PROMPTS[:1], first=24) == [(of_one[0][0], of_one[0][1][24:])], "behind the cache"
