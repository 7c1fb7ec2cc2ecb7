"""Laws of an engine's settings: what is not possible is one clear error, and "auto" follows the hardware."""

from pathlib import Path

import pytest
import torch
from baton.cluster.config.roles import DecodeConfig, PrefillConfig
from baton.engine.config import (
    EngineConfig,
    has_native_bfloat16,
    resolve_device,
    resolve_dtype,
)
from baton.engine.errors import CheckpointError, LifecycleError
from baton.engine.hub import resolve_checkpoint
from baton.engine.loader import EngineLoader
from baton.engine.runner.lifecycle import Lifecycle, Phase

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 avx2", True),
        ("flags : fpu amx_bf16", True),
        ("Features : fp asimd bf16", True),
        ("flags : fpu avx512f avx2", False),
        ("model name : bf16", False),
    ],
)
def test_native_bfloat16_is_read_from_the_cpu_flags(tmp_path, line, expected):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{line}\n")
    assert has_native_bfloat16(tmp_path / "cpuinfo") is expected
    assert not has_native_bfloat16(tmp_path / "absent")


def test_auto_dtype_follows_the_hardware_and_a_named_one_is_kept():
    assert resolve_dtype("auto", CPU) is (torch.bfloat16 if has_native_bfloat16() else torch.float32)
    assert resolve_dtype("float32", CPU) is torch.float32
    with pytest.raises(CheckpointError, match="float16"):
        resolve_dtype("float16", CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_names_the_remedy():
    assert resolve_device("auto") == CPU
    with pytest.raises(CheckpointError, match="--device cpu"):
        resolve_device("cuda")


@pytest.mark.parametrize("model", ["/no/such/dir", "./absent", "justaname", "a/b/c"])
def test_a_model_that_is_no_directory_and_no_hub_id_names_the_value(model):
    with pytest.raises(CheckpointError, match=model.replace("/", "/")):
        resolve_checkpoint(model)


@pytest.mark.parametrize(("error", "told"), [(TimeoutError(), "TimeoutError"), (OSError("no\nroute"), "no")])
def test_a_failed_download_is_one_line_even_without_a_reason(monkeypatch, error, told):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("baton.engine.hub.snapshot_download", fail)
    with pytest.raises(CheckpointError, match=rf"owner/name.*\({told}.*\); name a directory"):
        resolve_checkpoint("owner/name")


def load(path, **settings):
    settings = {"has_drafter": False, **settings}
    has_drafter = settings.pop("has_drafter")
    loader = EngineLoader(
        EngineConfig(model=str(path), device="cpu", dtype="float32", **settings), has_drafter=has_drafter
    )
    for _, run in loader.phases():
        run()
    return loader.engine()


def test_a_missing_shard_or_too_long_a_context_is_refused_with_its_value(toy_copy):
    path = toy_copy("llama", shard_size="40KB")
    with pytest.raises(CheckpointError, match=r"9999.*512"):
        load(path, max_context=9999)
    victim = sorted(path.glob("*.safetensors"))[0]
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        load(path)


def test_kv_memory_too_small_for_a_page_names_the_cost(toy_checkpoint):
    with pytest.raises(CheckpointError, match="one page costs"):
        load(toy_checkpoint("llama"), kv_memory_mb=1, page_size=4096)


def test_graphs_are_captured_when_asked_for_and_only_then(toy_checkpoint):
    settings = {"pages": 8, "max_running": 2, "chunk_size": 4}
    assert load(toy_checkpoint("llama"), **settings).graphs is None
    engine = load(toy_checkpoint("llama"), graphs="on", **settings)
    assert sum(engine.graph_counts.values()) > 0
    assert engine.lifecycle.phase is Phase.SERVING


def test_engine_settings_take_the_fields_of_a_role():
    prefill = EngineConfig.of(PrefillConfig(model="m", chunk_size=7, graphs="on", graph_self_test=False))
    decode = EngineConfig.of(DecodeConfig(model="m", max_running=3, spec_steps=2))
    assert (prefill.chunk_size, prefill.graphs, prefill.graph_self_test) == (7, "on", False)
    assert (decode.max_running, decode.spec_steps, decode.graphs) == (3, 2, "auto")


def test_a_head_for_another_hidden_size_names_both_numbers(toy_checkpoint, tmp_path):
    head = tmp_path / "head"
    head.mkdir()
    source = Path(__file__).parents[3] / "assets" / "smollm2-135m-eagle3" / "config.json"
    (head / "config.json").write_text(source.read_text())
    with pytest.raises(CheckpointError, match=r"576.*64"):
        load(toy_checkpoint("llama", num_hidden_layers=28, vocab_size=49152), draft=str(head))


def test_pages_cover_what_the_memory_holds(toy_checkpoint):
    engine = load(toy_checkpoint("llama"), kv_memory_mb=8)
    cost = engine.pool.page_bytes
    assert engine.pool.num_pages == (8 << 20) // cost
    assert engine.num_pages == engine.pool.num_pages - 1
    assert load(toy_checkpoint("llama"), pages=7).num_pages == 7


@pytest.mark.parametrize("to", [Phase.AUX_CONFIGURED, Phase.CAPTURED, Phase.SERVING])
def test_a_phase_out_of_order_names_both(to):
    lifecycle = Lifecycle()
    with pytest.raises(LifecycleError, match=f"{to.name}.*CREATED"):
        lifecycle.advance(to)
    with pytest.raises(LifecycleError, match=r"SERVING.*CREATED"):
        lifecycle.require(Phase.SERVING)


def test_phases_run_in_one_order_only(toy_checkpoint):
    loader = EngineLoader(EngineConfig(model=str(toy_checkpoint("llama")), device="cpu"), has_drafter=False)
    phases = dict(loader.phases())
    phases["load weights"]()
    with pytest.raises(LifecycleError, match=r"POOLS_ALLOCATED.*LOADED"):
        phases["allocate pools"]()
