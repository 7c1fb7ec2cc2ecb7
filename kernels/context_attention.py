"""Causal attention of ragged runs of new rows over contiguous keys and values: long prompts.

A tile of contiguous rows is one bulk copy of the device (TMA), while a tile of pages is a copy for each of
its values' groups. The paged kernel of `extend_attention` needs no buffers and no copy before it.

Legend: T new rows of all requests, B requests, S buffer rows, N query heads, K key/value heads, G = N/K, D
head dimension. Request b owns rows [q_starts[b], q_starts[b+1]), the last of its kv_lens[b] context rows,
which are buffer rows from kv_starts[b] on (`gather_context`). Rows from q_starts[B] on are padding.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch

from .attention_form import PLAIN_FORM, AttentionForm
from .gather_context import REQUEST_BLOCK
from .paged_attention import QUERY_BLOCK, causal_band, extend_attention
from .paged_tile import LOG2_E, MIN_DOT, first_sums, fold_tile
from .triton_jit import jit_varying, next_power_of_2, tensor_descriptor, tile_descriptor, tl
from .wgmma_attention import COLUMNS as GROUP_COLUMNS
from .wgmma_attention import can_run, wgmma_attention_triton

MakeDescriptor: TypeAlias = Callable[[torch.Tensor, tuple[int, ...]], object]


@jit_varying("num_requests", "num_rows")
def _context_kernel(
    p_q: tl.tensor,
    d_keys: tl.tensor,
    d_values: tl.tensor,
    p_q_starts: tl.tensor,
    p_kv_starts: tl.tensor,
    p_kv_lens: tl.tensor,
    p_sinks: tl.tensor,
    p_out: tl.tensor,
    num_requests: tl.tensor,
    num_rows: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    num_heads: tl.tensor,
    scale: tl.tensor,
    HAS_SINKS: tl.constexpr,
    SLIDING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    REQUEST_BLOCK: tl.constexpr,
) -> None:
    # The tiles of request b are those from q_starts[b] * G / BLOCK_ROWS + b on: at least as many as it needs.
    # The padding rows count as one more request. The last tiles see the most context, so they start first.
    i_kv_head = tl.program_id(0)
    i_slot = tl.num_programs(1) - 1 - tl.program_id(1)
    i_request = -1
    for start in range(0, num_requests + 1, REQUEST_BLOCK):
        i_start = start + tl.arange(0, REQUEST_BLOCK)
        m_start = i_start <= num_requests
        b_starts = tl.load(p_q_starts + i_start, mask=m_start, other=0).to(tl.int32)
        is_before = m_start & (b_starts * GROUP // BLOCK_ROWS + i_start <= i_slot)
        i_request += tl.sum(is_before.to(tl.int32), axis=0)
    q_start = tl.load(p_q_starts + i_request).to(tl.int32)
    q_len = num_rows - q_start
    if i_request < num_requests:
        q_len = tl.load(p_q_starts + i_request + 1).to(tl.int32) - q_start
    i_tile = i_slot - (q_start * GROUP // BLOCK_ROWS + i_request)
    if i_tile * BLOCK_ROWS >= q_len * GROUP:
        return

    # a tile's rows are (query, head of the group) pairs, so keys and values are read once for the whole group
    i_row = i_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    i_query = i_row // GROUP
    i_head = i_kv_head * GROUP + i_row % GROUP
    i_dim = tl.arange(0, BLOCK_DIM)
    m_row = (i_query < q_len)[:, None]
    # Columns behind those of a head are the next head's, or zeros behind the last: queries have zeros there,
    # and what their values give is not stored.
    m_rows = m_row & (i_dim < HEAD_DIM)[None, :]
    o_out = ((q_start + i_query).to(tl.int64) * num_heads + i_head) * HEAD_DIM
    p_rows = p_out + o_out[:, None] + i_dim[None, :]
    if i_request == num_requests:
        b_none = tl.zeros((BLOCK_ROWS, BLOCK_DIM), dtype=p_out.dtype.element_ty)
        tl.store(p_rows, b_none, mask=m_rows)
        return
    o_q = (q_start + i_query).to(tl.int64) * q_stride + i_head * q_head_stride
    b_q = tl.load(p_q + o_q[:, None] + i_dim[None, :], mask=m_rows, other=0.0)
    context = tl.load(p_kv_lens + i_request).to(tl.int32) - q_len
    o_context = tl.load(p_kv_starts + i_request).to(tl.int32)

    # every row of the tile sees columns [low_end, num_full), some rows see those before and those up to
    # num_seen
    first_query = i_tile * BLOCK_ROWS // GROUP
    last_query = tl.minimum((i_tile * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, q_len - 1)
    num_full = (context + first_query + 1) // BLOCK_COLUMNS * BLOCK_COLUMNS
    num_seen = context + last_query + 1
    start = context * 0
    low_end = start
    if SLIDING:
        start = tl.maximum(context + first_query + 1 - SLIDING, 0) // BLOCK_COLUMNS * BLOCK_COLUMNS
        low_end = tl.cdiv(tl.maximum(context + last_query + 1 - SLIDING, 0), BLOCK_COLUMNS) * BLOCK_COLUMNS
        num_full = tl.maximum(num_full, start)
        low_end = tl.minimum(low_end, num_full)
    o_head = i_kv_head * HEAD_DIM
    b_max, b_sum = first_sums(p_sinks, i_head, i_query < q_len, True, HAS_SINKS)
    b_out = tl.zeros((BLOCK_ROWS, BLOCK_DIM), dtype=tl.float32)
    i_offset = tl.arange(0, BLOCK_COLUMNS)
    if SLIDING:
        for first in range(start, low_end, BLOCK_COLUMNS):
            b_k = d_keys.load([o_context + first, o_head])
            b_v = d_values.load([o_context + first, o_head])
            i_new = (first + i_offset - context)[None, :]
            m_seen = (i_new <= i_query[:, None]) & (i_new > i_query[:, None] - SLIDING)
            b_max, b_sum, b_out = fold_tile(
                b_q, b_k.T, b_v, m_seen, b_max, b_sum, b_out, scale, False, False, SOFTCAP
            )
    for first in range(low_end, num_full, BLOCK_COLUMNS):
        b_k = d_keys.load([o_context + first, o_head])
        b_v = d_values.load([o_context + first, o_head])
        b_max, b_sum, b_out = fold_tile(
            b_q, b_k.T, b_v, m_row, b_max, b_sum, b_out, scale, True, False, SOFTCAP
        )
    for first in range(num_full, num_seen, BLOCK_COLUMNS):
        b_k = d_keys.load([o_context + first, o_head])
        b_v = d_values.load([o_context + first, o_head])
        i_new = (first + i_offset - context)[None, :]
        m_seen = i_new <= i_query[:, None]
        if SLIDING:
            m_seen = m_seen & (i_new > i_query[:, None] - SLIDING)
        b_max, b_sum, b_out = fold_tile(
            b_q, b_k.T, b_v, m_seen, b_max, b_sum, b_out, scale, False, False, SOFTCAP
        )
    b_out = b_out / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    tl.store(p_rows, b_out.to(p_out.dtype.element_ty), mask=m_rows)


class ContextTile(NamedTuple):
    """Launch configuration."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


