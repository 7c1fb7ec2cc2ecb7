"""Prompt pages that the choices of one request share, after one hand-off.

    leader    a room whose prompt is handed over, or computed here, as any other
    sharer    a room with the same prompt. It owns the leader's whole prompt pages together with it, and has
              pages of its own behind them

Once the leader's prompt is complete, a sharer copies the page that both will write. Then it computes the last
tokens of the prompt, like a prompt that the prefix cache holds: this gives token 1 by its own seed, and its
own draft row. A page with several owners is never written. If the leader ends before its prompt is complete,
the sharer fails as UNSHARED, and the router places it like any other room.
"""

from collections.abc import Sequence

from ..engine.engine import Engine
from ..engine.kv.page_table import pages_for
from ..engine.request import Request
from .queues import DecodeQueues, DecodeRoom, DecodeState
from .step_decoder import StepDecoder

UNSHARED = "Unshared"  # kind of a Failed: the room whose prompt it should share has none
NO_PROMPT = (  # not in its pages yet
    DecodeState.ADMITTING,
    DecodeState.RESTORING,
    DecodeState.SHARING,
    DecodeState.PULLING,
    DecodeState.CLOSING,
)


class PageSharing:
    """The sharers of a decode engine and their leaders."""

    def __init__(self, engine: Engine, queues: DecodeQueues, decoder: StepDecoder) -> None:
        self._engine = engine
        self._queues = queues
        self._decoder = decoder

    def __repr__(self) -> str:
        return f"<PageSharing {self._queues.count(DecodeState.SHARING)} waiting>"

    def num_rows(self, request: Request) -> int:
        """Leading prompt tokens of `request` whose KV and draft KV any choice can use.

        The logits of the last token give token 1, and the last draft rows look ahead to it.
        """
        return max(0, request.num_prompt - max(1, self._engine.cache.lookahead))

    def leader_for(self, request: Request, room: str) -> DecodeRoom | None:
        """The attempt of `room` whose prompt `request` can share; None if there is none."""
        for found in reversed(self._queues.attempts(room)):
            has_prompt = not found.is_over or self.is_complete(found)
            mine, theirs = request, found.request
            is_alike = (mine.prompt_ids, mine.salt) == (theirs.prompt_ids, theirs.salt)
            if has_prompt and is_alike and not mine.num_embeds and self._has_tail(theirs):
                return found
        return None

    def shared_pages(self, leader: DecodeRoom) -> Sequence[int]:
        """The prompt pages that the leader and its sharers never write once the prompt is complete."""
        return leader.request.pages[: self.num_rows(leader.request) // self._engine.page_size]

    def is_complete(self, leader: DecodeRoom) -> bool:
        """Whether every row that is shared lies in the leader's pages."""
        if leader.state in NO_PROMPT or leader.is_tainted:
            return False
        rows = self.num_rows(leader.request)
        has_drafts = self._engine.drafter is None or self._decoder.num_covered(leader.request) >= rows
        return leader.landed >= rows and has_drafts and self._has_tail(leader.request)

    def _has_tail(self, request: Request) -> bool:
        """Whether the prompt's tail has its window pages; a leader gives them up as its own window moves
        on.
        """
        return self._engine.windows.has_tail(
            request, pages_for(self.num_rows(request), self._engine.page_size)
        )

    def sharers_of(self, leader: DecodeRoom) -> list[DecodeRoom]:
        """The rooms that wait for the leader's prompt."""
        return [room for room in self._queues.of(DecodeState.SHARING) if room.leader == leader.key]

    def turn(self) -> tuple[list[DecodeRoom], list[DecodeRoom]]:
        """(rooms that have their prompt from now on, rooms whose leader will never have it)."""
        begun, lost = [], []
        for room in self._queues.of(DecodeState.SHARING):
            leader = None if room.leader is None else self._queues.get(*room.leader)
            is_lost = leader is None or leader.state is DecodeState.CLOSING
            if leader is None or is_lost or not self._has_tail(leader.request):
                lost.append(room)
            elif self.is_complete(leader):
                self.begin(room, leader)
                begun.append(room)
        return begun, lost

    def begin(self, sharer: DecodeRoom, leader: DecodeRoom) -> None:
        """Copies the page that both write; `sharer` computes the rest of its prompt from now on."""
        request, rows, size = sharer.request, self.num_rows(sharer.request), self._engine.page_size
        self._follow(request, self.shared_pages(leader))
        if rows % size:
            at = rows // size
            self._engine.copy_page(leader.request.pages[at], request.pages[at])
        request.num_computed = sharer.have = sharer.landed = sharer.warmed = rows
        sharer.head_number = leader.head_number
        sharer.state = DecodeState.PREFILLING

    def _follow(self, request: Request, shared: Sequence[int]) -> None:
        """Takes the leader's pages again: those that it held first may have made way for cached ones."""
        held = request.pages[: len(shared)]
        if held != list(shared):
            allocator = self._engine.cache.allocator
            self._engine.windows.follow(request, shared)
            allocator.retain(shared)
            allocator.release(held)
            request.pages[: len(shared)] = shared
