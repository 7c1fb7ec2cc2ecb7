"""The kernels of steps of few rows against their definitions, one case each, see `cases`."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from baton.kernels import (
    few_experts,
    fp8_rows,
    int4_rows,
    kv_store,
    latent_step,
    normed_linear,
    rms_norm,
    rotary_product,
    rotate_store,
    skinny_linear,
    split_rows,
)
from baton.kernels.expert_mlp import ExpertForm
from baton.kernels.few_experts import FewExperts
from baton.kernels.fp8_experts import Fp8Matrices
from baton.kernels.fp8_scales import BLOCK, FP8, Fp8Weight, dequantise_fp8, raw
from baton.kernels.int4_values import Int4Weight
from baton.kernels.packed_experts import MXFP4, PackedMatrices
from baton.kernels.rms_norm import NextNorm
from baton.kernels.route_experts import Routing
from baton.kernels.silu_mul import silu_mul_reference
from baton.tests.kernels.cases import BFLOAT16, DTYPES, FLOAT32, NAN, assert_close, randn
from baton.tests.kernels.latent_cases import SCALE, poisoned_latents
from baton.tests.kernels.quant_cases import int4_weight
from baton.tests.kernels.quant_expert_cases import fp8_experts_of, packed_experts_of

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
    given = x, moved(first), moved(biases[0]), moved(residual)
    usual, _ = normed_linear.sum_linear_triton(*given, None)  # in the tiles that a server takes
    assert_close(usual, expected, bfloat16=3.2e-2)
    usual = normed_linear.scaled_linear_triton(rows, moved(second), moved(biases[1]))
    assert_close(usual, normed_linear.scaled_linear_reference(kept, second, biases[1]), bfloat16=3.2e-2)
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


def check_rotary_product(
    device: str, num_rows: int, sizes: tuple[int, int, int, int], num_real: int, has_bias: bool,
    kv_dtype: torch.dtype, dtype: torch.dtype,
) -> None:  # fmt: skip
    """The bits of a projection, a rotation and a store, one after the other; x is part of wider rows."""
    in_size, num_heads, kv_heads, head_dim = sizes
    outputs, num_pages = (num_heads + 2 * kv_heads) * head_dim, 2 + num_rows
    wide = torch.full((num_rows + 1, in_size + 5), NAN, dtype=dtype)
    wide[:num_rows, :in_size] = randn(num_rows, in_size, dtype=dtype)
    squares = torch.full((num_rows, 3), in_size / 3.0) + randn(num_rows, 3, seed=1)
    rows = normed_linear.UnscaledRows(wide.to(device)[:num_rows, :in_size], squares.to(device), 1e-5)
    weight = (randn(outputs, in_size, seed=2) / in_size**0.5).to(dtype).to(device)
    bias = randn(outputs, seed=3).to(dtype).to(device) if has_bias else None
    angles = randn(num_rows, head_dim // 2, seed=4)
    cos, sin = angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)
    tables = torch.cat((cos, 2 * cos), -1), torch.cat((-sin, 3 * sin), -1)
    pool = randn(num_pages, 3, 2, 4, kv_heads, head_dim, seed=5).to(kv_dtype)
    slots = 4 * (1 + torch.arange(num_rows)) + torch.arange(num_rows) % 4
    slots[num_real:] = 0
    places = torch.stack((kv_store.kv_rows(slots, pool), slots - 1), dim=1).to(device)[:, 0]
    shape = SMALL_TILE._replace(out=16 if head_dim < 64 else 32)
    apart, joined = pool.to(device, copy=True), pool.to(device, copy=True)
    heads = normed_linear.scaled_linear_triton(rows, weight, bias, shape=shape)
    expected = rotate_store.rotate_store_triton(apart, 1, places, heads.view(num_rows, -1, head_dim), *tables)
    q = rotary_product.rotary_product_triton(joined, 1, places, rows, weight, bias, *tables, shape=shape)
    assert not torch.equal(raw(joined).cpu(), raw(pool))
    if dtype == FLOAT32:
        assert_close(q, expected.cpu())
        assert_close(joined, apart.cpu())
    else:
        assert torch.equal(q, expected)
        assert torch.equal(raw(joined), raw(apart))


def check_logits_of_a_row(device: str, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Sums and results in float32 of products of the dtype."""
    vocabulary, in_size = sizes
    x, weight = randn(1, in_size, dtype=dtype), randn(vocabulary, in_size, dtype=dtype, seed=1)
    shape = skinny_linear.vector_shape(in_size, vocabulary)
    y = skinny_linear.linear_triton(
        x.to(device), weight.to(device), shape=shape, max_tile_rows=1, out_dtype=FLOAT32
    )
    assert y.dtype == FLOAT32
    torch.testing.assert_close(y.cpu().double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-5)


