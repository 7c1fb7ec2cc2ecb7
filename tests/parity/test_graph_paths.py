"""Every path of a batch through the graphs gives the same answers.

The matrix of paths on tapes: `make test` runs cells of eight engines that have every two values of any two
fields, and every combination of models, shape and path; `make test-full` runs all. The other cases are those
that the matrix holds fixed: sampling, numbers of steps, changing paths, requests that end at different times.
Batches have one request, as many as a bucket and one more or less, and more than the largest; prompts
likewise. Static inputs are poisoned before every step, and what graphs have given back to their arena too.
"""

import pytest
import torch
from baton.engine.sampling.params import SamplingParams
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.graph_engine import MAX_TOKENS, arena, families, kv_of, uses_kernels, with_graphs
from baton.tests.parity.path_matrix import AHEAD, ALL, QUICK, Cell, Matrix, combined_in, quick_ahead
from baton.tests.parity.toy_engine import random_ids
from baton.tests.variants import slow

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))


def test_the_quick_cells_combine_every_two_values_of_any_two_fields():
    assert set().union(*map(combined_in, QUICK)) == set().union(*map(combined_in, ALL))


CHOSEN = {*QUICK, *quick_ahead()}


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=str(cell), marks=() if cell in CHOSEN else pytest.mark.slow)
        for cell in ALL + AHEAD
    ],
)
def test_every_path_gives_the_same_tokens_hidden_states_and_kv(matrix: Matrix, cell: Cell):
    matrix.check(cell)


# --- cases that the matrix holds fixed ------------------------------------------------------------------

LENGTHS = (1, 7, 8, 9, MAX_TOKENS - 1, MAX_TOKENS, MAX_TOKENS + 1, 40)
BATCHES = (1, 2, 3, 4, 5)


def greedy(max_new_tokens: int = 9) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True)


def sampled(seed: int, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_new_tokens=9, ignore_eos=True, **changes)


def assert_same(
    eager: Engine, graphed: Engine, vocab_size: int = 256, params: list[SamplingParams] | None = None
) -> None:
    """Any batch size and request length: equal tokens and accept lengths, equal KV within float noise."""
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


def test_no_drafter_decodes_one_row_per_request_as_a_graph(target):
    eager, graphed = Engine(target), Engine(target)
    graphs = with_graphs(graphed, arena())
    assert_same(eager, graphed)
    assert graphs.counts()["decode"] == 3 * 3, "three kinds of three sizes"
    assert graphs.counters()["graph_replays_decode_step"] > 0


@pytest.mark.parametrize(
    "params",
    [
        slow([sampled(3)]),
        [greedy(), sampled(4), sampled(5, top_k=1), sampled(6, top_p=0.6)],
        [sampled(7, frequency_penalty=0.7, repetition_penalty=1.3), greedy()],
    ],
    ids=["sampled", "mixed", "penalties"],
)
def test_sampled_drafts_are_the_same_inside_a_graph(target, head, params):
    eager, graphed = Engine(target, head), Engine(target, head)
    with_graphs(graphed, arena())
    assert_same(eager, graphed, params=params)


@pytest.mark.parametrize("steps", [1, slow(2), 5])
def test_any_number_of_draft_steps(target, head, steps):
    eager, graphed = Engine(target, head, steps=steps), Engine(target, head, steps=steps)
    with_graphs(graphed)
    assert_same(eager, graphed)


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


def test_m4_6_graph_and_eager_steps_in_turn_equal_eager_alone(target, head):
    eager, graphed = Engine(target, head), Engine(target, head)
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


def test_run_as_one_break_the_same_graphs_run_eagerly(target, head):
    eager, graphed = Engine(target, head), Engine(target, head)
    graphs = with_graphs(graphed, as_one_break=True)
    assert {kind.num_breaks for kind in graphs.pool.report().kinds} == {1}
    assert_same(eager, graphed)


def test_the_kernels_path_of_a_device_gives_the_same(target, head):
    eager, paged = Engine(target, head), Engine(target, head)
    uses_kernels(paged)
    assert_same(eager, paged)
