"""The dry run before serving finds every kernel variant of attention over latents, too."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baton.engine.config import EngineConfig
from baton.engine.loader import EngineLoader
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.unit.engine.warmup.test_variants import CHUNK, TREE, as_on_a_gpu, planned, workload

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
assert as_on_a_gpu

KERNELS = {"_store_latent_kernel", "_latent_kernel", "_expanded_kernel", "_route_kernel", "_expert_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_dry_run_finds_every_variant_of_a_latent_model(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, as_on_a_gpu: None, role: str
):
    target = toy_checkpoint("deepseek_v3", first_k_dense_replace=3, num_hidden_layers=4, kv_lora_rank=64)
    head = write_head(tmp_path / "head", head_config(2, (0, 1, 2)), head_tensors())
    config = EngineConfig(
        model=str(target), draft=str(head), device="cpu", dtype="bfloat16", pages=64, max_context=200,
        chunk_size=CHUNK, max_batch=5, max_running=9, spec_adaptive="off", **TREE,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as on_a_cpu:
        on_a_cpu.setattr(torch.Tensor, "is_cuda", property(lambda tensor: False), raising=False)
        loader = EngineLoader(config, has_drafter=role == "decode")
        for _, run in loader.phases():
            run()
    engine = loader.engine()
    reach = replace(loader.reach(), prompt_rows=CHUNK)
    known = planned(engine, reach)
    asked = {launch.variant for launch in workload(engine, reach, seed=1, num_forwards=10)}
    ours = {variant for variant in asked if variant[0] in KERNELS}
    reached = KERNELS - ({"_expanded_kernel"} if role == "decode" else set())  # decode has no long prompts
    assert {variant[0] for variant in ours} == reached
    assert ours <= known, sorted(ours - known)
