"""Each architecture and each form of weights on two ranks says what transformers says, on every path."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.quant_toys import (
    FORMS,
    ORDERED,
    WIDE_EXPERTS,
    rounded_greedy,
    write_kv_scales,
    write_quantised,
)
from baton.tests.parity.quant_toys import SHAPE as QUANT_SHAPE
from baton.tests.parity.rank_cases import RankCases
from baton.tests.parity.test_aggregated import ask, worker_of
from baton.tests.parity.test_gpt_oss import write_packed
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import FAMILIES, reference_greedy, reference_model

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

PROMPTS = tuple(tuple(random_ids(length, seed=length)) for length in (40, 17))
NUM_TOKENS = 7
LAYERS = (0, 1, 2)  # whose outputs the head reads
PATHS = {
    "eager": {"graphs": "off", "draft": ""},
    "eager, n-grams": {"graphs": "off", "draft": "ngram"},
    "tape": {"graphs": "on", "draft": ""},
    "tape, drafts": {"graphs": "on", "draft": "head"},
}
BLOCKS = QUANT_SHAPE | {"head_dim": 128, "num_hidden_layers": 2}  # whole blocks of scales on each rank


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankCases]:
    cases = RankCases(2)
    yield cases
    cases.close()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(2, LAYERS), head_tensors())


def check(
    ranks: RankCases, path: Path, answers: list[list[int]], draft: Path | str = "", **settings: object
) -> None:
    """Prompts in parts, in a batch, cold and cached, get `answers`."""
    with ranks.worker(path, draft, max_running=len(PROMPTS), **settings) as worker:
        assert ask(worker, list(PROMPTS), NUM_TOKENS) == answers
        assert ask(worker, list(PROMPTS), NUM_TOKENS) == answers  # from cached prefixes
        worker.engine.cache.allocator.check_integrity()


def answers_of(path: Path) -> list[list[int]]:
    model = reference_model(path)
    return [reference_greedy(model, list(ids), NUM_TOKENS) for ids in PROMPTS]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_architecture_says_what_transformers_says(
    ranks: RankCases, toy_checkpoint: Callable[..., Path], head: Path, family: str
):
    path = toy_checkpoint(family)
    answers = answers_of(path)
    for given in PATHS.values():
        draft = head if given["draft"] == "head" else given["draft"]
        check(ranks, path, answers, draft, graphs=given["graphs"])


MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
EVEN = {"mixtral": {"num_local_experts": 4}}  # the others have an even number


@pytest.mark.parametrize("family", MOE)
def test_experts_that_are_whole_on_a_rank_say_what_transformers_says(
    ranks: RankCases, toy_checkpoint: Callable[..., Path], head: Path, family: str
):
    path = toy_checkpoint(family, **EVEN.get(family, {}))
    answers = answers_of(path)
    for given in PATHS.values():
        draft = head if given["draft"] == "head" else given["draft"]
        check(ranks, path, answers, draft, graphs=given["graphs"], ep=True)


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_rows_of_experts_are_counted_as_on_one_rank(
    ranks: RankCases, toy_checkpoint: Callable[..., Path], graphs: str
):
    path = toy_checkpoint("qwen3_moe")
    settings = {"count_experts": True, "graphs": graphs, "max_running": len(PROMPTS)}
    alone = worker_of(path, None, 16, **settings)
    alone.engine.begin_watch()  # forgets the rows of captures
    ask(alone, list(PROMPTS), NUM_TOKENS)
    counted = alone.engine.expert_counters
    assert sum(counted.values()) > 100
    for ep in (False, True):
        with ranks.worker(path, ep=ep, **settings) as worker:
            worker.engine.begin_watch()
            ask(worker, list(PROMPTS), NUM_TOKENS)
            assert worker.engine.expert_counters == counted


@pytest.mark.parametrize("form", [form for form in FORMS if form != ORDERED])
def test_quantised_weights_say_what_transformers_says_with_their_values(
    ranks: RankCases, toy_checkpoint: Callable[..., Path], tmp_path: Path, form: str
):
    family = "qwen2" if form == "gptq" else "phi3" if form in ("awq", "channel") else "llama"
    answers = answers_of(write_quantised(toy_checkpoint(family, **BLOCKS), tmp_path / form, form))
    check(ranks, tmp_path / form, answers, "ngram", graphs="on")
    check(ranks, tmp_path / form, answers, graphs="off")


@pytest.mark.parametrize(
    ("family", "form"),
    [("deepseek_v3", "block"), ("qwen3_moe", "block"), ("mixtral", "channel"), ("qwen2_moe", "awq")],
)
def test_quantised_experts_say_what_transformers_says_with_their_values(
    ranks: RankCases, toy_checkpoint: Callable[..., Path], tmp_path: Path, family: str, form: str
):
    plain = toy_checkpoint(family, **BLOCKS | WIDE_EXPERTS[family] | EVEN.get(family, {}))
    answers = answers_of(write_quantised(plain, tmp_path / form, form))
    for ep in (False, True):
        check(ranks, tmp_path / form, answers, "ngram", graphs="on", ep=ep)
        check(ranks, tmp_path / form, answers, graphs="off", ep=ep)


def test_experts_in_4_bits_say_what_transformers_says_with_their_values(
    ranks: RankCases, toy_copy: Callable[..., Path], tmp_path: Path
):
    path = toy_copy("gpt_oss", intermediate_size=128)
    write_packed(path, tmp_path / "packed")
    for ep in (False, True):
        check(ranks, tmp_path / "packed", answers_of(path), "ngram", graphs="on", ep=ep)


def one_rank_of(path: Path, **settings: object) -> list[list[int]]:
    return ask(worker_of(path, None, 16, **settings), list(PROMPTS), NUM_TOKENS)


def test_weights_rounded_at_load_say_what_one_rank_says(
    ranks: RankCases, toy_checkpoint: Callable[..., Path]
):
    path = toy_checkpoint("phi3")
    check(ranks, path, one_rank_of(path, quantize="fp8"), "ngram", graphs="on", quantize="fp8")


@pytest.mark.parametrize("has_scales", [False, True], ids=["no scales", "scales"])
def test_a_cache_in_8_bits_says_what_transformers_says_with_such_a_cache(
    ranks: RankCases, toy_checkpoint: Callable[..., Path], tmp_path: Path, has_scales: bool
):
    path, scales = toy_checkpoint("qwen3"), {}
    values = path
    if has_scales:
        path = tmp_path / "scaled"
        values = write_quantised(toy_checkpoint("qwen3", **QUANT_SHAPE), path, "channel")
        scales = write_kv_scales(path, num_layers=3)
    model = reference_model(values)
    answers = [rounded_greedy(model, list(ids), NUM_TOKENS, scales)[0] for ids in PROMPTS]
    check(ranks, path, answers, graphs="off", kv_dtype="fp8_e4m3")
    check(ranks, path, answers, "ngram", graphs="on", kv_dtype="fp8_e4m3")
