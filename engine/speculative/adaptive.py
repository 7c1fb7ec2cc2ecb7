"""How many tokens to draft next: as many as pay, by batch size and by how many drafts were kept lately.

A step of s drafts yields 1 + a + a^2 + ... + a^s tokens on average, a the share of drafts that are kept once
all before them were (of a tree: of levels). It costs a target forward over all nodes, the draft's forwards
and its extend. Drafting trades idle arithmetic for fewer reads of the weights; a large batch leaves none
idle, and a poor draft wastes it.

The policy is pure: it is told what was accepted and asked for the next shape; the caller runs it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .drafting.shape import DraftShape

PRIOR = 0.6  # the share of drafts kept before anything was seen, and
PRIOR_TRIED = 4.0  # how many drafts that counts as
DECAY = 0.05  # share of the newest step in the averages
MARGIN = 0.04  # another shape has to be better by so much
# Rows of a forward whose arithmetic takes as long as reading the weights: an H200 multiplies about 160
# bfloat16 rows in the time in which it reads the matrix; a CPU core is busy after a few.
KNEE_ROWS = {"cuda": 160.0, "cpu": 6.0}


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Costs relative to reading the target's weights once. `draft`: the same for the draft's; `knee_rows` as
    KNEE_ROWS."""

    draft: float
    knee_rows: float

    def forward(self, rows: float) -> float:
        """A target forward of `rows` rows; a draft forward costs `draft` times as much."""
        return 1.0 + rows / self.knee_rows

    def step(self, shape: DraftShape, batch_size: int) -> float:
        """One step: verify, the draft's levels but the first, which is remembered, and draft extend."""
        levels = max(shape.steps - 1, 0) * self.forward(batch_size * shape.topk)
        return self.forward(batch_size * shape.num_nodes) + self.draft * (
            levels + self.forward(batch_size * shape.num_path)
        )


def expected_tokens(shape: DraftShape, share_kept: float) -> float:
    """Tokens of one step when each draft is kept with probability `share_kept` if all before it were."""
    return sum(share_kept**level for level in range(shape.num_path))


class StepPolicy:
    """Chooses among `shapes`, of which the last is the configured one.

    A shape is left only for one that is better by MARGIN, or when the configured one is better: as far as the
    costs and the averages tell, a step is never dearer per token than with the configured shape throughout.
    """

    def __init__(self, shapes: Sequence[DraftShape], costs: StepCosts) -> None:
        assert shapes, "at least the configured shape"
        self.shapes = tuple(shapes)
        self.costs = costs
        self.current = self.shapes[-1]
        self.num_changes = 0
        self.chosen: Counter[int] = Counter()
        self._kept = PRIOR * PRIOR_TRIED
        self._tried = PRIOR_TRIED

    @property
    def share_kept(self) -> float:
        """Of the drafts that were compared with the target's choice, recently, how many were kept."""
        return self._kept / self._tried

    def rate(self, shape: DraftShape, batch_size: int) -> float:
        """Expected tokens per unit of cost, of each request."""
        return expected_tokens(shape, self.share_kept) / self.costs.step(shape, batch_size)

    def choose(self, batch_size: int) -> DraftShape:
        """The shape of the next step, `batch_size` requests in it."""
        rates = {shape: self.rate(shape, batch_size) for shape in self.shapes}
        best = max(self.shapes, key=lambda shape: rates[shape])
        held = rates[self.current]
        if rates[best] > held * (1 + MARGIN) or rates[self.shapes[-1]] > held:
            self.num_changes += best != self.current
            self.current = best
        self.chosen[self.current.steps] += 1
        return self.current

    def observe(self, kept: int, tried: int) -> None:
        """Of one step's drafts, over all its requests: `tried` were compared with the target's choice, `kept`
        matched."""
        assert 0 <= kept <= tried, (kept, tried)
        if tried:
            self._kept += DECAY * (kept - self._kept)
            self._tried += DECAY * (tried - self._tried)

    def __repr__(self) -> str:
        return f"<StepPolicy {self.current}, {self.share_kept:.0%} kept, {self.num_changes} changes>"
