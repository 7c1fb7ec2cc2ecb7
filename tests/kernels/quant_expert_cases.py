"""Kernels of quantised experts against their definitions, as in `cases`: columns beside x and experts that
nobody chose are poison, launches on `device`, results compared on the CPU in float32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from baton.kernels.expert_mlp import PLAIN_EXPERTS, ExpertForm
from baton.kernels.fp8_expert_rows import ExpertRowsShape, fp8_expert_rows_triton
from baton.kernels.fp8_experts import Fp8ExpertTile, Fp8Matrices, fp8_experts_reference, fp8_experts_triton
from baton.kernels.fp8_scales import FP8, FP8_ROUNDING
from baton.kernels.mxfp4 import pack_mxfp4
from baton.kernels.packed_experts import (
    PackedExpertTile,
    PackedMatrices,
    packed_experts_reference,
    packed_experts_triton,
)
from baton.kernels.packed_words import pack_groups, pack_words
from baton.tests.kernels.cases import DTYPES, NAN, randn
from baton.tests.kernels.expert_cases import choices
from baton.tests.kernels.quant_cases import fp8_weight

Sizes = tuple[int, int, int, int, int]  # rows, experts, experts of a row, hidden size, intermediate size
FP8_NAN = 0x7F
SHAPES = ExpertRowsShape(32, 256, 4, 2), ExpertRowsShape(64, 64, 4, 2)


def rows_of(sizes: Sizes, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, a slice of rows that go on with NaN, ids, weights)."""
    num_rows, num_experts, top_k, hidden, _ = sizes
    wide = torch.full((num_rows, hidden + 16), NAN, dtype=dtype)
    wide[:, :hidden] = randn(num_rows, hidden, dtype=dtype)
    return (
        wide[:, :hidden],
        choices(num_rows, num_experts, top_k),
        torch.softmax(randn(num_rows, top_k, seed=3), -1),
    )


def on(device: str, x: torch.Tensor) -> torch.Tensor:
    """`x` on the device, with what lies beside its columns."""
    base = x if x._base is None else x._base
    return base.to(device)[:, : x.shape[1]] if x.dim() == 2 and base.dim() == 2 else x.to(device)


def fp8_experts_of(sizes: Sizes, form: str) -> tuple[Fp8Matrices, Fp8Matrices]:
    """Matrices that differ from expert to expert by their scales and by the order of their rows."""
    _, num_experts, _, hidden, inner = sizes
    made = []
    for out_size, in_size in ((2 * inner, hidden), (hidden, inner)):
        weight, scales = fp8_weight(out_size, in_size, form)
        weights = [weight.view(torch.uint8).roll(expert, dims=0) for expert in range(num_experts)]
        stacked = torch.stack(weights).view(FP8)
        factors = [scales * (1 + 0.25 * expert) for expert in range(num_experts)]
        made.append(Fp8Matrices(stacked, torch.stack(factors)))
    return made[0], made[1]


def poisoned(matrices: Fp8Matrices, ids: torch.Tensor) -> Fp8Matrices:
    """NaN in the experts that `ids` do not name."""
    weight, scales = matrices.weight.clone(), matrices.scales.clone()
    for expert in set(range(len(weight))) - set(ids.flatten().tolist()):
        weight.view(torch.uint8)[expert] = FP8_NAN
        scales[expert] = NAN
    return Fp8Matrices(weight, scales)


def check_fp8_experts(device: str, sizes: Sizes, form: str, dtype: torch.dtype) -> None:
    """Rows that are not rounded, grouped."""
    x, ids, weights = rows_of(sizes, dtype)
    first, second = (poisoned(each, ids) for each in fp8_experts_of(sizes, form))
    found = fp8_experts_triton(
        on(device, x),
        ids.to(device),
        weights.to(device),
        *(Fp8Matrices(each.weight.to(device), each.scales.to(device)) for each in (first, second)),
        is_rounded=False,
        tile=Fp8ExpertTile(rows=16, out=32, inner=32, num_warps=4, num_stages=2),
    )
    expected = fp8_experts_reference(x.float(), ids, weights, first, second)
    assert_near(found, expected, 2e-2 if dtype == torch.bfloat16 else 1e-5)


def check_fp8_expert_rows(device: str, sizes: Sizes, form: str, dtype: torch.dtype) -> None:
    """One slot at a time."""
    x, ids, weights = rows_of(sizes, dtype)
    first, second = (poisoned(each, ids) for each in fp8_experts_of(sizes, form))
    found = fp8_expert_rows_triton(
        on(device, x),
        ids.to(device),
        weights.to(device),
        *(tensor.to(device) for each in (first, second) for tensor in each),
        shapes=SHAPES,
    )
    expected = fp8_experts_reference(x.float(), ids, weights, first, second)
    assert_near(found, expected, 2e-2 if dtype == torch.bfloat16 else 1e-5)


