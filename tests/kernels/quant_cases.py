"""Kernels on 8-bit floating point against their definitions, as in `cases`: inputs poisoned with NaN where no
kernel may read, launches on `device`, results compared on the CPU.
"""

from collections.abc import Callable, Iterator

import torch
from baton.kernels import fp8_linear, fp8_rows, int4_linear, quantise_rows
from baton.kernels.compact_kv import compact_kv_reference, compact_kv_triton
from baton.kernels.extend_attention import paged_extend_reference, paged_extend_triton
from baton.kernels.fp8_many_rows import fp8_blocks_triton
from baton.kernels.fp8_scales import BLOCK, FP8, FP8_ROUNDING, Fp8Weight, quantise_rows_fp8, to_fp8
from baton.kernels.gather_context import gather_context_reference, gather_context_triton
from baton.kernels.int4_values import dequantise_int4, pack_groups, pack_int4, unit_of
from baton.kernels.kv_store import kv_rows, store_kv, store_kv_triton
from baton.kernels.rotate_store import rotate_store, rotate_store_triton
from baton.kernels.verify_attention import paged_verify_reference, paged_verify_triton
from baton.tests.kernels.cases import DTYPES, NAN, assert_close, randn

FP8_LARGEST_BITS = 0x7E  # 448; the positive values up to it are in the order of their bits


