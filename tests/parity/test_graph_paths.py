"""Full graphs, breakable graphs and eager forwards give the same tokens, hidden rows and KV.

Batches have one request, as many as a bucket and one more or less, and more than the largest; prompts likewise. Static
inputs are poisoned before every step, and what graphs have given back to their arena too.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.sampling_params import SamplingParams
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.graph_engine import BREAKABLE, FULL, MAX_TOKENS, arena, families, kv_of, uses_kernels, with_graphs
from baton.tests.parity.toy_engine import random_ids

pytestmark = pytest.mark.usefixtures("one_thread")

AUX_IDS = {"default": (1, 5, 8), "custom": (2, 3, 7), "unsorted": (8, 1, 5), "last layer": (0, 5, 11)}
LENGTHS = (1, 7, 8, 9, MAX_TOKENS - 1, MAX_TOKENS, MAX_TOKENS + 1, 40)
BATCHES = (1, 2, 3, 4, 5)


@pytest.fixture(scope="module")
def head_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def written(name: str) -> Path:
        return write_head(tmp_path_factory.mktemp("head"), head_config(2, AUX_IDS[name]), head_tensors())

    return written


def greedy(max_new_tokens: int = 9) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True)


def sampled(seed: int, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_new_tokens=9, ignore_eos=True, **changes)


def assert_same(eager: Engine, graphed: Engine, vocab_size: int = 256, params: list[SamplingParams] | None = None) -> None:
    """Batches of every size, requests of every length: equal tokens and accept lengths, equal KV within float noise."""
    for size in BATCHES:
        prompts = [random_ids(LENGTHS[(size + i) % len(LENGTHS)], seed=10 * size + i, vocab_size=vocab_size)
                   for i in range(size)]  # fmt: skip
        wanted = (params or [greedy()]) * size
        outputs, kv = [], []
        for engine in (eager, graphed):
            requests = [engine.prefill(ids, p, chunk=7) for ids, p in zip(prompts, wanted, strict=False)]
            outputs.append(engine.run(requests))
            kv.append([rows for request in requests for rows in kv_of(engine, request)])
        assert outputs[0] == outputs[1], f"batch of {size}"
        torch.testing.assert_close(kv[1], kv[0], atol=2e-4, rtol=1e-4)
    assert [r.accept_lens for r in eager.results] == [r.accept_lens for r in graphed.results]
    assert [r.drafted for r in eager.results] == [r.drafted for r in graphed.results]


PATHS = {"all": None, "full": FULL, "breakable": BREAKABLE}
CASES = [
    pytest.param(ids, kinds, id=f"{ids}-{name}", marks=[] if kinds is None or ids == "unsorted" else [pytest.mark.slow])
    for ids in AUX_IDS
    for name, kinds in PATHS.items()
]


@pytest.mark.parametrize(("ids", "kinds"), CASES)
def test_every_path_gives_the_same_tokens_and_kv(target, head_of, ids, kinds):
    path = head_of(ids)
    eager, graphed = Engine(target, path), Engine(target, path)
    graphs = with_graphs(graphed, arena() if kinds is None else None, kinds)
    assert_same(eager, graphed)
    paths = {result.path for result in graphed.results}
    assert paths == ({"eager"} if kinds == BREAKABLE else {"graph", "eager"}), "a batch of five is above the largest"
    counters = graphs.counters()
    for family in families(graphed):
        name, expected = family.kind.value, kinds is None or family.kind in kinds
        assert (counters.get(f"graph_replays_{name}", 0) > 0) is expected, counters
        reason = ("tokens_over_max" if family.kind in BREAKABLE else "batch_over_planned") if expected else "disabled"
        if name != "draft_prefill" or not expected:  # its chunks of seven tokens fit
            assert counters[f"graph_fallback_{name}_{reason}"] > 0, counters


def test_no_drafter_decodes_one_row_per_request_as_a_graph(target):
    eager, graphed = Engine(target), Engine(target)
    graphs = with_graphs(graphed, arena())
    assert_same(eager, graphed)
    assert graphs.counts()["decode"] == 3
    assert graphs.counters()["graph_replays_target_verify"] > 0


@pytest.mark.parametrize(
    "params",
    [
        [sampled(3)],
        [greedy(), sampled(4), sampled(5, top_k=1), sampled(6, top_p=0.6)],
        [sampled(7, frequency_penalty=0.7, repetition_penalty=1.3), greedy()],
    ],
    ids=["sampled", "mixed", "penalties"],
)
def test_sampled_drafts_are_the_same_inside_a_graph(target, head, params):
    eager, graphed = Engine(target, head), Engine(target, head)
    with_graphs(graphed, arena())
    assert_same(eager, graphed, params=params)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_any_number_of_draft_steps(target, head, steps):
    eager, graphed = Engine(target, head, steps=steps), Engine(target, head, steps=steps)
    with_graphs(graphed)
    assert_same(eager, graphed)


def test_the_oracle_is_believed_in_full_on_every_path(oracle):
    """The oracle's drafts are right exactly when the right layers, in their order, reach the draft."""
    for kinds in (None, FULL, BREAKABLE):
        engine = Engine(*oracle)
        with_graphs(engine, arena(), kinds)
        engine.generate([[1, 2, 3], [9], list(range(30))], greedy(40))
        assert set(engine.accept_lens) == {1 + engine.steps}
    engine = Engine(*oracle, aux_ids=(1, 3, 6))
    with_graphs(engine, arena())
    engine.generate([[1, 2, 3], [9]], greedy(20))
    assert set(engine.accept_lens) == {1}


def test_m4_1_many_tokens_with_requests_that_end_at_different_times(oracle):
    eager, graphed = Engine(*oracle), Engine(*oracle)
    with_graphs(graphed, arena())
    prompts = [[i + 1, i + 2] for i in range(6)]
    for engine in (eager, graphed):
        requests = [engine.prefill(ids, greedy(5 + 9 * i)) for i, ids in enumerate(prompts)]
        engine.run(requests)
    assert [r.tokens for r in eager.results] == [r.tokens for r in graphed.results]
    assert [r.accept_lens for r in eager.results] == [r.accept_lens for r in graphed.results]
    assert {r.path for r in graphed.results} == {"graph", "eager"}


def test_m4_6_graph_and_eager_steps_in_turn_equal_eager_alone(target, head_of):
    path = head_of("unsorted")
    eager, graphed = Engine(target, path), Engine(target, path)
    with_graphs(graphed, arena())
    step, turn = graphed.decoder.step, 0

    def by_turns(requests):
        nonlocal turn
        turn += 1
        for i, family in enumerate(families(graphed)):
            family.is_enabled = (turn + i) % 3 != 0
        return step(requests)

    graphed.decoder.step = by_turns
    assert_same(eager, graphed)


def test_run_as_one_break_the_same_graphs_run_eagerly(target, head_of):
    path = head_of("custom")
    eager, graphed = Engine(target, path), Engine(target, path)
    graphs = with_graphs(graphed, as_one_break=True)
    assert {kind.num_breaks for kind in graphs.pool.report().kinds} == {1}
    assert_same(eager, graphed)


def test_the_kernels_path_of_a_device_gives_the_same(target, head):
    eager, paged = Engine(target, head), Engine(target, head)
    uses_kernels(paged)
    assert_same(eager, paged)
