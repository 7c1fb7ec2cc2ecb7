"""Sparse attention of a decode step, with equally many rows per request; see `row_attention`.

Legend: B requests, N rows each, P planned pages per request, W columns of a tree mask.
"""

from collections.abc import Sequence

import torch

from ..kernels.attention_form import PLAIN_FORM, AttentionForm
from ..kernels.ops import recorded_store_kv
from ..kernels.sparse_caches import SparseSizes, plan_commits, plan_rows
from ..kernels.sparse_ops import recorded_compress, recorded_sparse_attention
from .errors import CheckpointError, LifecycleError
from .kv.pool import KVPool
from .kv.sparse_layout import SparseLayout
from .row_attention import RowPlan


class SparseRowPlan(RowPlan):
    """A `RowPlan` over a pool with side caches. Its plan is made from device tensors, so a graph that records
    the forward makes it anew at each replay.

    Raises LifecycleError as `RowPlan`, and for batch-invariant attention, which there is none of.
    """

    def __init__(
        self,
        pool: KVPool,
        rows: torch.Tensor,
        page_table: torch.Tensor,
        kv_lens: torch.Tensor,
        tree_mask: torch.Tensor | None = None,
        *,
        is_recorded: bool,
        is_invariant: bool = False,
    ) -> None:
        if is_invariant:
            raise LifecycleError("sparse attention is not batch-invariant")
        # recorded: the base gathers nothing for the attention of all tokens
        super().__init__(pool, rows, page_table, kv_lens, tree_mask, is_recorded=True)
        self.sizes = _sizes_of(pool)
        self.plan = plan_rows(self.sizes, page_table, kv_lens, rows.shape[0], tree_mask=tree_mask)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm = PLAIN_FORM
    ) -> torch.Tensor:
        """As `RowPlan.attend`; the last heads of q are queries of the indexer."""
        self.check(q.shape[0])
        recorded_store_kv(self.pool.kv, layer, self.rows, k, v)
        return self._read(layer, q, form)

    def _read(self, layer: int, q: torch.Tensor, form: AttentionForm) -> torch.Tensor:
        pool = self.pool
        return recorded_sparse_attention(
            q,
            pool.kv,
            layer,
            self.plan,
            self.page_table,
            self.kv_lens,
            self.sizes,
            pool.layout.scale,
            pool.faults,
            self.tree_mask,
        )


def compress_commits(
    pool: KVPool, page_table: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor, num_path: int
) -> None:
    """Writes the entries of side caches that the accepted branches of trees complete, in all layers.

    The rows of the branches lie at their positions by now: `counts` of at most `num_path` rows from `starts`
    on, both int64 `[B]`. `page_table` int64 `[B, P]`.
    """
    sizes = _sizes_of(pool)
    plan = plan_commits(sizes, page_table, starts, counts, num_path)
    recorded_compress(pool.kv, 0, sizes.num_layers, plan, page_table, starts, sizes, pool.faults)


def has_side_caches(pool: KVPool) -> bool:
    """Whether the pages of `pool` hold the side caches of sparse attention."""
    return isinstance(pool.layout, SparseLayout)


def check_branches(pool: KVPool, num_path: int, windows: Sequence[int] = ()) -> None:
    """Raises CheckpointError unless every window of attention holds tree branches of `num_path` rows.

    `windows` are those of the layers, 0 for none. A row of a tree sees all its ancestors. In sparse
    attention it must not see an entry of the side caches that another branch of the tree completes.
    """
    narrow = [window for window in windows if window]
    if has_side_caches(pool):
        narrow.append(_sizes_of(pool).window)
    if narrow and num_path > (window := min(narrow)):
        raise CheckpointError(
            f"spec_steps {num_path - 1}: trees of this model may be at most {window - 1} steps deep, because "
            f"rows attend one by one to {window} tokens only; lower spec_steps or set spec_topk to 1"
        )


def _sizes_of(pool: KVPool) -> SparseSizes:
    assert isinstance(pool.layout, SparseLayout), pool.layout
    return pool.layout.sizes
