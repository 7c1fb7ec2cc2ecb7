"""Times the launches of a decode layer of few rows, joined and apart: `python
tests/kernels/bench_few_rows.py`.

Each way computes the same layer, or a part of it, with the weights of several layers in one CUDA graph, so
that no cache holds them. Printed are microseconds a layer, launches a layer, and the distance of the results
from those of the first way, `|a - b| / |b|`. Arguments choose sections by the beginnings of their names. With
`--compile` in front, their kernels are compiled, in threads, and nothing is timed: several such processes at
once fill Triton's cache on disk.
"""

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
from baton.kernels.expert_mlp import PLAIN_EXPERTS, ExpertForm, expert_mlp
from baton.kernels.few_experts import FewExperts, FewTile, few_experts_triton, router_logits_triton
from baton.kernels.few_packed_experts import first_products, second_products
from baton.kernels.fp8_linear import fp8_linear
from baton.kernels.fp8_rows import RowsShape, scaled_fp8_triton, sum_fp8_triton
from baton.kernels.fp8_scales import Fp8Weight
from baton.kernels.kv_store import kv_rows
from baton.kernels.latent_attention import absorb, latent_verify, project_values
from baton.kernels.latent_step import LatentRows, LatentSizes, attend_latents_triton, prepare_latents_triton
from baton.kernels.latent_store import store_latent
from baton.kernels.logits import float32_logits
from baton.kernels.normed_linear import UnscaledRows, scaled_linear_triton, sum_linear_triton
from baton.kernels.packed_experts import MXFP4, PackedMatrices, packed_experts
from baton.kernels.rms_norm import NextNorm, add_rms_norm, rms_norm
from baton.kernels.rope import apply_rope
from baton.kernels.rotary_product import rotary_product_triton
from baton.kernels.rotate_store import HeadNorms, rotate_store_triton
from baton.kernels.route_experts import Routing, route_experts
from baton.kernels.skinny_linear import SkinnyShape, gated_linear, linear
from baton.kernels.split_rows import SplitTile
from baton.kernels.triton_jit import planned_launches
from baton.kernels.verify_attention import paged_verify_triton

PAGE_SIZE, EPS, REPLAYS = 16, 1e-5, 30
DEVICE = "cuda"


Result = torch.Tensor | UnscaledRows


@dataclass
class Way:
    """One way to compute `num_layers` layers: `run(layer)` returns the result of one."""

    name: str
    run: Callable[[int], Result | tuple[Result, ...]]


@dataclass
class Section:
    """Ways to compute the same; `num_bytes` a layer reads."""

    name: str
    num_layers: int
    num_bytes: int
    ways: list[Way] = field(default_factory=list)


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    x = torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)
    return x if scale == 1.0 else x.mul_(scale)


def weights_of(count: int, *shape: int) -> list[torch.Tensor]:
    return [random(*shape, scale=shape[-1] ** -0.5) for _ in range(count)]


# --- the products of a dense layer --------------------------------------------------------------------------


