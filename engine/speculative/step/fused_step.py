"""One whole decode step on the device: draft -> verify -> sample -> judge -> compact -> draft extend -> advance.

It reads what it needs of each request from the step state and moves it on there, so that a step may be launched before the
one before it was read. Nothing looks at the host and every shape follows from the number of requests and the draft's shape:
a graph can hold it. The tokens are those of `SpecDecoder.step` for requests whose parameters `choose_tokens` knows.

Shape legend: B requests, N nodes verified of each, R rows of the longest branch, S spare slots, K captured features,
Ht target hidden.
"""

from dataclasses import dataclass

import torch

from ....kernels.select_rows import select_last_rows
from ....kernels.step_glue import NUM_COUNTS, Places, PlaceSizes, step_outcome, step_places
from ...fixed_rows import attend_rows
from ...model_runner import ModelRunner
from ...sampling.choose import choose_tokens
from ...target_graphs import aux_ids_of
from ..drafters.eagle3 import DraftWorker
from ..drafters.eagle3_head import DraftPhase
from ..drafters.loops import DraftRows, draft_chain, draft_tree
from ..drafters.states import PAD_ROW
from ..drafting.choice import DraftSampling
from ..drafting.shape import DraftShape
from ..drafting.tree import DraftTree
from ..drafting.verify import Verdict, compact, judge
from .device_state import StepRows, StepState

# Columns of a report behind the R tokens: what verify accepted; rows in front of the first whose logits are not finite;
# rows in front of the first whose support was not seen whole; whether the draft that was not asked would have been right.
ACCEPTED, GOOD, SEEN, WOULD_MATCH = range(NUM_COUNTS)


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


class StepBody:
    """Steps of `runner` and `drafter` over `state`; `max_context` in tokens."""

    def __init__(
        self, runner: ModelRunner, drafter: DraftWorker | None, state: StepState, max_context: int
    ) -> None:
        self.runner = runner
        self.drafter = drafter
        self.state = state
        self.max_context = max_context

    @torch.no_grad()
    def run(self, slots: torch.Tensor, kind: StepKind) -> torch.Tensor:
        """Step the requests in `slots` `[B]` int64; the report `[B, R + NUM_COUNTS]` int64."""
        rows = self.state.read(slots)
        places = step_places(rows.integers, self._sizes(kind.shape))
        tokens, tree = self._draft(rows, places, kind.shape)
        logits, features = self._verify(rows, places, tokens, tree)
        targets, bad, unseen = self._choose(rows, places, logits, tree, kind)
        verdict = judge(kind.shape, tokens, tree, targets, places.limits)
        would_match = self._would_match(rows, places, verdict, kind)
        table = self.state.integers
        outcome = step_outcome(
            table, slots, verdict.tokens, verdict.path, verdict.accept_len, bad, unseen, would_match
        )
        if tree is not None:
            compact(self.runner.pool, places.slots, verdict)
        self._extend(rows, places, features, verdict, outcome.emitted, kind.shape)
        return outcome.report

    def _sizes(self, shape: DraftShape) -> PlaceSizes:
        pool = self.runner.pool
        return PlaceSizes(
            num_places=shape.spare_slots,
            num_nodes=shape.num_nodes,
            num_path=shape.num_path,
            page_size=pool.page_size,
            max_context=self.max_context,
            target_page=pool.num_layers * 2 * pool.page_size,
            draft_page=2 * pool.page_size,
        )

    def _draft(
        self, rows: StepRows, places: Places, shape: DraftShape
    ) -> tuple[torch.Tensor, DraftTree | None]:
        """Tokens `[B, N]`, the newest first, and of a tree what its nodes are."""
        newest, drafter = rows.newest[:, None], self.drafter
        if drafter is None or shape.steps == 0:
            return newest, None
        sampling, states = self._draft_sampling(rows), drafter.states
        where = DraftRows(
            pool=drafter.pool,
            positions=places.positions,
            kv_rows=places.draft_rows,
            page_table=rows.pages,
            lens=places.lengths,
            hidden=states.hidden.index_select(0, rows.draft_rows),
            logits=states.logits.index_select(0, rows.draft_rows),
        )
        if not shape.is_tree:
            return torch.cat((newest, draft_chain(drafter.head, sampling, where, shape.steps)), dim=1), None
        tree = draft_tree(drafter.head, sampling, where, shape)
        return torch.cat((newest, tree.drafts), dim=1), tree

    def _verify(
        self, rows: StepRows, places: Places, tokens: torch.Tensor, tree: DraftTree | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits `[B*N, V]` and features `[B*N, K*Ht]` of all nodes."""
        model, pool, num_nodes = self.runner.model, self.runner.pool, tokens.shape[1]
        positions = places.positions[:, :num_nodes]
        if tree is not None:
            positions = (positions[:, :1] + tree.depths).clamp(max=self.max_context - 1)
        attend = attend_rows(
            pool,
            places.target_rows[:, :num_nodes].reshape(-1),
            rows.pages,
            places.verify_lens,
            pool.head_dim**-0.5,
            None if tree is None else tree.mask,
        )
        ids = () if self.drafter is None else aux_ids_of(model)
        hidden, features = model.body(model.embed(tokens.reshape(-1)), positions.reshape(-1), attend, ids)
        return model.compute_logits(hidden), features

    def _choose(
        self, rows: StepRows, places: Places, logits: torch.Tensor, tree: DraftTree | None, kind: StepKind
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The target's choice `[B, N]` behind each node; bool `[B*N]` of nodes with bad logits, and of those not seen."""
        count = kind.shape.num_nodes
        positions = places.positions[:, :count] if tree is None else places.positions[:, :1] + tree.depths
        positions = positions.reshape(-1) + 1
        tokens, bad, unseen = choose_tokens(logits, positions, rows.knobs, is_ranked=kind.is_ranked)
        return tokens.view(-1, count), bad, unseen

    def _would_match(self, rows: StepRows, places: Places, verdict: Verdict, kind: StepKind) -> torch.Tensor:
        """Whether one of the first proposals that were not asked for is what the target chose: `[B]` int64, 0 or 1."""
        drafter = self.drafter
        if drafter is None or kind.watched is None or kind.shape.steps:
            return torch.zeros_like(places.lengths)
        logits, target_ids = drafter.states.logits.index_select(0, rows.draft_rows), drafter.head.target_ids
        sampling, count = self._draft_sampling(rows), places.lengths.shape[0]
        ids, _ = sampling.rank(logits, places.positions[:, 0] + 1, target_ids, kind.watched.topk, count)
        return (target_ids[ids] == verdict.tokens[:, :1]).any(dim=1).long()

    def _extend(
        self,
        rows: StepRows,
        places: Places,
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
            firsts = torch.arange(places.lengths.shape[0], device=features.device)[:, None] * shape.num_nodes
            features = features.index_select(0, (firsts + verdict.path).reshape(-1))
        attend = attend_rows(
            drafter.pool,
            places.draft_rows[:, :count].reshape(-1),
            rows.pages,
            places.extend_lens,
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
