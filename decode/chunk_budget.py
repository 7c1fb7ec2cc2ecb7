"""The prompt tokens that decode computes between two of its steps, by the gap that running streams may see.
Pure.

A gap is the time from the tokens of one step to those of the next. It is fitted as a line over the prompt
tokens that were computed in it. A margin above the line is the one that all gaps but TAIL stay below, so that
the tail of the gaps keeps the bound and not only their mean (the stochastic approximation of a quantile,
Robbins and Monro 1951). A stream of a prompt that was computed here also has the gap behind its token 1, in
which the device may take two steps.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from ..cluster.telemetry.linear_fit import LinearFit

SHARE = 0.95  # of the bound, that a gap is planned for
TAIL = 0.01  # of all gaps, that may be longer
RATE = 0.1  # of the bound, by which the margin moves with a step whose gaps are all longer
LEAST_TOKENS = 16  # prompts go on, however long the steps take
GROWTH = 1.1  # of a part over the largest recent one; SHARE leaves room for it
RECENT = 50  # parts
FIRST_TOKENS = 64  # before any cost is known
FORGET_S = 10.0  # a stream that has not been in a step for so long has ended


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The gaps that streams saw before one step: `seconds` since the step before, with `num_tokens` prompt
    tokens computed meanwhile. `firsts`: seconds since token 1, of the streams that have begun here.
    `num_streams`: all of them.
    """

    seconds: float
    num_tokens: int
    num_streams: int = 1
    firsts: tuple[float, ...] = ()


class ChunkBudget:
    """At most `most` tokens between two steps, fewer where a gap would exceed `slo_s` seconds.

    0: no bound. A part is never much larger than the recent ones, since gaps of parts of one size tell
    nothing of larger ones.
    """

    def __init__(self, most: int, slo_s: float) -> None:
        self.most = most
        self.slo_s = slo_s
        self._line = LinearFit()
        self._margin = 0.0
        self._parts: deque[int] = deque(maxlen=RECENT)

    def __repr__(self) -> str:
        return f"<ChunkBudget {self.tokens} of {self.most} tokens>"

    @property
    def tokens(self) -> int:
        """Prompt tokens of the next part while streams run."""
        if not self.slo_s:
            return self.most
        least = min(LEAST_TOKENS, self.most)
        if not (self._parts and self._line.is_known):
            return min(self.most, FIRST_TOKENS)
        fixed = self._line.at(0)
        slope = self.delay(self.most) / self.most
        left = self.slo_s * SHARE - fixed - self._margin
        if left <= 0:
            return least
        most = min(self.most, int(GROWTH * max(self._parts)) + 1)
        return max(least, most if left >= slope * most else int(left / slope))

    def delay(self, num_tokens: int) -> float:
        """Seconds by which so many prompt tokens lengthen a gap; 0 while that is not known."""
        if not (self._parts and self._line.is_known):
            return 0.0
        return self._line.at(num_tokens) - self._line.at(0)

    def saw(self, gap: Gap) -> None:
        """Learns from the gaps before a step."""
        self._line.add(gap.num_tokens, gap.seconds)
        if gap.num_tokens:
            self._parts.append(gap.num_tokens)
        most = self._line.at(gap.num_tokens) + self._margin
        num_longer = sum(first > most for first in gap.firsts)
        num_longer += (gap.num_streams - len(gap.firsts)) * (gap.seconds > most)
        share = num_longer / max(1, gap.num_streams)
        self._margin = max(0.0, self._margin + RATE * self.slo_s * (share - TAIL))


class StepGaps:
    """The gaps between the steps of running streams, with the prompt tokens computed in each.

    `launches_ahead`: when a step is read, the part of the next gap is launched already.
    """

    def __init__(self, *, launches_ahead: bool) -> None:
        self._launches_ahead = launches_ahead
        self._last: tuple[frozenset[tuple[str, int]], float] | None = None  # rooms and time of the last step
        self._known = self._due = 0  # prompt tokens launched until the last step; those of the next gap
        self._begun: dict[tuple[str, int], float] = {}  # streams that have token 1 only, and its time

    def __repr__(self) -> str:
        return f"<StepGaps {'none yet' if self._last is None else f'since {self._last[1]:.3f}'}>"

    def begin(self, rooms: Collection[tuple[str, int]], now: float) -> None:
        """Streams of prompts that were computed here have their token 1."""
        self._begun.update(dict.fromkeys(rooms, now))

    def step(self, rooms: Collection[tuple[str, int]], num_launched: int, now: float) -> Gap | None:
        """A step of `rooms` was read at `now`; `num_launched` counts prompt tokens since the start.

        Returns the gaps of these streams; None where the step before had none of them.
        """
        fresh, self._known = num_launched - self._known, num_launched
        tokens, self._due = (self._due, fresh) if self._launches_ahead else (fresh, 0)
        begun, self._begun = self._begun, {}
        firsts = tuple(now - begun[room] for room in rooms if room in begun)
        self._begun = {room: at for room, at in begun.items() if room not in rooms and now - at < FORGET_S}
        last, self._last = self._last, (frozenset(rooms), now)
        if last is None or last[0].isdisjoint(rooms):
            return None
        return Gap(seconds=now - last[1], num_tokens=tokens, num_streams=len(rooms), firsts=firsts)
