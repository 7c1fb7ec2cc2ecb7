"""Ranks on two GPUs that share experts say what transformers says, eager and with collectives in graphs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from baton.tests.parity.dp_cases import DpCases
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.test_dp_attention import LAYERS, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SIZES = {"page_size": 16, "gpu_memory_share": 0.2, "pages": 160}
WAYS = {
    "eager": {"graphs": "off", "draft": "", "ep": True},
    "graphs, experts cut by width": {"graphs": "on", "draft": ""},
    "graphs, chains": {"graphs": "on", "draft": "head", "ep": True},
    "graphs, trees": {"graphs": "on", "draft": "head", "spec_topk": 3, "spec_tokens": 8, "ep": True},
    "graphs, steps that wait": {"graphs": "on", "draft": "head", "overlap": "off", "ep": True},
}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(2, LAYERS), head_tensors())


@pytest.fixture(scope="module")
def ranks() -> Iterator[DpCases]:
    cases = DpCases(2, "cuda")
    yield cases
    cases.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("way", WAYS)
def test_two_gpus_say_what_transformers_says(
    ranks: DpCases, toy_checkpoint: Callable[..., Path], head: Path, family: str, way: str
):
    settings = dict(WAYS[way])
    draft = settings.pop("draft")
    check(ranks, toy_checkpoint(family), head if draft == "head" else "", **SIZES, **settings)
