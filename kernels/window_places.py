"""The pages and slots of windowed layers, from those of a model's pages.

A page of a model with windows has a window page, in a pool of its own, while some row may still read it.
`table` int64 `[num_pages]` names it, 0 without one. Page 0 and slot 0 are the sinks of both pools.
"""

from __future__ import annotations

import torch

from .triton_jit import cdiv, jit_varying, next_power_of_2, tl

MAX_BLOCK = 1024


def window_places_reference(
    table: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition and the CPU path; arguments as in `window_places`."""
    window_pages = table.index_select(0, pages.flatten()).view(pages.shape)
    return window_pages, window_slots_reference(table, slots, page_size)


def window_slots_reference(table: torch.Tensor, slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """The slots of `window_places_reference` alone."""
    pages = torch.div(slots, page_size, rounding_mode="floor")
    found = table.index_select(0, pages.flatten()).view(slots.shape)
    return torch.where(found > 0, found * page_size + slots % page_size, 0)


@jit_varying("num_pages", "num_slots", "p_slots")
def _window_places_kernel(
    p_table: tl.tensor,
    p_pages: tl.tensor,
    p_slots: tl.tensor,
    p_window_pages: tl.tensor,
    p_window_slots: tl.tensor,
    num_pages: tl.tensor,
    num_slots: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # the first programs map pages, the others slots
    page_programs = tl.cdiv(num_pages, BLOCK)
    i_program = tl.program_id(0)
    if i_program < page_programs:
        i_page = i_program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        b_page = tl.load(p_pages + i_page, mask=i_page < num_pages, other=0)
        tl.store(p_window_pages + i_page, tl.load(p_table + b_page), mask=i_page < num_pages)
    else:
        i_slot = (i_program - page_programs).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        b_slot = tl.load(p_slots + i_slot, mask=i_slot < num_slots, other=0)
        b_page = tl.load(p_table + b_slot // PAGE_SIZE)
        b_placed = tl.where(b_page > 0, b_page * PAGE_SIZE + b_slot % PAGE_SIZE, 0)
        tl.store(p_window_slots + i_slot, b_placed, mask=i_slot < num_slots)


def window_places_triton(
    table: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch on `table` int64 `[num_pages]`, `pages` int64 `[B, P]` and `slots` int64 of any shape.

    Raises ValueError for other dtypes.
    """
    _check(table, pages, slots)
    pages, slots = pages.contiguous(), slots.contiguous()
    window_pages, window_slots = torch.empty_like(pages), torch.empty_like(slots)
    num_pages, num_slots = pages.numel(), slots.numel()
    block = min(MAX_BLOCK, max(next_power_of_2(max(num_pages, num_slots, 1)), 16))
    programs = cdiv(num_pages, block) + cdiv(num_slots, block)
    if programs:
        _window_places_kernel[(programs,)](
            table,
            pages,
            slots,
            window_pages,
            window_slots,
            num_pages,
            num_slots,
            PAGE_SIZE=page_size,
            BLOCK=block,
            num_warps=4,
        )
    return window_pages, window_slots


def _check(table: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    if not table.dtype == pages.dtype == slots.dtype == torch.int64:
        raise ValueError(
            f"window_places: table {table.dtype}, pages {pages.dtype} and slots {slots.dtype} must be int64"
        )


def window_places(
    table: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(window pages in the shape of `pages`, window slots in the shape of `slots`), int64.

    A page without a window page gives page 0, and its slots give slot 0. Raises ValueError for other dtypes
    than int64.
    """
    if pages.is_cuda:
        return window_places_triton(table, pages, slots, page_size)
    _check(table, pages, slots)
    return window_places_reference(table, pages, slots, page_size)


def window_slots(table: torch.Tensor, slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """The slots of `window_places` alone."""
    if slots.is_cuda:
        return window_places_triton(table, slots[:0], slots, page_size)[1]
    _check(table, slots, slots)
    return window_slots_reference(table, slots, page_size)
