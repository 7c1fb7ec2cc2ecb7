"""The experts of few rows in three launches: logits of the router, first products, second products.

The launch of the first products also chooses the experts, each program for its row; that of the second adds
them, and ends in the residual sum, as in `normed_linear`. Shared experts are in the same launches. Choice
and rounding are those of `route_experts` and `expert_mlp`; the order of sums is not. Weights of 8 bits are
converted where they are read, and rows are not rounded. Weights of 4 bits have products of their own, see
`few_packed_experts`.

Legend: T rows, E experts, K experts of a row, J shared experts (a shared MLP of J*I inner values), H hidden
size, I intermediate size of an expert, S tiles whose squares were summed.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .expert_mlp import PLAIN_EXPERTS, Dequantised, ExpertForm, experts_by_definition
from .expert_products import store_expert_tile
from .few_packed_experts import first_products, second_products
from .fp8_experts import Fp8Matrices, check_fp8_matrices
from .fp8_rows import row_sums
from .fp8_scales import BLOCK
from .joined_experts import choose_expert, store_row_sum
from .normed_linear import UnscaledRows, new_sums, scaled_linear_reference, sum_linear_reference
from .packed_experts import PackedMatrices, check_matrices
from .rms_norm import NextNorm
from .route_experts import LARGEST, SMALLEST_SUM, Routing, route_experts_reference
from .row_product import row_product
from .split_rows import SplitTile
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl

MAX_EXPERTS = 128  # to choose from; each of their pairs is compared
# Rows times the inner values of an expert: each row reads its experts for itself.
MAX_INNER = 3072
MAX_INNER_OF_TWO = 5760  # for one row or two


Matrices: TypeAlias = torch.Tensor | Fp8Matrices | PackedMatrices


def _stored(matrices: Matrices) -> torch.Tensor:
    """The values of all experts as they are stored, outputs in the second dimension."""
    if isinstance(matrices, Fp8Matrices):
        return matrices.weight
    return matrices.words if isinstance(matrices, PackedMatrices) else matrices


class FewExperts(NamedTuple):
    """The weights of a layer: `router` `[E, H]`, `gate_up` `[E, 2*I, H]`, `down` `[E, H, I]`, these two
    perhaps in 8 or 4 bits.

    `bias` float32 `[E]` or None, for the choice alone. `shared_gate_up` `[2*J*I, H]` and `shared_down`
    `[H, J*I]`, or None. `is_float32`: the router's logits are not rounded to the dtype. `router_bias` `[E]`
    or None. `form`: biases and the gate.
    """

    routing: Routing
    router: torch.Tensor
    gate_up: Matrices
    down: Matrices
    bias: torch.Tensor | None = None
    is_float32: bool = False
    shared_gate_up: torch.Tensor | None = None
    shared_down: torch.Tensor | None = None
    router_bias: torch.Tensor | None = None
    form: ExpertForm = PLAIN_EXPERTS

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(E, H, I)."""
        matrices = _stored(self.gate_up)
        return len(matrices), self.router.shape[1], matrices.shape[1] // 2

    @property
    def num_shared(self) -> int:
        """J."""
        return 0 if self.shared_down is None else self.shared_down.shape[1] // self.sizes[2]


def can_join_experts(experts: FewExperts) -> bool:
    """Whether these kernels compute such a layer."""
    form, shared = experts.form, experts.shared_down
    is_gpt_oss = form.limit != 0.0 or form.gate_up_bias is not None or form.down_bias is not None
    is_plain = not is_gpt_oss and isinstance(experts.down, torch.Tensor)
    is_known = shared is None or (is_plain and shared.shape[1] % experts.sizes[2] == 0)
    is_here = form.total == 0
    return is_known and is_here and experts.routing.num_groups == 1 and len(experts.router) <= MAX_EXPERTS


def should_join_experts(experts: FewExperts, num_rows: int) -> bool:
    """Whether they are faster for `num_rows` rows. The part of a layer behind attention takes, in us on an
    H200, for one row, two, and four that choose as differently as can be: 32, 49 and 85 instead of 41, 58 and
    92 (Qwen3-30B-A3B; in 8 bits a layer takes 10, 16 and 21 us less). One row and two of DeepSeek-V2-Lite
    take 49 and 79 instead of 66 and 88, of gpt-oss-20b 65 and 117 instead of 74 and 120, in 4 bits 46 and 59
    instead of 62 and 74.
    """
    if num_rows <= 2:
        return num_rows * experts.sizes[2] <= MAX_INNER_OF_TWO
    is_packed = isinstance(experts.down, PackedMatrices)
    return not is_packed and num_rows * experts.sizes[2] <= MAX_INNER


