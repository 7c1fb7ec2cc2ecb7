"""What the engine asks of a drafter, whatever kind of model proposes the tokens.

    prefill    write draft state from the target's features of prompt rows, as they land
    propose    on the device, inside a decode step: the drafts of the step
    observe    on the device, at the end of the step: the target's features of what was kept
    open/close a place for what the drafter remembers of one request between two steps

`propose`, `first_proposals` and `observe` run inside graphs: fixed shapes, no look at the host.
Shape legend: B requests, S spare slots of each, N nodes, R rows of the longest branch, K captured features,
Ht target hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ...batch.forward_batch import ForwardBatch
from ...graphs.bucketed_graphs import GraphFamily
from ...graphs.graph_pool import GraphPool
from ...graphs.token_graphs import AttendContext
from ...kv.pool import KVPool
from ...models.layers import NamedTensors
from ..drafting.choice import DraftSampling
from ..drafting.shape import DraftShape
from ..drafting.tree import DraftTree
from ..drafting.verify import AcceptResult

MAX_PREFILL_ROWS = 512  # rows of one draft prefill that a graph is captured for


@dataclass(frozen=True, kw_only=True)
class DraftPrefill:
    """Rows [start, start + len(next_ids)) of one request.

    `next_ids[k]` is the token at start+k+1, `features` `[len(next_ids), K*Ht]`. `state_row` is written when
    `is_final`, that is when the last row is the newest one and so predicts the first draft token.
    """

    pages: Sequence[int]
    start: int
    next_ids: Sequence[int]
    features: torch.Tensor
    state_row: int
    is_final: bool

    @property
    def end(self) -> int:
        return self.start + len(self.next_ids)


@dataclass(frozen=True, kw_only=True)
class DraftView:
    """The requests of one step as a drafter sees them, all int64 on the device.

    `positions` and `kv_rows` `[B, S]`: positions behind the committed rows, and row numbers in the draft's
    pool (0: in the sink). `page_table` `[B, P]`; `lens` `[B]` committed rows, `extend_lens` `[B]` the same
    and R; `states` `[B]` places of `open`, 0 where nothing is drafted. `is_recorded`: a graph records the
    step.
    """

    positions: torch.Tensor
    kv_rows: torch.Tensor
    page_table: torch.Tensor
    lens: torch.Tensor
    extend_lens: torch.Tensor
    states: torch.Tensor
    sampling: DraftSampling
    is_recorded: bool


class Proposal(NamedTuple):
    """`drafts` int64 `[B, N-1]`, target ids; `tree`: what the nodes are, None for a chain."""

    drafts: torch.Tensor
    tree: DraftTree | None


class Drafter(Protocol):
    """A drafter of one engine, with the memory that it keeps per request."""

    @property
    def max_context(self) -> int:
        """Positions that the draft model was trained for; beyond them nothing is drafted."""

    @property
    def pool(self) -> KVPool:
        """The draft's KV, under the target's page ids."""

    @property
    def feature_width(self) -> int:
        """K*Ht, the width of every feature row handed in."""

    @property
    def page_rows(self) -> int:
        """Rows of a page in the draft's KV pool, as of `kv_rows`."""

    @property
    def anchors(self) -> tuple[torch.Tensor, ...]:
        """Tensors that graphs of a step read and write besides the parameters; they move when more places are
        opened than were reserved."""

    @property
    def prefill_family(self) -> GraphFamily[AttendContext, torch.Tensor] | None:
        """The graphs of `prefill_rows`; None before `capture`."""

    def capture(self, graphs: GraphPool, max_tokens: int) -> None:
        """Make graphs of `prefill_rows` for up to `max_tokens` rows."""

    def parameters(self) -> NamedTensors:
        """Every tensor that a graph reads and that nothing writes."""

    def reserve(self, count: int) -> None:
        """Room for `count` places: until there are more, `anchors` stay where they are."""

    def open(self) -> int:
        """A place for a new request, never 0."""

    def close(self, row: int) -> None:
        """Give a place back."""

    def prefill(self, items: Sequence[DraftPrefill]) -> None:
        """Write the draft state of all rows of `items`."""

    def prefill_rows(self, batch: ForwardBatch) -> torch.Tensor:
        """What a prefill computes of rows made from target features, by graph or as `batch.decision` says."""

    def propose(self, view: DraftView, shape: DraftShape) -> Proposal:
        """The drafts of a step of `shape`, which has at least one."""

    def first_proposals(self, view: DraftView, topk: int) -> torch.Tensor:
        """What would be drafted first, int64 `[B, topk]`, target ids; changes nothing."""

    def observe(
        self,
        view: DraftView,
        features: torch.Tensor,
        accepted: AcceptResult,
        emitted: torch.Tensor,
        shape: DraftShape,
    ) -> None:
        """Rewrite the rows along the kept branch from the target's `features` `[B*N, K*Ht]`, and the places
        of the requests that got tokens, `emitted` int64 `[B]` of them."""
