"""A decoder whose host works one step late: step N+1 is launched before step N is read.

    launch   step N+1, behind step N on the device; all that it needs is in the step state there
    read     step N: its tokens, already on the host or soon; appended to the requests that still want them

A request that ends with step N was in step N+1 too. What that computed for it is dropped, and what it wrote lies behind the
request's tokens, in pages and a slot that are given back once step N+1 was read. Requests that the device cannot sample for
(`host_reason`) are stepped by `SpecDecoder.step`, with nothing under way; how often and why is counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...model_runner import ModelRunner
from ...request import Request
from ...sampling.choose import needs_ranking
from ...sampling.params import SamplingParams
from ...sampling.sampler import Sampler
from ..adaptive import StepPolicy
from ..drafters.eagle3 import DraftWorker
from ..drafters.states import PAD_ROW
from ..drafting.shape import PLAIN, DraftShape, planned_pages
from ..spec_decoder import SpecDecoder, StepResult, num_offered
from .device_state import Joining, StepState
from .fused_step import ACCEPTED, GOOD, SEEN, WOULD_MATCH, StepBody, StepKind
from .step_graphs import DeviceSteps, Report


def host_reason(params: SamplingParams) -> str | None:
    """Why a request with `params` is sampled for with the host's help; None where it is not."""
    for is_so, reason in (
        (params.needs_penalties, "penalties"),
        (bool(params.logit_bias), "logit_bias"),
        (params.logprobs >= 0, "logprobs"),
        (params.min_new_tokens > 0, "min_tokens"),
        (bool(params.grammar), "guided"),
    ):
        if is_so:
            return reason
    return None


def device_steps(
    runner: ModelRunner,
    drafter: DraftWorker | None,
    *,
    shapes: Sequence[DraftShape],
    watched: DraftShape | None = None,
    max_requests: int,
    max_context: int,
    make: type[DeviceSteps] = DeviceSteps,
) -> DeviceSteps:
    """Steps of any of `shapes`, and plain ones, for up to `max_requests` requests of up to `max_context` tokens.

    `watched`: the shape whose first proposals are compared where nothing is drafted.
    """
    every = list(dict.fromkeys([*shapes, PLAIN]))
    max_pages = planned_pages(every, max_context, runner.pool.page_size)
    state = StepState(max_requests + 1, max_pages, runner.model.config.vocab_size, runner.pool.device)
    if drafter is not None:
        drafter.states.reserve(max_requests)
    kinds = [
        kind_of(shape, is_ranked=is_ranked, watched=watched) for shape in every for is_ranked in (False, True)
    ]
    return make(StepBody(runner, drafter, state, max_context), kinds, max_requests)


def kind_of(shape: DraftShape, *, is_ranked: bool, watched: DraftShape | None) -> StepKind:
    return StepKind(shape=shape, is_ranked=is_ranked, watched=None if shape.steps else watched)


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A step that was launched and not read: whom it steps, who of them is drafted for, and where its report will be."""

    requests: tuple[Request, ...]
    warm: tuple[bool, ...]
    kind: StepKind
    report: Report


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Whom the newest step steps, and what follows from it alone."""

    requests: Sequence[Request]
    slots: tuple[int, ...]
    warm: tuple[bool, ...]
    is_ranked: bool


_NOBODY = _Batch(requests=(), slots=(), warm=(), is_ranked=False)


