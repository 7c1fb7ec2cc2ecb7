"""The prefill of MTP modules: KV of their own under the target's page ids, common to both drafters.

The feature of a row is the target's residual stream behind its last layer. Shape legend: T rows, H hidden, K
modules.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ...attention.registry import attention_for
from ...batch.forward_batch import CaptureHidden, ForwardBatch
from ...batch.padding import pad_rows
from ...errors import UnsupportedInput
from ...graphs.bucketed_graphs import EAGER
from ...graphs.graph_pool import GraphPool
from ...host_copy import IntArray, arrays_to_device
from ...kv.layouts import PageLayout
from ...kv.page_table import row_arrays
from ...kv.pool import KVPool
from ...models.layers import NamedTensors
from .eagle3_head import DraftPhase
from .idle import idle_draft_batch
from .mtp_graphs import MtpPrefillGraphs
from .mtp_head import MtpHead
from .mtp_states import FrontStates
from .mtp_window import module_attention
from .paged import PagedDrafter, joined_features, require_loaded
from .protocol import DraftPrefill
from .states import DraftStates


def modules_layout(head: MtpHead, page_size: int) -> PageLayout:
    """The layout of the modules' KV, under the page ids of the target: one layer for each module."""
    return head.config.layer.kv_layout(head.num_modules, page_size, head.dtype)


def look_ahead(item: DraftPrefill, first: int, depth: int) -> IntArray:
    """The tokens behind rows [first, item.end), `[rows, depth]`.

    Column k is the token k+1 positions behind its row, 0 where it is not known yet.
    """
    known = item.known_ids or [*[0] * (item.start + 1), *item.next_ids]
    tokens = list(known[first + 1 : item.end + depth])
    tokens += [0] * (item.end - first - 1 + depth - len(tokens))
    return np.lib.stride_tricks.sliding_window_view(np.array(tokens, dtype=np.int64), depth)


class MtpDrafter(PagedDrafter[MtpHead, MtpPrefillGraphs]):
    """The prefill of K modules and their KV, common to both kinds.

    Row i of module k depends on the tokens up to i+k+1. Requests may therefore share a page only if the
    `lookahead` tokens behind the page are equal, too. Idle rows pad every forward of a prefill to a multiple
    of `row_multiple`.

    Raises LifecycleError for modules without shared weights, and CheckpointError for a dtype other than that
    of the config.
    """

    states: DraftStates | FrontStates

    def __init__(self, head: MtpHead, *, num_pages: int, page_size: int, row_multiple: int = 1) -> None:
        require_loaded(head, "MTP modules")
        self.head = head
        self.row_multiple = row_multiple
        self.page_size = page_size
        self.device = head.device
        self.pool = KVPool(num_pages, modules_layout(head, page_size), head.device)
        self._attention = attention_for(self.pool)

    @property
    def lookahead(self) -> int:
        """Tokens behind a row that its KV depends on: one for each module."""
        return self.head.num_modules

    @property
    def max_context(self) -> int:
        return self.head.config.layer.max_position_embeddings

    def parameters(self) -> NamedTensors:
        return self.head.tensors()

    def _row_graphs(self, graphs: GraphPool, buckets: Sequence[int]) -> MtpPrefillGraphs:
        return MtpPrefillGraphs(graphs, self.head, self.pool, buckets)

    @torch.no_grad()
    def prefill(self, items: Sequence[DraftPrefill]) -> None:
        """Writes the KV of all modules for the rows of `items`, and the states. Items may have no rows."""
        items = [item for item in items if item.next_ids]
        if not items:
            if self.row_multiple > 1:
                dims = self.head.config.dims
                self.prefill_rows(idle_draft_batch(dims, DraftPhase.FROM_TARGET_FEATURES, device=self.device))
            return
        for item in items:
            self._check_features(item.features, len(item.next_ids))
        widened = [self._with_dirty_rows(item) for item in items]
        out = self.prefill_rows(self._prefill_batch(items, widened))
        self._remember(items, widened, out)

    @torch.no_grad()
    def prefill_rows(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns the outputs of all modules `[T, K*H]` for rows of target features.

        `batch.input_ids` has a column for each module; with one token per row, module k takes the token k
        rows further. A graph runs if `batch.decision` or, without a decision, the captured buckets allow it.
        """
        graphs, padded = self.graphs, pad_rows(self._with_columns(batch), self.row_multiple)
        if batch.decision is None:
            batch.decision = EAGER if graphs is None else graphs.decide(padded)
        decision = batch.decision
        if padded.input_embeds is not None:
            raise UnsupportedInput("MTP modules take no input_embeds: their hidden is the target's")
        assert padded.features is not None
        plan = self._attention.plan(padded)
        if graphs is not None and decision.is_graph:
            return graphs.run(padded, self._attention.bind_reads(plan), decision)[: batch.num_tokens]
        attend = self._attention.bind(plan)
        attends = [module_attention(attend, k) for k in range(self.head.num_modules)]
        out = self.head.run(padded.features, padded.input_ids, padded.positions, attends)
        return out[: batch.num_tokens]

    def _with_columns(self, batch: ForwardBatch) -> ForwardBatch:
        """`batch` with a column of tokens for each module."""
        if batch.input_ids.dim() == 2:
            return batch
        columns = [batch.input_ids.roll(-k) for k in range(self.head.num_modules)]
        return replace(batch, input_ids=torch.stack(columns, dim=1))

    @abstractmethod
    def _with_dirty_rows(self, item: DraftPrefill) -> tuple[int, torch.Tensor]:
        """(first row, features) of the rows to compute for `item`: its own, behind earlier ones that were
        written before their tokens were known.
        """

    @abstractmethod
    def _remember(
        self,
        items: Sequence[DraftPrefill],
        widened: Sequence[tuple[int, torch.Tensor]],
        out: torch.Tensor,
    ) -> None:
        """Writes the states of `items` after their rows gave `out` `[T, K*H]`."""

    def _prefill_batch(
        self, items: Sequence[DraftPrefill], widened: Sequence[tuple[int, torch.Tensor]]
    ) -> ForwardBatch:
        pairs = [(item, first) for item, (first, _) in zip(items, widened, strict=True)]
        host = (
            np.concatenate([look_ahead(item, first, self.head.num_modules) for item, first in pairs]),
            *row_arrays([(item.pages, first, item.end) for item, first in pairs], self.page_size),
        )
        input_ids, positions, slots, page_table = arrays_to_device(host, self.device)
        return ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slots=slots,
            page_table=page_table,
            q_lens=[item.end - first for item, first in pairs],
            kv_lens=[item.end for item in items],
            capture_hidden=CaptureHidden.LAST,
            features=joined_features([features for _, features in widened], self.device),
        )
