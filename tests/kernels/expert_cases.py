"""Cases of the kernels of mixture-of-experts layers: routing, grouping and the experts' products."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from baton.kernels import expert_mlp, group_experts, route_experts
from baton.tests.kernels.cases import DTYPES, NAN, assert_close, randn

TILES = (
    expert_mlp.ExpertTile(rows=16, out=16, inner=32, num_warps=4, num_stages=2),
    expert_mlp.ExpertTile(rows=32, out=32, inner=16, num_warps=4, num_stages=2),
)


def choices(num_rows: int, num_experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    """Distinct experts for each row, int32 `[T, K]`; expert 1 has none, and expert 0 one in each row."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(num_rows, num_experts, generator=generator).argsort(-1)
    order = torch.where(order == 1, num_experts, order) if num_experts > top_k else order
    width = num_experts - (num_experts > top_k)
    order = order[order < num_experts].view(num_rows, width)[:, :top_k].clone()
    has_first = (order == 0).any(-1, keepdim=True)
    order[:, :1] = torch.where(has_first, order[:, :1], 0)
    return order.to(torch.int32)


def check_route_experts(
    device: str, num_rows: int, num_experts: int, routing: route_experts.Routing, dtype: torch.dtype
) -> None:
    """With equal logits in some rows, which the lower ids win."""
    logits = 3 * randn(num_rows, num_experts, dtype=dtype)
    logits[::2, num_experts // 2 :] = logits[::2, :1]
    for bias in (None, randn(num_experts, seed=4)):
        on_device = None if bias is None else bias.to(device)
        ids, weights = route_experts.route_experts_triton(logits.to(device), routing, on_device)
        expected_ids, expected = route_experts.route_experts_reference(logits, routing, bias)
        assert torch.equal(ids.cpu(), expected_ids)
        assert_close(weights, expected)


def check_a_row_of_nan_takes_experts_that_exist(device: str, num_experts: int, top_k: int) -> None:
    logits = torch.full((2, num_experts), NAN)
    for is_sigmoid in (False, True):
        routing = route_experts.Routing(
            top_k=top_k, is_normalised=True, is_sigmoid=is_sigmoid, num_groups=2, kept_groups=2
        )
        ids, weights = route_experts.route_experts_triton(logits.to(device), routing)
        assert ((ids >= 0) & (ids < num_experts)).all()
        assert torch.isfinite(weights).all()


def check_group_experts(
    device: str, num_rows: int, num_experts: int, top_k: int, tile_rows: int, part: tuple[int, int] = (0, 0)
) -> None:
    """`part`: the first of the experts here, and their number; the others are elsewhere."""
    ids = choices(num_rows, num_experts, top_k)
    first, held = part if part[1] else (0, num_experts)
    tiles = group_experts.group_experts_triton(ids.to(device), held, tile_rows, first)
    expected = group_experts.group_experts_reference(ids, held, tile_rows, first)
    assert torch.equal(tiles.num_tiles.cpu(), expected.num_tiles)
    used = int(expected.num_tiles)
    assert used <= group_experts.max_tiles(ids.numel(), held, tile_rows) == expected.experts.shape[0]
    assert torch.equal(tiles.experts[:used].cpu(), expected.experts[:used])
    assert torch.equal(tiles.slots[: used * tile_rows].cpu(), expected.slots[: used * tile_rows])


def check_expert_mlp(
    device: str,
    sizes: tuple[int, int, int, int, int],
    is_grouped: bool,
    tile: int,
    dtype: torch.dtype,
    is_clamped: bool = False,
) -> None:
    """Columns beside x and an expert that nobody chose are NaN. `is_clamped`: biases and a clamped gate."""
    num_rows, num_experts, top_k, hidden, inner = sizes
    wide = torch.full((num_rows, hidden + 3), NAN, dtype=dtype)
    wide[:, :hidden] = randn(num_rows, hidden, dtype=dtype)
    ids = choices(num_rows, num_experts, top_k)
    weights = torch.softmax(randn(num_rows, top_k, seed=3), -1)
    gate_up = randn(num_experts, 2 * inner, hidden, dtype=dtype, seed=1) / hidden**0.5
    down = randn(num_experts, hidden, inner, dtype=dtype, seed=2) / inner**0.5
    for expert in set(range(num_experts)) - set(ids.flatten().tolist()):
        gate_up[expert], down[expert] = NAN, NAN
    x = wide[:, :hidden]
    form = on_device = expert_mlp.PLAIN_EXPERTS
    if is_clamped:
        biases = (randn(num_experts, size, dtype=dtype, seed=size).mul(0.3) for size in (2 * inner, hidden))
        form = expert_mlp.ExpertForm(*biases, limit=0.8, alpha=1.702)
        on_device = form._replace(
            gate_up_bias=form.gate_up_bias.to(device), down_bias=form.down_bias.to(device)
        )
    out = expert_mlp.expert_mlp_triton(
        wide.to(device)[:, :hidden],
        ids.to(device),
        weights.to(device),
        gate_up.to(device),
        down.to(device),
        form=on_device,
        tile=TILES[tile],
        is_grouped=is_grouped,
    )
    expected = expert_mlp.expert_mlp(x.contiguous(), ids, weights, gate_up, down, form=form)
    assert_close(out, expected, bfloat16=3.2e-2)


@contextmanager
def unwritten_values_are_nan() -> Iterator[None]:
    """Otherwise a new tensor may hold the right values of one that was freed."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # this also fills memory that `torch.empty` returns
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def check_prompt_experts(
    device: str,
    sizes: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    is_clamped: bool = False,
    part: tuple[int, int] = (0, 0),
) -> None:
    """The products for prompts. On a GPU their bits are those of the others. Columns beside x and an expert
    that nobody chose are NaN. `part`: the first of the experts here, and their number.
    """
    num_rows, num_experts, top_k, hidden, inner = sizes
    first, held = part if part[1] else (0, num_experts)
    wide = torch.full((num_rows, hidden + 8), NAN, dtype=dtype)
    wide[:, :hidden] = randn(num_rows, hidden, dtype=dtype)
    ids = choices(num_rows, num_experts, top_k)
    weights = torch.softmax(randn(num_rows, top_k, seed=3), -1)
    gate_up = randn(held, 2 * inner, hidden, dtype=dtype, seed=1) / hidden**0.5
    down = randn(held, hidden, inner, dtype=dtype, seed=2) / inner**0.5
    for expert in set(range(held)) - set((ids - first).flatten().tolist()):
        gate_up[expert], down[expert] = NAN, NAN
    form = expert_mlp.ExpertForm(first=first, total=num_experts if part[1] else 0)
    if is_clamped:
        biases = (randn(held, size, dtype=dtype, seed=size).mul(0.3) for size in (2 * inner, hidden))
        form = form._replace(
            **dict(zip(("gate_up_bias", "down_bias"), biases, strict=True)), limit=0.8, alpha=1.702
        )
    expected = expert_mlp.expert_mlp(wide[:, :hidden].contiguous(), ids, weights, gate_up, down, form=form)
    inputs = [each.to(device) for each in (wide, ids, weights, gate_up, down)]
    on_device = form._replace(**{
        name: value.to(device) for name, value in form._asdict().items() if torch.is_tensor(value)
    })  # fmt: skip
    with unwritten_values_are_nan():
        found, other = (
            expert_mlp.expert_mlp_triton(
                inputs[0][:, :hidden], *inputs[1:], form=on_device, is_grouped=True, is_prompt=is_prompt
            )
            for is_prompt in (True, False)
        )
    assert_close(found, expected, bfloat16=3.2e-2)
    if device == "cuda":  # the interpreter multiplies matrices of different sizes in different orders
        assert torch.equal(found, other)


def check_parts_of_experts(device: str, num_parts: int, is_grouped: bool, is_clamped: bool) -> None:
    """Parts of the experts sum up to all of them; a row without an expert in a part gets zeros from it."""
    num_rows, num_experts, top_k, hidden, inner = 11, 6, 2, 40, 24
    x, ids = randn(num_rows, hidden), choices(num_rows, num_experts, top_k)
    weights = torch.softmax(randn(num_rows, top_k, seed=3), -1)
    gate_up = randn(num_experts, 2 * inner, hidden, seed=1) / hidden**0.5
    down = randn(num_experts, hidden, inner, seed=2) / inner**0.5
    form = expert_mlp.PLAIN_EXPERTS
    if is_clamped:
        biases = (randn(num_experts, size, seed=size).mul(0.3) for size in (2 * inner, hidden))
        form = expert_mlp.ExpertForm(*biases, limit=0.8, alpha=1.702)
    whole = expert_mlp.expert_mlp(x, ids, weights, gate_up, down, form=form)
    held, total, num_elsewhere = num_experts // num_parts, torch.zeros_like(whole), 0
    for first in range(0, num_experts, held):
        own = slice(first, first + held)
        part = form._replace(first=first, total=num_experts)
        if is_clamped:
            part = part._replace(gate_up_bias=form.gate_up_bias[own], down_bias=form.down_bias[own])
        reference = expert_mlp.expert_mlp(x, ids, weights, gate_up[own], down[own], form=part)
        on_device = part._replace(**{
            name: value.to(device) for name, value in part._asdict().items() if torch.is_tensor(value)
        })  # fmt: skip
        found = expert_mlp.expert_mlp_triton(
            x.to(device),
            ids.to(device),
            weights.to(device),
            gate_up[own].to(device),
            down[own].to(device),
            form=on_device,
            tile=TILES[0],
            is_grouped=is_grouped,
        )
        assert_close(found, reference)
        is_elsewhere = ((ids < first) | (ids >= first + held)).all(1)
        num_elsewhere += int(is_elsewhere.sum())
        assert not reference[is_elsewhere].any()
        assert not found.cpu()[is_elsewhere].any()
        total += reference
    assert num_elsewhere
    assert_close(total, whole)


def expert_cases() -> Iterator[tuple[Callable[..., None], tuple[object, ...]]]:
    for dtype in DTYPES:
        for sizes in ((0, 4, 2), (1, 1, 1), (3, 60, 4), (5, 8, 3)):
            *sizes, top_k = sizes
            for is_normalised in (False, True):
                plain = route_experts.Routing(top_k=top_k, is_normalised=is_normalised)
                sigmoid = replace(plain, is_sigmoid=True, scale=2.5)
                for routing in (plain, sigmoid):
                    yield check_route_experts, (*sizes, routing, dtype)
        for num_groups, kept, best in ((4, 2, 1), (6, 3, 2), (2, 1, 5)):
            for is_sigmoid in (False, True):
                routing = route_experts.Routing(
                    top_k=5,
                    is_normalised=is_sigmoid,
                    is_sigmoid=is_sigmoid,
                    num_groups=num_groups,
                    kept_groups=kept,
                    best_of_group=best,
                )
                yield check_route_experts, (7, 60, routing, dtype)
        for sizes in ((0, 4, 2, 32, 16), (1, 3, 2, 40, 24), (23, 5, 3, 50, 20)):
            for is_grouped in (False, True):
                yield check_expert_mlp, (sizes, is_grouped, int(is_grouped), dtype)
        yield check_expert_mlp, ((5, 3, 2, 40, 24), True, 0, dtype, True)
    # tiles of all heights, full and with one row more; more tiles than neighbours; outputs that fill no tile
    yield check_prompt_experts, ((160, 4, 2, 128, 64), torch.bfloat16)
    yield check_prompt_experts, ((65, 6, 2, 192, 320), torch.float16)
    yield check_prompt_experts, ((33, 12, 4, 64, 192), torch.bfloat16, True)
    yield check_prompt_experts, ((90, 6, 2, 128, 64), torch.bfloat16, False, (2, 3))
    yield check_a_row_of_nan_takes_experts_that_exist, (6, 4)
    for case in ((1, 3, 1, 16), (9, 4, 2, 16), (40, 7, 3, 32), (700, 5, 2, 16)):
        yield check_group_experts, case
    for part in ((0, 3), (3, 4), (6, 1)):
        yield check_group_experts, (40, 7, 3, 16, part)
    for is_grouped in (False, True):
        for num_parts, is_clamped in ((2, False), (3, True)):
            yield check_parts_of_experts, (num_parts, is_grouped, is_clamped)