class OverlappedDecoder(SpecDecoder):
    """A `SpecDecoder` that can launch `steps` ahead of reading them; arguments besides as there.

    Between `launch` and the `read` of the same flight no request in it may be forgotten. `fallbacks` counts, by reason, the
    batches that could not be launched ahead.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        *,
        steps: DeviceSteps,
        drafter: DraftWorker | None = None,
        shape: DraftShape | None = None,
        policy: StepPolicy | None = None,
        eos_token_ids: Sequence[int] = (),
        max_context: int,
    ) -> None:
        super().__init__(
            runner,
            sampler,
            drafter=drafter,
            shape=shape,
            policy=policy,
            eos_token_ids=eos_token_ids,
            max_context=max_context,
        )
        self.steps = steps
        self.fallbacks: Counter[str] = Counter()
        self.num_launched = 0
        self._slots: dict[Request, int] = {}
        self._stale: set[Request] = set()  # those whom the host has stepped since the device heard of them
        self._unseen: set[Request] = set()  # those whose support was wider than what the device looks at
        self._batch = _NOBODY

    @property
    def counters(self) -> dict[str, float]:
        fallbacks = {
            f"overlap_fallback_{reason}": float(count) for reason, count in sorted(self.fallbacks.items())
        }
        return fallbacks | {"overlapped_steps": float(self.num_launched)}

    def can_launch(self, requests: Sequence[Request]) -> bool:
        """Whether `requests` can be stepped without the host; if not, the reason is counted."""
        if self._is_known(requests):
            return True
        for request in requests:
            reason = "nucleus" if request in self._unseen else host_reason(request.sampling)
            if reason is not None:
                self.fallbacks[reason] += 1
                return False
        return True

    def launch(self, requests: Sequence[Request]) -> Flight:
        """Begin a step of `requests`, which `can_launch`; each may be in one flight that was not read yet."""
        if not self._is_known(requests):
            self._batch = self._gather(requests)
        batch, shape = self._batch, PLAIN
        if self.drafter is not None and any(batch.warm):
            shape = self.shape if self.policy is None else self.policy.choose(len(requests))
        watched = self.shape if self.policy is not None and self.drafter is not None else None
        kind = kind_of(shape, is_ranked=batch.is_ranked, watched=watched)
        self.num_launched += 1
        report = self.steps.launch(batch.slots, kind)
        return Flight(requests=tuple(requests), warm=batch.warm, kind=kind, report=report)

    def read(self, flight: Flight, is_live: Sequence[bool]) -> StepResult:
        """Wait for `flight`, the oldest not read, and commit its tokens to those of its requests that are live.

        The result is of these only. A request may get no token: its support was not seen whole, and it will be stepped by
        the host next.
        """
        width, shape = flight.kind.shape.num_path, flight.kind.shape
        found = [
            (request, row, is_warm)
            for request, row, is_warm, live in zip(
                flight.requests, flight.report.rows(), flight.warm, is_live, strict=True
            )
            if live
        ]
        warm = [is_warm for *_, is_warm in found]
        most_left = max((request.num_remaining for request, _, is_warm in found if is_warm), default=1)
        useful_rows = min(shape.num_path, most_left)
        tokens, accept_lens, is_bad = [], [], []
        for request, row, _ in found:
            accepted, good, seen = (row[width + column] for column in (ACCEPTED, GOOD, SEEN))
            if seen < min(accepted, good):
                self._unseen.add(request)
                self._batch = _NOBODY
            accept_lens.append(min(accepted, useful_rows))
            is_bad.append(good < accepted and good <= seen)
            tokens.append(self._commit_one(request, row[: min(accepted, good, seen)]))
        self._tell_policy(flight, useful_rows, [(row, is_warm) for _, row, is_warm in found])
        offered = num_offered(shape, useful_rows)
        return StepResult(
            tokens=tokens,
            logprobs=[[] for _ in found],
            accept_lens=accept_lens,
            drafted=[offered if is_warm else 0 for is_warm in warm],
            is_bad=is_bad,
            path=flight.report.path,
        )

    def step(self, requests: Sequence[Request]) -> StepResult:
        """As `SpecDecoder.step`; none of `requests` may be in a flight."""
        self._stale.update(request for request in requests if request in self._slots)
        self._batch = _NOBODY
        return super().step(requests)

    def forget(self, request: Request) -> None:
        super().forget(request)
        slot = self._slots.pop(request, None)
        if slot is not None:
            self.steps.body.state.close(slot)
        self._stale.discard(request)
        self._unseen.discard(request)

    def _is_known(self, requests: Sequence[Request]) -> bool:
        return requests == self._batch.requests and requests != ()

    def _gather(self, requests: Sequence[Request]) -> _Batch:
        """The batch of `requests`, after telling the device of those that it does not know, or not any more."""
        state = self.steps.body.state
        joining = [request for request in requests if request not in self._slots or request in self._stale]
        for request in joining:
            if request not in self._slots:
                self._slots[request] = state.open()
        if joining:
            state.write(
                [self._slots[request] for request in joining], [self._joining(request) for request in joining]
            )
        self._stale.difference_update(joining)
        return _Batch(
            requests=list(requests),
            slots=tuple(self._slots[request] for request in requests),
            warm=tuple(self._is_drafted(request) for request in requests),
            is_ranked=any(needs_ranking(request.sampling, state.vocab_size) for request in requests),
        )

    def _joining(self, request: Request) -> Joining:
        return Joining(
            newest=request.bonus_token,
            length=request.num_tokens - 1,
            remaining=request.num_remaining,
            capacity=min(len(request.pages) * self._page_size, self.max_context),
            draft_row=self._warm[request].row if self._is_drafted(request) else PAD_ROW,
            pages=request.pages,
            sampling=request.sampling,
        )

    def _is_drafted(self, request: Request) -> bool:
        return self.drafter is not None and self.is_warm(request)

    def _tell_policy(self, flight: Flight, useful_rows: int, found: Sequence[tuple[list[int], bool]]) -> None:
        """What became of the drafts of the requests that got a token; `found`: each one's row and whether it is warm."""
        width = flight.kind.shape.num_path
        told = [(row, is_warm) for row, is_warm in found if row[width + ACCEPTED] > 0]
        if self.policy is None or not any(is_warm for _, is_warm in told):
            return
        accept_lens = [min(row[width + ACCEPTED], useful_rows) for row, _ in told]
        would_match = (
            [row[width + WOULD_MATCH] for row, _ in told] if flight.kind.watched is not None else None
        )
        self._observe(
            self.policy, useful_rows - 1, [is_warm for _, is_warm in told], accept_lens, would_match
        )

    def __repr__(self) -> str:
        return f"<OverlappedDecoder {self.num_launched} launched, fallbacks {dict(self.fallbacks)}, {self.steps!r}>"
