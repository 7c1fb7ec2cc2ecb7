"""Products of more rows with 4-bit weights, in Gluon, for Hopper GPUs.

Words become the left operand of Hopper's matrix instruction in registers, so that no value of the weight is
written anywhere. Tiles of x come to a ring in shared memory by bulk copies (TMA). Where few outputs would
leave multiprocessors idle, the inputs are cut into splits that run side by side, and a second kernel adds
their sums in a fixed order.

Legend as in `int4_values`; T rows of x, M rows of a tile of weights, S splits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .add_splits import add_splits
from .chained_launch import chained
from .int4_fragments import can_unpack, fragments, group_scales, store_outputs, weight_rows, words_layout
from .int4_values import unit_of
from .triton_jit import (
    ALIGNMENT,
    cdiv,
    gl,
    gluon_jit_varying,
    mbarrier,
    next_power_of_2,
    tile_descriptor,
    tl,
    tma,
    warpgroups,
)

M, WARPS = 64, 4  # the rows of the matrix instruction, and its warps
MIN_TILE_ROWS, MAX_TILE_ROWS = 8, 128


class WgmmaTile(NamedTuple):
    """Launch configuration. `rows`: those of x. `ahead`: units of words in flight. `stages`: tiles of x."""

    rows: int
    num_splits: int
    ahead: int = 2
    stages: int = 2


# One tile for any number of rows: then the bits of a row do not depend on it.
FIXED_TILE = WgmmaTile(rows=64, num_splits=1, ahead=4, stages=3)


def can_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel runs on CUDA `device` for x of `dtype`."""
    return can_unpack(dtype) and torch.cuda.get_device_capability(device)[0] == 9


def wgmma_tile(num_rows: int, num_weights: int, num_units: int, is_gated: bool) -> WgmmaTile:
    """The tile for `num_rows` rows and `num_weights` rows of the weight, of `num_units` units each.

    As many programs as an H200 runs at once: these were the best of 36 tiles there, for the projections of an
    8B Llama at 8 to 128 rows.
    """
    rows = min(max(next_power_of_2(num_rows), MIN_TILE_ROWS), MAX_TILE_ROWS)
    programs = cdiv(num_weights, M) * cdiv(num_rows, rows)
    most = 512 if rows <= 32 else 384 if rows == 64 else 256
    splits = 1
    while not is_gated and 2 * splits * programs <= most and 4 * splits <= num_units:
        splits *= 2
    ahead = 2
    if programs > 384:
        ahead = 4 if rows <= 16 else 1 if rows == 64 else 2
    return WgmmaTile(rows, splits, ahead)


