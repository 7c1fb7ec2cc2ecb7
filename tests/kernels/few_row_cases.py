"""The kernels of steps of few rows against their definitions, one case each, see `cases`."""

from collections.abc import Callable, Iterator

import torch
from baton.kernels import (
    decode_attention,
    few_experts,
    kv_store,
    latent_step,
    layer_products,
    normed_fp8,
    normed_linear,
    rms_norm,
    rotate_store,
    skinny_linear,
    verify_attention,
)
from baton.kernels.fp8_scales import BLOCK, FP8, dequantise_fp8
from baton.kernels.layer_products import ChainShape, LayerWeights, NextLayer, PhaseShape
from baton.kernels.rms_norm import NextNorm
from baton.kernels.rotate_store import HeadNorms
from baton.kernels.route_experts import Routing
from baton.kernels.silu_mul import silu_mul_reference
from baton.tests.kernels.attention_cases import form_of, on, poisoned_pool
from baton.tests.kernels.cases import BFLOAT16, DTYPES, FLOAT32, NAN, assert_close, randn
from baton.tests.kernels.latent_cases import SCALE, poisoned_latents

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
        weights.append(normed_fp8.Fp8Weight(values, scales, bias))
    x, residual = randn(num_rows, in_size, dtype=dtype, seed=6), randn(num_rows, width, dtype=dtype, seed=7)
    norm = NextNorm(1 + 0.3 * randn(width, dtype=dtype, seed=8), 1e-2)
    moved = [
        normed_fp8.Fp8Weight(*(None if x is None else x.to(device) for x in weight)) for weight in weights
    ]
    total, rows = normed_fp8.sum_fp8_triton(
        x.to(device), moved[0], residual.to(device), norm._replace(weight=norm.weight.to(device)),
        tile=normed_fp8.Fp8Tile(4, 128, 4, 2),
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
        y = normed_fp8.scaled_fp8_triton(
            rows, moved[1], is_gated=is_gated, tile=normed_fp8.Fp8Tile(4, 128, 4, 2)
        )
        given = values[1], None if weights[1].bias is None else weights[1].bias.float()
        expected = normed_linear.scaled_linear_reference(kept._replace(z=kept.z.float()), *given).to(dtype)
        assert_close(y, silu_mul_reference(expected) if is_gated else expected, bfloat16=3.2e-2)


def check_layer_products(
    device: str, num_rows: int, is_last: bool, prefetches: bool, dtype: torch.dtype
) -> None:
    """Each product of a chain in a launch of its own, by three programs that have one to five tiles each; on
    a GPU also all of them in one launch.
    """
    width, attended_size, inner, outputs = 72, 40, 100, 50
    sizes = (width, attended_size), (2 * inner, width), (width, inner), (outputs, width)
    weights = [randn(*size, dtype=dtype, seed=i) / size[1] ** 0.5 for i, size in enumerate(sizes)]
    norms = [1 + 0.3 * randn(width, dtype=dtype, seed=5 + i) for i in range(2)]
    bias = randn(outputs, dtype=dtype, seed=7)
    attended, hidden = (
        randn(num_rows, attended_size, dtype=dtype),
        3 * randn(num_rows, width, dtype=dtype, seed=8),
    )
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


def check_decode_attention(
    device: str,
    lens: list[int],
    num_rows: int,
    heads: tuple[int, int],
    head_dim: int,
    num_splits: int,
    form_name: str,
    norms: tuple[bool, float | None],
    dtype: torch.dtype,
) -> None:
    """`lens`: context rows with the new ones, 0 for an idle request, whose rows are NaN and go to the sink.

    The new rows' places in the pool are NaN before, as all behind them.
    """
    num_heads, kv_heads = heads
    layer, page_size = 1, 16
    pool, table = poisoned_pool(
        [max(n - num_rows, 0) for n in lens], page_size, kv_heads, head_dim, dtype, layer
    )
    needed = [-(-n // page_size) for n in lens]
    table = torch.nn.functional.pad(table, (0, max(needed, default=0)))
    more = pool.shape[0]
    pool = torch.cat((pool, torch.full_like(pool[:1], NAN).expand(sum(needed) + 1, *pool.shape[1:])))
    slots = []
    for request, length in enumerate(lens):
        for column in range(max(length - num_rows, 0), length) if length else [-1] * num_rows:
            if column < 0:
                slots.append(0)
                continue
            if table[request, column // page_size] == 0:
                table[request, column // page_size], more = more, more + 1
            slots.append(int(table[request, column // page_size]) * page_size + column % page_size)
    num_tokens = len(slots)
    projected = randn(num_tokens, num_heads + 2 * kv_heads, head_dim, dtype=dtype, seed=5)
    projected[torch.tensor(slots, dtype=torch.int64) == 0] = NAN
    angles = randn(num_tokens, head_dim // 2, seed=3)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    has_norms, offset = norms
    weights = [1 + 0.3 * randn(head_dim, seed=seed).to(dtype) for seed in (5, 6)]
    form, rows = form_of(form_name, num_heads), kv_store.kv_rows(torch.tensor(slots, dtype=torch.int64), pool)
    lengths, scale = torch.tensor(lens), head_dim**-0.5
    places = {}
    for place in {device, "cpu"}:
        own = HeadNorms(*(weight.to(place) for weight in weights), 1e-5, offset) if has_norms else None
        places[place] = (rows.to(place), projected.to(place), *(x.to(place) for x in tables)), own
    after = pool.to(device, copy=True)
    arrivals = torch.zeros(len(lens) * kv_heads, dtype=torch.int32, device=device)
    for _ in range(2):
        out = decode_attention.decode_attention_triton(
            after, layer, *places[device][0], table.to(device), lengths.to(device), scale, arrivals,
            places[device][1], on(device, form), num_splits=num_splits,
        )  # fmt: skip
        assert not arrivals.any()
    expected_pool = pool.clone()
    q = rotate_store.rotate_store(expected_pool, layer, *places["cpu"][0], places["cpu"][1])
    expected = verify_attention.paged_verify_reference(
        q.reshape(len(lens), num_rows, num_heads, head_dim), expected_pool.nan_to_num(0.0), layer, table,
        lengths, scale, None, form,
    )  # fmt: skip
    torch.testing.assert_close(after.cpu(), expected_pool, rtol=1.6e-2, atol=3.2e-2, equal_nan=True)
    is_busy = (lengths > 0)[:, None, None, None]
    wanted = torch.where(is_busy, expected, 0.0).reshape(out.shape)
    torch.testing.assert_close(
        out.cpu(),
        wanted,
        rtol=1e-5 if dtype == FLOAT32 else 3.2e-2,
        atol=1e-5 if dtype == FLOAT32 else 3.2e-2,
    )


def check_few_experts(
    device: str, num_rows: int, sizes: tuple[int, int, int], num_shared: int, routing: Routing,
    has_bias: bool, is_float32: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Equal logits are among those to choose from."""
    num_experts, hidden, inner = sizes

    def made(*shape: int, seed: int) -> torch.Tensor:
        return (randn(*shape, seed=seed) / shape[-1] ** 0.5).to(dtype)

    router = made(num_experts, hidden, seed=1)
    router[1] = router[0]
    shared = made(2 * num_shared * inner, hidden, seed=4), made(hidden, num_shared * inner, seed=5)
    weights = few_experts.FewExperts(
        routing, router, made(num_experts, 2 * inner, hidden, seed=2), made(num_experts, hidden, inner,
        seed=3), randn(num_experts, seed=6) if has_bias else None, is_float32,
        *(shared if num_shared else (None, None)),
    )  # fmt: skip
    on_device = weights._replace(
        **{name: x.to(device) for name, x in weights._asdict().items() if isinstance(x, torch.Tensor)}
    )
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


def check_latent_step(
    device: str, lens: list[int], num_rows: int, num_heads: int, num_splits: int, is_interleaved: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """As `check_decode_attention`, over latents, with queries and latents in wider rows."""
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
        for sizes in ((1, 32, 64), (0, 8, 16), (3, 41, 50), (17, 100, 33)):
            for has_bias, offset in ((False, None), (True, 1.0)):
                if dtype == FLOAT32 or has_bias:
                    yield check_norm_between_products, (sizes, has_bias, offset, dtype)
        for num_rows, is_last, prefetches in ((1, False, True), (5, False, False), (3, True, True)):
            yield check_layer_products, (num_rows, is_last, prefetches, dtype)
    plain, normed, gemma = (False, None), (True, None), (True, 1.0)
    for lens, num_rows, heads, head_dim, num_splits, form, norms, dtype in (
        ([1], 1, (4, 4), 64, 3, "", plain, FLOAT32),
        ([200], 1, (8, 2), 64, 5, "", plain, FLOAT32),
        ([200], 1, (8, 2), 64, 2, "", normed, FLOAT32),
        ([130, 0, 64, 65], 1, (3, 1), 80, 4, "", plain, BFLOAT16),
        ([70, 0, 131, 4], 4, (8, 2), 64, 4, "", normed, FLOAT32),
        ([200, 33], 4, (8, 1), 64, 4, "wide window", gemma, FLOAT32),
        ([200, 33], 3, (4, 4), 64, 1, "all", plain, FLOAT32),
        ([140], 2, (8, 2), 128, 0, "sinks", plain, BFLOAT16),
        ([300, 17], 1, (8, 2), 64, 3, "window", plain, BFLOAT16),
    ):
        yield check_decode_attention, (lens, num_rows, heads, head_dim, num_splits, form, norms, dtype)
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
    ):
        yield check_few_experts, (num_rows, sizes, num_shared, routing, has_bias, is_float32, dtype)
    for lens, num_rows, num_heads, num_splits, is_interleaved, dtype in (
        ([1], 1, 3, 2, True, FLOAT32),
        ([200, 0, 70], 1, 16, 5, False, FLOAT32),
        ([130, 64], 4, 5, 0, True, FLOAT32),
        ([200], 2, 16, 3, True, BFLOAT16),
    ):
        yield check_latent_step, (lens, num_rows, num_heads, num_splits, is_interleaved, dtype)
    for num_rows, has_blocks, has_bias, dtype in (
        (1, False, True, FLOAT32),
        (2, True, False, FLOAT32),
        (4, False, False, BFLOAT16),
        (3, True, True, BFLOAT16),
    ):
        yield check_norm_between_fp8_products, (num_rows, has_blocks, has_bias, dtype)
