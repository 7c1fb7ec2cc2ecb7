"""Graphs of the draft prefill, one per token bucket.

Capture needs the shared embedding and lm_head, because a graph stores the addresses of its inputs. Shape
legend: T rows, H draft hidden.
"""

from collections.abc import Sequence

import torch

from ...batch.forward_batch import CaptureHidden, ForwardBatch
from ...errors import LifecycleError
from ...graphs.bucketed_graphs import BatchShape, GraphFamily, PathDecision
from ...graphs.graph_pool import GraphKind, GraphPool
from ...graphs.token_graphs import AttendContext, AttentionBridge, TokenGraphs
from ...kv.pool import KVPool
from ...models.layers import Attend, NamedTensors, Read
from ...parallel.vocabulary import rows_of
from .eagle3_head import DraftPhase, FeatureHead


def parameters_of(head: FeatureHead) -> NamedTensors:
    """Every tensor that a graph of `head` reads, including those shared by the target."""
    yield from head.tensors()
    yield "target_ids", head.target_ids
    if head.embed_tokens is not None and head.lm_head is not None:
        yield "embed_tokens", rows_of(head.embed_tokens)
        yield "lm_head", rows_of(head.lm_head)
    if head.final_norm is not None:
        yield from head.final_norm.tensors("final_norm")
    if head.mask_input is not None:
        yield "mask_input", head.mask_input


def require_shared(head: FeatureHead) -> None:
    """Raises LifecycleError before `share`: a graph would keep reading the replaced tensors."""
    if not head.is_shared:
        raise LifecycleError(
            f"graphs of {head!r} need the target's embedding and lm_head, which are shared before"
        )


class DraftPrefillGraphs:
    """Graphs that compute draft rows from target features, up to the number of tokens of the largest
    bucket.
    """

    def __init__(self, graphs: GraphPool, head: FeatureHead, pool: KVPool, buckets: Sequence[int]) -> None:
        require_shared(head)
        config, most, device = head.config, max(buckets), pool.device
        features = torch.zeros((most, config.dims.target_feature_width), dtype=head.dtype, device=device)
        ids, positions, slots = (torch.zeros(most, dtype=torch.int64, device=device) for _ in range(3))
        self.head = head
        self.tokens: TokenGraphs[torch.Tensor] = TokenGraphs(
            graphs,
            GraphKind.DRAFT_PREFILL,
            buckets,
            inputs={"features": features, "input_ids": ids, "positions": positions, "slots": slots},
            bridge=AttentionBridge.empty(most, config.num_heads, config.head_dim, head.dtype, device),
            kv_pool=pool,
            body=self._body,
            parameters=lambda: parameters_of(head),
            hidden=CaptureHidden.LAST,
        )

    @property
    def family(self) -> GraphFamily[AttendContext, torch.Tensor]:
        return self.tokens.family

    def capture(self) -> None:
        self.tokens.capture()

    def decide(self, batch: ForwardBatch) -> PathDecision:
        return self.tokens.family.decide(
            BatchShape(
                size=batch.num_tokens,
                hidden=batch.capture_hidden,
                has_embeds=batch.input_embeds is not None,
            )
        )

    def run(self, batch: ForwardBatch, read: Read, decision: PathDecision) -> torch.Tensor:
        """Returns the layer's output `[T, H]`. `read` is bound to the live batch."""
        assert batch.features is not None
        values = batch.features, batch.input_ids, batch.positions, batch.slots
        return self.tokens.run(decision, values, read)

    def _body(self, inputs: Sequence[torch.Tensor], attend: Attend) -> torch.Tensor:
        features, ids, positions = inputs
        return self.head.forward(features, ids, positions, attend, DraftPhase.FROM_TARGET_FEATURES)
