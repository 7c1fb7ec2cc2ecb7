"""Workers of two and four GPUs: the tokens of one, eager and with graphs, and sums that are those of NCCL.

The toy models have 4 heads. Their 2 KV heads are copied where there are 4 ranks.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.test_aggregated import DRAFTS, LAYERS, answers_of, ask
from baton.tests.parity.tp_worker import tp_worker

NUM_CARDS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_CARDS < 2, reason="needs two CUDA devices")]
SIZES = {"device": "cuda", "page_size": 16, "gpu_memory_share": 0.2, "pages": 160}
RANKS = [2, pytest.param(4, marks=pytest.mark.skipif(NUM_CARDS < 4, reason="needs four CUDA devices"))]
EXPERTS = {"qwen3_moe": {"num_experts": 8}, "gpt_oss": {"num_local_experts": 8}}  # 4 ranks share 8


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(2, LAYERS), head_tensors())


def check(target: Path, draft: Path | None, tp: int, **settings: object) -> None:
    """Prompts that come together get the tokens of transformers, cold and cached."""
    answers = answers_of(target)
    with tp_worker(target, draft, tp, **settings) as worker:
        if worker.engine.pool.device.type == "cuda":
            assert worker.engine.group.small is not None, "GPUs of one host map each other's memory"
        assert ask(worker, list(answers)) == list(answers.values())
        assert ask(worker, list(answers)) == list(answers.values()), "from cached prefixes"
        worker.engine.cache.allocator.check_integrity()
        assert worker.ranks is not None
        assert worker.ranks.size == tp


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("tp", RANKS)
def test_gpus_say_what_transformers_says(target: Path, head: Path, tp: int, graphs: str):
    check(target, head, tp, graphs=graphs, **SIZES)


@pytest.mark.parametrize("tp", RANKS)
def test_trees_in_graphs_say_what_transformers_says(target: Path, head: Path, tp: int):
    check(target, head, tp, graphs="on", **DRAFTS["tree"], **SIZES)


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("tp", RANKS)
def test_gpus_with_kv_heads_of_their_own_say_the_same(
    toy_checkpoint: Callable[..., Path], head: Path, tp: int, graphs: str
):
    """With a vocabulary that ranks cannot share evenly."""
    sizes = {"num_hidden_layers": 4, "num_key_value_heads": 4, "vocab_size": 257}
    check(toy_checkpoint("llama", **sizes), None, tp, graphs=graphs, **SIZES)


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("tp", RANKS)
def test_experts_dealt_whole_to_tensor_parallel_gpus_say_the_same(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, tp: int, family: str, graphs: str
):
    path = toy_checkpoint(family, **EXPERTS[family])
    head = write_head(tmp_path, head_config(2, (0, 1, 2)), head_tensors())
    check(path, head, tp, graphs=graphs, ep=True, **SIZES)
