"""One kernel launch against its definition per case: interpreted on the CPU, or compiled on a GPU.

Every case builds its inputs on the CPU, poisons what a kernel must not read with NaN, launches on `device`
and compares there. `assert_close` says how far the results may be apart and what has been seen to fail at
that distance.
"""

from collections.abc import Callable, Iterator

import torch
from baton.kernels import (
    kv_store,
    look_up_rows,
    norm_pair,
    put_rows,
    rms_norm,
    rope,
    rotate_store,
    select_rows,
    silu_mul,
    skinny_linear,
    window_places,
)

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
DTYPES = (FLOAT32, BFLOAT16)
NAN = float("nan")


def randn(*shape: int, dtype: torch.dtype = FLOAT32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, bfloat16: float = 1.6e-2) -> None:
    """Within 5e-6 in float32; in bfloat16 within two units in the last place near 1 (two roundings).

    Changes to the kernels that have been seen to fail, with the distance they cause: softmax scale 1 % off
    (1.4e-2 in float32), a split that begins one row early (0.18), mask-free tiles that reach into the masked
    ones (0.28), a running sum or output not rescaled (0.36, 0.75), a split's weight without its sum (0.91),
    causal mask one column short or long (3.5, 3.3), another request's tree mask (2.7), a transposed one
    (3.5), layer, head or page strides mixed up (above 1), a tile's edge one column too far (reads poison:
    NaN).
    """
    tolerance = 5e-6 if expected.dtype == FLOAT32 else bfloat16
    torch.testing.assert_close(actual.cpu(), expected, atol=tolerance, rtol=tolerance)


