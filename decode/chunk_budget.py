"""The prompt tokens that decode computes between two of its steps, by the gap that running streams may see.
Pure.

A gap is the time from the tokens of one step to those of the next. It is fitted as a line over the prompt
tokens that were computed in it. A margin above the line grows with gaps that were longer than the line says,
so that the bound holds for the longest gaps, and not only for their mean.
"""

from collections import deque
from collections.abc import Collection

from ..cluster.telemetry.linear_fit import LinearFit

SHARE = 0.9  # of the bound, that a gap is planned for
RISE = 0.3  # share by which the margin follows a gap above it
FALL = 0.02  # share by which it shrinks with every other gap
LEAST_TOKENS = 16  # prompts go on, however long the steps take
GROWTH = 1.1  # of a part over the largest recent one; SHARE leaves room for it
RECENT = 50  # parts
FIRST_TOKENS = 64  # before any cost is known


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
        slope = (self._line.at(self.most) - fixed) / self.most
        left = self.slo_s * SHARE - fixed - self._margin
        if left <= 0:
            return least
        most = min(self.most, int(GROWTH * max(self._parts)) + 1)
        return max(least, most if left >= slope * most else int(left / slope))

    def saw(self, gap_s: float, num_tokens: int) -> None:
        """A gap between two steps of running streams, with `num_tokens` prompt tokens computed in it."""
        self._line.add(num_tokens, gap_s)
        if num_tokens:
            self._parts.append(num_tokens)
        above = gap_s - self._line.at(num_tokens)
        if above > self._margin:
            self._margin += RISE * (above - self._margin)
        else:
            self._margin -= FALL * self._margin


class StepGaps:
    """The gaps between the steps of running streams, with the prompt tokens computed in each.

    `launches_ahead`: when a step is read, the part of the next gap is launched already.
    """

    def __init__(self, *, launches_ahead: bool) -> None:
        self._launches_ahead = launches_ahead
        self._last: tuple[frozenset[tuple[str, int]], float] | None = None  # rooms and time of the last step
        self._known = self._due = 0  # prompt tokens launched until the last step; those of the next gap

    def __repr__(self) -> str:
        return f"<StepGaps {'none yet' if self._last is None else f'since {self._last[1]:.3f}'}>"

    def step(
        self, rooms: Collection[tuple[str, int]], num_launched: int, now: float
    ) -> tuple[float, int] | None:
        """A step of `rooms` was read at `now`; `num_launched` counts prompt tokens since the start.

        Returns the gap since the last step of one of them and its prompt tokens; None without one.
        """
        fresh, self._known = num_launched - self._known, num_launched
        tokens, self._due = (self._due, fresh) if self._launches_ahead else (fresh, 0)
        last, self._last = self._last, (frozenset(rooms), now)
        return None if last is None or last[0].isdisjoint(rooms) else (now - last[1], tokens)
