"""A line through measured times, which follows changes: weighted recursive least squares with a forgetting
factor (Haykin, "Adaptive Filter Theory"). Pure.

A sample counts by its relative error. Work may grow faster than its tokens, as attention of prompts does.
Then no line fits short and long pieces, and by absolute errors a single long one would decide it for hundreds
of short ones.
"""

from dataclasses import dataclass, field

FORGETTING = 0.98  # factor on the weight of older samples, per new sample
MIN_SAMPLES = 3  # samples before a line is used
FIXED_TOKENS = 64  # errors are taken as proportional to (tokens + FIXED_TOKENS)


@dataclass(eq=False)
class LinearFit:
    """Seconds as a linear function of tokens."""

    num_samples: int = 0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # weighted, of 1, x, x^2, y, x*y

    def __repr__(self) -> str:
        return f"LinearFit({self.num_samples} samples)"

    @property
    def is_known(self) -> bool:
        return self.num_samples >= MIN_SAMPLES

    def add(self, tokens: int, seconds: float) -> None:
        """Adds one sample."""
        self.num_samples += 1
        n, x, xx, y, xy = self._sums
        old, weight = FORGETTING, (FIXED_TOKENS / (tokens + FIXED_TOKENS)) ** 2
        self._sums = [
            old * n + weight,
            old * x + weight * tokens,
            old * xx + weight * tokens**2,
            old * y + weight * seconds,
            old * xy + weight * tokens * seconds,
        ]

    def at(self, tokens: int) -> float:
        """Predicted seconds for `tokens`; neither coefficient is below 0."""
        return self.total(1, tokens)

    def total(self, count: int, tokens: int) -> float:
        """Predicted seconds for `count` pieces of work of `tokens` tokens together, one after the other."""
        n, x, xx, y, xy = self._sums
        if not n:
            return 0.0
        spread = xx - x * x / n
        slope = max(0.0, (xy - x * y / n) / spread) if spread > 1e-6 * xx else 0.0
        fixed = (y - slope * x) / n
        if fixed < 0 < xx:  # fit a line through 0 instead
            slope, fixed = xy / xx, 0.0
        return count * fixed + slope * tokens