def assert_rounds_alike(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Rounded where the definition rounds: 99 % of the values are bitwise equal in bfloat16.

    A missing or extra rounding moves a few values in a hundred by one unit, which no tolerance shows.
    """
    assert_close(actual, expected)
    if expected.dtype == BFLOAT16:
        assert int((actual.cpu() != expected).sum()) <= expected.numel() // 100


# --- row by row ---------------------------------------------------------------------------------------------


def check_rms_norm(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), 1 + randn(shape[-1], dtype=dtype, seed=1)
    normed, same = rms_norm.rms_norm_triton(x.to(device), weight.to(device), 1e-2)
    assert_rounds_alike(normed, rms_norm.rms_norm_reference(x, weight, 1e-2))
    assert torch.equal(same.cpu(), x)


def check_add_rms_norm(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = randn(*shape, dtype=dtype), 3 * randn(*shape, dtype=dtype, seed=2)
    weight = 1 + randn(shape[-1], dtype=dtype, seed=1)
    normed, total = rms_norm.rms_norm_triton(x.to(device), weight.to(device), 1e-2, residual.to(device))
    expected, expected_total = rms_norm.add_rms_norm_reference(x, residual, weight, 1e-2)
    assert torch.equal(total.cpu(), expected_total)
    assert_rounds_alike(normed, expected)


def check_rms_norm_of_heads(device: str, dtype: torch.dtype) -> None:
    """A part of some heads cut out of a projection; all beside it is NaN."""
    wide = torch.full((5, 9, 96), NAN, dtype=dtype)
    wide[:, 2:5, :80] = randn(5, 3, 80, dtype=dtype)
    weight = randn(80, dtype=dtype, seed=1)
    normed, _ = rms_norm.rms_norm_triton(wide.to(device)[:, 2:5, :80], weight.to(device), 1e-5)
    assert_close(normed, rms_norm.rms_norm_reference(wide[:, 2:5, :80], weight, 1e-5))


def check_rms_norm_with_offset(device: str, offset: float, dtype: torch.dtype) -> None:
    x, residual = randn(5, 123, dtype=dtype), 3 * randn(5, 123, dtype=dtype, seed=2)
    weight = 0.3 * randn(123, dtype=dtype, seed=1)
    on_device = x.to(device), weight.to(device), 1e-2
    normed, _ = rms_norm.rms_norm_triton(*on_device, None, offset)
    assert_rounds_alike(normed, rms_norm.rms_norm_reference(x, weight, 1e-2, offset))
    normed, total = rms_norm.rms_norm_triton(*on_device, residual.to(device), offset)
    expected, expected_total = rms_norm.add_rms_norm_reference(x, residual, weight, 1e-2, offset)
    assert torch.equal(total.cpu(), expected_total)
    assert_rounds_alike(normed, expected)


def check_norm_behind_norm(device: str, offset: float | None, dtype: torch.dtype) -> None:
    """A norm, and a norm of a sum behind it: the same bits as in two launches, in float32 close."""
    x, residual = randn(5, 123, dtype=dtype).to(device), 3 * randn(5, 123, dtype=dtype, seed=2).to(device)
    norms = [
        rms_norm.NextNorm(1 + 0.3 * randn(123, dtype=dtype, seed=i).to(device), 1e-2, offset) for i in (3, 4)
    ]
    found = rms_norm.rms_norm_triton(x, norms[1].weight, 1e-2, residual, offset, norms[0])
    apart, _ = rms_norm.rms_norm_triton(x, *norms[0][:2], None, offset)
    expected = rms_norm.rms_norm_triton(apart, *norms[1][:2], residual, offset)
    for pair in zip(found, expected, strict=True):
        assert_close(*(x.cpu() for x in pair), bfloat16=0.0)
    on_cpu = [norm._replace(weight=norm.weight.cpu()) for norm in norms]
    for pair in zip(
        found, rms_norm.norm_add_norm(x.cpu(), on_cpu[0], residual.cpu(), on_cpu[1]), strict=True
    ):
        assert_close(*pair, bfloat16=3.2e-2)


def check_silu_mul(device: str, shape: tuple[int, ...], dtype: torch.dtype, is_gelu: bool = False) -> None:
    x = (2 if is_gelu else 20) * randn(*shape, dtype=dtype)
    if x.numel():
        x.view(-1)[0] = -200.0  # exp overflows float32
    expected = silu_mul.silu_mul_reference(x, is_gelu)
    # torch's gelu cancels digits of small results, which the kernel keeps
    same = assert_close if is_gelu else assert_rounds_alike
    same(silu_mul.silu_mul_triton(x.to(device), is_gelu), expected)


def check_gelu_linear(device: str, dtype: torch.dtype) -> None:
    x, weight = randn(3, 41, dtype=dtype), randn(44, 41, dtype=dtype, seed=1) / 6
    out = skinny_linear.linear_triton(x.to(device), weight.to(device), is_gated=True, is_gelu=True)
    assert_close(out, skinny_linear.gated_linear_reference(x, weight, None, True), bfloat16=3.2e-2)


def check_rope_of_some_dimensions(device: str, dtype: torch.dtype) -> None:
    """The first 24 of 40 dimensions turn, also where they are stored in the same launch."""
    pool, heads, slots = store_inputs((4, 2), 40, 4, 3, dtype, 2)
    cos, sin, full_cos, signed_sin = rope_tables(slots.shape[0], 24, dtype)
    rows, tables = kv_store.kv_rows(slots, pool), (full_cos, signed_sin)
    y = rope.apply_rope_triton(heads.to(device), *(table.to(device) for table in tables))
    real = ~heads.isnan().any(-1).any(-1)
    assert_close(y.cpu()[real], rope.rope_reference(heads, cos, sin)[real], bfloat16=3.2e-2)
    assert torch.equal(y.cpu()[real][..., 24:], heads[real][..., 24:])
    on_cpu, on_device = pool.clone(), pool.to(device, copy=True)
    given = (rows.to(device), heads.to(device), *(table.to(device) for table in tables))
    q = rotate_store.rotate_store_triton(on_device, 2, *given)
    q_on_cpu = rotate_store.rotate_store(on_cpu, 2, rows, heads, *tables)
    torch.testing.assert_close(q.cpu(), q_on_cpu, rtol=1.6e-2, atol=1.6e-2, equal_nan=True)
    assert_close(on_device, on_cpu)


def check_linear(
    device: str, sizes: tuple[int, int, int], has_bias: bool, is_gated: bool, dtype: torch.dtype
) -> None:
    """Rows and columns beside x are NaN; tiles so small that every edge falls inside one."""
    num_rows, in_size, out_size = sizes
    wide = torch.full((num_rows + 1, in_size + 3), NAN, dtype=dtype)
    wide[:num_rows, :in_size] = randn(num_rows, in_size, dtype=dtype)
    weight = randn(out_size, in_size, dtype=dtype, seed=1) / in_size**0.5
    bias = randn(out_size, dtype=dtype, seed=2) if has_bias else None
    x = wide[:num_rows, :in_size]
    shape = skinny_linear.SkinnyShape(out=16, inner=32, num_warps=4, num_stages=2)
    on_device = (
        wide.to(device)[:num_rows, :in_size],
        weight.to(device),
        None if bias is None else bias.to(device),
    )
    out = skinny_linear.linear_triton(*on_device, is_gated=is_gated, shape=shape)
    reference = skinny_linear.gated_linear_reference if is_gated else torch.nn.functional.linear
    packed = x.contiguous()  # oneDNN with AMX reads the NaN beside rows that lie apart (torch 2.13)
    assert_close(out, reference(packed, weight, bias), bfloat16=3.2e-2)
    apart = skinny_linear.linear_triton(*on_device, is_gated=is_gated, shape=shape, max_tile_rows=1)
    assert_close(apart, reference(packed, weight, bias), bfloat16=3.2e-2)


def rope_tables(num_tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Half-wide cos and sin, then both in the form of `apply_rope`."""
    angles = randn(num_tokens, head_dim // 2, seed=3)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return cos, sin, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def check_rope(device: str, num_tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    wide = randn(num_tokens, heads + 2, head_dim, dtype=dtype)
    wide[:, 0] = wide[:, -1] = NAN
    cos, sin, full_cos, signed_sin = rope_tables(num_tokens, head_dim, dtype)
    y = rope.apply_rope_triton(wide.to(device)[:, 1:-1], full_cos.to(device), signed_sin.to(device))
    assert_close(y, rope.rope_reference(wide[:, 1:-1], cos, sin), bfloat16=3.2e-2)


# --- into the pool, out of the pool -------------------------------------------------------------------------


def store_inputs(
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    num_real: int,
    dtype: torch.dtype,
    num_padding: int = 2,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A pool `[7, 3, 2, page_size, K, D]` of random content, projections `[T, N + 2K, D]`, and their slots.

    Padding rows of NaN stand behind the first row; slots are distinct, and far apart. The sink is dirty.
    """
    num_heads, kv_heads = heads
    pool = randn(7, 3, 2, page_size, kv_heads, head_dim, dtype=dtype)
    order = torch.randperm(6 * page_size, generator=torch.Generator().manual_seed(4))[:num_real] + page_size
    slots = torch.cat((order[:1], torch.zeros(num_padding, dtype=torch.int64), order[1:]))
    projected = randn(len(slots), num_heads + 2 * kv_heads, head_dim, dtype=dtype, seed=5)
    projected[slots == 0] = NAN
    return pool, projected, slots


def stored(
    pool: torch.Tensor, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """The pool after a loop over the rows, the sink cleared."""
    after, page_size = pool.clone(), pool.shape[3]
    for row, slot in enumerate(slots.tolist()):
        after[slot // page_size, layer, :, slot % page_size] = torch.stack((k[row], v[row]))
    after[0, layer, :, 0] = 0
    return after


def check_store_kv(
    device: str,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    num_real: int,
    dtype: torch.dtype,
    num_padding: int = 2,
) -> None:
    pool, projected, slots = store_inputs((1, kv_heads), head_dim, page_size, num_real, dtype, num_padding)
    rows, after = kv_store.kv_rows(slots, pool), pool.to(device)
    k, v = projected[:, 1 : 1 + kv_heads], projected[:, 1 + kv_heads :]
    on_device = projected.to(device)
    kv_store.store_kv_triton(
        after, 2, rows.to(device), on_device[:, 1 : 1 + kv_heads], on_device[:, 1 + kv_heads :]
    )
    assert torch.equal(after.cpu(), stored(pool, 2, slots, k, v))


def check_rotate_store(
    device: str, num_heads: int, kv_heads: int, head_dim: int, num_real: int, dtype: torch.dtype
) -> None:
    """The bits of a rotation and a store, one after the other, from heads and places in wider rows."""
    pool, heads, slots = store_inputs((num_heads, kv_heads), head_dim, 4, num_real, dtype, 2)
    angles = randn(slots.shape[0], head_dim // 2, seed=4)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    rows, split = kv_store.kv_rows(slots, pool), num_heads + kv_heads
    wide = torch.cat((heads, torch.full_like(heads[:, :1], NAN)), dim=1).to(device)[:, :-1]
    places = torch.stack((rows, torch.full_like(rows, 1 << 40)), dim=1).to(device)[:, 0]
    given = (places, wide, *(table.to(device) for table in tables))
    after, apart, on_cpu = (pool.to(place, copy=True) for place in (device, device, "cpu"))
    q = rotate_store.rotate_store_triton(after, 2, *given)
    rotated = rope.apply_rope_triton(wide[:, :split], *given[2:])
    kv_store.store_kv_triton(apart, 2, given[0], rotated[:, num_heads:], wide[:, split:])
    torch.testing.assert_close(q, rotated[:, :num_heads], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(after, apart)
    placed = torch.full_like(q, NAN)
    assert rotate_store.rotate_store_triton(after, 2, *given, out=placed) is placed
    torch.testing.assert_close(placed, q, rtol=0, atol=0, equal_nan=True)
    q_on_cpu = rotate_store.rotate_store(on_cpu, 2, rows, heads, *tables)
    torch.testing.assert_close(q.cpu(), q_on_cpu, rtol=1.6e-2, atol=1.6e-2, equal_nan=True)
    assert_close(after, on_cpu)
    weights = [1 + 0.3 * randn(head_dim, seed=seed).to(dtype) for seed in (5, 6)]
    for offset in (None, 1.0):
        norms = rotate_store.HeadNorms(*(weight.to(device) for weight in weights), 1e-5, offset)
        q = rotate_store.rotate_store_triton(after, 2, *given, norms)
        q_on_cpu = rotate_store.rotate_store(
            on_cpu, 2, rows, heads, *tables, rotate_store.HeadNorms(*weights, 1e-5, offset)
        )
        torch.testing.assert_close(q.cpu(), q_on_cpu, rtol=1.6e-2, atol=3.2e-2, equal_nan=True)
        assert_close(after, on_cpu, bfloat16=3.2e-2)


def check_select_rows(
    device: str, accept_lens: list[int], rows_each: int, width: int, dtype: torch.dtype
) -> None:
    hidden = torch.full((len(accept_lens) * rows_each, width), NAN, dtype=dtype)
    expected = torch.zeros(len(accept_lens), width, dtype=dtype)
    for request, length in enumerate(accept_lens):
        if length:
            expected[request] = randn(width, dtype=dtype, seed=request)
            hidden[request * rows_each + length - 1] = expected[request]
    lens = torch.tensor(accept_lens, dtype=torch.int64)
    out = select_rows.select_last_rows_triton(hidden.to(device), lens.to(device))
    assert torch.equal(out.cpu(), expected)
    assert torch.equal(select_rows.select_last_rows(hidden, lens), expected)


def check_look_up_rows(
    device: str, num_rows: int, widths: tuple[int, ...], dtype: torch.dtype, is_column: bool = False
) -> None:
    """Tables of different widths, each with ids of its own; rows that are not looked up are NaN. With
    `is_column`, ids are a column of wider rows.
    """
    lookups = []
    for seed, width in enumerate(widths):
        table = torch.full((90, width), NAN, dtype=dtype)
        ids = torch.randint(90, (num_rows, 2), generator=torch.Generator().manual_seed(seed))
        ids = ids[:, 1] if is_column else ids[:, 1].contiguous()
        table[ids] = randn(90, width, dtype=dtype, seed=seed)[ids]
        lookups.append(look_up_rows.Lookup(table, ids))
    if len(lookups) == 2:  # the state of requests: large integers beside floats
        lookups[1] = lookups[1]._replace(table=(1 << 62) + torch.arange(90 * widths[1]).view(90, -1))
    expected = [table[ids] for table, ids in lookups]
    moved = [look_up_rows.Lookup(table.to(device), ids.to(device)) for table, ids in lookups]
    for found in (look_up_rows.look_up_rows_triton(*moved), look_up_rows.look_up_rows(*lookups)):
        assert len(found) == len(widths)
        assert all(torch.equal(rows.cpu(), wanted) for rows, wanted in zip(found, expected, strict=True))


def check_put_rows(
    device: str, num_rows: int, widths: tuple[int, ...], dtype: torch.dtype, has_counts: bool
) -> None:
    """Some requests emit nothing: their rows are NaN and must not arrive. The numbers are columns of wider
    rows, and rows of the tables that nobody writes stay.
    """
    ids = torch.randperm(60, generator=torch.Generator().manual_seed(num_rows))[: 2 * num_rows].view(-1, 2)
    counts = torch.arange(2 * num_rows).view(-1, 2) % 3 if has_counts else None
    is_kept = torch.ones(num_rows, dtype=torch.bool) if counts is None else counts[:, 1] > 0
    puts, expected = [], []
    for seed, width in enumerate(widths):
        table = randn(60, width, dtype=dtype if seed == 0 else torch.float32, seed=seed)
        rows = randn(num_rows, width, dtype=table.dtype, seed=seed + 9)
        wanted = table.clone()
        wanted[ids[is_kept, 1]] = rows[is_kept]
        puts.append(put_rows.Put(table, rows.masked_fill(~is_kept[:, None], NAN)))
        expected.append(wanted)
    moved = [put_rows.Put(table.to(device, copy=True), rows.to(device)) for table, rows in puts]
    on_device = None if counts is None else counts.to(device)[:, 1]
    put_rows.put_rows_triton(ids.to(device)[:, 1], *moved, counts=on_device)
    put_rows.put_rows(ids[:, 1], *puts, counts=None if counts is None else counts[:, 1])
    for found in (moved, puts):
        assert all(torch.equal(put.table.cpu(), wanted) for put, wanted in zip(found, expected, strict=True))


def check_norm_pair(device: str, num_rows: int, width: int, dtype: torch.dtype) -> None:
    """The right rows are part of wider ones, whose rest is NaN."""
    left, wide = randn(num_rows, width, dtype=dtype), torch.full((num_rows, width + 3), NAN, dtype=dtype)
    wide[:, :width] = 3 * randn(num_rows, width, dtype=dtype, seed=1)
    weights = [(1 + 0.3 * randn(width, seed=seed)).to(dtype).to(device) for seed in (2, 3)]
    norms = [rms_norm.NextNorm(weight, eps) for weight, eps in zip(weights, (1e-5, 1e-2), strict=True)]
    left, right = left.to(device), wide.to(device)[:, :width]
    pair, alone = norm_pair.norm_pair_triton(left, norms[0], right, norms[1], has_alone=True)
    assert alone is not None
    rows = left.cpu(), right.cpu()
    on_cpu = [norm._replace(weight=norm.weight.cpu()) for norm in norms]
    apart = [rms_norm.rms_norm_reference(x, *norm[:2]) for x, norm in zip(rows, on_cpu, strict=True)]
    assert_rounds_alike(pair, torch.cat(apart, dim=1))
    assert torch.equal(alone, pair[:, width:])
    without, none = norm_pair.norm_pair_triton(left, norms[0], right, norms[1])
    assert none is None
    assert torch.equal(without, pair)
    on_a_cpu, alone = norm_pair.norm_pair(rows[0], on_cpu[0], rows[1], on_cpu[1], has_alone=True)
    assert alone is not None
    assert_close(on_a_cpu, torch.cat(apart, dim=1), bfloat16=3.2e-2)
    assert torch.equal(alone, on_a_cpu[:, width:])


def check_window_places(device: str, shape: tuple[int, int], num_slots: int, page_size: int) -> None:
    """Pages and slots of some pages with a window page and some without, the sink among them."""
    generator = torch.Generator().manual_seed(7)
    table = torch.randint(0, 5, (9,), generator=generator) * torch.randint(0, 2, (9,), generator=generator)
    table[0] = 0
    pages = torch.randint(0, 9, shape, generator=generator)
    slots = torch.randint(0, 9 * page_size, (num_slots,), generator=generator)
    given = [tensor.to(device) for tensor in (table, pages, slots)]
    found = window_places.window_places_triton(*given, page_size)
    wanted_slots = [
        int(table[slot // page_size]) * page_size + slot % page_size if table[slot // page_size] else 0
        for slot in slots.tolist()
    ]
    for mapped in (found, window_places.window_places(table, pages, slots, page_size)):
        assert torch.equal(mapped[0].cpu(), table[pages])
        assert mapped[1].tolist() == wanted_slots


# --- the list -----------------------------------------------------------------------------------------------


def rows_cases() -> Iterator[tuple[Callable[..., None], tuple[object, ...]]]:
    for dtype in DTYPES:
        for shape in ((0, 8), (1, 1), (3, 42), (5, 7, 123), (2, 4097), (2, 2, 2, 64)):
            yield check_rms_norm, (shape, dtype)
            yield check_add_rms_norm, (shape, dtype)
        yield check_rms_norm_of_heads, (dtype,)
        for offset in (0.0, 1.0):
            yield check_rms_norm_with_offset, (offset, dtype)
        for norm_offset in (None, 1.0):
            yield check_norm_behind_norm, (norm_offset, dtype)
        yield check_silu_mul, ((6, 246), dtype, True)
        yield check_gelu_linear, (dtype,)
        yield check_rope_of_some_dimensions, (dtype,)
        for shape in ((0, 8), (1, 2), (6, 246), (2, 3, 2050)):
            yield check_silu_mul, (shape, dtype)
        for sizes in ((0, 8, 4), (1, 32, 16), (3, 41, 22), (17, 100, 50), (65, 7, 4)):
            for has_bias, is_gated in ((False, False), (True, False), (True, True)):
                yield check_linear, (sizes, has_bias, is_gated, dtype)
        for sizes in ((0, 2, 8), (1, 1, 2), (5, 3, 42), (2, 17, 80), (3, 33, 128)):
            yield check_rope, (*sizes, dtype)


def pool_cases() -> Iterator[tuple[Callable[..., None], tuple[object, ...]]]:
    for dtype in DTYPES:
        for page_size, num_real in ((1, 1), (1, 6), (16, 0), (16, 5)):
            yield check_store_kv, (3, 80, page_size, num_real, dtype)
        for num_real in (0, 3):
            yield check_store_kv, (2, 64, 4, num_real, dtype, 0)
        yield check_store_kv, (40, 64, 4, 3, dtype)
        for num_heads, kv_heads, head_dim, num_real in ((4, 2, 8, 5), (32, 8, 80, 3), (9, 3, 64, 0)):
            yield check_rotate_store, (num_heads, kv_heads, head_dim, num_real, dtype)
        for lens, rows_each, width in (([], 3, 8), ([1], 1, 1), ([3, 0, 1, 4], 4, 123), ([5, 2], 5, 2049)):
            yield check_select_rows, (lens, rows_each, width, dtype)
        for count, widths in ((0, (8,)), (1, (7,)), (3, (64, 1)), (5, (1100, 16, 3)), (2, (7, 8200))):
            yield check_look_up_rows, (count, widths, dtype)
        yield check_look_up_rows, (4, (16, 33), dtype, True)
        for count, widths in ((0, (8,)), (1, (7,)), (5, (1100, 16)), (7, (64, 4100))):
            for has_counts in (False, True):
                yield check_put_rows, (count, widths, dtype, has_counts)
        for count, width in ((0, 8), (1, 1), (3, 42), (33, 123), (2, 4097)):
            yield check_norm_pair, (count, width, dtype)
    for shape, num_slots, page_size in (
        ((0, 1), 0, 4),
        ((1, 1), 1, 1),
        ((3, 37), 50, 4),
        ((2, 700), 1030, 16),
    ):
        yield check_window_places, (shape, num_slots, page_size)