@dataclass(frozen=True)
class Dense:
    """The sizes of a dense layer."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    layers: int

    @property
    def attended(self) -> int:
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


LLAMA = Dense("8b", 4096, 32, 8, 128, 14336, 12)
SMOLLM = Dense("smollm2", 576, 9, 3, 64, 1536, 30)


def dense_section(dense: Dense, num_rows: int) -> Section:
    """From what attention gave to the heads of the next layer."""
    count = dense.layers
    output = weights_of(count, dense.hidden, dense.attended)
    gate_up = weights_of(count, 2 * dense.inner, dense.hidden)
    down = weights_of(count, dense.hidden, dense.inner)
    qkv = weights_of(count, dense.qkv, dense.hidden)
    norms = [1 + random(dense.hidden, scale=0.1) for _ in range(2)]
    attended, hidden = random(num_rows, dense.attended), random(num_rows, dense.hidden)
    num_bytes = 2 * sum(w[0].numel() for w in (output, gate_up, down, qkv))
    section = Section(f"{dense.name} products, {num_rows} rows", count, num_bytes)
    post, following = (NextNorm(weight, EPS) for weight in norms)

    def apart(layer: int) -> torch.Tensor:
        normed, middle = add_rms_norm(linear(attended, output[layer]), hidden, norms[0], EPS)
        delta = linear(gated_linear(normed, gate_up[layer]), down[layer])
        normed, _ = add_rms_norm(delta, middle, norms[1], EPS)
        return linear(normed, qkv[layer])

    def joined(shapes: tuple[SkinnyShape | None, ...], layer: int) -> torch.Tensor:
        middle, rows = sum_linear_triton(attended, output[layer], None, hidden, post, shape=shapes[0])
        inner = scaled_linear_triton(rows, gate_up[layer], is_gated=True, shape=shapes[1])
        _, rows = sum_linear_triton(inner, down[layer], None, middle, following, shape=shapes[2])
        return scaled_linear_triton(rows, qkv[layer], shape=shapes[3])

    section.ways += [Way("apart", apart), Way("norms joined", partial(joined, (None,) * 4))]
    if num_rows == 1:
        for name, shapes in (
            ("sums 4x512 2 warps", ((4, 512, 2, 4), None, (4, 512, 2, 4), None)),
            ("sums 16x512 8 warps", ((16, 512, 8, 3), None, (16, 512, 8, 3), None)),
            ("sums 8x256 2 warps", ((8, 256, 2, 5), None, (8, 256, 2, 5), None)),
            ("gate 4x512", (None, (4, 512, 4, 3), None, None)),
            ("gate 4x1024 8 warps", (None, (4, 1024, 8, 5), None, None)),
            ("gate 4x256 2 warps", (None, (4, 256, 2, 4), None, None)),
            ("qkv 16x256", (None, None, None, (16, 256, 4, 4))),
            ("qkv 8x512", (None, None, None, (8, 512, 4, 4))),
        ):
            tiles = tuple(None if shape is None else SkinnyShape(*shape) for shape in shapes)
            section.ways.append(Way(f"norms joined, {name}", partial(joined, tiles)))
    elif dense is LLAMA:
        few, wide, gate = SkinnyShape(16, 256, 2, 5), SkinnyShape(32, 256, 4, 4), SkinnyShape(64, 128, 4, 3)
        for name, shapes in (
            ("qkv 32", (few, None, few, wide)),
            ("gate 64x128, 3 stages", (None, gate, None, None)),
            ("sums 16", (few, None, few, None)),
            ("sums 32", (wide, None, wide, None)),
            ("sums 32, qkv 16, gate 64x128", (wide, gate, wide, few)),
            ("sums 32, gate 64x128", (wide, gate, wide, None)),
        ):
            section.ways.append(Way(f"norms joined, {name}", partial(joined, shapes)))
    else:
        tiny = SkinnyShape(16, 128, 4, 5)
        section.ways.append(Way("norms joined, 16x128", partial(joined, (tiny,) * 4)))
        tiny = SkinnyShape(16, 64, 2, 5)
        section.ways.append(Way("norms joined, 16x64", partial(joined, (tiny,) * 4)))
    return section


def fp8_section(dense: Dense) -> Section:
    """As `dense_section`, of one row and weights in 8 bits with a scale for each output."""
    count = dense.layers

    def made(out: int, inner: int) -> list[Fp8Weight]:
        values = [random(out, inner, scale=16.0).to(torch.float8_e4m3fn) for _ in range(count)]
        return [Fp8Weight(each, torch.full((out,), inner**-0.5 / 16, device=DEVICE)) for each in values]

    output, gate_up = made(dense.hidden, dense.attended), made(2 * dense.inner, dense.hidden)
    down, qkv = made(dense.hidden, dense.inner), made(dense.qkv, dense.hidden)
    norms = [1 + random(dense.hidden, scale=0.1) for _ in range(2)]
    attended, hidden = random(1, dense.attended), random(1, dense.hidden)
    num_bytes = sum(w[0].values.numel() for w in (output, gate_up, down, qkv))
    section = Section(f"{dense.name} products in 8 bits, 1 row", count, num_bytes)
    post, following = (NextNorm(weight, EPS) for weight in norms)

    def apart(layer: int) -> torch.Tensor:
        normed, middle = add_rms_norm(fp8_linear(attended, *output[layer]), hidden, norms[0], EPS)
        delta = fp8_linear(fp8_linear(normed, *gate_up[layer], is_gated=True), *down[layer])
        normed, _ = add_rms_norm(delta, middle, norms[1], EPS)
        return fp8_linear(normed, *qkv[layer])

    def joined(
        sum_tile: RowsShape | None, gate: RowsShape | None, last: RowsShape | None, layer: int
    ) -> torch.Tensor:
        middle, rows = sum_fp8_triton(attended, output[layer], hidden, post, shape=sum_tile)
        inner = scaled_fp8_triton(rows, gate_up[layer], is_gated=True, shape=gate)
        _, rows = sum_fp8_triton(inner, down[layer], middle, following, shape=sum_tile)
        return scaled_fp8_triton(rows, qkv[layer], shape=last)

    section.ways += [Way("apart", apart), Way("joined", partial(joined, None, None, None))]
    for tiles in (
        (RowsShape(4, 1024, 4, 3), RowsShape(2, 1024, 4, 3), RowsShape(4, 1024, 4, 3)),
        (RowsShape(8, 512, 4, 5), RowsShape(4, 512, 4, 5), RowsShape(8, 512, 4, 5)),
        (RowsShape(4, 512, 2, 4), RowsShape(2, 512, 2, 4), RowsShape(4, 512, 2, 4)),
        (RowsShape(16, 512, 8, 4), RowsShape(8, 512, 8, 4), RowsShape(16, 512, 8, 4)),
        (RowsShape(8, 1024, 8, 3), RowsShape(4, 1024, 8, 3), RowsShape(8, 1024, 8, 3)),
        (RowsShape(4, 2048, 8, 2), RowsShape(2, 2048, 8, 2), RowsShape(4, 2048, 8, 2)),
    ):
        said = "; ".join(f"{t.out}x{t.inner} {t.num_warps}w {t.num_stages}s" for t in tiles[:2])
        section.ways.append(Way(f"joined, {said}", partial(joined, *tiles)))
    return section


# --- experts ------------------------------------------------------------------------------------------------


def expert_section(
    name: str, num_experts: int, top_k: int, inner: int, hidden: int, num_shared: int, num_rows: int
) -> Section:
    """From the residual sum behind attention to the one behind the experts, and its norm."""
    count = 6
    routing = Routing(top_k=top_k, is_normalised=True)
    router = weights_of(count, num_experts, hidden)
    gate_up = weights_of(count, num_experts, 2 * inner, hidden)
    down = weights_of(count, num_experts, hidden, inner)
    shared_up = weights_of(count, 2 * num_shared * inner, hidden) if num_shared else []
    shared_down = weights_of(count, hidden, num_shared * inner) if num_shared else []
    norms = [1 + random(hidden, scale=0.1) for _ in range(2)]
    attended, residual, output = (
        random(num_rows, hidden),
        random(num_rows, hidden),
        weights_of(count, hidden, hidden),
    )
    used = (num_rows * top_k + num_shared) * 3 * inner * hidden * 2
    section = Section(f"{name} experts, {num_rows} rows", count, used + 2 * hidden * (hidden + num_experts))
    post, following = (NextNorm(weight, EPS) for weight in norms)

    def apart(layer: int) -> tuple[torch.Tensor, ...]:
        normed, middle = add_rms_norm(linear(attended, output[layer]), residual, norms[0], EPS)
        logits = float32_logits(normed, router[layer]) if num_shared else linear(normed, router[layer])
        ids, weights = route_experts(logits, routing)
        delta = expert_mlp(normed, ids, weights, gate_up[layer], down[layer])
        if num_shared:
            delta = delta + linear(gated_linear(normed, shared_up[layer]), shared_down[layer])
        return add_rms_norm(delta, middle, norms[1], EPS)

    def joined(first: FewTile | None, second: FewTile | None, block: int, layer: int) -> tuple[Result, ...]:
        middle, rows = sum_linear_triton(attended, output[layer], None, residual, post)
        shared = (shared_up[layer], shared_down[layer]) if num_shared else (None, None)
        weights = FewExperts(
            routing, router[layer], gate_up[layer], down[layer], None, num_shared > 0, *shared
        )
        total, rows, _ = few_experts_triton(
            rows, weights, middle, following, first=first, second=second, block_experts=block
        )
        return rows, total

    section.ways += [Way("apart", apart), Way("joined", partial(joined, None, None, 1))]
    for label, first, second, block in (
        ("first 4x512, 4 stages", FewTile(4, 512, 4, 4), None, 1),
        ("first 4x512, 3 stages", FewTile(4, 512, 4, 3), None, 1),
        ("first 8x256, 5 stages", FewTile(8, 256, 4, 5), None, 1),
        ("first 4x256, 5 stages", FewTile(4, 256, 4, 5), None, 1),
        ("first 4x256 2 warps, 4 stages", FewTile(4, 256, 2, 4), None, 1),
        ("first 8x128 2 warps, 4 stages", FewTile(8, 128, 2, 4), None, 1),
        ("second 8x256 4 warps", None, FewTile(8, 256, 4, 1), 1),
        ("second 8x128 4 warps", None, FewTile(8, 128, 4, 1), 1),
        ("second 4x256 8 warps", None, FewTile(4, 256, 8, 1), 1),
        ("second 4x256 4 warps", None, FewTile(4, 256, 4, 1), 1),
        ("second 16x128 8 warps", None, FewTile(16, 128, 8, 1), 1),
        ("second 8x128 8 warps", None, FewTile(8, 128, 8, 1), 1),
        ("second 4x128 4 warps", None, FewTile(4, 128, 4, 1), 1),
        ("second 16x256 8 warps", None, FewTile(16, 256, 8, 1), 1),
        ("second 16x128 4 warps", None, FewTile(16, 128, 4, 1), 1),
        ("logits of 2", None, None, 2),
    ):
        section.ways.append(Way(f"joined, {label}", partial(joined, first, second, block)))
    rows = UnscaledRows(attended, torch.rand(num_rows, 128, device=DEVICE), EPS)
    for block in (1, 2, 4):

        def logits_alone(block: int, layer: int) -> torch.Tensor:
            shared = (shared_up[layer], shared_down[layer]) if num_shared else (None, None)
            weights = FewExperts(routing, router[layer], gate_up[layer], down[layer], None, True, *shared)
            return router_logits_triton(rows, weights, block_experts=block)

        section.ways.append(Way(f"(logits alone, of {block})", partial(logits_alone, block)))
    return section


GPT_OSS = ExpertForm(limit=7.0, alpha=1.702)


def packed(count: int, out_size: int, in_size: int, group: int) -> PackedMatrices:
    """Random words of `count` experts, with scales near one hundredth."""
    parts = -(-in_size // 128)
    words = torch.randint(-(2**15), 2**15, (count, out_size, 32 * parts), device=DEVICE, dtype=torch.int16)
    if group:
        shape, word = (count, parts * 128 // group, out_size), 8 << 16 | 0x1F00
    else:
        shape, word = (count, parts, out_size), 0xB6B7B6B6 - (1 << 32)
    return PackedMatrices(words, torch.full(shape, word, device=DEVICE, dtype=torch.int32), group)


FIRST_PACKED_TILES = (
    (8, 2, 2, 4), (8, 2, 2, 6), (16, 2, 2, 3), (16, 2, 2, 5), (16, 2, 2, 6), (16, 2, 2, 8), (16, 4, 4, 4),
    (16, 4, 4, 6), (4, 4, 2, 4), (4, 4, 2, 6), (32, 1, 2, 4), (32, 2, 4, 4),
)  # fmt: skip
SECOND_PACKED_TILES = (
    (8, 1, 2, 4), (4, 2, 2, 3), (4, 2, 2, 6), (8, 2, 2, 3), (8, 2, 2, 6), (8, 2, 4, 4), (16, 2, 4, 4),
    (4, 1, 2, 4),
)  # fmt: skip


def packed_section(
    dense: Dense, num_rows: int, num_experts: int, top_k: int, group: int, form: ExpertForm = PLAIN_EXPERTS
) -> Section:
    """As `expert_section`, with experts in 4 bits; of gpt-oss with biases."""
    count, has_bias, hidden, inner = dense.layers, form != PLAIN_EXPERTS, dense.hidden, dense.inner
    routing = Routing(top_k=top_k, is_normalised=True)
    router, output = weights_of(count, num_experts, hidden), weights_of(count, hidden, dense.attended)
    gate_up = [packed(num_experts, 2 * inner, hidden, group) for _ in range(count)]
    down = [packed(num_experts, hidden, inner, group) for _ in range(count)]
    router_bias = output_bias = None
    if has_bias:
        router_bias, output_bias = random(num_experts), random(hidden)
        form = form._replace(
            gate_up_bias=random(num_experts, 2 * inner), down_bias=random(num_experts, hidden)
        )
    norms = [NextNorm(1 + random(hidden, scale=0.1), EPS) for _ in range(2)]
    attended, residual = random(num_rows, dense.attended), random(num_rows, hidden)
    used = num_rows * top_k * 3 * inner * hidden * 17 // 32
    num_bytes = used + 2 * hidden * (dense.attended + num_experts)
    section = Section(f"{dense.name} experts in 4 bits, {num_rows} rows", count, num_bytes)

    def apart(layer: int) -> tuple[torch.Tensor, ...]:
        found = linear(attended, output[layer], output_bias)
        normed, middle = add_rms_norm(found, residual, norms[0].weight, EPS)
        ids, weights = route_experts(linear(normed, router[layer], router_bias), routing)
        delta = packed_experts(normed, ids, weights, gate_up[layer], down[layer], form=form)
        return add_rms_norm(delta, middle, norms[1].weight, EPS)

    def joined(first: SplitTile | None, second: SplitTile | None, layer: int) -> tuple[Result, ...]:
        middle, rows = sum_linear_triton(attended, output[layer], output_bias, residual, norms[0])
        weights = FewExperts(
            routing, router[layer], gate_up[layer], down[layer], router_bias=router_bias, form=form
        )
        total, left, _ = few_experts_triton(rows, weights, middle, norms[1], packed=(first, second))
        return left, total

    section.ways += [Way("apart", apart), Way("joined", partial(joined, None, None))]
    for tile in FIRST_PACKED_TILES:
        section.ways.append(Way(f"joined, first {tile}", partial(joined, SplitTile(*tile), None)))
    for tile in SECOND_PACKED_TILES:
        section.ways.append(Way(f"joined, second {tile}", partial(joined, None, SplitTile(*tile))))
    middle, rows = sum_linear_triton(attended, output[0], output_bias, residual, norms[0])
    logits = random(num_rows, num_experts).float()

    def products(part: int, layer: int) -> tuple[Result, ...]:
        inner, ids, weights = first_products(rows, logits, None, routing, gate_up[layer], form)
        if part == 1:
            return (inner,)
        total, left = second_products(inner, ids, weights, down[layer], form, middle, norms[1])
        return left, total

    section.ways += [Way(f"(products alone, {part} of 2)", partial(products, part)) for part in (1, 2)]
    return section


# --- latents ------------------------------------------------------------------------------------------------


def latent_section(batch: int, context: int) -> Section:
    """DeepSeek-V2-Lite: from the projection of a layer to the input of its output projection."""
    count, num_heads, sizes = 12, 16, LatentSizes(128, 64, 128, 512, True)
    width = sizes.rank + sizes.rope
    each = -(-(context + 64) // PAGE_SIZE)
    pool = random(batch * each + 1, count, 1, PAGE_SIZE, 1, width)
    pool[0].zero_()
    table = (torch.randperm(batch * each, device=DEVICE) + 1).view(batch, each)
    lens = torch.full((batch,), context, device=DEVICE)
    slots = table[:, (context - 1) // PAGE_SIZE] * PAGE_SIZE + (context - 1) % PAGE_SIZE
    rows = kv_rows(slots, pool)
    ups = weights_of(count, num_heads, sizes.key + sizes.value, sizes.rank)
    found = random(batch, num_heads * (sizes.key + sizes.rope) + width)
    angles = torch.rand(batch, sizes.rope // 2, device=DEVICE) * 6
    cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    norm, scale = 1 + random(sizes.rank, scale=0.1), (sizes.key + sizes.rope) ** -0.5
    num_bytes = 2 * (ups[0].numel() + batch * context * width)
    section = Section(f"latents, {batch} rows on {context}", count, num_bytes)
    split = num_heads * (sizes.key + sizes.rope)

    def apart(layer: int) -> torch.Tensor:
        q = found[:, :split].reshape(batch, num_heads, sizes.key + sizes.rope)
        turning = torch.cat((q[..., sizes.key :], found[:, None, split + sizes.rank :]), dim=1)
        turning = turning.view(*turning.shape[:2], -1, 2).transpose(-1, -2).flatten(-2)
        turned = apply_rope(turning, *tables)
        q = torch.cat((q[..., : sizes.key], turned[:, :-1]), dim=-1)
        normed = rms_norm(found[:, split : split + sizes.rank], norm, EPS)
        store_latent(pool, layer, rows, torch.cat((normed[:, None], turned[:, -1:]), dim=-1))
        absorbed = absorb(q, ups[layer], sizes.rope)[:, None]
        sums = latent_verify(absorbed, pool, layer, table, lens, scale, sizes.rank)
        return project_values(sums.flatten(0, 1), ups[layer], sizes.value).flatten(1)

    def joined(part: int, warps: int, min_split: int, values: int, layer: int) -> torch.Tensor:
        new = LatentRows(found[:, :split], found[:, split:], norm, EPS, *tables)
        q = prepare_latents_triton(pool, layer, rows, new, ups[layer], sizes, part=part, num_warps=warps)
        return attend_latents_triton(
            q, pool, layer, table, lens, scale, ups[layer], sizes, min_split=min_split, part=values
        ).flatten(1)

    section.ways.append(Way("apart", apart))
    for part, warps, min_split, values in (
        (64, 4, 64, 32), (128, 4, 64, 32), (64, 2, 64, 32), (64, 4, 32, 32), (64, 4, 64, 16), (64, 4, 32, 16),
    ):  # fmt: skip
        said = f"parts of {part}, {warps} warps, splits of {min_split}, values of {values}"
        section.ways.append(Way(f"joined, {said}", partial(joined, part, warps, min_split, values)))
    return section


# --- whole layers -------------------------------------------------------------------------------------------


class Attended:
    """A new row of each of `num_rows` requests, behind `context` others, and their KV in all layers."""

    def __init__(self, dense: Dense, num_rows: int, context: int = 1024) -> None:
        self.dense, self.num_rows, self.context = dense, num_rows, context
        each = context // PAGE_SIZE + 1
        self.kv = random(1 + num_rows * each, dense.layers, 2, PAGE_SIZE, dense.kv_heads, dense.head_dim)
        self.pages = 1 + torch.arange(num_rows * each, device=DEVICE).view(num_rows, each)
        self.places = kv_rows(self.pages[:, -1] * PAGE_SIZE, self.kv)
        self.lens = torch.full((num_rows,), context + 1, device=DEVICE)
        angles = torch.rand(num_rows, dense.head_dim // 2, device=DEVICE) * 6
        cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
        self.tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def read(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attends with `q` `[T, N, D]`; `[T, N*D]`."""
        scale = self.dense.head_dim**-0.5
        return paged_verify_triton(q[:, None], self.kv, layer, self.pages, self.lens, scale).flatten(1)

    def rotate(self, layer: int, projected: torch.Tensor, norms: HeadNorms | None = None) -> torch.Tensor:
        heads = projected.view(self.num_rows, -1, self.dense.head_dim)
        return rotate_store_triton(self.kv, layer, self.places, heads, *self.tables, norms)

    @property
    def num_bytes(self) -> int:
        """Bytes of KV that a layer reads."""
        return 4 * self.num_rows * self.context * self.dense.kv_heads * self.dense.head_dim


