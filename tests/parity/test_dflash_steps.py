"""Engines with a block drafter as workers load them: graphs, steps ahead, and blocks of all lengths."""

from collections.abc import Callable
from pathlib import Path

import pytest
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.loader import EngineLoader
from baton.tests.gpu.test_steps import EDITED, RANKED, begun, run_ahead, run_waiting
from baton.tests.parity.dflash_toys import BLOCK, dflash_config, dflash_tensors, write_dflash
from baton.tests.parity.test_dflash import LAYOUTS

pytestmark = pytest.mark.usefixtures("one_thread")

Ways = tuple[dict[str, object], ...]


def write_mixed(path: Path) -> Path:
    """A drafter with one layer that sees everything and one with a window."""
    return write_dflash(path, dflash_config(**LAYOUTS["sliding"][0]), dflash_tensors(seed=4))


def loaded_engine(target: Path, head: Path | str, *, device: str, **settings: object) -> Engine:
    common = {"dtype": "float32", "pages": 200, "max_context": 256, "max_running": 4, "spec_steps": BLOCK - 1}
    plain = {"graphs": "off", "overlap": "off", "spec_adaptive": "off"}
    config = EngineConfig(model=str(target), draft=str(head), device=device, **(common | plain | settings))
    loader = EngineLoader(config, has_drafter=True)
    for _, run in loader.phases():
        run()
    return loader.engine()


def check_graphs(engine: Engine) -> None:
    """The self-test has dropped no graph, and there are some for each length of a block."""
    assert all(family.captured == family.buckets for family in engine.steps.families.values())
    family = engine.drafter.prefill_family
    assert family.captured == family.buckets
    assert {kind.shape.steps for kind in engine.steps.kinds} == {0, 1, 2, 3, 5, BLOCK - 1}


def tokens_of(engine: Engine, ways: Ways, size: int) -> list[list[int]]:
    """The tokens of `size` requests; steps are launched ahead, as graphs, where the engine does that."""
    decoder = engine.decoder()
    requests = begun(engine, decoder, size, ways)
    if engine.launches_ahead:
        assert set(run_ahead(decoder, requests)) == {"graph"}
    else:
        run_waiting(decoder, requests)
    for request in requests:
        decoder.forget(request)
    engine.cache.allocator.release([page for request in requests for page in request.pages])
    return [request.output_ids for request in requests]


def test_steps_of_graphs_launched_ahead_give_the_tokens_of_plain_steps(
    toy_checkpoint: Callable[..., Path], tmp_path: Path
):
    target = toy_checkpoint("llama", num_hidden_layers=12)
    plain = loaded_engine(target, "", device="cpu")
    settings = {"overlap": "on", "graphs": "on", "spec_adaptive": "on"}
    ahead = loaded_engine(target, write_mixed(tmp_path), device="cpu", **settings)
    check_graphs(ahead)
    for ways, size in ((RANKED, 4), (EDITED, 1)):
        assert tokens_of(ahead, ways, size) == tokens_of(plain, ways, size)
    assert len(ahead.step_counters) > 2, "blocks had several lengths"
