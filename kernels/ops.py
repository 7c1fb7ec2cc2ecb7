"""Paged attention and KV store as torch library operations: a full graph records each as one.

A recorder sees operations and not the Python code around them, so each operation declares the arguments that
it mutates. Lengths and pages are tensors that are read when the operation runs, so a recorded graph follows
their values. The torch reference on CPU reads only as many pages as the longest context has, which fixed
shapes could not do. The Triton kernels on CUDA do that by themselves. On fake tensors the CUDA form runs, so
that a dry run sees its launches.

Shapes and dtypes are those of `kv_store` and `verify_attention`.
"""

from __future__ import annotations

import torch

from .kv_store import store_kv
from .verify_attention import paged_verify_reference, paged_verify_triton

torch.library.define("baton::store_kv", "(Tensor(a!) kv, int layer, Tensor rows, Tensor k, Tensor v) -> ()")
torch.library.define(
    "baton::paged_verify",
    "(Tensor q, Tensor kv, int layer, Tensor page_table, Tensor kv_lens, float scale, Tensor? tree_mask) -> "
    "Tensor",
)


def _store_kv(kv: torch.Tensor, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    store_kv(kv, layer, rows, k, v)


torch.library.impl("baton::store_kv", ("cpu", "cuda"), _store_kv)
torch.library.register_fake("baton::store_kv", _store_kv)


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


torch.library.impl("baton::paged_verify", "cuda", _paged_verify_cuda)
torch.library.register_fake("baton::paged_verify", _paged_verify_cuda)


def recorded_store_kv(
    kv: torch.Tensor, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """`kv_store.store_kv` as one operation, which mutates `kv`."""
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
    """`verify_attention.paged_verify` as one operation; returns `[B, Q, N, D]`.

    `q`: `[B, Q, N, D]`. `page_table`: int `[B, P]`. `kv_lens`: int `[B]`, 0 for an idle request, whose rows
    give zeros. `tree_mask`: None or bool `[B, Q, W]`.
    """
    out: torch.Tensor = torch.ops.baton.paged_verify.default(
        q, kv, layer, page_table, kv_lens, scale, tree_mask
    )
    return out