def rotary_section(dense: Dense, num_rows: int) -> Section:
    """A layer, from the rows in front of its norm to those of the next one: rotation apart, and joined."""
    count, attended = dense.layers, Attended(dense, num_rows)
    qkv, output = (
        weights_of(count, dense.qkv, dense.hidden),
        weights_of(count, dense.hidden, dense.attended),
    )
    gate_up = weights_of(count, 2 * dense.inner, dense.hidden)
    down = weights_of(count, dense.hidden, dense.inner)
    norm = NextNorm(1 + random(dense.hidden, scale=0.1), EPS)
    residual = random(num_rows, dense.hidden)
    rows = UnscaledRows(
        random(num_rows, dense.hidden), torch.rand(num_rows, 128, device=DEVICE) * dense.hidden / 64, EPS
    )
    num_bytes = 2 * sum(w[0].numel() for w in (qkv, output, gate_up, down)) + attended.num_bytes
    section = Section(f"{dense.name} layer, {num_rows} rows", count, num_bytes)

    def way(is_joined: bool, layer: int) -> tuple[Result, ...]:
        if is_joined:
            q = rotary_product_triton(
                attended.kv, layer, attended.places, rows, qkv[layer], None, *attended.tables
            )
        else:
            q = attended.rotate(layer, scaled_linear_triton(rows, qkv[layer]))
        middle, behind = sum_linear_triton(attended.read(layer, q), output[layer], None, residual, norm)
        inner = scaled_linear_triton(behind, gate_up[layer], is_gated=True)
        total, last = sum_linear_triton(inner, down[layer], None, middle, norm)
        return last, total

    section.ways += [Way("rotation apart", partial(way, False)), Way("rotation joined", partial(way, True))]
    return section


