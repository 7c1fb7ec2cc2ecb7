"""Which waiting prompts go into the next forward, and with how many tokens, by an objective for first tokens.
Pure.

    on time   of each class the largest number of prompts whose first tokens can be in time (Moore, "An n Job,
              One Machine Sequencing Algorithm for Minimizing the Number of Late Jobs", 1968)
    order     among these the sum of their waits is least while all of them stay in time (Smith, "Various
              Optimizers for Single-Stage Production", 1956): short prompts go first where long ones can
              bear it
    late      the others, by rank, behind the prompts of their class that are on time. The first of them gets
              LATE_SHARE of the tokens, unless a more urgent class waits that has arrived shortly before or
              after it (`request_rank`)

A forward takes FORWARD_SHARE of the objective at most, so a prompt that comes meanwhile may still be in time.
Prompts that end in a forward get no company that would make them late.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..cluster.protocol.request_rank import rank
from ..cluster.telemetry.linear_fit import LinearFit
from .room import WorkerRoom

LATE_SHARE = 0.25  # of the tokens of all forwards, for the first late prompt
FORWARD_SHARE = 0.25  # of the objective, that one forward may take

T = TypeVar("T")
R = TypeVar("R", bound=WorkerRoom)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt(Generic[T]):
    """A prompt that waits. `tokens`: those to compute. `due`: when its first token should be there, monotonic
    seconds. `priority`: of its class, lower is more urgent.
    """

    item: T
    tokens: int
    arrived: float
    due: float
    priority: int = 0

    @property
    def rank(self) -> float:
        """As `request_rank.rank`."""
        return rank(self.arrived, self.priority)


@dataclass(frozen=True, kw_only=True)
class Share(Generic[T]):
    """The next `tokens` of a prompt."""

    item: T
    tokens: int


class ForwardPace:
    """The seconds of a forward over prompts, as a line over its tokens that follows the measured ones."""

    def __init__(self) -> None:
        self._line = LinearFit()

    def __repr__(self) -> str:
        return f"<ForwardPace {self._line!r}>"

    @property
    def is_known(self) -> bool:
        """Whether enough forwards were measured."""
        return self._line.is_known

    def saw(self, tokens: int, seconds: float) -> None:
        """A forward of `tokens` kept the device busy for so long."""
        self._line.add(tokens, seconds)

    def seconds(self, tokens: int) -> float:
        """The time of one forward; 0 while nothing is known."""
        return self._line.at(tokens) if self.is_known else 0.0

    def behind(self, num_before: int) -> Callable[[int], float] | None:
        """The time of tokens that are computed behind `num_before` others, by their number; None while
        nothing is known.
        """
        return (lambda tokens: self.seconds(num_before + tokens)) if self.is_known else None

    def tokens_within(self, seconds: float, most: int) -> int:
        """Tokens of the largest forward that takes so long, up to `most`. It computes for at least as long as
        it takes to begin: smaller forwards would waste more than half of the device.
        """
        if not self.is_known or most <= 1:
            return most
        fixed = self._line.at(0)
        slope = (self._line.at(most) - fixed) / most
        if slope <= 0:
            return most
        return max(1, min(most, int(max(seconds - fixed, fixed) / slope)))


class FirstTokenPlan:
    """Plans forwards for first tokens within `slo_s` seconds of a request's arrival at its router."""

    def __init__(self, slo_s: float) -> None:
        assert slo_s > 0, slo_s
        self.slo_s = slo_s
        self.pace = ForwardPace()
        self._owed = 0.0  # tokens that late prompts may take before others, in forwards with no part for them

    def __repr__(self) -> str:
        return f"<FirstTokenPlan within {self.slo_s:g} s, {self.pace!r}>"

    def prompt(self, room: R, tokens: int) -> Prompt[R]:
        """The prompt of a room, of which `tokens` are to be computed."""
        arrived = room.arrived - room.waited
        return Prompt(
            item=room, tokens=tokens, arrived=arrived, due=arrived + self.slo_s, priority=room.priority
        )

    def budget(self, most: int) -> int:
        """Tokens of the next forward, at most `most`."""
        return self.pace.tokens_within(FORWARD_SHARE * self.slo_s, most)

    def order(
        self, prompts: Iterable[Prompt[T]], budget: int, now: float
    ) -> tuple[list[Prompt[T]], Prompt[T] | None]:
        """All prompts as they should be computed, and the late one that is owed a share; None if none is.

        `budget`: tokens of a forward.
        """
        waiting = list(prompts)
        ordered, late = self._sorted(waiting, budget, now, 1.0)
        owed = _first_late(ordered, late)
        if owed is not None:  # the others get less
            ordered, late = self._sorted(waiting, budget, now, 1.0 - LATE_SHARE)
            owed = _first_late(ordered, late)
        return ordered, owed

    def fill(
        self,
        ordered: Sequence[Prompt[T]],
        owed: Prompt[T] | None,
        *,
        budget: int,
        most: int,
        now: float,
        is_cut: bool = True,
    ) -> list[Share[T]]:
        """The forward: `budget` tokens of at most `most` prompts of `ordered`, in this order.

        `is_cut`: prompts may be computed in parts; else each is computed in one forward, whatever its size.
        """
        if not ordered:
            return []
        if not is_cut:
            return self._whole(ordered, owed, budget=budget, most=most)
        if most == 1:
            return [self._in_turn(ordered[0], owed, budget)]
        kept = 0
        if owed is not None and owed is not ordered[0]:
            kept = min(owed.tokens, max(1, int(LATE_SHARE * budget)))
        left, shares, places = budget - kept, list[tuple[Prompt[T], int]](), most - (kept > 0)
        for prompt in ordered:
            if left <= 0 or len(shares) >= places:
                break
            if not kept or prompt is not owed:
                shares.append((prompt, min(prompt.tokens, left)))
                left -= shares[-1][1]
        shares, left = self._without_burden(shares, kept, now), max(0, left)
        if kept and owed is not None:
            shares.append((owed, min(owed.tokens, kept + left)))
        return [Share(item=prompt.item, tokens=tokens) for prompt, tokens in shares]

    def _in_turn(self, first: Prompt[T], owed: Prompt[T] | None, budget: int) -> Share[T]:
        """A forward of one prompt: `first`, or the late one when that is owed as much."""
        turn, has_turn = first, False
        if owed is None or owed is first:
            self._owed = 0.0
        else:
            taken = min(owed.tokens, budget)
            has_turn = self._owed + LATE_SHARE * taken >= taken
            turn = owed if has_turn else first
            self._owed += LATE_SHARE * min(turn.tokens, budget) - taken * has_turn
        return Share(item=turn.item, tokens=min(turn.tokens, budget))

    def _whole(
        self, ordered: Sequence[Prompt[T]], owed: Prompt[T] | None, *, budget: int, most: int
    ) -> list[Share[T]]:
        first = ordered[0]
        if owed is None:
            self._owed = 0.0
        elif self._owed >= min(owed.tokens, budget):
            self._owed -= owed.tokens
            first = owed
        shares, left = [Share(item=first.item, tokens=first.tokens)], budget - first.tokens
        for prompt in ordered:
            if left <= 0 or len(shares) >= most:
                break
            if prompt is not first and prompt.tokens <= left:
                shares.append(Share(item=prompt.item, tokens=prompt.tokens))
                left -= prompt.tokens
        if owed is not None and first is not owed:
            self._owed += LATE_SHARE * (budget - left)
        return shares

    def _without_burden(
        self, shares: list[tuple[Prompt[T], int]], kept: int, now: float
    ) -> list[tuple[Prompt[T], int]]:
        """`shares` without those, from the end, that would make a prompt late that ends in the forward.

        `kept`: tokens of the forward that are another prompt's.
        """
        total, due = kept, float("inf")
        for prompt, tokens in shares:
            total += tokens
            if tokens == prompt.tokens and now + self.pace.seconds(total) <= prompt.due:
                due = min(due, prompt.due)
        if now + self.pace.seconds(total) <= due:
            return shares
        left, found = self.pace.tokens_within(due - now, total) - kept, []
        for prompt, tokens in shares:
            taken = min(tokens, left)
            left -= taken
            if taken > 0:
                found.append((prompt, taken))
        return found

    def _sorted(
        self, waiting: list[Prompt[T]], budget: int, now: float, speed: float
    ) -> tuple[list[Prompt[T]], set[int]]:
        """The prompts as they should be computed, and the ids of the late ones."""
        ordered: list[Prompt[T]] = []
        late_ids: set[int] = set()
        token_s = self.pace.seconds(budget) / (budget * speed)
        start = now
        for priority in sorted({prompt.priority for prompt in waiting}):
            kind = [prompt for prompt in waiting if prompt.priority == priority]
            on_time, late = split_late(kind, start, token_s)
            ordered += shortest_first(on_time, start, token_s)
            ordered += sorted(late, key=lambda prompt: prompt.rank)
            late_ids.update(map(id, late))
            start += token_s * sum(prompt.tokens for prompt in kind)
        return ordered, late_ids


