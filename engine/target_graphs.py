"""The graphs of a target model's prefill, by token bucket, with breaks at attention.

They hold the model's body only. The rows whose logits are wanted are chosen behind it, eagerly, so that no graph depends
on how many they are and no padding row costs a pass over the vocabulary. Legend as in `forward_batch`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .forward_batch import CaptureHidden, ForwardBatch, ForwardMode
from .graphs.family import EAGER, BatchShape, PathDecision
from .graphs.inventory import GraphKind, GraphPool
from .graphs.token_graphs import AttentionBridge, TokenGraphs
from .kv_pool import KVPool
from .layers import Attend
from .models.interface import AuxCapture, CausalLM

# The residual stream [T, H] and the captured layer outputs [T, K*H] (None: nothing is captured).
Hidden: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]


def captured_mode(model: CausalLM) -> CaptureHidden:
    """What graphs of `model` return: FULL once layers were chosen for a drafter, which must have happened before."""
    has_aux = isinstance(model, AuxCapture) and bool(model.aux_layer_ids)
    return CaptureHidden.FULL if has_aux else CaptureHidden.NULL


def aux_ids_of(model: CausalLM) -> tuple[int, ...]:
    """The layers that `model` captures, none before any were chosen."""
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
        """`attend` is bound to the live batch; the result is the caller's."""
        return self.tokens.run(decision, (batch.input_ids, batch.positions), attend)

    def _body(self, inputs: Sequence[torch.Tensor], attend: Attend) -> Hidden:
        ids, positions = inputs
        return self.model.body(self.model.embed(ids), positions, attend, aux_ids_of(self.model))


@dataclass(frozen=True, kw_only=True)
class TargetGraphs:
    """What a runner asks. Decode and verify are part of a step, which has graphs of its own."""

    prefill: PrefillGraphs

    def decide(self, batch: ForwardBatch) -> PathDecision:
        """Which graph takes `batch`; EAGER for rows that are no prompt."""
        if batch.mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
            return EAGER
        return self.prefill.decide(batch)
