"""The depth and width of drafting, and every size that follows from them.

A step verifies N nodes per request: the root, which is the newest committed token, and N-1 drafts. A chain
has one draft per level. A tree grows each of `steps` levels from the `topk` best nodes of the level before,
and keeps the best drafts of all levels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...kv.page_table import pages_for

# Lengths of chains that the adaptive policy may use instead of a longer configured one; 0 is plain decode.
SHORTER_CHAINS = (0, 1, 2, 3, 5, 8, 12)


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """`steps` levels, `topk` children of each expanded node, `num_nodes` verified nodes with the root."""

    steps: int
    topk: int
    num_nodes: int

    @classmethod
    def of(cls, steps: int, topk: int = 1, tokens: int = 0) -> "DraftShape":
        """The shape of `--spec-steps`, `--spec-topk` and `--spec-tokens` (0: the maximum that fits steps and
        topk).

        Raises ValueError naming values and remedy for inconsistent sizes.
        """
        if steps < 0:
            raise ValueError(f"spec_steps {steps}: use 0 (no drafts) or more")
        if topk < 1:
            raise ValueError(f"spec_topk {topk}: use 1 (a chain) or more")
        most = most_nodes(steps, topk)
        if tokens and tokens < 1 + steps:
            raise ValueError(
                f"spec_tokens {tokens}: spec_steps {steps} needs at least {1 + steps} (the newest token and "
                f"one draft per step), or the last steps would be drafted in vain; raise spec_tokens or "
                "lower spec_steps"
            )
        if tokens > most:
            raise ValueError(
                f"spec_tokens {tokens}: {steps} steps with spec_topk {topk} draft no more than {most} "
                "tokens, the newest one included; lower spec_tokens or raise spec_topk"
            )
        return cls(steps=steps, topk=topk, num_nodes=tokens or min(1 + steps * topk, most))

    @property
    def is_tree(self) -> bool:
        return self.topk > 1 and self.steps > 0

    @property
    def num_path(self) -> int:
        """Maximum nodes of a branch with the root. It bounds the tokens of a step and equals the rows of a
        draft extend.
        """
        return 1 + self.steps

    @property
    def num_draft_slots(self) -> int:
        """Draft KV rows that drafting writes: `topk` nodes of every level but the last."""
        return max(self.steps - 1, 0) * self.topk

    @property
    def spare_slots(self) -> int:
        """Slots behind a request's committed rows that a step may write."""
        return max(self.num_nodes, self.num_draft_slots)

    def candidates(self) -> tuple["DraftShape", ...]:
        """Shapes that the adaptive policy may use, fewest steps first, this one last.

        A chain gives shorter chains; a tree gives plain decode.
        """
        shorter = (0,) if self.is_tree else (steps for steps in SHORTER_CHAINS if steps < self.steps)
        return (*(DraftShape.of(steps) for steps in shorter), self) if self.steps else (self,)

    def __str__(self) -> str:
        kind = f"tree of {self.num_nodes} nodes, {self.topk} per level" if self.is_tree else "chain"
        return f"{self.steps} steps, {kind}"


PLAIN = DraftShape(steps=0, topk=1, num_nodes=1)


def most_nodes(steps: int, topk: int) -> int:
    """Maximum number of nodes with the root: topk in the first level, topk squared in each further level."""
    return 1 + (topk + (steps - 1) * topk * topk if steps else 0)


def planned_pages(shapes: Sequence[DraftShape], max_context: int, page_size: int) -> int:
    """Columns of a page table that a step of any of `shapes` may read, for up to `max_context` tokens."""
    return pages_for(max_context + max(shape.spare_slots for shape in shapes), page_size)
