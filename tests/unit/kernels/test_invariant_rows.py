"""The CPU's batch-invariant operations: the right values, and equal bits in any number of rows."""

import pytest
import torch
import torch.nn.functional as F
from baton.kernels.invariant_linear import invariant_logits
from baton.kernels.invariant_rows import (
    COLUMNS,
    attend_rows,
    exp_rounded,
    linear_rows,
    rms_norm_rows,
    rope_rows,
    silu_mul_rows,
    sum_halves,
)
from baton.kernels.logits import BLOCK_VOCABULARY, float32_logits
from baton.kernels.paged_attention import causal_band, extend_attention

DTYPES = (torch.float32, torch.bfloat16)
COUNTS = (1, 2, 4, 15, 16, 17, 33)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_exp_is_right_to_a_unit_in_the_last_place_and_saturates():
    x = torch.linspace(-87, 88, 100_001)
    expected = x.double().exp()
    assert float(((exp_rounded(x) - expected) / expected).abs().max()) < 2.0**-22
    edges = exp_rounded(torch.tensor([float("-inf"), -1000.0, 0.0, 1000.0]))
    assert edges[:3].tolist() == [0.0, 0.0, 1.0]
    assert 1e38 < float(edges[3]) < float("inf")


@pytest.mark.parametrize("width", [1, 2, 48, 63, 64, 576])
def test_halves_add_up(width: int):
    x = randn(3, 5, width)
    torch.testing.assert_close(sum_halves(x), x.sum(-1, keepdim=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (33, 17), (576, 1536)])
def test_a_row_of_a_product_has_the_same_bits_in_any_number(dtype: torch.dtype, outputs: int, inputs: int):
    x, weight = randn(40, inputs, dtype=dtype), randn(outputs, inputs, seed=1, dtype=dtype)
    bias = randn(outputs, seed=2, dtype=dtype)
    whole, logits = linear_rows(x, weight, bias), invariant_logits(x, weight)
    for count in COUNTS:
        assert torch.equal(linear_rows(x[-count:], weight, bias), whole[-count:])
        assert torch.equal(invariant_logits(x[-count:], weight), logits[-count:])
    torch.testing.assert_close(whole, F.linear(x, weight, bias))
    assert linear_rows(x[:0], weight).shape == (0, outputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_norm_gate_and_rotation_has_the_same_bits_in_any_number(dtype: torch.dtype):
    x, weight, tables = (
        randn(40, 4, 34, dtype=dtype),
        randn(34, seed=1, dtype=dtype),
        randn(2, 40, 34, seed=2),
    )
    cos, sin = tables.to(dtype)
    normed, gated, rotated = rms_norm_rows(x, weight, 1e-5), silu_mul_rows(x), rope_rows(x, cos, sin)
    for count in COUNTS:
        assert torch.equal(rms_norm_rows(x[-count:], weight, 1e-5), normed[-count:])
        assert torch.equal(silu_mul_rows(x[-count:]), gated[-count:])
        assert torch.equal(rope_rows(x[-count:], cos[-count:], sin[-count:]), rotated[-count:])
    torch.testing.assert_close(normed, F.rms_norm(x, (34,), weight, 1e-5), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(gated, F.silu(x[..., :17]) * x[..., 17:], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [40, COLUMNS, 2 * COLUMNS + 44])
def test_a_row_of_attention_has_the_same_bits_in_any_cut(dtype: torch.dtype, length: int):
    q, keys, values = randn(30, 6, 16, dtype=dtype), *randn(2, length, 2, 16, seed=1, dtype=dtype)
    whole = attend_rows(q, keys, values, length - 29, 0.25)
    for count in (1, 3, 4, 7, 30):
        for start in range(0, 30 - count + 1, count):
            end = length - 30 + start + count
            some = attend_rows(q[start : start + count], keys[:end], values[:end], end - count + 1, 0.25)
            assert torch.equal(some, whole[start : start + count])
    band = causal_band(length, 30, dtype, torch.device("cpu"))
    expected = extend_attention(q, keys, values, band, 0.25)
    torch.testing.assert_close(whole, expected, atol=1e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)


def test_logits_are_sums_in_float32_of_products_in_bfloat16():
    vocab = BLOCK_VOCABULARY + 3
    x, weight = randn(5, 64, dtype=torch.bfloat16), randn(vocab, 64, seed=1, dtype=torch.bfloat16)
    expected = x.double() @ weight.double().T
    for logits in (float32_logits(x, weight), invariant_logits(x, weight)):
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=1e-5)
    assert float32_logits(x.float(), weight.float()).dtype == torch.float32
