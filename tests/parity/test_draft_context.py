"""Drafting ends where the draft model's context does: tokens stay, the end is counted, and nothing is written
beyond it."""

from pathlib import Path

import pytest
import torch
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafters.protocol import DraftView
from baton.tests.parity.eagle3_engine import PAGE_SIZE, Engine
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.graph_engine import arena, with_graphs
from baton.tests.parity.overlap_engine import overlapped, run_ahead
from baton.tests.parity.toy_engine import random_ids
from baton.tests.sim.worker_pair import Pair, name

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 32
LENGTHS = (
    5,
    LIMIT - 3,
    LIMIT - 4,
    45,
)  # short, reached by the first step, by the second, longer from the beginning
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def short_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = head_config(2, (0, 1, 3), max_position_embeddings=LIMIT)
    return write_head(tmp_path_factory.mktemp("short"), config, head_tensors())


@pytest.mark.parametrize("way", ["waiting", "ahead", "graphs"])
@pytest.mark.parametrize("shape", [{}, {"steps": 2, "topk": 2, "tokens": 6}], ids=["chain", "tree"])
def test_beyond_the_drafts_context_nothing_is_drafted(
    target: Path, short_head: Path, way: str, shape: dict[str, int]
) -> None:
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    expected = Engine(target).generate(prompts, GREEDY)
    engine = Engine(target, short_head, is_greedy=True, **shape)
    if way == "ahead":
        overlapped(engine)
    elif way == "graphs":
        with_graphs(engine, arena())
    written: list[int] = []
    propose = engine.drafter.propose

    def watched(view: DraftView, *rest: object) -> object:
        if not view.is_recorded:
            written.extend((view.lens + engine.steps)[view.states != 0].tolist())
        return propose(view, *rest)

    engine.drafter.propose = watched
    requests = [engine.prefill(prompt, GREEDY, chunk=8) for prompt in prompts]
    if way == "ahead":
        run_ahead(engine, requests)
    else:
        live = requests
        while live := [request for request in live if not request.is_finished]:
            result = engine.decoder.step(live)
        assert not any(result.drafted), "all are beyond"
    assert [request.output_ids for request in requests] == expected
    assert engine.decoder.counters["draft_beyond_context"] == len(LENGTHS)
    assert engine.drafter.states.num_open == 0, "their places are free for others"
    late = engine.steps + 1 if way == "ahead" else 0  # a step is launched before the one before it was read
    assert way == "graphs" or LIMIT - 4 - engine.steps <= max(written) < LIMIT + late
    for request in requests:
        assert engine.decoder.num_covered(request) == request.num_computed, (
            "no row is missing that one could ask for"
        )
        beyond = request.pages[(LIMIT + 2 * (1 + engine.steps)) // PAGE_SIZE :]
        assert not engine.drafter.pool.kv[beyond].any()


def test_a_request_within_the_context_is_drafted_for_beside_one_beyond(
    target: Path, short_head: Path
) -> None:
    engine = Engine(target, short_head)
    params = SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True)
    near, far = (engine.prefill(random_ids(n, seed=n), params) for n in (4, 45))
    assert engine.decoder.step([near, far]).drafted == [engine.steps, 0]
    assert engine.decoder.coverage.num_beyond == 1
    assert torch.equal(engine.drafter.pool.kv[far.pages[LIMIT // PAGE_SIZE :]].any(), torch.tensor(False))


def test_heartbeats_count_requests_beyond_the_drafts_context(target: Path, short_head: Path) -> None:
    pair = Pair(target, short_head, pages=96)
    for i, length in enumerate((4, 50)):
        pair.send(name(i), random_ids(length, seed=i), max_new_tokens=6)
    pair.run()
    assert pair.decode.stats().counters["draft_beyond_context"] == 1
    pair.assert_nothing_is_held()
