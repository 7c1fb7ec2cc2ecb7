"""A rehearsal runs every graph and leaves the engine as it was."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.hub import NGRAM
from baton.engine.loader import EngineLoader
from baton.engine.speculative.drafters.protocol import draft_pools
from baton.engine.warmup.rehearsal import Rehearsal, RehearsalSizes
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head

CHUNK, MAX_RUNNING = 48, 5


@pytest.fixture
def load(toy_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Engine]:
    head = write_head(tmp_path / "head", head_config(2, (0, 1, 2)), head_tensors())

    def load(role: str, **settings: object) -> Engine:
        config = EngineConfig(
            model=str(toy_checkpoint("llama", num_hidden_layers=4)), device="cpu",
            dtype="float32", chunk_size=CHUNK, max_running=MAX_RUNNING, graph_self_test=False,
            **({"draft": str(head), "pages": 120, "max_context": 400, "graphs": "on", "spec_adaptive": "on"}
               | settings),
        )  # fmt: skip
        loader = EngineLoader(config, has_drafter=role == "decode")
        for _, run in loader.phases():
            run()
        return loader.engine()

    return load


def rehearse(engine: Engine) -> int:
    rehearsal = Rehearsal(engine, RehearsalSizes(prompt_rows=CHUNK, max_prompts=4, max_requests=MAX_RUNNING))
    rehearsal.run()
    return rehearsal.num_forwards


def free_pages(engine: Engine) -> list[int]:
    """All free pages, in the order in which requests would get them."""
    pages = engine.cache.alloc(engine.cache.num_available)
    engine.cache.allocator.release(reversed(pages))
    return pages


@pytest.mark.parametrize(
    ("settings", "role"),
    [
        pytest.param({}, "prefill", id="graphs-prefill"),
        pytest.param({}, "decode", id="graphs-decode"),
        pytest.param({"graphs": "off"}, "prefill", id="eager-prefill"),
        pytest.param({"graphs": "off"}, "decode", id="eager-decode"),
        pytest.param({"draft": NGRAM}, "prefill", id="lookup-prefill"),
        pytest.param({"draft": NGRAM}, "decode", id="lookup-decode", marks=pytest.mark.slow),
    ],
)
def test_every_graph_is_replayed_and_pages_states_and_averages_stay(
    load: Callable[..., Engine], role: str, settings: dict[str, object]
):
    engine = load(role, **settings)
    before = free_pages(engine), averages_of(engine)
    assert rehearse(engine) > 30
    if engine.graphs is not None:
        kinds = engine.graphs.pool.kinds()
        assert {kind.kind for kind in kinds if set(kind.replays) != set(kind.buckets)} == set()
        assert not {reason for kind in kinds for reason in kind.fallbacks} - {"disabled"}
    assert (engine.graphs is None) is (settings.get("graphs") == "off")
    assert (free_pages(engine), averages_of(engine)) == before
    engine.cache.allocator.check_integrity()
    assert not engine.pool.kv.any()
    if engine.features is not None:
        assert not engine.features.features.any()
    if role == "decode":
        assert engine.steps is not None
        assert engine.drafter is not None
        assert engine.step_policy is not None
        assert engine.steps.step.state.num_open == engine.drafter.states.num_open == 0
        assert not any(pool.kv.any() for pool in draft_pools(engine.drafter))
        assert not any(values.any() for values in engine.drafter.anchors)
        assert not engine.step_policy.chosen


def averages_of(engine: Engine) -> object:
    """The number of slots for requests, and the averages that choose the next drafts."""
    if engine.steps is None or engine.step_policy is None:
        return None
    return engine.steps.step.state.num_slots, engine.step_policy.share_kept


def test_a_pool_of_few_pages_is_rehearsed_with_what_fits(load: Callable[..., Engine]):
    for role in ("prefill", "decode"):
        engine = load(role, pages=4, max_context=40, spec_adaptive="off")
        assert rehearse(engine) > 0
        engine.cache.allocator.check_integrity()
        assert engine.cache.num_available == 4


def test_first_tokens_are_chosen_as_serving_does_and_exactly(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    engine = load("decode", spec_adaptive="off", graphs="off")
    sample, ways = engine.sampler.sample, set()

    def noting(*args: object, is_exact: bool = True) -> object:
        ways.add(is_exact)
        return sample(*args, is_exact=is_exact)

    monkeypatch.setattr(engine.sampler, "sample", noting)
    rehearse(engine)
    assert ways == {True, False}


def test_an_interrupted_rehearsal_gives_its_pages_back(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    engine = load("prefill")

    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine.sampler, "sample", fail)
    with pytest.raises(RuntimeError, match="device lost"):
        rehearse(engine)
    assert engine.cache.num_available == 120


def test_copies_come_behind_what_the_start_did_to_pages(toy_checkpoint: Callable[..., Path]):
    model = str(toy_checkpoint("llama"))
    config = EngineConfig(model=model, device="cpu", dtype="float32", pages=8, max_context=40)
    loader = EngineLoader(config, has_drafter=False)
    for _, run in loader.phases():
        run()
    assert loader._engine is not None
    pool, pages = loader._engine.pool, range(1, 9)
    pool.order.check_uses()
    pool.note_use(reads=[], writes=pages)  # as the zeros behind a rehearsal
    assert loader.engine().pool is pool
    for page in pages:
        pool.order.wait([page])
        pool.order.touch(page, is_write=True)
