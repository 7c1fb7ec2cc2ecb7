"""One whole decode step: draft -> verify -> sample -> accept -> compact -> observe -> advance.

The step reads and advances the device state, so the next step can be launched before this one is read. Every
shape follows from the number of requests and the kind of the step. The step has one graph break: grammar
masks depend on the drafts, so the host fills them between verify and sampling. The same code runs eagerly, on
tapes and in device graphs.

Shape legend: B requests, N verified nodes of each, R rows of the longest branch, S spare slots, K captured
features, Ht target hidden, V vocabulary, W words of a mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ....kernels.step_glue import MATCHED, NUM_COUNTS, Places, PlaceSizes, step_outcome, step_places
from ...graphs.breakable import Breaks, ReplayContext
from ...parallel.group import SOLO, TensorGroup
from ...row_plans import plan_rows
from ...runner.model_runner import ModelRunner
from ...runner.target_graphs import aux_ids_of
from ...sampling.choose import choose_tokens
from ...sampling.edits import ALL_ALLOWED, edit_logits
from ...sampling.logprobs import pack_logprobs, packed_width, top_logprobs
from ...sparse_rows import compress_commits, has_side_caches
from ..drafters.protocol import Drafter, DraftView, reads_features
from ..drafting.choice import DraftSampling
from ..drafting.shape import DraftShape
from ..drafting.tree import DraftTree
from ..drafting.verify import AcceptResult, compact, verify_drafts
from .device_state import DeviceState, StepRows
from .late_rows import LateRows, matches

# Columns of a report behind the R tokens: accepted rows; rows before the first with logits that are not
# finite; rows before the first whose support exceeds the ranked candidates; in a step with drafts, the number
# of drafts found, and in one without, whether an unused first proposal matches: UNASKED, MISS or MATCH.
ACCEPTED, GOOD, SEEN, PROPOSED = range(NUM_COUNTS)
WORD = 8  # bytes of a column

# (drafts [B, N-1], parents [B, N] of a tree, masks int32 [B, N, W] to be written)
FillMasks = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class StepKind:
    """The fixed properties of a step: the `shape` drafted, the choice of tokens, and the content of the
    report.

    `is_ranked`: some request samples from a top-k or a nucleus. `is_edited`: some request has penalties,
    biases, bans, a grammar or logprobs. `num_top` is the maximum number of top logprobs (-1: no logprobs).
    `is_exact`: the step uses the exact chooser, which no graph can hold. `watched`: the first proposals of
    this shape are compared with what steps without drafts choose.
    """

    shape: DraftShape
    is_ranked: bool = False
    is_edited: bool = False
    num_top: int = -1
    is_exact: bool = False
    watched: DraftShape | None = None

    @property
    def report_width(self) -> int:
        return self.shape.num_path * (1 + packed_width(self.num_top)) + NUM_COUNTS

    def covers(self, wanted: "StepKind") -> bool:
        """Whether a step of this kind gives the tokens of `wanted` and a report with at least its content."""
        is_same = (self.shape, self.watched, self.is_exact) == (wanted.shape, wanted.watched, wanted.is_exact)
        chooses = self.is_ranked >= wanted.is_ranked and self.is_edited >= wanted.is_edited
        return is_same and chooses and self.num_top >= wanted.num_top


@dataclass(frozen=True, kw_only=True)
class StepContext(ReplayContext):
    """`fill` writes grammar masks; None if no request of the batch has a grammar."""

    fill: FillMasks | None = None


class TargetChoice(NamedTuple):
    """`tokens` int64 `[B, N]`: the target's choice behind each node. bool `[B*N]`: nodes whose logits are not
    finite, and nodes whose support was not seen whole."""

    tokens: torch.Tensor
    is_bad: torch.Tensor
    is_unseen: torch.Tensor


class FusedStep:
    """Steps of `runner` and `drafter` over `state`; `max_context` in tokens.

    With `late`, a step without drafts that is watched leaves its row to a later `catch_up`. The ranks of
    `group` step together: each verifies the drafts of rank 0 and accepts the tokens that rank 0 chose.
    """

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter | None,
        state: DeviceState,
        max_context: int,
        late: LateRows | None = None,
        group: TensorGroup = SOLO,
    ) -> None:
        self.group = group
        self.runner = runner
        self.drafter = drafter
        self.state = state
        self.max_context = max_context
        self.late = late

    @property
    def expert_words(self) -> int:
        """Columns of a report for the experts of one row; 0 if none are kept."""
        routed = self.runner.routed_experts
        return 0 if routed is None else -(-routed.shape.row_bytes // WORD)

    def report_width(self, kind: StepKind) -> int:
        """Columns of a report: those of `kind`, and the experts of the rows along the accepted branch."""
        return kind.report_width + kind.shape.num_path * self.expert_words

    def is_late(self, kind: StepKind) -> bool:
        """Whether a step of `kind` leaves its rows to a later `catch_up`."""
        return self.late is not None and kind.watched is not None and not kind.shape.steps

    @torch.no_grad()
    def run(self, slots: torch.Tensor, kind: StepKind, breaks: Breaks[StepContext]) -> torch.Tensor:
        """Steps the requests in `slots` `[B]` int64.

        Returns the report, int64 `[B, report_width(kind)]`.
        """
        rows = self.state.read(slots)
        places = step_places(rows.integers, self._sizes(kind.shape))
        if not breaks.is_recorded:
            self._note_pages(rows, places)
        view = self._view(rows, places, breaks)
        tokens, tree, found = self._draft(rows, view, places, kind.shape)
        logits, features = self._verify(rows, places, tokens, tree, breaks)
        choice = self._choose(slots, rows, places, logits, tokens, tree, kind, breaks)
        nodes = places.nodes[:, : kind.shape.num_nodes]
        accepted = verify_drafts(kind.shape, tokens, tree, choice.tokens, places.limits, nodes)
        proposed = self._would_match(rows, view, accepted, kind) if found is None else found
        outcome = step_outcome(
            self.state.integers,
            slots,
            accepted.tokens,
            accepted.path,
            accepted.accept_len,
            choice.is_bad,
            choice.is_unseen,
            proposed,
        )
        if tree is not None:
            compact(self.runner.pool, places.slots, accepted)
            if has_side_caches(self.runner.pool):
                compress_commits(
                    self.runner.pool, rows.pages, places.lengths, accepted.accept_len, accepted.path.shape[1]
                )
        if self.drafter is not None:
            if features is None:
                assert not reads_features(self.drafter), "the target captured no features for the draft"
                features = logits[:, :0]
            if self.late is not None and self.is_late(kind):
                self.late.keep(slots, rows, features, accepted.tokens[:, 0], outcome.emitted)
            else:
                self.drafter.observe(view, features, accepted, outcome.emitted, kind.shape)
        report = outcome.report
        if kind.is_edited:
            self.state.count_tokens(slots, accepted.tokens, outcome.emitted)
            report = self._with_logprobs(slots, report, logits, accepted, kind)
        return self._with_experts(report, accepted, kind.shape)

    @torch.no_grad()
    def catch_up(self, slots: torch.Tensor, breaks: Breaks[StepContext]) -> torch.Tensor:
        """The drafter observes the late rows of the requests in `slots` `[B]`.

        Returns int64 `[B, 2]`: their numbers, and what column MATCHED of the state now says.
        """
        assert self.late is not None, "no step leaves rows to the drafter"
        assert self.drafter is not None
        batch = self.late.take(slots)
        places = step_places(batch.rows.integers, self._sizes(self.late.shape))
        if not breaks.is_recorded:
            self._note_pages(batch.rows, places)
        view = self._view(batch.rows, places, breaks)
        proposals = self.drafter.first_proposals(view, self.late.watched.topk)
        found = self.late.note_matches(slots, batch, proposals)
        self.drafter.observe(view, batch.features, batch.accepted, batch.counts, self.late.shape)
        return torch.stack((batch.counts, found), dim=1)

    def _note_pages(self, rows: StepRows, places: Places) -> None:
        """In debug runs, records the pages that this step reads and writes, to order page copies."""
        pool = self.runner.pool
        if pool.order.is_checked:
            writes = (places.slots // pool.page_size).flatten().tolist()
            pool.note_use(rows.pages.flatten().tolist(), writes)

    def _sizes(self, shape: DraftShape) -> PlaceSizes:
        pool, drafter = self.runner.pool, self.drafter
        return PlaceSizes(
            num_places=shape.spare_slots,
            num_nodes=shape.num_nodes,
            num_path=shape.num_path,
            page_size=pool.page_size,
            max_context=self.max_context,
            target_page=pool.page_rows,
            draft_page=2 * pool.page_size if drafter is None else drafter.page_rows,
        )

    def _view(self, rows: StepRows, places: Places, breaks: Breaks[StepContext]) -> DraftView:
        tensors = rows.tensors
        return DraftView(
            newest=rows.newest,
            positions=places.positions,
            proposed=places.proposed,
            chain_lens=places.chain_lens,
            kv_rows=places.draft_rows,
            page_table=rows.pages,
            lens=places.lengths,
            extend_lens=places.extend_lens,
            states=rows.draft_rows,
            sampling=DraftSampling(
                seeds=tensors.seeds, temperature=tensors.temperature, is_drawn=tensors.is_drawn
            ),
            is_recorded=breaks.is_recorded,
        )

    def _draft(
        self, rows: StepRows, view: DraftView, places: Places, shape: DraftShape
    ) -> tuple[torch.Tensor, DraftTree | None, torch.Tensor | None]:
        """Tokens `[B, N]`, the newest one first, the tree, if the shape is one, and the number of drafts
        found, `[B]` (None in a step without drafts).
        """
        newest = rows.newest[:, None]
        if self.drafter is None or shape.steps == 0:
            return newest, None, None
        drafts, tree, found = self.drafter.propose(view, shape)
        if found is None:
            found = places.num_drafts
        drafts, tree, found = self._rank_0_drafts(drafts, tree, found)
        return torch.cat((newest, drafts), dim=1), tree, found

    def _rank_0_drafts(
        self, drafts: torch.Tensor, tree: DraftTree | None, found: torch.Tensor
    ) -> tuple[torch.Tensor, DraftTree | None, torch.Tensor]:
        """The drafts of rank 0. All ranks draft alike; one that did not would verify other tokens."""
        if self.group.is_solo:
            return drafts, tree, found
        count, numbers = drafts.shape[1], [drafts, found[:, None]]
        if tree is not None:
            numbers += [tree.parents, tree.depths, tree.mask.flatten(1).long()]
        whole = self.group.share(torch.cat(numbers, dim=1))
        parts = torch.split(whole, [part.shape[1] for part in numbers], dim=1)
        drafts, found = parts[0].contiguous(), parts[1][:, 0].contiguous()
        if tree is not None:
            mask = parts[4].view(-1, count + 1, count + 1) != 0
            tree = DraftTree(drafts, parts[2].contiguous(), parts[3].contiguous(), mask)
        return drafts, tree, found

    def _verify(
        self,
        rows: StepRows,
        places: Places,
        tokens: torch.Tensor,
        tree: DraftTree | None,
        breaks: Breaks[StepContext],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits `[B*N, V]` and features `[B*N, K*Ht]` of all nodes."""
        model, num_nodes = self.runner.model, tokens.shape[1]
        positions = places.positions[:, :num_nodes]
        if tree is not None:
            positions = (positions[:, :1] + tree.depths).clamp(max=self.max_context - 1)
        plan = plan_rows(
            self.runner.pool,
            places.target_rows[:, :num_nodes].reshape(-1),
            rows.pages,
            places.verify_lens,
            None if tree is None else tree.mask,
            slots=places.slots[:, :num_nodes].reshape(-1),
            is_recorded=breaks.is_recorded,
            is_invariant=self.runner.is_invariant,
        )
        if self.runner.routed_experts is not None:
            self.runner.routed_experts.begin(tokens.numel())
        if self.runner.expert_counts is not None:
            is_live = (places.verify_lens > 0)[:, None].expand(-1, num_nodes)
            self.runner.expert_counts.begin_where(is_live.reshape(-1))
        ids = () if self.drafter is None else aux_ids_of(model)
        hidden, features = model.body(model.embed(tokens.reshape(-1)), positions.reshape(-1), plan, ids)
        return model.compute_logits(hidden), features

    def _choose(
        self,
        slots: torch.Tensor,
        rows: StepRows,
        places: Places,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        tree: DraftTree | None,
        kind: StepKind,
        breaks: Breaks[StepContext],
    ) -> TargetChoice:
        count = kind.shape.num_nodes
        if self.group.rank:
            if kind.is_edited and breaks.is_recorded:
                breaks.graph_break(leave_masks)()  # all ranks run a new graph segment by segment
            return self._rank_0_choice(TargetChoice(*torch.zeros_like(tokens).expand(3, -1, -1)))
        positions = places.proposed[:, :count] if tree is None else places.proposed[:, :1] + tree.depths
        positions = positions.reshape(-1)
        if kind.is_edited:
            logits = edit_logits(
                logits,
                positions,
                slots,
                self.state.edits,
                drafts=tokens[:, 1:],
                ancestors=None if tree is None else tree.mask,
                masks=self._masks(tokens, tree, logits.shape[1], breaks),
            )
        chosen, bad, unseen = choose_tokens(
            logits, positions, rows.tensors, is_ranked=kind.is_ranked, is_exact=kind.is_exact
        )
        return self._rank_0_choice(TargetChoice(chosen.view(-1, count), bad, unseen))

    def _rank_0_choice(self, choice: TargetChoice) -> TargetChoice:
        """The choice of rank 0; that of other ranks tells the shape only."""
        if self.group.is_solo:
            return choice
        shape = choice.tokens.shape
        numbers = (choice.tokens, choice.is_bad.view(shape).long(), choice.is_unseen.view(shape).long())
        tokens, is_bad, is_unseen = self.group.share(torch.stack(numbers)).unbind(0)
        return TargetChoice(tokens, is_bad.reshape(-1) != 0, is_unseen.reshape(-1) != 0)

    def _masks(
        self, tokens: torch.Tensor, tree: DraftTree | None, vocab_size: int, breaks: Breaks[StepContext]
    ) -> torch.Tensor | None:
        """The masks of all nodes, int32 `[B*N, W]`. The host fills those of requests with a grammar."""
        if not breaks.is_recorded and breaks.context.fill is None:
            return None
        count, num_words = tokens.shape[0], -(-vocab_size // 32)
        masks = torch.full(
            (count, tokens.shape[1], num_words), ALL_ALLOWED, dtype=torch.int32, device=tokens.device
        )
        parents = None if tree is None else tree.parents
        breaks.graph_break(fill_masks)(tokens[:, 1:], parents, out=masks)
        return masks.view(-1, num_words)

    def _would_match(
        self, rows: StepRows, view: DraftView, accepted: AcceptResult, kind: StepKind
    ) -> torch.Tensor:
        """Whether one of the unused first proposals equals the target's sample, as MATCHED says it: `[B]`.

        If the step leaves its rows to a `catch_up`, what the last of those found.
        """
        if self.is_late(kind):
            return rows.integers[:, MATCHED]
        if self.drafter is None or kind.watched is None:
            return torch.zeros_like(view.lens)
        proposals = self.drafter.first_proposals(view, kind.watched.topk)
        return matches(proposals, accepted.tokens[:, :1])

    def _with_logprobs(
        self,
        slots: torch.Tensor,
        report: torch.Tensor,
        logits: torch.Tensor,
        accepted: AcceptResult,
        kind: StepKind,
    ) -> torch.Tensor:
        """`report` followed by the log probabilities of the tokens along the accepted branch."""
        if kind.num_top < 0:
            return report
        count, num_path = accepted.path.shape
        if kind.shape.is_tree:
            firsts = torch.arange(count, device=logits.device)[:, None] * kind.shape.num_nodes
            logits = logits.index_select(0, (firsts + accepted.path).reshape(-1))
        wanted = self.state.wanted(slots)[:, None].expand(count, num_path).reshape(-1)
        values, ids = top_logprobs(logits, accepted.tokens.reshape(-1), wanted, kind.num_top)
        return torch.cat((report, pack_logprobs(values, ids).view(count, -1)), dim=1)

    def _with_experts(self, report: torch.Tensor, accepted: AcceptResult, shape: DraftShape) -> torch.Tensor:
        """`report` followed by the experts of the rows along the accepted branch, if they are kept."""
        routed = self.runner.routed_experts
        if routed is None:
            return report
        count = accepted.path.shape[0]
        ids = routed.rows(count * shape.num_nodes).view(count, shape.num_nodes, -1)
        if shape.is_tree:
            ids = ids.gather(1, accepted.path[:, :, None].expand(-1, -1, ids.shape[2]))
        packed = F.pad(ids.view(torch.uint8), (0, WORD * self.expert_words - routed.shape.row_bytes))
        return torch.cat((report, packed.view(torch.int64).view(count, -1)), dim=1)


def fill_masks(
    context: StepContext, drafts: torch.Tensor, parents: torch.Tensor | None, out: torch.Tensor
) -> None:
    """The graph break of a step. The host reads the drafts and writes masks, if a request has a grammar."""
    if context.fill is not None:
        count = context.num_rows
        context.fill(drafts[:count], None if parents is None else parents[:count], out[:count])


def leave_masks(context: StepContext) -> None:
    """The break of `fill_masks` on a rank that chooses no tokens. Ranks vote on each segment of a new graph
    before it runs, so a sum must be in the same segment on all of them.
    """
