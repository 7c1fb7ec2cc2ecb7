"""Experts with weights of 8-bit floating point for few slots, each multiplied by itself, without grouping.

As in `fp8_rows`, each thread multiplies the values that it loads with those of the row and adds them in
float32, so that nothing but the weights is moved: the experts of few slots differ anyway.

Legend: T rows, K experts of a row, S = T*K slots, E experts, H hidden size, I intermediate size of an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .combine_experts import combine_experts_triton
from .expert_mlp import PLAIN_EXPERTS, ExpertForm
from .fp8_rows import row_outputs, row_sums
from .fp8_scales import BLOCK
from .triton_jit import cdiv, jit, tl


@jit
def _fp8_expert_rows_kernel(
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_scales: tl.tensor,
    p_y: tl.tensor,
    p_experts: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    x_stride: tl.tensor,
    scale_stride: tl.tensor,
    expert_scales: tl.tensor,
    first_expert: tl.tensor,
    num_experts: tl.tensor,
    SLOTS_A_ROW: tl.constexpr,
    IS_PART: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    slot = tl.program_id(1).to(tl.int64)
    expert = tl.load(p_experts + slot).to(tl.int64)
    if IS_PART:
        expert -= first_expert
        if (expert < 0) | (expert >= num_experts):
            return
    i_out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows_of_expert = out_size * 2 if IS_GATED else out_size
    p_own_scales = p_scales + expert * expert_scales
    b_sum, b_up = row_sums(
        p_x + (slot // SLOTS_A_ROW) * x_stride, p_weight + expert * rows_of_expert * in_size, p_own_scales,
        tl.program_id(0) * BLOCK_OUT, out_size, in_size, scale_stride, HAS_BLOCKS, IS_GATED, IS_EVEN,
        SCALE_BLOCK, BLOCK_OUT, BLOCK_IN, NUM_STAGES,
    )  # fmt: skip
    p_own = p_y + slot * out_size
    dtype: tl.constexpr = p_y.dtype.element_ty
    b_total = row_outputs(
        b_sum, b_up, 1.0, p_own_scales, p_scales, i_out, out_size, dtype, False, HAS_BLOCKS, IS_GATED
    )
    tl.store(p_own + i_out, b_total.to(dtype), mask=i_out < out_size)


class ExpertRowsShape(NamedTuple):
    """Launch configuration."""

    out: int
    inner: int
    num_warps: int
    num_stages: int


def expert_rows_shape(in_size: int, is_gated: bool) -> ExpertRowsShape:
    """Tiles of outputs and inputs; with a gate each has two weights. The sums of a program are in registers.

    The tile of inputs divides them if it can: the intermediate sizes of experts are often multiples of 256
    or 128 alone.
    """
    inner = next((size for size in (1024, 512, 256, 128) if in_size % size == 0), 512)
    out = 8192 // inner // (2 if is_gated else 1)
    return ExpertRowsShape(out=out, inner=inner, num_warps=4, num_stages=3)


def fp8_expert_rows_triton(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down: torch.Tensor,
    down_scales: torch.Tensor,
    *,
    form: ExpertForm = PLAIN_EXPERTS,
    shapes: tuple[ExpertRowsShape, ExpertRowsShape] | None = None,
) -> torch.Tensor:
    """Launch with checked arguments of `fp8_experts.fp8_experts`, T at least 1. `shapes`: of both products.
    """
    num_slots, top_k = ids.numel(), ids.shape[1]
    inner = torch.empty(num_slots, gate_up.shape[1] // 2, dtype=x.dtype, device=x.device)
    outputs = torch.empty(num_slots, x.shape[1], dtype=x.dtype, device=x.device)
    source = x if x.stride(1) == 1 else x.contiguous()
    for i, (weight, scales, target) in enumerate(
        ((gate_up, gate_up_scales, inner), (down, down_scales, outputs))
    ):
        out_size, in_size = target.shape[1], source.shape[1]
        tile = expert_rows_shape(in_size, i == 0) if shapes is None else shapes[i]
        _fp8_expert_rows_kernel[(cdiv(out_size, tile.out), num_slots)](
            source,
            weight,
            scales,
            target,
            ids,
            out_size,
            in_size,
            source.stride(0),
            scales.shape[-1],
            scales.stride(0),
            form.first,
            len(weight),
            SLOTS_A_ROW=top_k if i == 0 else 1,
            IS_PART=form.total > 0,
            IS_GATED=i == 0,
            HAS_BLOCKS=scales.dim() == 3,
            IS_EVEN=in_size % tile.inner == 0,
            SCALE_BLOCK=BLOCK,
            BLOCK_OUT=tile.out,
            BLOCK_IN=tile.inner,
            NUM_STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
        source = target
    return combine_experts_triton(outputs, weights, ids if form.total else None, form.first, len(down))
