"""Weights of 4-bit integers: where their bits lie, and which kernel multiplies them, by rows and device."""

from collections.abc import Callable

import pytest
import torch
from baton.engine.warmup.variants import sizes
from baton.kernels import int4_cpu, int4_fragments, int4_mma, int4_rows, mxfp4
from baton.kernels.int4_linear import MAX_MMA_ROWS, MAX_ROWS, int4_linear
from baton.kernels.int4_values import (
    UNITS,
    Int4Weight,
    check_int4,
    dequantise_int4,
    pack_groups,
    pack_int4,
    unit_of,
    unpack_groups,
    unpack_int4,
)
from baton.kernels.silu_mul import silu_mul_reference
from baton.kernels.triton_jit import Launch, planned_launches
from torch._subclasses.fake_tensor import FakeTensorMode

IN = 4096
WIDE_OUT, NARROW_OUT = 28672, 4096


@pytest.mark.parametrize("unit", UNITS)
def test_bits_of_a_word_are_the_operands_of_a_thread(unit: int):
    values = torch.randint(0, 16, (3, 2 * unit), generator=torch.Generator().manual_seed(1))
    words = pack_int4(values, unit)
    for row in range(3):
        for column in range(2 * unit):
            at, within = divmod(column, unit)
            i, j, t, e = within // 32, within // 8 % 4, within // 2 % 4, within % 2
            word = int(words[row, at * unit // 8 + unit // 32 * t + i])
            assert word >> 4 * (j + 4 * e) & 15 == int(values[row, column]), (row, column)
    assert torch.equal(unpack_int4(words, unit), values.to(torch.uint8))


def test_values_of_mxfp4_lie_where_one_shift_makes_them_bfloat16():
    all_places = [
        tuple(bit + by for bit in range(4) for bits, by in runs if bits >> bit & 1) for runs in mxfp4.PLACES
    ]
    assert sorted(sum(all_places, ())) == list(range(16))
    for shift, places in zip((0, 3, 6), all_places, strict=False):
        assert tuple(place + shift for place in places) == (6, 7, 8, 15)
    halves = torch.randint(0, 256, (5, 8, 16), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    scales = torch.full((5, 8), 127, dtype=torch.uint8)
    words, packed = mxfp4.pack_mxfp4(halves, scales)
    values = mxfp4.decode_mxfp4(halves, scales, torch.float32).flatten(1)
    assert torch.equal(mxfp4.unpack_mxfp4(words, packed, 256, torch.float32), values)
    for quarter, shift in enumerate((0, 3, 6)):
        bits = (words.to(torch.int32) << shift & 0x81C0).to(torch.int16).view(torch.bfloat16)
        wanted = values.view(5, 2, 4, 32)[:, :, quarter].flatten(1)
        assert torch.equal(bits.to(torch.float64), wanted.to(torch.float64) * 2.0**-126), quarter


def test_words_of_groups_hold_any_scale_and_zero_point():
    scales = torch.tensor([[0.5, -0.25, 65504.0, 6e-8, 0.0]], dtype=torch.float16)
    zeros = torch.tensor([[0, 16, 8, 1, 15]], dtype=torch.uint8)
    found_scales, found_zeros = unpack_groups(pack_groups(scales, zeros))
    assert torch.equal(found_scales, scales.float())
    assert torch.equal(found_zeros, zeros.float())


@pytest.mark.parametrize(("in_size", "group"), [(96, 64), (96, 24), (100, 32), (64, 128)])
def test_groups_that_no_unit_divides_are_refused(in_size: int, group: int):
    with pytest.raises(ValueError, match=f"{in_size} inputs in groups of {group}"):
        unit_of(in_size, group)


def test_parts_that_do_not_fit_are_refused():
    weight, groups = torch.zeros(16, 32, dtype=torch.int32), torch.zeros(2, 16, dtype=torch.int32)
    assert check_int4("op", weight, groups) == 128
    for wrong in (
        (weight.long(), groups),
        (weight, groups[:, :8]),
        (weight.t(), groups),
        (weight, groups.half()),
    ):
        with pytest.raises(ValueError, match="op: "):
            check_int4("op", *wrong)
    x = torch.zeros(2, 256)
    for arguments, message in (
        ((x[:, :128], weight, groups), "does not fit weight"),
        ((x, weight, groups, torch.zeros(8)), "expected \\[N\\]"),
        ((x, weight[:15], groups[:, :15], None, True), "are odd"),
    ):
        with pytest.raises(ValueError, match=message):
            int4_linear(*arguments)


@pytest.mark.parametrize("group", UNITS)
def test_the_kernel_of_a_cpu_multiplies_with_the_values(group: int):
    """Of strided rows, as exactly as a product with the values in bfloat16."""
    made = torch.Generator().manual_seed(3)
    values = torch.randint(0, 16, (48, 4 * group), generator=made)
    zeros = torch.randint(0, 17, (4, 48), generator=made).to(torch.uint8)
    scales = (0.002 + 0.01 * torch.rand(4, 48, generator=made)).to(torch.float16)
    exact = dequantise_int4(pack_int4(values, group), pack_groups(scales, zeros), torch.float32)
    assert int4_cpu.can_pack(torch.device("cpu"), torch.bfloat16, 48, group)
    packed = int4_cpu.pack_for_cpu(values, scales, zeros)
    wide = torch.full((9, 4 * group + 8), float("nan"), dtype=torch.bfloat16)
    wide[:, : 4 * group] = torch.randn(9, 4 * group, generator=made)
    x, bias = wide[:, : 4 * group], torch.randn(48, generator=made).to(torch.bfloat16)
    for given in (None, bias):
        y = x.float() @ exact.t() + (0 if given is None else given.float())
        for is_gated in (False, True):
            expected = silu_mul_reference(y) if is_gated else y
            found = int4_linear(x, *packed, given, is_gated).float()
            assert float((found - expected).norm() / expected.norm()) < (0.01 if is_gated else 0.004)
    found = int4_cpu.unpack_from_cpu(*packed, torch.float32)
    assert float((found - exact).norm() / exact.norm()) < 0.004
    with pytest.raises(ValueError, match="int4_cpu_linear: x"):
        int4_linear(x[:, 1:], *packed)
    for other in ((torch.float32, 48, group), (torch.bfloat16, 40, group), (torch.bfloat16, 48, 24)):
        assert not int4_cpu.can_pack(torch.device("cpu"), *other)
    assert not int4_cpu.can_pack(torch.device("cuda"), torch.bfloat16, 48, group)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Launch]]:
    """The launches of a product on a GPU of the given capability, which need not be there."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")

    def plan(
        num_rows: int,
        num_weights: int,
        capability: tuple[int, int],
        *,
        is_gated: bool = False,
        group: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        **options: bool,
    ) -> list[Launch]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        with FakeTensorMode(), planned_launches() as found:
            x = torch.empty(num_rows, IN, dtype=dtype, device="cuda")
            weight = torch.empty(num_weights, IN // 8, dtype=torch.int32, device="cuda")
            groups = torch.empty(IN // group, num_weights, dtype=torch.int32, device="cuda")
            y = int4_linear(x, weight, groups, None, is_gated, **options)
            assert y.shape == (num_rows, num_weights // 2 if is_gated else num_weights)
        return found

    return plan


def names(launches: list[Launch]) -> list[str]:
    return [launch.variant[0] for launch in launches]


def test_rows_and_devices_choose_the_kernel(plan: Callable[..., list[Launch]]):
    wgmma, split = ["_int4_wgmma_kernel"], ["_int4_wgmma_kernel", "_add_splits_kernel"]
    few = ["_int4_rows_kernel"]
    for count, is_gated in ((1, False), (3, True), (int4_rows.MAX_ROWS, False)):
        for capability in ((8, 0), (9, 0), (10, 0)):
            assert names(plan(count, WIDE_OUT, capability, is_gated=is_gated)) == few
    more = int4_rows.MAX_ROWS + 1
    assert names(plan(more, NARROW_OUT, (9, 0))) == ["_int4_mma_kernel"]
    assert names(plan(more, WIDE_OUT, (9, 0), is_gated=True)) == wgmma
    assert names(plan(1, NARROW_OUT, (9, 0), group=32)) == ["_int4_mma_kernel"]
    assert names(plan(1, NARROW_OUT, (9, 0), dtype=torch.float16)) == ["_int4_mma_kernel"]
    assert names(plan(9, NARROW_OUT, (9, 0))) == split
    assert names(plan(MAX_ROWS, WIDE_OUT, (9, 0), is_gated=True)) == wgmma
    assert names(plan(MAX_ROWS + 1, NARROW_OUT, (9, 0))) == ["_dequantise_kernel"]
    for capability in ((8, 0), (8, 9), (10, 0)):
        assert names(plan(MAX_MMA_ROWS, WIDE_OUT, capability)) == ["_int4_mma_kernel"]
        assert names(plan(MAX_MMA_ROWS + 1, WIDE_OUT, capability)) == ["_dequantise_kernel"]
    assert names(plan(1, NARROW_OUT, (7, 5))) == ["_dequantise_kernel"]


def test_a_gluon_that_is_not_known_is_not_used(
    plan: Callable[..., list[Launch]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(int4_fragments, "has_gluon", lambda: False)
    assert names(plan(int4_rows.MAX_ROWS, NARROW_OUT, (9, 0))) == ["_int4_rows_kernel"]
    assert names(plan(int4_rows.MAX_ROWS + 1, NARROW_OUT, (9, 0))) == ["_dequantise_kernel"]


def test_products_that_do_not_depend_on_the_rows_take_one_variant(plan: Callable[..., list[Launch]]):
    """Without splits, whose number depends on the rows."""
    for capability in ((9, 0), (8, 0)):
        for is_gated in (False, True):
            found = [
                launch
                for count in (1, 8, 9, 64, 300)
                for launch in plan(count, WIDE_OUT, capability, is_gated=is_gated, is_invariant=True)
            ]
            assert len(found) == 5
            assert len({launch.variant for launch in found}) == 1


@pytest.mark.parametrize("num_weights", [1024, 4096, 6144, WIDE_OUT])
def test_variants_of_all_rows_are_those_that_a_dry_run_meets(
    plan: Callable[..., list[Launch]], num_weights: int
):
    for capability in ((9, 0), (8, 0)):
        planned = {launch.variant for count in sizes(512) for launch in plan(count, num_weights, capability)}
        for count in (1, 2, 3, 4, 5, 7, 9, 15, 17, 31, 33, 63, 65, 100, 127, 129, 200, 255, 257, 300):
            for launch in plan(count, num_weights, capability):
                assert launch.variant in planned, (count, launch.variant)


@pytest.mark.slow
def test_the_kernel_for_older_gpus_compiles_for_an_a100(compiled_for_a100: list[tuple[str, object]]):
    """Without instructions that came with Hopper."""
    for group in UNITS:
        for dtype, is_gated in ((torch.bfloat16, True), (torch.float16, False)):
            for num_weights, num_rows in ((NARROW_OUT, 1), (WIDE_OUT, 1), (WIDE_OUT, 16)):
                int4_mma.int4_mma_triton(
                    torch.zeros(num_rows, IN, dtype=dtype),
                    torch.zeros(num_weights, IN // 8, dtype=torch.int32),
                    torch.zeros(IN // group, num_weights, dtype=torch.int32),
                    None,
                    is_gated=is_gated,
                )
    for is_gated in (False, True):
        for num_rows in range(1, int4_rows.MAX_ROWS + 1):
            words, groups = torch.zeros(NARROW_OUT, IN // 8).int(), torch.zeros(IN // 128, NARROW_OUT).int()
            weight, x = Int4Weight(words, groups), torch.zeros(num_rows, IN, dtype=torch.bfloat16)
            int4_rows.int4_rows_triton(x, weight, is_gated=is_gated, has_pairs=True)
    assert len(compiled_for_a100) == 18 + 2 * int4_rows.MAX_ROWS
    for _, kernel in compiled_for_a100:
        assert "mma.sync" in kernel.asm["ptx"]
        assert "griddepcontrol" not in kernel.asm["ptx"]
        assert kernel.metadata.shared <= 48 * 1024
