"""Workers of two and four ranks: the tokens of one, eager and with graphs, and sums that are those of NCCL.

The toy models have 4 heads. Their 2 KV heads are copied where there are 4 ranks. On a machine with fewer GPUs
ranks share them, and then NCCL makes all sums.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.tests.gpu.rank_checks import check_answers, in_own_process, share_cards
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.test_aggregated import DRAFTS, LAYERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RANKS = (2, 4)
EXPERTS = {"qwen3_moe": {"num_experts": 8}, "gpt_oss": {"num_local_experts": 8}}  # 4 ranks share 8


@pytest.fixture(params=RANKS)
def tp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The ranks of a worker."""
    share_cards(request.param, monkeypatch)
    return request.param


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(2, LAYERS), head_tensors())


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_gpus_say_what_transformers_says(target: Path, head: Path, tp: int, graphs: str):
    in_own_process(check_answers, target, head, tp, graphs=graphs)


def test_trees_in_graphs_say_what_transformers_says(target: Path, head: Path, tp: int):
    in_own_process(check_answers, target, head, tp, graphs="on", **DRAFTS["tree"])


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_gpus_with_kv_heads_of_their_own_say_the_same(
    toy_checkpoint: Callable[..., Path], head: Path, tp: int, graphs: str
):
    """With a vocabulary that ranks cannot share evenly."""
    sizes = {"num_hidden_layers": 4, "num_key_value_heads": 4, "vocab_size": 257}
    in_own_process(check_answers, toy_checkpoint("llama", **sizes), None, tp, graphs=graphs)


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_dealt_whole_to_tensor_parallel_gpus_say_the_same(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, tp: int, family: str, graphs: str
):
    path = toy_checkpoint(family, **EXPERTS[family])
    head = write_head(tmp_path, head_config(2, (0, 1, 2)), head_tensors())
    in_own_process(check_answers, path, head, tp, graphs=graphs, ep=True)