def expert_layer_section(dense: Dense, num_rows: int, num_experts: int, top_k: int) -> Section:
    """As `rotary_section`, with norms of heads and experts, and all of its steps apart or joined."""
    count, attended = dense.layers, Attended(dense, num_rows)
    qkv, output = (
        weights_of(count, dense.qkv, dense.hidden),
        weights_of(count, dense.hidden, dense.attended),
    )
    router = weights_of(count, num_experts, dense.hidden)
    gate_up = weights_of(count, num_experts, 2 * dense.inner, dense.hidden)
    down = weights_of(count, num_experts, dense.hidden, dense.inner)
    norm, routing = (
        NextNorm(1 + random(dense.hidden, scale=0.1), EPS),
        Routing(top_k=top_k, is_normalised=True),
    )
    heads = HeadNorms(*[1 + random(dense.head_dim, scale=0.1) for _ in range(2)], EPS)
    residual, normed = random(num_rows, dense.hidden), random(num_rows, dense.hidden)
    rows = UnscaledRows(normed, torch.full((num_rows, 128), dense.hidden / 128, device=DEVICE), 0.0)
    used = num_rows * top_k * 3 * dense.inner * dense.hidden + num_experts * dense.hidden
    num_bytes = 2 * (used + qkv[0].numel() + output[0].numel()) + attended.num_bytes
    section = Section(f"{dense.name} layer, {num_rows} rows", count, num_bytes)

    def apart(layer: int) -> tuple[Result, ...]:
        read = attended.read(layer, attended.rotate(layer, linear(normed, qkv[layer]), heads))
        between, middle = add_rms_norm(linear(read, output[layer]), residual, norm.weight, EPS)
        ids, weights = route_experts(linear(between, router[layer]), routing)
        delta = expert_mlp(between, ids, weights, gate_up[layer], down[layer])
        return add_rms_norm(delta, middle, norm.weight, EPS)

    def joined(layer: int) -> tuple[Result, ...]:
        q = attended.rotate(layer, scaled_linear_triton(rows, qkv[layer]), heads)
        middle, behind = sum_linear_triton(attended.read(layer, q), output[layer], None, residual, norm)
        experts = FewExperts(routing, router[layer], gate_up[layer], down[layer])
        total, last, _ = few_experts_triton(behind, experts, middle, norm)
        return last, total

    section.ways += [Way("apart", apart), Way("joined", joined)]
    return section


