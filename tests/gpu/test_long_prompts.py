"""Long prompts with heads of 128 values take the kernel of warp groups, which is compiled before."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.loader import EngineLoader
from baton.kernels import context_attention, wgmma_attention
from baton.tests.gpu.test_warmup import Workload, nothing_late

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CHUNK = 2048
SIZES = {
    "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def load(toy_checkpoint: Callable[..., Path]) -> Callable[[str], Engine]:
    if not wgmma_attention.can_run(torch.device("cuda"), SIZES["head_dim"], torch.bfloat16):
        pytest.skip("needs a Hopper GPU and a Gluon that is known")

    def load(graphs: str) -> Engine:
        config = EngineConfig(
            model=str(toy_checkpoint("llama", **SIZES)), device="cuda", dtype="bfloat16", pages=900,
            max_context=3600, chunk_size=CHUNK, max_batch=4, max_running=4, graphs=graphs,
        )  # fmt: skip
        loader = EngineLoader(config, has_drafter=False)
        for _, run in loader.phases():
            run()
        engine = loader.engine()
        engine.begin_watch()
        return engine

    return load


@pytest.mark.parametrize("graphs", ["on", "off"], ids=["graphs", "eager"])
def test_long_prompts_find_their_kernel_compiled(
    load: Callable[[str], Engine], graphs: str, monkeypatch: pytest.MonkeyPatch
):
    launched, launch = [], context_attention.wgmma_attention_triton

    def counted(*arguments: object, **options: object) -> torch.Tensor:
        launched.append(arguments)
        return launch(*arguments, **options)

    monkeypatch.setattr(context_attention, "wgmma_attention_triton", counted)
    engine = load(graphs)
    workload = Workload(engine)
    for lens, prefix in (([CHUNK], 0), ([1500], 2000), ([1100, 800, 3], 700), ([1025], 0)):
        workload.prompts(lens, prefix)
    assert launched
    assert not nothing_late(engine)


def test_long_prompts_have_the_logits_of_the_other_kernels(
    load: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch
):
    engine = load("off")
    workload = Workload(engine)
    long, short = (workload.request(length) for length in (3000, 1300))
    parts = [[(long, 0, 1700)], [(long, 1700, 3000), (short, 0, 700)], [(short, 700, 1300)]]
    found = []
    for is_known in (True, False):
        monkeypatch.setattr(context_attention, "can_run", lambda *_, is_known=is_known: is_known)
        found.append([workload.forward(part).logits.float() for part in parts])
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        if len(ours):
            assert float((ours - theirs).norm() / theirs.norm()) < 0.02
