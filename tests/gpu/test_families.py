"""Families with windows, caps, sinks and other layers on a device: graphs, drafts, trees and hand-offs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.models.registry import load_model_config
from baton.engine.warmup.watch import COMPILATIONS
from baton.tests.gpu.test_engine_graphs import load, serve
from baton.tests.parity.answer_engine import Models, Way
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.test_batch_invariance import answers_of
from baton.tests.parity.test_family_paths import WAYS
from baton.tests.parity.toy_engine import random_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES = ("mistral", "gemma2", "gemma3", "phi3", "olmo2", "smollm3", "gpt_oss")


@pytest.fixture(autouse=True, scope="module")
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_gives_the_tokens_of_the_cpu(toy_checkpoint: Callable[..., Path], family: str):
    config = load_model_config(toy_checkpoint(family))
    prompts = [random_ids(n, seed=n) for n in (5, 17, 70)]
    on_cpu, on_gpu = Models(config, torch.float32, "cpu"), Models(config, torch.float32, "cuda")
    for (_, ours), (_, theirs) in zip(on_gpu.fastest.tensors(), on_cpu.fastest.tensors(), strict=True):
        ours.copy_(theirs)
    expected = answers_of(on_cpu, Way(), prompts, [], is_invariant=False)
    for way in (Way(), *WAYS):
        found = answers_of(on_gpu, way, prompts, expected, is_invariant=False)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected], way


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_bits_of_an_answer_do_not_depend_on_the_way(toy_checkpoint: Callable[..., Path], family: str):
    config = load_model_config(toy_checkpoint(family))
    models = Models(config, torch.bfloat16, "cuda")
    prompts = [random_ids(n, seed=n) for n in (5, 17, 70)]
    alone = answers_of(models, Way(), prompts, [])
    for way in WAYS:
        found = answers_of(models, way, prompts, alone)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in alone], way
        assert [answer.kv_hash for answer in found] == [answer.kv_hash for answer in alone], way


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_an_engine_starts_with_graphs_and_compiles_nothing_later(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
):
    target = toy_checkpoint(family, num_hidden_layers=4, layer_types=None)
    head = write_head(tmp_path / "head", head_config(2, (0, 1, 3)), head_tensors())
    eager = load(target, head, graphs=False)
    graphed = load(target, head, graphs=True)
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
