"""The experts that tokens took on a device: those of transformers' routers, in graphs and joined launches."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.toy_engine import random_ids
from baton.tests.sim.test_routed_experts import (
    FAMILIES,
    NEW_TOKENS,
    WAYS,
    Kept,
    by_transformers,
    ordered,
    pair_of,
)
from baton.tests.sim.worker_pair import name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Models = Callable[[str], tuple[Path, Path]]


@pytest.fixture(autouse=True, scope="module")
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def models(toy_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Models:
    """(target, head) of a family."""
    head = write_head(tmp_path_factory.mktemp("head"), head_config(2, (0, 1, 2)), head_tensors())
    return cache(lambda family: (toy_checkpoint(family), head))


@pytest.fixture(scope="module")
def expected(models: Models) -> Callable[[str, list[int]], tuple[list[int], Any]]:
    """By transformers on the CPU: the tokens behind a prompt, and the sorted experts of all rows."""
    return by_transformers(models)


@pytest.mark.parametrize("is_local", [False, True], ids=["handed over", "local"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_those_of_transformers(
    models: Models,
    expected: Callable[[str, list[int]], tuple[list[int], Any]],
    family: str,
    way: str,
    is_local: bool,
) -> None:
    pair = pair_of(models, family, way, device="cuda")
    kept, half = Kept(pair), random_ids(20, seed=1)
    prompts = [half + half[:11], random_ids(5, seed=2), random_ids(41, seed=3)]
    for number, prompt in enumerate(prompts):
        pair.send(name(number), prompt, max_new_tokens=NEW_TOKENS, routed_experts=0, is_local=is_local)
    pair.run(random.Random(3), turns=2000)
    for number, prompt in enumerate(prompts):
        tokens, rows = expected(family, prompt)
        assert pair.tokens[name(number)] == tokens
        assert ordered(kept.rows[name(number)]) == rows
    pair.assert_nothing_is_held()