def check_fp8_experts_rounded(device: str, sizes: Sizes, form: str) -> None:
    """Each of the two roundings is off by FP8_ROUNDING / sqrt(3) at most."""
    x, ids, weights = rows_of(sizes, torch.bfloat16)
    first, second = (poisoned(each, ids) for each in fp8_experts_of(sizes, form))
    found = fp8_experts_triton(
        on(device, x),
        ids.to(device),
        weights.to(device),
        *(Fp8Matrices(each.weight.to(device), each.scales.to(device)) for each in (first, second)),
        tile=Fp8ExpertTile(rows=32, out=64, inner=64, num_warps=4, num_stages=2),
    )
    expected = fp8_experts_reference(x.float(), ids, weights, first, second)
    assert_near(found, expected, 1.5 * FP8_ROUNDING)
    if x.shape[0]:
        assert not torch.equal(found.cpu(), expected.to(torch.bfloat16)), "rows were not rounded"


def packed_experts_of(sizes: Sizes, group: int) -> tuple[PackedMatrices, PackedMatrices]:
    """4-bit integers in groups of `group`, MXFP4 with 0; every expert has values of its own."""
    _, num_experts, _, hidden, inner = sizes
    made = []
    for out_size, in_size in ((2 * inner, hidden), (hidden, inner)):
        generator = torch.Generator().manual_seed(in_size)
        pairs = []
        for _ in range(num_experts):
            if group:
                values = torch.randint(0, 16, (out_size, in_size), generator=generator)
                shape = (in_size // group, out_size)
                zeros = torch.randint(1, 17, shape, generator=generator)
                scales = (0.002 + 0.01 * torch.rand(shape, generator=generator)).to(torch.float16)
                pairs.append((pack_words(values), pack_groups(scales, zeros, group)))
            else:
                shape = (out_size, in_size // 32)
                blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
                scales = torch.randint(121, 126, shape, generator=generator).to(torch.uint8)
                pairs.append(pack_mxfp4(blocks, scales))
        made.append(PackedMatrices(*(torch.stack(part) for part in zip(*pairs, strict=True)), group))
    return made[0], made[1]


def check_packed_experts(
    device: str,
    sizes: Sizes,
    group: int,
    is_grouped: bool,
    dtype: torch.dtype,
    is_clamped: bool = False,
    tile: PackedExpertTile | None = None,
) -> None:
    """`is_clamped`: biases and a clamped gate."""
    x, ids, weights = rows_of(sizes, dtype)
    _, num_experts, _, hidden, inner = sizes
    first, second = packed_experts_of(sizes, group)
    form = on_device = PLAIN_EXPERTS
    if is_clamped:
        biases = (randn(num_experts, size, dtype=dtype, seed=size).mul(0.3) for size in (2 * inner, hidden))
        form = ExpertForm(*biases, limit=0.8, alpha=1.702)
        on_device = form._replace(
            gate_up_bias=form.gate_up_bias.to(device), down_bias=form.down_bias.to(device)
        )
    found = packed_experts_triton(
        on(device, x),
        ids.to(device),
        weights.to(device),
        *(
            PackedMatrices(each.words.to(device), each.scales.to(device), each.group)
            for each in (first, second)
        ),
        form=on_device,
        tile=tile or PackedExpertTile(rows=16, out=32, num_warps=4, num_stages=2),
        is_grouped=is_grouped,
    )
    if form.limit:
        form = form._replace(gate_up_bias=form.gate_up_bias.float(), down_bias=form.down_bias.float())
    expected = packed_experts_reference(x.float(), ids, weights, first, second, form=form)
    assert_near(found, expected, 2e-2 if dtype == torch.bfloat16 else 1e-5)


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Memory that no kernel writes is NaN."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


def check_parts_of_fp8_experts(device: str, sizes: Sizes, form: str, is_grouped: bool) -> None:
    """Two halves of the experts, each for the rows of both: a row gets the sum over those that are here."""
    x, ids, weights = rows_of(sizes, torch.float32)
    matrices, held = fp8_experts_of(sizes, form), sizes[1] // 2
    for first in (0, held):
        own = [Fp8Matrices(*(part[first : first + held] for part in each)) for each in matrices]
        part = ExpertForm(first=first, total=sizes[1])
        on_device = [Fp8Matrices(each.weight.to(device), each.scales.to(device)) for each in own]
        rows = on(device, x), ids.to(device), weights.to(device)
        with unwritten_is_nan():
            if is_grouped:
                found = fp8_experts_triton(*rows, *on_device, form=part, is_rounded=False)
            else:
                found = fp8_expert_rows_triton(*rows, *on_device[0], *on_device[1], form=part, shapes=SHAPES)
        assert_near(found, fp8_experts_reference(x, ids, weights, *own, form=part), 1e-5)


def check_parts_of_packed_experts(device: str, sizes: Sizes, group: int, is_grouped: bool) -> None:
    """As `check_parts_of_fp8_experts`, with biases."""
    x, ids, weights = rows_of(sizes, torch.float32)
    _, num_experts, _, hidden, inner = sizes
    matrices, held = packed_experts_of(sizes, group), num_experts // 2
    biases = [randn(num_experts, size, seed=size).mul(0.3) for size in (2 * inner, hidden)]
    for first in (0, held):
        here = slice(first, first + held)
        own = [PackedMatrices(each.words[here], each.scales[here], group) for each in matrices]
        part = ExpertForm(*(bias[here] for bias in biases), first=first, total=num_experts)
        on_device = [PackedMatrices(each.words.to(device), each.scales.to(device), group) for each in own]
        with unwritten_is_nan():
            found = packed_experts_triton(
                on(device, x),
                ids.to(device),
                weights.to(device),
                *on_device,
                form=part._replace(
                    gate_up_bias=part.gate_up_bias.to(device), down_bias=part.down_bias.to(device)
                ),
                is_grouped=is_grouped,
            )
        assert_near(found, packed_experts_reference(x, ids, weights, *own, form=part), 1e-5)


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """By the norm of each row, which a wrong expert, scale or half changes by more than a tenth."""
    assert found.shape == expected.shape
    error = (found.cpu().float() - expected).norm(dim=-1)
    assert (error <= tolerance * expected.norm(dim=-1)).all(), (error / expected.norm(dim=-1)).tolist()


CHANNEL, BLOCK, ROUNDED = (7, 4, 2, 72, 40), (5, 3, 2, 200, 128), (19, 3, 2, 200, 128)
CLAMPED = (4, 3, 2, 64, 96)
HALVES, HALVES_IN_BLOCKS = (7, 4, 2, 64, 32), (5, 4, 2, 136, 128)
PACKED: tuple[tuple[int, Sizes], ...] = (
    (0, (5, 3, 2, 96, 64)),
    (32, (5, 3, 2, 64, 160)),
    (64, (3, 4, 2, 128, 64)),
    (128, (3, 4, 2, 256, 128)),
)


def quant_expert_cases(*, is_whole: bool = True) -> Iterator[tuple[Callable[..., None], tuple[object, ...]]]:
    if not is_whole:
        yield check_fp8_experts_rounded, (ROUNDED, "block")
        yield check_fp8_expert_rows, (CHANNEL, "channel", torch.bfloat16)
        yield check_packed_experts, (CLAMPED, 0, True, torch.bfloat16, True)
        yield check_packed_experts, (PACKED[3][1], 128, False, torch.bfloat16)
        yield check_parts_of_fp8_experts, (HALVES, "channel", False)
        yield check_parts_of_packed_experts, (HALVES, 0, False)
        return
    for dtype in DTYPES:
        for form, sizes in (("channel", CHANNEL), ("block", BLOCK)):
            yield check_fp8_experts, (sizes, form, dtype)
            yield check_fp8_expert_rows, (sizes, form, dtype)
        for group, sizes in PACKED:
            for is_grouped in (False, True):
                yield check_packed_experts, (sizes, group, is_grouped, dtype)
        yield check_packed_experts, (CLAMPED, 0, True, dtype, True)
    yield check_fp8_experts_rounded, (ROUNDED, "block")
    yield check_fp8_experts_rounded, ((19, 3, 2, 72, 40), "channel")
    yield check_fp8_experts_rounded, ((0, 3, 2, 32, 16), "channel")
    yield check_packed_experts, ((0, 3, 2, 64, 32), 0, True, torch.float32)
    for is_grouped in (False, True):
        yield check_parts_of_fp8_experts, (HALVES, "channel", is_grouped)
        yield check_parts_of_fp8_experts, (HALVES_IN_BLOCKS, "block", is_grouped)
        yield check_parts_of_packed_experts, (HALVES, 0, is_grouped)
        yield check_parts_of_packed_experts, (HALVES, 32, is_grouped)
