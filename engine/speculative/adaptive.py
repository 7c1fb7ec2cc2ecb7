"""Chooses the number of draft tokens per step from the batch size and the recent acceptance.

A step with s drafts yields 1 + a1 + a1*a2 + ... tokens on average. Here ai is the probability that the draft
of level i is accepted after all drafts before it were: later drafts are less often right. The step costs one
target forward over all nodes, the draft forwards and the draft extend. Drafting uses idle arithmetic units to
save reads of the weights. A large batch leaves no unit idle, and drafts of low acceptance waste the work.

The costs of the steps are measured at start where the steps run as graphs (`MeasuredCosts`), and estimated
from the sizes of the models elsewhere (`StepCosts`). The KV of the context is read once by a step of any
shape, so a long context makes drafts cheaper in comparison.

The policy is pure: `observe` takes acceptance counts and `choose` returns the next shape. The caller runs the
step.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .drafting.shape import DraftShape

PRIOR = 0.6  # initial estimate of the share of accepted drafts
PRIOR_TRIED = 4.0  # weight of the initial estimate, in drafts
DECAY = 0.05  # share of what was seen of a level that a step replaces
FORGET = 0.005  # the same for a step that did not draft the level
MARGIN = 0.03  # minimum relative gain for a change of shape
PROBE_STEPS = 25  # steps without drafts before a short draft shows whether drafts would be accepted again
# Rows of a forward whose arithmetic takes as long as reading the weights. An H200 multiplies about 160
# bfloat16 rows in the time of one read of the matrix. A CPU core is busy after a few rows.
KNEE_ROWS = {"cuda": 160.0, "cpu": 6.0}


class CostModel(Protocol):
    """The cost of a step, in any unit that is the same for all shapes."""

    def step(self, shape: DraftShape, batch_size: int, context: int) -> float:
        """Cost of one step of `batch_size` requests that have `context` tokens together."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Estimated costs, in units of one read of the target's weights.

    `draft` is the cost of reading the draft's weights, `kv` that of reading the KV of one token. `knee_rows`
    is explained at KNEE_ROWS. `is_block`: one draft forward drafts the whole chain.
    """

    draft: float
    knee_rows: float
    kv: float = 0.0
    is_block: bool = False

    def forward(self, rows: float) -> float:
        """Cost of a target forward of `rows` rows. A draft forward costs `draft` times as much."""
        return 1.0 + rows / self.knee_rows

    def step(self, shape: DraftShape, batch_size: int, context: int = 0) -> float:
        """As `CostModel.step`: verify, draft levels 2 and up, and the draft extend. Level 1 is remembered
        from the step before. A block costs one draft forward instead, and none without drafts.
        """
        if self.is_block:
            blocks = self.draft * self.forward(batch_size * shape.num_nodes) if shape.steps else 0.0
            return self.forward(batch_size * shape.num_nodes) + blocks + self.kv * context
        levels = max(shape.steps - 1, 0) * self.forward(batch_size * shape.topk)
        drafts = self.draft * (levels + self.forward(batch_size * shape.num_path))
        return self.forward(batch_size * shape.num_nodes) + drafts + self.kv * context


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Costs in seconds: those of steps without context, measured, and those of reading the context's KV.

    `seconds` holds, for each shape, the duration of a step by batch size; all shapes have the same sizes.
    `kv_seconds` is the time to read the KV of one token.
    """

    seconds: Mapping[DraftShape, Mapping[int, float]]
    kv_seconds: float

    def step(self, shape: DraftShape, batch_size: int, context: int) -> float:
        """As `CostModel.step`. Between two measured batch sizes the cost rises linearly; beyond the largest
        one it grows in proportion."""
        measured = self.seconds[shape]
        sizes = sorted(measured)
        above = bisect_left(sizes, batch_size)
        if above == len(sizes):
            base = measured[sizes[-1]] * batch_size / sizes[-1]
        elif above == 0 or sizes[above] == batch_size:
            base = measured[sizes[above]]
        else:
            low, high = sizes[above - 1], sizes[above]
            share = (batch_size - low) / (high - low)
            base = measured[low] + share * (measured[high] - measured[low])
        return base + self.kv_seconds * context


def expected_tokens(shape: DraftShape, shares: Sequence[float]) -> float:
    """Expected tokens of one step.

    `shares[i]`: probability that the draft of level i + 1 is accepted after its predecessors were. The last
    share stands for all further levels.
    """
    expected, kept = 1.0, 1.0
    for level in range(shape.num_path - 1):
        kept *= shares[min(level, len(shares) - 1)]
        expected += kept
    return expected


