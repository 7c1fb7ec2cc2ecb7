"""The graph of a whole draft tree: all levels, the choice of what is expanded, and the pruning, by batch size."""

from collections.abc import Sequence

from ..graphs.breakable import Breaks, ReplayContext
from ..graphs.inventory import GraphPool
from ..kv_pool import KVPool
from .drafters.eagle3_head import Eagle3Head
from .drafters.loops import draft_tree
from .drafters.prefill_graphs import LoopGraphs
from .drafting.shape import DraftShape
from .drafting.tree import DraftTree


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
        return draft_tree(self.head, self.sampling, self._rows_of(bucket), self.shape)
