"""The graphs of a drafter: prefill by token bucket, the loop of all draft steps and the extend by batch size.

They are made once the head has the target's embedding and lm_head: a graph holds the addresses of what it reads.
Shape legend: B requests, N rows each, H draft hidden, W feature width, Vd draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from ....kernels.kv_store import kv_rows
from ....kernels.select_rows import select_last_rows
from ...errors import LifecycleError
from ...fixed_rows import FixedRows
from ...forward_batch import CaptureHidden, ForwardBatch
from ...graphs.breakable import Breaks, ReplayContext
from ...graphs.family import BatchShape, GraphFamily, GraphLimits, PathDecision
from ...graphs.inventory import GraphKind, GraphPool
from ...graphs.nest import own
from ...graphs.static import load_rows
from ...graphs.token_graphs import AttentionBridge, TokenGraphs
from ...kv_pool import KVPool
from ...layers import Attend, NamedTensors
from ...sampling.params import SamplingParams
from ..chain import ChainPlan
from ..drafting.choice import DraftSampling
from .eagle3_head import DraftPhase, Eagle3Head
from .loops import DraftRows, draft_chain

Drafts = TypeVar("Drafts")


def parameters_of(head: Eagle3Head) -> NamedTensors:
    """Every tensor that a graph of `head` reads, those shared by the target too."""
    yield from head.tensors()
    yield "target_ids", head.target_ids
    if head.embed_tokens is not None and head.lm_head is not None:
        yield "embed_tokens", head.embed_tokens
        yield "lm_head", head.lm_head


def require_shared(head: Eagle3Head) -> None:
    """LifecycleError before the target's weights are shared: the graph would keep reading what they replace."""
    if not head.is_shared:
        raise LifecycleError(
            f"graphs of {head!r} need the target's embedding and lm_head, which are shared before"
        )


class DraftPrefillGraphs:
    """Draft rows from the target's features, up to the largest bucket's tokens."""

    def __init__(self, graphs: GraphPool, head: Eagle3Head, pool: KVPool, buckets: Sequence[int]) -> None:
        require_shared(head)
        config, most, device = head.config, max(buckets), pool.device
        features = torch.zeros((most, config.dims.target_feature_width), dtype=head.dtype, device=device)
        ids, positions = (torch.zeros(most, dtype=torch.int64, device=device) for _ in range(2))
        self.head = head
        self.tokens: TokenGraphs[torch.Tensor] = TokenGraphs(
            graphs,
            GraphKind.DRAFT_PREFILL,
            buckets,
            inputs={"features": features, "input_ids": ids, "positions": positions},
            bridge=AttentionBridge.empty(
                most, config.num_heads, config.num_kv_heads, config.head_dim, head.dtype, device
            ),
            body=self._body,
            parameters=lambda: parameters_of(head),
            hidden=CaptureHidden.LAST,
        )

    def decide(self, batch: ForwardBatch) -> PathDecision:
        return self.tokens.family.decide(BatchShape(size=batch.num_tokens, hidden=batch.capture_hidden))

    def run(self, batch: ForwardBatch, attend: Attend, decision: PathDecision) -> torch.Tensor:
        """The layer's output `[T, H]`; `attend` is bound to the live batch."""
        assert batch.features is not None
        return self.tokens.run(decision, (batch.features, batch.input_ids, batch.positions), attend)

    def _body(self, inputs: Sequence[torch.Tensor], attend: Attend) -> torch.Tensor:
        features, ids, positions = inputs
        return self.head.forward(features, ids, positions, attend, DraftPhase.FROM_TARGET_FEATURES)