class LevelShares:
    """The recent share of accepted drafts of each level, among those whose predecessors were accepted.

    A level that no step drafts is forgotten slowly: its share returns to that of the level before it, so
    longer chains are tried again after `1 / FORGET` steps or so.
    """

    def __init__(self, num_levels: int) -> None:
        # moving sums over the steps that drafted a level; level 1 begins with the prior
        self._kept = [PRIOR * PRIOR_TRIED, *[0.0] * (num_levels - 1)]
        self._tried = [PRIOR_TRIED, *[0.0] * (num_levels - 1)]

    @property
    def shares(self) -> list[float]:
        """The estimate of each level, which leans on the level before it as if by PRIOR_TRIED drafts."""
        found = [self._kept[0] / self._tried[0]]
        for kept, tried in zip(self._kept[1:], self._tried[1:], strict=True):
            found.append((kept + found[-1] * PRIOR_TRIED) / (tried + PRIOR_TRIED))
        return found

    def observe(self, kept: Sequence[int], tried: Sequence[int]) -> None:
        """Records one step: drafts accepted, and drafts whose predecessors were accepted, by level."""
        for level in range(len(self._kept)):
            is_drafted = level < len(tried) and tried[level] > 0
            if not is_drafted and level == 0:
                return  # nothing was seen
            lasting = 1 - (DECAY if is_drafted else FORGET)
            self._kept[level] = self._kept[level] * lasting + (kept[level] if is_drafted else 0)
            self._tried[level] = self._tried[level] * lasting + (tried[level] if is_drafted else 0)


class StepPolicy:
    """Chooses among `shapes`, of which the last is the configured one.

    The policy leaves a shape only for one that is better by MARGIN, or when the configured shape is better.
    By the estimated costs and averages, a token never costs more than with the configured shape.

    `is_watched`: steps without drafts report whether the first drafts would have matched. Otherwise one of
    PROBE_STEPS such steps drafts the shortest shape instead.
    """

    def __init__(self, shapes: Sequence[DraftShape], costs: CostModel, *, is_watched: bool = True) -> None:
        assert shapes, "at least the configured shape"
        self.shapes = tuple(shapes)
        self.costs = costs
        self.is_watched = is_watched
        self._num_plain = 0  # steps without drafts since the last probe
        self.current = self.shapes[-1]
        self.num_changes = 0
        self.chosen: Counter[int] = Counter()
        self._levels = LevelShares(max(self.shapes[-1].steps, 1))

    @property
    def share_kept(self) -> float:
        """Recent share of accepted first drafts."""
        return self._levels.shares[0]

    def rate(self, shape: DraftShape, batch_size: int, context: int = 0) -> float:
        """Expected tokens per request and unit of cost."""
        return expected_tokens(shape, self._levels.shares) / self.costs.step(shape, batch_size, context)

    def choose(self, batch_size: int, context: int = 0) -> DraftShape:
        """Returns the shape of the next step for `batch_size` requests of `context` tokens together."""
        rates = {shape: self.rate(shape, batch_size, context) for shape in self.shapes}
        best = max(self.shapes, key=lambda shape: rates[shape])
        held = rates[self.current]
        if rates[best] > held * (1 + MARGIN) or rates[self.shapes[-1]] > held:
            self.num_changes += best != self.current
            self.current = best
        chosen = self._probe() or self.current
        self.chosen[chosen.steps] += 1
        return chosen

    def _probe(self) -> DraftShape | None:
        """The shortest shape with drafts, in one of PROBE_STEPS plain steps of a policy that sees nothing of
        them.
        """
        self._num_plain = 0 if self.is_watched or self.current.steps else self._num_plain + 1
        if self._num_plain < PROBE_STEPS:
            return None
        self._num_plain = 0
        return next((shape for shape in self.shapes if shape.steps), None)

    def observe(self, kept: Sequence[int], tried: Sequence[int]) -> None:
        """Records the acceptance of one step, summed over its requests, by level of drafts.

        `tried[i]` drafts of level i + 1 followed accepted ones and were compared with the target's choice;
        `kept[i]` of them matched.
        """
        assert len(kept) == len(tried), (kept, tried)
        assert all(0 <= k <= t for k, t in zip(kept, tried, strict=True)), (kept, tried)
        self._levels.observe(kept, tried)

    def __repr__(self) -> str:
        return f"<StepPolicy {self.current}, {self.share_kept:.0%} kept, {self.num_changes} changes>"
