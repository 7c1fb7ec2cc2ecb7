"""The tile code of both paged attention kernels.

It loads keys and values through the page table and adds one tile of scores to a running softmax (Dao et al.,
"FlashAttention", 2022).

Legend: M rows of a tile, which are (new row, head of the group) pairs; C context columns of a tile; D head
dimension. Scores are kept in base 2: `scale` holds the softmax scale times log2(e).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .fp8_scales import FP8
from .triton_jit import jit, next_power_of_2, tl

LOG2_E = math.log2(math.e)
# The smallest side of a matrix instruction.
MIN_DOT = 16


@jit
def load_kv_tile(
    p_kv: tl.tensor,
    p_pages: tl.tensor,
    i_column: tl.tensor,
    m_column: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    o_value: tl.tensor,
    IS_FULL: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """Keys `[BLOCK_DIM, C]` and values `[C, BLOCK_DIM]` of context rows `i_column`, zeros where masked.

    `p_kv` points at the layer's keys of one head in page 0; the values lie `o_value` further. With `IS_FULL`,
    `m_column` is true everywhere and not read.
    """
    i_dim = tl.arange(0, BLOCK_DIM)
    m_dim = i_dim < HEAD_DIM
    # a pool may hold more than 2^31 values: page offsets are 64-bit
    if IS_FULL:
        i_page = tl.load(p_pages + i_column // PAGE_SIZE).to(tl.int64)
    else:
        i_page = tl.load(p_pages + i_column // PAGE_SIZE, mask=m_column, other=0).to(tl.int64)
    o_row = i_page * page_stride + (i_column % PAGE_SIZE) * slot_stride
    p_k = p_kv + o_row[None, :] + i_dim[:, None]
    p_v = p_kv + o_value + o_row[:, None] + i_dim[None, :]
    if IS_FULL and HEAD_DIM == BLOCK_DIM:
        b_k = tl.load(p_k)
        b_v = tl.load(p_v)
    else:
        b_k = tl.load(p_k, mask=m_dim[:, None] & m_column[None, :], other=0.0)
        b_v = tl.load(p_v, mask=m_column[:, None] & m_dim[None, :], other=0.0)
    return b_k, b_v


@jit
def softcapped(b_scores: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Scores in base 2 between plus and minus SOFTCAP, which is in base e, see `attention_form`."""
    LIMIT: tl.constexpr = SOFTCAP * 1.4426950408889634
    # tanh(x) = 1 - 2 / (exp(2x) + 1), with exp(2x) = 2^(2x log2(e)); an overflow gives the right 1
    b_power = tl.exp2(b_scores * (2.0 * 1.4426950408889634 / LIMIT))
    return LIMIT - 2.0 * LIMIT / (b_power + 1.0)


@jit
def fold_tile(
    b_q: tl.tensor,
    b_k: tl.tensor,
    b_v: tl.tensor,
    m_visible: tl.tensor,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    b_out: tl.tensor,
    scale: tl.tensor,
    IS_FULL: tl.constexpr,
    IS_INVARIANT: tl.constexpr = False,
    SOFTCAP: tl.constexpr = 0.0,
) -> tl.tensor:
    """One step of the running softmax: `b_q` `[M, D]`, `m_visible` `[M, C]` -> new (max `[M]`, sum `[M]`, out
    `[M, D]`).

    A row that has seen no column keeps max = -inf, sum = 0, out = 0. With `IS_FULL`, every row sees every
    column. `scale` is positive, so it can be applied after the maximum, where it costs nothing, unless there
    is a SOFTCAP. With `IS_INVARIANT`, the sum `[M, 16]`, in equal columns, is a product with ones: its order,
    too, is then that of the matrix instruction, for any number of rows and warps.
    """
    # keys and values of a pool in 8 bits
    b_k, b_v = b_k.to(b_q.dtype), b_v.to(b_q.dtype)
    # ieee matters for float32 only, which would be truncated to tf32
    b_scores = tl.dot(b_q, b_k, input_precision="ieee")
    b_scale = scale
    if SOFTCAP != 0.0:
        b_scores = softcapped(b_scores * scale, SOFTCAP)
        b_scale = scale * 0.0 + 1.0
    if IS_FULL:
        b_new_max = tl.maximum(b_max, tl.max(b_scores, axis=1) * b_scale)
        b_shift = b_new_max
    else:
        b_scores = tl.where(m_visible, b_scores, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_scores, axis=1) * b_scale)
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)  # -inf - -inf would be NaN
    b_weights = tl.exp2(b_scores * b_scale - b_shift[:, None])
    b_rescale = tl.exp2(b_max - b_shift)
    b_rounded = b_weights.to(b_v.dtype)
    if IS_INVARIANT:
        b_ones = tl.full((b_v.shape[0], 16), 1.0, dtype=tl.float32).to(b_v.dtype)
        b_sum = tl.dot(b_rounded, b_ones, b_sum * b_rescale[:, None], input_precision="ieee")
    else:
        b_sum = b_sum * b_rescale + tl.sum(b_weights, axis=1)
    b_out = tl.dot(b_rounded, b_v, b_out * b_rescale[:, None], input_precision="ieee")
    return b_new_max, b_sum, b_out