class DraftExtendGraphs:
    """Draft rows from the features of a verify, N per request, and the state of the row that was accepted last."""

    def __init__(
        self,
        graphs: GraphPool,
        head: Eagle3Head,
        pool: KVPool,
        buckets: Sequence[int],
        *,
        num_rows: int,
        max_pages: int,
    ) -> None:
        require_shared(head)
        most = max(buckets)
        self.head = head
        self.rows = FixedRows(pool, max_requests=most, num_rows=num_rows, max_pages=max_pages)
        width = head.config.dims.target_feature_width
        self.features = torch.zeros((most * num_rows, width), dtype=head.dtype, device=pool.device)
        self.accept_len = torch.zeros(most, dtype=torch.int64, device=pool.device)
        limits = GraphLimits(is_by_token=False, rows=num_rows, pages=max_pages, hidden=CaptureHidden.LAST)
        self.family: GraphFamily[ReplayContext, tuple[torch.Tensor, torch.Tensor]] = GraphFamily(
            graphs, GraphKind.DRAFT_EXTEND, buckets, limits
        )
        self._scale = pool.head_dim**-0.5

    def capture(self) -> None:
        self.family.capture(
            self._forward, lambda bucket: ReplayContext(num_rows=bucket), lambda: parameters_of(self.head)
        )

    def decide(self, batch: ForwardBatch) -> PathDecision:
        return self.family.decide(self.rows.shape_of(batch))

    def run(
        self, batch: ForwardBatch, accept_len: torch.Tensor, decision: PathDecision
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fed-back hidden `[B, H]` and logits `[B, Vd]` of row accept_len - 1 of each request; the caller's."""
        assert batch.features is not None
        self.rows.plan(batch, decision.bucket)
        load_rows(
            self.features, batch.features, decision.bucket * self.rows.num_rows, name="draft extend features"
        )
        load_rows(self.accept_len, accept_len, decision.bucket, name="accept_len")
        return own(
            self.family.replay(decision, ReplayContext(num_rows=batch.num_requests)), batch.num_requests
        )

    def _forward(self, bucket: int, _: Breaks[ReplayContext]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, count = self.rows, bucket * self.rows.num_rows
        out = self.head.forward(
            self.features[:count],
            rows.input_ids[:count],
            rows.positions[:count],
            rows.attend(bucket, self._scale),
            DraftPhase.FROM_TARGET_FEATURES,
        )
        last = select_last_rows(out, self.accept_len[:bucket])
        return self.head.feedback(last), self.head.compute_logits(last)


class LoopGraphs(ABC, Generic[Drafts]):
    """All draft steps of a verify in one graph, by batch size; how they draft is the subclass's `_forward`."""

    def __init__(
        self,
        graphs: GraphPool,
        head: Eagle3Head,
        pool: KVPool,
        buckets: Sequence[int],
        *,
        num_rows: int,
        max_pages: int,
    ) -> None:
        """`num_rows`: draft slots planned for per request."""
        require_shared(head)
        most, device = max(buckets), pool.device
        self.head = head
        self.rows = FixedRows(pool, max_requests=most, num_rows=num_rows, max_pages=max_pages)
        self.hidden = torch.zeros((most, head.config.dims.self_width), dtype=head.dtype, device=device)
        self.logits = torch.zeros((most, head.config.draft_vocab_size), dtype=torch.float32, device=device)
        self.sampling = DraftSampling(most, device)
        limits = GraphLimits(is_by_token=False, rows=num_rows, pages=max_pages)
        self.family: GraphFamily[ReplayContext, Drafts] = GraphFamily(
            graphs, GraphKind.DRAFT_DECODE, buckets, limits
        )

    def _rows_of(self, bucket: int) -> DraftRows:
        """The static inputs of the first `bucket` requests."""
        rows = self.rows
        positions, slots = (
            x[: bucket * rows.num_rows].view(bucket, -1) for x in (rows.positions, rows.slots)
        )
        return DraftRows(
            pool=rows.pool,
            positions=positions,
            kv_rows=kv_rows(slots, rows.pool.kv),
            page_table=rows.page_table[:bucket],
            lens=rows.kv_lens[:bucket],
            hidden=self.hidden[:bucket],
            logits=self.logits[:bucket],
        )

    @abstractmethod
    def _forward(self, bucket: int, breaks: Breaks[ReplayContext]) -> Drafts:
        """What is captured."""

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
    ) -> Drafts:
        """The drafts, the caller's. `slots` `[B, num_rows]` of draft KV, `state` hidden `[B, H]` and logits `[B, Vd]`."""
        end, rows = decision.bucket, self.rows
        load_rows(rows.positions, plan.positions.reshape(-1), end * rows.num_rows, name="positions")
        load_rows(rows.slots, slots.reshape(-1), end * rows.num_rows, name="draft slots")
        rows.plan_context(plan.page_table, plan.lens, end)
        for static, value, name in ((self.hidden, state[0], "hidden"), (self.logits, state[1], "logits")):
            load_rows(static, value, end, name=f"draft {name}")
        self.sampling.load(params)
        return own(self.family.replay(decision, ReplayContext(num_rows=plan.num_requests)), plan.num_requests)


class DraftLoopGraphs(LoopGraphs[torch.Tensor]):
    """Chains, `[B, N-1]`: N-1 choices and, since the first is remembered, N-2 forwards."""

    def _forward(self, bucket: int, _: Breaks[ReplayContext]) -> torch.Tensor:
        return draft_chain(self.head, self.sampling, self._rows_of(bucket), self.rows.num_rows - 1)
