"""The deterministic mode on a GPU: equal bits with and without drafts, in batches, PD and aggregated.

200 answers of a random bfloat16 model. Prompts are computed by the engine of the steps (aggregated) and by
another one (PD), in chunks of several lengths.
"""

import pytest
import torch
from baton.tests.gpu.bf16_answers import PLAIN_WAY, answers_of, assert_same_bits
from baton.tests.parity.answer_engine import CHAIN, TREE, Answer, Models, Way

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WAYS = [
    Way(shape=CHAIN, batch=32, chunk=512, has_graphs=True, is_disaggregated=True),
    Way(shape=TREE, batch=32, chunk=100, has_graphs=True, is_disaggregated=True),
    Way(batch=32, chunk=64, has_graphs=True, is_disaggregated=True),
    Way(shape=CHAIN, batch=32, chunk=100, has_graphs=True),
    Way(shape=TREE, batch=32, chunk=512, has_graphs=True),
]


@pytest.fixture(scope="module")
def plain(models: Models, prompts: list[list[int]]) -> list[Answer]:
    return answers_of(models, PLAIN_WAY, prompts, is_invariant=True)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_deterministic_answers_and_kv_have_the_same_bits(
    models: Models, prompts: list[list[int]], plain: list[Answer], way: Way
) -> None:
    found = answers_of(models, way, prompts, plain, is_invariant=True)
    assert_same_bits(way, found, plain)
