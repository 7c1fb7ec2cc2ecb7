"""Which kernel multiplies weights in 8 bits, by rows, dtype and device."""

from functools import partial

import pytest
import torch
from baton.engine.models.quant.config import Fp8Form
from baton.engine.models.quant.fp8_projection import Fp8Projection
from baton.kernels import fp8_linear, skinny_linear
from baton.kernels.fp8_rows import scaled_fp8, sum_fp8
from baton.kernels.fp8_scales import FP8, Fp8Weight
from baton.kernels.int4_rows import sum_int4_triton
from baton.kernels.int4_values import Int4Weight
from baton.kernels.normed_linear import UnscaledRows
from baton.kernels.triton_jit import planned_launches
from torch._subclasses.fake_tensor import FakeTensorMode

OUT, IN = 512, 256
FEW, ROUNDED = ["_fp8_few_rows_kernel"], ["_quantise_kernel", "_fp8_kernel"]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are planned as for an H200 with CUDA 13."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(skinny_linear, "shared_bytes", lambda device: skinny_linear.SHARED_BYTES)


def launched(
    num_rows: int,
    sizes: tuple[int, int] = (OUT, IN),
    dtype: torch.dtype = torch.bfloat16,
    *,
    has_blocks: bool = True,
    is_gated: bool = False,
    is_invariant: bool = False,
) -> list[str]:
    """The kernels of a product of `num_rows` rows with a weight of `sizes`."""
    out_size, in_size = sizes
    with FakeTensorMode(), planned_launches() as found:
        x = torch.empty(num_rows, in_size, dtype=dtype, device="cuda")
        weight = torch.empty(out_size, in_size, dtype=FP8, device="cuda")
        shape = (-(-out_size // 128), -(-in_size // 128)) if has_blocks else (out_size,)
        fp8_linear.fp8_linear(x, weight, torch.empty(shape, device="cuda"), None, is_gated, is_invariant)
    return [launch.variant[0] for launch in found]


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("has_blocks", [False, True])
def test_up_to_four_rows_of_bfloat16_are_not_rounded(monkeypatch: pytest.MonkeyPatch, has_blocks: bool):
    names = partial(launched, has_blocks=has_blocks)
    assert names(1) == names(1, dtype=torch.float16) == ["_fp8_rows_kernel"]
    assert names(2) == names(4) == FEW
    assert names(5) == names(2, dtype=torch.float16) == names(4, dtype=torch.float16) == names(64) == ROUNDED
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    dequantised: list[int] = []
    monkeypatch.setattr(fp8_linear, "fp8_linear_reference", lambda x, *given: dequantised.append(len(x)))
    assert names(1) == names(2) == []
    assert dequantised == [1, 2]


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("has_blocks", [False, True])
def test_the_library_multiplies_many_rows_where_it_can(monkeypatch: pytest.MonkeyPatch, has_blocks: bool):
    names = partial(launched, has_blocks=has_blocks)
    by_library = ["_quantise_kernel"]
    elsewhere = [*by_library, *(["_fp8_blocks_kernel"] if has_blocks else [])]
    assert names(68) == by_library
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert names(68) == elsewhere
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert names(68) == elsewhere


@pytest.mark.usefixtures("h200")
def test_a_smaller_last_block_and_many_outputs_are_the_librarys():
    for sizes in ((576, 7168), (2112, 7168), (4096, 400)):
        assert launched(68, sizes) == ["_quantise_kernel"]
    assert launched(36, (24576, 1536)) == ["_quantise_kernel"]
    assert launched(32, (24576, 1536)) == launched(64, (16384, 1536))[:2] == ROUNDED


@pytest.mark.usefixtures("h200")
def test_inputs_are_cut_where_few_tiles_of_blocks_leave_processors_idle():
    for sizes in ((4096, 4096), (4096, 14336), (6144, 4096)):
        assert launched(8, sizes) == [*ROUNDED, "_add_splits_kernel"]
        assert launched(8, sizes, is_invariant=True) == ROUNDED, "one chain of products whatever the rows"
    assert launched(8, (28672, 4096), is_gated=True) == launched(8, (24576, 1536)) == ROUNDED
    assert fp8_linear.num_splits(64, 4096) == 4
    assert fp8_linear.num_splits(32, 14336) == 8
    assert fp8_linear.num_splits(4, 1024) == 2, "a part has four blocks at least"


@pytest.mark.slow
def test_products_fit_the_shared_memory_of_an_l40(
    compiled_for_l40: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch
):
    num_bytes = 99 * 1024
    monkeypatch.setattr(skinny_linear, "shared_bytes", lambda device: num_bytes)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    for has_blocks in (False, True):
        for out_size, in_size, is_gated in ((28672, 4096, True), (4096, 14336, False), (28672, 8320, True)):
            weight = torch.zeros(out_size, in_size, dtype=FP8)
            scales = torch.zeros((out_size // 128, in_size // 128) if has_blocks else (out_size,))
            for num_rows in (32, 64):
                x = torch.zeros(num_rows, in_size, dtype=torch.bfloat16)
                fp8_linear.fp8_linear_triton(x, weight, scales, is_gated=is_gated, is_rounded=True, splits=0)
    used = [kernel.metadata for name, kernel in compiled_for_l40 if name == "_fp8_kernel"]
    assert max(each.shared for each in used) <= num_bytes
    assert min(each.num_stages for each in used) >= 2


def test_projections_join_as_many_rows_as_are_not_rounded():
    form = Fp8Form(has_blocks=False)
    for dtype, joined in ((torch.bfloat16, 4), (torch.float32, 4), (torch.float16, 1)):
        found = Fp8Projection(form, "p.", IN, {"one": OUT}, bias=False, dtype=dtype, device="cpu")
        assert found.joined_rows == joined, dtype


def test_rows_and_residuals_that_do_not_fit_are_refused():
    weight = Fp8Weight(torch.zeros(OUT, IN, dtype=FP8), torch.ones(OUT))
    for x in (torch.zeros(5, IN), torch.zeros(1, IN - 8)):
        with pytest.raises(ValueError, match="normed fp8: rows"):
            sum_fp8(x, weight, torch.zeros(len(x), OUT), None)
    odd = Fp8Weight(torch.zeros(384, IN, dtype=FP8), torch.ones(3, 2))
    rows = UnscaledRows(torch.zeros(1, IN), torch.ones(1, 1), 1e-5)
    with pytest.raises(ValueError, match="384 gated outputs; a multiple of 256"):
        scaled_fp8(rows, odd, is_gated=True)
    words, groups = torch.zeros(OUT, IN // 8, dtype=torch.int32), torch.zeros(2, OUT, dtype=torch.int32)
    for shape in ((3, OUT), (2, OUT - 8)):
        with pytest.raises(ValueError, match="does not fit 2 rows of 512"):
            sum_int4_triton(torch.zeros(2, IN), Int4Weight(words, groups), torch.zeros(shape), None)
