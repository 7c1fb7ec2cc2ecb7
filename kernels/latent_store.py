"""Write new latents into a page-major pool of one plane.

Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024) keeps one vector per token and layer for all
heads: R values from which keys and values are made, and P values of a rotated key. The pool is
`[num_pages, L, 1, page_size, 1, R+P]`, contiguous. Slots and the sink are those of `kv_store`.
"""

from __future__ import annotations

import torch

from .kv_store import kv_rows
from .triton_jit import jit_varying, next_power_of_2, tl


def is_latent(kv: torch.Tensor) -> bool:
    """Whether the pool `kv` `[num_pages, L, planes, ...]` holds latents: one plane instead of K and V."""
    return kv.shape[2] == 1


def gather_latents(kv: torch.Tensor, layer: int, rows: torch.Tensor) -> torch.Tensor:
    """Latents of `layer`, `[M, R+P]`, at `rows` int64 `[M]` (from `kv_rows`)."""
    return kv.view(-1, kv.shape[-1]).index_select(0, rows + layer * kv.shape[3])


@jit_varying("p_rows")
def _store_latent_kernel(
    p_latent: tl.tensor,
    p_rows: tl.tensor,
    p_kv: tl.tensor,
    latent_stride: tl.tensor,
    o_layer: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # program 0 has no token: it reads row 0 and zeros, and so clears the sink
    i_token = tl.program_id(0).to(tl.int64) - 1
    i_column = tl.arange(0, BLOCK)
    m_column = i_column < WIDTH
    m_token = i_token >= 0
    i_row = tl.load(p_rows + i_token, mask=m_token, other=0)
    b_latent = tl.load(p_latent + i_token * latent_stride + i_column, mask=m_column & m_token, other=0.0)
    # all padding rows write the same zeros to row 0, so their order does not matter
    b_latent = tl.where(i_row != 0, b_latent, 0.0)
    tl.store(p_kv + o_layer + i_row * WIDTH + i_column, b_latent, mask=m_column)


def store_latent_triton(kv: torch.Tensor, layer: int, rows: torch.Tensor, latent: torch.Tensor) -> None:
    """Launch on `kv` `[num_pages, L, 1, page_size, 1, R+P]`, `rows` int64 `[T]`, `latent` `[T, 1, R+P]`.

    Raises ValueError if shapes or dtypes do not fit the pool.
    """
    _check(kv, rows, latent)
    latent = latent if latent.stride(-1) == 1 else latent.contiguous()
    page_size, width = kv.shape[3], kv.shape[-1]
    _store_latent_kernel[(rows.shape[0] + 1,)](
        latent,
        rows.contiguous(),
        kv,
        latent.stride(0),
        layer * page_size * width,
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        num_warps=4,
    )


def _check(kv: torch.Tensor, rows: torch.Tensor, latent: torch.Tensor) -> None:
    if not is_latent(kv) or latent.shape != (rows.shape[0], *kv.shape[4:]) or latent.dtype != kv.dtype:
        raise ValueError(
            f"store_latent: latents {tuple(latent.shape)} {latent.dtype} for {rows.shape[0]} rows do not fit "
            f"a pool {tuple(kv.shape)} {kv.dtype}; expected [T, 1, R+P] and one plane"
        )


def store_latent(kv: torch.Tensor, layer: int, rows: torch.Tensor, latent: torch.Tensor) -> None:
    """Store `latent` `[T, 1, R+P]` of `layer` at `rows` int64 `[T]` (from `kv_rows`), then clear the sink.

    Raises ValueError if shapes or dtypes do not fit the pool.
    """
    if kv.is_cuda:
        store_latent_triton(kv, layer, rows, latent)
        return
    _check(kv, rows, latent)
    flat = kv.view(-1, kv.shape[-1])
    flat.index_copy_(0, rows + layer * kv.shape[3], latent.flatten(1))
    kv[0, layer, :, 0].zero_()


def latent_slots(page_table: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """The rows of layer 0 of every slot of `page_table` int `[B, P]`: int64 `[B, P*page_size]`."""
    page_size = kv.shape[3]
    slots = page_table.to(torch.int64)[:, :, None] * page_size + torch.arange(page_size, device=kv.device)
    return kv_rows(slots.flatten(1), kv)
