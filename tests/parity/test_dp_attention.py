"""Ranks that share experts say what transformers says, however requests are spread over them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from baton.tests.parity.dp_cases import Asked, DpCases
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

NUM_TOKENS = 9
LAYERS = (0, 1, 2)  # whose outputs the head reads


@pytest.fixture(scope="module")
def ranks() -> Iterator[DpCases]:
    cases = DpCases(2)
    yield cases
    cases.close()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(2, LAYERS), head_tensors())


def spread_of(path: Path) -> dict[str, tuple[dict[int, list[Asked]], list[list[list[int]]]]]:
    """Ways to spread requests over two ranks, with the answers of transformers."""
    model = reference_model(path)

    def asked(length: int, num_tokens: int = NUM_TOKENS, at: int = 0) -> Asked:
        return Asked(tuple(random_ids(length, seed=length)), num_tokens, at)

    ways = {
        "rank 0 alone": {0: [asked(17), asked(5)]},
        "rank 1 alone": {1: [asked(33)]},
        "both, unequal": {0: [asked(4)], 1: [asked(21), asked(9), asked(30)]},
        "joining and leaving": {
            0: [asked(6, 14), asked(19, 3, at=4), asked(11, 6, at=9)],
            1: [asked(8, 2), asked(40, 5, at=2), asked(7, 9, at=12)],
        },
    }
    return {
        name: (
            way,
            [
                [reference_greedy(model, list(each.ids), each.num_tokens) for each in way.get(rank, [])]
                for rank in range(2)
            ],
        )
        for name, way in ways.items()
    }


def check(ranks: DpCases, path: Path, draft: Path | str = "", **settings: object) -> None:
    with ranks.workers(path, draft, **settings) as pair:
        for name, (way, answers) in spread_of(path).items():
            assert pair.ask(way) == answers, name
            assert pair.ask(way) == answers, f"{name}, from cached prefixes"


FAMILIES = ("qwen3_moe", "deepseek_v3", "mixtral", "qwen2_moe", "glm4_moe", "deepseek_v2", "gpt_oss")
EVEN = {"mixtral": {"num_local_experts": 4}}  # the others have an even number
PATHS = {
    "eager": {"graphs": "off", "draft": "", "ep": True},
    "eager, n-grams, experts cut by width": {"graphs": "off", "draft": "ngram"},
    "tape, experts cut by width": {"graphs": "on", "draft": ""},
    "tape, chains": {"graphs": "on", "draft": "head", "ep": True},
    "eager, trees": {"graphs": "off", "draft": "head", "spec_topk": 3, "spec_tokens": 8, "ep": True},
}


@pytest.mark.parametrize("way", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_say_what_transformers_says(
    ranks: DpCases, toy_checkpoint: Callable[..., Path], head: Path, family: str, way: str
):
    settings = dict(PATHS[way])
    draft = settings.pop("draft")
    path = toy_checkpoint(family, **EVEN.get(family, {}))
    check(ranks, path, head if draft == "head" else draft, **settings)


MORE = {
    "trees on tapes": {"graphs": "on", "spec_topk": 3, "spec_tokens": 8},
    "steps launched ahead": {"graphs": "on", "overlap": "on"},
    "drafts that adapt": {"graphs": "on", "overlap": "on", "spec_adaptive": "on"},
    "drafts that adapt, eagerly": {"graphs": "off", "spec_adaptive": "on"},
}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("way", MORE)
def test_other_steps_say_what_transformers_says(
    ranks: DpCases, toy_checkpoint: Callable[..., Path], head: Path, family: str, way: str
):
    check(ranks, toy_checkpoint(family), head, ep=True, **MORE[way])
