"""The oracle's drafts are accepted in full if and only if the right layers reach the draft in order.

A first step is fed by the features of the prompt, each later one by those of the verify before it. So prompt
and decode may go wrong apart, and what is accepted says which did.
"""

from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest
from baton.engine.capture.graph_set import GraphSet
from baton.engine.graphs.tape.tape import TapeBackend
from baton.engine.runner.lifecycle import Phase
from baton.engine.sampling.params import SamplingParams
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.eagle3_toys import ORACLE_IDS, ORACLE_LAYERS, successor
from baton.tests.parity.graph_engine import arena, at, enable, poison
from baton.tests.parity.path_matrix import PATHS

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, STEPS_TAKEN = [40, 7, 9], 3
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=1 + STEPS_TAKEN * (1 + Engine.steps), ignore_eos=True)
Ids = tuple[int, ...]
OTHERS = [layer for layer in range(ORACLE_LAYERS) if layer not in ORACLE_IDS]
REPLACED = [
    (*ORACLE_IDS[:j], layer, *ORACLE_IDS[j + 1 :]) for j in range(len(ORACLE_IDS)) for layer in OTHERS
]
REORDERED = [ids for ids in permutations(ORACLE_IDS) if ids != ORACLE_IDS]  # swaps of two, and both rotations
WRONG = [*REPLACED, *REORDERED]
QUICK = {(1, 4, 5), (3, 1, 5)}  # a layer of others, and a swap


def accepted(
    oracle: tuple[Path, Path], prompt_ids: Ids, decode_ids: Ids, kinds: Sequence[set | None]
) -> set[tuple]:
    """Accept lengths of STEPS_TAKEN steps for each of `kinds`, the graphs that run (None: no graphs)."""
    engine, found = Engine(*oracle), set()
    model = engine.runner.model
    if any(kinds):
        graphs = GraphSet(TapeBackend(arena()), at(Phase.POOLS_ALLOCATED))
        model.aux_layer_ids = prompt_ids
        graphs.capture_prefill(engine.runner, 4)
        model.aux_layer_ids = decode_ids
        graphs.capture_draft(engine.drafter, 4)
        graphs.capture_steps(engine.decoder.steps, 1)
    for running in kinds:
        if any(kinds):
            enable(engine, running)
            poison(engine)
        model.aux_layer_ids = prompt_ids
        request = engine.prefill(PROMPT, PARAMS)
        model.aux_layer_ids = decode_ids
        lengths = [engine.decoder.step([request]).accept_lens[0] for _ in range(STEPS_TAKEN)]
        tokens = request.all_ids[len(PROMPT) - 1 :]
        assert tokens[1:] == [successor(token) for token in tokens[:-1]], "drafts never change a token"
        engine.decoder.forget(request)
        found.add(tuple(lengths))
    return found


def expected(prompt_ids: Ids, decode_ids: Ids) -> set[tuple]:
    first, later = (1 + Engine.steps if ids == ORACLE_IDS else 1 for ids in (prompt_ids, decode_ids))
    return {(first, later, later)}


def test_features_of_the_right_layers_are_accepted_in_full_on_every_path(oracle):
    kinds = [*PATHS.values(), None]
    assert accepted(oracle, ORACLE_IDS, ORACLE_IDS, kinds) == expected(ORACLE_IDS, ORACLE_IDS)


@pytest.mark.parametrize("ids", WRONG, ids=str)
def test_features_of_wrong_layers_are_never_accepted(oracle, ids):
    assert (len(REPLACED), len(REORDERED)) == (15, 5)
    for pair in ((ids, ids), (ids, ORACLE_IDS), (ORACLE_IDS, ids)):
        assert accepted(oracle, *pair, [set()]) == expected(*pair)


@pytest.mark.parametrize(
    "ids", [pytest.param(ids, id=str(ids), marks=() if ids in QUICK else pytest.mark.slow) for ids in WRONG]
)
def test_graphs_never_accept_features_of_wrong_layers(oracle, ids):
    for pair in ((ids, ORACLE_IDS), (ORACLE_IDS, ids)):
        assert accepted(oracle, *pair, list(PATHS.values())) == expected(*pair)
