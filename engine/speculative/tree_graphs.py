"""The graph of a whole draft tree: all levels, the choice of what is expanded, and the pruning, by batch size.

Shape legend as in `tree`; S draft slots planned for per request.
"""

from collections.abc import Sequence

import torch

from ..fixed_rows import FixedRows, attend_rows
from ..graphs.breakable import Breaks, ReplayContext
from ..graphs.family import BatchShape, GraphFamily, GraphLimits, PathDecision
from ..graphs.inventory import GraphKind, GraphPool
from ..graphs.nest import own
from ..graphs.static import load_rows
from ..kv_pool import KVPool
from ..sampling_params import SamplingParams
from .chain import ChainPlan
from .draft_choice import DraftSampling
from .draft_graphs import parameters_of, require_shared
from .draft_shape import DraftShape
from .eagle3 import DraftPhase, Eagle3Head
from .tree import DraftTree, grow_tree


class TreeLoopGraphs:
    """`steps` choices and, since the first is remembered, `steps` - 1 forwards of `topk` rows per request."""

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
        require_shared(head)
        most, device = max(buckets), pool.device
        self.head = head
        self.shape = shape
        self.rows = FixedRows(pool, max_requests=most, num_rows=shape.spare_slots, max_pages=max_pages)
        self.hidden = torch.zeros((most, head.config.dims.self_width), dtype=head.dtype, device=device)
        self.logits = torch.zeros((most, head.config.draft_vocab_size), dtype=torch.float32, device=device)
        self.sampling = DraftSampling(most, device)
        limits = GraphLimits(is_by_token=False, rows=shape.spare_slots, pages=max_pages)
        self.family: GraphFamily[ReplayContext, DraftTree] = GraphFamily(
            graphs, GraphKind.DRAFT_DECODE, buckets, limits
        )
        self._scale = pool.head_dim**-0.5

    def capture(self) -> None:
        self.family.capture(
            self._forward, lambda bucket: ReplayContext(num_rows=bucket), lambda: parameters_of(self.head)
        )

    def decide(self, plan: ChainPlan) -> PathDecision:
        return self.family.decide(
            BatchShape(size=plan.num_requests, rows=plan.num_rows, pages=plan.page_table.shape[1])
        )

    def run(
        self,
        plan: ChainPlan,
        slots: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
        params: Sequence[SamplingParams],
        decision: PathDecision,
    ) -> DraftTree:
        """The trees, the caller's. `slots` `[B, S]` of draft KV, `state` hidden `[B, H]` and logits `[B, Vd]`."""
        end, rows = decision.bucket, self.rows
        load_rows(rows.positions, plan.positions.reshape(-1), end * rows.num_rows, name="positions")
        load_rows(rows.slots, slots.reshape(-1), end * rows.num_rows, name="draft slots")
        rows.plan_context(plan.page_table, plan.lens, end)
        for static, value, name in ((self.hidden, state[0], "hidden"), (self.logits, state[1], "logits")):
            load_rows(static, value, end, name=f"draft {name}")
        self.sampling.load(params)
        return own(self.family.replay(decision, ReplayContext(num_rows=plan.num_requests)), plan.num_requests)

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
