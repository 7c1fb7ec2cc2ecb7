"""The drafter of EAGLE and EAGLE3 heads, with its own KV pool under the target's page ids and a state per
request.

The head computes draft row i from the target's features of position i and the token at i+1. Rows of drafts
are provisional. `observe` overwrites them with rows of true features before a later step reads them. Shape
legend: T rows, H draft hidden, Ht target hidden, K features.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ...attention.registry import attention_for
from ...auto_sizes import LATE_ROWS
from ...batch.forward_batch import CaptureHidden, ForwardBatch
from ...batch.input_embeds import place_rows
from ...batch.padding import pad_rows
from ...errors import CheckpointError, UnsupportedInput
from ...graphs.bucketed_graphs import EAGER
from ...graphs.graph_pool import GraphPool
from ...host_copy import arrays_to_device
from ...kv.layouts import MHALayout
from ...kv.page_table import row_arrays
from ...kv.pool import KVPool
from ...models.layers import NamedTensors
from ...parallel.vocabulary import look_up
from ..drafting.shape import DraftShape
from .eagle3_head import DraftPhase, FeatureHead
from .idle import idle_draft_batch
from .paged import joined_features, require_loaded
from .parallel_loop import draft_parallel
from .prefill_graphs import DraftPrefillGraphs, parameters_of
from .protocol import DraftPrefill, DraftView, Proposal
from .recycling import RecyclingDrafter
from .spec_config import HeadConfig
from .states import DraftStates


def draft_layout(config: HeadConfig, page_size: int, dtype: torch.dtype) -> MHALayout:
    """The layout of the draft's KV, under the page ids of the target."""
    return MHALayout.of(config, num_layers=config.num_layers, page_size=page_size, dtype=dtype)