QWEN = Dense("qwen3-30b", 2048, 32, 4, 128, 768, 6)
OSS = Dense("gpt-oss-20b", 2880, 64, 8, 64, 2880, 6)


SECTIONS: dict[str, Callable[[], Section]] = {
    "layer-8b-1": lambda: rotary_section(LLAMA, 1),
    "layer-8b-16": lambda: rotary_section(LLAMA, 16),
    "layer-smollm-1": lambda: rotary_section(SMOLLM, 1),
    "layer-qwen-1": lambda: expert_layer_section(QWEN, 1, 128, 8),
    "layer-qwen-2": lambda: expert_layer_section(QWEN, 2, 128, 8),
    "layer-qwen-4": lambda: expert_layer_section(QWEN, 4, 128, 8),
    "products-8b-1": lambda: dense_section(LLAMA, 1),
    "products-8b-4": lambda: dense_section(LLAMA, 4),
    "products-smollm-1": lambda: dense_section(SMOLLM, 1),
    "products-fp8-1": lambda: fp8_section(LLAMA),
    "experts-qwen-1": lambda: expert_section("qwen3-30b", 128, 8, 768, 2048, 0, 1),
    "experts-qwen-2": lambda: expert_section("qwen3-30b", 128, 8, 768, 2048, 0, 2),
    "experts-qwen-4": lambda: expert_section("qwen3-30b", 128, 8, 768, 2048, 0, 4),
    "experts-oss-1": lambda: expert_section("gpt-oss-20b", 32, 4, 2880, 2880, 0, 1),
    "experts-oss-2": lambda: expert_section("gpt-oss-20b", 32, 4, 2880, 2880, 0, 2),
    "experts-deepseek-1": lambda: expert_section("deepseek-v2-lite", 64, 6, 1408, 2048, 2, 1),
    "experts-deepseek-2": lambda: expert_section("deepseek-v2-lite", 64, 6, 1408, 2048, 2, 2),
    "packed-oss-1": lambda: packed_section(OSS, 1, 32, 4, MXFP4, GPT_OSS),
    "packed-oss-2": lambda: packed_section(OSS, 2, 32, 4, MXFP4, GPT_OSS),
    "packed-qwen-1": lambda: packed_section(QWEN, 1, 128, 8, 128),
    "packed-qwen-2": lambda: packed_section(QWEN, 2, 128, 8, 128),
    "latents-1": lambda: latent_section(1, 1024),
}