# Of thirteen shapes on an H200, with 32 heads of 128 values in bfloat16: 8192 new rows run at 512 TFLOP/s
# with the wide tile and 444 with the narrow one, 1024 rows at 307 and 356, 8 prompts of 512 rows at 209 and
# 265.
WIDE_TILE = ContextTile(rows=128, columns=128, num_warps=8, num_stages=3)
NARROW_TILE = ContextTile(rows=64, columns=64, num_warps=4, num_stages=3)
# The same for heads of more values. Of six shapes, with 16 heads of 256: 8192 new rows run at 527 and 415
# TFLOP/s, 1024 rows at 222 and 271.
WIDE_TILE_OF_WIDE = ContextTile(rows=128, columns=64, num_warps=8, num_stages=2)
NARROW_TILE_OF_WIDE = ContextTile(rows=64, columns=32, num_warps=4, num_stages=3)
MAX_HEAD_DIM, WIDE_HEAD_DIM = 256, 128  # the widest heads, and those that have the first two tiles
# Bytes of shared memory for the wide tile and heads of 128 values.
SHARED_BYTES = 225 * 1024
# Up to this number of (row, head) pairs, or of context rows per request, narrow tiles are faster; of wider
# heads half as many.
FEW_PAIRS = 32 * 1024
SHORT_CONTEXT = 1024


def tile_of(
    num_rows: int, num_heads: int, longest: int, dtype: torch.dtype, head_dim: int = WIDE_HEAD_DIM
) -> ContextTile:
    """The tile for `num_rows` new rows whose requests have at most `longest` context rows; 0: unknown."""
    if dtype == torch.float32:  # has no matrix instruction of full precision; for tests
        return ContextTile(rows=32, columns=32, num_warps=4, num_stages=2)
    is_wide_head = head_dim > WIDE_HEAD_DIM
    few_pairs = FEW_PAIRS // 2 if is_wide_head else FEW_PAIRS
    is_narrow = num_rows * num_heads <= few_pairs or 0 < longest <= SHORT_CONTEXT
    if is_wide_head:
        return NARROW_TILE_OF_WIDE if is_narrow else WIDE_TILE_OF_WIDE
    return NARROW_TILE if is_narrow else WIDE_TILE


