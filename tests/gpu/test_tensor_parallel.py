"""Workers of two GPUs: the tokens of one, eager and with graphs, and sums that are those of NCCL."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.test_aggregated import LAYERS, LENGTHS, NUM_TOKENS, ask
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model
from baton.tests.parity.tp_worker import tp_worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SIZES = {"device": "cuda", "page_size": 16, "gpu_memory_share": 0.2, "pages": 160}


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(2, LAYERS), head_tensors())


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_two_gpus_say_what_transformers_says(target: Path, head: Path, graphs: str):
    model = reference_model(target)
    prompts = [tuple(random_ids(length, seed=length)) for length in LENGTHS]
    with tp_worker(target, head, 2, graphs=graphs, **SIZES) as worker:
        assert worker.engine.group.small is not None, "GPUs of one host map each other's memory"
        said = ask(worker, prompts)
    assert said == [reference_greedy(model, list(ids), NUM_TOKENS) for ids in prompts]


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_dealt_whole_to_tensor_parallel_gpus_say_the_same(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, family: str, graphs: str
):
    path = toy_checkpoint(family)
    head = write_head(tmp_path, head_config(2, (0, 1, 2)), head_tensors())
    model, prompts = reference_model(path), [tuple(random_ids(length, seed=length)) for length in LENGTHS]
    with tp_worker(path, head, 2, graphs=graphs, ep=True, **SIZES) as worker:
        said = ask(worker, prompts)
    assert said == [reference_greedy(model, list(ids), NUM_TOKENS) for ids in prompts]
