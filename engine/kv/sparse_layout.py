"""The layout of pages that hold the side caches of sparse attention behind their keys and values.

The caches lie in further layers of the page, `[side layers, 2, page_size, K, D]` of plain memory. So a page
is still one byte range with one owner, and allocation, prefix cache, hand-off, digests and fingerprints treat
it as they treat any page.
"""

from dataclasses import dataclass

from ...kernels.sparse_caches import SparseSizes
from .layouts import MHALayout


@dataclass(frozen=True, kw_only=True)
class SparseLayout(MHALayout):
    """An MHA layout, `num_layers` of which are the layers of `sizes` and those of its side caches.

    Raises ValueError if blocks and pages do not divide each other, for a size below 1, or for other layers.
    """

    sizes: SparseSizes

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.sizes
        if min(sizes) < 1:
            raise ValueError(f"sparse attention of sizes {sizes}: each must be at least 1")
        if self.page_size % sizes.index_block:
            raise ValueError(
                f"page_size {self.page_size} is no multiple of the indexer's blocks of {sizes.index_block} "
                f"tokens; use a multiple"
            )
        if self.page_size % sizes.dense_block and sizes.dense_block % self.page_size:
            raise ValueError(
                f"page_size {self.page_size} neither divides the groups of {sizes.dense_block} tokens nor is "
                "a multiple of them; use one that does"
            )
        if self.num_layers != sizes.num_layers + sizes.side_layers:
            raise ValueError(
                f"pages of {self.num_layers} layers for {sizes.num_layers} layers and {sizes.side_layers} of "
                "side caches"
            )

    @classmethod
    def with_caches(cls, layout: MHALayout, sizes: SparseSizes) -> "SparseLayout":
        """`layout`, of the model's layers, with the side caches of `sizes`."""
        return cls(
            page_size=layout.page_size,
            num_layers=layout.num_layers + sizes.side_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            dtype=layout.dtype,
            sizes=sizes,
        )

    @property
    def token_layers(self) -> int:
        return self.sizes.num_layers

    def shard(self, num_ranks: int) -> "SparseLayout":
        """As `PageLayout.shard`, of one rank only: an entry of the index is a mean over all KV heads."""
        if num_ranks != 1:
            raise ValueError(f"the index of sparse attention cannot be dealt to {num_ranks} ranks; use 1")
        return self
