"""No drafter changes a token on a device: 26 prompts x 64 tokens in float32, in graphs of whole steps."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.graphs.cuda import CudaBackend
from baton.tests.gpu import test_mtp
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.every_drafter import (
    KINDS,
    LAYERS,
    Answers,
    answers_of,
    check_batches,
    engine_of,
    greedy,
    tell,
)
from baton.tests.parity.graph_engine import with_graphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("one_thread"),
]

VOCAB, BATCH = 256, 8


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def answers(target: Path) -> Answers:
    return answers_of(target)


def test_all_answers_without_drafts_are_those_of_transformers(target: Path, answers: Answers) -> None:
    engine = Engine(target, device="cuda")
    for prompt, tokens in answers.items():
        engine.next_page = 1
        assert engine.generate([prompt], greedy()) == [tokens]


@pytest.mark.parametrize("kind", KINDS)
def test_all_answers_are_those_without_drafts_alone_and_in_batches(
    target: Path, tmp_path: Path, answers: Answers, kind: str
) -> None:
    head = KINDS[kind].write(tmp_path / "head", target)
    engine = engine_of(kind, target, head, "cuda")
    tell(engine.drafter, answers, VOCAB, "cuda")
    with_graphs(engine, backend=CudaBackend(), max_batch=BATCH)
    for batch in (1, BATCH):
        check_batches(engine, answers, batch)
        assert {result.path for result in engine.results} == {"graph"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_self_test_keeps_the_graphs_in_which_a_head_catches_up(
    target: Path, tmp_path: Path, dtype: str
) -> None:
    head = KINDS["eagle3"].write(tmp_path / "head", target)
    engine = test_mtp.engine_of(target, head, has_graphs=True, dtype=dtype)
    assert engine.steps.catch_up_graphs.captured == engine.steps.catch_up_graphs.buckets
    assert not any("capture_failed" in name for name in engine.graph_counters), engine.graph_counters
