"""The deterministic mode on a GPU: a request alone has the bits that it has in a batch, also when sampled."""

import pytest
import torch
from baton.engine.sampling.params import SamplingParams
from baton.tests.gpu.bf16_answers import PLAIN_WAY, answers_of, assert_same_bits
from baton.tests.parity.answer_engine import CHAIN, TREE, Answer, Models, Way

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WAYS = [
    Way(shape=CHAIN, batch=1, has_graphs=True),
    Way(shape=TREE, batch=1, has_graphs=True),
    Way(batch=1, has_graphs=True, is_disaggregated=True),
]


@pytest.fixture(scope="module")
def plain(models: Models, prompts: list[list[int]]) -> list[Answer]:
    return answers_of(models, PLAIN_WAY, prompts, is_invariant=True)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_deterministic_answers_of_a_request_alone_have_the_same_bits(
    models: Models, prompts: list[list[int]], plain: list[Answer], way: Way
) -> None:
    found = answers_of(models, way, prompts, plain, is_invariant=True)
    assert_same_bits(way, found, plain)


def test_deterministic_samples_are_the_same_with_and_without_drafts(
    models: Models, prompts: list[list[int]]
) -> None:
    params = SamplingParams(temperature=0.9, seed=5, max_new_tokens=64, ignore_eos=True)
    plain = answers_of(models, Way(batch=16), prompts[:32], params=params, is_invariant=True)
    for way in (Way(shape=CHAIN, batch=5), Way(shape=TREE, batch=32, has_graphs=True, is_disaggregated=True)):
        found = answers_of(models, way, prompts[:32], plain, params, is_invariant=True)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in plain]
