"""The deterministic mode on a GPU: equal bits with and without drafts, in any batch, PD and aggregated.

200 answers of 128 tokens of a random bfloat16 model. Prompts are computed whole and in chunks, in graphs and
eagerly, by the engine of the steps (aggregated) and by another one (PD).
"""

import pytest
import torch
from baton.engine.sampling.params import SamplingParams
from baton.tests.parity.answer_engine import CHAIN, TREE, Answer, AnswerEngine, Models, Way

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MAX_PROMPT, NEW_TOKENS, NUM_EAGER = 200, 128, 50
MAX_TOKENS = MAX_PROMPT + NEW_TOKENS
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
PLAIN_WAY = Way(batch=32, chunk=512, has_graphs=True)
WAYS = [
    Way(shape=CHAIN, batch=32, chunk=512, has_graphs=True, is_disaggregated=True),
    Way(shape=TREE, batch=32, chunk=100, has_graphs=True, is_disaggregated=True),
    Way(batch=32, chunk=64, has_graphs=True, is_disaggregated=True),
    Way(shape=CHAIN, batch=32, chunk=100, has_graphs=True),
    Way(shape=TREE, batch=32, chunk=512, has_graphs=True),
    Way(shape=CHAIN, batch=1, has_graphs=True),
    Way(shape=TREE, batch=1, has_graphs=True),
    Way(batch=1, has_graphs=True, is_disaggregated=True),
]
FEWER_WAYS = [
    Way(shape=CHAIN, batch=16, chunk=77),
    Way(shape=TREE, batch=7, chunk=512),
    Way(shape=TREE, batch=9, chunk=77, has_graphs=True, has_breaks=True),
]


def answers_of(
    models: Models,
    way: Way,
    prompts: list[list[int]],
    texts: list[Answer] | None = None,
    params: SamplingParams = GREEDY,
) -> list[Answer]:
    engine = AnswerEngine(models, way, is_invariant=True, max_tokens=MAX_TOKENS)
    return engine.answer(prompts, params, [answer.tokens for answer in texts or ()])


@pytest.fixture(scope="module")
def plain(models: Models, prompts: list[list[int]]) -> list[Answer]:
    return answers_of(models, PLAIN_WAY, prompts)


@pytest.mark.parametrize("way", [*WAYS, *FEWER_WAYS], ids=str)
def test_deterministic_answers_and_kv_have_the_same_bits(
    models: Models, prompts: list[list[int]], plain: list[Answer], way: Way
) -> None:
    count = NUM_EAGER if way in FEWER_WAYS else len(prompts)
    found = answers_of(models, way, prompts[:count], plain)
    accepted = [number for answer in found for number in answer.accept_lens]
    tokens = [ours.tokens != theirs.tokens for ours, theirs in zip(found, plain, strict=False)]
    kv = [ours.kv_hash != theirs.kv_hash for ours, theirs in zip(found, plain, strict=False)]
    print(
        f"{way}: {count} answers of {NEW_TOKENS} tokens, {sum(tokens)} differ, KV of {sum(kv)} differs, "
        f"{sum(accepted) / max(1, len(accepted)):.2f} tokens a step"
    )
    assert not any(tokens)
    assert not any(kv)
    assert not way.shape.steps or sum(accepted) > 2 * len(accepted), "drafts are accepted"


def test_deterministic_samples_are_the_same_with_and_without_drafts(
    models: Models, prompts: list[list[int]]
) -> None:
    params = SamplingParams(temperature=0.9, seed=5, max_new_tokens=64, ignore_eos=True)
    plain = answers_of(models, Way(batch=16), prompts[:32], params=params)
    for way in (Way(shape=CHAIN, batch=5), Way(shape=TREE, batch=32, has_graphs=True, is_disaggregated=True)):
        found = answers_of(models, way, prompts[:32], plain, params)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in plain]
