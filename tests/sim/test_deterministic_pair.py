"""Deterministic workers in bfloat16: a handed-over prompt has the bits of one that decode computes itself."""

from collections.abc import Sequence

import pytest
import torch
from baton.engine.kv.page_table import slots_for
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.toy_engine import random_ids
from baton.tests.sim.worker_pair import Pair, layout, name

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [random_ids(count, seed=count) for count in (29, 3, 17)]
NEW_TOKENS = 14
MODE = {"dtype": "bfloat16", "deterministic": True, "pages": 96, "max_running": 4}


@pytest.fixture(scope="module")
def models(toy_checkpoint, tmp_path_factory):
    target = toy_checkpoint("llama", num_hidden_layers=6)
    return target, write_head(tmp_path_factory.mktemp("head"), head_config(2, (4, 1, 3)), head_tensors())


def served(pair: Pair, rooms: Sequence[int], *, is_local: bool) -> list[tuple[list[int], torch.Tensor]]:
    """(tokens, target KV of the prompt on decode) of each prompt; all run at once."""
    for room in rooms:
        pair.send(name(room), PROMPTS[room], max_new_tokens=NEW_TOKENS, is_local=is_local)
    pair.run(until=lambda: all(len(pair.tokens.get(name(room), [])) > 1 for room in rooms))
    engine, kv = pair.decode.engine, {}
    for running in pair.decode.queues:
        pages, count = running.request.pages, running.request.num_prompt
        slots = slots_for(list(pages), 0, count, engine.page_size)
        kv[running.request.room] = engine.pool.kv[slots // engine.page_size, :, :, slots % engine.page_size]
    pair.run()
    return [(pair.tokens[name(room)], kv[name(room)]) for room in rooms]


@pytest.fixture(scope="module")
def alone(models):
    """Each prompt alone, computed by decode, without drafts."""
    pair = Pair(models[0], chunk_size=0, **MODE)
    return [served(pair, [room], is_local=True)[0] for room in range(len(PROMPTS))]


GRAPHS = {"graphs": "on", "graph_self_test": False, "captured": {"chunk_size": 32, "max_running": 4}}


@pytest.mark.parametrize(
    ("is_local", "chunk_size", "shape"),
    [
        (False, 0, {"no_draft": True}),
        (True, 5, {"spec_steps": 3}),
        (False, 5, {"spec_steps": 3, "spec_topk": 2, "spec_tokens": 6}),
        (False, 8, {"spec_steps": 3} | GRAPHS),
    ],
    ids=["handed over", "aggregated chain", "handed over tree", "handed over graphs"],
)
def test_tokens_and_kv_have_the_bits_of_one_worker_alone(models, alone, is_local, chunk_size, shape):
    pair = Pair(*models, chunk_size=chunk_size, **MODE, **shape)
    found = served(pair, range(len(PROMPTS)), is_local=is_local)
    for (tokens, kv), (expected, expected_kv) in zip(found, alone, strict=True):
        assert tokens == expected
        assert torch.equal(kv, expected_kv)
    pair.assert_nothing_is_held()


def test_a_deterministic_worker_has_another_fingerprint(models):
    engines = [Pair(models[0], **(MODE | {"deterministic": on})).decode.engine for on in (False, True)]
    fast, deterministic = (layout(engine).fingerprint for engine in engines)
    assert fast != deterministic
