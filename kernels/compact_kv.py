"""Moves rows of the paged KV pool: the accepted branch of a tree becomes contiguous.

Within a request every source is read before any destination is written, so they may overlap. Pool and slots
are those of `kv_store`. Slot 0, the sink, may be source and destination at once: zeros over zeros.
"""

from __future__ import annotations

import torch

from .fp8_scales import raw
from .kv_store import kv_rows
from .triton_jit import cdiv, jit_varying, next_power_of_2, tl

# Values of one program's tile.
TILE = 4096
MAX_MOVES = 256


def compact_kv_reference(
    kv: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, num_layers: int = 0
) -> None:
    """The definition and the CPU path; arguments as in `compact_kv`."""
    page_size = kv.shape[3]
    planes = torch.arange(kv.shape[2] * (num_layers or kv.shape[1]), device=kv.device) * page_size
    read, written = (
        (kv_rows(slots.flatten(), kv)[:, None] + planes).flatten() for slots in (sources, targets)
    )
    flat = raw(kv.view(-1, kv.shape[4] * kv.shape[5]))
    flat.index_copy_(0, written, flat[read])


@jit_varying("num_moves")
def _compact_kv_kernel(
    p_kv: tl.tensor,
    p_read: tl.tensor,
    p_written: tl.tensor,
    num_moves: tl.tensor,
    width: tl.tensor,
    page_size: tl.tensor,
    BLOCK_MOVES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # program (request, layer and K or V, columns): the whole tile is read before any of it is written
    i_request = tl.program_id(0).to(tl.int64)
    i_move = tl.arange(0, BLOCK_MOVES)
    i_column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    m_move = i_move < num_moves
    m_tile = m_move[:, None] & (i_column < width)[None, :]
    o_plane = tl.program_id(1).to(tl.int64) * page_size
    i_read = tl.load(p_read + i_request * num_moves + i_move, mask=m_move, other=0) + o_plane
    i_written = tl.load(p_written + i_request * num_moves + i_move, mask=m_move, other=0) + o_plane
    b_rows = tl.load(p_kv + i_read[:, None] * width + i_column[None, :], mask=m_tile)
    tl.debug_barrier()
    tl.store(p_kv + i_written[:, None] * width + i_column[None, :], b_rows, mask=m_tile)


def compact_kv_triton(
    kv: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, num_layers: int = 0
) -> None:
    """Launch on `kv` `[num_pages, L, planes, page_size, N, D]` and `sources`, `targets` int64 `[B, M]`.

    Raises ValueError if shapes or dtypes do not fit.
    """
    _check(kv, sources, targets)
    if sources.numel() == 0:
        return
    num_requests, num_moves = sources.shape
    page_size, width = kv.shape[3], kv.shape[4] * kv.shape[5]
    block_moves = next_power_of_2(num_moves)
    block = min(next_power_of_2(width), max(TILE // block_moves, 16))
    num_planes = kv.shape[2] * (num_layers or kv.shape[1])
    _compact_kv_kernel[(num_requests, num_planes, cdiv(width, block))](
        raw(kv),
        kv_rows(sources, kv).contiguous(),
        kv_rows(targets, kv).contiguous(),
        num_moves,
        width,
        page_size,
        BLOCK_MOVES=block_moves,
        BLOCK=block,
        num_warps=4,
    )


def _check(kv: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    is_integer = sources.dtype == targets.dtype == torch.int64
    if sources.shape != targets.shape or sources.dim() != 2 or not is_integer or not kv.is_contiguous():
        raise ValueError(
            f"compact_kv: sources {tuple(sources.shape)} {sources.dtype} and targets {tuple(targets.shape)} "
            f"{targets.dtype} must be int64 [B, M], the pool contiguous"
        )
    if sources.shape[1] > MAX_MOVES:
        raise ValueError(f"compact_kv: {sources.shape[1]} rows of a request, at most {MAX_MOVES}")


def compact_kv(kv: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, num_layers: int = 0) -> None:
    """Copy all planes from slots `sources` int64 `[B, M]` to slots `targets` int64 `[B, M]`.

    `kv`: `[num_pages, L, planes, page_size, N, D]`. `num_layers`: the first layers, 0 for all. Slots of
    different requests are disjoint, except for slot 0. Raises ValueError if shapes or dtypes do not fit.
    """
    if kv.is_cuda:
        compact_kv_triton(kv, sources, targets, num_layers)
        return
    _check(kv, sources, targets)
    compact_kv_reference(kv, sources, targets, num_layers)
