"""The kernel of `context_attention` for long prompts on Hopper GPUs, in Gluon.

One warp copies tiles of keys and values (TMA) into rings of shared memory. Two groups of four warps have half
of the rows of a tile each, and take turns on the matrix unit by themselves: while one computes weights, the
other multiplies. Within a group, the scores of a tile are multiplied behind the weights of the tile before it
(Shah et al., "FlashAttention-3", 2024). Triton's own language waits for each product where its result leaves
an iteration of a loop, so it can do neither.

Legend as in `context_attention`; M rows of a group, C columns of a tile. Shared memory begins with s_.
"""

from __future__ import annotations

import torch

from .gather_context import REQUEST_BLOCK
from .triton_jit import (
    gl,
    gluon_jit,
    gluon_jit_varying,
    has_gluon,
    mbarrier,
    next_power_of_2,
    tl,
    tma,
    warpgroups,
)

ROWS = 64  # of a group of warps: those of its matrix instruction
COLUMNS = 128  # of a tile
KEY_TILES, VALUE_TILES = 3, 2  # of the rings
HEAD_DIM = 128
# Largest ring, as a power of two: the shape of the barriers of each ring.
BARRIERS = next_power_of_2(max(KEY_TILES, VALUE_TILES))


def can_run(device: torch.device, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernel runs on `device` for heads of `head_dim` values of `dtype`."""
    if head_dim != HEAD_DIM or dtype not in (torch.bfloat16, torch.float16) or not has_gluon():
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


@gluon_jit
def _weights_of(
    b_scores: tl.tensor,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    scale: tl.tensor,
    first: tl.tensor,
    i_last: tl.tensor,
    IS_FULL: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCORES: tl.constexpr,
) -> tl.tensor:
    """The running softmax of `paged_tile.fold_tile`, up to the weights: (weights, max, sum, factor of what
    was summed before).

    Row i sees columns up to `i_last[i]`, or all with IS_FULL. `first`: the tile's first column.
    """
    if not IS_FULL:
        i_column = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, SCORES))
        b_scores = gl.where(i_column[None, :] <= i_last[:, None], b_scores, float("-inf"))
    b_new_max = gl.maximum(b_max, gl.max(b_scores, axis=1) * scale)
    b_shift = b_new_max
    if not IS_FULL:
        b_shift = gl.where(b_new_max == float("-inf"), 0.0, b_new_max)  # -inf - -inf would be NaN
    b_weights = gl.exp2(b_scores * scale - b_shift[:, None])
    b_rescale = gl.exp2(b_max - b_shift)
    return b_weights, b_new_max, b_sum * b_rescale + gl.sum(b_weights, axis=1), b_rescale


@gluon_jit
def _fold(
    s_q: tl.tensor,
    rings: tl.tensor,
    i_tile: tl.tensor,
    b_weights: tl.tensor,
    b_out: tl.tensor,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    scale: tl.tensor,
    first: tl.tensor,
    i_last: tl.tensor,
    IS_FULL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_TILES: tl.constexpr,
    VALUE_TILES: tl.constexpr,
    SCORES: tl.constexpr,
    OUT: tl.constexpr,
    WEIGHTS: tl.constexpr,
) -> tl.tensor:
    """Adds the values of tile `i_tile` - 1, which are in shared memory, by their weights `b_weights`; returns
    the weights of tile `i_tile`, whose values are in shared memory then, and the running softmax.
    """
    s_keys, s_values, keys_ready, keys_free, values_ready, values_free = rings
    i_slot, i_before = i_tile % KEY_TILES, (i_tile - 1) % VALUE_TILES
    mbarrier.wait(keys_ready.index(i_slot), (i_tile // KEY_TILES) & 1)
    b_zero = gl.zeros([ROWS, COLUMNS], gl.float32, SCORES)
    b_scores = warpgroups.warpgroup_mma(
        s_q, s_keys.index(i_slot).permute((1, 0)), b_zero, use_acc=False, is_async=True
    )
    b_out = warpgroups.warpgroup_mma(b_weights, s_values.index(i_before), b_out, is_async=True)
    b_scores = warpgroups.warpgroup_mma_wait(1, deps=(b_scores,))
    mbarrier.arrive(keys_free.index(i_slot), count=1)
    b_new, b_max, b_sum, b_rescale = _weights_of(
        b_scores, b_max, b_sum, scale, first, i_last, IS_FULL, COLUMNS, SCORES
    )
    b_next = gl.convert_layout(b_new.to(s_values.dtype), WEIGHTS)
    # The wait for the next values stands between the weights and the end of the product. Without a branch
    # there the assembler moves the weights behind that end, and nothing overlaps.
    mbarrier.wait(values_ready.index(i_tile % VALUE_TILES), (i_tile // VALUE_TILES) & 1)
    b_out, b_weights, b_next = warpgroups.warpgroup_mma_wait(0, deps=(b_out, b_weights, b_next))
    mbarrier.arrive(values_free.index(i_before), count=1)
    b_out = b_out * gl.convert_layout(b_rescale, gl.SliceLayout(1, OUT))[:, None]
    return b_next, b_out, b_max, b_sum


@gluon_jit
def _attend(
    p_q: tl.tensor,
    p_out: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    num_heads: tl.tensor,
    s_q: tl.tensor,
    q_ready: tl.tensor,
    rings: tl.tensor,
    num_tiles: tl.tensor,
    num_masked: tl.tensor,
    context: tl.tensor,
    q_start: tl.tensor,
    q_len: tl.tensor,
    first_row: tl.tensor,
    i_kv_head: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_TILES: tl.constexpr,
    VALUE_TILES: tl.constexpr,
) -> None:
    """One group of warps: rows `first_row` to `first_row` + ROWS, over tiles from the last to the first. The
    first `num_masked` of these have columns that some row does not see.
    """
    SCORES: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    OUT: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: tl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    COPIED: tl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    s_keys, s_values, keys_ready, keys_free, values_ready, _values_free = rings
    i_last = context + (first_row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))) // GROUP
    b_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    b_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    b_out = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUT)
    if num_tiles > 0:
        i_asked = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, COPIED))
        i_dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, COPIED))
        i_head = i_kv_head * GROUP + i_asked % GROUP
        o_q = (q_start + i_asked // GROUP).to(gl.int64) * q_stride + i_head * q_head_stride
        m_q = (i_asked // GROUP < q_len)[:, None] & (i_dim < HEAD_DIM)[None, :]
        s_q.store(gl.load(p_q + o_q[:, None] + i_dim[None, :], mask=m_q, other=0.0))
        warpgroups.fence_async_shared()
        mbarrier.arrive(q_ready, count=1)
        mbarrier.wait(q_ready, 0)
        mbarrier.wait(keys_ready.index(0), 0)
        b_zero = gl.zeros([ROWS, COLUMNS], gl.float32, SCORES)
        b_scores = warpgroups.warpgroup_mma(
            s_q, s_keys.index(0).permute((1, 0)), b_zero, use_acc=False, is_async=True
        )
        b_scores = warpgroups.warpgroup_mma_wait(0, deps=(b_scores,))
        mbarrier.arrive(keys_free.index(0), count=1)
        first = (num_tiles - 1) * COLUMNS
        b_new, b_max, b_sum, _ = _weights_of(
            b_scores, b_max, b_sum, scale, first, i_last, False, COLUMNS, SCORES
        )
        b_weights = gl.convert_layout(b_new.to(s_values.dtype), WEIGHTS)
        mbarrier.wait(values_ready.index(0), 0)
        for i_tile in range(1, num_masked):
            b_weights, b_out, b_max, b_sum = _fold(
                s_q, rings, i_tile, b_weights, b_out, b_max, b_sum, scale, first - i_tile * COLUMNS, i_last,
                False, ROWS, COLUMNS, KEY_TILES, VALUE_TILES, SCORES, OUT, WEIGHTS,
            )  # fmt: skip
        for i_tile in range(gl.maximum(num_masked, 1), num_tiles):
            b_weights, b_out, b_max, b_sum = _fold(
                s_q, rings, i_tile, b_weights, b_out, b_max, b_sum, scale, first, i_last,
                True, ROWS, COLUMNS, KEY_TILES, VALUE_TILES, SCORES, OUT, WEIGHTS,
            )  # fmt: skip
        b_out = warpgroups.warpgroup_mma(
            b_weights, s_values.index((num_tiles - 1) % VALUE_TILES), b_out, is_async=True
        )
        b_out = warpgroups.warpgroup_mma_wait(0, deps=(b_out,))
        b_total = gl.convert_layout(gl.where(b_sum == 0.0, 1.0, b_sum), gl.SliceLayout(1, OUT))
        b_out = b_out / b_total[:, None]
    i_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    i_dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, OUT))
    i_query = i_row // GROUP
    o_out = ((q_start + i_query).to(gl.int64) * num_heads + i_kv_head * GROUP + i_row % GROUP) * HEAD_DIM
    m_rows = (i_query < q_len)[:, None] & (i_dim < HEAD_DIM)[None, :]
    gl.store(p_out + o_out[:, None] + i_dim[None, :], b_out.to(p_out.dtype.element_ty), mask=m_rows)


@gluon_jit
def _copy_tiles(
    d_keys: tl.tensor,
    d_values: tl.tensor,
    rings: tl.tensor,
    num_tiles: tl.tensor,
    o_context: tl.tensor,
    o_head: tl.tensor,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_TILES: tl.constexpr,
    VALUE_TILES: tl.constexpr,
) -> None:
    """The warp that copies: tiles from the last to the first, each as soon as its place is free."""
    BYTES: tl.constexpr = COLUMNS * HEAD_DIM * 2
    s_keys, s_values, keys_ready, keys_free, values_ready, values_free = rings
    for i_tile in range(0, num_tiles):
        o_row = o_context + (num_tiles - 1 - i_tile) * COLUMNS
        i_slot = i_tile % KEY_TILES
        mbarrier.wait(keys_free.index(i_slot), ((i_tile // KEY_TILES) & 1) ^ 1)
        mbarrier.expect(keys_ready.index(i_slot), BYTES)
        tma.async_copy_global_to_shared(
            d_keys, [o_row, o_head], keys_ready.index(i_slot), s_keys.index(i_slot)
        )
        i_slot = i_tile % VALUE_TILES
        mbarrier.wait(values_free.index(i_slot), ((i_tile // VALUE_TILES) & 1) ^ 1)
        mbarrier.expect(values_ready.index(i_slot), BYTES)
        tma.async_copy_global_to_shared(
            d_values, [o_row, o_head], values_ready.index(i_slot), s_values.index(i_slot)
        )


@gluon_jit_varying("num_requests", "num_rows")
def _wgmma_context_kernel(
    p_q: tl.tensor,
    d_keys: tl.tensor,
    d_values: tl.tensor,
    p_q_starts: tl.tensor,
    p_kv_starts: tl.tensor,
    p_kv_lens: tl.tensor,
    p_out: tl.tensor,
    num_requests: tl.tensor,
    num_rows: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    num_heads: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_TILES: tl.constexpr,
    VALUE_TILES: tl.constexpr,
    BARRIERS: tl.constexpr,
    REQUEST_BLOCK: tl.constexpr,
) -> None:
    # Tiles are assigned as in `context_attention._context_kernel`, whose rows are (query, head) pairs, too.
    # Padding rows count as one more request, all of whose columns are unseen: their tiles store zeros.
    LINE: tl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    BOTH: tl.constexpr = 2 * ROWS
    i_kv_head = gl.program_id(0)
    i_slot = gl.num_programs(1) - 1 - gl.program_id(1)
    i_request = -1
    for start in range(0, num_requests + 1, REQUEST_BLOCK):
        i_start = start + gl.arange(0, REQUEST_BLOCK, LINE)
        m_start = i_start <= num_requests
        b_starts = gl.load(p_q_starts + i_start, mask=m_start, other=0).to(gl.int32)
        is_before = m_start & (b_starts * GROUP // BOTH + i_start <= i_slot)
        i_request += gl.sum(is_before.to(gl.int32), axis=0)
    q_start = gl.load(p_q_starts + i_request).to(gl.int32)
    q_len = num_rows - q_start
    context = 0
    o_context = 0
    if i_request < num_requests:
        q_len = gl.load(p_q_starts + i_request + 1).to(gl.int32) - q_start
        context = gl.load(p_kv_lens + i_request).to(gl.int32) - q_len
        o_context = gl.load(p_kv_starts + i_request).to(gl.int32)
    first_row = (i_slot - (q_start * GROUP // BOTH + i_request)) * BOTH
    is_live = (first_row < q_len * GROUP) & (i_request < num_requests)
    last_query = gl.minimum((first_row + BOTH - 1) // GROUP, q_len - 1)
    num_tiles = gl.where(is_live, (context + last_query + COLUMNS) // COLUMNS, 0)
    num_masked = num_tiles - (context + first_row // GROUP + 1) // COLUMNS

    TILE: tl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: tl.constexpr = mbarrier.MBarrierLayout()
    s_q = gl.allocate_shared_memory(p_q.dtype.element_ty, [2, ROWS, HEAD_DIM], TILE)
    s_keys = gl.allocate_shared_memory(p_q.dtype.element_ty, [KEY_TILES, COLUMNS, HEAD_DIM], TILE)
    s_values = gl.allocate_shared_memory(p_q.dtype.element_ty, [VALUE_TILES, COLUMNS, HEAD_DIM], TILE)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    keys_ready = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], BARRIER)
    keys_free = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], BARRIER)
    values_ready = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], BARRIER)
    values_free = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(q_ready.index(i), count=1)
    for i in gl.static_range(KEY_TILES):
        mbarrier.init(keys_ready.index(i), count=1)
        mbarrier.init(keys_free.index(i), count=2)  # by both groups
    for i in gl.static_range(VALUE_TILES):
        mbarrier.init(values_ready.index(i), count=1)
        mbarrier.init(values_free.index(i), count=2)
    rings = (s_keys, s_values, keys_ready, keys_free, values_ready, values_free)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    p_q, p_out, q_stride, q_head_stride, num_heads, s_q.index(0), q_ready.index(0), rings,
                    num_tiles, num_masked, context, q_start, q_len, first_row, i_kv_head, scale,
                    GROUP, HEAD_DIM, ROWS, COLUMNS, KEY_TILES, VALUE_TILES,
                ),
            ),
            (
                _attend,
                (
                    p_q, p_out, q_stride, q_head_stride, num_heads, s_q.index(1), q_ready.index(1), rings,
                    num_tiles, num_masked, context, q_start, q_len, first_row + ROWS, i_kv_head, scale,
                    GROUP, HEAD_DIM, ROWS, COLUMNS, KEY_TILES, VALUE_TILES,
                ),
            ),
            (
                _copy_tiles,
                (
                    d_keys, d_values, rings, num_tiles, o_context, i_kv_head * HEAD_DIM,
                    HEAD_DIM, COLUMNS, KEY_TILES, VALUE_TILES,
                ),
            ),
        ],
        [4, 1],  # warps of the second and the third
        [240, 24],  # their registers
    )  # fmt: skip


def wgmma_attention_triton(
    q: torch.Tensor,
    descriptors: tuple[object, object],
    kv_heads: int,
    q_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch on `q` `[T, N, D]` and the `descriptors` of keys and values, in tiles of COLUMNS rows; returns
    `[T, N, D]`, zeros in padding rows. `scale` includes log2(e).

    Every start of a request in the context is a multiple of COLUMNS. Only where `can_run` says so.
    """
    num_rows, num_heads, head_dim = q.shape
    group, num_requests = num_heads // kv_heads, kv_lens.shape[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    _wgmma_context_kernel[(kv_heads, num_rows * group // (2 * ROWS) + num_requests + 1)](
        q,
        *descriptors,
        q_starts,
        kv_starts,
        kv_lens,
        out,
        num_requests,
        num_rows,
        q.stride(0),
        q.stride(1),
        num_heads,
        scale,
        GROUP=group,
        HEAD_DIM=head_dim,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        KEY_TILES=KEY_TILES,
        VALUE_TILES=VALUE_TILES,
        BARRIERS=BARRIERS,
        REQUEST_BLOCK=REQUEST_BLOCK,
        num_warps=4,
    )
    return out
