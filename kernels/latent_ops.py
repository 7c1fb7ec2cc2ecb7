"""Attention over latents as operations of the torch library, which a full graph records as one each; see
`ops`.
"""

from __future__ import annotations

import torch

from .latent_attention import latent_verify_reference, latent_verify_triton
from .latent_store import store_latent

torch.library.define("baton::store_latent", "(Tensor(a!) kv, int layer, Tensor rows, Tensor latent) -> ()")
torch.library.define(
    "baton::latent_verify",
    "(Tensor q, Tensor kv, int layer, Tensor page_table, Tensor kv_lens, float scale, int rank, "
    "Tensor? tree_mask) -> Tensor",
)


def _store_latent(kv: torch.Tensor, layer: int, rows: torch.Tensor, latent: torch.Tensor) -> None:
    store_latent(kv, layer, rows, latent)


torch.library.impl("baton::store_latent", ("cpu", "cuda"), _store_latent)
torch.library.register_fake("baton::store_latent", _store_latent)


@torch.library.impl("baton::latent_verify", "cpu")
def _latent_verify_cpu(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    rank: int,
    tree_mask: torch.Tensor | None,
) -> torch.Tensor:
    longest = int(kv_lens.max()) if kv_lens.numel() else 0
    num_pages = max(-(-longest // kv.shape[3]), 1)
    return latent_verify_reference(q, kv, layer, page_table[:, :num_pages], kv_lens, scale, rank, tree_mask)


def _latent_verify_cuda(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    rank: int,
    tree_mask: torch.Tensor | None,
) -> torch.Tensor:
    return latent_verify_triton(q, kv, layer, page_table, kv_lens, scale, rank, tree_mask)


torch.library.impl("baton::latent_verify", "cuda", _latent_verify_cuda)
torch.library.register_fake("baton::latent_verify", _latent_verify_cuda)


def recorded_store_latent(kv: torch.Tensor, layer: int, rows: torch.Tensor, latent: torch.Tensor) -> None:
    """`latent_store.store_latent` as one operation, which mutates `kv`."""
    torch.ops.baton.store_latent.default(kv, layer, rows, latent)


def recorded_latent_verify(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    rank: int,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`latent_attention.latent_verify` as one operation; `q` `[B, Q, N, R+P]` -> `[B, Q, N, R]`."""
    out: torch.Tensor = torch.ops.baton.latent_verify.default(
        q, kv, layer, page_table, kv_lens, scale, rank, tree_mask
    )
    return out
