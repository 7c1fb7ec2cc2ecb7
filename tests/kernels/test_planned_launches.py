"""Launches that are planned on tensors without values compile what the real launches then find compiled."""

from pathlib import Path

import pytest
import torch
from baton.engine.warmup.variants import sizes
from baton.kernels import context_attention, prompt_experts
from baton.kernels.context_attention import ContextKV
from baton.kernels.expert_mlp import ExpertForm, expert_mlp_triton
from baton.kernels.expert_products import SOME_SLOTS
from baton.kernels.fp8_experts import Fp8Matrices, fp8_experts_triton
from baton.kernels.fp8_scales import FP8
from baton.kernels.launch_plan import decode_launches, encode_launches
from baton.kernels.packed_experts import PackedMatrices, packed_experts_triton
from baton.kernels.rope import apply_rope_triton
from baton.kernels.select_rows import select_last_rows_triton
from baton.kernels.silu_mul import _silu_mul_kernel, silu_mul_triton
from baton.kernels.triton_jit import Compiled, Launch, planned_launches, watch_compilations
from baton.tests.kernels.cases import randn
from baton.tests.variants import second
from torch._subclasses.fake_tensor import FakeTensorMode


class DriverWithoutGpu:
    """Triton's driver of a GPU that is not there. `launcher_cls` notes the host stubs that are asked for."""

    def __init__(self) -> None:
        self.stubs: list[object] = []

    def launcher_cls(self, source: object, metadata: object) -> None:
        self.stubs.append(source)

    def get_current_device(self) -> int:
        return -2  # a kernel cache of its own beside that of any other device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DriverWithoutGpu:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from triton.runtime import driver

    absent = DriverWithoutGpu()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", absent)
    return absent


def test_a_planned_launch_compiles_the_variant_of_the_real_one(driver: DriverWithoutGpu):
    seen: list[Compiled] = []
    end = watch_compilations(seen.append)
    gate_up = randn(3, 512, dtype=torch.bfloat16)
    with planned_launches() as planned:
        silu_mul_triton(gate_up)
        silu_mul_triton(gate_up[:2])
    one, other = planned
    assert one.variant == other.variant, "the number of rows makes no variant"
    one.prepare()
    one.compile()
    assert [compiled.kernel for compiled in seen] == ["_silu_mul_kernel"]
    assert len(driver.stubs) == 1
    # The real launch finds it: this compiles, but does not run.
    real = (gate_up[1:], torch.empty(2, 256, dtype=torch.bfloat16), 256, 1, 512, 0)
    options = {"IS_GELU": False, "BLOCK": 1024, "CHAINED": False, "num_warps": 4}
    _silu_mul_kernel.warmup(*real, grid=(2, 1), **options)
    assert len(seen) == 1
    # The plant: another dtype is another variant.
    _silu_mul_kernel.warmup(*(x.float() if isinstance(x, torch.Tensor) else x for x in real), grid=(2, 1),
                            **options)  # fmt: skip
    assert len(seen) == 2
    end()


def test_a_plan_collects_and_launches_nothing():
    x, tables = randn(3, 4, 32), (randn(3, 32), randn(3, 32))
    with planned_launches() as planned:
        apply_rope_triton(x, *tables)
        apply_rope_triton(x[:, 1:], *tables)
        select_last_rows_triton(randn(6, 64), torch.ones(3, dtype=torch.int64))
    assert [launch.variant[0] for launch in planned] == ["_rope_kernel"] * 2 + ["_select_last_rows_kernel"]
    assert "p_x:*float32/16" in planned[0].variant
    assert "HEAD_DIM=32" in planned[0].variant
    assert "p_accept_len:*int64" in planned[2].variant, "its address changes with the batch"
    assert str(planned[2]).startswith("_select_last_rows_kernel(p_hidden:*float32/16, ")


