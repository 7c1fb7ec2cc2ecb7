"""The interface between the engine and a drafter, independent of the kind of draft model.

    prefill     writes draft state from the target's features of prompt rows, as they land
    propose     computes the drafts of a step, on the device
    observe     updates draft state from the target's features of the accepted nodes, at the end of the step
    open/close  reserve and release the state row of one request

`propose`, `first_proposals` and `observe` run inside graphs: shapes are fixed, and the host is not consulted.
Shape legend: B requests, S spare slots of each, N nodes, R rows of the longest branch, K captured features,
Ht target hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from ...batch.forward_batch import ForwardBatch
from ...graphs.bucketed_graphs import GraphFamily
from ...graphs.graph_pool import GraphPool
from ...kv.pool import KVPool
from ...models.layers import NamedTensors
from ...sampling.params import SamplingParams
from ..drafting.choice import DraftSampling
from ..drafting.shape import DraftShape
from ..drafting.tree import DraftTree
from ..drafting.verify import AcceptResult

MAX_PREFILL_ROWS = 1024  # rows of one draft prefill that a graph is captured for


@dataclass(frozen=True, kw_only=True)
class DraftPrefill:
    """Rows [start, start + len(next_ids)) of one request.

    `next_ids[k]` is the token at start+k+1. `features` is `[len(next_ids), K*Ht]`. `is_final` means that the
    last row is the newest one and so predicts the first draft token; prefill then writes `state_row`.
    `known_ids`: all tokens of the request so far, for drafters that look further ahead; empty: `next_ids`
    only. `params` is for drafters that choose tokens in a prefill; None: the likeliest. `next_embeds`
    `[n, Ht]` on the host are the target's inputs of the first n of `next_ids`, which have no ids; None: all
    have.
    """

    pages: Sequence[int]
    start: int
    next_ids: Sequence[int]
    features: torch.Tensor
    state_row: int
    is_final: bool
    known_ids: Sequence[int] = ()
    params: SamplingParams | None = None
    next_embeds: torch.Tensor | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.next_ids)


@dataclass(frozen=True, kw_only=True)
class DraftView:
    """The requests of one step as a drafter sees them. All tensors are int64 on the device.

    `newest` `[B]` are the newest tokens, which have no KV yet; their positions are the first of `positions`.
    `positions` `[B, S]` are those behind the committed rows, and `proposed` `[B, S]` those of the tokens that
    these rows propose. `chain_lens` `[S, B]`: row j is lens + j, what row j of a chain attends to. `kv_rows`
    `[B, S]` are row numbers in the draft's pool; 0 is the sink. `page_table` is `[B, P]`. `lens` `[B]` counts
    committed rows, and `extend_lens` `[B]` is lens + R. `states` `[B]` are the rows from `open`, 0 for
    requests without drafts. `is_recorded`: a graph records the step.
    """

    newest: torch.Tensor
    positions: torch.Tensor
    proposed: torch.Tensor
    chain_lens: torch.Tensor
    kv_rows: torch.Tensor
    page_table: torch.Tensor
    lens: torch.Tensor
    extend_lens: torch.Tensor
    states: torch.Tensor
    sampling: DraftSampling
    is_recorded: bool


class Proposal(NamedTuple):
    """`drafts` int64 `[B, N-1]`, target ids. `tree` describes the nodes; None for a chain.

    `found` int64 `[B]`: the number of nodes that the drafter really proposes; the rest only fills the shape.
    None: all of them.
    """

    drafts: torch.Tensor
    tree: DraftTree | None
    found: torch.Tensor | None = None


class Drafter(Protocol):
    """The drafter of one engine, with its memory per request."""

    @property
    def max_context(self) -> int:
        """Positions for which the draft model was trained. No drafts are made beyond them."""

    @property
    def pool(self) -> KVPool | None:
        """The draft's KV, under the target's page ids; None for a drafter without KV."""

    @property
    def feature_width(self) -> int:
        """K*Ht, the width of every feature row; 0 for a drafter that reads no features."""

    @property
    def page_rows(self) -> int:
        """Rows of a page in the draft's KV pool, in the unit of `kv_rows`."""

    @property
    def lookahead(self) -> int:
        """Tokens behind a row on which the row's draft KV depends; 0 for a drafter without KV."""

    @property
    def late_rows(self) -> int:
        """Accepted rows of a request that `observe` may get at once, after the steps that they come from.
        0: every step must observe.
        """

    @property
    def anchors(self) -> tuple[torch.Tensor, ...]:
        """Tensors besides the parameters that graphs of a step read and write.

        They move when the number of open rows exceeds the reserved number.
        """

    @property
    def prefill_family(self) -> GraphFamily[Any, torch.Tensor] | None:
        """The graphs of `prefill_rows`; None before `capture`."""

    def capture(self, graphs: GraphPool, max_tokens: int) -> None:
        """Captures graphs of `prefill_rows` for up to `max_tokens` rows."""

    def parameters(self) -> NamedTensors:
        """Every constant tensor that a graph reads."""

    def reserve(self, count: int) -> None:
        """Allocates state rows for `count` requests. `anchors` do not move before more requests are open."""

    def open(self) -> int:
        """Returns the state row of a new request, never 0."""

    def close(self, row: int) -> None:
        """Releases a state row."""

    def prefill(self, items: Sequence[DraftPrefill]) -> None:
        """Writes the draft state of all rows of `items`."""

    def prefill_rows(self, batch: ForwardBatch) -> torch.Tensor:
        """Runs the forward of a prefill over target features, as a graph or eagerly as `batch.decision`
        says.
        """

    def propose(self, view: DraftView, shape: DraftShape) -> Proposal:
        """Returns the drafts of a step of `shape`, which has at least one draft step."""

    def first_proposals(self, view: DraftView, topk: int) -> torch.Tensor:
        """Returns the target ids of the `topk` first drafts, int64 `[B, topk]`, without any change of
        state.
        """

    def observe(
        self,
        view: DraftView,
        features: torch.Tensor,
        accepted: AcceptResult,
        emitted: torch.Tensor,
        shape: DraftShape,
    ) -> None:
        """Rewrites the draft rows along the accepted branch, and the states of requests that got tokens.

        `features` `[B*N, K*Ht]` are the target's. `emitted` int64 `[B]` counts the new tokens of each
        request.
        """


@runtime_checkable
class HistoryDrafter(Protocol):
    """A drafter whose state is the text of a request: it needs no features, and no rows over the prompt."""

    def begin(self, requests: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Writes the states of requests that join: each state row, and all tokens so far."""


def reads_features(drafter: Drafter | None) -> bool:
    """Whether the target's features of every row go to `drafter`."""
    return drafter is not None and drafter.feature_width > 0


def draft_pools(drafter: Drafter | None) -> list[KVPool]:
    """The pool of the draft's KV, if there is one."""
    return [] if drafter is None or drafter.pool is None else [drafter.pool]


def cache_lookahead(drafter: Drafter | None) -> int:
    """Tokens behind a page on which the draft KV of the page depends; 0 without a drafter."""
    return 0 if drafter is None else drafter.lookahead
