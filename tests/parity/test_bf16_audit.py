"""On a CPU, bfloat16 answers of the default mode differ from float32 at near-ties only."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from baton.engine.sampling.params import SamplingParams
from baton.tests.parity.answer_engine import CHAIN, TREE, Answer, AnswerEngine, Models, Way
from baton.tests.parity.eagle3_toys import toy_target
from baton.tests.parity.forward_bugs import FORWARD_BUGS
from baton.tests.parity.near_ties import Audit, dense_logits

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, MAX_TOKENS = 2000, 120
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
WAYS = [
    Way(batch=8),
    Way(shape=CHAIN, batch=5, chunk=16),
    Way(shape=TREE, batch=5, chunk=50),
    Way(shape=CHAIN, batch=4, chunk=50, has_graphs=True),
    Way(shape=TREE, batch=4, chunk=16, has_graphs=True),
    Way(shape=TREE, batch=4, chunk=50, has_graphs=True, has_breaks=True),
]


@pytest.fixture(scope="module")
def models() -> Models:
    config = toy_target(num_layers=4, vocab_size=VOCAB, dtype="bfloat16")
    return Models(config, torch.bfloat16, "cpu")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = (5, 17, 40, 1, 63, 30, 90, 12) * 2
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module")
def plain(models: Models, prompts: list[list[int]]) -> list[Answer]:
    return answers_of(models, WAYS[0], prompts, [])


def answers_of(
    models: Models,
    way: Way,
    prompts: list[list[int]],
    texts: list[Answer],
    *,
    is_invariant: bool = False,
) -> list[Answer]:
    engine = AnswerEngine(models, way, is_invariant=is_invariant, max_tokens=MAX_TOKENS)
    return engine.answer(prompts, GREEDY, [answer.tokens for answer in texts])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_default_answers_differ_from_float32_at_near_ties_only(
    models: Models, prompts: list[list[int]], plain: list[Answer], way: Way
) -> None:
    found = answers_of(models, way, prompts, plain)
    Audit(models.fastest).check(prompts, [answer.tokens for answer in found])
    accepted = [count for answer in found for count in answer.accept_lens]
    assert not way.shape.steps or sum(accepted) > 2 * len(accepted), "drafts are accepted"


def test_deterministic_answers_differ_from_float32_at_near_ties_only(
    models: Models, prompts: list[list[int]], plain: list[Answer]
) -> None:
    found = answers_of(models, Way(shape=CHAIN, batch=5, chunk=50), prompts, plain, is_invariant=True)
    Audit(models.fastest).check(prompts, [answer.tokens for answer in found])


@pytest.mark.parametrize("bug", FORWARD_BUGS)
def test_the_audit_finds_planted_bugs(
    models: Models,
    prompts: list[list[int]],
    plain: list[Answer],
    bug: Callable[[object], AbstractContextManager[None]],
) -> None:
    with bug(models.fastest):
        found = answers_of(models, Way(shape=CHAIN, batch=5), prompts, plain)
    with pytest.raises(AssertionError, match="no near-ties"):
        Audit(models.fastest).check(prompts, [answer.tokens for answer in found])


def test_the_reference_has_the_engines_logits_in_float32(prompts: list[list[int]]) -> None:
    """With float32 weights the engine's answers are the reference's, to the last token."""
    models = Models(toy_target(num_layers=4, vocab_size=VOCAB), torch.float32, "cpu")
    found = answers_of(models, Way(batch=5), prompts, [])
    assert Audit(models.fastest).differences(prompts, [answer.tokens for answer in found]) == []
    weights = dict(models.fastest.tensors())
    assert dense_logits(models.config, weights, torch.tensor(prompts[0])).shape == (len(prompts[0]), VOCAB)
