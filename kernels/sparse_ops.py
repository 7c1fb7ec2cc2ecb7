"""Sparse attention as operations of the torch library, which a full graph records as one each; see `ops`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .sparse_attention import sparse_attention
from .sparse_caches import SparsePlan, SparseSizes, compress

torch.library.define(
    "baton::sparse_attention",
    "(Tensor q, Tensor(a!) kv, int layer, Tensor rows, Tensor stamp, Tensor page_table, Tensor kv_lens, "
    "int[] sizes, float scale, Tensor(b!) faults, Tensor? tree_mask) -> Tensor",
)
torch.library.define(
    "baton::sparse_compress",
    "(Tensor(a!) kv, int layer, int num_layers, Tensor rows, Tensor stamp, Tensor page_table, "
    "Tensor kv_lens, int[] sizes, Tensor(b!) faults) -> ()",
)


def _sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
    stamp: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    sizes: Sequence[int],
    scale: float,
    faults: torch.Tensor,
    tree_mask: torch.Tensor | None,
) -> torch.Tensor:
    plan = SparsePlan(rows, stamp)
    return sparse_attention(
        q, kv, layer, plan, page_table, kv_lens, SparseSizes(*sizes), scale, faults, tree_mask
    )


def _sparse_compress(
    kv: torch.Tensor,
    layer: int,
    num_layers: int,
    rows: torch.Tensor,
    stamp: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    sizes: Sequence[int],
    faults: torch.Tensor,
) -> None:
    plan = SparsePlan(rows, stamp)
    compress(kv, layer, num_layers, plan, page_table, kv_lens, SparseSizes(*sizes), faults)


for _name, _form in (
    ("baton::sparse_attention", _sparse_attention),
    ("baton::sparse_compress", _sparse_compress),
):
    torch.library.impl(_name, ("cpu", "cuda"), _form)
    torch.library.register_fake(_name, _form)


def recorded_sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    plan: SparsePlan,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    sizes: SparseSizes,
    scale: float,
    faults: torch.Tensor,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sparse_attention.sparse_attention` as one operation, which mutates `kv` and `faults`."""
    out: torch.Tensor = torch.ops.baton.sparse_attention.default(
        q, kv, layer, *plan, page_table, kv_lens, list(sizes), scale, faults, tree_mask
    )
    return out


def recorded_compress(
    kv: torch.Tensor,
    layer: int,
    num_layers: int,
    plan: SparsePlan,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    sizes: SparseSizes,
    faults: torch.Tensor,
) -> None:
    """`sparse_caches.compress` as one operation, which mutates `kv` and `faults`."""
    torch.ops.baton.sparse_compress.default(
        kv, layer, num_layers, *plan, page_table, kv_lens, list(sizes), faults
    )
