"""The decoder of a batch. It launches and reads steps separately, so the host may work one step behind.

    launch   queues step N+1 behind step N on the device; its inputs are in the device state
    read     waits for the report of step N and appends its tokens to the requests that are still live
    step     launches, then reads

A request that ends with step N also took part in step N+1. The decoder drops those tokens. Their KV lies
behind the request's tokens, in pages and a slot that are released after step N+1 was read. A batch that
cannot be launched ahead (`can_launch`) is counted by reason and stepped with no other step in flight.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from ....kernels.step_glue import MATCH, NUM_COUNTS, UNASKED
from ...host_copy import to_device
from ...parallel.plan_messages import (
    BeginDraftsPlan,
    DraftPart,
    DraftPrefillPlan,
    DrawPart,
    GrowPart,
    GrowPlan,
    JoinPart,
    JoinPlan,
    StopDraftingPlan,
    Tell,
)
from ...request import Request
from ...sampling.logprobs import ScoredToken, packed_width, unpack_logprobs
from ...sampling.params import SamplingParams
from ..adaptive import StepPolicy
from ..drafters.protocol import Drafter, DraftPrefill, reads_features
from ..drafting.shape import PLAIN, DraftShape
from ..drafting.tree import branches
from .device_state import MorePages, RequestInit
from .draft_coverage import DraftCoverage
from .fused_step import ACCEPTED, GOOD, PROPOSED, SEEN, FillMasks, StepKind
from .result import StepResult
from .step_graphs import Report, StepGraphs


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A launched step that was not read yet.

    `warm` marks the requests with drafts. `kind` determines the layout of the report. `is_watched`: the
    report tells of first proposals that no earlier one told of.
    """

    requests: tuple[Request, ...]
    warm: tuple[bool, ...]
    kind: StepKind
    report: Report
    is_watched: bool = False


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """The requests of the newest step and the values derived from them.

    `version` is that of the device state at derivation. `kind` is that of a step without drafts. `reason`
    tells why the batch cannot be launched ahead. `context`: tokens of all requests at derivation.
    """

    requests: Sequence[Request]
    slots: tuple[int, ...]
    warm: tuple[bool, ...]
    kind: StepKind
    reason: str | None
    version: int
    context: int = 0


_NOBODY = _Batch(requests=(), slots=(), warm=(), kind=StepKind(shape=PLAIN), reason=None, version=-1)


def num_offered(shape: DraftShape, useful_rows: int) -> int:
    """Number of drafts offered to a warm request."""
    return shape.num_nodes - 1 if shape.is_tree and useful_rows > 1 else useful_rows - 1


