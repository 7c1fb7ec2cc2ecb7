"""The two launches of products of `few_experts` for experts with weights of 4 bits.

Each row reads its experts for itself, and its inputs are split, see `split_rows`. Weights are unpacked as
in `packed_experts`; the order of sums is another.

Legend: T rows, E experts, K experts of a row, H hidden size, I intermediate size of an expert, S tiles whose
squares were summed.
"""

from __future__ import annotations

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .expert_mlp import ExpertForm
from .expert_products import store_expert_tile
from .joined_experts import choose_expert, store_row_sum
from .normed_linear import MIN_ROWS, UnscaledRows, new_sums
from .packed_experts import PackedMatrices
from .packed_product import packed_product
from .packed_words import UNIT, unpacks_pairs
from .rms_norm import NextNorm
from .route_experts import LARGEST, SMALLEST_SUM, Routing
from .split_rows import SplitTile
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl


@jit_varying("num_slots")
def _first_packed_kernel(
    p_x: tl.tensor,
    p_squares: tl.tensor,
    p_logits: tl.tensor,
    p_choice_bias: tl.tensor,
    p_words: tl.tensor,
    p_scales: tl.tensor,
    p_bias: tl.tensor,
    p_ids: tl.tensor,
    p_weights: tl.tensor,
    p_inner: tl.tensor,
    num_slots: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    scale: tl.tensor,
    TOP_K: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_CHOICE_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    WORDS: tl.constexpr,
    EXPERT_SCALES: tl.constexpr,
    SQUARES: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SUM: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (tile of outputs, slot). The last program of a slot has no tile: it stores the expert and its
    # weight for the second products. Lines are (split, gate or up, output), the row lies in a column for each
    # split.
    wait_for_previous(CHAINED)
    i_tile = tl.program_id(0)
    i_slot = tl.program_id(1)
    row = (i_slot // TOP_K).to(tl.int64)
    choice = i_slot % TOP_K
    is_last = i_tile == tl.num_programs(0) - 1
    expert = choose_expert(
        p_logits + row * NUM_EXPERTS, p_choice_bias, p_ids + i_slot, p_weights + i_slot, choice, is_last,
        scale, TOP_K, IS_NORMALISED, IS_SIGMOID, HAS_CHOICE_BIAS, NUM_EXPERTS, BLOCK_EXPERTS, LARGEST,
        SMALLEST_SUM,
    )  # fmt: skip
    if is_last:
        return
    i_part = tl.arange(0, BLOCK_SQUARES)
    b_squares = tl.load(p_squares + row * SQUARES + i_part, mask=i_part < SQUARES, other=0.0)
    i_row = tl.arange(0, BLOCK_ROWS)
    LINES: tl.constexpr = SPLITS * 2 * BLOCK_OUT
    i_line = tl.arange(0, LINES)
    i_out = i_tile * BLOCK_OUT + i_line % BLOCK_OUT
    i_half = (i_line // BLOCK_OUT) % 2
    i_split = i_line // (2 * BLOCK_OUT)
    i_own = i_half * INNER + tl.minimum(i_out, INNER - 1)
    p_outs = p_words + (expert.to(tl.int64) * (2 * INNER) + i_own)[:, None] * WORDS
    p_groups = p_scales + expert.to(tl.int64) * EXPERT_SCALES + i_own
    i_unit = tl.arange(0, UNIT)
    b_y = packed_product(
        p_x + row * x_stride + i_row * 0, i_row < SPLITS, i_row, i_unit, p_outs + i_unit[None, :], p_groups,
        i_out < INNER, i_split, HIDDEN, 2 * INNER, SPLITS, HAS_PAIRS, GROUP, UNIT, UNIT,
    )  # fmt: skip
    release_next(CHAINED)
    b_own = tl.sum(tl.where(i_split[:, None] == i_row[None, :], b_y, 0.0), axis=1)
    b_own *= tl.rsqrt(tl.sum(b_squares) / HIDDEN + eps)
    b_halves = tl.sum(tl.reshape(b_own, (SPLITS, 2, BLOCK_OUT)), axis=0)
    is_up = tl.arange(0, 2)[:, None] == 1
    b_gate = tl.sum(tl.where(is_up, 0.0, b_halves), axis=0)
    b_up = tl.sum(tl.where(is_up, b_halves, 0.0), axis=0)
    store_expert_tile(
        b_gate[:, None], b_up[:, None], p_bias + expert.to(tl.int64) * (2 * INNER), p_inner,
        i_slot + tl.arange(0, 1), i_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT), num_slots, INNER, HAS_BIAS,
        True, LIMIT, ALPHA,
    )  # fmt: skip


@jit
def _second_packed_kernel(
    p_inner: tl.tensor,
    p_ids: tl.tensor,
    p_weights: tl.tensor,
    p_words: tl.tensor,
    p_scales: tl.tensor,
    p_bias: tl.tensor,
    p_residual: tl.tensor,
    p_norm: tl.tensor,
    p_total: tl.tensor,
    p_z: tl.tensor,
    p_sums: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    WORDS: tl.constexpr,
    EXPERT_SCALES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (tile of outputs, row): the same outputs of all experts of the row lie below each other in one
    # product, whose columns are their inputs. Lines are (split, expert, output), columns (split, expert).
    wait_for_previous(CHAINED)
    i_tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    LINES: tl.constexpr = SPLITS * BLOCK_K * BLOCK_OUT
    i_line = tl.arange(0, LINES)
    i_column = i_line // BLOCK_OUT
    i_choice = i_column % BLOCK_K
    i_out = i_tile * BLOCK_OUT + i_line % BLOCK_OUT
    m_line = (i_choice < TOP_K) & (i_out < HIDDEN)
    b_expert = tl.load(p_ids + row * TOP_K + tl.minimum(i_choice, TOP_K - 1)).to(tl.int64)
    i_sum = i_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    b_residual = tl.load(p_residual + row * HIDDEN + i_sum, mask=i_sum < HIDDEN, other=0.0).to(tl.float32)
    i_each = tl.arange(0, BLOCK_K)
    m_each = (i_each < TOP_K)[:, None] & (i_sum < HIDDEN)[None, :]
    b_weight = tl.load(p_weights + row * TOP_K + i_each, mask=i_each < TOP_K, other=0.0)
    b_bias = tl.zeros((BLOCK_K, BLOCK_OUT), dtype=tl.float32)
    if HAS_BIAS:
        b_each = tl.load(p_ids + row * TOP_K + i_each, mask=i_each < TOP_K, other=0).to(tl.int64)
        p_biases = p_bias + b_each[:, None] * HIDDEN + i_sum[None, :]
        b_bias = tl.load(p_biases, mask=m_each, other=0.0).to(tl.float32)
    i_row = tl.arange(0, BLOCK_ROWS)
    i_input = tl.minimum(i_row % BLOCK_K, TOP_K - 1)
    i_own = tl.minimum(i_out, HIDDEN - 1)
    i_unit = tl.arange(0, UNIT)
    p_outs = p_words + (b_expert * HIDDEN + i_own)[:, None] * WORDS + i_unit[None, :]
    p_groups = p_scales + b_expert * EXPERT_SCALES + i_own
    b_y = packed_product(
        p_inner + (row * TOP_K + i_input) * INNER, i_row < SPLITS * BLOCK_K, i_row // BLOCK_K, i_unit, p_outs,
        p_groups, m_line, i_column // BLOCK_K, INNER, HIDDEN, SPLITS, HAS_PAIRS, GROUP, UNIT, UNIT,
    )  # fmt: skip
    release_next(CHAINED)
    dtype: tl.constexpr = p_total.dtype.element_ty
    b_own = tl.sum(tl.where(i_column[:, None] == i_row[None, :], b_y, 0.0), axis=1)
    b_own = tl.sum(tl.reshape(b_own, (SPLITS, BLOCK_K, BLOCK_OUT)), axis=0) + b_bias
    b_total = tl.sum(b_own.to(dtype).to(tl.float32) * b_weight[:, None], axis=0)
    p_sum = p_sums + row * tl.num_programs(0) + i_tile
    store_row_sum(b_total, b_residual, p_norm, p_total, p_z, p_sum, row, i_sum, HIDDEN, HAS_NORM, OFFSET)


FIRST_TILE = SplitTile(16, 2, 2, 4)


def second_tile(top_k: int) -> SplitTile:
    """The tile of the second products: as many splits as fill the columns of the shortest instruction."""
    return SplitTile(8, max(1, MIN_ROWS // next_power_of_2(top_k)), 2, 4)


def first_products(
    rows: UnscaledRows,
    logits: torch.Tensor,
    choice_bias: torch.Tensor | None,
    routing: Routing,
    gate_up: PackedMatrices,
    form: ExpertForm,
    *,
    tile: SplitTile | None = None,
    has_pairs: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gated products `[T*K, I]`, the chosen experts int32 `[T, K]`, their weights float32 `[T, K]`) of rows
    with the router's `logits` float32 `[T, E]`. `has_pairs` as in `packed_experts_triton`.
    """
    num_rows, hidden = rows.z.shape
    num_experts, double, num_words = gate_up.words.shape
    top_k, inner_size, chosen = routing.top_k, double // 2, tile or FIRST_TILE
    device, dtype = rows.z.device, rows.z.dtype
    ids = torch.empty(num_rows, top_k, dtype=torch.int32, device=device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=device)
    inner = torch.empty(num_rows * top_k, inner_size, dtype=dtype, device=device)
    bias = form.gate_up_bias
    _first_packed_kernel[(cdiv(inner_size, chosen.out) + 1, num_rows * top_k)](
        rows.z,
        rows.squares,
        logits,
        logits if choice_bias is None else choice_bias,
        gate_up.words,
        gate_up.scales,
        rows.z if bias is None else bias,
        ids,
        weights,
        inner,
        num_rows * top_k,
        rows.z.stride(0),
        rows.eps,
        float(routing.scale),
        TOP_K=top_k,
        IS_NORMALISED=routing.is_normalised,
        IS_SIGMOID=routing.is_sigmoid,
        HAS_CHOICE_BIAS=choice_bias is not None,
        HAS_BIAS=bias is not None,
        LIMIT=form.limit,
        ALPHA=form.alpha,
        NUM_EXPERTS=num_experts,
        HIDDEN=hidden,
        INNER=inner_size,
        WORDS=num_words,
        EXPERT_SCALES=gate_up.scales.stride(0),
        SQUARES=rows.squares.shape[1],
        HAS_PAIRS=unpacks_pairs(rows.z, has_pairs),
        GROUP=gate_up.group,
        UNIT=UNIT,
        BLOCK_EXPERTS=next_power_of_2(num_experts),
        BLOCK_SQUARES=next_power_of_2(rows.squares.shape[1]),
        BLOCK_OUT=chosen.out,
        BLOCK_ROWS=max(MIN_ROWS, chosen.splits),
        SPLITS=chosen.splits,
        LARGEST=LARGEST,
        SMALLEST_SUM=SMALLEST_SUM,
        **chained(device),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    return inner, ids, weights


def second_products(
    inner: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    down: PackedMatrices,
    form: ExpertForm,
    residual: torch.Tensor,
    norm: NextNorm | None,
    *,
    tile: SplitTile | None = None,
    has_pairs: bool | None = None,
) -> tuple[torch.Tensor, UnscaledRows | None]:
    """The results of `first_products` -> the sum `[T, H]` of the chosen experts and `residual`, and its rows
    in front of `norm`. `has_pairs` as in `packed_experts_triton`.
    """
    num_rows, hidden = residual.shape
    top_k, inner_size = ids.shape[1], inner.shape[1]
    chosen = tile or second_tile(top_k)
    total, sums = new_sums(residual, hidden, residual, norm, chosen.out)
    block_k = next_power_of_2(top_k)
    _second_packed_kernel[(cdiv(hidden, chosen.out), num_rows)](
        inner,
        ids,
        weights,
        down.words,
        down.scales,
        residual if form.down_bias is None else form.down_bias,
        sums.residual,
        residual if norm is None else norm.weight,
        total,
        sums.z,
        sums.squares,
        TOP_K=top_k,
        BLOCK_K=block_k,
        HAS_BIAS=form.down_bias is not None,
        HIDDEN=hidden,
        INNER=inner_size,
        WORDS=down.words.shape[2],
        EXPERT_SCALES=down.scales.stride(0),
        HAS_NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset or 0.0,
        HAS_PAIRS=unpacks_pairs(inner, has_pairs),
        GROUP=down.group,
        UNIT=UNIT,
        BLOCK_OUT=chosen.out,
        BLOCK_ROWS=max(MIN_ROWS, chosen.splits * block_k),
        SPLITS=chosen.splits,
        **chained(residual.device),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    return total, sums.rows()
