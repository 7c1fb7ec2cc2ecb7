"""Products of few rows with 4-bit weights, in Gluon, for every GPU since sm_80, where `int4_rows` cannot run.

Each warp of a program multiplies units of its own, with the next one in flight, and the sums of the warps
are added at the end. So a program has many loads in flight although it has few outputs, and no second
kernel adds parts.

Legend as in `int4_values`; T rows of x, M rows of a tile of weights, W warps.
"""

from __future__ import annotations

import torch

from .chained_launch import chained
from .int4_fragments import (
    can_unpack,
    fragments,
    group_scales,
    split_words_layout,
    store_outputs,
    weight_rows,
)
from .int4_values import unit_of
from .triton_jit import cdiv, constexpr_function, gl, gluon_jit, gluon_jit_varying, tl, warpgroups

FEW_ROWS, MORE_ROWS = 8, 16  # of a tile
M = 16  # rows of a tile of weights: those of the matrix instruction
NARROW = 4224  # outputs up to which an H200 runs the eight warps of each program at once


def can_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel runs on CUDA `device` for x of `dtype`."""
    return can_unpack(dtype) and torch.cuda.get_device_capability(device) >= (8, 0)


@constexpr_function
def _x_layout(unit: int, warps: int) -> object:
    """x `[W, U, R]` as it is loaded: 16 bytes of a row by each thread."""
    return gl.BlockedLayout([1, 8, 1], [1, unit // 8, 256 // unit], [warps, 1, 1], [1, 2, 0])


@gluon_jit
def _load_unit(
    p_words: tl.tensor,
    p_groups: tl.tensor,
    i_unit: tl.tensor,
    first: tl.tensor,
    num_units: tl.tensor,
    num_weights: tl.tensor,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """The words `[W, M, U/8]` of units `first` + `i_unit` and of their groups `[W, M]`, zeros behind the
    last.
    """
    m_unit = (first + i_unit < num_units)[:, None]
    b_words = gl.load(p_words + first * (UNIT // 8), mask=m_unit[:, :, None], other=0)
    o_groups = ((first + i_unit) * UNIT // GROUP)[:, None] * num_weights
    return b_words, gl.load(p_groups + o_groups, mask=m_unit, other=0)


@gluon_jit_varying("num_rows")
def _int4_mma_kernel(
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_groups: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    num_rows: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    x_stride: tl.tensor,
    num_weights: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    SUMS: tl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: tl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: tl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    WORDS: tl.constexpr = split_words_layout(M, UNIT, WARPS)
    X: tl.constexpr = _x_layout(UNIT, WARPS)
    OUTS: tl.constexpr = gl.SliceLayout(2, WORDS)
    dtype: tl.constexpr = p_x.dtype.element_ty
    i_tile = gl.program_id(0)
    first_row = gl.program_id(1) * ROWS
    num_units = in_size // UNIT
    i_weight = weight_rows(i_tile, out_size, M, IS_GATED, gl.SliceLayout(0, OUTS))
    i_unit = gl.arange(0, WARPS, gl.SliceLayout(1, OUTS))
    i_word = gl.arange(0, UNIT // 8, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    o_unit = i_weight.to(gl.int64)[None, :] * (in_size // 8) + (i_unit * (UNIT // 8))[:, None]
    p_words = p_weight + o_unit[:, :, None] + i_word[None, None, :]
    p_weight_groups = p_groups + i_weight[None, :]
    i_x_unit = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, X)))
    i_in = gl.arange(0, UNIT, gl.SliceLayout(0, gl.SliceLayout(2, X)))
    i_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, X)))
    o_x = (i_x_unit[:, None] * UNIT + i_in[None, :])[:, :, None]
    p_rows = p_x + o_x + (i_row.to(gl.int64) * x_stride)[None, None, :]
    m_row = (i_row < num_rows)[None, None, :]
    b_zero = gl.zeros([WARPS, M, ROWS], gl.float32, SUMS)
    b_sums = b_zero
    b_words, b_groups = _load_unit(p_words, p_weight_groups, i_unit, 0, num_units, num_weights, UNIT, GROUP)
    for first in range(0, num_units, WARPS):
        m_x = m_row & (first + i_x_unit < num_units)[:, None, None]
        b_x = gl.load(p_rows + first * UNIT, mask=m_x, other=0.0)
        b_left = fragments(b_words, b_groups, LEFT, dtype)
        b_scales = group_scales(b_groups, gl.SliceLayout(2, SUMS))
        # behind the use of the last words: their registers take the next ones, which nothing waits for
        b_words, b_groups = _load_unit(
            p_words, p_weight_groups, i_unit, first + WARPS, num_units, num_weights, UNIT, GROUP
        )
        b_dot = warpgroups.mma_v2(b_left, gl.convert_layout(b_x, RIGHT), b_zero)
        b_sums += b_dot * b_scales[:, :, None]
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    store_outputs(
        gl.sum(b_sums, axis=0), p_bias, p_y, i_tile, first_row, num_rows, out_size, dtype, HAS_BIAS, IS_GATED,
        WARPS, gl.SliceLayout(0, SUMS),
    )  # fmt: skip


def int4_mma_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_gated: bool,
    tile_rows: int = 0,
) -> torch.Tensor:
    """Launch on `x` `[T, H]` and a packed weight that fit together; returns `[T, N]`, gated `[T, N/2]`.

    `tile_rows`: FEW_ROWS or MORE_ROWS, 0: by T. The bits of a row do not depend on T if it is given. Only
    where `can_run` says so.
    """
    num_rows, in_size = x.shape
    group = in_size // groups.shape[0]
    unit = unit_of(in_size, group)
    num_weights = weight.shape[0]
    out_size = num_weights // 2 if is_gated else num_weights
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    rows = tile_rows or (FEW_ROWS if num_rows <= FEW_ROWS else MORE_ROWS)
    warps = 8 if num_weights <= NARROW else 4
    _int4_mma_kernel[(cdiv(num_weights, M), cdiv(num_rows, rows))](
        x,
        weight,
        groups,
        groups if bias is None else bias,
        y,
        num_rows,
        out_size,
        in_size,
        x.stride(0),
        num_weights,
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        GROUP=group,
        UNIT=unit,
        M=M,
        ROWS=rows,
        WARPS=warps,
        **chained(x.device),
        num_warps=warps,
    )
    return y
