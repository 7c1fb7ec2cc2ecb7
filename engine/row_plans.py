"""The plan of a decode step's attention, by the layout of the pool."""

import torch

from .kv.layouts import MLALayout
from .kv.pool import KVPool
from .kv.window_pool import WindowedPool
from .latent_rows import LatentRowPlan
from .row_attention import RowPlan
from .sparse_rows import SparseRowPlan, has_side_caches
from .windowed_rows import WindowedRowPlan


def plan_rows(
    pool: KVPool,
    rows: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    tree_mask: torch.Tensor | None = None,
    *,
    slots: torch.Tensor | None = None,
    is_recorded: bool,
    is_invariant: bool = False,
) -> RowPlan | WindowedRowPlan:
    """The plan for the layout of `pool`; arguments and errors as of `RowPlan`.

    `slots`: those of `rows`, which a pool with window pages needs.
    """
    if isinstance(pool, WindowedPool):
        assert slots is not None, "rows of the pool do not tell those of window pages"
        return WindowedRowPlan(
            pool,
            rows,
            slots,
            page_table,
            kv_lens,
            tree_mask,
            is_recorded=is_recorded,
            is_invariant=is_invariant,
        )
    kind: type[RowPlan] = RowPlan
    if has_side_caches(pool):
        kind = SparseRowPlan
    elif isinstance(pool.layout, MLALayout):
        kind = LatentRowPlan
    return kind(
        pool, rows, page_table, kv_lens, tree_mask, is_recorded=is_recorded, is_invariant=is_invariant
    )