@gluon_jit_varying("num_rows")
def _int4_wgmma_kernel(
    d_x: tl.tensor,
    p_weight: tl.tensor,
    p_groups: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    num_rows: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    num_weights: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    SUMS: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    LEFT: tl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    WORDS: tl.constexpr = words_layout(M, UNIT, WARPS)
    BYTES: tl.constexpr = ROWS * UNIT * 2
    dtype: tl.constexpr = d_x.dtype
    i_tile = gl.program_id(0)
    first_row = gl.program_id(1) * ROWS
    i_split = gl.program_id(2)
    i_weight = weight_rows(i_tile, out_size, M, IS_GATED, gl.SliceLayout(1, WORDS))
    i_word = gl.arange(0, UNIT // 8, gl.SliceLayout(0, WORDS))
    p_words = p_weight + i_weight.to(gl.int64)[:, None] * (in_size // 8) + i_word[None, :]
    p_weight_groups = p_groups + i_weight
    # A split has a multiple of AHEAD units. Behind the last one of the weight, copies of x are filled with
    # zeros, and words are the last ones again.
    last = in_size // UNIT - 1
    num_units = gl.cdiv(last + 1, SPLITS * AHEAD) * AHEAD
    first = i_split * num_units
    s_x = gl.allocate_shared_memory(dtype, [STAGES, ROWS, UNIT], d_x.layout)
    x_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(x_ready.index(i), count=1)
    warpgroups.fence_async_shared()
    for i in gl.static_range(STAGES - 1):
        if i < num_units:
            mbarrier.expect(x_ready.index(i), BYTES)
            tma.async_copy_global_to_shared(
                d_x, [first_row, (first + i) * UNIT], x_ready.index(i), s_x.index(i)
            )
    words: tl.tensor = ()
    groups: tl.tensor = ()
    for i in gl.static_range(AHEAD):
        i_unit = gl.minimum(first + i, last)
        words += (gl.load(p_words + i_unit * (UNIT // 8)),)
        groups += (gl.load(p_weight_groups + i_unit * UNIT // GROUP * num_weights),)
    b_zero = gl.zeros([M, ROWS], gl.float32, SUMS)
    b_sums = b_zero
    for start in range(0, num_units, AHEAD):
        for i in gl.static_range(AHEAD):  # a whole turn, so that no words in flight change their registers
            at = start + i
            i_next = at + STAGES - 1
            if i_next < num_units:
                i_slot = i_next % STAGES
                mbarrier.expect(x_ready.index(i_slot), BYTES)
                tma.async_copy_global_to_shared(
                    d_x, [first_row, (first + i_next) * UNIT], x_ready.index(i_slot), s_x.index(i_slot)
                )
            b_left = fragments(words[0], groups[0], LEFT, dtype)
            b_scales = group_scales(groups[0], gl.SliceLayout(1, SUMS))
            i_unit = gl.minimum(first + at + AHEAD, last)
            words, groups = words[1:], groups[1:]
            words += (gl.load(p_words + i_unit * (UNIT // 8)),)
            groups += (gl.load(p_weight_groups + i_unit * UNIT // GROUP * num_weights),)
            mbarrier.wait(x_ready.index(at % STAGES), (at // STAGES) & 1)
            s_right = s_x.index(at % STAGES).permute((1, 0))
            b_dot = warpgroups.warpgroup_mma(b_left, s_right, b_zero, use_acc=False, is_async=True)
            b_dot = warpgroups.warpgroup_mma_wait(0, deps=(b_dot,))
            b_sums += b_dot * b_scales[:, None]
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    if SPLITS == 1:
        store_outputs(
            b_sums, p_bias, p_y, i_tile, first_row, num_rows, out_size, dtype, HAS_BIAS, IS_GATED, WARPS, SUMS
        )
    else:
        p_sums = p_y + i_split.to(gl.int64) * num_rows * out_size
        store_outputs(
            b_sums, p_bias, p_sums, i_tile, first_row, num_rows, out_size, dtype, False, False, WARPS, SUMS
        )


def int4_wgmma_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_gated: bool,
    tile: WgmmaTile | None = None,
) -> torch.Tensor:
    """Launch on `x` `[T, H]` and a packed weight that fit together; returns `[T, N]`, gated `[T, N/2]`.

    `tile`: FIXED_TILE where the bits of a row must not depend on T; None: the fastest. Only where `can_run`
    says so.
    """
    num_rows, in_size = x.shape
    group = in_size // groups.shape[0]
    unit = unit_of(in_size, group)
    num_weights = weight.shape[0]
    out_size = num_weights // 2 if is_gated else num_weights
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    tile = wgmma_tile(num_rows, num_weights, in_size // unit, is_gated) if tile is None else tile
    splits = tile.num_splits
    sums = y if splits == 1 else torch.empty(splits, *y.shape, dtype=torch.float32, device=x.device)
    if x.stride() != (in_size, 1) or int(x.storage_offset()) * x.element_size() % ALIGNMENT:
        x = x.clone(memory_format=torch.contiguous_format)  # a copy of tiles needs aligned rows
    _int4_wgmma_kernel[(cdiv(num_weights, M), cdiv(num_rows, tile.rows), splits)](
        tile_descriptor(x, (tile.rows, unit)),
        weight,
        groups,
        groups if bias is None else bias,
        sums,
        num_rows,
        out_size,
        in_size,
        num_weights,
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        GROUP=group,
        UNIT=unit,
        M=M,
        ROWS=tile.rows,
        SPLITS=splits,
        AHEAD=tile.ahead,
        STAGES=tile.stages,
        WARPS=WARPS,
        **chained(x.device),
        num_warps=WARPS,
    )
    if splits > 1:
        add_splits(sums, bias, y)
    return y
