"""Static inputs of full graphs: equally many rows of each request, with everything that attention needs on the device.

Legend: B requests planned for, N rows each, P pages planned for per request.
"""

import torch

from ...kernels.kv_store import kv_rows
from ...kernels.ops import recorded_paged_verify, recorded_store_kv
from ..errors import LifecycleError
from ..graphs.bucketed_graphs import BatchShape
from ..graphs.static import load_rows
from ..kv.pool import KVPool
from ..models.layers import Attend
from .forward_batch import ForwardBatch


class FixedRows:
    """`input_ids`, `positions`, `slots` `[B*N]`, `page_table` `[B, P]`, `kv_lens` `[B]`, all int64, and with `has_tree` a
    `tree_mask` bool `[B, N, N]`; idle requests have length 0 and their rows lie in the sink."""

    def __init__(
        self, pool: KVPool, *, max_requests: int, num_rows: int, max_pages: int, has_tree: bool = False
    ) -> None:
        self.pool = pool
        self.num_rows = num_rows
        self.max_pages = max_pages
        self.input_ids, self.positions, self.slots = (
            torch.zeros(max_requests * num_rows, dtype=torch.int64, device=pool.device) for _ in range(3)
        )
        self.page_table = torch.zeros((max_requests, max_pages), dtype=torch.int64, device=pool.device)
        self.kv_lens = torch.zeros(max_requests, dtype=torch.int64, device=pool.device)
        square = (max_requests, num_rows, num_rows)
        self.tree_mask = torch.zeros(square, dtype=torch.bool, device=pool.device) if has_tree else None

    def shape_of(self, batch: ForwardBatch) -> BatchShape:
        """The sizes by which a graph is chosen for `batch`; padding rows count as idle requests."""
        rows = batch.q_lens[0] if batch.q_lens else self.num_rows
        is_uniform = all(q == rows for q in batch.q_lens) and batch.num_tokens % rows == 0
        is_uniform = is_uniform and (batch.tree_mask is None) is (self.tree_mask is None)
        return BatchShape(
            size=batch.num_tokens // rows,
            rows=rows if is_uniform else -1,
            pages=batch.page_table.shape[1],
            hidden=batch.capture_hidden,
            has_embeds=batch.input_embeds is not None,
        )

    def plan(self, batch: ForwardBatch, num_requests: int) -> None:
        """Load `batch`, padded with idle requests to `num_requests`: the only place that makes a full graph's metadata.

        Raises LifecycleError when rows and lengths of the batch do not belong together.
        """
        n, end = batch.num_requests, num_requests * self.num_rows
        if (
            any(q != self.num_rows for q in batch.q_lens)
            or batch.page_table.shape[0] != n
            or len(batch.kv_lens) != n
        ):
            raise LifecycleError(
                f"{n} requests with {batch.q_lens} rows, {len(batch.kv_lens)} lengths and {batch.page_table.shape[0]} "
                f"rows of pages do not make {self.num_rows} rows per request"
            )
        if (batch.tree_mask is None) is not (self.tree_mask is None):
            raise LifecycleError(f"rows with a tree mask and rows without need graphs of their own: {self!r}")
        if self.tree_mask is not None and batch.tree_mask is not None:
            load_rows(self.tree_mask, batch.tree_mask, num_requests, name="tree_mask")
        load_rows(self.input_ids, batch.input_ids, end, name="input_ids")
        load_rows(self.positions, batch.positions, end, name="positions")
        load_rows(self.slots, batch.slots, end, name="slots")
        self.plan_context(batch.page_table, batch.kv_lens, num_requests)

    def plan_context(self, page_table: torch.Tensor, kv_lens: list[int], num_requests: int) -> None:
        """Load `page_table` `[n, p]` and the lengths of n requests.

        Page ids behind a length are never read. Idle requests have the sink's page, because a graph that counts lengths up
        soon gives them a length above 0.
        """
        n, width = page_table.shape
        self.page_table[:n, :width].copy_(page_table, non_blocking=True)
        self.page_table[n:num_requests].zero_()
        load_rows(self.kv_lens, torch.tensor(kv_lens, dtype=torch.int64), num_requests, name="kv_lens")

    def attend(self, num_requests: int, scale: float) -> Attend:
        """The attention that layers call under capture: `num_requests` * N rows at their slots."""
        return attend_rows(
            self.pool,
            kv_rows(self.slots[: num_requests * self.num_rows], self.pool.kv),
            self.page_table[:num_requests],
            self.kv_lens[:num_requests],
            scale,
            None if self.tree_mask is None else self.tree_mask[:num_requests],
        )

    def __repr__(self) -> str:
        return f"<FixedRows {self.kv_lens.shape[0]} x {self.num_rows} rows, {self.max_pages} pages each>"


def attend_rows(
    pool: KVPool,
    rows: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    tree_mask: torch.Tensor | None = None,
) -> Attend:
    """Attention of equally many rows per request: `rows` `[B*N]` as of `kv_rows`, `page_table` `[B, P]`, `kv_lens` `[B]`,
    `tree_mask` None or `[B, N, W]`, all on the device and read when the graph is replayed."""
    num_requests = page_table.shape[0]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        recorded_store_kv(pool.kv, layer, rows, k, v)
        grouped = q.reshape(num_requests, -1, *q.shape[1:])
        return recorded_paged_verify(grouped, pool.kv, layer, page_table, kv_lens, scale, tree_mask).view(
            q.shape
        )

    return attend