def check_norm_between_fp8_products(
    device: str, num_rows: int, has_blocks: bool, has_bias: bool, dtype: torch.dtype
) -> None:
    """As `check_norm_between_products`."""
    in_size, width, outputs = 300, 140, 256
    weights = []
    for seed, (rows, columns) in enumerate(((width, in_size), (outputs, width))):
        values = (64 * randn(rows, columns, seed=seed)).to(FP8)
        shape = (-(-rows // BLOCK), -(-columns // BLOCK)) if has_blocks else (rows,)
        scales = (1 + randn(*shape, seed=seed + 2).abs()) / 64 / columns**0.5
        bias = randn(rows, dtype=dtype, seed=seed + 4) if has_bias else None
        weights.append(Fp8Weight(values, scales, bias))
    x, residual = (randn(num_rows, n, dtype=dtype, seed=6) for n in (in_size, width))
    norm = NextNorm(1 + 0.3 * randn(width, dtype=dtype, seed=8), 1e-2)
    shape = fp8_rows.RowsShape(out=4, inner=128, num_warps=4, num_stages=2)
    moved = [Fp8Weight(*(None if x is None else x.to(device) for x in weight)) for weight in weights]
    total, rows = fp8_rows.sum_fp8_triton(
        x.to(device), moved[0], residual.to(device), norm._replace(weight=norm.weight.to(device)),
        shape=shape,
    )  # fmt: skip
    assert rows is not None
    values = [dequantise_fp8(weight.values, weight.scales, torch.float32) for weight in weights]
    wide = torch.nn.functional.linear(x.float(), values[0])
    wide = (wide if weights[0].bias is None else wide + weights[0].bias.float()).to(dtype)
    assert_close(total, wide + residual, bfloat16=3.2e-2)
    assert_close(rows.z, ((wide + residual).float() * norm.weight.float()).to(dtype), bfloat16=6e-2)
    assert_close(rows.scale(), torch.rsqrt(total.cpu().float().pow(2).mean(1, keepdim=True) + 1e-2))
    kept = normed_linear.UnscaledRows(rows.z.cpu(), rows.squares.cpu(), rows.eps)
    for is_gated in (False, True):
        y = fp8_rows.scaled_fp8_triton(rows, moved[1], is_gated=is_gated, shape=shape)
        given = values[1], None if weights[1].bias is None else weights[1].bias.float()
        expected = normed_linear.scaled_linear_reference(kept._replace(z=kept.z.float()), *given).to(dtype)
        assert_close(y, silu_mul_reference(expected) if is_gated else expected, bfloat16=3.2e-2)


def check_norm_between_int4_products(
    device: str, sizes: tuple[int, int, int], group: int, tile: tuple[int, int], has_bias: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """As `check_norm_between_products`, also with what each of its operations gives by itself."""
    num_rows, in_size, width = sizes
    wide = torch.full((num_rows + 1, in_size + 3), NAN, dtype=dtype)
    wide[:num_rows, :in_size] = randn(num_rows, in_size, dtype=dtype)
    residual = 3 * randn(num_rows, width, dtype=dtype, seed=4)
    norm = NextNorm(1 + 0.3 * randn(width, dtype=dtype, seed=5), 1e-2, 1.0)
    biases = [randn(n, dtype=dtype, seed=3) if has_bias else None for n in (width, 2 * 28)]
    weights = [
        Int4Weight(*int4_weight(out, inner, group), bias)
        for (out, inner), bias in zip(((width, in_size), (2 * 28, width)), biases, strict=True)
    ]
    moved = [
        Int4Weight(*(None if x is None else x.to(device) for x in weight)) for weight in weights
    ]
    shape = split_rows.SplitTile(out=tile[0], splits=tile[1], num_warps=4, num_stages=3)
    x, packed = wide.to(device)[:num_rows, :in_size], wide[:num_rows, :in_size].contiguous()
    total, rows = int4_rows.sum_int4_triton(
        x, moved[0], residual.to(device), norm._replace(weight=norm.weight.to(device)), tile=shape
    )
    exact = weights[0].values(FLOAT32), weights[1].values(FLOAT32)
    plain = torch.nn.functional.linear(packed.float(), exact[0])
    plain = (plain if biases[0] is None else plain + biases[0].float()).to(dtype)
    assert rows is not None
    assert_close(total, plain + residual, bfloat16=3.2e-2)
    assert_close(rows.z, ((plain + residual).float() * (1 + norm.weight.float())).to(dtype), bfloat16=6e-2)
    mean = total.cpu().float().pow(2).mean(1, keepdim=True)
    torch.testing.assert_close(rows.scale().cpu(), torch.rsqrt(mean + 1e-2), atol=1e-5, rtol=1e-5)
    turned = [each.t().contiguous().t() for each in (x, residual.to(device))]
    last, nothing = int4_rows.sum_int4_triton(turned[0], moved[0], turned[1], None, tile=shape)
    assert nothing is None
    assert torch.equal(last, total)
    kept = normed_linear.UnscaledRows(rows.z.cpu().float(), rows.squares.cpu(), rows.eps)
    for is_gated in (False, True):
        bias = None if biases[1] is None else biases[1].float()
        y = int4_rows.scaled_int4_triton(rows, moved[1], is_gated=is_gated, tile=shape)
        expected = normed_linear.scaled_linear_reference(kept, exact[1], bias).to(dtype)
        assert_close(y, silu_mul_reference(expected) if is_gated else expected, bfloat16=3.2e-2)
        y = int4_rows.int4_rows_triton(rows.z, moved[1], is_gated=is_gated, tile=shape)
        expected = torch.nn.functional.linear(kept.z, exact[1], bias).to(dtype)
        assert_close(y, silu_mul_reference(expected) if is_gated else expected, bfloat16=3.2e-2)


def check_few_experts(
    device: str, num_rows: int, sizes: tuple[int, int, int], num_shared: int, routing: Routing,
    has_bias: bool, is_float32: bool, dtype: torch.dtype, stored: int | str | None = None,
    is_gpt_oss: bool = False,
) -> None:  # fmt: skip
    """Equal logits are among those to choose from, and sigmoids that round to 1 without a bias. `stored`: the
    group of weights in 4 bits, or the form of the scales of 8 bits; `is_gpt_oss`: with biases and its gate.
    """
    num_experts, hidden, inner = sizes

    def made(*shape: int, seed: int) -> torch.Tensor:
        return (randn(*shape, seed=seed) / shape[-1] ** 0.5).to(dtype)

    router = made(num_experts, hidden, seed=1)
    router[1] = router[0]
    if routing.is_sigmoid and not has_bias:
        router *= 100
    shared = made(2 * num_shared * inner, hidden, seed=4), made(hidden, num_shared * inner, seed=5)
    weights = few_experts.FewExperts(
        routing, router, made(num_experts, 2 * inner, hidden, seed=2), made(num_experts, hidden, inner,
        seed=3), randn(num_experts, seed=6) if has_bias else None, is_float32,
        *(shared if num_shared else (None, None)),
    )  # fmt: skip
    if isinstance(stored, str):
        eighths = fp8_experts_of((num_rows, num_experts, routing.top_k, hidden, inner), stored)
        gate_up, down = (each._replace(scales=each.scales / 16) for each in eighths)  # as the others' values
        weights = weights._replace(gate_up=gate_up, down=down)
    elif stored is not None:
        packed = packed_experts_of((num_rows, num_experts, routing.top_k, hidden, inner), stored)
        weights = weights._replace(gate_up=packed[0], down=packed[1])
    if is_gpt_oss:
        biases = made(num_experts, 2 * inner, seed=11), made(num_experts, hidden, seed=12)
        form = ExpertForm(*(8 * bias for bias in biases), limit=0.4, alpha=1.7)
        weights = weights._replace(router_bias=made(num_experts, seed=13), form=form)
    on_device = _moved(weights, device)
    hidden_rows = randn(num_rows, hidden, seed=7).to(dtype)
    squares = hidden_rows.to(torch.float32).pow(2).view(num_rows, 4, -1).sum(2)
    rows = normed_linear.UnscaledRows(
        (hidden_rows * (1 + 0.3 * randn(hidden, seed=8))).to(dtype), squares, 1e-2
    )
    residual, norm = (
        randn(num_rows, hidden, seed=9).to(dtype),
        NextNorm(1 + 0.3 * randn(hidden, seed=10).to(dtype), 1e-2),
    )
    moved = normed_linear.UnscaledRows(rows.z.to(device), rows.squares.to(device), rows.eps)
    total, scaled, ids = few_experts.few_experts_triton(
        moved, on_device, residual.to(device), norm._replace(weight=norm.weight.to(device))
    )
    expected, kept, chosen = few_experts.few_experts_reference(rows, weights, residual, norm)
    assert torch.equal(ids.cpu(), chosen)
    assert_close(total, expected, bfloat16=3.2e-2)
    assert_close(scaled.z, kept.z, bfloat16=3.2e-2)
    tolerance = 5e-6 if dtype == FLOAT32 else 1e-2
    torch.testing.assert_close(scaled.scale().cpu(), kept.scale(), atol=tolerance, rtol=tolerance)


Tensors = TypeVar("Tensors", FewExperts, Fp8Matrices, PackedMatrices, ExpertForm)


def _moved(parts: Tensors, device: str) -> Tensors:
    """`parts` with all tensors in it on `device`."""
    moved: dict[str, object] = {}
    for name, part in parts._asdict().items():
        if isinstance(part, torch.Tensor):
            moved[name] = part.to(device)
        elif isinstance(part, Fp8Matrices | PackedMatrices | ExpertForm):
            moved[name] = _moved(part, device)
    return parts._replace(**moved)


def check_latent_step(
    device: str, lens: list[int], num_rows: int, num_heads: int, num_splits: int, is_interleaved: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """`lens`: context rows with the new ones, 0 for an idle request, whose rows are NaN and go to the sink.

    Queries and latents lie in wider rows, which are NaN beside them.
    """
    sizes, layer = latent_step.LatentSizes(24, 8, 20, 40, is_interleaved), 1
    width = sizes.rank + sizes.rope
    pool, table, _ = poisoned_latents(lens, width, dtype)
    slots = [
        int(table[request, column // 16]) * 16 + column % 16 if length else 0
        for request, length in enumerate(lens)
        for column in (range(length - num_rows, length) if length else range(num_rows))
    ]
    num_tokens = len(slots)
    wide = torch.full((num_tokens, num_heads * 32 + width + 3), NAN, dtype=dtype)
    wide[:, :-3] = randn(num_tokens, num_heads * 32 + width, dtype=dtype, seed=1)
    wide[torch.tensor(slots) == 0] = NAN
    angles = randn(num_tokens, sizes.rope // 2, seed=3)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    up = randn(num_heads, sizes.key + sizes.value, sizes.rank, seed=4).to(dtype) / 5
    norm = 1 + 0.3 * randn(sizes.rank, seed=5).to(dtype)
    given = norm, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def rows_on(place: str) -> latent_step.LatentRows:
        moved, split = wide.to(place), num_heads * 32
        weight, *tables = (x.to(place) for x in given)
        return latent_step.LatentRows(moved[:, :split], moved[:, split:-3], weight, 1e-2, *tables)

    places, lengths = kv_store.kv_rows(torch.tensor(slots), pool), torch.tensor(lens)
    after, on_cpu = pool.to(device, copy=True), pool.clone()
    q = latent_step.prepare_latents_triton(
        after, layer, places.to(device), rows_on(device), up.to(device), sizes, part=16
    )
    expected = latent_step.prepare_latents(on_cpu, layer, places, rows_on("cpu"), up, sizes)
    torch.testing.assert_close(after.cpu(), on_cpu, rtol=1.6e-2, atol=3.2e-2, equal_nan=True)
    is_busy = torch.tensor(slots) > 0
    assert_close(q.cpu()[is_busy], expected[is_busy], bfloat16=3.2e-2)
    out = latent_step.attend_latents_triton(
        q, after, layer, table.to(device), lengths.to(device), SCALE, up.to(device), sizes,
        num_splits=num_splits, part=16,
    )  # fmt: skip
    clean = on_cpu.nan_to_num(0.0), expected.nan_to_num(0.0)
    found = latent_step.attend_latents(clean[1], clean[0], layer, table, lengths, SCALE, up, sizes)
    wanted = torch.where(is_busy[:, None, None], found, 0.0)
    assert_close(out, wanted, bfloat16=3.2e-2)


def few_row_cases() -> Iterator[tuple[Callable[..., None], tuple[object, ...]]]:
    for dtype in DTYPES:
        for sizes in ((1, 32, 64), (1, 41, 50), (0, 8, 16), (3, 41, 50), (17, 100, 33)):
            for has_bias, offset in ((False, None), (True, 1.0)):
                if dtype == FLOAT32 or has_bias:
                    yield check_norm_between_products, (sizes, has_bias, offset, dtype)
    for num_rows, sizes, num_real, has_bias, kv_dtype, dtype in (
        (1, (64, 2, 1, 16), 1, False, FLOAT32, FLOAT32),
        (3, (41, 3, 1, 32), 2, True, FLOAT32, FLOAT32),
        (5, (100, 4, 2, 64), 0, False, FP8, BFLOAT16),
        (16, (96, 1, 1, 128), 11, True, BFLOAT16, BFLOAT16),
        (1, (72, 2, 1, 64), 1, True, BFLOAT16, BFLOAT16),
    ):
        yield check_rotary_product, (num_rows, sizes, num_real, has_bias, kv_dtype, dtype)
    for num_rows, sizes, num_shared, routing, has_bias, is_float32, dtype in (
        (1, (16, 64, 40), 0, Routing(top_k=4, is_normalised=True), False, False, FLOAT32),
        (3, (20, 36, 48), 2, Routing(top_k=3, is_normalised=False, scale=1.5), False, True, FLOAT32),
        (
            2,
            (16, 64, 32),
            1,
            Routing(top_k=2, is_normalised=True, is_sigmoid=True, scale=2.5),
            True,
            True,
            FLOAT32,
        ),
        (2, (16, 64, 32), 1, Routing(top_k=8, is_normalised=True), False, True, BFLOAT16),
        (4, (16, 64, 32), 0, Routing(top_k=4, is_normalised=True), False, False, BFLOAT16),
        (1, (4, 64, 2056), 0, Routing(top_k=2, is_normalised=True), False, False, BFLOAT16),
        (3, (16, 64, 32), 0, Routing(top_k=3, is_normalised=True, is_sigmoid=True), False, True, FLOAT32),
    ):
        yield check_few_experts, (num_rows, sizes, num_shared, routing, has_bias, is_float32, dtype)
    for num_rows, sizes, top_k, has_bias, dtype, group, is_gpt_oss in (
        (2, (16, 96, 160), 4, False, FLOAT32, MXFP4, True),
        (1, (16, 64, 40), 4, False, FLOAT32, None, True),
        (1, (20, 160, 96), 3, True, FLOAT32, 32, False),
        (2, (16, 128, 128), 8, False, BFLOAT16, 64, False),
        (1, (16, 256, 128), 4, False, BFLOAT16, 128, False),
        (1, (32, 160, 288), 4, False, BFLOAT16, MXFP4, True),
        (1, (16, 64, 32), 4, False, BFLOAT16, None, True),
        (2, (16, 300, 40), 4, False, FLOAT32, "channel", False),
        (3, (16, 256, 384), 8, True, BFLOAT16, "channel", False),
        (1, (8, 300, 256), 3, False, FLOAT32, "block", False),
        (4, (16, 384, 128), 8, False, BFLOAT16, "block", False),
        (1, (8, 256, 2176), 2, False, BFLOAT16, "block", False),
    ):
        routing = Routing(top_k=top_k, is_normalised=True)
        yield check_few_experts, (num_rows, sizes, 0, routing, has_bias, False, dtype, group, is_gpt_oss)
    for lens, num_rows, num_heads, num_splits, is_interleaved, dtype in (
        ([1], 1, 3, 2, True, FLOAT32),
        ([200, 0, 70], 1, 16, 5, False, FLOAT32),
        ([130, 64], 4, 5, 0, True, FLOAT32),
        ([200], 2, 16, 3, True, BFLOAT16),
    ):
        yield check_latent_step, (lens, num_rows, num_heads, num_splits, is_interleaved, dtype)
    for sizes, dtype in (((515, 576), BFLOAT16), ((130, 2052), torch.float16)):
        yield check_logits_of_a_row, (sizes, dtype)
    for has_blocks, has_bias, dtype in (
        (True, True, BFLOAT16), (False, True, FLOAT32), (True, False, FLOAT32), (False, False, BFLOAT16),
    ):  # fmt: skip
        for num_rows in (3, 1, 4):
            yield check_norm_between_fp8_products, (num_rows, has_blocks, has_bias, dtype)
    for sizes, group, tile, has_bias, dtype in (
        ((3, 640, 256), 128, (16, 4), True, BFLOAT16), ((1, 512, 384), 128, (16, 8), False, BFLOAT16),
        ((4, 192, 192), 64, (128, 1), True, BFLOAT16), ((2, 192, 320), 64, (32, 4), False, torch.float16),
        ((1, 512, 256), 256, (16, 4), True, FLOAT32), ((2, 320, 320), 320, (16, 8), True, BFLOAT16),
    ):  # fmt: skip
        yield check_norm_between_int4_products, (sizes, group, tile, has_bias, dtype)