def _values(matrices: Matrices, in_size: int, dtype: torch.dtype) -> torch.Tensor | Dequantised:
    if isinstance(matrices, PackedMatrices):
        return matrices.values(in_size, dtype)
    return matrices.values(dtype) if isinstance(matrices, Fp8Matrices) else matrices


def few_experts_reference(
    rows: UnscaledRows, experts: FewExperts, residual: torch.Tensor, norm: NextNorm | None
) -> tuple[torch.Tensor, UnscaledRows | None, torch.Tensor]:
    """The definition and the CPU path."""
    dtype = residual.dtype
    wide = UnscaledRows(rows.z.to(torch.float32), rows.squares, rows.eps)
    router_bias = None if experts.router_bias is None else experts.router_bias.to(torch.float32)
    logits = scaled_linear_reference(wide, experts.router.to(torch.float32), router_bias)
    logits = logits if experts.is_float32 else logits.to(dtype)
    ids, weights = route_experts_reference(logits, experts.routing, experts.bias)
    x = (wide.z * rows.scale()).to(dtype)
    _, hidden, inner_size = experts.sizes
    gate_up, down = _values(experts.gate_up, hidden, dtype), _values(experts.down, inner_size, dtype)
    found = experts_by_definition(x, ids, weights, gate_up, down, form=experts.form)
    if experts.shared_gate_up is not None and experts.shared_down is not None:
        inner = scaled_linear_reference(rows, experts.shared_gate_up, is_gated=True)
        found = found + torch.nn.functional.linear(inner, experts.shared_down)
    identity = torch.eye(found.shape[1], dtype=dtype)
    return *sum_linear_reference(found, identity, None, residual, norm), ids


