"""An aggregated decode worker says what transformers says: in parts, in batches, cold and cached."""

import itertools
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
from baton.cluster.protocol.messages import Finished, Reserve, Sampling, Tokens
from baton.decode.worker import DecodeWorker
from baton.engine.config import EngineConfig
from baton.engine.loader import EngineLoader
from baton.tests.parity.dflash_toys import dflash_config, dflash_tensors, write_dflash
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.test_sampled_law import D, Ears
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model
from baton.tests.variants import slow, witnesses

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS, NUM_TOKENS = (1, 4, 17, 40, 33, 8), 12
DRAFTS: dict[str, dict[str, int] | None] = {
    "off": None,
    "chain": {},
    "tree": {"spec_topk": 3, "spec_tokens": 8},
}
LAYERS = (0, 1, 3)  # whose outputs a drafter reads
Answers = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(2, LAYERS), head_tensors())


@pytest.fixture(scope="module")
def answers(target: Path) -> Answers:
    return answers_of(target)


def answers_of(target: Path) -> Answers:
    model = reference_model(target)
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    return {tuple(ids): reference_greedy(model, ids, NUM_TOKENS) for ids in prompts}


def worker_of(target: Path, draft: Path | None, budget: int, **settings: object) -> DecodeWorker:
    sizes = {"page_size": 4, "pages": 160, "max_context": 96, "max_running": len(LENGTHS)} | settings
    config = EngineConfig(
        model=str(target), draft=str(draft or ""), device="cpu", dtype="float32", aggregated=True,
        local_prefill_tokens=budget, **sizes,
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=True)
    for _, run in loader.phases():
        run()
    engine = loader.engine()
    worker = DecodeWorker(
        engine,
        Ears(),
        instance=D,
        max_running=config.max_running,
        local_prefill_tokens=engine.sizes.local_prefill_tokens,
    )
    worker.local.budget_alone = worker.local.budget  # the same parts whether or not a stream runs
    return worker


def ask(
    worker: DecodeWorker, prompts: list[tuple[int, ...]], num_tokens: int = NUM_TOKENS
) -> list[list[int]]:
    """The tokens of prompts that come together."""
    sampling = Sampling(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True)
    rooms = [secrets.token_hex(16) for _ in prompts]
    for room, ids in zip(rooms, prompts, strict=True):
        worker.handle(
            Reserve(room=room, epoch=0, instance=D, prompt_ids=list(ids), sampling=sampling, deadline_ms=0),
            now=0.0,
        )
    for _ in range(5000):
        worker.step()
        if not worker.num_rooms:
            break
    assert worker.num_rooms == 0
    said: dict[str, list[int]] = {}
    for message in worker.link.heard:
        for item in message.items if isinstance(message, Tokens) else ():
            said.setdefault(item.room, []).extend(item.ids)
    assert sum(isinstance(message, Finished) for message in worker.link.heard) == len(prompts)
    worker.link.heard.clear()
    return [said[room] for room in rooms]


def check(worker: DecodeWorker, answers: Answers) -> None:
    prompts = list(answers)
    assert ask(worker, prompts) == list(answers.values()), "together, cold"
    assert ask(worker, prompts) == list(answers.values()), "together, cached"
    assert [ask(worker, [ids])[0] for ids in prompts] == list(answers.values()), "one by one"
    stats = worker.stats()
    assert stats.counters["have_tokens"] > 0
    assert stats.pages_free == stats.pages_total


@pytest.mark.parametrize(
    ("budget", "drafts", "overlap"),
    witnesses(
        itertools.product((5, 64), DRAFTS, ("off", "on")),
        {(5, "off", "off"), (5, "chain", "on"), (64, "tree", "on"), (5, "tree", "off"), (64, "off", "on")},
    ),
)
def test_greedy_tokens_equal_those_of_transformers(
    target: Path, head: Path, answers: Answers, drafts: str, overlap: str, budget: int
) -> None:
    shape = DRAFTS[drafts]
    draft = None if shape is None else head
    check(worker_of(target, draft, budget, overlap=overlap, **(shape or {})), answers)


def test_parts_run_as_graphs_where_graphs_are_on(target: Path, head: Path, answers: Answers) -> None:
    worker = worker_of(target, head, 16, overlap="on", graphs="on", graph_self_test=False)
    check(worker, answers)
    counters = worker.stats().counters
    assert counters["graph_replays_target_prefill"] > 5
    assert not any(name.startswith("graph_fallback_target_prefill") for name in counters), counters


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_every_family_is_served_without_prefill_workers(
    toy_checkpoint: Callable[..., Path], family: str
) -> None:
    target = toy_checkpoint(family)
    check(worker_of(target, None, 5, overlap="on"), answers_of(target))


@pytest.mark.parametrize(
    ("settings", "overlap"),
    [
        slow({}, "off", id="fixed-off"),
        pytest.param({}, "on", id="fixed-on"),
        pytest.param({"spec_adaptive": "on"}, "off", id="adaptive-off"),
        slow({"spec_adaptive": "on"}, "on", id="adaptive-on"),
        slow({"deterministic": True}, "off", id="deterministic-off"),
        pytest.param({"deterministic": True}, "on", id="deterministic-on"),
    ],
)
def test_tokens_with_a_block_drafter_equal_those_of_transformers(
    target: Path, tmp_path: Path, answers: Answers, overlap: str, settings: dict[str, object]
) -> None:
    drafter = write_dflash(tmp_path, dflash_config(LAYERS), dflash_tensors())
    check(worker_of(target, drafter, 5, overlap=overlap, spec_steps=7, **settings), answers)
