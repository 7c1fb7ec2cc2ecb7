"""The DFLASH drafter of a decode engine: one forward drafts a whole block.

A step of s drafts runs one forward over blocks of s + 1 rows: the newest token and s mask tokens. The KV of a
block lies behind the committed rows and is valid within its step only. The target verifies the block as a
chain. `observe` then overwrites these rows with projections of the target's features, which are the draft KV
of committed tokens. Rows behind the accepted ones are overwritten by the next block before anything reads
them. A draft row depends on the tokens up to its own only, so pages are shared under the target's key.

Shape legend: B requests, N rows of a block, T rows, P pages, K captured features, H hidden size, V
vocabulary.
"""

from collections.abc import Sequence

import torch

from ....kernels.kv_store import kv_rows
from ...batch.forward_batch import ForwardBatch
from ...errors import CheckpointError, UnsupportedInput
from ...graphs.bucketed_graphs import EAGER, PathDecision
from ...graphs.graph_pool import GraphPool
from ...host_copy import arrays_to_device
from ...kv.layouts import MHALayout
from ...kv.page_table import pages_for, row_arrays
from ...kv.pool import KVPool
from ...models.layers import NamedTensors
from ...row_attention import RowPlan
from ..drafting.shape import DraftShape
from ..drafting.verify import AcceptResult
from .dflash_graphs import ContextGraphs, store_context
from .dflash_head import DflashHead
from .paged import PagedDrafter, joined_features, require_loaded
from .protocol import DraftPrefill, DraftView, Proposal
from .states import DraftStates


class DflashDrafter(PagedDrafter[DflashHead, ContextGraphs]):
    """Runs a DFLASH draft model after `share`; owns its KV. A request has no other draft state.

    Raises LifecycleError for a model without shared weights, and CheckpointError for a dtype other than that
    of the config.
    """

    states: DraftStates
    lookahead = 0

    def __init__(self, head: DflashHead, *, num_pages: int, page_size: int, capacity: int = 64) -> None:
        config = head.config
        require_loaded(head, "draft model")
        self.head = head
        self.device = head.device
        self.pool = KVPool(num_pages, dflash_layout(head, page_size), head.device)
        # Rows without values: their numbers tell requests with drafts from others.
        self.states = DraftStates(capacity, 0, 0, head.dtype, head.device)
        self._token_ids = torch.arange(config.vocab_size, device=head.device)

    @property
    def max_context(self) -> int:
        return self.head.config.max_position_embeddings

    @property
    def anchors(self) -> tuple[torch.Tensor, ...]:
        return ()

    def parameters(self) -> NamedTensors:
        yield from self.head.parameters()
        yield "token_ids", self._token_ids

    @torch.no_grad()
    def prefill(self, items: Sequence[DraftPrefill]) -> None:
        """Writes the draft KV of all rows of `items`. Items may have no rows. No draft forward runs."""
        items = [item for item in items if item.next_ids]
        if not items:
            return
        for item in items:
            self._check_features(item.features, len(item.next_ids))
        spans = [(item.pages, item.start, item.end) for item in items]
        positions, slots = arrays_to_device(row_arrays(spans, self.pool.page_size)[:2], self.device)
        features = joined_features([item.features for item in items], self.device)
        self._write(features, positions, slots, self._decide(positions.shape[0]))

    @torch.no_grad()
    def prefill_rows(self, batch: ForwardBatch) -> torch.Tensor:
        """Writes the draft KV of the rows of `batch` and returns their context vectors `[T, H]`.

        A graph runs if `batch.decision` or, without a decision, the captured buckets allow it.
        """
        if batch.input_embeds is not None:
            raise UnsupportedInput(
                "a draft model takes no input_embeds: its context are the target's features"
            )
        assert batch.features is not None
        self._check_features(batch.features, batch.num_tokens)
        if batch.decision is None:
            batch.decision = self._decide(batch.num_tokens)
        return self._write(batch.features, batch.positions, batch.slots, batch.decision)

    def propose(self, view: DraftView, shape: DraftShape) -> Proposal:
        """Implements `Drafter.propose` in one forward over blocks of `shape.num_nodes` rows."""
        count, num_requests = shape.num_nodes, view.lens.shape[0]
        attends = [plan.attend for plan in self._plans(view, count)]
        positions = view.positions[:, :count]
        hidden = self.head.embed_block(view.newest, count)
        out = self.head.forward(hidden, positions.reshape(-1), attends).view(num_requests, count, -1)
        logits = self.head.compute_logits(out[:, 1:].reshape(num_requests * (count - 1), -1))
        # The target draws the token behind node i with the noise of its position + 1.
        noise = (positions[:, :-1] + 1).reshape(-1)
        chosen = view.sampling.by_rows(count - 1).choose(logits, noise, self._token_ids)
        return Proposal(chosen.view(num_requests, count - 1), None)

    def first_proposals(self, view: DraftView, topk: int) -> torch.Tensor:
        """Runs a block of two rows. The policy of a block drafter does not ask for it."""
        assert topk == 1, "a block drafter drafts chains"
        return self.propose(view, DraftShape.of(1)).drafts

    def observe(
        self,
        view: DraftView,
        features: torch.Tensor,
        accepted: AcceptResult,
        emitted: torch.Tensor,
        shape: DraftShape,
    ) -> None:
        """Implements `Drafter.observe` by a projection of all N rows, accepted or not."""
        count = shape.num_nodes
        self._check_features(features, view.lens.shape[0] * count)
        positions, rows = (x[:, :count].reshape(-1) for x in (view.positions, view.kv_rows))
        store_context(self.head, self.pool, features, positions, rows)

    def _decide(self, num_rows: int) -> PathDecision:
        return EAGER if self.graphs is None else self.graphs.decide(num_rows)

    def _write(
        self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, decision: PathDecision
    ) -> torch.Tensor:
        if self.graphs is not None and decision.is_graph:
            return self.graphs.run((features, positions, slots), decision)
        return store_context(self.head, self.pool, features, positions, kv_rows(slots, self.pool.kv))

    def _plans(self, view: DraftView, count: int) -> list[RowPlan]:
        """The attention of each layer over the context and the blocks. Layers of one kind share a plan."""
        config = self.head.config
        rows = view.kv_rows[:, :count].reshape(-1)
        kinds = list(zip(config.windows, config.are_causal, strict=True))
        plans = {
            kind: block_plan(self.pool, rows, view, count, window=kind[0], is_causal=kind[1])
            for kind in dict.fromkeys(kinds)
        }
        return [plans[kind] for kind in kinds]

    def _row_graphs(self, graphs: GraphPool, buckets: Sequence[int]) -> ContextGraphs:
        return ContextGraphs(graphs, self.head, self.pool, buckets)