@jit
def tree_positions(
    p_tree_mask: tl.tensor, i_query: tl.tensor, m_row: tl.tensor, context: tl.tensor, window: tl.tensor
) -> tl.tensor:
    """The position of each row of a tree: that of its root is `context`, a child's is one more.

    `p_tree_mask` `[rows, window]` names a row's ancestors and itself.
    """
    b_depth = i_query * 0
    for first in range(0, window, 16):
        i_node = first + tl.arange(0, 16)
        m_node = m_row[:, None] & (i_node < window)[None, :]
        b_seen = tl.load(p_tree_mask + i_query[:, None] * window + i_node[None, :], mask=m_node, other=0)
        b_depth += tl.sum((b_seen != 0).to(tl.int32), axis=1)
    return context + b_depth - 1


@jit
def first_sums(
    p_sinks: tl.tensor, i_head: tl.tensor, m_row: tl.tensor, is_first: tl.tensor, HAS_SINKS: tl.constexpr
) -> tl.tensor:
    """(max, sum) of a running softmax before its first column: of the sinks of heads `i_head`, in base 2.

    Without sinks, or where not `is_first`: (-inf, 0), as before any column.
    """
    b_max = i_head * 0.0 + float("-inf")
    b_sum = i_head * 0.0
    if HAS_SINKS:
        b_sink = tl.load(p_sinks + i_head, mask=m_row, other=0.0).to(tl.float32) * 1.4426950408889634
        b_max = tl.where(is_first, b_sink, b_max)
        b_sum = tl.where(is_first, 1.0, b_sum)
    return b_max, b_sum


