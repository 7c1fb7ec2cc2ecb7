"""One decode step of a batch: draft -> verify -> sample -> accept -> compact -> draft extend -> commit.

Without a drafter, or when no request of the batch is warm, a step is plain decode with one row per request.
Shape legend: B requests, N rows each (the root and N-1 drafts), R rows of the longest branch (R = N in a chain), K captured
features, Ht target hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..forward_batch import CaptureHidden, ForwardMode, ForwardOutput
from ..model_runner import ModelRunner
from ..request import Request
from ..sampling.sampler import SampleOutput, Sampler, rows_behind
from .adaptive import StepPolicy
from .chain import ChainPlan, chain_batch, plan_chain
from .drafters.eagle3 import DraftPrefill, DraftWorker
from .drafters.states import PAD_ROW
from .drafting.shape import PLAIN, DraftShape
from .drafting.tree import DraftTree, branches
from .drafting.verify import Verdict, compact, judge


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Of the model's own distribution: the chosen token's log probability and the likeliest (id, log probability)."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step gave each request, in the order of the batch.

    `tokens` committed this step (already appended to the request). `logprobs`, per token, is empty for a request that
    asks for none. `accept_lens` counts what verify accepted, `drafted` how many drafts were offered (of a tree all nodes but
    the root): both before an end inside the block cut it. `is_bad`: the model's logits were not finite; fail the request.
    """

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprob]]
    accept_lens: list[int]
    drafted: list[int]
    is_bad: list[bool]
    path: str