def outputs(result: Result | tuple[Result, ...]) -> tuple[torch.Tensor, ...]:
    """Copies of the results; rows in front of their scale are scaled, so that they equal normed ones."""
    parts = result if type(result) is tuple else (result,)
    return tuple(each.z * each.scale() if isinstance(each, UnscaledRows) else each.clone() for each in parts)


def distance(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> float:
    """The largest relative distance of two results."""
    if [x.shape for x in found] != [x.shape for x in wanted]:
        return float("nan")
    return max(
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(found, wanted, strict=True)
    )


def compile_all(section: Section) -> int:
    """Compiles the kernels of all ways in threads, and counts them."""
    with planned_launches() as planned:
        for way in section.ways:
            try:
                way.run(0)
            except Exception as error:
                print(f"  {way.name}: {error}")
    variants = list({launch.variant: launch for launch in planned}.values())
    for launch in variants:
        launch.prepare()

    def compiled(launch: object) -> object:
        try:
            return launch.compile()
        except Exception as error:
            return error

    with ThreadPoolExecutor(14) as pool:
        for loaded in list(pool.map(compiled, variants)):
            if callable(loaded):
                loaded()
    return len(variants)


def timed(way: Way, num_layers: int) -> float:
    """Microseconds a layer, the median of replays of a graph of all layers."""
    way.run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(num_layers):
            way.run(layer)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times) * 1e3 / num_layers


