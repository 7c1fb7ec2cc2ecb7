"""With default settings an engine on a GPU uses its share of the card; its weights arrive unchanged."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.errors import CheckpointError
from baton.engine.loader import EngineLoader
from baton.engine.models import weight_reader
from baton.engine.models.weights import load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHARE = 0.1


def load(model: Path, *, has_drafter: bool, **settings: object) -> Engine:
    settings = {"gpu_memory_share": SHARE} | settings
    config = EngineConfig(model=str(model), device="cuda", **settings)  # type: ignore[arg-type]
    loader = EngineLoader(config, has_drafter=has_drafter)
    for _, run in loader.phases():
        run()
    return loader.engine()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_on_the_device_are_those_of_the_file(
    toy_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", 4096)
    monkeypatch.setattr(weight_reader, "BYTES_PER_THREAD", 16384)
    path = toy_checkpoint("qwen2", shard_size="100KB")
    ours, theirs = (load_model(path, dtype=dtype, device=device)[0] for device in ("cuda", "cpu"))
    for (name, on_device), (_, on_host) in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert torch.equal(on_device.cpu(), on_host), name


@pytest.fixture(autouse=True)
def free_memory() -> None:
    """An engine of an earlier test, not collected yet, would count as memory of this one's weights."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("has_drafter", [False, True], ids=["prefill", "decode"])
def test_a_default_engine_stays_within_its_share(
    toy_checkpoint: Callable[..., Path], has_drafter: bool
) -> None:
    before = torch.cuda.memory_reserved()
    engine = load(toy_checkpoint("llama"), has_drafter=has_drafter)
    taken = torch.cuda.memory_reserved() - before
    total = torch.cuda.mem_get_info()[1]
    assert 0.5 * SHARE * total < taken < SHARE * total
    assert engine.sizes.has_graphs
    assert sum(engine.graph_counts.values()) > 0
    assert engine.num_pages + 1 == engine.sizes.num_pages == engine.pool.num_pages


def test_what_does_not_fit_is_refused_before_it_is_allocated(toy_checkpoint: Callable[..., Path]) -> None:
    model = toy_checkpoint("llama")
    with pytest.raises(CheckpointError, match="give at most"):
        load(model, has_drafter=False, kv_memory_mb=2**24)
    with pytest.raises(CheckpointError, match="lower it to at most 32"):
        load(model, has_drafter=True, pages=2, max_context=512)