@dataclass(kw_only=True)
class _Warmth:
    """A request's draft state row and how many of its draft rows are written."""

    row: int
    covered: int


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What one step is about: `useful_rows` is how many tokens some request can still use, at most `shape.num_path`.

    `rows` `[B]` draft states and `slots` `[B, S]` draft KV slots of the plan's S rows. `tokens` `[B, N]`, root first, are
    verified; `tree` None: they are a chain.
    """

    requests: Sequence[Request]
    warm: list[bool]
    shape: DraftShape
    useful_rows: int
    plan: ChainPlan
    rows: torch.Tensor
    slots: torch.Tensor
    tokens: torch.Tensor
    tree: DraftTree | None = None


def num_offered(shape: DraftShape, useful_rows: int) -> int:
    """Drafts offered to a warm request."""
    return shape.num_nodes - 1 if shape.is_tree and useful_rows > 1 else useful_rows - 1


class SpecDecoder:
    """Runs decode steps on `runner` and, when given, `drafter`.

    A step drafts `shape`, or what `policy`, given one, makes of it. The caller reserves pages for prompt + max_new_tokens +
    shape.spare_slots tokens, within `max_context`; where a request has less, the rows beyond go to the padding sink and are
    never accepted. Pages are shared by target and draft KV. `steps` stands for a chain where no `shape` is given.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        *,
        drafter: DraftWorker | None = None,
        steps: int = 3,
        shape: DraftShape | None = None,
        policy: StepPolicy | None = None,
        eos_token_ids: Sequence[int] = (),
        max_context: int,
    ) -> None:
        self.runner = runner
        self.sampler = sampler
        self.drafter = drafter
        self.shape = DraftShape.of(steps) if shape is None else shape
        self.policy = policy
        self.max_context = max_context
        self._eos = frozenset(eos_token_ids)
        self._page_size = runner.pool.page_size
        self._device = runner.pool.device
        self._warm: dict[Request, _Warmth] = {}

    def is_warm(self, request: Request) -> bool:
        """Whether `request` can be drafted for: its draft KV covers every row that its target KV covers."""
        warmth = self._warm.get(request)
        return warmth is not None and warmth.covered == request.num_tokens - 1

    def num_covered(self, request: Request) -> int:
        """Rows of `request` whose draft KV is written."""
        warmth = self._warm.get(request)
        return 0 if warmth is None else warmth.covered

    def draft_prefill(self, request: Request, features: torch.Tensor, start_row: int) -> None:
        """Write the draft rows from `start_row` on that target `features` `[rows, K*Ht]` of `request` stand for."""
        self.draft_prefill_batch([(request, features, start_row)])

    def draft_prefill_batch(self, items: Sequence[tuple[Request, torch.Tensor, int]]) -> None:
        """`draft_prefill` of several requests in one forward.

        The first call of a request may start behind a cached prefix; later ones continue without a gap. Row i needs the
        token at i+1, so the last row of a prompt has to wait for the first output token. No-op without a drafter.
        """
        if self.drafter is not None:
            self.drafter.prefill([self._prefill_item(self.drafter, *item) for item in items])

    def _prefill_item(
        self, drafter: DraftWorker, request: Request, features: torch.Tensor, start: int
    ) -> DraftPrefill:
        end = start + features.shape[0]
        assert end < request.num_tokens, (
            f"{request!r}: draft row {end - 1} needs token {end}, which is not there yet"
        )
        warmth = self._warm.get(request)
        if warmth is None:
            warmth = self._warm[request] = _Warmth(row=drafter.states.open(), covered=start)
        assert start <= warmth.covered, (
            f"{request!r}: draft rows {warmth.covered}..{start - 1} would stay unwritten"
        )
        warmth.covered = max(warmth.covered, end)
        return DraftPrefill(
            pages=request.pages,
            start=start,
            next_ids=request.all_ids[start + 1 : end + 1],
            features=features,
            state_row=warmth.row,
            is_final=end == request.num_tokens - 1,
        )

    def forget(self, request: Request) -> None:
        """Drop the draft state of `request`; no-op when there is none."""
        warmth = self._warm.pop(request, None)
        if warmth is not None and self.drafter is not None:
            self.drafter.states.close(warmth.row)

    @torch.no_grad()
    def step(self, requests: Sequence[Request]) -> StepResult:
        """Advance every request of `requests` (none finished, each with an output token) by at least one token."""
        step = self._draft(self._plan(requests))
        output = self._verify(step)
        sampled = self._sample(step, output.logits)
        targets = sampled.tokens.view(step.tokens.shape)
        verdict = judge(step.shape, step.tokens, step.tree, targets, step.plan.limits)
        verdict = verdict._replace(accept_len=verdict.accept_len.clamp(max=step.useful_rows))
        if step.tree is not None:
            compact(self.runner.pool, step.plan.slots, verdict)
        first_proposals = self._first_proposals(step)
        self._extend(step, output, verdict)
        return self._commit(step, sampled, verdict, first_proposals, output.path)

    def _plan(self, requests: Sequence[Request]) -> _Step:
        warm = [self.is_warm(request) for request in requests]
        shape, useful_rows = self._shape_to_run(requests, warm)
        plan = plan_chain(
            requests,
            shape.spare_slots,
            page_size=self._page_size,
            max_context=self.max_context,
            device=self._device,
        )
        rows, slots = self._draft_places(requests, warm, plan)
        newest = torch.tensor(
            [request.bonus_token for request in requests], dtype=torch.int64, device=self._device
        )
        return _Step(
            requests=requests,
            warm=warm,
            shape=shape,
            useful_rows=useful_rows,
            plan=plan,
            rows=rows,
            slots=slots,
            tokens=newest[:, None],
        )

    def _shape_to_run(self, requests: Sequence[Request], warm: Sequence[bool]) -> tuple[DraftShape, int]:
        """The shape of this step, and how many tokens some request can use of it.

        Of a chain no more rows are run than are useful, but where graphs take the batch: they have them all.
        """
        if not any(warm):
            return PLAIN, 1
        shape = self.shape if self.policy is None else self.policy.choose(len(requests))
        most_left = max(r.num_remaining for r, is_warm in zip(requests, warm, strict=True) if is_warm)
        useful_rows = min(shape.num_path, most_left)
        graphs = self.runner.graphs.verify_of(shape.num_nodes) if self.runner.graphs is not None else None
        if graphs is not None and graphs.rows.num_rows == shape.num_nodes and graphs.takes(len(requests)):
            return shape, useful_rows
        if shape.is_tree:
            return (shape if useful_rows > 1 else PLAIN), useful_rows
        return DraftShape.of(useful_rows - 1), useful_rows

    def _draft_places(
        self, requests: Sequence[Request], warm: Sequence[bool], plan: ChainPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft state rows `[B]` and draft KV slots `[B, S]`; a cold request keeps neither state nor KV."""
        rows = [self._warm[r].row if is_warm else PAD_ROW for r, is_warm in zip(requests, warm, strict=True)]
        is_kept = torch.tensor(warm, dtype=torch.bool, device=self._device)
        return torch.tensor(rows, dtype=torch.int64, device=self._device), torch.where(
            is_kept[:, None], plan.slots, 0
        )

    def _draft(self, step: _Step) -> _Step:
        """The step with its drafts behind the newest tokens."""
        drafter, shape = self.drafter, step.shape
        if drafter is None or shape.steps == 0:
            return step
        params = [request.sampling for request in step.requests]
        if not shape.is_tree:
            drafts = drafter.propose(step.plan, step.rows, step.slots, params)
            return replace(step, tokens=torch.cat((step.tokens, drafts), dim=1))
        tree = drafter.propose_tree(shape, step.plan, step.rows, step.slots, params)
        return replace(step, tokens=torch.cat((step.tokens, tree.drafts), dim=1), tree=tree)

    def _verify(self, step: _Step) -> ForwardOutput:
        tree, positions = step.tree, step.plan.positions[:, : step.shape.num_nodes]
        if tree is not None:
            positions = (positions[:, :1] + tree.depths).clamp(max=self.max_context - 1)
        batch = chain_batch(
            step.plan,
            step.tokens,
            mode=ForwardMode.TARGET_VERIFY if step.shape.steps else ForwardMode.DECODE,
            positions=positions,
            tree_mask=None if tree is None else tree.mask,
            capture=CaptureHidden.FULL if any(step.warm) else CaptureHidden.NULL,
        )
        return self.runner.forward(batch)

    def _sample(self, step: _Step, logits: torch.Tensor) -> SampleOutput:
        # Only penalties look at a row's own branch of drafts; without them the host need not wait for the drafts.
        num_nodes, tree = step.shape.num_nodes, step.tree
        seen: Sequence[Sequence[Sequence[int]]] = [[[0] * j for j in range(num_nodes)]] * len(step.requests)
        if any(request.sampling.sees_drafts for request in step.requests):
            drafts = step.tokens[:, 1:].tolist()
            parents = tree.parents.tolist() if tree is not None else [range(-1, num_nodes - 1)] * len(drafts)
            seen = [branches(*both) for both in zip(drafts, parents, strict=True)]
        rows = [row for r, mine in zip(step.requests, seen, strict=True) for row in rows_behind(r, mine)]
        batch = self.sampler.build(rows)
        if tree is not None:
            batch = batch.at((step.plan.positions[:, :1] + 1 + tree.depths).flatten())
        return self.sampler.sample(logits, batch)

    def _first_proposals(self, step: _Step) -> torch.Tensor | None:
        """Where nothing is drafted for now: what would have been, `[B, topk]`, to see whether drafting would pay."""
        if self.policy is None or self.drafter is None or step.shape.steps or not any(step.warm):
            return None
        params = [request.sampling for request in step.requests]
        return self.drafter.first_proposals(self.shape, step.plan.positions[:, 0] + 1, step.rows, params)

    def _extend(self, step: _Step, output: ForwardOutput, verdict: Verdict) -> None:
        """Rewrite the draft's rows along the kept branch from the target's features of it."""
        if self.drafter is None or not any(step.warm):
            return
        features = output.hidden
        assert features is not None, "the target captured no features for the draft"
        plan, slots, count = step.plan, step.slots, verdict.path.shape[1]
        if step.tree is not None:
            firsts = torch.arange(plan.num_requests, device=self._device)[:, None] * step.shape.num_nodes
            features = features.index_select(0, (firsts + verdict.path).flatten())
            plan, slots = plan.first(count), slots[:, :count]
        self.drafter.extend(plan, step.rows, slots, verdict.tokens, features, verdict.accept_len)

    def _commit(
        self,
        step: _Step,
        sampled: SampleOutput,
        verdict: Verdict,
        first_proposals: torch.Tensor | None,
        path: str,
    ) -> StepResult:
        """Append what was accepted: the one place of a step where the host waits for the device."""
        num_rows = verdict.path.shape[1]
        bad_before = sampled.bad_rows.view(step.tokens.shape).gather(1, verdict.path).long().cumsum(dim=1)
        good_rows = (bad_before == 0).sum(dim=1)
        parts = [verdict.tokens, verdict.path, verdict.accept_len[:, None], good_rows[:, None]]
        if first_proposals is not None:
            parts.append((first_proposals == verdict.tokens[:, :1]).any(dim=1, keepdim=True))
        host = torch.cat(parts, dim=1).tolist()
        tokens, is_bad, accept_lens, paths = [], [], [], []
        for request, row in zip(step.requests, host, strict=True):
            accepted, good = row[2 * num_rows : 2 * num_rows + 2]
            accept_lens.append(accepted)
            is_bad.append(good < accepted)
            paths.append(row[num_rows : 2 * num_rows])
            tokens.append(self._commit_one(request, row[: min(accepted, good)]))
        if self.policy is not None:
            would_match = None if first_proposals is None else [row[-1] for row in host]
            self._observe(self.policy, step.useful_rows - 1, step.warm, accept_lens, would_match)
        return StepResult(
            tokens=tokens,
            logprobs=_logprobs_of(step.requests, tokens, paths, sampled, step.shape.num_nodes),
            accept_lens=accept_lens,
            drafted=[num_offered(step.shape, step.useful_rows) if is_warm else 0 for is_warm in step.warm],
            is_bad=is_bad,
            path=path,
        )

    def _observe(
        self,
        policy: StepPolicy,
        most: int,
        warm: Sequence[bool],
        accept_lens: Sequence[int],
        would_match: Sequence[int] | None,
    ) -> None:
        """Tell the policy what became of the drafts, at most `most`, of the warm requests, or of those that were not
        offered."""
        if would_match is not None:
            kept = [matched for matched, is_warm in zip(would_match, warm, strict=True) if is_warm]
            policy.observe(sum(kept), len(kept))
        else:
            kept = [length - 1 for length, is_warm in zip(accept_lens, warm, strict=True) if is_warm]
            policy.observe(sum(kept), sum(min(count + 1, most) for count in kept))

    def _commit_one(self, request: Request, tokens: list[int]) -> list[int]:
        warmth = self._warm.get(request) if self.is_warm(request) else None
        count = request.append(tokens, self._eos) if tokens else 0
        request.num_computed = request.num_tokens - 1
        if warmth is not None:
            warmth.covered += count
            assert warmth.covered == request.num_computed, (
                f"{request!r}: draft KV covers {warmth.covered} rows"
            )
        return tokens[:count]

    def __repr__(self) -> str:
        return f"<SpecDecoder {self.shape if self.drafter is not None else PLAIN}, {len(self._warm)} drafted for>"


def _logprobs_of(
    requests: Sequence[Request],
    tokens: Sequence[list[int]],
    paths: Sequence[list[int]],
    sampled: SampleOutput,
    num_rows: int,
) -> list[list[TokenLogprob]]:
    if sampled.logprobs is None or sampled.top_ids is None or sampled.top_logprobs is None:
        return [[] for _ in requests]
    chosen, ids, values = sampled.logprobs.tolist(), sampled.top_ids.tolist(), sampled.top_logprobs.tolist()
    out = []
    for b, (request, committed) in enumerate(zip(requests, tokens, strict=True)):
        wanted = request.sampling.logprobs
        rows = [b * num_rows + node for node in paths[b][: len(committed)]] if wanted >= 0 else []
        out.append(
            [
                TokenLogprob(
                    logprob=chosen[r], top=list(zip(ids[r][:wanted], values[r][:wanted], strict=True))
                )
                for r in rows
            ]
        )
    return out
