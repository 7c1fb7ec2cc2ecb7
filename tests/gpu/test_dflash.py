"""DFLASH on a device: blocks, windows and projections as CUDA graphs give the eager tokens and drafts."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.engine import Engine
from baton.engine.graphs.cuda import CudaBackend
from baton.engine.sampling.params import SamplingParams
from baton.tests.gpu.test_steps import EDITED, RANKED, begun
from baton.tests.parity.dflash_engine import DflashEngine
from baton.tests.parity.dflash_toys import (
    BLOCK,
    DISTANCE,
    dflash_config,
    dflash_tensors,
    write_dflash,
    write_dflash_oracle,
)
from baton.tests.parity.graph_engine import enable, with_graphs
from baton.tests.parity.path_matrix import PATHS
from baton.tests.parity.test_dflash import LAYOUTS, PROMPTS
from baton.tests.parity.test_dflash_oracle import check_tokens
from baton.tests.parity.test_dflash_steps import check_graphs, loaded_engine, tokens_of, write_mixed

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


@pytest.fixture(scope="module")
def plain(target: Path) -> Engine:
    return loaded_engine(target, "", device="cuda")


@pytest.fixture(scope="module")
def ahead(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    head = write_mixed(tmp_path_factory.mktemp("dflash"))
    return loaded_engine(target, head, device="cuda", overlap="on", graphs="on", spec_adaptive="on")


def test_the_self_test_keeps_every_graph(ahead: Engine):
    check_graphs(ahead)


@pytest.mark.parametrize("ways", [RANKED, EDITED], ids=["ranked", "edited"])
@pytest.mark.parametrize("size", [1, 4])
def test_steps_of_graphs_launched_ahead_give_the_tokens_of_plain_steps(
    plain: Engine, ahead: Engine, ways: tuple[dict[str, object], ...], size: int
):
    assert tokens_of(ahead, ways, size) == tokens_of(plain, ways, size)


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
