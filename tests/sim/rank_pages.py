"""Logical KV and its parts on tensor-parallel ranks, as the tests of hand-offs between ranks know them.

The parts are cut by torch's indexing here, and by byte ranges in `kvtransfer`.
"""

import torch
from baton.cluster.protocol.messages import Layout
from baton.kvtransfer.protocol.rank_pairs import Shard

ITEM_BYTES = {"bfloat16": 2, "float32": 4}


def layout_of_ranks(
    *, num_kv_heads: int = 4, head_dim: int = 8, has_features: bool = True, block_bytes: int = 4096
) -> Layout:
    ids = [0, 3] if has_features else []
    return Layout(
        fingerprint="ranks", dtype="bfloat16", page_size=4, num_layers=2, num_kv_heads=num_kv_heads,
        head_dim=head_dim, feature_ids=ids, feature_width=len(ids) * 24, block_bytes=block_bytes,
    )  # fmt: skip


def head_slice(layout: Layout, shard: Shard) -> slice:
    """The KV heads of a rank."""
    heads, num_ranks = layout.num_kv_heads, shard.num_ranks
    if num_ranks > heads:
        head = shard.rank // (num_ranks // heads)
        return slice(head, head + 1)
    each = heads // num_ranks
    return slice(shard.rank * each, (shard.rank + 1) * each)


def logical_pages(layout: Layout, num_pages: int, noise: torch.Generator) -> torch.Tensor:
    """Random KV of all heads, uint8 `[pages, layers, 2, page_size, heads, bytes of a head]`."""
    shape = (
        num_pages,
        layout.num_layers,
        2,
        layout.page_size,
        layout.num_kv_heads,
        layout.head_dim * ITEM_BYTES[layout.dtype],
    )
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=noise)


def rank_pages(layout: Layout, logical: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The pages of a rank, uint8 `[pages, bytes]`."""
    return logical[:, :, :, :, head_slice(layout, shard)].reshape(logical.shape[0], -1).contiguous()


def feature_bytes(layout: Layout) -> int:
    """Bytes of one page of features."""
    return layout.page_size * layout.feature_width * ITEM_BYTES[layout.dtype]
