"""Ranks that share experts say what transformers says, however requests are spread over them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from baton.cluster.protocol.messages import RoutedExperts, Tokens
from baton.tests.parity.dp_cases import Asked, AskedWorker, DpCases
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.quant_toys import EXPERTS, SHAPE, write_quantised
from baton.tests.parity.test_aggregated import worker_of
from baton.tests.parity.test_gpt_oss import write_packed
from baton.tests.parity.test_latent_mtp import Toy
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


def spread_of(values: Path) -> dict[str, tuple[dict[int, list[Asked]], list[list[list[int]]]]]:
    """Ways to spread requests over two ranks, with the answers of transformers for the weights `values`."""
    model = reference_model(values)

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


def check(
    ranks: DpCases, path: Path, draft: Path | str = "", values: Path | None = None, **settings: object
) -> None:
    """`values`: the checkpoint of the weights' values, if `path` is a quantised one."""
    with ranks.workers(path, draft, **settings) as pair:
        for name, (way, answers) in spread_of(values or path).items():
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


@pytest.mark.parametrize(
    ("family", "form", "ep"),
    [("deepseek_v3", "block", True), ("qwen3_moe", "awq", True), ("mixtral", "channel", False)],
)
def test_quantised_experts_say_what_transformers_says_with_their_values(
    ranks: DpCases, toy_checkpoint: Callable[..., Path], tmp_path: Path, family: str, form: str, ep: bool
):
    plain = toy_checkpoint(family, **SHAPE | EXPERTS[family] | EVEN.get(family, {}))
    values = write_quantised(plain, tmp_path / form, form)
    check(ranks, tmp_path / form, "ngram", values, graphs="on", ep=ep)


@pytest.mark.parametrize("ep", [False, True])
def test_experts_in_4_bits_say_what_transformers_says_with_their_values(
    ranks: DpCases, toy_copy: Callable[..., Path], tmp_path: Path, ep: bool
):
    path = toy_copy("gpt_oss", intermediate_size=64)
    write_packed(path, tmp_path / "packed")
    check(ranks, tmp_path / "packed", "ngram", path, graphs="on", ep=ep)


WISHES: list[dict[str, object]] = [
    {"temperature": 0.8, "seed": 7, "top_p": 0.9},
    {"temperature": 0.7, "seed": 8, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {5: 4.0}},
    {"temperature": 1.0, "seed": 9, "prompt_logprobs": 1},
    {"temperature": 0.0, "min_new_tokens": 4, "ignore_eos": False},
]


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_sampled_edited_and_scored_answers_are_those_of_one_rank(
    ranks: DpCases, toy_checkpoint: Callable[..., Path], head: Path, graphs: str
):
    """Steps of ranks have the same rows, and each its own way to choose tokens."""
    path = toy_checkpoint("qwen3_moe")
    asked = [
        Asked(tuple(random_ids(length, seed=length)), NUM_TOKENS, at=at, sampling=wish)
        for at, (length, wish) in enumerate(zip((5, 20, 33, 26, 12), WISHES, strict=True))
    ]
    alone = AskedWorker(worker_of(path, head, 16, max_running=len(asked)))
    alone.ask(asked)
    while not alone.is_done:
        alone.step()
    with ranks.workers(path, head, graphs=graphs, ep=True) as pair:
        for spread in ([0, 1, 0, 1, 0], [1, 0, 0, 0, 1]):
            by_rank: dict[int, list[Asked]] = {0: [], 1: []}
            for one, rank in zip(asked, spread, strict=True):
                by_rank[rank].append(one)
            said = pair.ask(by_rank)
            found = [iter(of_rank) for of_rank in said]
            assert [next(found[rank]) for rank in spread] == alone.said()


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_rows_of_experts_are_counted_where_they_come_from(
    ranks: DpCases, toy_checkpoint: Callable[..., Path], graphs: str
):
    """Each rank counts its own rows, also those that another rank computes, and no padding."""
    path, settings = toy_checkpoint("qwen3_moe"), {"count_experts": True, "graphs": graphs}
    asked = [Asked(tuple(random_ids(length, seed=length)), NUM_TOKENS) for length in (17, 30)]
    alone = AskedWorker(worker_of(path, None, 16, **settings))
    alone.worker.engine.begin_watch()  # forgets the rows of captures
    alone.ask(asked)
    while not alone.is_done:
        alone.step()
    counted = alone.worker.engine.expert_counters
    assert sum(counted.values()) > 100
    for way in ({0: asked}, {1: asked}):
        with ranks.workers(path, ep=True, **settings) as pair:
            pair.worker.engine.begin_watch()
            pair.ask(way)
            own = pair.worker.engine.expert_counters
            assert own == (counted if 0 in way else dict.fromkeys(counted, 0.0))


def experts_by_room(worker: AskedWorker) -> list[bytes]:
    """The experts that the worker has told of each prompt's rows, in the order of the prompts."""
    rows = dict.fromkeys(worker._rooms, b"")
    for message in worker.worker.link.heard:
        if isinstance(message, RoutedExperts):
            rows[message.room] += message.ids
        for item in message.items if isinstance(message, Tokens) else ():
            rows[item.room] += item.experts or b""
    return list(rows.values())


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_each_rank_keeps_the_experts_of_its_own_rows(
    ranks: DpCases, toy_checkpoint: Callable[..., Path], graphs: str
):
    """Beside rows of another rank, and padding, as alone; so also those of both ranks' steps."""
    path, settings = toy_checkpoint("qwen3_moe"), {"return_routed_experts": True, "graphs": graphs}
    wish = {"routed_experts": 0}
    asked = [Asked(tuple(random_ids(length, seed=length)), NUM_TOKENS, sampling=wish) for length in (17, 30)]
    other = [Asked(tuple(random_ids(length, seed=length)), NUM_TOKENS) for length in (5, 41, 9)]
    alone = AskedWorker(worker_of(path, None, 16, **settings))
    alone.ask(asked)
    while not alone.is_done:
        alone.step()
    told = experts_by_room(alone)
    shape = alone.worker.engine.expert_shape
    assert shape is not None
    assert [len(rows) for rows in told] == [
        (length + NUM_TOKENS - 1) * shape.row_bytes for length in (17, 30)
    ]
    with ranks.workers(path, ep=True, **settings) as pair:
        pair.ask({0: asked, 1: other})
        assert pair._worker is not None
        assert experts_by_room(pair._worker) == told


def test_modules_with_experts_of_their_own_draft_on_each_rank_alone(
    ranks: DpCases, toy_checkpoint: Callable[..., Path], tmp_path: Path
):
    toy = Toy.of(toy_checkpoint("deepseek_v3", num_hidden_layers=4), tmp_path, 2)
    for graphs in ("off", "on"):
        check(ranks, toy.target, toy.draft, ep=True, graphs=graphs, spec_steps=2)
