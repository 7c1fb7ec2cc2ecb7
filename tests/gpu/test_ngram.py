"""Drafts by lookup on a device: whole steps in graphs, launched ahead, with the tokens of plain decode."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.batch.extend_batch import extend_batch
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.hub import NGRAM
from baton.engine.loader import EngineLoader
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafters.ngram import NgramDrafter
from baton.engine.speculative.step.async_decoder import AsyncDecoder
from baton.tests.gpu.test_steps import run_ahead, run_waiting
from baton.tests.parity.ngram_search import lookup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTH, SIZE = 60, 4


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=4)


def load(target: Path, draft: str, *, overlap: str = "off", **settings: object) -> Engine:
    config = EngineConfig(
        model=str(target), draft=draft, device="cuda", dtype="float32", pages=200, max_context=256,
        max_running=SIZE, overlap=overlap, spec_steps=4, ngram_min=1, ngram_max=3, ngram_window=64,
        **({"graphs": "on", "spec_adaptive": "off"} | settings),
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=True)
    for _, run in loader.phases():
        run()
    return loader.engine()


def begun(engine: Engine) -> list[Request]:
    """Requests with computed prompts of few tokens and token 1, half of them sampled."""
    requests = []
    for i in range(SIZE):
        draws = random.Random(i)
        prompt = [draws.randrange(3 + i) for _ in range(20 + 30 * i)]
        params = SamplingParams(temperature=float(i % 2), seed=i, max_new_tokens=LENGTH, ignore_eos=True)
        request = Request(room=f"{i:032x}", epoch=0, prompt_ids=prompt, sampling=params)
        tokens = request.num_prompt + LENGTH + engine.shape.spare_slots
        request.pages = engine.cache.alloc(-(-tokens // engine.page_size))
        batch = extend_batch(
            [(request, 0, request.num_prompt)], page_size=engine.page_size, device=engine.pool.device
        )
        request.append([int(engine.runner.forward(batch).logits[-1].argmax())], ())
        request.num_computed = request.num_prompt
        requests.append(request)
    return requests


def plain_tokens(target: Path) -> list[list[int]]:
    engine = load(target, "")
    requests = begun(engine)
    run_waiting(engine.decoder(), requests)
    return [request.output_ids for request in requests]


@pytest.mark.parametrize("settings", [{}, {"spec_adaptive": "on"}, {"graphs": "off"}], ids=str)
def test_tokens_are_those_of_plain_decode(target: Path, settings: dict[str, object]) -> None:
    wanted = plain_tokens(target)
    waiting = load(target, NGRAM, **settings)
    requests = begun(waiting)
    run_waiting(waiting.decoder(), requests)
    assert [request.output_ids for request in requests] == wanted
    ahead = load(target, NGRAM, overlap="on", **settings)
    requests = begun(ahead)
    paths = set(run_ahead(ahead.decoder(), requests))
    assert [request.output_ids for request in requests] == wanted
    assert paths == {"eager" if settings.get("graphs") == "off" else "graph"}


def test_drafts_in_graphs_are_those_of_a_plain_search(target: Path) -> None:
    """After every step, the tokens on the device are the newest of the text, and so are the drafts."""
    engine = load(target, NGRAM)
    decoder, requests, drafter = engine.decoder(), begun(engine), engine.drafter
    assert isinstance(drafter, NgramDrafter)
    assert all(family.captured == (1, 2, 4) for family in engine.steps.families.values()), "none differs"
    drafted = 0
    while not any(request.is_finished for request in requests):
        wanted = [lookup(request.all_ids, drafter.config, engine.shape.steps) for request in requests]
        result = decoder.step(requests)
        assert result.path == "graph"
        found = [bool(drafts) for drafts in wanted]
        assert [count > 0 for count in result.drafted] == found
        drafted += sum(found)
        for request in requests:
            ring = drafter.states.tokens[decoder.coverage.row_of(request)].tolist()
            newest = range(max(0, request.num_tokens - len(ring)), request.num_tokens)
            assert [ring[i % len(ring)] for i in newest] == [request.all_ids[i] for i in newest]
    assert drafted > 0


def test_a_steady_step_neither_waits_for_the_device_nor_allocates(target: Path) -> None:
    engine = load(target, NGRAM, overlap="on")
    decoder: AsyncDecoder = engine.decoder()
    requests = begun(engine)
    flight = decoder.launch(requests)
    for _ in range(2):
        newer = decoder.launch(requests)
        decoder.read(flight, [True] * SIZE)
        flight = newer
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # torch calls it a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            newer = decoder.launch(requests)
            assert all(decoder.read(flight, [True] * SIZE).tokens)
            flight = newer
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