def test_the_attention_of_long_prompts_is_planned_kept_and_compiled(
    driver: DriverWithoutGpu, monkeypatch: pytest.MonkeyPatch
):
    """As on a Hopper GPU, where the buffers' descriptors are made before the dry run."""
    buffers = ContextKV(*(torch.zeros(4096, 8, 128, dtype=torch.bfloat16) for _ in range(2)))
    monkeypatch.setattr(context_attention, "can_run", lambda *_: True)
    buffers.prepare()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    with FakeTensorMode(allow_non_fake_inputs=True), planned_launches() as planned:
        for num_rows in (2048, 1500):
            q = torch.empty(num_rows, 32, 128, dtype=torch.bfloat16)
            starts, lens = torch.empty(2, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
            context_attention.context_attention(q, buffers, starts, starts, lens, 0.1)
    assert planned[0].variant == planned[1].variant, "the number of rows makes no variant"
    kept, _ = decode_launches(encode_launches(planned))
    assert kept.variant == planned[0].variant
    seen: list[Compiled] = []
    end = watch_compilations(seen.append)
    kept.prepare()
    kept.compile()
    planned[0].compile()
    end()
    assert [compiled.kernel for compiled in seen] == ["_wgmma_context_kernel"]


def planned_experts(num_rows: int, num_experts: int, top_k: int, held: int, inner: int = 64) -> list[Launch]:
    """The launches of `num_rows` rows, of whose experts the first `held` are here."""
    with FakeTensorMode(), planned_launches() as planned:
        x = torch.empty(num_rows, 128, dtype=torch.bfloat16)
        ids = torch.empty(num_rows, top_k, dtype=torch.int32)
        gate_up = torch.empty(held, 2 * inner, 128, dtype=torch.bfloat16)
        down = torch.empty(held, 128, inner, dtype=torch.bfloat16)
        form = ExpertForm(total=num_experts if held < num_experts else 0)
        expert_mlp_triton(x, ids, torch.empty(num_rows, top_k), gate_up, down, form=form)
    return planned


@pytest.mark.parametrize(
    ("num_experts", "top_k", "held"), [(128, 8, 128), (60, 4, 60), (8, 2, 8), (32, 4, 8)], ids=str
)
def test_a_dry_run_by_powers_of_two_plans_experts_of_any_number_of_rows(
    num_experts: int, top_k: int, held: int, monkeypatch: pytest.MonkeyPatch
):
    """As on a Hopper GPU: up to SOME_SLOTS slots of an expert on average in small tiles, then in others."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    monkeypatch.setattr(prompt_experts, "can_run", lambda device: True)
    first_prompt = -(-(SOME_SLOTS + 1) * num_experts // top_k)
    most = 2 * first_prompt + 3
    planned = [each for rows in sizes(most) for each in planned_experts(rows, num_experts, top_k, held)]
    known = {launch.variant for launch in planned}
    assert sum(variant[0] == "_prompt_kernel" for variant in known) == 2
    step = max(most // 100, 1)
    for num_rows in (*range(1, most, step), first_prompt - 1, first_prompt):
        asked = {launch.variant for launch in planned_experts(num_rows, num_experts, top_k, held)}
        assert asked <= known, num_rows
        takes_prompts = any(variant[0] == "_prompt_kernel" for variant in asked)
        assert takes_prompts == (num_rows >= first_prompt), num_rows
    kept = decode_launches(encode_launches(planned))
    assert {launch.variant for launch in kept} == known


GROUPS = {"mxfp4": 0, "int4": 128}  # of the forms in 4 bits


def planned_quantised(num_rows: int, num_experts: int, top_k: int, form: str) -> list[Launch]:
    """The launches of `num_rows` rows with experts in 4 or 8 bits."""
    with FakeTensorMode(), planned_launches() as planned:
        x = torch.empty(num_rows, 256, dtype=torch.bfloat16)
        ids, shares = torch.empty(num_rows, top_k, dtype=torch.int32), torch.empty(num_rows, top_k)
        sizes_of = (2 * 128, 256), (256, 128)
        if form.startswith("fp8"):
            blocks = form == "fp8 blocks"
            matrices = [
                Fp8Matrices(
                    torch.empty(num_experts, out, size, dtype=FP8),
                    torch.empty(num_experts, *((out // 128, size // 128) if blocks else (out,))),
                )
                for out, size in sizes_of
            ]
            fp8_experts_triton(x, ids, shares, *matrices)
        else:
            group = GROUPS[form]
            packed = [
                PackedMatrices(
                    torch.empty(num_experts, out, size // 4, dtype=torch.int16),
                    torch.empty(num_experts, size // (group or 128), out, dtype=torch.int32),
                    group,
                )
                for out, size in sizes_of
            ]
            packed_experts_triton(x, ids, shares, *packed)
    return planned


@pytest.mark.parametrize("form", [*GROUPS, "fp8", "fp8 blocks"])
@pytest.mark.parametrize(("num_experts", "top_k"), [second(128, 8), (60, 4), second(8, 2)], ids=str)
def test_a_dry_run_plans_quantised_experts_of_any_number_of_rows(num_experts: int, top_k: int, form: str):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    most = -(-300 * num_experts // top_k)  # behind the last border of the tiles, 256 slots an expert
    known = {
        launch.variant for rows in sizes(most) for launch in planned_quantised(rows, num_experts, top_k, form)
    }
    borders = {
        share * num_experts // top_k + more
        for share in (0, 1, 12, 13, 28, 29, 112, 113, 256)
        for more in (0, 1)
    }
    for num_rows in sorted({*range(1, most, max(most // 40, 1)), *borders} - {0}):
        asked = {launch.variant for launch in planned_quantised(num_rows, num_experts, top_k, form)}
        assert asked <= known, num_rows


def test_experts_whose_tiles_cannot_be_copied_keep_the_small_tiles(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    names = [{launch.variant[0] for launch in planned_experts(500, 8, 2, 8)}]
    monkeypatch.setattr(prompt_experts, "can_run", lambda device: True)
    names.append({launch.variant[0] for launch in planned_experts(500, 8, 2, 8, inner=72)})
    assert names == [{"_group_kernel", "_expert_kernel", "_combine_kernel"}] * 2, "no device, a cut step"
    x, whole = torch.empty(4, 64, dtype=torch.bfloat16), torch.empty(3 * 128 * 64 + 1, dtype=torch.bfloat16)
    matrices = whole[:-1].view(3, 128, 64)
    assert prompt_experts.can_multiply(x, matrices)
    assert not prompt_experts.can_multiply(x.float(), matrices.float())
    assert not prompt_experts.can_multiply(x, whole[1:].view(3, 128, 64)), "begins at no multiple of 16 bytes"
    assert not prompt_experts.can_multiply(x, matrices, matrices[:, :64].mT), "not contiguous"