def fp8_weight(out_size: int, in_size: int, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """An e4m3 matrix with scales that differ much from each other."""
    values = randn(out_size, in_size, seed=1) / in_size**0.5
    if form == "channel":
        values = values * torch.logspace(-1, 0, out_size)[:, None]
        return quantise_rows_fp8(values)
    shape = (-(-out_size // BLOCK), -(-in_size // BLOCK))
    scales = 0.002 * (1 + torch.arange(shape[0] * shape[1]).view(shape) % 7).float()
    return to_fp8(values / 0.002), scales


def check_fp8_linear(
    device: str,
    sizes: tuple[int, int, int],
    form: str,
    has_bias: bool,
    is_gated: bool,
    dtype: torch.dtype,
) -> None:
    """Columns beside x are NaN. The definition runs in float32, where it rounds no weight and no gate."""
    num_rows, out_size, in_size = sizes
    wide = torch.full((num_rows, in_size + 5), NAN, dtype=dtype)
    wide[:, :in_size] = randn(num_rows, in_size, dtype=dtype)
    weight, scales = fp8_weight(out_size, in_size, form)
    bias = randn(out_size, dtype=dtype, seed=2) if has_bias else None
    y = fp8_linear.fp8_linear_triton(
        wide.to(device)[:, :in_size],
        weight.to(device),
        scales.to(device),
        None if bias is None else bias.to(device),
        is_gated=is_gated,
    )
    x, wide_bias = wide[:, :in_size].float(), None if bias is None else bias.float()
    expected = fp8_linear.fp8_linear_reference(x, weight, scales, wide_bias, is_gated)
    assert y.dtype == dtype
    assert_close(y, expected.to(dtype), bfloat16=3.2e-2)


def check_fp8_rows(
    device: str, sizes: tuple[int, int, int], form: str, is_gated: bool, dtype: torch.dtype
) -> None:
    """Few rows that are not rounded, as `check_fp8_linear`."""
    num_rows, out_size, in_size = sizes
    wide = torch.full((num_rows, in_size + 5), NAN, dtype=dtype)
    wide[:, :in_size] = randn(num_rows, in_size, dtype=dtype)
    weight, scales = fp8_weight(out_size, in_size, form)
    bias = randn(out_size, dtype=dtype, seed=2) if is_gated else None
    moved = Fp8Weight(weight.to(device), scales.to(device), None if bias is None else bias.to(device))
    shape = fp8_rows.RowsShape(out=8, inner=256, num_warps=4, num_stages=2)
    y = fp8_rows.fp8_rows_triton(wide.to(device)[:, :in_size], moved, is_gated=is_gated, shape=shape)
    x, wide_bias = wide[:, :in_size].float(), None if bias is None else bias.float()
    expected = fp8_linear.fp8_linear_reference(x, weight, scales, wide_bias, is_gated)
    assert_close(y, expected.to(dtype), bfloat16=3.2e-2)


def check_fp8_rounded(
    device: str,
    sizes: tuple[int, int, int],
    form: str,
    is_gated: bool,
    splits: int = 1,
    shape: fp8_linear.Fp8Shape | None = None,
) -> None:
    """Rows are rounded as `quantise_rows` does; the definition takes the rounded values, and a bias where the
    inputs are cut into `splits` parts.

    What is left of the distance: y in bfloat16 (2^-9 of it), with a gate three more roundings of which silu
    enlarges one, and sums of 8-bit products, which a matrix instruction cuts off at 2^-13 of the largest.
    Half-way values of x that go to the other neighbour fail in blocks: 0.27 off, with a gate 0.6.
    """
    num_rows, out_size, in_size = sizes
    x = randn(num_rows, in_size, dtype=torch.bfloat16)
    weight, scales = fp8_weight(out_size, in_size, form)
    bias = randn(out_size, dtype=torch.bfloat16, seed=2) if splits != 1 else None
    y = fp8_linear.fp8_linear_triton(
        x.to(device),
        weight.to(device),
        scales.to(device),
        None if bias is None else bias.to(device),
        is_gated=is_gated,
        is_rounded=True,
        splits=splits,
        shape=shape,
    )
    group = BLOCK if form == "block" else in_size
    rounded, row_scales = quantise_rows.quantise_rows_reference(x, group)
    values = rounded.float() * row_scales.repeat_interleave(group, dim=1)[:, :in_size]
    wide_bias = None if bias is None else bias.float()
    expected = fp8_linear.fp8_linear_reference(values, weight, scales, wide_bias, is_gated)
    torch.testing.assert_close(y.cpu().float(), expected, atol=2e-2, rtol=2e-2)


def check_fp8_blocks(
    device: str, sizes: tuple[int, int, int], product: Callable[..., torch.Tensor] = fp8_blocks_triton
) -> None:
    """Near the product of the rounded rows as in `check_fp8_rounded`. Of the rows as they are, each term is
    off by FP8_ROUNDING at most, and the terms' errors add up at random.
    """
    num_rows, out_size, in_size = sizes
    x = randn(num_rows, in_size, dtype=torch.bfloat16)
    weight, scales = fp8_weight(out_size, in_size, "block")
    y = product(x.to(device), weight.to(device), scales.to(device)).cpu().float()
    rounded, row_scales = quantise_rows.quantise_rows_reference(x, BLOCK)
    values = rounded.float() * row_scales.repeat_interleave(BLOCK, dim=1)[:, :in_size]
    exact = fp8_linear.fp8_linear_reference(values, weight, scales)
    torch.testing.assert_close(y, exact, atol=2e-2, rtol=2e-2)
    plain = fp8_linear.fp8_linear_reference(x.float(), weight, scales)
    assert (y - plain).norm() <= FP8_ROUNDING * plain.norm()


def check_quantise_rows(device: str, num_rows: int, width: int, group: int, dtype: torch.dtype) -> None:
    """A row of zeros has a scale of 1; values beyond the width are NaN."""
    wide = torch.full((num_rows, width + 3), NAN, dtype=dtype)
    wide[:, :width] = randn(num_rows, width, dtype=dtype)
    wide[0, :width] = 0
    check_rounded_bits(device, wide, width, group)


def check_quantise_half_way(device: str, dtype: torch.dtype) -> None:
    """Every quotient is half-way between two neighbours and goes to the even one.

    The scales are 3, 5 and 7: with few bits, times a half-way value they fit bfloat16. A quotient that is one
    unit in the last place off falls to the other neighbour: 63 of 126 values of a row.
    """
    stored = torch.arange(FP8_LARGEST_BITS + 1, dtype=torch.uint8).view(FP8).float()
    half_way = (stored[1:] + stored[:-1]) / 2
    signs = 1 - 2 * (torch.arange(len(stored)) % 4 // 2)
    row = signs * torch.cat((half_way, stored[-1:]))
    x = torch.tensor([[3.0], [5.0], [7.0]]) * row
    assert torch.equal(x.to(dtype).float(), x)
    check_rounded_bits(device, x.to(dtype), len(row), len(row))


def check_rounded_bits(device: str, wide: torch.Tensor, width: int, group: int) -> None:
    """The kernel gives the bits of the definition for the first columns. Rows behind the last are zeros."""
    for multiple in (1, 4):
        rounded, scales = quantise_rows.quantise_rows_triton(wide.to(device)[:, :width], group, multiple)
        expected, expected_scales = quantise_rows.quantise_rows_reference(wide[:, :width], group, multiple)
        assert len(rounded) == len(scales) == -(-len(wide) // multiple) * multiple
        assert torch.equal(scales.cpu(), expected_scales)
        assert torch.equal(rounded.cpu().view(torch.uint8), expected.view(torch.uint8))
        if group < width:
            assert scales.stride() == (1, len(scales)), "the library reads them so"


def int4_weight(out_size: int, in_size: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, zeros and scales that differ from group to group and from output to output."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randint(0, 16, (out_size, in_size), generator=generator)
    shape = (in_size // group, out_size)
    zeros = torch.randint(0, 17, shape, generator=generator).to(torch.uint8)
    scales = (0.002 + 0.01 * torch.rand(shape, generator=generator)).to(torch.float16)
    return pack_int4(values, unit_of(in_size, group)), pack_groups(scales, zeros)


def check_dequantise_int4(device: str, out_size: int, in_size: int, group: int) -> None:
    parts = int4_weight(out_size, in_size, group)
    y = int4_linear.dequantise_int4_triton(*(part.to(device) for part in parts), torch.float32)
    assert_close(y, dequantise_int4(*parts, torch.float32))


def fp8_pool() -> torch.Tensor:
    """6 pages of 4 tokens, 2 layers, 2 KV heads of 16; the sink is zeros."""
    kv = to_fp8(randn(6, 2, 2, 4, 2, 16, seed=5))
    kv[0, :, :, 0].zero_()
    return kv


def check_fp8_store(device: str, dtype: torch.dtype) -> None:
    """Rows go to their places in 8 bits; beyond the largest value they become the largest."""
    ours, theirs = fp8_pool().to(device), fp8_pool()
    rows = kv_rows(torch.tensor([5, 0, 22]), theirs)
    k, v = (100 * randn(3, 2, 16, dtype=dtype, seed=seed) for seed in (1, 2))
    k[0, 0, :2] = torch.tensor([1000.0, -1000.0])
    store_kv_triton(ours, 1, rows.to(device), k.to(device), v.to(device))
    store_kv(theirs, 1, rows, k, v)
    assert theirs.float().abs().max() == 448
    assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))
    compact_kv_triton(ours, *(torch.tensor([[s]]).to(device) for s in (5, 9)))
    compact_kv_reference(theirs, *(torch.tensor([[s]]) for s in (5, 9)))
    assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))


def check_fp8_rotate(device: str, dtype: torch.dtype) -> None:
    ours, theirs = fp8_pool().to(device), fp8_pool()
    rows = kv_rows(torch.tensor([6, 0, 21]), theirs)
    heads = randn(3, 4 + 2 * 2, 16, dtype=dtype)
    tables = (randn(3, 16, dtype=dtype, seed=3), randn(3, 16, dtype=dtype, seed=4))
    q = rotate_store_triton(ours, 0, *(x.to(device) for x in (rows, heads, *tables)))
    assert_close(q, rotate_store(theirs, 0, rows, heads, *tables))
    # a rotated value may fall to either side of a boundary
    differing = ours.cpu().view(torch.uint8) != theirs.view(torch.uint8)
    assert int(differing.sum()) <= (0 if dtype == torch.float32 else 4)


def check_fp8_attention(device: str, dtype: torch.dtype) -> None:
    """Keys and values are converted as they are read, in each kernel that reads pages."""
    kv, scale = fp8_pool(), 0.3
    table, lens = torch.tensor([[3, 1, 5], [2, 4, 0]]), torch.tensor([10, 7])
    near = (kv.to(device), 1, table.to(device), lens.to(device))
    q = randn(2, 3, 4, 16, dtype=dtype)
    found = paged_verify_triton(q.to(device), *near, scale)
    assert_close(found, paged_verify_reference(q, kv, 1, table, lens, scale))
    starts, rows = torch.tensor([0, 5, 7]), randn(8, 4, 16, dtype=dtype)
    found = paged_extend_triton(
        rows.to(device), kv.to(device), 1, table.to(device), starts.to(device), lens.to(device), 5, scale
    )
    assert_close(found, paged_extend_reference(rows, kv, 1, table, starts, lens, scale))
    places = torch.tensor([0, 128, 256])
    ours, theirs = ([torch.full((256, 2, 16), NAN, dtype=dtype) for _ in range(2)] for _ in range(2))
    ours = [buffer.to(device) for buffer in ours]
    gather_context_triton(*near[:3], places.to(device), near[3], *ours)
    gather_context_reference(kv, 1, table, places, lens, *theirs)
    for mine, definition in zip(ours, theirs, strict=True):
        assert torch.equal(mine.cpu(), definition)


def quant_cases() -> Iterator[tuple[Callable[..., None], tuple[object, ...]]]:
    for dtype in DTYPES:
        for form, sizes in (("channel", (3, 70, 200)), ("block", (5, 256, 200)), ("channel", (18, 66, 128))):
            for is_gated in (False, True):
                yield check_fp8_linear, (sizes, form, is_gated, is_gated, dtype)
        yield check_fp8_linear, ((2, 130, 260), "block", True, False, dtype)
        for check in (check_fp8_store, check_fp8_rotate, check_fp8_attention):
            yield check, (dtype,)
        yield check_quantise_rows, (3, 300, 128, dtype)
        yield check_quantise_rows, (2, 100, 100, dtype)
        yield check_quantise_rows, (3, 2500, 128, dtype)
        yield check_quantise_rows, (3, 2500, 2500, dtype)
        yield check_quantise_rows, (3, 8200, 8200, dtype)
        yield check_quantise_rows, (65, 2500, 2500, dtype)
        yield check_quantise_half_way, (dtype,)
    for sizes in ((70, 256, 128), (33, 96, 32), (5, 192, 64)):
        yield check_dequantise_int4, sizes
    for form in ("channel", "block"):
        for is_gated in (False, True):
            yield check_fp8_rounded, ((18, 256, 260), form, is_gated)
            yield check_fp8_rows, ((1, 256, 300), form, is_gated, torch.bfloat16)
            yield check_fp8_rows, ((3, 256, 300), form, is_gated, torch.bfloat16)
            yield check_fp8_rows, ((4, 512, 1024), form, is_gated, torch.bfloat16)
        cut = ((2, (18, 256, 260)), (3, (5, 130, 1024)), (0, (33, 256, 1024)), (8, (17, 130, 300)))
        for splits, sizes in cut:
            yield check_fp8_rounded, (sizes, form, False, splits)
        for num_rows in (1, 2):
            yield check_fp8_rows, ((num_rows, 70, 512), "channel", False, torch.float32)
    for shape in (fp8_linear.Fp8Shape(128, 128, 4, 2), fp8_linear.Fp8Shape(128, 128, 8, 2)):
        yield check_fp8_rounded, ((40, 512, 300), "block", True, 1, shape)
    yield check_fp8_blocks, ((70, 130, 260),)
