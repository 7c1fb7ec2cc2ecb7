"""Ranks that share experts say what transformers says, eager and with collectives in graphs: two on GPUs of
their own, and four, which share GPUs where there are fewer.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from baton.tests.gpu.rank_checks import in_own_process, share_cards
from baton.tests.parity.dp_cases import DpCases
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.test_dp_attention import LAYERS, check
from baton.tests.parity.test_dp_three_ranks import ASKED, answered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("way", WAYS)
def test_two_gpus_say_what_transformers_says(
    ranks: DpCases, toy_checkpoint: Callable[..., Path], head: Path, family: str, way: str
):
    settings = dict(WAYS[way])
    draft = settings.pop("draft")
    check(ranks, toy_checkpoint(family), head if draft == "head" else "", **SIZES, **settings)


OF_FOUR = {**ASKED, 3: [(33, 2)]}


@pytest.mark.parametrize("way", ["graphs, experts cut by width", "graphs, chains"])
def test_four_ranks_of_which_one_is_idle_say_the_same(
    toy_checkpoint: Callable[..., Path], head: Path, monkeypatch: pytest.MonkeyPatch, way: str
):
    share_cards(len(OF_FOUR), monkeypatch)
    settings = dict(WAYS[way])
    draft = settings.pop("draft")
    path = toy_checkpoint("qwen3_moe", num_experts=8)
    in_own_process(check_four, path, head if draft == "head" else "", **settings)


def check_four(path: Path, draft: Path | str, **settings: object) -> None:
    """Four ranks answer as transformers does."""
    asked, answers = answered(path, OF_FOUR)
    cases = DpCases(len(OF_FOUR), "cuda")
    try:
        with cases.workers(path, draft, **SIZES, **settings) as workers:
            assert workers.ask(asked) == answers
    finally:
        cases.close()
