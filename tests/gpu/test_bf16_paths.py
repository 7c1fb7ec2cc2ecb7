"""The deterministic mode on a GPU: eager forwards and graphs with breaks have the bits of full graphs."""

import pytest
import torch
from baton.tests.gpu.bf16_answers import PLAIN_WAY, answers_of, assert_same_bits
from baton.tests.parity.answer_engine import CHAIN, TREE, Answer, Models, Way

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_PROMPTS = 50
WAYS = [
    Way(shape=CHAIN, batch=16, chunk=77),
    Way(shape=TREE, batch=7, chunk=512, is_disaggregated=True),
    Way(shape=TREE, batch=9, chunk=77, has_graphs=True, has_breaks=True),
]


@pytest.fixture(scope="module")
def plain(models: Models, prompts: list[list[int]]) -> list[Answer]:
    return answers_of(models, PLAIN_WAY, prompts[:NUM_PROMPTS], is_invariant=True)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_deterministic_answers_have_the_same_bits_on_every_path(
    models: Models, prompts: list[list[int]], plain: list[Answer], way: Way
) -> None:
    found = answers_of(models, way, prompts[:NUM_PROMPTS], plain, is_invariant=True)
    assert_same_bits(way, found, plain)
