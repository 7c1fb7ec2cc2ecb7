"""Rows grouped by expert, so that a grouped product can work on tiles of rows of one expert.

A slot is one (row, expert) pair: slot t*K + j is choice j of row t. The slots of each expert stand together,
in ascending order, filled up to a multiple of the tile with the number of slots, which is no slot. All sizes
depend on the numbers of slots, experts and tile rows alone, so a graph can record the launch. Slots of
experts that are elsewhere stand in no tile. Legend: S slots, E experts, R rows of a tile, M tiles at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .triton_jit import cdiv, jit_varying, next_power_of_2, tl

# Slots that a program looks at in a step; MANY_SLOTS where tiles have MANY_ROWS or more.
BLOCK_SLOTS, MANY_ROWS, MANY_SLOTS = 1024, 64, 8192


class ExpertTiles(NamedTuple):
    """`slots`: int32 `[M*R]`, the slot of each row of a tile. `experts`: int32 `[M]`, the expert of each
    tile. `num_tiles`: int32 `[1]`; tiles behind it are unset.
    """

    slots: torch.Tensor
    experts: torch.Tensor
    num_tiles: torch.Tensor


def max_tiles(num_slots: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles that `num_slots` slots can fill: each expert with slots has one that is not full."""
    return num_slots // tile_rows + min(num_slots, num_experts)


def group_experts_reference(
    ids: torch.Tensor, num_experts: int, tile_rows: int, first: int = 0
) -> ExpertTiles:
    """The definition and the CPU path."""
    flat = (ids - first).flatten().tolist()
    slots: list[int] = []
    experts: list[int] = []
    for expert in range(num_experts):
        own = [slot for slot, chosen in enumerate(flat) if chosen == expert]
        tiles = cdiv(len(own), tile_rows)
        slots += own + [len(flat)] * (tiles * tile_rows - len(own))
        experts += [expert] * tiles
    most = max_tiles(len(flat), num_experts, tile_rows)
    padded = slots + [len(flat)] * (most * tile_rows - len(slots))
    return ExpertTiles(
        torch.tensor(padded, dtype=torch.int32),
        torch.tensor(experts + [0] * (most - len(experts)), dtype=torch.int32),
        torch.tensor([len(experts)], dtype=torch.int32),
    )


@jit_varying("num_slots")
def _group_kernel(
    p_ids: tl.tensor,
    p_slots: tl.tensor,
    p_experts: tl.tensor,
    p_num_tiles: tl.tensor,
    num_slots: tl.tensor,
    num_experts: tl.tensor,
    first_expert: tl.tensor,
    TILE_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # one program for each expert; each counts all of them, which needs no second launch
    expert = tl.program_id(0)
    i_expert = tl.arange(0, BLOCK_EXPERTS)
    i_slot = tl.arange(0, BLOCK)
    b_counts = tl.zeros((BLOCK_EXPERTS,), dtype=tl.int32)
    for first in range(0, num_slots, BLOCK):
        m_slot = first + i_slot < num_slots
        b_id = tl.load(p_ids + first + i_slot, mask=m_slot, other=-1) - first_expert
        # slots behind the last one, or of experts elsewhere, count as of the last bin, which no expert has
        m_here = m_slot & (b_id >= 0) & (b_id < num_experts)
        b_counts += tl.histogram(tl.where(m_here, b_id, BLOCK_EXPERTS - 1), BLOCK_EXPERTS)
    b_tiles = tl.where(i_expert < num_experts, (b_counts + TILE_ROWS - 1) // TILE_ROWS, 0)
    first_tile = tl.sum(tl.where(i_expert < expert, b_tiles, 0))
    own_tiles = tl.sum(tl.where(i_expert == expert, b_tiles, 0))
    own_slots = tl.sum(tl.where(i_expert == expert, b_counts, 0))
    if expert == 0:
        tl.store(p_num_tiles, tl.sum(b_tiles))
    for tile in range(0, own_tiles):
        tl.store(p_experts + first_tile + tile, expert)
    place = first_tile * TILE_ROWS
    end = place + own_slots
    for first in range(0, num_slots, BLOCK):
        m_slot = first + i_slot < num_slots
        b_id = tl.load(p_ids + first + i_slot, mask=m_slot, other=-1) - first_expert
        b_own = (m_slot & (b_id == expert)).to(tl.int32)
        b_place = place + tl.cumsum(b_own) - 1
        tl.store(p_slots + b_place, first + i_slot, mask=b_own > 0)
        place += tl.sum(b_own)
    i_rest = end + tl.arange(0, TILE_ROWS)
    m_rest = i_rest < (first_tile + own_tiles) * TILE_ROWS
    tl.store(p_slots + i_rest, tl.zeros((TILE_ROWS,), dtype=tl.int32) + num_slots, mask=m_rest)


def group_experts_triton(ids: torch.Tensor, num_experts: int, tile_rows: int, first: int = 0) -> ExpertTiles:
    """Launch on `ids` int32 `[T, K]`."""
    num_slots = ids.numel()
    most = max_tiles(num_slots, num_experts, tile_rows)
    tiles = ExpertTiles(
        *(torch.empty(size, dtype=torch.int32, device=ids.device) for size in (most * tile_rows, most, 1))
    )
    _group_kernel[(num_experts,)](
        ids,
        *tiles,
        num_slots,
        num_experts,
        first,
        TILE_ROWS=tile_rows,
        BLOCK_EXPERTS=next_power_of_2(num_experts + 1),
        BLOCK=MANY_SLOTS if tile_rows >= MANY_ROWS else BLOCK_SLOTS,
        num_warps=8,
    )
    return tiles


def group_experts(ids: torch.Tensor, num_experts: int, tile_rows: int, first: int = 0) -> ExpertTiles:
    """The slots of `ids` int32 `[T, K]`, grouped by expert in tiles of `tile_rows` (a power of 2) rows.

    The experts here have the ids from `first` on; `ExpertTiles.experts` counts from there.
    """
    group = group_experts_triton if ids.is_cuda else group_experts_reference
    return group(ids, num_experts, tile_rows, first)
