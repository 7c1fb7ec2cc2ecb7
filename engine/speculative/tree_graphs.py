"""The graph of a whole draft tree: all levels, the choice of what is expanded, and the pruning, by batch size."""

from collections.abc import Sequence

from ..graphs.breakable import Breaks, ReplayContext
from ..graphs.graph_pool import GraphPool
from ..kv.pool import KVPool
from .draft_graphs import LoopGraphs
from .draft_loops import draft_tree
from .draft_shape import DraftShape
from .eagle3 import Eagle3Head
from .tree import DraftTree


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
