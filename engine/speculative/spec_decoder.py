"""One decode step of a batch: draft -> verify -> sample -> accept -> commit -> draft extend.

Without a drafter, or when no request of the batch is warm, a step is plain decode with one row per request.
Shape legend: B requests, N rows each (N-1 drafts), K captured features, Ht target hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..forward_batch import CaptureHidden, ForwardMode, ForwardOutput
from ..model_runner import ModelRunner
from ..request import Request
from ..sampler import SampleOutput, Sampler, sampling_rows
from .chain import ChainPlan, chain_batch, plan_chain
from .draft_state import PAD_ROW
from .draft_worker import DraftPrefill, DraftWorker
from .verify import accept


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Of the model's own distribution: the chosen token's log probability and the likeliest (id, log probability)."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step gave each request, in the order of the batch.

    `tokens` committed this step (already appended to the request). `logprobs`, per token, is empty for a request that
    asks for none. `accept_lens` counts what verify accepted, `drafted` how many drafts were offered: both before an
    end inside the block cut it. `is_bad`: the model's logits were not finite; fail the request.
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


class SpecDecoder:
    """Runs decode steps on `runner` and, when given, `drafter`; `steps` drafts are verified per step.

    The caller reserves pages for prompt + max_new_tokens + steps + 1 tokens, within `max_context`; where a request has
    less, the rows beyond go to the padding sink and are never accepted. Pages are shared by target and draft KV.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        *,
        drafter: DraftWorker | None = None,
        steps: int = 3,
        eos_token_ids: Sequence[int] = (),
        max_context: int,
    ) -> None:
        if steps < 0:
            raise ValueError(f"spec_steps {steps}: use 0 (no drafts) or more")
        self.runner = runner
        self.sampler = sampler
        self.drafter = drafter
        self.steps = steps
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
        assert end < request.num_tokens, f"{request!r}: draft row {end - 1} needs token {end}, which is not there yet"
        warmth = self._warm.get(request)
        if warmth is None:
            warmth = self._warm[request] = _Warmth(row=drafter.states.open(), covered=start)
        assert start <= warmth.covered, f"{request!r}: draft rows {warmth.covered}..{start - 1} would stay unwritten"
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
        warm = [self.is_warm(request) for request in requests]
        useful_rows = self._rows_per_request(requests, warm)
        plan = plan_chain(
            requests,
            self._rows_to_run(len(requests), useful_rows, any(warm)),
            page_size=self._page_size,
            max_context=self.max_context,
            device=self._device,
            useful_rows=useful_rows,
        )
        rows, slots = self._draft_places(requests, warm, plan)
        drafts = self._draft(requests, plan, rows, slots)
        output = self._verify(requests, plan, drafts, any(warm))
        sampled = self._sample(requests, plan, drafts, output.logits)
        targets = sampled.tokens.view(plan.num_requests, plan.num_rows)
        accept_len = torch.minimum(accept(targets, drafts), plan.limits)
        if self.drafter is not None and any(warm):
            assert output.hidden is not None, "the target captured no features for the draft"
            self.drafter.extend(plan, rows, slots, targets, output.hidden, accept_len)
        offered = [useful_rows - 1 if is_warm else 0 for is_warm in warm]
        return self._commit(requests, plan, offered, sampled, accept_len, output.path)

    def _rows_per_request(self, requests: Sequence[Request], warm: Sequence[bool]) -> int:
        """N: no more rows than the request with the most output left can use."""
        if not any(warm):
            return 1
        most_left = max(r.num_remaining for r, is_warm in zip(requests, warm, strict=True) if is_warm)
        return 1 + min(self.steps, most_left - 1)

    def _rows_to_run(self, num_requests: int, useful_rows: int, is_drafting: bool) -> int:
        """As many rows as the graphs have, where they take this batch; else no more than are useful."""
        graphs = self.runner.graphs.verify if self.runner.graphs is not None else None
        if graphs is None or graphs.rows.num_rows != (1 + self.steps if is_drafting else 1):
            return useful_rows
        return graphs.rows.num_rows if graphs.takes(num_requests) else useful_rows

    def _draft_places(
        self, requests: Sequence[Request], warm: Sequence[bool], plan: ChainPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft state rows `[B]` and draft KV slots `[B, N]`; a cold request keeps neither state nor KV."""
        rows = [self._warm[r].row if is_warm else PAD_ROW for r, is_warm in zip(requests, warm, strict=True)]
        is_kept = torch.tensor(warm, dtype=torch.bool, device=self._device)
        return torch.tensor(rows, dtype=torch.int64, device=self._device), torch.where(is_kept[:, None], plan.slots, 0)

    def _draft(
        self, requests: Sequence[Request], plan: ChainPlan, rows: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        if self.drafter is None or plan.num_rows == 1:
            return torch.empty((plan.num_requests, 0), dtype=torch.int64, device=self._device)
        return self.drafter.propose(plan, rows, slots, [request.sampling for request in requests])

    def _verify(
        self, requests: Sequence[Request], plan: ChainPlan, drafts: torch.Tensor, is_captured: bool
    ) -> ForwardOutput:
        newest = torch.tensor([request.bonus_token for request in requests], dtype=torch.int64, device=self._device)
        batch = chain_batch(
            plan,
            torch.cat((newest[:, None], drafts), dim=1),
            mode=ForwardMode.TARGET_VERIFY if plan.num_rows > 1 else ForwardMode.DECODE,
            capture=CaptureHidden.FULL if is_captured else CaptureHidden.NULL,
        )
        return self.runner.forward(batch)

    def _sample(
        self, requests: Sequence[Request], plan: ChainPlan, drafts: torch.Tensor, logits: torch.Tensor
    ) -> SampleOutput:
        # Only penalties look at a row's own prefix of drafts; without them the host need not wait for the drafts.
        if any(request.sampling.needs_penalties for request in requests):
            prefixes = drafts.tolist()
        else:
            prefixes = [[0] * (plan.num_rows - 1)] * plan.num_requests
        rows = [row for r, prefix in zip(requests, prefixes, strict=True) for row in sampling_rows(r, prefix)]
        return self.sampler.sample(logits, self.sampler.build(rows))

    def _commit(
        self,
        requests: Sequence[Request],
        plan: ChainPlan,
        offered: list[int],
        sampled: SampleOutput,
        accept_len: torch.Tensor,
        path: str,
    ) -> StepResult:
        shape = (plan.num_requests, plan.num_rows)
        bad_before = sampled.bad_rows.view(shape).long().cumsum(dim=1)
        good_rows = (bad_before == 0).sum(dim=1)
        host = torch.cat((sampled.tokens.view(shape), accept_len[:, None], good_rows[:, None]), dim=1).tolist()
        tokens, is_bad, accept_lens = [], [], []
        for request, row in zip(requests, host, strict=True):
            accepted, good = row[-2], row[-1]
            accept_lens.append(accepted)
            is_bad.append(good < accepted)
            tokens.append(self._commit_one(request, row[: min(accepted, good)]))
        logprobs = _logprobs_of(requests, tokens, sampled, plan.num_rows)
        return StepResult(
            tokens=tokens, logprobs=logprobs, accept_lens=accept_lens, drafted=offered, is_bad=is_bad, path=path
        )

    def _commit_one(self, request: Request, tokens: list[int]) -> list[int]:
        warmth = self._warm.get(request) if self.is_warm(request) else None
        count = request.append(tokens, self._eos) if tokens else 0
        request.num_computed = request.num_tokens - 1
        if warmth is not None:
            warmth.covered += count
        return tokens[:count]

    def __repr__(self) -> str:
        return f"<SpecDecoder {self.steps if self.drafter is not None else 0} steps, {len(self._warm)} drafted for>"


def _logprobs_of(
    requests: Sequence[Request], tokens: Sequence[list[int]], sampled: SampleOutput, num_rows: int
) -> list[list[TokenLogprob]]:
    if sampled.logprobs is None or sampled.top_ids is None or sampled.top_logprobs is None:
        return [[] for _ in requests]
    chosen, ids, values = sampled.logprobs.tolist(), sampled.top_ids.tolist(), sampled.top_logprobs.tolist()
    out = []
    for b, (request, committed) in enumerate(zip(requests, tokens, strict=True)):
        wanted = request.sampling.logprobs
        rows = range(b * num_rows, b * num_rows + len(committed)) if wanted >= 0 else range(0)
        out.append(
            [
                TokenLogprob(logprob=chosen[r], top=list(zip(ids[r][:wanted], values[r][:wanted], strict=True)))
                for r in rows
            ]
        )
    return out