class Eagle3Drafter(RecyclingDrafter[FeatureHead, DraftPrefillGraphs]):
    """Runs an EAGLE or EAGLE3 head after `share`; owns the draft KV and the draft state of each request.

    Draft row i depends on the token at i+1. Requests may therefore share a page only if the token behind the
    page is equal, too. Idle rows pad every forward to a multiple of `row_multiple`. An empty prefill runs a
    forward only if `row_multiple` exceeds 1.

    Raises LifecycleError for a head without shared weights, and CheckpointError for a dtype other than that
    of the config.
    """

    states: DraftStates
    lookahead = 1
    late_rows = LATE_ROWS

    def __init__(
        self,
        head: FeatureHead,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        capacity: int = 64,
        row_multiple: int = 1,
    ) -> None:
        config = head.config
        require_loaded(head, "head")
        if dtype != head.dtype:
            raise CheckpointError(
                f"draft KV in {dtype}, but {config.path} was resolved for {config.dims.self_dtype}"
            )
        self.row_multiple = row_multiple
        self.head = head
        self.page_size = page_size
        self.device = torch.device(device)
        self.pool = KVPool(num_pages, draft_layout(config, page_size, dtype), device)
        self.states = DraftStates(capacity, config.hidden_size, config.draft_vocab_size, dtype, device)
        self._attention = attention_for(self.pool)

    @torch.no_grad()
    def prefill(self, items: Sequence[DraftPrefill]) -> None:
        """Writes the draft KV of all rows of `items`, and the states of the final items. Items may have no
        rows.
        """
        items = [item for item in items if item.next_ids]
        if not items:
            if self.row_multiple > 1:
                dims = self.head.config.dims
                self.prefill_rows(idle_draft_batch(dims, DraftPhase.FROM_TARGET_FEATURES, device=self.device))
            return
        batch = self._prefill_batch(items)
        self._remember_last(items, self.prefill_rows(batch))

    @torch.no_grad()
    def prefill_rows(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns the layer's output `[T, H]` for rows of target features.

        A graph runs if `batch.decision` or, without a decision, the captured buckets allow it.
        """
        graphs, padded = self.graphs, pad_rows(batch, self.row_multiple)
        if batch.decision is None:
            batch.decision = EAGER if graphs is None else graphs.decide(padded)
        if graphs is None or not batch.decision.is_graph:
            return self._forward(batch, DraftPhase.FROM_TARGET_FEATURES)
        read = self._attention.bind_reads(self._attention.plan(padded))
        return graphs.run(padded, read, batch.decision)[: batch.num_tokens]

    def _prefill_batch(self, items: Sequence[DraftPrefill]) -> ForwardBatch:
        for item in items:
            self._check_features(item.features, len(item.next_ids))
        host = (
            np.array([token for item in items for token in item.next_ids], dtype=np.int64),
            *row_arrays([(item.pages, item.start, item.end) for item in items], self.page_size),
        )
        input_ids, positions, slots, page_table = arrays_to_device(host, self.device)
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slots=slots,
            page_table=page_table,
            q_lens=[len(item.next_ids) for item in items],
            kv_lens=[item.end for item in items],
            capture_hidden=CaptureHidden.LAST,
            features=joined_features([item.features for item in items], self.device),
        )
        self._set_embeds(batch, items)
        return batch

    def _set_embeds(self, batch: ForwardBatch, items: Sequence[DraftPrefill]) -> None:
        """Sets the embeddings of `batch` if tokens of `items` have no ids.

        A head of another width than the target's cannot read them: it sees token 0 in their place.
        """
        given, row = [], 0
        for item in items:
            embeds = item.next_embeds
            if embeds is not None and embeds.shape[1] == self.head.config.hidden_size:
                given.append((row, embeds))
            row += len(item.next_ids)
        if given:
            assert self.head.embed_tokens is not None
            batch.input_embeds = place_rows(look_up(batch.input_ids, self.head.embed_tokens), given)

    @property
    def max_context(self) -> int:
        return self.head.config.max_position_embeddings

    def parameters(self) -> NamedTensors:
        return parameters_of(self.head)

    def propose(self, view: DraftView, shape: DraftShape) -> Proposal:
        """As `RecyclingDrafter.propose`; a parallel head makes all further drafts in one forward."""
        if shape.is_tree or self.head.mask_input is None:
            return super().propose(view, shape)
        logits = self.states.logits.index_select(0, view.states)
        return Proposal(draft_parallel(self.head, self.pool, view, logits, shape.steps), None)

    def _row_graphs(self, graphs: GraphPool, buckets: Sequence[int]) -> DraftPrefillGraphs:
        return DraftPrefillGraphs(graphs, self.head, self.pool, buckets)

    def _forward(self, batch: ForwardBatch, phase: DraftPhase) -> torch.Tensor:
        padded = pad_rows(batch, self.row_multiple)
        embeds, width = padded.input_embeds, self.head.config.hidden_size
        if embeds is not None and tuple(embeds.shape) != (padded.num_tokens, width):
            raise UnsupportedInput(
                f"input_embeds {list(embeds.shape)}: the draft head takes [{padded.num_tokens}, {width}] here"
            )
        assert padded.features is not None
        attend = self._attention.bind(self._attention.plan(padded))
        out = self.head.forward(
            padded.features, padded.input_ids, padded.positions, attend, phase, embeds=embeds
        )
        return out[: batch.num_tokens]


class Eagle3Model:
    """The weights of an EAGLE or EAGLE3 head that shares the target's embedding and lm_head."""

    late_rows = Eagle3Drafter.late_rows

    def __init__(self, head: FeatureHead) -> None:
        self.head = head

    @property
    def num_weights(self) -> int:
        """Number of weights in the layers, `fc` and `lm_head`."""
        head = self.head
        own = sum(
            weight.numel()
            for name, weight in head.tensors()
            if "embed_tokens" not in name and "lm_head" not in name
        )
        return own + (0 if head.lm_head is None else head.lm_head.numel())

    def kv_layout(self, page_size: int) -> MHALayout:
        """The layout of the draft's KV in pages of `page_size` tokens."""
        return draft_layout(self.head.config, page_size, self.head.dtype)

    def check(self, shape: DraftShape) -> None:
        config = self.head.config
        if shape.topk > config.draft_vocab_size:
            raise CheckpointError(
                f"spec_topk {shape.topk}: the head at {config.path} knows {config.draft_vocab_size} tokens; "
                "lower --spec-topk"
            )
        if shape.is_tree and self.head.mask_input is not None:
            raise CheckpointError(
                f"spec_topk {shape.topk}: the parallel head at {config.path} drafts chains; set it to 1"
            )

    def drafter(self, *, num_pages: int, page_size: int, capacity: int) -> Eagle3Drafter:
        head = self.head
        return Eagle3Drafter(
            head,
            num_pages=num_pages,
            page_size=page_size,
            dtype=head.dtype,
            device=head.device,
            capacity=capacity,
        )

    def __repr__(self) -> str:
        return f"<Eagle3Model {self.head!r}>"
