"""Tracks the draft rows that are written for each request, and the end of drafting for it.

A request gets drafts while its draft KV covers every row of its target KV, and while its drafts lie within
the context of the draft model's training. Drafts beyond that context are hardly ever right.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ...request import Request
from ..drafters.protocol import Drafter, DraftPrefill, HistoryDrafter, cache_lookahead
from ..drafting.shape import DraftShape

NEVER = 1 << 30  # steps


@dataclass(kw_only=True)
class Coverage:
    """The draft coverage of one request.

    `row` is its state row in the drafter, None after drafting ended. `covered` counts its draft rows, of
    which the drafter may still have to see the newest `late`. `known`: tokens of the request at its last
    prefill of draft rows; None once its steps write them.
    """

    row: int | None
    covered: int
    late: int = 0
    known: int | None = None


class DraftCoverage:
    """The requests of `drafter`, whose steps draft at most `shape`. Without a drafter nothing is drafted."""

    def __init__(self, drafter: Drafter | None, shape: DraftShape) -> None:
        self.drafter = drafter
        self.shape = shape
        self.known: dict[Request, Coverage] = {}
        self.num_beyond = 0  # requests that outgrew the draft's context

    @property
    def limit(self) -> int:
        """Maximum number of positions with drafts."""
        return 0 if self.drafter is None else self.drafter.max_context

    def is_warm(self, request: Request) -> bool:
        """Whether `request` can get drafts."""
        mine = self.known.get(request)
        return mine is not None and mine.row is not None and mine.covered == request.num_tokens - 1

    def row_of(self, request: Request) -> int:
        """The state row of a warm request, 0 for any other."""
        mine = self.known.get(request)
        return mine.row or 0 if mine is not None and self.is_warm(request) else 0

    def num_covered(self, request: Request) -> int:
        """Rows of `request` whose draft KV is final, or unneeded: because they lie beyond the draft's
        context, or because the drafter keeps none.
        """
        if isinstance(self.drafter, HistoryDrafter):
            return request.num_computed
        mine = self.known.get(request)
        if mine is None:
            return 0
        # Steps that were launched and not read, or that gave no token, count as late but not as covered.
        written = max(0, mine.covered - mine.late)
        if mine.known is not None:  # later rows look ahead to tokens that were not there
            written = min(written, max(0, mine.known - cache_lookahead(self.drafter)))
        is_whole = mine.row is None or written >= self.limit
        return max(written, request.num_computed) if is_whole else written

    def join(self, requests: Sequence[Request]) -> list[tuple[int, list[int]]]:
        """Begins drafting for `requests`, whose first step follows, if the drafter needs their text alone.

        Returns the state row and the text of each request that began.
        """
        drafter = self.drafter
        new = [request for request in requests if request not in self.known]
        if not new or drafter is None or not isinstance(drafter, HistoryDrafter):
            return []
        for request in new:
            self.known[request] = Coverage(row=drafter.open(), covered=request.num_tokens - 1)
        begun = [(self.row_of(request), request.all_ids) for request in new]
        drafter.begin(begun)
        return begun

    def begin(self, drafter: Drafter, request: Request, features: torch.Tensor, start: int) -> DraftPrefill:
        """The prefill of the rows of `request` from `start` on, from `features` `[rows, K*Ht]`.

        Rows beyond the draft's context are skipped. Raises AssertionError for a gap between covered rows and
        `start`, or if the token behind the last row is unknown.
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
        mine.known = request.num_tokens
        known_ids = request.all_ids
        return DraftPrefill(
            pages=request.pages,
            start=start,
            next_ids=known_ids[start + 1 : last + 1],
            features=features[: last - start],
            state_row=mine.row,
            is_final=last == request.num_tokens - 1,
            known_ids=known_ids,
            params=request.sampling,
            next_embeds=request.embeds_of(start + 1, last + 1),
        )

    def advance(self, request: Request, count: int) -> None:
        """Records that a step with drafts for `request` wrote `count` more draft rows."""
        mine = self.known.get(request)
        if mine is not None:
            mine.covered += count
            mine.known = None
            assert mine.covered == request.num_computed, f"{request!r}: draft KV covers {mine.covered} rows"

    def most_late(self, requests: Iterable[Request]) -> int:
        """The largest number of rows of one of `requests` that the drafter may still have to see."""
        return max((self.known[each].late for each in requests if each in self.known), default=0)

    def note_late(self, requests: Iterable[Request], num_rows: int | None) -> None:
        """Records `num_rows` more such rows of each of `requests`; None: the drafter has seen all."""
        for request in requests:
            mine = self.known.get(request)
            if mine is not None and mine.row is not None:
                mine.late = 0 if num_rows is None else mine.late + num_rows

    def retire(self, requests: Iterable[Request]) -> list[Request]:
        """Ends drafting for the requests whose drafts would lie beyond the draft's context, and returns
        them.
        """
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
        """Minimum steps after which one of `requests` may have outgrown the draft's context."""
        known = [(request, self.known.get(request)) for request in requests]
        lengths = [request.num_tokens for request, mine in known if mine is not None and mine.row is not None]
        room = self.limit - self.shape.steps - max(lengths, default=0)
        return max(1, room // self.shape.num_path) if lengths else NEVER

    def forget(self, request: Request) -> None:
        """Drops the state of `request`; no-op without one."""
        mine = self.known.pop(request, None)
        if mine is not None and mine.row is not None and self.drafter is not None:
            self.drafter.close(mine.row)

    def __repr__(self) -> str:
        return f"<DraftCoverage {len(self.known)} requests, {self.num_beyond} beyond the draft's context>"