@jit_varying("num_rows")
def _logits_kernel(
    p_x: tl.tensor,
    p_squares: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor,
    p_logits: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IS_FLOAT32: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (experts, row); the weights of few experts are read at once, and again for each row
    wait_for_previous(CHAINED)
    i_expert = tl.program_id(0) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    i_row = tl.program_id(1).to(tl.int64)
    m_expert = i_expert < NUM_EXPERTS
    b_total = tl.zeros((BLOCK_EXPERTS, BLOCK_IN), dtype=tl.float32)
    i_part = tl.arange(0, BLOCK_SQUARES)
    b_squares = tl.load(p_squares + i_row * SQUARES + i_part, mask=i_part < SQUARES, other=0.0)
    for first in tl.static_range(0, HIDDEN, BLOCK_IN):
        i_in = first + tl.arange(0, BLOCK_IN)
        m_in = i_in < HIDDEN
        b_x = tl.load(p_x + i_row * x_stride + i_in, mask=m_in, other=0.0).to(tl.float32)
        m_weight = m_expert[:, None] & m_in[None, :]
        b_weight = tl.load(p_weight + i_expert[:, None] * HIDDEN + i_in[None, :], mask=m_weight, other=0.0)
        b_total += b_weight.to(tl.float32) * b_x[None, :]
    release_next(CHAINED)
    b_logit = tl.sum(b_total, axis=1) * tl.rsqrt(tl.sum(b_squares) / HIDDEN + eps)
    if HAS_BIAS:
        b_logit += tl.load(p_bias + i_expert, mask=m_expert, other=0.0).to(tl.float32)
    if not IS_FLOAT32:
        b_logit = b_logit.to(p_x.dtype.element_ty).to(tl.float32)
    tl.store(p_logits + i_row * NUM_EXPERTS + i_expert, b_logit, mask=m_expert)


@jit_varying("num_slots")
def _first_kernel(
    p_x: tl.tensor,
    p_squares: tl.tensor,
    p_logits: tl.tensor,
    p_choice_bias: tl.tensor,
    p_gate_up: tl.tensor,
    p_scales: tl.tensor,
    p_bias: tl.tensor,
    p_shared: tl.tensor,
    p_ids: tl.tensor,
    p_weights: tl.tensor,
    p_inner: tl.tensor,
    num_slots: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    scale: tl.tensor,
    TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_CHOICE_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    EXPERT_SCALES: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SUM: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (tile of outputs, slot); the first K slots of a row are the chosen experts. The last program of
    # such a slot has no tile: it stores the expert and its weight for the second products.
    wait_for_previous(CHAINED)
    SLOTS: tl.constexpr = TOP_K + NUM_SHARED
    i_tile = tl.program_id(0)
    i_slot = tl.program_id(1)
    row = (i_slot // SLOTS).to(tl.int64)
    choice = i_slot % SLOTS
    is_last = i_tile == tl.num_programs(0) - 1
    p_weight = p_shared + (choice - TOP_K).to(tl.int64) * (INNER * HIDDEN)
    up_rows = NUM_SHARED * INNER
    expert = choice * 0
    if choice < TOP_K:
        o_choice = row * TOP_K + choice
        expert = choose_expert(
            p_logits + row * NUM_EXPERTS, p_choice_bias, p_ids + o_choice, p_weights + o_choice, choice,
            is_last, scale, TOP_K, IS_NORMALISED, IS_SIGMOID, HAS_CHOICE_BIAS, NUM_EXPERTS, BLOCK_EXPERTS,
            LARGEST, SMALLEST_SUM,
        )  # fmt: skip
        p_weight = p_gate_up + expert.to(tl.int64) * (2 * INNER * HIDDEN)
        up_rows = INNER
    if is_last:
        return
    i_row = tl.arange(0, 1)
    i_part = tl.arange(0, BLOCK_SQUARES)
    b_squares = tl.load(p_squares + row * SQUARES + i_part, mask=i_part < SQUARES, other=0.0)
    i_out = i_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m_out = i_out < INNER
    if EXPERT_SCALES > 0:
        p_own_scales = p_scales + expert.to(tl.int64) * EXPERT_SCALES
        b_sum, b_sum_up = row_sums(
            p_x + row * x_stride, p_weight, p_own_scales, i_tile * BLOCK_OUT, INNER, HIDDEN,
            (HIDDEN + SCALE_BLOCK - 1) // SCALE_BLOCK, HAS_BLOCKS, True, HIDDEN % BLOCK_IN == 0, SCALE_BLOCK,
            BLOCK_OUT, BLOCK_IN, NUM_STAGES,
        )  # fmt: skip
        if not HAS_BLOCKS:
            b_sum *= tl.load(p_own_scales + i_out, mask=m_out, other=0.0)
            b_sum_up *= tl.load(p_own_scales + INNER + i_out, mask=m_out, other=0.0)
        b_y, b_up = b_sum[:, None], b_sum_up[:, None]
    else:
        b_zero = tl.zeros((BLOCK_OUT, 1), dtype=tl.float32)
        b_y, b_up = row_product(
            p_x + row * x_stride, p_weight, i_row, i_row == 0, i_out, m_out, 0, INNER, HIDDEN, x_stride,
            up_rows, b_zero, b_zero, True, INNER % BLOCK_OUT == 0 and HIDDEN % BLOCK_IN == 0, BLOCK_IN,
            NUM_STAGES,
        )  # fmt: skip
    release_next(CHAINED)
    row_scale = tl.rsqrt(tl.sum(b_squares) / HIDDEN + eps)
    store_expert_tile(
        b_y * row_scale, b_up * row_scale, p_bias + expert.to(tl.int64) * (2 * INNER), p_inner,
        i_slot + i_row, i_out, num_slots, INNER, HAS_BIAS, True, LIMIT, ALPHA,
    )  # fmt: skip


@jit
def _second_kernel(
    p_inner: tl.tensor,
    p_ids: tl.tensor,
    p_weights: tl.tensor,
    p_down: tl.tensor,
    p_scales: tl.tensor,
    p_bias: tl.tensor,
    p_shared: tl.tensor,
    p_residual: tl.tensor,
    p_norm: tl.tensor,
    p_total: tl.tensor,
    p_z: tl.tensor,
    p_sums: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    EXPERT_SCALES: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (tile of outputs, row): one load asks for a part of all experts of the row
    wait_for_previous(CHAINED)
    SLOTS: tl.constexpr = TOP_K + NUM_SHARED
    i_tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    i_out = i_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m_out = i_out < HIDDEN
    i_own = tl.minimum(i_out, HIDDEN - 1)
    i_offset = tl.arange(0, BLOCK_IN)
    i_choice = tl.arange(0, BLOCK_K)
    m_choice = i_choice < TOP_K
    b_expert = tl.load(p_ids + row * TOP_K + i_choice, mask=m_choice, other=0).to(tl.int64)
    b_weight = tl.load(p_weights + row * TOP_K + i_choice, mask=m_choice, other=0.0)
    b_residual = tl.load(p_residual + row * HIDDEN + i_out, mask=m_out, other=0.0).to(tl.float32)
    dtype: tl.constexpr = p_total.dtype.element_ty
    o_down = b_expert[:, None, None] * (HIDDEN * INNER) + (i_own * INNER)[None, :, None]
    m_sum = m_choice[:, None] & m_out[None, :]
    p_own_scales = p_scales + b_expert * EXPERT_SCALES
    b_y = tl.zeros((BLOCK_K, BLOCK_OUT), dtype=tl.float32)
    for first in tl.static_range(0, INNER, BLOCK_IN):
        i_in = first + i_offset
        m_in = m_choice[:, None] & (i_in < INNER)[None, :]
        b_x = tl.load(
            p_inner + (row * SLOTS + i_choice[:, None]) * INNER + i_in[None, :], mask=m_in, other=0.0
        )
        b_down = tl.load(p_down + o_down + i_in[None, None, :], mask=m_in[:, None, :], other=0.0)
        b_each = tl.sum(b_down.to(tl.float32) * b_x[:, None, :].to(tl.float32), axis=2)
        if HAS_BLOCKS:  # a step and the outputs of a program lie in one block
            o_block = i_tile * BLOCK_OUT // SCALE_BLOCK * ((INNER + SCALE_BLOCK - 1) // SCALE_BLOCK)
            b_scale = tl.load(p_own_scales + o_block + first // SCALE_BLOCK, mask=m_choice, other=0.0)
            b_each *= b_scale[:, None]
        b_y += b_each
    if EXPERT_SCALES > 0 and not HAS_BLOCKS:
        b_y *= tl.load(p_own_scales[:, None] + i_out[None, :], mask=m_sum, other=0.0)
    if HAS_BIAS:
        b_y += tl.load(p_bias + b_expert[:, None] * HIDDEN + i_out[None, :], mask=m_sum, other=0.0)
    b_total = tl.sum(b_y.to(dtype).to(tl.float32) * b_weight[:, None], axis=0)
    if NUM_SHARED > 0:
        SHARED: tl.constexpr = NUM_SHARED * INNER
        i_wide = tl.arange(0, BLOCK_K * BLOCK_IN)
        b_own = tl.zeros((BLOCK_OUT,), dtype=tl.float32)
        for first in tl.static_range(0, SHARED, BLOCK_K * BLOCK_IN):
            i_in = first + i_wide
            m_wide = i_in < SHARED
            b_x = tl.load(p_inner + (row * SLOTS + TOP_K) * INNER + i_in, mask=m_wide, other=0.0)
            p_own = p_shared + i_own[:, None] * SHARED + i_in[None, :]
            b_down = tl.load(p_own, mask=m_wide[None, :], other=0.0)
            b_own += tl.sum(b_down.to(tl.float32) * b_x[None, :].to(tl.float32), axis=1)
        b_total = b_total.to(dtype).to(tl.float32) + b_own.to(dtype).to(tl.float32)
    release_next(CHAINED)
    p_sum = p_sums + row * tl.num_programs(0) + i_tile
    store_row_sum(b_total, b_residual, p_norm, p_total, p_z, p_sum, row, i_out, HIDDEN, HAS_NORM, OFFSET)


class FewTile(NamedTuple):
    """The tile of a product: outputs and inputs of a step, warps, and steps under way at once, which the
    second products leave to the compiler.
    """

    out: int
    inner: int
    num_warps: int
    num_stages: int


FIRST_TILE = FewTile(8, 256, 4, 4)
FP8_TILES = FewTile(8, 256, 2, 4), FewTile(8, 128, 8, 1)  # the latter's steps lie in one block of scales
SECOND_TILE = FewTile(8, 256, 8, 1)
SHORT_SECOND_TILE = FewTile(8, 128, 8, 1)
SHORT_INNER = 2048  # up to so many inner values
FLOAT32_TILE = FewTile(16, 32, 4, 2)  # for tests


def router_logits_triton(rows: UnscaledRows, experts: FewExperts, *, block_experts: int = 1) -> torch.Tensor:
    """The logits of the router, float32 `[T, E]`."""
    num_rows, hidden = rows.z.shape
    num_experts = experts.router.shape[0]
    logits = torch.empty(num_rows, num_experts, dtype=torch.float32, device=rows.z.device)
    _logits_kernel[(cdiv(num_experts, block_experts), num_rows)](
        rows.z,
        rows.squares,
        experts.router,
        experts.router if experts.router_bias is None else experts.router_bias,
        logits,
        num_rows,
        rows.z.stride(0),
        rows.eps,
        HAS_BIAS=experts.router_bias is not None,
        IS_FLOAT32=experts.is_float32,
        NUM_EXPERTS=num_experts,
        HIDDEN=hidden,
        SQUARES=rows.squares.shape[1],
        BLOCK_EXPERTS=block_experts,
        BLOCK_IN=min(next_power_of_2(hidden), 4096),
        BLOCK_SQUARES=next_power_of_2(rows.squares.shape[1]),
        **chained(rows.z.device),
        num_warps=4,
    )
    return logits


def few_experts_triton(
    rows: UnscaledRows,
    experts: FewExperts,
    residual: torch.Tensor,
    norm: NextNorm | None,
    *,
    first: FewTile | None = None,
    second: FewTile | None = None,
    packed: tuple[SplitTile | None, SplitTile | None] = (None, None),
    has_pairs: bool | None = None,
    block_experts: int = 1,
) -> tuple[torch.Tensor, UnscaledRows | None, torch.Tensor]:
    """Launch; arguments as in `few_experts`. Raises ValueError as it does. `packed`: the tiles of weights in
    4 bits. `has_pairs` as in `packed_experts_triton`.
    """
    _check(rows, experts, residual)
    num_rows, hidden = residual.shape
    inner_size, routing, form = experts.sizes[2], experts.routing, experts.form
    num_shared = experts.num_shared
    usual = FIRST_TILE, (SHORT_SECOND_TILE if inner_size <= SHORT_INNER else SECOND_TILE)
    usual = FP8_TILES if isinstance(experts.gate_up, Fp8Matrices) else usual
    usual = (FLOAT32_TILE,) * 2 if residual.dtype == torch.float32 else usual
    first, second = first or usual[0], second or usual[1]
    logits = router_logits_triton(rows, experts, block_experts=block_experts)
    if isinstance(experts.gate_up, PackedMatrices) or isinstance(experts.down, PackedMatrices):
        return _packed_triton(rows, logits, experts, residual, norm, packed, has_pairs)
    gate_up, down = _stored(experts.gate_up), _stored(experts.down)
    up_scales, up_sizes = _scales(experts.gate_up)
    down_scales, down_sizes = _scales(experts.down)
    ids = torch.empty(num_rows, routing.top_k, dtype=torch.int32, device=residual.device)
    weights = torch.empty(num_rows, routing.top_k, dtype=torch.float32, device=residual.device)
    slots = routing.top_k + num_shared
    inner = residual.new_empty(num_rows, slots, inner_size)
    _first_kernel[(cdiv(inner_size, first.out) + 1, num_rows * slots)](
        rows.z,
        rows.squares,
        logits,
        logits if experts.bias is None else experts.bias,
        gate_up,
        up_scales,
        logits if form.gate_up_bias is None else form.gate_up_bias,
        gate_up if experts.shared_gate_up is None else experts.shared_gate_up,
        ids,
        weights,
        inner,
        num_rows * slots,
        rows.z.stride(0),
        rows.eps,
        float(routing.scale),
        TOP_K=routing.top_k,
        NUM_SHARED=num_shared,
        IS_NORMALISED=routing.is_normalised,
        IS_SIGMOID=routing.is_sigmoid,
        HAS_CHOICE_BIAS=experts.bias is not None,
        HAS_BIAS=form.gate_up_bias is not None,
        LIMIT=form.limit,
        ALPHA=form.alpha,
        NUM_EXPERTS=logits.shape[1],
        HIDDEN=hidden,
        INNER=inner_size,
        **up_sizes,
        SQUARES=rows.squares.shape[1],
        BLOCK_EXPERTS=next_power_of_2(logits.shape[1]),
        BLOCK_SQUARES=next_power_of_2(rows.squares.shape[1]),
        BLOCK_OUT=first.out,
        BLOCK_IN=first.inner,
        NUM_STAGES=first.num_stages,
        LARGEST=LARGEST,
        SMALLEST_SUM=SMALLEST_SUM,
        **chained(residual.device),
        num_warps=first.num_warps,
    )
    total, sums = new_sums(residual, hidden, residual, norm, second.out)
    _second_kernel[(cdiv(hidden, second.out), num_rows)](
        inner,
        ids,
        weights,
        down,
        down_scales,
        logits if form.down_bias is None else form.down_bias,
        down if experts.shared_down is None else experts.shared_down,
        sums.residual,
        residual if norm is None else norm.weight,
        total,
        sums.z,
        sums.squares,
        TOP_K=routing.top_k,
        BLOCK_K=next_power_of_2(routing.top_k),
        NUM_SHARED=num_shared,
        HAS_BIAS=form.down_bias is not None,
        HIDDEN=hidden,
        INNER=inner_size,
        **down_sizes,
        HAS_NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset or 0.0,
        BLOCK_OUT=second.out,
        BLOCK_IN=second.inner,
        **chained(residual.device),
        num_warps=second.num_warps,
    )
    return total, sums.rows(), ids


def _scales(matrices: Matrices) -> tuple[torch.Tensor, dict[str, int]]:
    """The scales of the experts, and as constants how many an expert has, 0 without, and of what form."""
    if not isinstance(matrices, Fp8Matrices):
        return _stored(matrices), {"EXPERT_SCALES": 0, "HAS_BLOCKS": False, "SCALE_BLOCK": BLOCK}
    scales, has_blocks = matrices.scales, matrices.has_blocks
    return scales, {"EXPERT_SCALES": scales.stride(0), "HAS_BLOCKS": has_blocks, "SCALE_BLOCK": BLOCK}


def _packed_triton(
    rows: UnscaledRows,
    logits: torch.Tensor,
    experts: FewExperts,
    residual: torch.Tensor,
    norm: NextNorm | None,
    tiles: tuple[SplitTile | None, SplitTile | None],
    has_pairs: bool | None,
) -> tuple[torch.Tensor, UnscaledRows | None, torch.Tensor]:
    """As `few_experts_triton` behind the router."""
    routing, gate_up, down, form = experts.routing, experts.gate_up, experts.down, experts.form
    assert isinstance(gate_up, PackedMatrices)
    assert isinstance(down, PackedMatrices)
    inner, ids, weights = first_products(
        rows, logits, experts.bias, routing, gate_up, form, tile=tiles[0], has_pairs=has_pairs
    )
    total, left = second_products(
        inner, ids, weights, down, form, residual, norm, tile=tiles[1], has_pairs=has_pairs
    )
    return total, left, ids


def _check(rows: UnscaledRows, experts: FewExperts, residual: torch.Tensor) -> None:
    num_experts, hidden, inner = experts.sizes
    if isinstance(experts.gate_up, PackedMatrices) and isinstance(experts.down, PackedMatrices):
        check_matrices(experts.gate_up, num_experts, 2 * inner, hidden)
        check_matrices(experts.down, num_experts, hidden, inner)
        fits = True
    elif isinstance(experts.gate_up, Fp8Matrices) and isinstance(experts.down, Fp8Matrices):
        check_fp8_matrices("few_experts", experts.gate_up, experts.down, hidden)
        fits = True
    else:
        fits = [(num_experts, 2 * inner, hidden), (num_experts, hidden, inner)] == [
            getattr(matrices, "shape", ()) for matrices in (experts.gate_up, experts.down)
        ]
    if (
        not fits
        or rows.z.shape != residual.shape
        or residual.shape[1] != hidden
        or experts.router.shape != (num_experts, hidden)
    ):
        raise ValueError(
            f"few_experts: rows {tuple(rows.z.shape)}, residual {tuple(residual.shape)}, router "
            f"{tuple(experts.router.shape)} and matrices of {num_experts} experts [{2 * inner}, {hidden}] do "
            "not fit; expected [T, H], [T, H], [E, H], [E, 2*I, H], [E, H, I]"
        )
    fault = experts.routing.fault(num_experts)
    if fault or not can_join_experts(experts):
        known = "groups, too many experts, some elsewhere, or shared ones of another size or form"
        raise ValueError(f"few_experts: {fault or known}")


def few_experts(
    rows: UnscaledRows, experts: FewExperts, residual: torch.Tensor, norm: NextNorm | None
) -> tuple[torch.Tensor, UnscaledRows | None, torch.Tensor]:
    """(the chosen and shared experts of `rows` + `residual`, that sum in front of `norm`, ids): `[T, H]`,
    rows of H values or None without a norm, int32 `[T, K]`.

    Raises ValueError if shapes or numbers do not fit.
    """
    if residual.is_cuda:
        return few_experts_triton(rows, experts, residual, norm)
    _check(rows, experts, residual)
    return few_experts_reference(rows, experts, residual, norm)
