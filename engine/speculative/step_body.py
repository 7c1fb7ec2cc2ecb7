"""One whole decode step on the device: draft -> verify -> sample -> judge -> compact -> draft extend -> advance.

It reads what it needs of each request from the step state and moves it on there, so that a step may be launched before the
one before it was read. Nothing looks at the host and every shape follows from the number of requests and the draft's shape:
a graph can hold it. The tokens are those of `SpecDecoder.step` for requests whose parameters `choose_tokens` knows.

Shape legend: B requests, N nodes verified of each, R rows of the longest branch, S spare slots, K captured features,
Ht target hidden.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...kernels.select_rows import select_last_rows
from ..fixed_rows import attend_rows
from ..model_runner import ModelRunner
from ..target_graphs import aux_ids_of
from ..token_choice import choose_tokens
from .draft_choice import DraftSampling
from .draft_loops import DraftRows, draft_chain, draft_tree
from .draft_shape import DraftShape
from .draft_state import PAD_ROW
from .draft_worker import DraftWorker
from .eagle3 import DraftPhase
from .step_state import StepRows, StepState
from .tree import DraftTree
from .verify import Verdict, compact, judge

# Columns of a report behind the R tokens: what verify accepted; rows in front of the first whose logits are not finite;
# rows in front of the first whose support was not seen whole; whether the draft that was not asked would have been right.
ACCEPTED, GOOD, SEEN, WOULD_MATCH, NUM_COUNTS = range(5)


@dataclass(frozen=True, kw_only=True)
class StepKind:
    """What is fixed in a step: the `shape` drafted; `is_ranked`, whether some request is drawn from a top-k or a nucleus;
    `watched`, the shape of which the first proposals are compared where nothing is drafted."""

    shape: DraftShape
    is_ranked: bool = False
    watched: DraftShape | None = None

    @property
    def report_width(self) -> int:
        return self.shape.num_path + NUM_COUNTS


class _Places(NamedTuple):
    """Where the rows of a step stand: `positions` and `slots` `[B, S]`, `limits` `[B]` rows that may be accepted."""

    positions: torch.Tensor
    slots: torch.Tensor
    limits: torch.Tensor


class StepBody:
    """Steps of `runner` and `drafter` over `state`; `max_context` in tokens."""

    def __init__(self, runner: ModelRunner, drafter: DraftWorker | None, state: StepState, max_context: int) -> None:
        self.runner = runner
        self.drafter = drafter
        self.state = state
        self.max_context = max_context

    @torch.no_grad()
    def run(self, slots: torch.Tensor, kind: StepKind) -> torch.Tensor:
        """Step the requests in `slots` `[B]` int64; the report `[B, R + NUM_COUNTS]` int64."""
        rows = self.state.read(slots)
        places = self._places(rows, kind.shape)
        tokens, tree = self._draft(rows, places, kind.shape)
        logits, features = self._verify(rows, places, tokens, tree)
        targets, bad, unseen = self._choose(rows, places, logits, tree, kind)
        verdict = judge(kind.shape, tokens, tree, targets, places.limits)
        good, seen = (_rows_before(flags.view(tokens.shape), verdict.path) for flags in (bad, unseen))
        emitted = torch.stack((verdict.accept_len, good, seen, rows.remaining)).amin(dim=0)
        would_match = self._would_match(rows, places, verdict, kind)
        if tree is not None:
            compact(self.runner.pool, places.slots, verdict)
        self._extend(rows, places, features, verdict, emitted, kind.shape)
        self.state.advance(rows, verdict.tokens, emitted)
        return torch.cat((verdict.tokens, torch.stack((verdict.accept_len, good, seen, would_match), dim=1)), dim=1)

    def _places(self, rows: StepRows, shape: DraftShape) -> _Places:
        """As `chain.plan_chain`, on the device; rows past a request's capacity go to slot 0, as all of an idle one."""
        page_size = self.runner.pool.page_size
        positions = rows.lengths[:, None] + torch.arange(shape.spare_slots, device=rows.slots.device)
        slots = rows.pages.gather(1, positions // page_size) * page_size + positions % page_size
        is_stored = (positions < rows.capacity[:, None]) & rows.is_active[:, None]
        room = torch.where(rows.is_active, rows.capacity - rows.lengths, 0)
        return _Places(
            positions.clamp(max=self.max_context - 1), torch.where(is_stored, slots, 0), room.clamp(max=shape.spare_slots)
        )

    def _draft(self, rows: StepRows, places: _Places, shape: DraftShape) -> tuple[torch.Tensor, DraftTree | None]:
        """Tokens `[B, N]`, the newest first, and of a tree what its nodes are."""
        newest, drafter = rows.newest[:, None], self.drafter
        if drafter is None or shape.steps == 0:
            return newest, None
        sampling, states = self._draft_sampling(rows), drafter.states
        where = DraftRows(
            pool=drafter.pool,
            positions=places.positions,
            slots=torch.where(rows.is_warm[:, None], places.slots, 0),
            page_table=rows.pages,
            lens=rows.lengths,
            hidden=states.hidden.index_select(0, rows.draft_rows),
            logits=states.logits.index_select(0, rows.draft_rows),
        )
        if not shape.is_tree:
            return torch.cat((newest, draft_chain(drafter.head, sampling, where, shape.steps)), dim=1), None
        tree = draft_tree(drafter.head, sampling, where, shape)
        return torch.cat((newest, tree.drafts), dim=1), tree

    def _verify(
        self, rows: StepRows, places: _Places, tokens: torch.Tensor, tree: DraftTree | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits `[B*N, V]` and features `[B*N, K*Ht]` of all nodes."""
        model, pool, num_nodes = self.runner.model, self.runner.pool, tokens.shape[1]
        positions = places.positions[:, :num_nodes]
        if tree is not None:
            positions = (positions[:, :1] + tree.depths).clamp(max=self.max_context - 1)
        attend = attend_rows(
            pool,
            places.slots[:, :num_nodes].reshape(-1),
            rows.pages,
            torch.where(rows.is_active, rows.lengths + num_nodes, 0),
            pool.head_dim**-0.5,
            None if tree is None else tree.mask,
        )
        ids = () if self.drafter is None else aux_ids_of(model)
        hidden, features = model.body(model.embed(tokens.reshape(-1)), positions.reshape(-1), attend, ids)
        return model.compute_logits(hidden), features

    def _choose(
        self, rows: StepRows, places: _Places, logits: torch.Tensor, tree: DraftTree | None, kind: StepKind
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The target's choice `[B, N]` behind each node; bool `[B*N]` of nodes with bad logits, and of those not seen."""
        count = kind.shape.num_nodes
        depths = torch.arange(count, device=logits.device) if tree is None else tree.depths
        positions = (rows.lengths[:, None] + 1 + depths).reshape(-1)
        tokens, bad, unseen = choose_tokens(logits, positions, rows.knobs.repeated(count), is_ranked=kind.is_ranked)
        return tokens.view(-1, count), bad, unseen

    def _would_match(self, rows: StepRows, places: _Places, verdict: Verdict, kind: StepKind) -> torch.Tensor:
        """Whether one of the first proposals that were not asked for is what the target chose: `[B]` int64, 0 or 1."""
        drafter = self.drafter
        if drafter is None or kind.watched is None or kind.shape.steps:
            return torch.zeros_like(rows.slots)
        logits, target_ids = drafter.states.logits.index_select(0, rows.draft_rows), drafter.head.target_ids
        sampling, count = self._draft_sampling(rows), rows.slots.shape[0]
        ids, _ = sampling.rank(logits, places.positions[:, 0] + 1, target_ids, kind.watched.topk, count)
        return (target_ids[ids] == verdict.tokens[:, :1]).any(dim=1).long()

    def _extend(
        self,
        rows: StepRows,
        places: _Places,
        features: torch.Tensor | None,
        verdict: Verdict,
        emitted: torch.Tensor,
        shape: DraftShape,
    ) -> None:
        """The draft's rows along the kept branch, from the target's features of it, and its state behind the last."""
        drafter, count = self.drafter, shape.num_path
        if drafter is None:
            return
        assert features is not None, "the target captured no features for the draft"
        if shape.is_tree:
            firsts = torch.arange(rows.slots.shape[0], device=features.device)[:, None] * shape.num_nodes
            features = features.index_select(0, (firsts + verdict.path).reshape(-1))
        attend = attend_rows(
            drafter.pool,
            torch.where(rows.is_warm[:, None], places.slots[:, :count], 0).reshape(-1),
            rows.pages,
            torch.where(rows.is_active, rows.lengths + count, 0),
            drafter.pool.head_dim**-0.5,
        )
        positions = places.positions[:, :count].reshape(-1)
        head, phase = drafter.head, DraftPhase.FROM_TARGET_FEATURES
        out = head.forward(features, verdict.tokens.reshape(-1), positions, attend, phase)
        last = select_last_rows(out, emitted)
        kept = torch.where(emitted > 0, rows.draft_rows, PAD_ROW)
        drafter.states.write(kept, head.feedback(last), head.compute_logits(last))

    def _draft_sampling(self, rows: StepRows) -> DraftSampling:
        return DraftSampling.over(rows.knobs.seeds, rows.knobs.temperature, rows.knobs.is_drawn)


def _rows_before(flags: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """How many rows of `path` `[B, R]` stand in front of the first whose flag `[B, N]` is set: `[B]` int64."""
    return (flags.gather(1, path).long().cumsum(dim=1) == 0).sum(dim=1)