class AsyncDecoder:
    """Decodes requests by `steps`, which hold the target and the drafter.

    A step drafts `shape`, or the choice of `policy`, if given. Before each launch the caller holds pages for
    the tokens of all unread steps and of this one + shape.spare_slots, within the context of `steps`, and
    reports later ones by `grow`. Rows beyond a request's pages go to the padding sink and are never accepted.
    Target and draft KV share page ids. With `launches_ahead`
    False, the caller uses `step` only. The caller must not forget a request between `launch` and `read` of a
    flight that contains it.

    `prepare` is called before each step is launched.

    `tell` takes a plan of all that the other ranks of a tensor-parallel worker do, before it is done here.

    `fallbacks` counts, by reason, the batches that could not be launched ahead.
    """

    def __init__(
        self,
        steps: StepGraphs,
        *,
        shape: DraftShape = PLAIN,
        policy: StepPolicy | None = None,
        eos_token_ids: Sequence[int] = (),
        launches_ahead: bool = True,
        tell: Tell | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.steps = steps
        self._tell = steps.announce = tell
        self._prepare = prepare
        self.drafter: Drafter | None = steps.step.drafter
        self.shape = shape if self.drafter is not None else PLAIN
        self.policy = policy
        self.launches_ahead = launches_ahead
        self.fallbacks: Counter[str] = Counter()
        self.num_launched = 0  # steps launched ahead
        self.coverage = DraftCoverage(self.drafter, self.shape)
        self._eos = frozenset(eos_token_ids)
        self._page_size = steps.step.runner.pool.page_size
        self._slots: dict[Request, int] = {}
        self._unseen: set[Request] = set()  # support wider than the ranked candidates
        self._batch = _NOBODY
        self._num_unread = 0
        self._num_until_limit = 0

    @property
    def counters(self) -> dict[str, float]:
        """Monotonic counts: steps launched ahead, fallbacks by reason, requests beyond the draft's
        context.
        """
        found = {
            f"overlap_fallback_{reason}": float(count) for reason, count in sorted(self.fallbacks.items())
        }
        if self.launches_ahead:
            found["overlapped_steps"] = float(self.num_launched)
        if self.coverage.num_beyond:
            found["draft_beyond_context"] = float(self.coverage.num_beyond)
        return found

    # --- draft state -----------------------------------------------------------------------------------

    def num_covered(self, request: Request) -> int:
        """Rows of `request` whose draft KV is written, or unneeded because they lie beyond the draft's
        context.
        """
        return self.coverage.num_covered(request)

    def draft_prefill(self, request: Request, features: torch.Tensor, start_row: int) -> None:
        """Writes draft rows from `start_row` on, from the target `features` `[rows, K*Ht]` of `request`."""
        self.draft_prefill_batch([(request, features, start_row)])

    def draft_prefill_batch(self, items: Sequence[tuple[Request, torch.Tensor, int]]) -> None:
        """Runs `draft_prefill` for several requests in one forward.

        The first call for a request may start behind a cached prefix. Later calls continue without a gap. Row
        i needs the token at i+1, so the last row of a prompt waits for the first output token. Rows beyond
        the draft's context are skipped. No-op without a drafter that reads features. Raises AssertionError
        for a request that already takes steps.
        """
        if self.drafter is None or not reads_features(self.drafter):
            return
        for request, *_ in items:
            assert request not in self._slots, f"{request!r}: its steps have begun"
        parts = [self.coverage.begin(self.drafter, *item) for item in items]
        if self._tell is not None:
            self._tell(DraftPrefillPlan(parts=[_draft_part(part) for part in parts]))
            self.steps.step.group.share(torch.cat([part.features for part in parts]))
        self.drafter.prefill(parts)

    def grow(self, grown: Sequence[tuple[Request, int]]) -> None:
        """Tells the device of pages that requests got behind their first ones.

        An item is (request, pages before). Requests that did not join yet bring all their pages when they do.
        """
        told = [
            MorePages(
                slot=self._slots[request], start=start, pages=request.pages, capacity=self._capacity(request)
            )
            for request, start in grown
            if request in self._slots
        ]
        if told:
            if self._tell is not None:
                self._tell(GrowPlan(grown=[_grow_part(more) for more in told]))
            self.steps.step.state.append_pages(told)

    def forget(self, request: Request) -> None:
        """Drops the state of `request`; no-op without one."""
        self.coverage.forget(request)
        slot = self._slots.pop(request, None)
        if slot is not None:
            self.steps.step.state.close(slot)
        self._unseen.discard(request)

    # --- steps -----------------------------------------------------------------------------------------

    def can_launch(self, requests: Sequence[Request]) -> bool:
        """Whether a step of `requests` can be launched before the previous step is read. Counts the reason if
        not.
        """
        if not self.launches_ahead:
            return False
        reason = self._batch.reason if self._is_known(requests) else self._first_reason(requests)
        if reason is not None:
            self.fallbacks[reason] += 1
        return reason is None

    def step(self, requests: Sequence[Request]) -> StepResult:
        """Advances every request of `requests` by at least one token.

        Every request is unfinished and has an output token. Raises AssertionError while a flight is unread.
        """
        assert not self._num_unread, f"{self._num_unread} steps were launched and not read"
        if not requests:
            return StepResult(tokens=[], logprobs=[], accept_lens=[], drafted=[], is_bad=[], path="eager")
        return self.read(self._launch(requests), [True] * len(requests))

    def launch(self, requests: Sequence[Request]) -> Flight:
        """Launches a step of `requests`, which passed `can_launch`. Each may be in one other unread
        flight.
        """
        self.num_launched += 1
        return self._launch(requests)

    def _launch(self, requests: Sequence[Request]) -> Flight:
        self._num_until_limit -= 1
        if self._num_until_limit <= 0:
            self._retire(requests)
        if not self._is_known(requests):
            self._batch = self._gather(requests)
        batch = self._batch
        guided = [i for i, request in enumerate(requests) if request.guide is not None]
        assert not (guided and self._num_unread), "the grammar of a request waits for the step before"
        fill = self._filler(batch.requests, guided) if guided else None
        self._prepare()
        wanted, num_rows = self.steps.agree(self._kind_of(batch), len(requests))
        is_watched = self._keep_up(batch, wanted)
        report, kind = self.steps.launch(batch.slots, wanted, fill, num_rows)
        self._num_unread += 1
        return Flight(
            requests=tuple(requests), warm=batch.warm, kind=kind, report=report, is_watched=is_watched
        )

    def _keep_up(self, batch: _Batch, kind: StepKind) -> bool:
        """Lets the drafter catch up where a step of `kind` needs it, and counts the rows that the step leaves
        to it. Returns whether the step reports a new comparison of first proposals: its own, or that of the
        rows which the drafter has just seen.
        """
        is_late, late = self.steps.step.is_late(kind), self.coverage.most_late(batch.requests)
        catches_up = late > 0 and (not is_late or late >= self.steps.late_rows)
        if catches_up:
            self._catch_up(batch.requests)
        if is_late:
            self.coverage.note_late(batch.requests, 1)
        return catches_up if is_late else kind.watched is not None

    def _catch_up(self, requests: Sequence[Request]) -> None:
        self.steps.catch_up(tuple(self._slots[each] for each in requests if each in self._slots))
        self.coverage.note_late(requests, None)

    def read(self, flight: Flight, is_live: Sequence[bool]) -> StepResult:
        """Waits for `flight`, the oldest unread one, and commits its tokens to its live requests.

        The result has rows for the live requests only. A request may get no token if the step did not see its
        whole support; its next step then runs with the host's exact chooser.
        """
        width, shape = flight.kind.shape.num_path, flight.kind.shape
        values = flight.report.rows()
        rows: list[list[int]] = values[:, : width + NUM_COUNTS].tolist()
        self._num_unread -= 1
        found = [
            (request, row, is_warm, packed)
            for request, row, is_warm, packed, live in zip(
                flight.requests, rows, flight.warm, values[:, width + NUM_COUNTS :], is_live, strict=True
            )
            if live
        ]
        most_left = max((request.num_remaining for request, _, is_warm, _ in found if is_warm), default=1)
        useful_rows = min(shape.num_path, most_left)
        tokens, accept_lens, is_bad, logprobs, experts = [], [], [], [], []
        for request, row, is_warm, packed in found:
            accepted, good, seen = (row[width + column] for column in (ACCEPTED, GOOD, SEEN))
            assert accepted or not request.num_remaining, (
                f"{request!r}: no page or no context left for its newest token"
            )
            if seen < min(accepted, good):
                self._unseen.add(request)
                self._batch = _NOBODY
            accept_lens.append(min(accepted, useful_rows))
            is_bad.append(good < accepted and good <= seen)
            tokens.append(self._commit_one(request, row[: min(accepted, good, seen)], is_warm))
            logprobs.append(_logprobs_of(request, packed, len(tokens[-1]), flight.kind))
            experts.append(self._experts_of(request, packed, len(tokens[-1]), width))
        self._tell_policy(flight, useful_rows, [(row, is_warm) for _, row, is_warm, _ in found])
        offered = num_offered(shape, useful_rows)
        return StepResult(
            tokens=tokens,
            logprobs=logprobs,
            accept_lens=accept_lens,
            drafted=[min(offered, row[width + PROPOSED]) if is_warm else 0 for _, row, is_warm, _ in found],
            is_bad=is_bad,
            path=flight.report.path,
            experts=experts,
        )

    def _experts_of(
        self, request: Request, packed: npt.NDArray[np.int64], count: int, num_path: int
    ) -> bytes:
        """Of the first `count` rows of a report's row, where the request asks for them."""
        routed, words = self.steps.step.runner.routed_experts, self.steps.step.expert_words
        if routed is None or request.sampling.routed_experts < 0 or not count:
            return b""
        rows = packed[len(packed) - num_path * words :].reshape(num_path, words)[:count]
        return rows.view(np.uint8)[:, : routed.shape.row_bytes].tobytes()

    # --- the batch -------------------------------------------------------------------------------------

    def _is_known(self, requests: Sequence[Request]) -> bool:
        batch = self._batch
        return batch.version == self.steps.step.state.version and requests == batch.requests

    def _first_reason(self, requests: Sequence[Request]) -> str | None:
        """The reason why a step of `requests` cannot be launched ahead; None without one."""
        for request in requests:
            if request.guide is not None:
                return "guided"
            if request in self._unseen:
                return "nucleus"
        return None

    def _gather(self, requests: Sequence[Request]) -> _Batch:
        """Derives the batch of `requests`, after new requests were written to the device state."""
        state = self.steps.step.state
        joining = [request for request in requests if request not in self._slots]
        if joining:
            begun = self.coverage.join(joining)
            if begun and self._tell is not None:
                self._tell(BeginDraftsPlan(rows=[row for row, _ in begun], texts=[text for _, text in begun]))
            self._retire(joining)
            slots = [state.open() for _ in joining]
            inits = [self._init_of(request) for request in joining]
            if self._tell is not None:
                parts = [_join_part(slot, init) for slot, init in zip(slots, inits, strict=True)]
                self._tell(JoinPlan(joining=parts))
            state.write(slots, inits)
            self._slots.update(zip(joining, slots, strict=True))
        self._num_until_limit = self.coverage.steps_until_limit(requests)
        vocab_size, is_edited = state.vocab_size, any(map(_is_edited, requests))
        num_top = max((request.sampling.logprobs for request in requests), default=-1)
        kind = StepKind(
            shape=PLAIN,
            is_ranked=any(request.sampling.needs_ranking(vocab_size) for request in requests),
            is_edited=is_edited,
            num_top=min(vocab_size, num_top),
            is_exact=any(request in self._unseen for request in requests),
        )
        return _Batch(
            requests=list(requests),
            slots=tuple(self._slots[request] for request in requests),
            warm=tuple(map(self.coverage.is_warm, requests)),
            kind=kind,
            reason=self._first_reason(requests),
            version=state.version,
            context=sum(request.num_tokens for request in requests),
        )

    def _init_of(self, request: Request) -> RequestInit:
        return RequestInit(
            newest=request.bonus_token,
            length=request.num_tokens - 1,
            remaining=request.num_remaining,
            capacity=self._capacity(request),
            draft_row=self.coverage.row_of(request),
            pages=request.pages,
            row=request.sampling_row,
        )

    def _capacity(self, request: Request) -> int:
        return min(request.num_writable_pages * self._page_size, self.steps.step.max_context)

    def _kind_of(self, batch: _Batch) -> StepKind:
        """The kind of the next step.

        A graph always runs all rows of its shape. An eager chain is cut to the rows that some request can
        use.
        """
        is_watched = self.policy is not None and self.policy.is_watched
        watched = self.shape if is_watched and self.drafter is not None else None
        plain = replace(batch.kind, watched=watched)
        if not any(batch.warm):
            return plain
        shape = self.shape
        if self.policy is not None:
            shape = self.policy.choose(len(batch.requests), batch.context)
        kind = replace(batch.kind, shape=shape) if shape.steps else plain
        if not shape.steps or self.steps.takes(kind, len(batch.requests)):
            return kind
        pairs = zip(batch.requests, batch.warm, strict=True)
        most_left = max(request.num_remaining for request, is_warm in pairs if is_warm)
        if most_left <= 1:
            return plain
        return kind if shape.is_tree else replace(kind, shape=DraftShape.of(min(shape.steps, most_left - 1)))

    def _filler(self, requests: Sequence[Request], guided: Sequence[int]) -> FillMasks:
        """A function that writes the masks of the requests `guided`, all of whose earlier steps were read."""

        def fill(drafts: torch.Tensor, parents: torch.Tensor | None, masks: torch.Tensor) -> None:
            num_nodes = masks.shape[1]
            # The host waits for the drafts here.
            tokens = drafts.tolist() if num_nodes > 1 else [[]] * len(requests)
            trees = [[-1, *range(num_nodes - 1)]] * len(requests) if parents is None else parents.tolist()
            found = []
            for i in guided:
                guide = requests[i].guide
                assert guide is not None
                found.append(guide.masks(requests[i].asked_and_chosen[1], branches(tokens[i], trees[i])))
            where = to_device(torch.tensor(guided, dtype=torch.int64), masks.device)
            masks.index_copy_(0, where, to_device(torch.from_numpy(np.stack(found)), masks.device))

        return fill

    def _retire(self, requests: Sequence[Request]) -> None:
        """Ends drafting for the requests that have outgrown the draft's context."""
        if self.coverage.most_late(requests):
            self._catch_up(requests)
        for request in self.coverage.retire(requests):
            if request in self._slots:
                if self._tell is not None:
                    self._tell(StopDraftingPlan(slot=self._slots[request]))
                self.steps.step.state.stop_drafting(self._slots[request])
        self._num_until_limit = self.coverage.steps_until_limit(requests)

    # --- results of a step -----------------------------------------------------------------------------

    def _commit_one(self, request: Request, tokens: list[int], is_warm: bool) -> list[int]:
        count = request.append(tokens, self._eos) if tokens else 0
        request.num_computed = request.num_tokens - 1
        if is_warm:
            self.coverage.advance(request, count)
        return tokens[:count]

    def _tell_policy(self, flight: Flight, useful_rows: int, found: Sequence[tuple[list[int], bool]]) -> None:
        """Reports acceptance to the policy, for the warm requests that got a token.

        A step without drafts reports its first proposals instead. `found`: the report row of each request,
        and whether the request is warm.
        """
        width, policy = flight.kind.shape.num_path, self.policy
        rows = [row for row, is_warm in found if is_warm and row[width + ACCEPTED] > 0]
        if policy is None or not rows:
            return
        if flight.kind.watched is not None:
            asked = [row[width + PROPOSED] for row in rows if row[width + PROPOSED] != UNASKED]
            if flight.is_watched and asked:
                policy.observe([asked.count(MATCH)], [len(asked)])
            return
        counts = Counter(min(row[width + ACCEPTED], useful_rows) - 1 for row in rows)
        levels = range(useful_rows - 1)
        reached = [sum(n for kept, n in counts.items() if kept >= level) for level in levels]
        matched = [sum(n for kept, n in counts.items() if kept > level) for level in levels]
        policy.observe(matched, reached)

    def __repr__(self) -> str:
        return (
            f"<AsyncDecoder {self.shape}, {len(self._slots)} requests, {self.num_launched} steps launched "
            f"ahead, fallbacks {dict(self.fallbacks)}>"
        )


def _draw_part(params: SamplingParams) -> DrawPart:
    return DrawPart(seed=params.seed % (1 << 64), temperature=float(params.temperature), top_k=params.top_k)


def _draft_part(item: DraftPrefill) -> DraftPart:
    return DraftPart(
        pages=list(item.pages),
        start=item.start,
        next_ids=list(item.next_ids),
        state_row=item.state_row,
        is_final=item.is_final,
        known_ids=list(item.known_ids),
        draw=_draw_part(item.params or SamplingParams(temperature=0.0)),
    )


def _join_part(slot: int, init: RequestInit) -> JoinPart:
    return JoinPart(
        slot=slot,
        newest=init.newest,
        length=init.length,
        remaining=init.remaining,
        capacity=init.capacity,
        draft_row=init.draft_row,
        pages=list(init.pages),
        draw=_draw_part(init.row.params),
    )


def _grow_part(more: MorePages) -> GrowPart:
    pages = list(more.pages[more.start :])
    return GrowPart(slot=more.slot, start=more.start, pages=pages, capacity=more.capacity)


def _is_edited(request: Request) -> bool:
    """Whether a step edits the logits of `request` or reports log probabilities."""
    params = request.sampling
    is_held = params.min_new_tokens > request.num_output
    return (
        params.needs_penalties
        or bool(params.logit_bias)
        or is_held
        or params.logprobs >= 0
        or request.guide is not None
    )


def _logprobs_of(
    request: Request, packed: npt.NDArray[np.int64], count: int, kind: StepKind
) -> list[ScoredToken]:
    """Of the first `count` tokens of a report's row, where the request asks for them."""
    wanted, each = request.sampling.logprobs, packed_width(kind.num_top)
    if wanted < 0:
        return []
    return [unpack_logprobs(packed[i * each : (i + 1) * each], wanted) for i in range(count)]
