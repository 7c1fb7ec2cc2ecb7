"""Graphs that write the draft KV of committed tokens from target features, one per token bucket.

A projection has no attention, so each graph is whole. Legend: T rows, H hidden size, K captured features.
"""

from collections.abc import Sequence

import torch

from ....kernels.kv_store import kv_rows
from ....kernels.ops import recorded_store_kv
from ...batch.forward_batch import CaptureHidden
from ...errors import LifecycleError
from ...graphs.breakable import Breaks, ReplayContext
from ...graphs.bucketed_graphs import BatchShape, GraphFamily, GraphLimits, PathDecision
from ...graphs.graph_pool import GraphKind, GraphPool
from ...graphs.pytree import own
from ...graphs.static import load_rows
from ...kv.pool import KVPool
from .dflash_head import DflashHead


def store_context(
    head: DflashHead, pool: KVPool, features: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Writes the draft KV of the tokens at `positions` int64 `[T]` into `rows` int64 `[T]` of `pool`.

    `features` are `[T, K*H]`. `rows` are those of `kv_rows`. Returns the context vectors `[T, H]`.
    """
    context = head.project(features, positions)
    for layer in range(pool.num_layers):
        recorded_store_kv(pool.kv, layer, rows, context.keys[:, layer], context.values[:, layer])
    return context.vectors


class ContextGraphs:
    """Graphs of `store_context` up to the number of tokens of the largest bucket.

    Raises LifecycleError for a head without shared weights, whose addresses would change.
    """

    def __init__(self, graphs: GraphPool, head: DflashHead, pool: KVPool, buckets: Sequence[int]) -> None:
        if not head.is_shared:
            raise LifecycleError(
                f"graphs of {head!r} need the target's embedding and lm_head, which are shared before"
            )
        most, device = max(buckets), pool.device
        width = head.config.dims.target_feature_width
        positions, slots = (torch.zeros(most, dtype=torch.int64, device=device) for _ in range(2))
        self.head = head
        self.pool = pool
        self.inputs = {
            "features": torch.zeros((most, width), dtype=head.dtype, device=device),
            "positions": positions,
            "slots": slots,
        }
        self.family: GraphFamily[ReplayContext, torch.Tensor] = GraphFamily(
            graphs,
            GraphKind.DRAFT_PREFILL,
            buckets,
            GraphLimits(is_by_token=True, hidden=CaptureHidden.LAST),
        )

    def capture(self) -> None:
        def forward(bucket: int, breaks: Breaks[ReplayContext]) -> torch.Tensor:
            features, positions, slots = (static[:bucket] for static in self.inputs.values())
            return store_context(self.head, self.pool, features, positions, kv_rows(slots, self.pool.kv))

        self.family.capture(forward, lambda bucket: ReplayContext(num_rows=bucket), self.head.parameters)

    def decide(self, num_rows: int) -> PathDecision:
        return self.family.decide(BatchShape(size=num_rows))

    def run(self, values: Sequence[torch.Tensor], decision: PathDecision) -> torch.Tensor:
        """Replays the graph of `decision` for `values`: features `[T, K*H]`, positions and slots int64 `[T]`.

        Returns the context vectors `[T, H]`, owned by the caller.
        """
        for (name, static), value in zip(self.inputs.items(), values, strict=True):
            load_rows(static, value, decision.bucket, name=f"{self.family.kind.value} {name}")
        n = values[0].shape[0]
        return own(self.family.replay(decision, ReplayContext(num_rows=n)), n)

    def __repr__(self) -> str:
        return f"<ContextGraphs {self.family!r}>"
