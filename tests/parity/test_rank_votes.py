"""A fault that one of two ranks meets at the start takes the same graphs from both, and no token changes."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from baton.engine.errors import RanksApart
from baton.tests.parity.dp_cases import Asked, DpCases
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.rank_cases import RankCases, graphs_of
from baton.tests.parity.rank_plants import BUCKET, PLANTS
from baton.tests.parity.test_aggregated import answers_of, ask
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

SETTINGS = {"graphs": "on", "spec_adaptive": "on", "spec_steps": 2}
LIMIT_S = 15.0  # in a collective: ranks in different ones would wait for ever


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(2, (0, 1, 2)), head_tensors())


@pytest.fixture
def cases() -> Iterator[RankCases]:
    made = RankCases(2, LIMIT_S)
    try:
        yield made
    finally:
        made.close()


def without(graphs: dict[str, list[int]]) -> dict[str, list[int]]:
    """`graphs` without those of BUCKET."""
    return {kind: [size for size in sizes if size != BUCKET] for kind, sizes in graphs.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_both_ranks_drop_what_one_cannot_capture_or_finds_wrong(
    cases: RankCases, target: Path, head: Path, rank: int
):
    answers = answers_of(target)
    found, counters = {}, {}
    for plant in ("", "capture fails once", "capture fails", "differs"):
        with cases.worker(target, head, plants={rank: plant}, **SETTINGS) as worker:
            found[plant] = graphs_of(worker.engine)
            assert cases.graphs() == [found[plant]]
            assert ask(worker, list(answers)) == list(answers.values())
            counters[plant] = worker.engine.graph_counters
            worker.engine.cache.allocator.check_integrity()
    whole = found[""]
    assert sum(BUCKET in sizes for sizes in whole.values()) > 3
    assert found["capture fails once"] == whole, "both have captured again"
    assert found["capture fails"] == found["differs"] == without(whole)
    reason = "rank_vote" if rank else "capture_failed"
    assert counters["differs"][f"graph_fallback_target_prefill_{reason}"] >= 1


def test_sums_are_in_the_same_segments_of_all_ranks(cases: RankCases, target: Path, head: Path):
    """A rank that has a sum in an earlier segment than the other would wait in it for the other's vote."""
    answers = answers_of(target)
    plants = dict.fromkeys(range(2), "votes on segments")
    with cases.worker(target, head, plants=plants, **SETTINGS) as worker:
        assert cases.graphs() == [graphs_of(worker.engine)]
        assert ask(worker, list(answers)) == list(answers.values())


def test_ranks_with_requests_of_their_own_drop_the_same_graphs(
    toy_checkpoint: Callable[..., Path], head: Path
):
    """The fault is one of rank 0. Rank 1 would wait in the experts for the forwards that rank 0 skips."""
    path = toy_checkpoint("qwen3_moe")
    prompts = {rank: [Asked(random_ids(9 + rank, seed=rank), 7)] for rank in range(2)}
    model = reference_model(path)
    expected = [[reference_greedy(model, list(each.ids), 7) for each in prompts[rank]] for rank in range(2)]
    cases = DpCases(2, limit_s=LIMIT_S)
    try:
        for plant in ("capture fails once", "capture fails", "differs"):
            with PLANTS[plant](), cases.workers(path, head, ep=True, **SETTINGS) as pair:
                sizes = graphs_of(pair.worker.engine).values()
                assert any(BUCKET in each for each in sizes) == (plant == "capture fails once")
                assert pair.ask(prompts) == expected
    finally:
        cases.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_steps_are_measured_on_both_ranks_or_on_none(cases: RankCases, target: Path, head: Path, rank: int):
    answers = answers_of(target)
    plants = {rank: "lacks a step", 1 - rank: "measures"}
    with cases.worker(target, head, plants=plants, **SETTINGS) as worker:
        assert ask(worker, list(answers)) == list(answers.values())


def test_a_forward_that_fails_on_both_ranks_costs_its_graphs(cases: RankCases, target: Path, head: Path):
    answers = answers_of(target)
    plants = dict.fromkeys(range(2), "fails inside a forward")
    with cases.worker(target, head, plants=plants, **SETTINGS) as worker:
        assert ask(worker, list(answers)) == list(answers.values())
        assert not any(BUCKET in sizes for sizes in graphs_of(worker.engine).values())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_in_a_forward_of_both_ends_the_start(
    cases: RankCases, target: Path, head: Path, rank: int
):
    began = time.monotonic()
    with (
        pytest.raises(RanksApart) as caught,
        cases.worker(target, head, plants={rank: "fails inside a forward"}, **SETTINGS),
    ):
        pass
    assert time.monotonic() - began < LIMIT_S + 30
    assert "\n" not in str(caught.value)
    if rank == 0:
        assert "4 cannot be captured: planted: out of memory; rank 0 cannot agree" in str(caught.value)
