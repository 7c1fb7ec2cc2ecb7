"""How long answers get, learned by API key and endpoint: what decode counts on for a request. Pure.

The mean of recent answers is counted on, times a margin. When decode takes pages back the margin grows; each
answer that ends by itself lets it shrink. A mean is enough, and the least margin is below 1, because a pool
holds many requests at different points of their answers, which do not need all their pages at one time.
"""

from collections import OrderedDict
from dataclasses import dataclass

from ...cluster.protocol.expected_output import expected_left

FIRST_GUESS = 256  # output tokens
GUESS_WEIGHT = 4  # answers that the first guess counts for
WINDOW = 64  # answers over which the mean forgets
MAX_KEYS = 1024  # the least recently used keys are forgotten beyond
LEAST_MARGIN, MOST_MARGIN = 0.9, 4.0
MARGIN_STEP, MARGIN_DECAY = 1.25, 0.99
BURST = 16  # answers and retractions after which another one raises the margin
MAX_DOUBLINGS = 16


@dataclass(eq=False)
class _Mean:
    value: float
    weight: float = GUESS_WEIGHT

    def add(self, num_tokens: int) -> None:
        self.weight = min(WINDOW, self.weight + 1)
        self.value += (num_tokens - self.value) / self.weight


class OutputEstimates:
    """The means by (API key, endpoint). `first_guess`: output tokens, until answers have been seen."""

    def __init__(self, first_guess: int = FIRST_GUESS) -> None:
        self.first_guess = first_guess
        self._means: OrderedDict[tuple[str, str], _Mean] = OrderedDict()
        self.margin = LEAST_MARGIN
        self._since_raised = BURST

    def __repr__(self) -> str:
        return f"OutputEstimates({len(self._means)} keys, margin {self.margin:.2f})"

    def expected(self, key: tuple[str, str]) -> int:
        """Output tokens to count on for a whole answer; at least 1."""
        mean = self._means.get(key)
        return max(1, round((self.first_guess if mean is None else mean.value) * self.margin))

    def ended(self, key: tuple[str, str], num_tokens: int) -> None:
        """Learns from an answer that ended by itself."""
        self._means.setdefault(key, _Mean(self.first_guess)).add(num_tokens)
        self._means.move_to_end(key)
        if len(self._means) > MAX_KEYS:
            self._means.popitem(last=False)
        self.margin = max(LEAST_MARGIN, self.margin * MARGIN_DECAY)
        self._since_raised += 1

    def retracted(self) -> None:
        """Learns that decode had counted on too little. Several at once come of one wrong guess."""
        if self._since_raised >= BURST:
            self.margin = min(MOST_MARGIN, self.margin * MARGIN_STEP)
            self._since_raised = 0
        self._since_raised += 1


def claim_of(expected: int, produced: int, remaining: int, retractions: int) -> tuple[int, int]:
    """(output tokens of the next attempt to count on, those of them that decode must not take back).

    `expected` is for the whole answer, 0 for unknown; then nothing is taken back, and the answer is (0, 0).
    """
    if not expected:
        return 0, 0
    left = expected_left(expected, produced, remaining)
    if not retractions:
        return left, 0
    granted = min(remaining, left << min(retractions, MAX_DOUBLINGS))
    return granted, granted
