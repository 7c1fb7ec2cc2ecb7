"""Projections with 4-bit integers share launches with norms and sums where a kernel does it."""

import pytest
import torch
from baton.engine.models.quant.config import Int4Form
from baton.engine.models.quant.int4_projection import Int4Projection
from baton.kernels import int4_cpu
from baton.kernels.int4_rows import MAX_ROWS, scaled_int4, sum_int4
from baton.kernels.normed_linear import UnscaledRows
from baton.kernels.rms_norm import NextNorm

HIDDEN, OUT = 256, 64


def projection(group: int, dtype: torch.dtype = torch.float32, *, has_order: bool = False) -> Int4Projection:
    """A finished one with random integers, with `has_order` of inputs that are in any group."""
    made = torch.Generator().manual_seed(0)
    form = Int4Form(packing="gptq", group_size=group, zero_offset=1, has_order=has_order)
    found = Int4Projection(form, "p.", HIDDEN, {"one": OUT}, bias=False, dtype=dtype, device="cpu")
    for name, tensor in found.tensors("p."):
        if name.endswith("scales"):
            tensor.copy_(0.01 + 0.01 * torch.rand(tensor.shape, generator=made))
        elif name.endswith("g_idx"):
            groups = torch.arange(HIDDEN, dtype=torch.int32) // group
            tensor.copy_(groups[torch.randperm(HIDDEN, generator=made)] if has_order else groups)
        else:
            tensor.copy_(torch.randint(-(2**31), 2**31 - 1, tensor.shape, generator=made))
    found.finish()
    return found


@pytest.fixture
def no_cpu_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are packed as for a GPU."""
    monkeypatch.setattr(int4_cpu, "can_pack", lambda *given: False)


@pytest.mark.parametrize("has_order", [False, True])
def test_joined_products_meet_the_inputs_in_their_order(has_order: bool):
    made, layer = torch.Generator().manual_seed(1), projection(64, has_order=has_order)
    assert (layer.order is not None) is has_order
    x, residual = (torch.randn(3, size, generator=made) for size in (HIDDEN, OUT))
    total, rows = layer.add(x, residual, NextNorm(torch.ones(OUT), 1e-5))
    torch.testing.assert_close(total, layer(x) + residual)
    assert rows is not None
    unscaled = UnscaledRows(x, x.pow(2).sum(1, keepdim=True), 1e-5)
    normed = x * unscaled.scale()
    torch.testing.assert_close(layer(unscaled), layer(normed), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.gated(unscaled), layer.gated(normed), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("no_cpu_form")
def test_rows_are_joined_where_a_kernel_joins_them():
    for group, dtype, joined in (
        (128, torch.bfloat16, MAX_ROWS), (64, torch.float32, MAX_ROWS), (32, torch.bfloat16, 0),
        (128, torch.float16, 0),
    ):  # fmt: skip
        assert projection(group, dtype).joined_rows == joined, (group, dtype)


def test_the_form_of_a_cpu_is_not_joined():
    assert projection(64, torch.bfloat16).joined_rows == 0


def test_rows_that_no_tile_takes_are_refused():
    layer = projection(64)
    for x in (torch.zeros(MAX_ROWS + 1, HIDDEN), torch.zeros(1, HIDDEN - 8)):
        with pytest.raises(ValueError, match="normed int4: rows"):
            sum_int4(x, layer._joined, torch.zeros(len(x), OUT), None)
    narrow = projection(32)._joined
    with pytest.raises(ValueError, match="units of 32"):
        scaled_int4(UnscaledRows(torch.zeros(1, HIDDEN), torch.ones(1, 1), 1e-5), narrow)
