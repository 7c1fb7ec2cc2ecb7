"""Graphs of the target's prefill by token bucket.

A graph holds the model's body only, up to its last attention. The rows that need logits are selected
afterwards and finished eagerly. No graph therefore depends on their number, and no padding row costs a pass
over the vocabulary. Legend as in `forward_batch`.

Breakable graphs stop at attention, where the fastest kernel for the live lengths is chosen. Few tokens take a
device less time than a host needs for the breaks. For them there are full graphs, whose attention reads
lengths and pages on the device: up to `MAX_WHOLE_TOKENS` tokens of up to `MAX_WHOLE_REQUESTS` requests, whose
context fits the backend's buffers. A backend whose attention cannot be recorded has none.
"""

from collections.abc import Sequence
from typing import TypeAlias, TypeGuard

import torch

from ...kernels.gather_context import context_rows
from ..attention.backend import AttentionBackend
from ..attention.places import RequestPlaces
from ..batch.forward_batch import CaptureHidden, ForwardBatch
from ..graphs.breakable import Breaks, ReplayContext
from ..graphs.bucketed_graphs import BatchShape, GraphFamily, GraphLimits, PathDecision
from ..graphs.buckets import bucket_for
from ..graphs.graph_pool import GraphKind, GraphPool
from ..graphs.pytree import own
from ..graphs.static import load_rows
from ..graphs.token_graphs import AttentionBridge, TokenGraphs
from ..kv.page_table import pages_for
from ..kv.pool import KVPool
from ..models.interface import AuxCapture, CausalLM, ShortEnd
from ..models.layers import Attend, Read

# What `ShortEnd.finish` needs of each row: what the last layer attended [T, N*D] and the residual stream in
# front of it [T, H]; then the captured layer outputs [T, K*H] (None: nothing is captured). Where the last
# layer is complete, the first is None and the second is its output.
Hidden: TypeAlias = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]

MAX_WHOLE_TOKENS = 2048
MAX_WHOLE_REQUESTS = 16


def captured_mode(model: CausalLM) -> CaptureHidden:
    """The hidden rows that graphs of `model` return: FULL if a drafter's layers are set, which must happen
    first.
    """
    has_aux = isinstance(model, AuxCapture) and bool(model.aux_layer_ids)
    return CaptureHidden.FULL if has_aux else CaptureHidden.NULL


def aux_ids_of(model: CausalLM) -> tuple[int, ...]:
    """The ids of the layers that `model` captures; empty before `set_aux_layer_ids`."""
    return (model.aux_layer_ids or ()) if isinstance(model, AuxCapture) else ()


def whole_buckets(buckets: Sequence[int]) -> tuple[int, ...]:
    """The buckets of full graphs, some of `buckets`: 64, 128, 256, and all above up to MAX_WHOLE_TOKENS.

    Few tokens take as long as it takes to read all weights, so their padding costs little.
    """
    wanted = (b for b in buckets if b in (64, 128) or 256 <= b <= MAX_WHOLE_TOKENS)
    return tuple(wanted) or (max(buckets),)


class WholePrefillGraphs:
    """Full graphs of prefill forwards, over `places` and static tokens."""

    def __init__(
        self,
        graphs: GraphPool,
        model: CausalLM,
        pool: KVPool,
        buckets: Sequence[int],
        attention: AttentionBackend,
    ) -> None:
        most, device = max(buckets), pool.device
        self.model = model
        self.inputs = {
            name: torch.zeros(most, dtype=torch.int64, device=device)
            for name in ("input_ids", "positions", "slots")
        }
        # whole pages only: a batch counts its context in pages, and must not exceed the buffers
        max_pages = min(attention.recordable_context, pool.num_slots) // pool.page_size
        self.places = RequestPlaces.empty(MAX_WHOLE_REQUESTS, max_pages, device)
        self._page_size = pool.page_size
        self._attention = attention
        limits = GraphLimits(
            is_by_token=False,
            pages=max_pages,
            requests=MAX_WHOLE_REQUESTS,
            hidden=captured_mode(model),
        )
        self.family: GraphFamily[ReplayContext, Hidden] = GraphFamily(
            graphs, GraphKind.WHOLE_PREFILL, buckets, limits
        )

    def capture(self) -> None:
        def forward(bucket: int, breaks: Breaks[ReplayContext]) -> Hidden:
            ids, positions, slots = (static[:bucket] for static in self.inputs.values())
            attend = self._attention.recorded(self.places, slots)
            return body_of(self.model, ids, positions, attend)

        self.family.capture(forward, lambda bucket: ReplayContext(num_rows=bucket), self.model.parameters)

    def peek(self, batch: ForwardBatch) -> PathDecision:
        """The decision for `batch`, uncounted: a batch that does not fit may have another graph."""
        shape = BatchShape(
            size=batch.num_tokens,
            pages=max(pages_for(context_rows(batch.kv_lens)[-1], self._page_size), batch.page_table.shape[1]),
            requests=batch.num_requests,
            hidden=batch.capture_hidden,
            has_embeds=batch.input_embeds is not None,
        )
        return self.family.peek(shape)

    def run(self, batch: ForwardBatch, decision: PathDecision) -> Hidden:
        """Runs the graph of `decision`. The caller owns the result."""
        values = (batch.input_ids, batch.positions, batch.slots)
        for (name, static), value in zip(self.inputs.items(), values, strict=True):
            load_rows(static, value, decision.bucket, name=f"{self.family.kind.value} {name}")
        self.places.load(batch)
        n = batch.num_tokens
        return own(self.family.replay(decision, ReplayContext(num_rows=n)), n)

    def __repr__(self) -> str:
        return f"<WholePrefillGraphs {self.family!r}>"


