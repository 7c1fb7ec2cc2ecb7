"""All graphs of a drafter, by kind and by how many rows a step has."""

from dataclasses import dataclass

from .drafters.prefill_graphs import DraftExtendGraphs, DraftLoopGraphs, DraftPrefillGraphs
from .tree_graphs import TreeLoopGraphs


@dataclass(frozen=True, kw_only=True)
class DraftGraphs:
    """`extends`: one family per number of rows that steps may have, the configured one first; `loops` likewise, of chains
    with a draft to make. `tree`: the loop of a configured tree."""

    prefill: DraftPrefillGraphs
    extends: tuple[DraftExtendGraphs, ...]
    loops: tuple[DraftLoopGraphs, ...] = ()
    tree: TreeLoopGraphs | None = None

    @property
    def extend(self) -> DraftExtendGraphs:
        """Those of the configured number of rows."""
        return self.extends[0]

    @property
    def loop(self) -> DraftLoopGraphs:
        """Those of the configured chain."""
        return self.loops[0]

    def extend_of(self, num_rows: int) -> DraftExtendGraphs:
        """Those of `num_rows` rows per request; where there are none, the configured ones, which will object."""
        return next((graphs for graphs in self.extends if graphs.rows.num_rows == num_rows), self.extend)

    def loop_of(self, num_rows: int) -> DraftLoopGraphs | None:
        """As `extend_of`; None without a chain of drafts."""
        first = self.loops[0] if self.loops else None
        return next((graphs for graphs in self.loops if graphs.rows.num_rows == num_rows), first)