def report(section: Section, bandwidth: float) -> None:
    floor = section.num_bytes / bandwidth * 1e6
    began = time.perf_counter()
    count = compile_all(section)
    print(
        f"\n{section.name}: {section.num_bytes / 1e6:.1f} MB a layer, {floor:.1f} us at the rate of reads; "
        f"{count} kernels compiled in {time.perf_counter() - began:.1f} s", flush=True,
    )  # fmt: skip
    wanted: tuple[torch.Tensor, ...] | None = None
    for way in section.ways:
        try:
            with planned_launches() as planned:
                way.run(0)
            found = outputs(way.run(0))
            torch.cuda.synchronize()
            wanted = found if wanted is None else wanted
            took = timed(way, section.num_layers)
        except Exception as error:
            print(
                f"  {way.name:64} {type(error).__name__}: {str(error).strip().splitlines()[:1]}", flush=True
            )
            if "CUDA error" in str(error):
                raise
            continue
        far = distance(found, wanted)
        print(f"  {way.name:64} {took:8.2f} us {len(planned):3} kernels  {far:.1e}", flush=True)


def compile_only(chosen: list[str]) -> None:
    """Fills Triton's cache on disk; nothing is computed, so no tensor is filled either."""
    globals()["random"] = lambda *shape, scale=1.0: torch.empty(*shape, dtype=torch.bfloat16, device=DEVICE)
    globals()["weights_of"] = lambda count, *shape: [random(*shape)] * count
    for name in chosen:
        began = time.perf_counter()
        count = compile_all(SECTIONS[name]())
        print(f"{name}: {count} kernels in {time.perf_counter() - began:.1f} s", flush=True)


def main(chosen: list[str]) -> None:
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: a kernel's time is only known where it runs")
    if chosen[:1] == ["--compile"]:
        compile_only(chosen[1:])
        return
    began = time.perf_counter()
    source = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        target.copy_(source)
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    copied = 2 * source.numel() / min(times) * 1e3
    del source, target
    print(f"{torch.cuda.get_device_name()}: copy {copied / 1e9:.0f} GB/s", flush=True)
    for name, make in SECTIONS.items():
        if not chosen or name.startswith(tuple(chosen)):
            report(make(), copied * 1.06)  # reads alone are 6 % faster
            torch.cuda.empty_cache()
    print(f"\n{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main(sys.argv[1:])
