"""The kernels of steps of few rows against their definitions, one case each, see `cases`."""

from collections.abc import Callable, Iterator

import torch
from baton.kernels import layer_products, normed_linear, rms_norm, skinny_linear
from baton.kernels.layer_products import ChainShape, LayerWeights, NextLayer, PhaseShape
from baton.kernels.normed_linear import NextNorm
from baton.tests.kernels.cases import DTYPES, FLOAT32, NAN, assert_close, randn

SMALL_TILE = skinny_linear.SkinnyShape(out=16, inner=32, num_warps=4, num_stages=2)


def check_norm_between_products(
    device: str, sizes: tuple[int, int, int], has_bias: bool, offset: float | None, dtype: torch.dtype
) -> None:
    """Two products with a residual sum and a norm between them; rows beside x are NaN."""
    num_rows, in_size, width = sizes
    wide = torch.full((num_rows + 1, in_size + 3), NAN, dtype=dtype)
    wide[:num_rows, :in_size] = randn(num_rows, in_size, dtype=dtype)
    residual = 3 * randn(num_rows, width, dtype=dtype, seed=4)
    first = randn(width, in_size, dtype=dtype, seed=1) / in_size**0.5
    second = randn(2 * 24, width, dtype=dtype, seed=2) / width**0.5
    biases = [randn(n, dtype=dtype, seed=3) if has_bias else None for n in (width, 2 * 24)]
    norm_weight = 1 + 0.3 * randn(width, dtype=dtype, seed=5)
    x = wide.to(device)[:num_rows, :in_size]

    def moved(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.to(device)

    norm = NextNorm(norm_weight.to(device), 1e-2, offset)
    total, rows = normed_linear.sum_linear_triton(
        x, moved(first), moved(biases[0]), moved(residual), norm, shape=SMALL_TILE
    )
    assert rows is not None
    packed = wide[:num_rows, :in_size].contiguous()
    expected, kept = normed_linear.sum_linear_reference(
        packed, first, biases[0], residual, NextNorm(norm_weight, 1e-2, offset)
    )
    assert kept is not None
    assert_close(total, expected, bfloat16=3.2e-2)
    assert_close(rows.z, kept.z, bfloat16=3.2e-2)
    assert_close(rows.scale(), kept.scale())
    alone, no_rows = normed_linear.sum_linear_triton(
        x, moved(first), moved(biases[0]), moved(residual), None, shape=SMALL_TILE
    )
    assert no_rows is None
    assert torch.equal(alone, total)
    normed = rms_norm.rms_norm_reference(expected, norm_weight, 1e-2, offset)
    for is_gated in (False, True):
        y = normed_linear.scaled_linear_triton(
            rows, moved(second), moved(biases[1]), is_gated=is_gated, shape=SMALL_TILE
        )
        assert_close(
            y,
            normed_linear.scaled_linear_reference(kept, second, biases[1], is_gated=is_gated),
            bfloat16=3.2e-2,
        )
        apart = skinny_linear.gated_linear_reference if is_gated else torch.nn.functional.linear
        assert_close(y, apart(normed, second, biases[1]), bfloat16=6e-2)


def check_layer_products(
    device: str, num_rows: int, is_last: bool, prefetches: bool, dtype: torch.dtype
) -> None:
    """Each product of a chain in a launch of its own, by three programs that have one to five tiles each; on a
    GPU also all of them in one launch.
    """
    width, attended_size, inner, outputs = 72, 40, 100, 50
    sizes = (width, attended_size), (2 * inner, width), (width, inner), (outputs, width)
    weights = [randn(*size, dtype=dtype, seed=i) / size[1] ** 0.5 for i, size in enumerate(sizes)]
    norms = [1 + 0.3 * randn(width, dtype=dtype, seed=5 + i) for i in range(2)]
    bias = randn(outputs, dtype=dtype, seed=7)
    attended, hidden = randn(num_rows, attended_size, dtype=dtype), 3 * randn(num_rows, width, dtype=dtype, seed=8)
    middle = torch.nn.functional.linear(attended, weights[0]) + hidden
    normed = rms_norm.rms_norm_reference(middle, norms[0], 1e-2)
    activated = skinny_linear.gated_linear_reference(normed, weights[1])
    total = torch.nn.functional.linear(activated, weights[2]) + middle
    normed = rms_norm.rms_norm_reference(total, norms[1], 1e-2)
    heads = torch.nn.functional.linear(normed, weights[3], bias)
    on_device = [weight.to(device) for weight in weights]
    scales = [NextNorm(weight.to(device), 1e-2) for weight in norms]
    small = PhaseShape(16, 32, 2)
    shape = ChainShape(small, small, small, small, num_warps=4, prefetches=prefetches)
    barrier = torch.zeros(1, dtype=torch.int32, device=device)
    for is_apart in (True,) if device == "cpu" else (True, False, False):
        out, found = layer_products.layer_products_triton(
            attended.to(device), hidden.to(device),
            LayerWeights(on_device[0], scales[0], *on_device[1:3]),
            None if is_last else NextLayer(scales[1], on_device[3], bias.to(device)),
            barrier, 3, shape=shape, is_apart=is_apart,
        )  # fmt: skip
        assert_close(out, total, bfloat16=6e-2)
        if is_last:
            assert found is None
        else:
            assert found is not None
            assert_close(found, heads, bfloat16=6e-2)


def few_row_cases() -> Iterator[tuple[Callable[..., None], tuple[object, ...]]]:
    for dtype in DTYPES:
        for sizes in ((0, 8, 16), (1, 32, 64), (3, 41, 50), (17, 100, 33)):
            for has_bias, offset in ((False, None), (True, 1.0)):
                if dtype == FLOAT32 or has_bias:
                    yield check_norm_between_products, (sizes, has_bias, offset, dtype)
        for num_rows, is_last, prefetches in ((1, False, True), (5, False, False), (3, True, True)):
            yield check_layer_products, (num_rows, is_last, prefetches, dtype)
