"""Prefill on a device: full, breakable and eager forwards give the same rows, and are launched ahead."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from baton.engine.batch.extend_batch import extend_batch
from baton.engine.batch.forward_batch import CaptureHidden
from baton.engine.capture.graph_self_test import relative_error
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.kv.page_table import pages_for
from baton.engine.loader import EngineLoader
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.toy_engine import random_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PATHS = ("eager", "breakable", "graph")
# Largest relative error of a row against the eager path: other sums, over twelve layers.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
LENGTHS = (200, 150, 33, 1)


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def load(model: Path, head: Path, dtype: str) -> Engine:
    config = EngineConfig(
        model=str(model), draft=str(head), device="cuda", dtype=dtype, pages=200, max_context=256,
        graphs="on", chunk_size=128,
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=False)
    for _, run in loader.phases():
        run()
    return loader.engine()


def take(engine: Engine, path: str) -> None:
    """Have the engine's forwards run on `path`."""
    assert engine.runner.graphs is not None
    engine.runner.graphs.tokens.family.is_enabled = path == "breakable"
    if engine.runner.graphs.whole is not None:
        engine.runner.graphs.whole.family.is_enabled = path == "graph"


def forwards(engine: Engine) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Path, logits and features of forwards over chunks: alone, ragged, and behind prefixes."""
    requests = [
        Request(room=f"{i:032x}", epoch=0, prompt_ids=random_ids(n, seed=i), sampling=SamplingParams())
        for i, n in enumerate(LENGTHS)
    ]
    for request in requests:
        request.pages = engine.cache.alloc(pages_for(request.num_prompt, engine.page_size))
    first, second, third, last = requests
    for ranges in (
        [(first, 0, 128)],
        [(second, 0, 90), (third, 0, 33)],
        [(first, 128, 200), (second, 90, 130), (last, 0, 1)],
        [(second, 130, 150)],
    ):
        batch = extend_batch(
            ranges,
            page_size=engine.page_size,
            device=engine.pool.device,
            capture=CaptureHidden.FULL,
        )
        output = engine.runner.forward(batch)
        assert output.hidden is not None
        yield output.path, output.logits, output.hidden
    for request in requests:
        engine.cache.allocator.release(request.pages)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rows_of_prompts_are_equal_on_every_path(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, dtype: str
):
    target = toy_checkpoint("llama", num_hidden_layers=12)
    head = write_head(tmp_path / "head", head_config(2), head_tensors())
    engine = load(target, head, dtype)
    found = {}
    for path in PATHS:
        take(engine, path)
        found[path] = list(forwards(engine))
    can_record = engine.runner.attention.recordable_context > 0
    assert can_record is (torch.cuda.get_device_capability() == (9, 0))
    for path in PATHS if can_record else PATHS[:2]:
        assert [name for name, *_ in found[path]] == [path] * len(found[path])
        for (_, *rows), (_, *expected) in zip(found[path], found["eager"], strict=True):
            for row, wanted in zip(rows, expected, strict=True):
                assert relative_error(wanted, row) <= TOLERANCES[dtype]


def test_a_prefill_engine_launches_ahead_on_a_device(toy_checkpoint: Callable[..., Path], tmp_path: Path):
    head = write_head(tmp_path / "head", head_config(2), head_tensors())
    engine = load(toy_checkpoint("llama", num_hidden_layers=12), head, "bfloat16")
    assert engine.launches_ahead
    assert engine.graph_counts["decode"] == engine.graph_counts["verify"] == 0
    prompt = Request(
        room="0" * 32, epoch=0, prompt_ids=random_ids(9), sampling=SamplingParams(temperature=0.0)
    )
    prompt.pages = engine.cache.alloc(1)
    batch = extend_batch([(prompt, 0, 9)], page_size=engine.page_size, device=engine.pool.device)
    output = engine.runner.forward(batch)
    firsts = engine.sampler.launch(output.logits, [prompt.masked_row]).read()
    assert not firsts.tokens.is_cuda
    assert firsts.tokens.tolist() == output.logits.argmax(-1).tolist()
    assert firsts.bad_rows.tolist() == [False]
