"""DFLASH's oracle is accepted in full if and only if features, layers, rows and positions are right.

A first block reads the context rows of the prompt, each later one those that the verify before it wrote.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafting.shape import DraftShape
from baton.tests.parity.dflash_engine import DflashEngine
from baton.tests.parity.dflash_toys import DISTANCE, chain, write_dflash_oracle
from baton.tests.parity.eagle3_toys import ORACLE_IDS
from baton.tests.parity.graph_engine import arena, enable, poison, uses_kernels, with_graphs
from baton.tests.parity.path_matrix import PATHS
from baton.tests.parity.test_adaptive_steps import Scripted
from baton.tests.parity.test_oracle_paths import QUICK, WRONG
from baton.tests.shared_files import SharedFiles

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, STEPS_TAKEN = DISTANCE - 1, 6
PROMPTS = [chain(40, 7), chain(3, DISTANCE), chain(11, 21)]
Ids = tuple[int, ...]


@pytest.fixture(scope="session")
def dflash_oracle(shared_files: SharedFiles) -> tuple[Path, Path]:
    path = shared_files.folder("dflash oracle", "default", write_dflash_oracle)
    return path / "target", path / "dflash"


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)


def check_tokens(engine: DflashEngine, count: int, **how: object) -> None:
    """All PROMPTS in one batch continue as chains, and every full block was accepted whole."""
    tokens = engine.run([engine.prefill(prompt, greedy(count), **how) for prompt in PROMPTS])
    assert tokens == [chain(prompt[-1], 1 + count)[1:] for prompt in PROMPTS]
    assert set(engine.accept_lens) == {1 + engine.steps}


@pytest.mark.parametrize("steps", range(1, DISTANCE))
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_blocks_of_any_length_are_accepted_in_full_for_any_chunks(dflash_oracle, steps, chunk):
    check_tokens(DflashEngine(*dflash_oracle, steps=steps), 26, chunk=chunk)


def test_kernels_of_a_device_accept_in_full(dflash_oracle):
    engine = DflashEngine(*dflash_oracle, steps=STEPS)
    uses_kernels(engine)
    check_tokens(engine, 26)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_of_graphs_accepts_in_full(dflash_oracle, path):
    engine = DflashEngine(*dflash_oracle, steps=STEPS, is_greedy=True)
    graphs = with_graphs(engine, arena(), max_batch=4)
    enable(engine, PATHS[path])
    check_tokens(engine, 26)
    replays = graphs.counters()
    is_full, is_breakable = path == "full", path == "breakable"
    assert (replays["graph_replays_decode_step"] > 0) == is_full
    assert (replays["graph_replays_draft_prefill"] > 0) == is_breakable
    assert {result.path for result in engine.results} == {"graph" if is_full else "eager"}


def accepted(models: tuple[Path, Path], prompt_ids: Ids, decode_ids: Ids, kinds: Sequence[set | None]) -> set:
    """Accept lengths of STEPS_TAKEN steps for each of `kinds`, the graphs that run (None: no graphs)."""
    engine, found = DflashEngine(*models, steps=STEPS, is_greedy=True), set()
    model = engine.runner.model
    if any(kinds):
        model.aux_layer_ids = decode_ids
        with_graphs(engine, arena(), max_batch=1, max_tokens=8)
    for running in kinds:
        if any(kinds):
            enable(engine, running)
            poison(engine)
        model.aux_layer_ids = prompt_ids
        prompt = chain(40, 7)
        params = greedy(1 + STEPS_TAKEN * (1 + STEPS))
        # a graph has frozen the layers of decode, so the prompt runs eagerly
        prefill, engine.runner.graphs = engine.runner.graphs, None
        request = engine.prefill(prompt, params)
        engine.runner.graphs = prefill
        model.aux_layer_ids = decode_ids
        lengths = [engine.decoder.step([request]).accept_lens[0] for _ in range(STEPS_TAKEN)]
        assert request.output_ids == chain(prompt[-1], 1 + request.num_output)[1:]
        engine.decoder.forget(request)
        found.add(tuple(lengths))
    return found


def expected(prompt_ids: Ids, decode_ids: Ids) -> set:
    """A block reads the STEPS rows before it. With wrong rows of the prompt, one token a step is accepted
    until decode has written as many others."""
    whole, one = 1 + STEPS, 1
    if decode_ids != ORACLE_IDS:
        first = whole if prompt_ids == ORACLE_IDS else one
        return {(first, *[one] * (STEPS_TAKEN - 1))}
    late = 0 if prompt_ids == ORACLE_IDS else STEPS
    return {(*[one] * late, *[whole] * (STEPS_TAKEN - late))}


def test_features_of_the_right_layers_are_accepted_in_full_on_every_path(dflash_oracle):
    kinds = [*PATHS.values(), None]
    assert accepted(dflash_oracle, ORACLE_IDS, ORACLE_IDS, kinds) == expected(ORACLE_IDS, ORACLE_IDS)


@pytest.mark.parametrize(
    "ids", [pytest.param(ids, id=str(ids), marks=() if ids in QUICK else pytest.mark.slow) for ids in WRONG]
)
def test_features_of_wrong_layers_are_never_accepted(dflash_oracle, ids):
    for pair in ((ids, ids), (ids, ORACLE_IDS), (ORACLE_IDS, ids)):
        assert accepted(dflash_oracle, *pair, [None]) == expected(*pair)


@pytest.mark.parametrize(
    "ids", [pytest.param(ids, id=str(ids), marks=() if ids in QUICK else pytest.mark.slow) for ids in WRONG]
)
def test_graphs_never_accept_features_of_wrong_layers(dflash_oracle, ids):
    for pair in ((ids, ORACLE_IDS), (ORACLE_IDS, ids)):
        assert accepted(dflash_oracle, *pair, list(PATHS.values())) == expected(*pair)


@pytest.mark.parametrize("has_graphs", [False, True])
def test_blocks_of_changing_length_are_accepted_in_full(dflash_oracle, has_graphs):
    """Plain steps and short blocks leave the context of the next block whole."""
    shapes, script = [DraftShape.of(steps) for steps in (0, 1, 2, STEPS)], [3, 0, 0, 1, 3, 2, 0, 3]
    policy = Scripted(shapes, list(script))
    policy.is_watched = False
    engine = DflashEngine(*dflash_oracle, steps=STEPS, policy=policy)
    if has_graphs:
        with_graphs(engine, arena(), max_batch=2)
    prompts = PROMPTS[:2]
    assert engine.generate(prompts, greedy(60)) == [chain(prompt[-1], 61)[1:] for prompt in prompts]
    lengths = [set(result.accept_lens) for result in engine.results]
    assert lengths[: len(script)] == [{1 + shapes[i].steps} for i in script]
    assert policy.heard[0] == (2 * STEPS, 2 * STEPS)
    assert policy.heard[1:3] == [(0, 0), (0, 0)], "plain steps show nothing of the drafts"