class PrefillGraphs:
    """Graphs of prefill forwards, up to the number of tokens of the largest bucket.

    `whole` is None if `attention` cannot be recorded.
    """

    def __init__(
        self,
        graphs: GraphPool,
        model: CausalLM,
        pool: KVPool,
        buckets: Sequence[int],
        attention: AttentionBackend,
    ) -> None:
        most = max(buckets)
        ids, positions, slots = (torch.zeros(most, dtype=torch.int64, device=pool.device) for _ in range(3))
        self.model = model
        self.tokens: TokenGraphs[Hidden] = TokenGraphs(
            graphs,
            GraphKind.TARGET_PREFILL,
            buckets,
            inputs={"input_ids": ids, "positions": positions, "slots": slots},
            bridge=bridge_of(model, most, pool.device),
            kv_pool=pool,
            body=self._body,
            parameters=model.parameters,
            hidden=captured_mode(model),
        )
        self.whole: WholePrefillGraphs | None = None
        if attention.recordable_context:
            self.whole = WholePrefillGraphs(graphs, model, pool, whole_buckets(buckets), attention)

    def capture(self) -> None:
        self.tokens.capture()
        if self.whole is not None:
            self.whole.capture()

    def common_rows(self, num_tokens: int) -> int:
        """The rows to which ranks that run together pad `num_tokens` tokens, so that each may take a graph,
        of any kind; `num_tokens` itself if there is none.
        """
        whole = () if self.whole is None else self.whole.family.buckets
        found = (bucket_for(buckets, num_tokens) for buckets in (whole, self.tokens.family.buckets))
        return next((bucket for bucket in found if bucket), num_tokens)

    def decide(self, batch: ForwardBatch) -> PathDecision:
        """The graph of `batch`: a full one if it fits, else a breakable one. Counts a batch without graph."""
        if self.whole is not None and (decision := self.whole.peek(batch)).is_graph:
            return decision
        shape = BatchShape(
            size=batch.num_tokens, hidden=batch.capture_hidden, has_embeds=batch.input_embeds is not None
        )
        return self.tokens.family.decide(shape)

    def run(self, batch: ForwardBatch, read: Read, decision: PathDecision) -> Hidden:
        """Runs the breakable graph of `decision`. `read` is bound to the live batch. The caller owns the
        result.
        """
        return self.tokens.run(decision, (batch.input_ids, batch.positions, batch.slots), read)

    def _body(self, inputs: Sequence[torch.Tensor], attend: Attend) -> Hidden:
        ids, positions = inputs
        return body_of(self.model, ids, positions, attend)


def bridge_of(model: CausalLM, max_tokens: int, device: torch.device) -> AttentionBridge:
    """Where the attention of up to `max_tokens` rows crosses a break."""
    config = model.config
    return AttentionBridge.empty(
        max_tokens, config.query_heads, config.head_dim, model.dtype, device, value_dim=config.value_dim
    )


def body_of(model: CausalLM, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> Hidden:
    """One pass of the model's body over token ids, with the captured layers."""
    return hidden_of(model, model.embed(ids), positions, attend, aux_ids_of(model))


def is_short(model: CausalLM, aux_ids: Sequence[int]) -> TypeGuard[ShortEnd]:
    """Whether forwards of prompts compute the end of the last layer for the rows with logits alone."""
    is_read = model.config.num_layers - 1 in aux_ids
    return isinstance(model, ShortEnd) and not is_read and not model.needs_all_rows


def hidden_of(
    model: CausalLM,
    embeds: torch.Tensor,
    positions: torch.Tensor,
    attend: Attend,
    aux_ids: Sequence[int],
) -> Hidden:
    """The rows of `embeds` up to the last attention, or to the end where that must be computed anyway."""
    if is_short(model, aux_ids):
        return model.trunk(embeds, positions, attend, aux_ids)
    return None, *model.body(embeds, positions, attend, aux_ids)


def finished_rows(model: CausalLM, computed: Hidden, rows: torch.Tensor | None) -> torch.Tensor:
    """The residual stream `[R, H]` behind the last layer of the rows `rows` int64 `[R]`; None: of all."""
    attended, hidden, _ = computed
    if rows is not None:
        hidden = hidden.index_select(0, rows)
        attended = None if attended is None else attended.index_select(0, rows)
    if attended is None or not len(hidden):
        return hidden
    assert isinstance(model, ShortEnd), model
    return model.finish(attended, hidden)
