"""Paged attention and KV store as operations of the torch library. A full graph records each as one operation.

A recorder sees operations, not the Python around them, so each declares what it mutates. Lengths and pages are tensors
that are read when the operation runs: a graph that holds it follows them. On CPU the torch reference looks at no more
pages than the longest context has, which fixed shapes could not do; on CUDA the Triton kernels do that by themselves.

Shapes and dtypes are those of `kv_store` and `verify_attention`.
"""

from __future__ import annotations

import torch

from .kv_store import store_kv
from .verify_attention import paged_verify_reference, paged_verify_triton

torch.library.define("baton::store_kv", "(Tensor(a!) kv, int layer, Tensor rows, Tensor k, Tensor v) -> ()")
torch.library.define(
    "baton::paged_verify",
    "(Tensor q, Tensor kv, int layer, Tensor page_table, Tensor kv_lens, float scale, Tensor? tree_mask) -> Tensor",
)


@torch.library.impl("baton::store_kv", ("cpu", "cuda"))
def _store_kv(kv: torch.Tensor, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    store_kv(kv, layer, rows, k, v)


@torch.library.impl("baton::paged_verify", "cpu")
def _paged_verify_cpu(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    tree_mask: torch.Tensor | None,
) -> torch.Tensor:
    longest = int(kv_lens.max()) if kv_lens.numel() else 0
    num_pages = max(-(-longest // kv.shape[3]), 1)
    return paged_verify_reference(q, kv, layer, page_table[:, :num_pages], kv_lens, scale, tree_mask)


@torch.library.impl("baton::paged_verify", "cuda")
def _paged_verify_cuda(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    tree_mask: torch.Tensor | None,
) -> torch.Tensor:
    return paged_verify_triton(q, kv, layer, page_table, kv_lens, scale, tree_mask)


def recorded_store_kv(
    kv: torch.Tensor, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """`kv_store.store_kv` as one operation: `kv` is mutated."""
    torch.ops.baton.store_kv.default(kv, layer, rows, k, v)


def recorded_paged_verify(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`verify_attention.paged_verify` as one operation: `q` `[B, Q, N, D]`, `page_table` int `[B, P]`, `kv_lens` int `[B]`
    (0: an idle request, whose rows give zeros), `tree_mask` None or bool `[B, Q, W]` -> `[B, Q, N, D]`.
    """
    out: torch.Tensor = torch.ops.baton.paged_verify.default(
        q, kv, layer, page_table, kv_lens, scale, tree_mask
    )
    return out
