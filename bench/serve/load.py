"""Schedules the requests of `baton bench serve`. The clock is the event loop's.

closed loop   `width` clients; each sends its next request when its answer is complete. A slow endpoint gets
              fewer requests: this measures capacity, and latency at a given concurrency
open loop     requests start at the times of a Poisson process, independent of earlier requests. Latency
              counts from these times and not from the actual send, so a stall of either side is included (no
              coordinated omission, G. Tene)

A client of a closed loop goes through a conversation turn by turn. In an open loop the Poisson process starts
conversations; a later turn is due when the answer before it is complete. A failed turn ends its conversation.

Where conversations take turns with each other, a client of a closed loop sends the next turn of the
conversation that has waited longest. Between two turns of a conversation lies one of each other, so a
server's cache is full of those.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from .client import TimedCall
from .prompts import Question

Ask = Callable[[Question, float], Awaitable[TimedCall]]
NEVER = float("inf")


@dataclass(frozen=True, kw_only=True)
class Level:
    """One load: `rate` requests per second in an open loop, or with `rate` 0 `width` clients in a closed
    loop."""

    width: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        return f"{self.rate:g} req/s" if self.rate else f"{self.width} clients"


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The end of a run: a number of requests or a time in seconds, whichever comes first.

    Requests that have begun by then are completed.
    """

    num_requests: float = NEVER
    seconds: float = NEVER


@dataclass(eq=False)
class Run:
    """One run of a level."""

    level: Level
    began: float
    calls: list[TimedCall] = field(default_factory=list)  # finished calls in the order of their ends
    num_begun: int = 0
    num_planned: int = 0  # begun, and later turns of conversations that have begun
    until: float = 0.0  # seconds that an open loop lasts at least, also if its last request ended earlier

    @property
    def num_running(self) -> int:
        return self.num_begun - len(self.calls)

    @property
    def num_errors(self) -> int:
        return sum(bool(call.error) for call in self.calls)

    def is_over(self, bound: Bound) -> bool:
        """Whether no further conversation may begin."""
        return self.num_planned >= bound.num_requests or self.seconds >= bound.seconds

    @property
    def seconds(self) -> float:
        """Seconds since the begin."""
        return asyncio.get_running_loop().time() - self.began

    async def converse(self, ask: Ask, question: Question, due: float, bound: Bound) -> None:
        """Sends a request and the later turns of its conversation, as many as `bound` has left.

        The turns are planned at once. A turn that may not begin any more, or follows a failed one, is not.
        """
        left = bound.num_requests - self.num_planned
        turns = [
            turn for number, turn in enumerate((question, *question.then)) if number == 0 or number < left
        ]
        self.num_planned += len(turns)
        has_failed = False
        answers: list[list[int]] = []
        for number, turn in enumerate(turns):
            if number and (has_failed or self.seconds >= bound.seconds):
                self.num_planned -= len(turns) - number
                return
            self.num_begun += 1
            call = await ask(turn.behind(answers), due)
            call.turn = number
            answers.append(call.ids)
            self.calls.append(call)
            has_failed, due = bool(call.error), self.began + self.seconds


async def drive(
    run: Run,
    questions: Iterator[Question],
    ask: Ask,
    bound: Bound,
    rng: random.Random,
    *,
    takes_turns: bool = False,
) -> Run:
    """Runs one level until `bound` and the end of the last answer.

    `takes_turns`: in a closed loop conversations take turns with each other.
    """
    loop = _open if run.level.rate else _rotating if takes_turns else _closed
    await loop(run, questions, ask, bound, rng)
    return run


def begin(level: Level) -> Run:
    """Starts a run of `level` now."""
    return Run(level, asyncio.get_running_loop().time())


async def _closed(
    run: Run, questions: Iterator[Question], ask: Ask, bound: Bound, rng: random.Random
) -> None:
    clock = asyncio.get_running_loop().time

    async def client() -> None:
        while not run.is_over(bound):
            await run.converse(ask, next(questions), clock(), bound)

    await asyncio.gather(*(client() for _ in range(run.level.width)))


async def _rotating(
    run: Run, questions: Iterator[Question], ask: Ask, bound: Bound, rng: random.Random
) -> None:
    clock = asyncio.get_running_loop().time
    # the answers of each so far, and all its turns
    waiting: deque[tuple[list[list[int]], tuple[Question, ...]]] = deque()
    while run.num_planned < bound.num_requests:
        question = next(questions)
        left = int(min(bound.num_requests - run.num_planned, 1 + len(question.then)))
        waiting.append(([], (question, *question.then)[:left]))
        run.num_planned += left

    async def client() -> None:
        while waiting and run.seconds < bound.seconds:
            answers, turns = waiting.popleft()
            run.num_begun += 1
            call = await ask(turns[len(answers)].behind(answers), clock())
            call.turn = len(answers)
            run.calls.append(call)
            answers.append(call.ids)
            if len(answers) < len(turns) and not call.error:
                waiting.append((answers, turns))

    await asyncio.gather(*(client() for _ in range(run.level.width)))


async def _open(run: Run, questions: Iterator[Question], ask: Ask, bound: Bound, rng: random.Random) -> None:
    clock = asyncio.get_running_loop().time
    due = run.began
    begun: list[asyncio.Future[None]] = []
    while run.num_planned < bound.num_requests:
        due += rng.expovariate(run.level.rate)
        if due - run.began >= bound.seconds:
            run.until = run.began + bound.seconds
            break
        await asyncio.sleep(max(0.0, due - clock()))
        if run.num_planned < bound.num_requests:
            begun.append(asyncio.ensure_future(run.converse(ask, next(questions), due, bound)))
            await asyncio.sleep(0)  # it plans its turns
    await asyncio.gather(*begun)


async def tell(run: Run, bound: Bound, show: Callable[[float, str], None], every_s: float) -> None:
    """Shows the share of `bound` that is done, and figures, every `every_s` seconds until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        tokens = sum(call.num_output for call in run.calls)
        elapsed = max(run.seconds, 1e-9)
        share = max(len(run.calls) / bound.num_requests, elapsed / bound.seconds)
        show(
            share,
            f"{len(run.calls)} ended, {run.num_running} running, {run.num_errors} errors, "
            f"{tokens / elapsed:.0f} tokens/s",
        )
