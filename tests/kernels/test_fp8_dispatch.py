"""Which kernel multiplies weights in 8 bits, by rows, dtype and device."""

import pytest
import torch
from baton.engine.models.quant.config import Fp8Form
from baton.engine.models.quant.fp8_projection import Fp8Projection
from baton.kernels import fp8_linear
from baton.kernels.fp8_rows import scaled_fp8, sum_fp8
from baton.kernels.fp8_scales import FP8, Fp8Weight
from baton.kernels.int4_rows import sum_int4_triton
from baton.kernels.int4_values import Int4Weight
from baton.kernels.normed_linear import UnscaledRows
from baton.kernels.triton_jit import planned_launches
from torch._subclasses.fake_tensor import FakeTensorMode

OUT, IN = 512, 256
FEW, ROUNDED = ["_fp8_few_rows_kernel"], ["_quantise_kernel", "_fp8_kernel"]


@pytest.mark.parametrize("has_blocks", [False, True])
def test_up_to_four_rows_of_bfloat16_are_not_rounded(monkeypatch: pytest.MonkeyPatch, has_blocks: bool):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability[0])

    def names(num_rows: int, dtype: torch.dtype = torch.bfloat16) -> list[str]:
        with FakeTensorMode(), planned_launches() as found:
            x = torch.empty(num_rows, IN, dtype=dtype, device="cuda")
            weight = torch.empty(OUT, IN, dtype=FP8, device="cuda")
            scales = torch.empty((OUT // 128, IN // 128) if has_blocks else (OUT,), device="cuda")
            fp8_linear.fp8_linear(x, weight, scales)
        return [launch.variant[0] for launch in found]

    assert names(1) == names(1, torch.float16) == ["_fp8_rows_kernel"]
    assert names(2) == names(4) == FEW
    assert names(5) == names(2, torch.float16) == names(4, torch.float16) == ROUNDED
    capability[0], dequantised = (8, 0), []
    monkeypatch.setattr(fp8_linear, "fp8_linear_reference", lambda x, *given: dequantised.append(len(x)))
    assert names(1) == names(2) == []
    assert dequantised == [1, 2]


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
