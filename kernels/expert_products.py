"""What the products of experts share, whatever the form of their weights.

Legend: T rows, K experts of a row, S = T*K slots, E experts, N outputs of a matrix, H inputs, I intermediate
size of an expert.
"""

from __future__ import annotations

import torch

from .group_experts import ExpertTiles, group_experts_triton
from .triton_jit import jit, tl

MIN_TILE_ROWS = 16  # of the smallest tile
# Slots of an expert, on average, up to which tiles have 16 rows, and 32: with more, many experts would have a
# second tile, which reads and multiplies the weights again. The largest share of each range is at least twice
# the smallest, so a power of two of rows lies in each, and a dry run over those finds all tiles.
FEW_SLOTS, SOME_SLOTS = 12, 28


def pays_grouping(num_slots: int, num_experts: int, total: int = 0) -> bool:
    """Whether slots are better grouped by expert: from half as many as experts on, enough of them share one.

    `total`: the number of all experts, where only `num_experts` are here; otherwise 0.
    """
    return 2 * num_slots >= (total or num_experts)


def expert_tiles(
    ids: torch.Tensor, num_experts: int, tile_rows: int, is_grouped: bool, first: int = 0
) -> tuple[ExpertTiles, int]:
    """The tiles of `ids` int32 `[T, K]`, and their number at most; the experts here have the ids from `first`
    on. Without grouping each slot is a tile, with the id of its expert.
    """
    if not is_grouped:
        return ExpertTiles(ids, ids, ids), ids.numel()
    tiles = group_experts_triton(ids, num_experts, tile_rows, first)
    return tiles, tiles.experts.shape[0]


def check_experts(op: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Raises ValueError unless the rows and their experts fit together."""
    if x.dim() != 2 or ids.dim() != 2 or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"{op}: x {tuple(x.shape)}, ids {tuple(ids.shape)}, weights {tuple(weights.shape)}; expected "
            "[T, H], [T, K], [T, K]"
        )
    if (ids.dtype, weights.dtype) != (torch.int32, torch.float32):
        raise ValueError(f"{op}: ids are {ids.dtype}, weights {weights.dtype}; expected int32, float32")


@jit
def store_expert_tile(
    b_y: tl.tensor,
    b_up: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    b_slot: tl.tensor,
    i_out: tl.tensor,
    num_slots: tl.tensor,
    out_size: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
) -> None:
    """Stores the sums `[OUT, ROWS]` of the outputs `i_out` of slots `b_slot`, with bias and gate.

    `p_bias`: that of the expert, the one of `b_up` behind the one of `b_y`. The gate is that of
    `expert_mlp`, with its roundings; LIMIT 0.0: silu.
    """
    m_out = i_out < out_size
    if HAS_BIAS:
        b_y += tl.load(p_bias + i_out, mask=m_out, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            b_up += tl.load(p_bias + out_size + i_out, mask=m_out, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        b_gate = b_y.to(p_y.dtype.element_ty).to(tl.float32)
        b_up = b_up.to(p_y.dtype.element_ty).to(tl.float32)
        if LIMIT != 0.0:
            b_gate = tl.minimum(b_gate, LIMIT)
            b_up = tl.minimum(tl.maximum(b_up, -LIMIT), LIMIT)
            b_y = (b_up + 1.0) * (b_gate / (1.0 + tl.exp(-ALPHA * b_gate)))
        else:
            b_silu = (b_gate / (1.0 + tl.exp(-b_gate))).to(p_y.dtype.element_ty).to(tl.float32)
            b_y = b_silu * b_up
    o_y = b_slot[None, :].to(tl.int64) * out_size + i_out[:, None]
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_out[:, None] & (b_slot < num_slots)[None, :])
