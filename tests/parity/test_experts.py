"""Mixture-of-experts models on every path: graphs, drafts, and the bits of a row alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.models.moe import QWEN_NAMES, MoEConfig
from baton.kernels.expert_mlp import expert_mlp
from baton.tests.kernels.cases import randn
from baton.tests.kernels.expert_cases import choices
from baton.tests.parity.answer_engine import CHAIN, Models, Way
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.eagle3_toys import toy_target
from baton.tests.parity.graph_engine import arena, with_graphs
from baton.tests.parity.test_batch_invariance import VOCAB, answers_of
from baton.tests.parity.test_graph_paths import assert_same
from baton.tests.parity.toy_engine import random_ids
from baton.tests.variants import slow

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS = MoEConfig(
    num_experts=5,
    top_k=2,
    intermediate_size=24,
    is_normalised=True,
    names=QWEN_NAMES,
    dense_layers=frozenset({1}),
)


@pytest.mark.parametrize("family", [slow("qwen3_moe"), "mixtral"])
def test_graphs_and_drafts_give_the_tokens_of_eager_steps(
    toy_checkpoint: Callable[..., Path], head: Path, family: str
):
    target = toy_checkpoint(family, num_hidden_layers=4)
    eager, graphed = Engine(target, head), Engine(target, head)
    with_graphs(graphed, arena())
    assert_same(eager, graphed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float32)], ids=str)
def test_bits_of_an_answer_do_not_depend_on_the_batch(dtype: torch.dtype):
    config = toy_target(num_layers=3, vocab_size=VOCAB, dtype=str(dtype).removeprefix("torch."), moe=EXPERTS)
    models, prompts = (
        Models(config, dtype, "cpu"),
        [random_ids(n, seed=n, vocab_size=VOCAB) for n in (5, 17, 40)],
    )
    alone = answers_of(models, Way(), prompts, [])
    for way in (
        Way(batch=3, chunk=16),
        Way(shape=CHAIN, batch=3, chunk=7, has_graphs=True),
        Way(shape=CHAIN, batch=2, chunk=13, is_disaggregated=True),
    ):
        found = answers_of(models, way, prompts, alone)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in alone], way
        assert [answer.kv_hash for answer in found] == [answer.kv_hash for answer in alone], way


def test_a_row_has_the_same_bits_alone_and_among_others():
    x, ids = randn(40, 64, dtype=torch.bfloat16), choices(40, 6, 3)
    weights = torch.softmax(randn(40, 3), -1)
    gate_up, down = (randn(6, *shape, dtype=torch.bfloat16, seed=1) for shape in ((80, 64), (64, 40)))
    together = expert_mlp(x, ids, weights, gate_up, down, is_invariant=True)
    for row in range(0, 40, 7):
        own = slice(row, row + 1)
        alone = expert_mlp(x[own], ids[own], weights[own], gate_up, down, is_invariant=True)
        assert torch.equal(alone, together[own])