def split_late(
    prompts: Iterable[Prompt[T]], start: float, token_s: float
) -> tuple[list[Prompt[T]], list[Prompt[T]]]:
    """(the most prompts that can all end by their dues, the others).

    They are computed one after the other from `start` on, a token in `token_s` seconds. Of equally many on
    time, those of fewer tokens are kept.
    """
    on_time: list[tuple[int, int, Prompt[T]]] = []  # a heap, the longest first
    late: list[Prompt[T]] = []
    end = start
    for number, prompt in enumerate(sorted(prompts, key=lambda each: each.due)):
        heapq.heappush(on_time, (-prompt.tokens, -number, prompt))
        end += token_s * prompt.tokens
        if end > prompt.due:
            _, _, longest = heapq.heappop(on_time)
            end -= token_s * longest.tokens
            late.append(longest)
    return [prompt for _, _, prompt in on_time], late


def shortest_first(prompts: Sequence[Prompt[T]], start: float, token_s: float) -> list[Prompt[T]]:
    """`prompts` in the order with the least sum of ends in which all end by their dues, as they can."""
    by_due = sorted(prompts, key=lambda each: each.due)
    end = start + token_s * sum(prompt.tokens for prompt in prompts)
    may_be_last: list[tuple[int, float, int, Prompt[T]]] = []
    backwards: list[Prompt[T]] = []
    while by_due or may_be_last:
        while by_due and (by_due[-1].due >= end or not may_be_last):
            prompt = by_due.pop()
            heapq.heappush(may_be_last, (-prompt.tokens, -prompt.arrived, len(by_due), prompt))
        last = heapq.heappop(may_be_last)[-1]
        backwards.append(last)
        end -= token_s * last.tokens
    return backwards[::-1]


def _first_late(ordered: Sequence[Prompt[T]], late: set[int]) -> Prompt[T] | None:
    """The late prompt of the least rank, if it comes before the first one that would be computed."""
    found = min(
        (prompt for prompt in ordered if id(prompt) in late), key=lambda each: each.rank, default=None
    )
    return found if found is not None and found.rank <= ordered[0].rank else None
