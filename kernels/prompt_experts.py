"""The products of experts for prompts: tiles of many rows, and weights that are copied as whole tiles.

They take the place of the products of `expert_mlp` where an expert has enough rows on average, and compute
the same bits: each value is one chain of matrix instructions along the inner dimension in both, and the rest
is `expert_products.store_expert_tile`. So it does not matter which of them a row meets.

A tile has up to 128 rows of one expert. The last tile of an expert is seldom full, so each tile runs with
128, 64 or 32 rows, the fewest that hold its slots. Rows are read by pointers from where they are. One copy
would need them side by side.

Legend: T rows, K experts of a row, S slots, E experts, N outputs, H inputs.
"""

from __future__ import annotations

import torch

from .expert_products import store_expert_tile
from .group_experts import ExpertTiles
from .skinny_linear import shared_bytes
from .triton_jit import ALIGNMENT, cdiv, jit, jit_varying, tensor_descriptor, tl

TILE_ROWS = 128
TILE_IN = 64  # inputs of a step: 128 bytes, the widest swizzled row of shared memory
TILE_WEIGHTS = 256  # rows of weights that a tile multiplies: 256 outputs, or 128 behind a gate
STAGES = 4
NEIGHBOURS = 8  # tiles whose programs run side by side before the next outputs, so that they share weights
CAPABILITY = (9, 0)  # the first compute capability that copies by tensor descriptors
SHARED_BYTES = STAGES * (TILE_ROWS + TILE_WEIGHTS) * TILE_IN * 2 + 1024  # and the barriers of the stages


def can_run(device: torch.device) -> bool:
    """Whether `device` copies by tensor descriptors and has the shared memory of a tile."""
    return (
        device.type == "cuda"
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device) >= CAPABILITY
        and shared_bytes(device) >= SHARED_BYTES
    )


def can_multiply(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether these products take `x` and the matrices `weights` `[E, N, H]`.

    All are 16-bit floats, since float32 has no matrix instruction of full precision. H is a multiple of
    TILE_IN: rows in part of a step would be read value by value. N may be any number.
    """
    if x.dtype not in (torch.bfloat16, torch.float16) or not can_run(x.device):
        return False
    return all(
        weight.is_contiguous()
        and weight.shape[2] % TILE_IN == 0
        and int(weight.storage_offset()) * weight.element_size() % ALIGNMENT == 0
        for weight in weights
    )


@jit
def _tile_product(
    p_x: tl.tensor,
    d_weight: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    p_slots: tl.tensor,
    first_weight: tl.tensor,
    first_out: tl.tensor,
    num_slots: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    x_stride: tl.tensor,
    SLOTS_A_ROW: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
) -> None:
    """The outputs from `first_out` on of the ROWS slots at `p_slots`. `first_weight`: the first row of the
    expert's matrix, whose bias is at `p_bias`.
    """
    b_slot = tl.load(p_slots + tl.arange(0, ROWS))
    # what is no slot repeats the first row of the tile, and is not stored
    b_row = tl.where(b_slot < num_slots, b_slot, tl.load(p_slots)) // SLOTS_A_ROW
    p_rows = p_x + b_row.to(tl.int64)[:, None] * x_stride + tl.arange(0, IN)[None, :]
    first_row = first_weight + first_out
    # outputs are the rows of the product: its other side can be as short as the tile. Rows of weights behind
    # the last output are those of others, whose products are not stored
    b_y = tl.zeros((OUT, ROWS), dtype=tl.float32)
    b_up = b_y
    for first in range(0, in_size, IN):
        b_x = tl.load(p_rows + first)
        b_weight = d_weight.load([first_row, first])
        b_y = tl.dot(b_weight, b_x.T, b_y, input_precision="ieee")
        if IS_GATED:
            b_weight = d_weight.load([first_row + out_size, first])
            b_up = tl.dot(b_weight, b_x.T, b_up, input_precision="ieee")
    store_expert_tile(
        b_y,
        b_up,
        p_bias,
        p_y,
        b_slot,
        first_out + tl.arange(0, OUT),
        num_slots,
        out_size,
        HAS_BIAS,
        IS_GATED,
        LIMIT,
        ALPHA,
    )


@jit_varying("num_slots")
def _prompt_kernel(
    p_x: tl.tensor,
    d_weight: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    p_slots: tl.tensor,
    p_experts: tl.tensor,
    p_num_tiles: tl.tensor,
    num_slots: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    x_stride: tl.tensor,
    SLOTS_A_ROW: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
) -> None:
    num_outs = tl.cdiv(out_size, OUT)
    num_tiles = tl.load(p_num_tiles)
    if tl.program_id(0) >= num_tiles * num_outs:
        return
    first_tile = tl.program_id(0) // (NEIGHBOURS * num_outs) * NEIGHBOURS
    neighbours = tl.minimum(num_tiles - first_tile, NEIGHBOURS)
    i_program = tl.program_id(0) - first_tile * num_outs
    i_tile = first_tile + i_program % neighbours
    first_out = i_program // neighbours * OUT
    p_slots += i_tile * ROWS
    num_rows = tl.sum((tl.load(p_slots + tl.arange(0, ROWS)) < num_slots).to(tl.int32))
    first_weight = tl.load(p_experts + i_tile) * (out_size * 2 if IS_GATED else out_size)
    # Not down to 16 rows, which save little: with float16 the assembler then runs the matrix instructions of
    # the whole kernel one by one.
    for halvings in tl.static_range(3):
        fewest = (ROWS >> (halvings + 1)) + 1 if halvings < 2 else 1
        if (num_rows >= fewest) & (num_rows <= ROWS >> halvings):
            _tile_product(
                p_x,
                d_weight,
                p_bias + first_weight,
                p_y,
                p_slots,
                first_weight,
                first_out,
                num_slots,
                out_size,
                in_size,
                x_stride,
                SLOTS_A_ROW,
                IS_GATED,
                HAS_BIAS,
                LIMIT,
                ALPHA,
                ROWS >> halvings,
                OUT,
                IN,
            )


def prompt_product_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tiles: ExpertTiles,
    *,
    slots_a_row: int,
    is_gated: bool,
    limit: float,
    alpha: float,
) -> None:
    """Launch on `x` `[S / slots_a_row, H]` and the `tiles` of TILE_ROWS slots; writes `y` `[S, N]`.

    `weight`: `[E, N, H]`, if `is_gated` `[E, 2*N, H]`, gate first. `limit` and `alpha`: of the gate. Only
    where `can_multiply` says so.
    """
    num_experts, weight_rows, in_size = weight.shape
    num_slots, out_size = y.shape
    out = TILE_WEIGHTS // 2 if is_gated else TILE_WEIGHTS
    _prompt_kernel[(tiles.experts.shape[0] * cdiv(out_size, out),)](
        x,
        tensor_descriptor(weight.view(num_experts * weight_rows, in_size), (out, TILE_IN)),
        weight if bias is None else bias,
        y,
        *tiles,
        num_slots,
        out_size,
        in_size,
        x.stride(0),
        SLOTS_A_ROW=slots_a_row,
        IS_GATED=is_gated,
        HAS_BIAS=bias is not None,
        LIMIT=limit,
        ALPHA=alpha,
        ROWS=TILE_ROWS,
        OUT=out,
        IN=TILE_IN,
        NEIGHBOURS=NEIGHBOURS,
        num_warps=8,
        num_stages=STAGES,
    )