class ContextKV:
    """Contiguous `keys` and `values` `[S, K, D]` of one layer, with what a launch needs to copy their tiles.

    `prepare` makes that ahead, for launches that must not allocate and dry runs without memory.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values
        self._descriptors: dict[tuple[object, int], tuple[object, object]] = {}

    def prepare(self) -> None:
        """Make the descriptors of every tile that `tile_of` can choose."""
        head_dim = self.keys.shape[2]
        tiles = {tile_of(rows, 1, 0, self.keys.dtype, head_dim) for rows in (1, FEW_PAIRS + 1)}
        for tile in tiles:
            self.descriptors(tile.columns)
        if can_run(self.keys.device, head_dim, self.keys.dtype):
            self.tile_descriptors()

    def descriptors(self, columns: int, make: MakeDescriptor = tensor_descriptor) -> tuple[object, object]:
        """Kernel arguments that copy `columns` rows of one head of the keys, and of the values."""
        if (make, columns) not in self._descriptors:
            keys, values = (x.view(x.shape[0], -1) for x in (self.keys, self.values))
            shape = columns, next_power_of_2(self.keys.shape[2])
            self._descriptors[make, columns] = make(keys, shape), make(values, shape)
        return self._descriptors[make, columns]

    def tile_descriptors(self) -> tuple[object, object]:
        """As `descriptors`, for the kernel of `wgmma_attention`."""
        return self.descriptors(GROUP_COLUMNS, tile_descriptor)


def context_attention_triton(
    q: torch.Tensor,
    context: ContextKV,
    q_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    *,
    tile: ContextTile,
    out: torch.Tensor | None = None,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """Launch on `q` `[T, N, D]` and a context of S rows; returns `[T, N, D]`, zeros in padding rows.

    Every start of a request in the context is a multiple of `tile.columns`.
    """
    num_rows, num_heads, head_dim = q.shape
    kv_heads = context.keys.shape[1]
    group = num_heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    num_requests = kv_lens.shape[0]
    d_keys, d_values = context.descriptors(tile.columns)
    _context_kernel[(kv_heads, num_rows * group // tile.rows + num_requests + 1)](
        q,
        d_keys,
        d_values,
        q_starts,
        kv_starts,
        kv_lens,
        q if form.sinks is None else form.sinks,
        out,
        num_requests,
        num_rows,
        q.stride(0),
        q.stride(1),
        num_heads,
        scale * LOG2_E,
        HAS_SINKS=form.sinks is not None,
        SLIDING=form.window,
        SOFTCAP=form.softcap,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        BLOCK_DIM=next_power_of_2(head_dim),
        REQUEST_BLOCK=REQUEST_BLOCK,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def context_attention_reference(
    q: torch.Tensor,
    context: ContextKV,
    q_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """The CPU path: one request after the other. It reads the lengths on the host."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    out.zero_()
    lens, q_lens = kv_lens.tolist(), [end - start for start, end in pairwise(q_starts.tolist())]
    block = min(max(q_lens, default=0), QUERY_BLOCK)
    band = causal_band(max(lens, default=0), block, q.dtype, q.device, form.window)
    parts = zip(q_starts.tolist(), q_lens, kv_starts.tolist(), lens, strict=False)
    for start, q_len, first, kv_len in parts:
        if q_len:
            mine = slice(first, first + kv_len)
            rows = q[start : start + q_len]
            keys, values = context.keys[mine], context.values[mine]
            out[start : start + q_len] = extend_attention(rows, keys, values, band, scale, form)
    return out


def context_attention(
    q: torch.Tensor,
    context: ContextKV,
    q_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    longest: int = 0,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """Attend rows `q` `[T, N, D]` over `context`, each row up to itself.

    `q_starts`: int `[B+1]`. `kv_starts`: int `[B+1]`, from `context_rows`. `kv_lens`: int `[B]`, the new rows
    included; `longest`: an upper bound of them, 0 if the host knows none. Returns `[T, N, D]`, in `out` if
    given, zeros in padding rows. `form`: window, soft cap and sinks. Raises ValueError for heads that do not
    fit, see `can_attend`.
    """
    kv_heads, head_dim = context.keys.shape[1:]
    if q.dtype != context.keys.dtype or q.shape[2] != head_dim or q.shape[1] % kv_heads:
        raise ValueError(
            f"context_attention: q {tuple(q.shape)} {q.dtype} does not fit keys of {kv_heads} heads x "
            f"{head_dim} {context.keys.dtype}"
        )
    if not q.is_cuda:
        return context_attention_reference(q, context, q_starts, kv_starts, kv_lens, scale, out, form)
    if not can_attend(head_dim):
        raise ValueError(f"context_attention: no kernel for heads of {head_dim} values")
    tile = tile_of(q.shape[0], q.shape[1], longest, q.dtype, head_dim)
    if tile is WIDE_TILE and form.is_plain and not form.window and can_run(q.device, head_dim, q.dtype):
        descriptors, scale = context.tile_descriptors(), scale * LOG2_E
        places = q_starts, kv_starts, kv_lens
        return wgmma_attention_triton(q, descriptors, kv_heads, *places, scale, out=out)
    arguments = q, context, q_starts, kv_starts, kv_lens, scale
    return context_attention_triton(*arguments, tile=tile, out=out, form=form)


def can_attend(head_dim: int) -> bool:
    """Whether the kernel has tiles for heads of `head_dim` values; others are attended by pages.

    A bulk copy begins at a multiple of 16 bytes.
    """
    return MIN_DOT <= head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0
