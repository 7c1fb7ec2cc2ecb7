"""The graphs of a target model: prefill by token bucket with breaks at attention, decode and verify whole by batch size.

Both hold the model's body only. The rows whose logits are wanted are chosen behind it, eagerly, so that no graph depends
on how many they are and no padding row costs a pass over the vocabulary. Legend as in `forward_batch`, N rows a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..batch.fixed_rows import FixedRows
from ..batch.forward_batch import CaptureHidden, ForwardBatch, ForwardMode
from ..graphs.breakable import Breaks, ReplayContext
from ..graphs.bucketed_graphs import EAGER, BatchShape, GraphFamily, GraphLimits, PathDecision
from ..graphs.graph_pool import GraphKind, GraphPool
from ..graphs.pytree import own
from ..graphs.token_graphs import AttentionBridge, TokenGraphs
from ..kv.pool import KVPool
from ..models.interface import AuxCapture, CausalLM
from ..models.layers import Attend

# The residual stream [T, H] and the captured layer outputs [T, K*H] (None: nothing is captured).
Hidden: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]


def captured_mode(model: CausalLM) -> CaptureHidden:
    """The hidden rows that graphs of `model` return: FULL when layers were chosen for a drafter, which must come first."""
    has_aux = isinstance(model, AuxCapture) and bool(model.aux_layer_ids)
    return CaptureHidden.FULL if has_aux else CaptureHidden.NULL


def aux_ids_of(model: CausalLM) -> tuple[int, ...]:
    """The ids of the layers that `model` captures; empty before `set_aux_layer_ids`."""
    return (model.aux_layer_ids or ()) if isinstance(model, AuxCapture) else ()


class PrefillGraphs:
    """Prefill forwards of up to the largest bucket's tokens."""

    def __init__(self, graphs: GraphPool, model: CausalLM, pool: KVPool, buckets: Sequence[int]) -> None:
        config, most = model.config, max(buckets)
        ids, positions = (torch.zeros(most, dtype=torch.int64, device=pool.device) for _ in range(2))
        self.model = model
        self.tokens: TokenGraphs[Hidden] = TokenGraphs(
            graphs,
            GraphKind.TARGET_PREFILL,
            buckets,
            inputs={"input_ids": ids, "positions": positions},
            bridge=AttentionBridge.empty(
                most, config.num_heads, config.num_kv_heads, config.head_dim, model.dtype, pool.device
            ),
            body=self._body,
            parameters=model.tensors,
            hidden=captured_mode(model),
        )

    def decide(self, batch: ForwardBatch) -> PathDecision:
        shape = BatchShape(
            size=batch.num_tokens, hidden=batch.capture_hidden, has_embeds=batch.input_embeds is not None
        )
        return self.tokens.family.decide(shape)

    def run(self, batch: ForwardBatch, attend: Attend, decision: PathDecision) -> Hidden:
        """`attend` is bound to the live batch. The caller owns the result."""
        return self.tokens.run(decision, (batch.input_ids, batch.positions), attend)

    def _body(self, inputs: Sequence[torch.Tensor], attend: Attend) -> Hidden:
        ids, positions = inputs
        return self.model.body(self.model.embed(ids), positions, attend, aux_ids_of(self.model))


class VerifyGraphs:
    """Decode (N = 1) and verify forwards of up to the largest bucket's requests, N rows each; `has_tree`: along a tree."""

    def __init__(
        self,
        graphs: GraphPool,
        model: CausalLM,
        pool: KVPool,
        buckets: Sequence[int],
        *,
        num_rows: int,
        max_pages: int,
        has_tree: bool = False,
    ) -> None:
        self.model = model
        self.rows = FixedRows(
            pool, max_requests=max(buckets), num_rows=num_rows, max_pages=max_pages, has_tree=has_tree
        )
        limits = GraphLimits(is_by_token=False, rows=num_rows, pages=max_pages, hidden=captured_mode(model))
        self.family: GraphFamily[ReplayContext, Hidden] = GraphFamily(
            graphs, GraphKind.TARGET_VERIFY, buckets, limits
        )
        self._scale = pool.layout.scale

    def capture(self) -> None:
        self.family.capture(self._forward, lambda bucket: ReplayContext(num_rows=bucket), self.model.tensors)

    def decide(self, batch: ForwardBatch) -> PathDecision:
        return self.family.decide(self.rows.shape_of(batch))

    def takes(self, num_requests: int) -> bool:
        """Whether a step of so many requests, N rows each, would run as a graph."""
        limits = self.family.limits
        return self.family.peek(
            BatchShape(size=num_requests, rows=limits.rows, hidden=limits.hidden)
        ).is_graph

    def run(self, batch: ForwardBatch, decision: PathDecision) -> Hidden:
        """Hidden rows and features; the caller owns them."""
        self.rows.plan(batch, decision.bucket)
        replayed = self.family.replay(
            decision, ReplayContext(num_rows=batch.num_tokens // self.rows.num_rows)
        )
        return own(replayed, batch.num_tokens)

    def _forward(self, bucket: int, _: Breaks[ReplayContext]) -> Hidden:
        rows, count = self.rows, bucket * self.rows.num_rows
        hidden = self.model.embed(rows.input_ids[:count])
        attend = rows.attend(bucket, self._scale)
        return self.model.body(hidden, rows.positions[:count], attend, aux_ids_of(self.model))


@dataclass(frozen=True, kw_only=True)
class TargetGraphs:
    """The graphs of one runner. A prefill engine has `prefill`, a decode engine `verifies`; either may be absent.

    `verifies`: one family per number of rows that steps may have, the configured one first.
    """

    prefill: PrefillGraphs | None = None
    verifies: tuple[VerifyGraphs, ...] = ()

    @property
    def verify(self) -> VerifyGraphs | None:
        """The graphs of the configured number of rows."""
        return self.verifies[0] if self.verifies else None

    def verify_of(self, num_rows: int) -> VerifyGraphs | None:
        """The graphs of `num_rows` rows per request; without any, the configured ones, which refuse the batch."""
        return next((graphs for graphs in self.verifies if graphs.rows.num_rows == num_rows), self.verify)

    def decide(self, batch: ForwardBatch) -> PathDecision:
        """The decision for `batch`; EAGER when this role has no graphs of its kind."""
        if batch.mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
            verify = self.verify_of(batch.q_lens[0] if batch.q_lens else 0)
            return verify.decide(batch) if verify is not None else EAGER
        return self.prefill.decide(batch) if self.prefill is not None else EAGER
