"""Pages to contiguous staging memory and back, for transfer: one launch per room and plane instead of a copy per page.

A plane is the byte view of a pool, uint8 `[num_pages, page_bytes]`; staging is uint8 `[M, page_bytes]` whose rows may
be strided, so that the KV and the features of a page can be gathered side by side into one stream.
"""

from __future__ import annotations

import torch

from .triton_jit import cdiv, jit, tl

# Words of one program's tile.
BLOCK = 2048
WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@jit
def _copy_pages_kernel(
    p_plane: tl.tensor,
    p_staging: tl.tensor,
    p_pages: tl.tensor,
    words: tl.tensor,
    plane_stride: tl.tensor,
    staging_stride: tl.tensor,
    IS_GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    i_word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_word = i_word < words
    i_page = tl.load(p_pages + i_row).to(tl.int64)
    p_page = p_plane + i_page * plane_stride + i_word
    p_row = p_staging + i_row * staging_stride + i_word
    if IS_GATHER:
        tl.store(p_row, tl.load(p_page, mask=m_word), mask=m_word)
    else:
        tl.store(p_page, tl.load(p_row, mask=m_word), mask=m_word)


def _check(plane: torch.Tensor, pages: torch.Tensor, staging: torch.Tensor) -> None:
    is_bytes = plane.dtype == staging.dtype == torch.uint8 and plane.dim() == 2
    is_dense = is_bytes and (plane.shape[1] == 0 or plane.stride(1) == 1)
    if not is_dense or staging.shape != (pages.shape[0], plane.shape[1]) or staging.stride(-1) != 1:
        raise ValueError(
            f"page copy: staging {staging.dtype} {tuple(staging.shape)} for {pages.shape[0]} pages of a plane "
            f"{plane.dtype} {tuple(plane.shape)}; both must be uint8 with dense rows of the same width"
        )


def _as_words(plane: torch.Tensor, staging: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as the widest integers that their addresses, strides and width allow."""
    numbers = [plane.shape[1]]
    for side in (plane, staging):
        numbers += [side.stride(0), int(side.storage_offset()), side.data_ptr()]
    for size, dtype in WORDS:
        if all(number % size == 0 for number in numbers):
            return plane.view(dtype), staging.view(dtype)
    raise AssertionError("every number is a multiple of 1")


def copy_pages_triton(
    plane: torch.Tensor, pages: torch.Tensor, staging: torch.Tensor, *, is_gather: bool
) -> None:
    """Launch on `plane` uint8 `[num_pages, page_bytes]`, `pages` int `[M]`, `staging` uint8 `[M, page_bytes]`.

    Page numbers are not checked. Raises ValueError for shapes and dtypes that do not fit.
    """
    _check(plane, pages, staging)
    if staging.numel() == 0:
        return
    plane, staging = _as_words(plane, staging)
    _copy_pages_kernel[(pages.shape[0], cdiv(plane.shape[1], BLOCK))](
        plane,
        staging,
        pages.contiguous(),
        plane.shape[1],
        plane.stride(0),
        staging.stride(0),
        IS_GATHER=is_gather,
        BLOCK=BLOCK,
        num_warps=4,
    )


def gather_pages(plane: torch.Tensor, pages: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy pages `pages` `[M]` of `plane` uint8 `[num_pages, page_bytes]` into the rows of `staging`
    uint8 `[M, page_bytes]`. Raises ValueError for shapes and dtypes that do not fit."""
    if plane.is_cuda:
        copy_pages_triton(plane, pages, staging, is_gather=True)
        return
    _check(plane, pages, staging)
    staging.copy_(plane.index_select(0, pages))


def scatter_pages(staging: torch.Tensor, pages: torch.Tensor, plane: torch.Tensor) -> None:
    """The way back: rows of `staging` uint8 `[M, page_bytes]` into the distinct pages `pages` `[M]` of `plane`.

    Raises ValueError for shapes and dtypes that do not fit.
    """
    if plane.is_cuda:
        copy_pages_triton(plane, pages, staging, is_gather=False)
        return
    _check(plane, pages, staging)
    plane.index_copy_(0, pages, staging)
