"""Weights in 4 and 8 bits and experts have kernels of their own for few rows and for many, all compiled
before an engine is ready.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.config import EngineConfig
from baton.engine.loader import EngineLoader
from baton.kernels import (
    expert_mlp,
    fp8_linear,
    fp8_many_rows,
    fp8_rows,
    int4_linear,
    int4_mma,
    int4_rows,
    int4_wgmma,
)
from baton.tests.gpu.test_warmup import MAX_BATCH, MAX_RUNNING, Workload, nothing_late
from baton.tests.parity.quant_toys import write_quantised

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CHUNK = 320  # more rows than the kernels of 4-bit integers take
SHAPE = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "num_hidden_layers": 2, "max_position_embeddings": 640,
}  # fmt: skip
WIDER = {**SHAPE, "hidden_size": 512, "intermediate_size": 2048}  # inputs of 16 blocks, which are cut
FP8_ROWS = (
    (fp8_linear, "fp8_rows_triton"), (fp8_rows, "sum_fp8_triton"), (fp8_rows, "scaled_fp8_triton"),
    (fp8_linear, "fp8_linear_triton"),
)  # fmt: skip
STORED = {"int4": "awq", "fp8": "channel", "fp8 in blocks": "block"}
# (module, launcher) of the kernels that a workload must reach
REACHED = {
    "int4": (
        (int4_rows, "int4_rows_triton"), (int4_rows, "sum_int4_triton"), (int4_rows, "scaled_int4_triton"),
        (int4_mma, "int4_mma_triton"), (int4_wgmma, "int4_wgmma_triton"),
        (int4_linear, "dequantise_int4_triton"),
    ),
    "fp8": (*FP8_ROWS, (fp8_many_rows, "fp8_rows_product")),
    "fp8 in blocks": (*FP8_ROWS, (fp8_linear, "add_splits"), (fp8_many_rows, "fp8_blocks_product")),
    "experts": ((expert_mlp, "prompt_product_triton"),),
}  # fmt: skip


@pytest.mark.parametrize("graphs", ["on", "off"], ids=["graphs", "eager"])
@pytest.mark.parametrize("form", REACHED)
def test_nothing_is_compiled_once_an_engine_serves(
    toy_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    graphs: str,
):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels for many rows are those of Hopper GPUs")
    if form in STORED:
        path = tmp_path / "quantised"
        write_quantised(toy_checkpoint("llama", **(SHAPE if form == "int4" else WIDER)), path, STORED[form])
    else:
        path = toy_checkpoint("qwen3_moe", **SHAPE, moe_intermediate_size=128)
    reached = {}
    for module, name in REACHED[form]:
        launch = getattr(module, name)

        def counted(*given: object, launch=launch, name=name, **options: object) -> object:
            reached[name] = reached.get(name, 0) + 1
            return launch(*given, **options)

        monkeypatch.setattr(module, name, counted)
    config = EngineConfig(
        model=str(path), device="cuda", dtype="bfloat16", pages=400, max_context=640, chunk_size=CHUNK,
        max_batch=MAX_BATCH, max_running=MAX_RUNNING, graphs=graphs, no_draft=True,
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=True)
    for _, run in loader.phases():
        run()
    engine = loader.engine()
    engine.begin_watch()
    if graphs == "off":
        reached.clear()  # a dry run reaches them, too
    workload = Workload(engine)
    workload.every_step()
    workload.every_prompt(CHUNK)
    assert set(reached) == {name for _, name in REACHED[form]}
    assert not nothing_late(engine)
