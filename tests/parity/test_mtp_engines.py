"""Engines that load MTP modules by their loader: start-up, its self-tests, and both ways to serve."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baton.engine.attention.registry import attention_for
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.errors import CheckpointError
from baton.engine.loader import EngineLoader
from baton.engine.warmup.rehearsal import Rehearsal, RehearsalSizes
from baton.kernels import skinny_linear
from baton.tests.parity.mtp_laws import DEEP, KINDS, write_kinds
from baton.tests.parity.mtp_oracles import SOURCES, write_oracle_modules, write_oracle_target
from baton.tests.parity.mtp_toys import random_modules, write_mtp
from baton.tests.parity.test_aggregated import NUM_TOKENS, answers_of, check, worker_of
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model
from baton.tests.sim.worker_pair import Pair
from baton.tests.unit.engine.warmup.test_variants import planned, workload
from baton.tests.variants import witnesses

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="session")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=2)


@pytest.fixture(scope="session")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_kinds(tmp_path_factory.mktemp("mtp"), target)


def load(
    target: Path, draft: Path, *, has_drafter: bool = True, **settings: object
) -> tuple[Engine, EngineLoader]:
    given = {"dtype": "float32", "pages": 120, "max_context": 400, "max_running": 5, "chunk_size": 48}
    config = EngineConfig(model=str(target), draft=str(draft), device="cpu", **(given | settings))
    loader = EngineLoader(config, has_drafter=has_drafter)
    for _, run in loader.phases():
        run()
    return loader.engine(), loader


# --- start-up -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", witnesses(KINDS, {"shared"}))
def test_graphs_pass_the_self_tests_and_a_rehearsal_replays_them(target, heads, kind):
    engine, _ = load(target, heads[kind], graphs="on", graph_self_test=True)
    kinds = engine.graphs.pool.kinds()
    assert not any("capture_failed" in each.fallbacks for each in kinds)
    Rehearsal(engine, RehearsalSizes(prompt_rows=48, max_prompts=4, max_requests=5)).run()
    kinds = engine.graphs.pool.kinds()
    assert {each.kind for each in kinds if set(each.replays) != set(each.buckets)} == set()
    assert engine.drafter.states.num_open == 0
    assert not any(bool(values.any()) for values in engine.drafter.anchors)
    assert not bool(engine.drafter.pool.kv.any())


@pytest.mark.parametrize("kind", ["shared", *(pytest.param(kind, marks=pytest.mark.slow) for kind in DEEP)])
def test_the_dry_run_finds_every_kernel_that_modules_launch(target, heads, kind, monkeypatch):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    engine, loader = load(target, heads[kind], dtype="bfloat16", spec_adaptive="off", max_context=128)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr(skinny_linear, "shared_bytes", lambda device: skinny_linear.SHARED_BYTES)
    engine.runner.attention = attention_for(engine.pool, "triton")
    engine.drafter._attention = attention_for(engine.drafter.pool, "triton")
    reach = replace(loader.reach(), prompt_rows=48)
    launched = {launch.variant for launch in workload(engine, reach, seed=3, num_forwards=12)}
    assert launched
    assert launched <= planned(engine, reach)


def test_prefill_reads_the_config_alone_and_offers_the_last_layers_output(target, heads, tmp_path):
    (tmp_path / "config.json").write_text((heads["chained"] / "config.json").read_text())
    engine, _ = load(target, tmp_path, has_drafter=False)
    assert engine.feature_ids == (1,)
    assert engine.features is not None
    assert engine.features.width == 64


@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_shared_by_as_many_tokens_as_there_are_modules(target, heads, kind):
    engine, _ = load(target, heads[kind])
    assert engine.cache.lookahead == KINDS[kind][1]


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("chained", {"spec_steps": 5}, ("spec_steps 5", "3 modules", "--spec-steps 3")),
        ("chained", {"spec_topk": 2}, ("spec_topk 2", "a chain", "--spec-topk 1")),
        ("shared", {"spec_topk": 300}, ("spec_topk 300", "256 tokens")),
    ],
)
def test_a_shape_that_the_modules_cannot_draft_is_refused(target, heads, kind, settings, words):
    with pytest.raises(CheckpointError) as caught:
        load(target, heads[kind], **settings)
    assert all(word in str(caught.value) for word in words), caught.value


def test_modules_are_read_from_the_targets_own_checkpoint(target, tmp_path):
    both = write_mtp(tmp_path, target, "deepseek", random_modules(target, 2), is_beside=True)
    engine, _ = load(both, both, spec_steps=2)
    assert engine.drafter.head.num_modules == 2
    plain, _ = load(both, "", has_drafter=True)
    assert plain.drafter is None
    assert engine.weights_hash == plain.weights_hash


# --- serving ------------------------------------------------------------------------------------------------


QUICK_WAYS = {("chained", "on", "on"), ("independent", "on", "off"), ("shared", "off", "off")}


@pytest.mark.parametrize(
    ("kind", "overlap", "graphs"),
    [
        pytest.param(*way, id="-".join(way), marks=() if way in QUICK_WAYS else pytest.mark.slow)
        for way in itertools.product(KINDS, ("off", "on"), ("off", "on"))
    ],
)
def test_an_aggregated_worker_gives_the_tokens_of_transformers(target, heads, kind, overlap, graphs):
    """Parts of prompts, prefix hits, batches and single requests."""
    worker = worker_of(target, heads[kind], 5, overlap=overlap, graphs=graphs, graph_self_test=False)
    check(worker, answers_of(target))


@pytest.mark.parametrize(
    ("kind", "chunk"),
    witnesses(itertools.product(KINDS, (16, 64, 96)), {("chained", 16), ("independent", 64), ("shared", 96)}),
)
def test_a_pair_of_workers_gives_the_tokens_of_transformers(target, heads, kind, chunk):
    """Features cross the hand-off as they are behind the last layer; a second round hits both caches."""
    answers, long = answers_of(target), random_ids(75, seed=75)
    answers[tuple(long)] = reference_greedy(reference_model(target), long, NUM_TOKENS)
    pair = Pair(target, heads[kind], pages=200, chunk_size=chunk, max_running=8)
    for number in range(2):
        rooms = [f"{number}{i}" * 16 for i in range(len(answers))]
        for room, prompt in zip(rooms, answers, strict=True):
            pair.send(room, list(prompt), max_new_tokens=NUM_TOKENS, ignore_eos=True)
        pair.run()
        for room, tokens in zip(rooms, answers.values(), strict=True):
            assert pair.tokens[room] == tokens
    counters = pair.decode.stats().counters
    assert counters["drafted_tokens"] > 50
    assert counters["have_tokens"] > 0
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("chunk", [8, 96])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("source", SOURCES)
def test_the_oracle_is_accepted_in_full_over_a_hand_off(tmp_path, source, count, chunk):
    """So the right rows of features reach each module, cold and behind a cached prefix."""
    target = write_oracle_target(tmp_path / "target")
    head = write_oracle_modules(tmp_path / "head", target, count, source=source)
    pair = Pair(target, head, pages=200, chunk_size=chunk, spec_steps=3)
    prompt = [token % 16 for token in random_ids(30, seed=4)]
    for number in range(2):
        before = pair.decode.stats().counters
        pair.send(f"{number}" * 32, prompt, max_new_tokens=1 + 4 * 5)
        pair.run()
        after = pair.decode.stats().counters
        steps, accepted = (after[name] - before.get(name, 0) for name in ("verify_steps", "accepted_tokens"))
        assert (steps, accepted) == (5, 15)
    assert after["have_tokens"] > 0
