"""Decode steps on a device give the tokens of waiting steps; a steady step neither waits nor allocates."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from baton.engine.batch.extend_batch import extend_batch
from baton.engine.batch.forward_batch import CaptureHidden
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.loader import EngineLoader
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.step.async_decoder import AsyncDecoder
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.toy_engine import random_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DRAFTS = {
    "off": None,
    "chain": {},
    "tree": {"spec_topk": 4, "spec_tokens": 8},
    "adaptive": {"spec_adaptive": "on", "spec_steps": 2},
}
RANKED = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_k": 5, "min_p": 0.001},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
)
EDITED = (
    {"temperature": 0.0, "frequency_penalty": 0.8, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 1.0, "seed": 1, "logit_bias": {5: 3.0}, "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 2, "top_k": 5, "logprobs": 0},
    {"temperature": 0.8, "seed": 3, "min_new_tokens": 20, "stop_token_ids": tuple(range(0, 256, 3))},
)
LENGTH = 40


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=12)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(2), head_tensors())


def load(target: Path, head: Path, drafts: str, *, overlap: str, graphs: bool = True) -> Engine:
    shape = DRAFTS[drafts]
    config = EngineConfig(
        model=str(target), draft=str(head) if shape is not None else "", device="cuda", dtype="float32",
        pages=200,
        max_context=256, graphs="on" if graphs else "off", max_running=4, overlap=overlap,
        graph_self_test=overlap == "auto",
        **{"spec_adaptive": "off", **(shape or {})},
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=True)
    for _, run in loader.phases():
        run()
    return loader.engine()


def begun(
    engine: Engine, decoder: AsyncDecoder, size: int, ways: Sequence[dict[str, object]] = RANKED
) -> list[Request]:
    """Requests with their prompts computed and token 1 chosen."""
    requests = []
    for i in range(size):
        params = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True, **ways[i])
        request = Request(
            room=f"{i:032x}", epoch=0, prompt_ids=random_ids(9 + 7 * i, seed=i), sampling=params
        )
        spare = engine.shape.spare_slots
        request.pages = engine.cache.alloc(-(-(request.num_prompt + LENGTH + spare) // engine.page_size))
        has_draft = engine.drafter is not None
        batch = extend_batch(
            [(request, 0, request.num_prompt)],
            page_size=engine.page_size,
            device=engine.pool.device,
            capture=CaptureHidden.FULL if has_draft else CaptureHidden.NULL,
        )
        output = engine.runner.forward(batch)
        request.num_computed = request.num_prompt
        request.append([int(output.logits[-1].argmax())], ())
        if output.hidden is not None:
            decoder.draft_prefill(request, output.hidden, 0)
        requests.append(request)
    return requests


def run_ahead(decoder: AsyncDecoder, requests: list[Request]) -> Iterator[str]:
    """Step to the end, each step launched before the one before is read; yields the paths."""
    flight = None
    while live := [request for request in requests if not request.is_finished]:
        newer = decoder.launch(live)
        if flight is not None:
            yield decoder.read(flight, [not request.is_finished for request in flight.requests]).path
        flight = newer
    decoder.read(flight, [False] * len(flight.requests))


def run_waiting(decoder: AsyncDecoder, requests: list[Request]) -> None:
    while live := [request for request in requests if not request.is_finished]:
        decoder.step(live)


@pytest.mark.parametrize(("drafts", "graphs"), [*((drafts, True) for drafts in DRAFTS), ("chain", False)])
def test_steps_launched_ahead_give_the_tokens_of_steps_that_wait(
    target: Path, head: Path, drafts: str, graphs: bool
):
    waiting, ahead = (load(target, head, drafts, overlap=overlap, graphs=graphs) for overlap in ("off", "on"))
    for size in (1, 4):
        decoder = waiting.decoder()
        expected = begun(waiting, decoder, size)
        run_waiting(decoder, expected)
        decoder = ahead.decoder()
        assert decoder.launches_ahead
        requests = begun(ahead, decoder, size)
        assert set(run_ahead(decoder, requests)) == {"graph" if graphs else "eager"}
        assert [r.output_ids for r in requests] == [r.output_ids for r in expected]
        for request in requests:
            decoder.forget(request)
        for engine, held in ((waiting, expected), (ahead, requests)):
            engine.cache.allocator.release([page for request in held for page in request.pages])


@pytest.mark.parametrize("drafts", ["off", "chain", "tree"])
def test_edited_steps_of_graphs_give_the_tokens_of_eager_steps(target: Path, head: Path, drafts: str):
    """The fixed forms of edits and logprobs in graphs, against the same forms run eagerly and waited for."""
    waiting, ahead = (
        load(target, head, drafts, overlap=overlap, graphs=overlap == "on") for overlap in ("off", "on")
    )
    decoder = waiting.decoder()
    expected = begun(waiting, decoder, 4, EDITED)
    run_waiting(decoder, expected)
    decoder = ahead.decoder()
    requests = begun(ahead, decoder, 4, EDITED)
    assert set(run_ahead(decoder, requests)) == {"graph"}
    assert [r.output_ids for r in requests] == [r.output_ids for r in expected]
    assert not decoder.fallbacks
    assert requests[3].num_output >= 20


@pytest.mark.parametrize("drafts", ["off", "chain", "tree"])
def test_a_steady_step_neither_waits_for_the_device_nor_allocates(target: Path, head: Path, drafts: str):
    engine = load(target, head, drafts, overlap="auto")
    decoder = engine.decoder()
    assert decoder.launches_ahead, "on a GPU steps are launched ahead by default"
    assert all(family.captured == (1, 2, 4) for family in engine.steps.families.values()), (
        "the self-test drops none"
    )
    requests = begun(engine, decoder, 4)
    flight = decoder.launch(requests)
    for _ in range(2):
        newer = decoder.launch(requests)
        decoder.read(flight, [True] * 4)
        flight = newer
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # torch calls it a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            newer = decoder.launch(requests)
            result = decoder.read(flight, [True] * 4)
            assert all(result.tokens)
            flight = newer
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert result.path == "graph"