def dflash_layout(head: DflashHead, page_size: int) -> MHALayout:
    """The layout of the draft's KV, under the page ids of the target."""
    config = head.config
    return MHALayout.of(config, num_layers=config.num_layers, page_size=page_size, dtype=head.dtype)


def block_plan(
    pool: KVPool, rows: torch.Tensor, view: DraftView, count: int, *, window: int | None, is_causal: bool
) -> RowPlan:
    """The attention of one kind of layer over blocks of `count` rows at `rows` int64 `[B*N]` of `pool`.

    A row sees the whole context and, unless `is_causal`, all rows of its block. With a `window`, it sees rows
    less than `window` positions away; only the pages that these rows may lie in are read.
    """
    if window is None:
        mask = (
            None
            if is_causal
            else torch.ones((view.lens.shape[0], count, count), dtype=torch.bool, device=rows.device)
        )
        return RowPlan(pool, rows, view.page_table, view.extend_lens, mask, is_recorded=view.is_recorded)
    size, max_pages = pool.page_size, view.page_table.shape[1]
    seen = window - 1 + count  # rows that any row of a block sees
    width = min(seen + size - 1, max_pages * size)  # and those before them in the first page
    skipped = (view.extend_lens - seen).clamp(min=0) // size
    columns = skipped[:, None] + torch.arange(pages_for(width, size), device=rows.device)
    pages = view.page_table.gather(1, columns.clamp(max=max_pages - 1))
    lens = view.extend_lens - skipped * size
    return RowPlan(
        pool,
        rows,
        pages,
        lens,
        window_mask(window, count, width, rows.device, is_causal=is_causal)
        .expand(view.lens.shape[0], -1, -1)
        .contiguous(),
        is_recorded=view.is_recorded,
    )


def window_mask(
    window: int, count: int, width: int, device: torch.device, *, is_causal: bool
) -> torch.Tensor:
    """The last `width` rows of a context and its block that each of the `count` rows of the block sees: bool
    `[count, width]`.
    """
    ahead = torch.arange(count - width, count, device=device) - torch.arange(count, device=device)[:, None]
    return (ahead > -window) & (ahead <= 0 if is_causal else ahead < window)


class DflashModel:
    """The weights of a DFLASH drafter that shares the target's embedding and lm_head."""

    late_rows = DflashDrafter.late_rows

    def __init__(self, head: DflashHead) -> None:
        self.head = head

    @property
    def num_weights(self) -> int:
        """Number of weights that a block reads: those of the layers and of `lm_head`."""
        own = sum(weight.numel() for _, weight in self.head.tensors())
        return own + (0 if self.head.lm_head is None else self.head.lm_head.numel())

    def kv_layout(self, page_size: int) -> MHALayout:
        """The layout of the draft's KV in pages of `page_size` tokens."""
        return dflash_layout(self.head, page_size)

    def check(self, shape: DraftShape) -> None:
        """Raises CheckpointError for a tree, and for blocks longer than the drafter was trained for."""
        config = self.head.config
        if shape.is_tree:
            raise CheckpointError(
                f"spec_topk {shape.topk}: the DFLASH drafter at {config.path} drafts chains only; "
                "use --spec-topk 1"
            )
        if shape.num_nodes > config.block_size:
            raise CheckpointError(
                f"spec_steps {shape.steps}: the DFLASH drafter at {config.path} was trained for blocks of "
                f"{config.block_size} tokens, the newest one included; use at most --spec-steps "
                f"{config.block_size - 1}"
            )

    def drafter(self, *, num_pages: int, page_size: int, capacity: int) -> DflashDrafter:
        return DflashDrafter(self.head, num_pages=num_pages, page_size=page_size, capacity=capacity)

    def __repr__(self) -> str:
        return f"<DflashModel {self.head!r}>"
