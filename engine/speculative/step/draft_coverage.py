"""Which rows of each request a drafter has written, and until when a request is drafted for.

A request is drafted for while its draft KV covers every row that its target KV covers, and while its drafts
would lie within the context that the draft model was trained for: beyond it drafts are hardly ever right.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ...request import Request
from ..drafters.protocol import Drafter, DraftPrefill
from ..drafting.shape import DraftShape

NEVER = 1 << 30  # steps


@dataclass(kw_only=True)
class Coverage:
    """Of one request: its place in the drafter, None once nothing is drafted for it any more, and how many of
    its draft rows are written."""

    row: int | None
    covered: int


class DraftCoverage:
    """The requests of `drafter` (None: nothing is ever drafted), whose steps draft at most `shape`."""

    def __init__(self, drafter: Drafter | None, shape: DraftShape) -> None:
        self.drafter = drafter
        self.shape = shape
        self.known: dict[Request, Coverage] = {}
        self.num_beyond = 0  # requests that outgrew the draft's context

    @property
    def limit(self) -> int:
        """Positions that drafts may have."""
        return 0 if self.drafter is None else self.drafter.max_context

    def is_warm(self, request: Request) -> bool:
        """Whether `request` can be drafted for."""
        mine = self.known.get(request)
        return mine is not None and mine.row is not None and mine.covered == request.num_tokens - 1

    def row_of(self, request: Request) -> int:
        """The place of a request that is drafted for, 0 for any other."""
        mine = self.known.get(request)
        return mine.row or 0 if mine is not None and self.is_warm(request) else 0

    def num_covered(self, request: Request) -> int:
        """Rows of `request` whose draft KV is written, or never needed since they lie beyond the draft's
        context."""
        mine = self.known.get(request)
        if mine is None:
            return 0
        return max(mine.covered, request.num_computed) if mine.row is None else mine.covered

    def begin(self, drafter: Drafter, request: Request, features: torch.Tensor, start: int) -> DraftPrefill:
        """The prefill of the rows of `request` from `start` on that `features` `[rows, K*Ht]` stand for.

        Rows beyond the draft's context are left out. Raises AssertionError for a gap, or where the token
        behind the last row is not there yet.
        """
        end = start + features.shape[0]
        assert end < request.num_tokens, (
            f"{request!r}: draft row {end - 1} needs token {end}, which is not there yet"
        )
        mine = self.known.get(request)
        if mine is None:
            mine = self.known[request] = Coverage(row=drafter.open(), covered=start)
        assert mine.row is not None, f"{request!r}: drafting has ended"
        assert min(start, self.limit) <= mine.covered, (
            f"{request!r}: draft rows {mine.covered}..{start - 1} would stay unwritten"
        )
        last = max(start, min(end, self.limit))
        mine.covered = max(mine.covered, last)
        return DraftPrefill(
            pages=request.pages,
            start=start,
            next_ids=request.all_ids[start + 1 : last + 1],
            features=features[: last - start],
            state_row=mine.row,
            is_final=last == request.num_tokens - 1,
        )

    def advance(self, request: Request, count: int) -> None:
        """A step that drafted for `request` wrote `count` more of its rows."""
        mine = self.known.get(request)
        if mine is not None:
            mine.covered += count
            assert mine.covered == request.num_computed, f"{request!r}: draft KV covers {mine.covered} rows"

    def retire(self, requests: Iterable[Request]) -> list[Request]:
        """End drafting for those of `requests` whose drafts would lie beyond the draft's context; returns
        them."""
        retired = []
        for request in requests:
            mine = self.known.get(request)
            if self.drafter is None or mine is None or mine.row is None:
                continue
            is_whole = mine.covered >= min(request.num_tokens - 1, self.limit)
            if is_whole and request.num_tokens + self.shape.steps > self.limit:
                self.drafter.close(mine.row)
                mine.row = None
                self.num_beyond += 1
                retired.append(request)
        return retired

    def steps_until_limit(self, requests: Sequence[Request]) -> int:
        """Steps after which one of `requests` may have outgrown the draft's context."""
        known = [(request, self.known.get(request)) for request in requests]
        lengths = [request.num_tokens for request, mine in known if mine is not None and mine.row is not None]
        room = self.limit - self.shape.steps - max(lengths, default=0)
        return max(1, room // self.shape.num_path) if lengths else NEVER

    def forget(self, request: Request) -> None:
        """Drop what is kept of `request`; no-op when there is nothing."""
        mine = self.known.pop(request, None)
        if mine is not None and mine.row is not None and self.drafter is not None:
            self.drafter.close(mine.row)

    def __repr__(self) -> str:
        return f"<DraftCoverage {len(self.known)} requests, {self.num_beyond} beyond the draft's context>"
