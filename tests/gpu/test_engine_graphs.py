"""Engines on a device: graphs give the eager path's tokens, and a batch step is launches, not waits."""

from collections.abc import Callable
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
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.toy_engine import random_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 3


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def load(model: Path, head: Path, *, graphs: bool, has_drafter: bool = True, **settings: object) -> Engine:
    config = EngineConfig(
        model=str(model), draft=str(head), device="cuda", dtype="float32", pages=200, max_context=256,
        graphs="on" if graphs else "off",
        max_running=4, spec_steps=STEPS, chunk_size=32, **({"spec_adaptive": "off"} | settings),
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=has_drafter)
    for _, run in loader.phases():
        run()
    return loader.engine()


def serve(engine: Engine, size: int) -> tuple[list[list[int]], set[str]]:
    """Tokens of `size` requests, and the paths that their steps took."""
    decoder = engine.decoder()
    requests = []
    for i in range(size):
        params = SamplingParams(temperature=float(i % 2), seed=i, max_new_tokens=12, ignore_eos=True)
        request = Request(
            room=f"{i:032x}", epoch=0, prompt_ids=random_ids(9 + 7 * i, seed=i), sampling=params
        )
        request.pages = engine.cache.alloc(
            -(-(request.num_prompt + 12 + engine.shape.spare_slots) // engine.page_size)
        )
        batch = extend_batch(
            [(request, 0, request.num_prompt)],
            page_size=engine.page_size,
            device=engine.pool.device,
            capture=CaptureHidden.FULL,
        )
        output = engine.runner.forward(batch)
        request.num_computed = request.num_prompt
        request.append([int(output.logits[-1].argmax())], ())
        decoder.draft_prefill(request, output.hidden, 0)
        requests.append(request)
    paths = set()
    while live := [request for request in requests if not request.is_finished]:
        paths.add(decoder.step(live).path)
    for request in requests:
        decoder.forget(request)
        engine.cache.allocator.release(request.pages)
    return [request.output_ids for request in requests], paths


@pytest.mark.parametrize(
    ("settings", "num_shapes"),
    [({}, 1), ({"spec_topk": 4, "spec_tokens": 8}, 1), ({"spec_adaptive": "auto"}, 3)],
    ids=["chain", "tree", "adaptive"],
)
def test_graphs_give_the_tokens_of_the_eager_path(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, settings: dict[str, object], num_shapes: int
):
    target = toy_checkpoint("llama", num_hidden_layers=12)
    head = write_head(tmp_path / "head", head_config(2), head_tensors())
    eager, graphed = load(target, head, graphs=False), load(target, head, graphs=True, **settings)
    assert graphed.graph_counts["verify"] == 3 * 3 * num_shapes, "three kinds of three sizes"
    for size in (1, 2, 3, 4, 5):
        expected, _ = serve(eager, size)
        tokens, paths = serve(graphed, size)
        assert tokens == expected
        assert ("graph" in paths) == (size <= 4), "more requests than planned run eagerly"
    assert load(target, head, graphs=True, has_drafter=False).graph_counts["prefill"] > 0
