"""Graphs of the target's prefill by token bucket, with breaks at attention.

A graph holds the model's body only. The rows that need logits are selected afterwards, eagerly. No graph
therefore depends on their number, and no padding row costs a pass over the vocabulary. Legend as in
`forward_batch`.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch

from ..batch.forward_batch import CaptureHidden, ForwardBatch
from ..graphs.bucketed_graphs import BatchShape, PathDecision
from ..graphs.graph_pool import GraphKind, GraphPool
from ..graphs.token_graphs import AttentionBridge, TokenGraphs
from ..kv.pool import KVPool
from ..models.interface import AuxCapture, CausalLM
from ..models.layers import Attend

# The residual stream [T, H] and the captured layer outputs [T, K*H] (None: nothing is captured).
Hidden: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]


def captured_mode(model: CausalLM) -> CaptureHidden:
    """The hidden rows that graphs of `model` return: FULL if a drafter's layers are set, which must happen
    first.
    """
    has_aux = isinstance(model, AuxCapture) and bool(model.aux_layer_ids)
    return CaptureHidden.FULL if has_aux else CaptureHidden.NULL


def aux_ids_of(model: CausalLM) -> tuple[int, ...]:
    """The ids of the layers that `model` captures; empty before `set_aux_layer_ids`."""
    return (model.aux_layer_ids or ()) if isinstance(model, AuxCapture) else ()


class PrefillGraphs:
    """Graphs of prefill forwards, up to the number of tokens of the largest bucket."""

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
        """Runs the graph of `decision`. `attend` is bound to the live batch. The caller owns the result."""
        return self.tokens.run(decision, (batch.input_ids, batch.positions), attend)

    def _body(self, inputs: Sequence[torch.Tensor], attend: Attend) -> Hidden:
        ids, positions = inputs
        return self.model.body(self.model.embed(ids), positions, attend, aux_ids_of(self.model))