@jit
def _fold_masked(
    b_q: tl.tensor,
    i_query: tl.tensor,
    b_position: tl.tensor,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    b_out: tl.tensor,
    p_kv: tl.tensor,
    p_pages: tl.tensor,
    p_tree_mask: tl.tensor,
    i_column: tl.tensor,
    end: tl.tensor,
    context: tl.tensor,
    num_rows: tl.tensor,
    window: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    o_value: tl.tensor,
    scale: tl.tensor,
    HAS_TREE: tl.constexpr,
    SLIDING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """One tile of columns of which each row sees some, see `attend_columns`."""
    m_column = i_column < end
    b_k, b_v = load_kv_tile(
        p_kv, p_pages, i_column, m_column, page_stride, slot_stride, o_value, False, PAGE_SIZE, HEAD_DIM,
        BLOCK_DIM,
    )  # fmt: skip
    i_node = i_column - context
    m_seen = i_node[None, :] <= i_query[:, None]
    if HAS_TREE:
        m_new = (i_query < num_rows)[:, None] & (m_column & (i_node >= 0))[None, :]
        b_seen = tl.load(p_tree_mask + i_query[:, None] * window + i_node[None, :], mask=m_new, other=0)
        m_seen = (b_seen != 0) | (i_node < 0)[None, :]
    if SLIDING:
        m_near = i_column[None, :] > b_position[:, None] - SLIDING
        if HAS_TREE:
            m_near = m_near | (i_node >= 0)[None, :]
        m_seen = m_seen & m_near
    return fold_tile(
        b_q, b_k, b_v, m_seen & m_column[None, :], b_max, b_sum, b_out, scale, False, False, SOFTCAP
    )


@jit
def attend_columns(
    b_q: tl.tensor,
    i_query: tl.tensor,
    b_position: tl.tensor,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    p_kv: tl.tensor,
    p_pages: tl.tensor,
    p_tree_mask: tl.tensor,
    start: tl.tensor,
    low_end: tl.tensor,
    full_end: tl.tensor,
    end: tl.tensor,
    context: tl.tensor,
    num_rows: tl.tensor,
    window: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    o_value: tl.tensor,
    scale: tl.tensor,
    HAS_TREE: tl.constexpr,
    SLIDING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """Attend rows `b_q` over columns [start, end) of their request -> running (max, sum, out), see
    `fold_tile`, that begins with (`b_max`, `b_sum`, 0).

    Every row sees the columns [low_end, full_end), a number of whole tiles, as [start, low_end) are. A row
    sees column context + j if j <= its own `i_query`, or if the request's `p_tree_mask` `[num_rows, window]`
    allows it. With SLIDING, it sees only columns above `b_position` - SLIDING; the nodes of a tree must all
    lie in the window of each other.
    """
    b_out = tl.zeros((BLOCK_ROWS, BLOCK_DIM), dtype=tl.float32)
    i_offset = tl.arange(0, BLOCK_COLUMNS)
    if SLIDING:
        for first in range(start, low_end, BLOCK_COLUMNS):
            b_max, b_sum, b_out = _fold_masked(
                b_q, i_query, b_position, b_max, b_sum, b_out, p_kv, p_pages, p_tree_mask, first + i_offset,
                end, context, num_rows, window, page_stride, slot_stride, o_value, scale, HAS_TREE, SLIDING,
                SOFTCAP, PAGE_SIZE, HEAD_DIM, BLOCK_DIM,
            )  # fmt: skip
    for first in range(low_end, full_end, BLOCK_COLUMNS):
        i_column = first + i_offset
        m_column = i_column < full_end
        b_k, b_v = load_kv_tile(
            p_kv, p_pages, i_column, m_column, page_stride, slot_stride, o_value, True, PAGE_SIZE, HEAD_DIM,
            BLOCK_DIM,
        )  # fmt: skip
        b_max, b_sum, b_out = fold_tile(
            b_q, b_k, b_v, m_column[None, :], b_max, b_sum, b_out, scale, True, False, SOFTCAP
        )
    for first in range(full_end, end, BLOCK_COLUMNS):
        b_max, b_sum, b_out = _fold_masked(
            b_q, i_query, b_position, b_max, b_sum, b_out, p_kv, p_pages, p_tree_mask, first + i_offset, end,
            context, num_rows, window, page_stride, slot_stride, o_value, scale, HAS_TREE, SLIDING, SOFTCAP,
            PAGE_SIZE, HEAD_DIM, BLOCK_DIM,
        )  # fmt: skip
    return b_max, b_sum, b_out


class TileShape(NamedTuple):
    """Launch configuration of an attention kernel."""

    rows: int
    columns: int
    dim: int
    num_warps: int
    num_stages: int


def tile_shape(dtype: torch.dtype, head_dim: int, num_rows: int, max_rows: int) -> TileShape:
    """Tiles for `num_rows` (row, head) pairs, at most `max_rows` at once.

    Chosen for an H200: 128 rows by 64 columns of 128 bf16 values in three stages compile for sm_90 to 97 of
    its 227 KiB of shared memory, with wgmma and without spills. float32 has no matrix instruction of full
    precision; it is for tests.
    """
    dim = max(next_power_of_2(head_dim), MIN_DOT)
    is_float32 = dtype == torch.float32
    is_wide = is_float32 or dim > 128
    most = max_rows // 4 if is_float32 else max_rows // 2 if is_wide else max_rows
    rows = min(max(next_power_of_2(num_rows), MIN_DOT), most)
    return TileShape(
        rows=rows,
        columns=32 if is_wide else 64,
        dim=dim,
        num_warps=8 if rows >= 128 else 4,
        num_stages=2 if is_wide else 3,
    )


def check_paged(
    op: str, q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, lens: tuple[torch.Tensor, ...]
) -> None:
    """Raises ValueError unless the tensors fit the pool.

    Heads and dtype of `q` must be the pool's, unless that is e4m3; table and lengths must be integers for
    equally many requests.
    """
    kv_heads, head_dim = kv.shape[-2:]
    num_heads = q.shape[-2]
    if q.dtype != kv.dtype != FP8 or q.shape[-1] != head_dim or num_heads % kv_heads:
        raise ValueError(
            f"{op}: q {tuple(q.shape)} {q.dtype} does not fit a pool of {kv_heads} heads x {head_dim} "
            f"{kv.dtype}"
        )
    integers = [x.dtype in (torch.int32, torch.int64) for x in (page_table, *lens)]
    if page_table.dim() != 2 or not all(integers) or not kv.is_contiguous():
        raise ValueError(
            f"{op}: page table {tuple(page_table.shape)} {page_table.dtype} and lengths "
            f"{[(tuple(x.shape), x.dtype) for x in lens]} must be int32 or int64, the pool contiguous"
        )


def check_tree_mask(op: str, mask: torch.Tensor, num_requests: int, num_rows: int) -> None:
    """Raises ValueError unless `mask` is bool `[num_requests, num_rows, W]` with W >= num_rows."""
    shape = tuple(mask.shape)
    fits = len(shape) == 3 and shape[:2] == (num_requests, num_rows) and shape[2] >= num_rows
    if not fits or mask.dtype != torch.bool:
        raise ValueError(
            f"{op}: tree mask {shape} {mask.dtype}, expected bool {(num_requests, num_rows, 'W')}, W >= "
            f"{num_rows}"
        )
