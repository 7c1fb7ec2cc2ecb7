"""Attention over latents on a device: sizes of DeepSeek, graphs, drafts, hand-offs, no late compiling."""

from pathlib import Path

import pytest
import torch
from baton.engine.models.config import ModelConfig
from baton.engine.models.registry import load_model_config
from baton.engine.warmup.watch import COMPILATIONS
from baton.kernels.latent_attention import latent_extend_triton, latent_verify_triton
from baton.tests.gpu.test_engine_graphs import load, serve
from baton.tests.kernels.attention_cases import random_trees
from baton.tests.kernels.cases import assert_close, randn
from baton.tests.kernels.latent_cases import SCALE, definition, poisoned_latents
from baton.tests.parity.answer_engine import CHAIN, TREE, Models, Way
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.test_batch_invariance import answers_of
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import write_toy_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RANK, ROPE = 512, 64
WAYS = (
    Way(batch=3, chunk=16),
    Way(batch=3, chunk=16, has_graphs=True),
    Way(shape=CHAIN, batch=3, chunk=7, has_graphs=True),
    Way(shape=TREE, batch=2, chunk=50, is_disaggregated=True),
    Way(shape=TREE, batch=3, chunk=16, has_graphs=True, has_breaks=True, is_disaggregated=True),
)


@pytest.fixture(autouse=True, scope="module")
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path = tmp_path_factory.mktemp("deepseek")
    write_toy_checkpoint(path, "deepseek_v3")
    return load_model_config(path)


@pytest.fixture(scope="module")
def models(config: ModelConfig, full_precision: None) -> Models:
    return Models(config, torch.float32, "cuda")


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("num_rows", [1, 4, 8])
def test_steps_of_deepseek_sizes_equal_the_definition(num_heads: int, num_rows: int):
    kv_lens = [num_rows, 700, 0, 2049]
    pool, table, latents = poisoned_latents(kv_lens, RANK + ROPE, torch.bfloat16)
    q = randn(len(kv_lens), num_rows, num_heads, RANK + ROPE, dtype=torch.bfloat16, seed=3)
    trees = random_trees(len(kv_lens), num_rows) if num_rows == 8 else None
    found = latent_verify_triton(
        q.cuda(),
        pool.cuda(),
        1,
        table.cuda(),
        torch.tensor(kv_lens).cuda(),
        SCALE / 4,
        RANK,
        None if trees is None else trees.cuda(),
    ).cpu()
    assert not found[2].any()
    for request in (0, 1, 3):
        seen = None if trees is None else trees[request]
        assert_close(found[request], definition(q[request] / 4, latents[request], RANK, seen))


def test_ragged_rows_of_deepseek_sizes_equal_the_definition():
    q_lens, kv_lens = [40, 1, 100], [300, 700, 100]
    pool, table, latents = poisoned_latents(kv_lens, RANK + ROPE, torch.bfloat16)
    q = randn(sum(q_lens), 16, RANK + ROPE, dtype=torch.bfloat16, seed=3)
    starts = torch.tensor([0, *q_lens]).cumsum(0)
    lens = torch.tensor(kv_lens).cuda()
    found = latent_extend_triton(
        q.cuda(), pool.cuda(), 1, table.cuda(), starts.cuda(), lens, max(q_lens), SCALE / 4, RANK
    ).cpu()
    for request, first in enumerate(starts[:-1].tolist()):
        own = slice(first, first + q_lens[request])
        assert_close(found[own], definition(q[own] / 4, latents[request], RANK))


def test_every_way_gives_the_tokens_of_the_cpu(config: ModelConfig, models: Models):
    prompts = [random_ids(n, seed=n) for n in (5, 17, 70)]
    on_cpu = Models(config, torch.float32, "cpu")
    for (_, ours), (_, theirs) in zip(on_cpu.fastest.tensors(), models.fastest.tensors(), strict=True):
        ours.copy_(theirs)
    expected = answers_of(on_cpu, Way(), prompts, [], is_invariant=False)
    for way in WAYS:
        found = answers_of(models, way, prompts, expected, is_invariant=False)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected], way


@pytest.mark.parametrize("settings", [{}, {"spec_topk": 3, "spec_tokens": 8}], ids=["chain", "tree"])
def test_an_engine_starts_with_graphs_and_compiles_nothing_later(
    tmp_path: Path, settings: dict[str, object], caplog: pytest.LogCaptureFixture
):
    target = tmp_path / "target"
    write_toy_checkpoint(target, "deepseek_v3", num_hidden_layers=4)
    head = write_head(tmp_path / "head", head_config(2, (0, 1, 3)), head_tensors())
    eager = load(target, head, graphs=False, **settings)
    graphed = load(target, head, graphs=True, **settings)
    assert "one by one" not in caplog.text, "the dry run failed"
    assert "differs from the eager path" not in caplog.text, "a graph was dropped"
    graphed.begin_watch()
    for size in (1, 3, 4):
        wanted, _ = serve(eager, size)
        tokens, paths = serve(graphed, size)
        assert tokens == wanted
        assert "graph" in paths
    assert graphed.watch is not None
    assert graphed.watch.counters[COMPILATIONS] == 0
