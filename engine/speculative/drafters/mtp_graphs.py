"""Graphs of the MTP modules' prefill, one per token bucket, with a break at the attention of each module.

Capture needs the shared embedding and lm_head, because a graph stores the addresses of its inputs. Shape
legend: T rows, H hidden, K modules.
"""

from collections.abc import Sequence

import torch

from ...batch.forward_batch import CaptureHidden, ForwardBatch
from ...errors import LifecycleError
from ...graphs.bucketed_graphs import BatchShape, GraphFamily, PathDecision
from ...graphs.graph_pool import GraphKind, GraphPool
from ...graphs.token_graphs import AttendContext, AttentionBridge, TokenGraphs
from ...kv.pool import KVPool
from ...models.layers import Attend, Read
from .mtp_head import MtpHead
from .mtp_window import module_attention


class MtpPrefillGraphs:
    """Graphs that compute the rows of all modules from target features and known tokens.

    Raises LifecycleError for modules without shared weights.
    """

    def __init__(self, graphs: GraphPool, head: MtpHead, pool: KVPool, buckets: Sequence[int]) -> None:
        if not head.is_shared:
            raise LifecycleError(
                f"graphs of {head!r} need the target's embedding and lm_head, which are shared before"
            )
        config, most, device = head.config.layer, max(buckets), pool.device
        width = head.config.dims.target_feature_width
        positions, slots = (torch.zeros(most, dtype=torch.int64, device=device) for _ in range(2))
        self.head = head
        self.tokens: TokenGraphs[torch.Tensor] = TokenGraphs(
            graphs,
            GraphKind.DRAFT_PREFILL,
            buckets,
            inputs={
                "features": torch.zeros((most, width), dtype=head.dtype, device=device),
                "input_ids": torch.zeros((most, head.num_modules), dtype=torch.int64, device=device),
                "positions": positions,
                "slots": slots,
            },
            bridge=AttentionBridge.empty(
                most,
                config.num_heads,
                config.head_dim,
                head.dtype,
                device,
                value_dim=config.value_dim,
            ),
            kv_pool=pool,
            body=self._body,
            parameters=head.tensors,
            hidden=CaptureHidden.LAST,
        )

    @property
    def family(self) -> GraphFamily[AttendContext, torch.Tensor]:
        return self.tokens.family

    def capture(self) -> None:
        self.tokens.capture()

    def decide(self, batch: ForwardBatch) -> PathDecision:
        """The graph of `batch`, or the eager path; counts a batch without graph."""
        return self.tokens.family.decide(BatchShape(size=batch.num_tokens, hidden=batch.capture_hidden))

    def run(self, batch: ForwardBatch, read: Read, decision: PathDecision) -> torch.Tensor:
        """The outputs of all modules `[T, K*H]`. `read` is bound to the live batch."""
        assert batch.features is not None
        return self.tokens.run(
            decision, (batch.features, batch.input_ids, batch.positions, batch.slots), read
        )

    def _body(self, inputs: Sequence[torch.Tensor], attend: Attend) -> torch.Tensor:
        features, ids, positions = inputs
        attends = [module_attention(attend, k) for k in range(self.head.num_modules)]
        return self.head.run(features, ids, positions, attends)
