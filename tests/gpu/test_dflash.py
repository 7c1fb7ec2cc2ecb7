"""DFLASH on a device: blocks, windows and projections as CUDA graphs give the eager tokens and drafts."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.config import EngineConfig
from baton.engine.graphs.cuda import CudaBackend
from baton.engine.loader import Engine, EngineLoader
from baton.engine.sampling.params import SamplingParams
from baton.tests.gpu.test_steps import EDITED, RANKED, begun, run_ahead, run_waiting
from baton.tests.parity.dflash_engine import DflashEngine
from baton.tests.parity.dflash_toys import (
    BLOCK,
    DISTANCE,
    chain,
    dflash_config,
    dflash_tensors,
    write_dflash,
    write_dflash_oracle,
)
from baton.tests.parity.graph_engine import enable, with_graphs
from baton.tests.parity.path_matrix import PATHS
from baton.tests.parity.test_dflash import LAYOUTS, PROMPTS
from baton.tests.parity.test_dflash_oracle import check_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("one_thread"),
]

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=100, ignore_eos=True)
BLOCKS = 3  # compared


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_of_blocks_are_those_of_a_cpu(target: Path, tmp_path: Path, layout: str):
    head = write_dflash(tmp_path, dflash_config(**LAYOUTS[layout][0]), dflash_tensors(seed=4))
    found = []
    for device in ("cpu", "cuda"):
        engine = DflashEngine(target, head, device=device, steps=BLOCK - 1)
        compute, seen = engine.drafter.head.compute_logits, []
        engine.drafter.head.compute_logits = lambda out, c=compute, s=seen: s.append(c(out)) or s[-1]
        requests = [engine.prefill(prompt, GREEDY) for prompt in PROMPTS]
        for _ in range(BLOCKS):
            engine.decoder.step(requests)
        found.append(([request.output_ids for request in requests], [logits.cpu() for logits in seen]))
    (tokens, expected), (others, logits) = found
    assert others == tokens
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("path", ["full", "breakable"])
def test_the_oracle_is_accepted_in_full_on_graphs(tmp_path: Path, path: str):
    models = write_dflash_oracle(tmp_path, attention=0.005)
    engine = DflashEngine(*models, device="cuda", steps=DISTANCE - 1, is_greedy=True)
    with_graphs(engine, backend=CudaBackend(), max_batch=4)
    enable(engine, PATHS[path])
    for _ in range(2):
        engine.next_page, engine.results = 1, []
        check_tokens(engine, 26)
        assert {result.path for result in engine.results} == {"graph" if path == "full" else "eager"}


def load(target: Path, head: Path | str, *, overlap: str, graphs: bool, **settings: object) -> Engine:
    config = EngineConfig(
        model=str(target), draft=str(head), device="cuda", dtype="float32", pages=200, max_context=256,
        graphs="on" if graphs else "off", max_running=4, overlap=overlap,
        **({"spec_steps": BLOCK - 1, "spec_adaptive": "off"} | settings),
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=True)
    for _, run in loader.phases():
        run()
    return loader.engine()


@pytest.fixture(scope="module")
def plain(target: Path) -> Engine:
    return load(target, "", overlap="off", graphs=False)


@pytest.fixture(scope="module")
def ahead(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine whose drafter has a full layer and one with a window, and whose blocks are of any length."""
    config = dflash_config(**LAYOUTS["sliding"][0])
    head = write_dflash(tmp_path_factory.mktemp("dflash"), config, dflash_tensors(seed=4))
    return load(target, head, overlap="on", graphs=True, spec_adaptive="on")


def test_the_self_test_keeps_every_graph(ahead: Engine):
    assert all(family.captured == family.buckets for family in ahead.steps.families.values())
    family = ahead.drafter.prefill_family
    assert family.captured == family.buckets
    assert {kind.shape.steps for kind in ahead.steps.kinds} == {0, 1, 2, 3, 5, 7}


@pytest.mark.parametrize("ways", [RANKED, EDITED], ids=["ranked", "edited"])
@pytest.mark.parametrize("size", [1, 4])
def test_steps_of_graphs_launched_ahead_give_the_tokens_of_plain_steps(
    plain: Engine, ahead: Engine, ways: tuple[dict[str, object], ...], size: int
):
    results = []
    for engine in (plain, ahead):
        decoder = engine.decoder()
        requests = begun(engine, decoder, size, ways)
        if engine is ahead:
            assert set(run_ahead(decoder, requests)) == {"graph"}
        else:
            run_waiting(decoder, requests)
        results.append([request.output_ids for request in requests])
        for request in requests:
            decoder.forget(request)
        engine.cache.allocator.release([page for request in requests for page in request.pages])
    assert results[0] == results[1]


def test_a_steady_step_of_blocks_does_not_wait_for_the_device(ahead: Engine):
    decoder = ahead.decoder()
    decoder.policy = None
    requests = begun(ahead, decoder, 4)
    flight = decoder.launch(requests)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # torch calls it a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            newer = decoder.launch(requests)
            result = decoder.read(flight, [True] * 4)
            assert all(result.tokens)
            flight = newer
    finally:
        torch.cuda.set_sync_debug_mode("default")
    decoder.read(flight, [False] * 4)
    assert result.path == "graph"
    for request in requests:
        decoder.forget(request)
    ahead.cache.allocator.release([page for request in requests for page in request.pages])
