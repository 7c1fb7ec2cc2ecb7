"""Projections with weights of 4-bit integers: y = x W^T + b, optionally with the gate of a SwiGLU MLP.

Up to MAX_ROWS rows, as in steps that decode and verify, kernels read the packed weight and turn it into
exact small values in the registers that matrix instructions read. Scales are applied to the sums of each
group. The fewest rows take `int4_rows` where it can run. Above, Hopper GPUs take `int4_wgmma`, or `int4_mma`
for few rows of a small weight, and other GPUs `int4_mma` for up to MAX_MMA_ROWS rows. More rows, as in
prompts, are multiplied with the dequantised weight by the library, and so is everything in float32, on older
GPUs and, but for `int4_rows`, with versions of Triton whose Gluon is not known.

On a CPU the definition dequantises the weight; `int4_cpu` multiplies weights that are packed for it.

Batch-invariant products take one of these kernels with one tile for any number of rows, and no splits. Where
there is none, they are those of `invariant_linear` with the dequantised weight.

Legend: T rows, N outputs, H inputs, G inputs of a group (see `int4_values`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import int4_cpu, int4_mma, int4_rows, int4_wgmma
from .int4_values import VALUES_A_WORD, Int4Weight, check_int4, dequantise_int4, unit_of
from .invariant_linear import invariant_linear
from .invariant_rows import linear_rows, silu_mul_rows
from .packed_words import group_scale
from .silu_mul import silu_mul, silu_mul_reference
from .triton_jit import cdiv, jit, tl

# With more rows the dequantised weight is faster on an H200. Elsewhere this was not measured.
MAX_ROWS, MAX_MMA_ROWS = 256, 64


def int4_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """The definition and the CPU path: a product with the weight's values, rounded to the dtype of `x`."""
    y = F.linear(x, dequantise_int4(weight, groups, x.dtype), bias)
    return silu_mul_reference(y) if is_gated else y


def int4_linear_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """As `int4_linear_reference`, batch-invariant on a CPU."""
    y = linear_rows(x, dequantise_int4(weight, groups, x.dtype), bias)
    return silu_mul_rows(y) if is_gated else y


@jit
def _dequantise_kernel(
    p_weight: tl.tensor,
    p_groups: tl.tensor,
    p_y: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
) -> None:
    i_unit = tl.program_id(0)
    i_out = tl.program_id(1).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m_out = i_out < out_size
    o_words = i_out[:, None] * (in_size // 8) + i_unit * (UNIT // 8) + tl.arange(0, UNIT // 8)[None, :]
    b_words = tl.load(p_weight + o_words, mask=m_out[:, None], other=0)
    b_group = tl.load(p_groups + i_unit * UNIT // GROUP * out_size + i_out, mask=m_out, other=0)
    # an axis for each part of an input: [OUT, t, i, e, j's low bit, j's high bit]
    b_low = tl.join(tl.join(b_words & 15, b_words >> 16 & 15), tl.join(b_words >> 4 & 15, b_words >> 20 & 15))
    b_high = tl.join(
        tl.join(b_words >> 8 & 15, b_words >> 24 & 15), tl.join(b_words >> 12 & 15, b_words >> 28 & 15)
    )
    b_parts = tl.reshape(tl.join(b_low, b_high), (BLOCK_OUT, 4, UNIT // 32, 2, 2, 2))
    b_values = tl.reshape(tl.permute(b_parts, (0, 2, 5, 4, 1, 3)), (BLOCK_OUT, UNIT)).to(tl.float32)
    b_y = (b_values - (b_group >> 16).to(tl.float32)[:, None]) * group_scale(b_group)[:, None]
    o_y = i_out[:, None] * in_size + i_unit * UNIT + tl.arange(0, UNIT)[None, :]
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_out[:, None])


def dequantise_int4_triton(weight: torch.Tensor, groups: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Launch: the values `[N, H]` of a packed weight in `dtype`."""
    group = check_int4("dequantise_int4", weight, groups)
    out_size, in_size = weight.shape[0], VALUES_A_WORD * weight.shape[1]
    y = torch.empty(out_size, in_size, dtype=dtype, device=weight.device)
    unit = unit_of(in_size, group)
    block_out = 4096 // unit
    _dequantise_kernel[(in_size // unit, cdiv(out_size, block_out))](
        weight,
        groups,
        y,
        out_size,
        in_size,
        GROUP=group,
        UNIT=unit,
        BLOCK_OUT=block_out,
        num_warps=4,
    )
    return y


def _check(
    x: torch.Tensor, weight: torch.Tensor, groups: torch.Tensor, bias: torch.Tensor | None, is_gated: bool
) -> None:
    """Raises ValueError unless the parts of a product fit together."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != VALUES_A_WORD * weight.shape[1]:
        raise ValueError(
            f"int4_linear: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}; expected [T, H], "
            "[N, H/8]"
        )
    if bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1]):
        raise ValueError(f"int4_linear: bias {tuple(bias.shape)} {bias.dtype}; expected [N] {x.dtype}")
    if is_gated and weight.shape[0] % 2:
        raise ValueError(f"int4_linear: {weight.shape[0]} gated outputs are odd")
    check_int4("int4_linear", weight, groups)


def int4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    is_invariant: bool = False,
) -> torch.Tensor:
    """x W^T + b with a packed `weight` int32 `[N, H/8]`: `x` `[T, H]`, `bias` None or `[N]` -> `[T, N]`.

    `groups` int32 `[H/G, N]` is that of `int4_values`. `is_gated`: silu of the first half of the outputs,
    times the second half, `[T, N/2]`. `is_invariant`: the bits of a row do not depend on the number of rows.
    Raises ValueError if shapes or dtypes do not fit. A weight of `int4_cpu` is multiplied by its kernel.
    """
    if weight.dtype == int4_cpu.STORED:
        y = int4_cpu.int4_cpu_linear(x, weight, groups, bias)
        return silu_mul_reference(y) if is_gated else y
    _check(x, weight, groups, bias, is_gated)
    if not x.is_cuda:
        on_cpu = int4_linear_rows if is_invariant else int4_linear_reference
        return on_cpu(x, weight, groups, bias, is_gated)
    has_wgmma, has_mma = (each.can_run(x.device, x.dtype) for each in (int4_wgmma, int4_mma))
    parts, num_rows = (x, weight, groups, bias), x.shape[0]
    if is_invariant:
        if has_wgmma:
            return int4_wgmma.int4_wgmma_triton(*parts, is_gated=is_gated, tile=int4_wgmma.FIXED_TILE)
        if has_mma:
            return int4_mma.int4_mma_triton(*parts, is_gated=is_gated, tile_rows=int4_mma.MORE_ROWS)
    else:
        whole = Int4Weight(weight, groups, bias)
        if int4_rows.can_run(x, whole):
            return int4_rows.int4_rows_triton(x, whole, is_gated=is_gated)
        is_few = num_rows <= int4_mma.FEW_ROWS and weight.shape[0] <= int4_mma.NARROW
        if has_mma and (is_few or (not has_wgmma and num_rows <= MAX_MMA_ROWS)):
            return int4_mma.int4_mma_triton(*parts, is_gated=is_gated)
        if has_wgmma and num_rows <= MAX_ROWS:
            return int4_wgmma.int4_wgmma_triton(*parts, is_gated=is_gated)
    product = invariant_linear if is_invariant else F.linear
    y = product(x, dequantise_int4_triton(weight, groups, x.dtype), bias)
    return silu_mul(y) if is_gated else y
