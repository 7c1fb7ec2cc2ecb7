"""No drafter changes a token: 26 prompts x 64 tokens in float32, on every path, alone, batched and served.

Most drafts are right, whatever the drafter; see `every_drafter`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from baton.decode.worker import DecodeWorker
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.eagle_toys import SourcedEngine
from baton.tests.parity.every_drafter import (
    KINDS,
    LAYERS,
    ORACLES,
    Answers,
    answers_of,
    check_batches,
    check_oracle,
    engine_of,
    tell,
    write_kinds,
)
from baton.tests.parity.graph_engine import BREAKABLE, FULL, arena, with_graphs
from baton.tests.parity.test_aggregated import ask, worker_of
from baton.tests.sim.worker_pair import Pair, name

pytestmark = pytest.mark.usefixtures("one_thread")

PATHS: dict[str, set | None] = {"eager": None, "breakable": BREAKABLE, "full": FULL}
VOCAB, BATCH = 256, 8
CHUNKS = {"16": 16, "64": 64, "whole": 0}
SIZES = {"pages": 400, "max_running": BATCH}
FEW, FEW_TOKENS = 6, 20  # of the first tier


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | Path]:
    return write_kinds(tmp_path_factory.mktemp("heads"), target)


@pytest.fixture(scope="module")
def answers(target: Path) -> Answers:
    return answers_of(target)


@pytest.fixture(scope="module")
def few(target: Path) -> Answers:
    return {prompt: tokens[:FEW_TOKENS] for prompt, tokens in answers_of(target, FEW).items()}


def check_path(target: Path, head: str | Path, answers: Answers, kind: str, path: str, batch: int) -> None:
    engine = engine_of(kind, target, head)
    tell(engine.drafter, answers, VOCAB)
    if path != "eager":
        with_graphs(engine, arena(), PATHS[path], max_batch=BATCH)
    check_batches(engine, answers, batch)
    assert {result.path for result in engine.results} == ({"graph"} if path == "full" else {"eager"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_answers_are_those_without_drafts(target, heads, few, kind):
    check_path(target, heads[kind], few, kind, "eager", BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_all_answers_are_those_without_drafts_on_every_path(target, heads, answers, kind, path, batch):
    check_path(target, heads[kind], answers, kind, path, batch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ORACLES)
def test_oracles_are_accepted_in_full_in_graphs(tmp_path, kind):
    target, head = ORACLES[kind](tmp_path)
    engine = SourcedEngine(target, head, is_greedy=True)
    with_graphs(engine, arena(), FULL, max_batch=BATCH)
    check_oracle(engine, Engine(target))
    assert {result.path for result in engine.results} == {"graph"}


def served(worker: DecodeWorker) -> dict[str, float]:
    return worker.stats().counters


def check_pair(pair: Pair, answers: Answers, batch: int) -> None:
    """`batch` prompts at a time over both workers, cold and then cached on both."""
    prompts, number = list(answers), 0
    tell(pair.decode.engine.drafter, answers, VOCAB)
    for i in range(0, len(prompts), batch):
        some = prompts[i : i + batch]
        for _ in range(2):
            for j, prompt in enumerate(some):
                pair.send(name(number + j), prompt, max_new_tokens=len(answers[prompt]))
            pair.run(turns=2000)
            assert [pair.tokens[name(number + j)] for j in range(len(some))] == [
                answers[prompt] for prompt in some
            ]
            number += len(some)
    counters = served(pair.decode)
    assert counters["accepted_tokens"] > counters["verify_steps"]
    assert counters["have_tokens"] > 0
    pair.assert_nothing_is_held()


def pair_of(target: Path, head: str | Path, kind: str, chunk: int, **settings: object) -> Pair:
    ours = {"draft": ""} if kind == "ngram" else None
    return Pair(target, head, ours=ours, chunk_size=chunk, **(SIZES | KINDS[kind].settings | settings))


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_answers_of_a_pair_of_workers_are_those_without_drafts(target, heads, few, kind):
    check_pair(pair_of(target, heads[kind], kind, 16, overlap="on", pages=120), few, BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("kind", KINDS)
def test_all_answers_of_a_pair_of_workers_are_those_without_drafts(
    target, heads, answers, kind, chunk, overlap
):
    batch = 1 if chunk == "64" else BATCH
    check_pair(pair_of(target, heads[kind], kind, CHUNKS[chunk], overlap=overlap), answers, batch)


def check_aggregated(worker: DecodeWorker, answers: Answers, batch: int) -> None:
    """`batch` prompts at a time in parts on one worker, cold and then cached."""
    prompts = list(answers)
    tell(worker.engine.drafter, answers, VOCAB)
    for i in range(0, len(prompts), batch):
        some = prompts[i : i + batch]
        count = len(answers[some[0]])
        for _ in range(2):
            assert ask(worker, some, count) == [answers[prompt] for prompt in some]
    counters = served(worker)
    assert counters["accepted_tokens"] > counters["verify_steps"]
    assert counters["have_tokens"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_answers_of_an_aggregated_worker_are_those_without_drafts(target, heads, few, kind):
    worker = worker_of(target, heads[kind], 16, overlap="on", **SIZES, **KINDS[kind].settings)
    check_aggregated(worker, few, BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("kind", KINDS)
def test_all_answers_of_an_aggregated_worker_are_those_without_drafts(
    target, heads, answers, kind, batch, overlap
):
    worker = worker_of(target, heads[kind], 16, overlap=overlap, **SIZES, **KINDS[kind].settings)
    check_aggregated(worker, answers, batch)
