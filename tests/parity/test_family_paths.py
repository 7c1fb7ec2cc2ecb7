"""Families with windows, caps, sinks and other layers, in chunks, batches, drafts, graphs and hand-offs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.models.registry import load_model_config
from baton.tests.parity.answer_engine import CHAIN, TREE, Models, Way
from baton.tests.parity.every_drafter import greedy
from baton.tests.parity.graph_engine import arena, with_graphs
from baton.tests.parity.ngram_search import NgramEngine
from baton.tests.parity.test_batch_invariance import answers_of
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ("gemma2", "gpt_oss")
FAMILIES = [
    pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow)
    for family in ("mistral", "gemma2", "gemma3", "phi3", "olmo2", "smollm3", "gpt_oss")
]
WAYS = (
    Way(batch=3, chunk=7),
    Way(shape=CHAIN, batch=3, chunk=16, has_graphs=True),
    Way(shape=TREE, batch=2, chunk=50, is_disaggregated=True),
    Way(shape=TREE, batch=3, chunk=16, has_graphs=True, has_breaks=True, is_disaggregated=True),
)


def models_of(toy_checkpoint: Callable[..., Path], family: str, device: str = "cpu", seed: int = 0) -> Models:
    return Models(load_model_config(toy_checkpoint(family)), torch.float32, device, seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_gives_the_tokens_of_plain_steps(toy_checkpoint: Callable[..., Path], family: str):
    models, prompts = models_of(toy_checkpoint, family), [random_ids(n, seed=n) for n in (5, 17, 40)]
    expected = answers_of(models, Way(), prompts, [], is_invariant=False)
    for way in WAYS:
        found = answers_of(models, way, prompts, expected, is_invariant=False)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected], way


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_the_tensors_of_another_gives_its_tokens(
    toy_checkpoint: Callable[..., Path], family: str
):
    """`tensors` names every tensor that a forward reads: graphs and hashes of weights rely on it."""
    one, other = (models_of(toy_checkpoint, family, seed=seed) for seed in (0, 1))
    prompts = [random_ids(17, seed=1)]
    answers = [answers_of(each, Way(), prompts, [], is_invariant=False)[0].tokens for each in (one, other)]
    assert answers[0] != answers[1]
    for (_, ours), (_, theirs) in zip(one.fastest.tensors(), other.fastest.tensors(), strict=True):
        ours.copy_(theirs)
    assert answers_of(one, Way(), prompts, [], is_invariant=False)[0].tokens == answers[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_by_lookup_in_graphs_give_the_tokens_of_transformers(
    toy_checkpoint: Callable[..., Path], family: str
):
    """Prompts that repeat themselves, longer than the windows, so that there are drafts."""
    path = toy_checkpoint(family)
    theirs, engine = reference_model(path), NgramEngine(path, is_greedy=True)
    with_graphs(engine, arena())
    prompts = [random_ids(9, seed=seed) * 2 for seed in (3, 4)]
    wanted = [reference_greedy(theirs, prompt, 20) for prompt in prompts]
    assert engine.generate(prompts, greedy(20)) == wanted
    assert {result.path for result in engine.results} == {"graph"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "phi3", "olmo2", "smollm3", "gpt_oss"])
def test_bits_of_an_answer_do_not_depend_on_the_way(toy_checkpoint: Callable[..., Path], family: str):
    models, prompts = models_of(toy_checkpoint, family), [random_ids(n, seed=n) for n in (5, 17, 40)]
    alone = answers_of(models, Way(), prompts, [])
    for way in WAYS:
        found = answers_of(models, way, prompts, alone)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in alone], way
        assert [answer.kv_hash for answer in found] == [answer.kv_hash for answer in alone], way
