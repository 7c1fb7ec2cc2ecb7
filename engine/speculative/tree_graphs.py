"""The graph of a whole draft tree: all levels, the choice of what is expanded, and the pruning, by batch size.

Shape legend as in `tree`.
"""

from collections.abc import Sequence

import torch

from ..fixed_rows import attend_rows
from ..graphs.breakable import Breaks, ReplayContext
from ..graphs.inventory import GraphPool
from ..kv_pool import KVPool
from .draft_graphs import LoopGraphs
from .draft_shape import DraftShape
from .eagle3 import DraftPhase, Eagle3Head
from .tree import DraftTree, grow_tree


class TreeLoopGraphs(LoopGraphs[DraftTree]):
    """Trees: `steps` choices and, since the first is remembered, `steps` - 1 forwards of `topk` rows per request."""

    def __init__(
        self,
        graphs: GraphPool,
        head: Eagle3Head,
        pool: KVPool,
        buckets: Sequence[int],
        *,
        shape: DraftShape,
        max_pages: int,
    ) -> None:
        super().__init__(graphs, head, pool, buckets, num_rows=shape.spare_slots, max_pages=max_pages)
        self.shape = shape

    def _forward(self, bucket: int, _: Breaks[ReplayContext]) -> DraftTree:
        """The nodes of level j stand at position lens + j - 1, behind the rows of all levels before."""
        head, rows, k = self.head, self.rows, self.shape.topk
        positions, slots = (x[: bucket * rows.num_rows].view(bucket, -1) for x in (rows.positions, rows.slots))
        table, lens = rows.page_table[:bucket], rows.kv_lens[:bucket]

        def forward(level: int, hidden: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            own_slots = slots[:, (level - 1) * k : level * k].reshape(-1)
            attend = attend_rows(rows.pool, own_slots, table, lens + level * k, self._scale, mask)
            at = positions[:, level - 1 : level].expand(bucket, k).reshape(-1)
            return head.forward(hidden, tokens, at, attend, DraftPhase.SELF_CHAIN)

        state = self.hidden[:bucket], self.logits[:bucket]
        return grow_tree(self.shape, head, self.sampling, state, positions[:, 0] + 1, forward)
