"""Rooms that make way for a more urgent one which finds no place or no pages.

The urgent room waits in state ADMITTING and holds nothing. At the next border between two steps the newest
rooms of the least urgent classes give up what they hold, as in a full pool (`page_growth`), and the urgent
one is admitted when their last writer is done. A room gives nothing up within its grant, so nobody is
retracted twice without progress, and urgent requests cannot starve others: with each retraction the grant
doubles. Only rooms of a less urgent class make way, and only if enough of them may.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..engine.engine import Engine
from ..engine.kv.leaving_owners import LeavingOwners
from ..worker.prompt_pages import hold_prefix
from ..worker.refusal import Refusal
from ..worker.retractions import Reason
from .page_growth import PageGrowth, is_beyond_grant
from .queues import DecodeQueues, DecodeRoom, DecodeState, claim_order

HasStaging = Callable[[DecodeRoom, int, Collection[DecodeRoom]], bool]
LONGEST_WAIT_S = 2.0  # of a room for those that make way; then its router places it again
TOO_LONG = Refusal(reason=f"nobody made way within {LONGEST_WAIT_S:g} s", retry_after_ms=250)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a room gets in: `victims` give up what they hold, and it waits for what comes back.

    `reason`: what it lacks.
    """

    victims: list[DecodeRoom]
    reason: Reason


class Preemption:
    """Finds the rooms that make way.

    `has_staging`: as `Admission.has_staging`. Nobody makes way where the features of a room do not fit.
    """

    def __init__(
        self, engine: Engine, queues: DecodeQueues, growth: PageGrowth, has_staging: HasStaging
    ) -> None:
        self._has_staging = has_staging
        self._engine = engine
        self._queues = queues
        self._growth = growth

    def __repr__(self) -> str:
        return f"<Preemption {self._queues.count(DecodeState.ADMITTING)} waiting>"

    @property
    def waiting(self) -> list[DecodeRoom]:
        """The rooms that are to be admitted, the most urgent first, older ones before newer ones."""
        return sorted(self._queues.of(DecodeState.ADMITTING), key=claim_order)

    def way_for(self, room: DecodeRoom) -> Way | None:
        """How `room`, which was not admitted, gets in; None if others do not help."""
        cache = self._engine.cache
        found = hold_prefix(cache, self._engine.windows, room.request, is_computed=room.is_local)
        try:  # what it finds in the cache is not available, and nobody gives it up
            return self._way_behind(room, len(found))
        finally:
            cache.allocator.release(found, is_used=False)

    def _way_behind(self, room: DecodeRoom, num_found: int) -> Way | None:
        """As `way_for`, of a room that holds its `num_found` pages in the cache."""
        cache, growth = self._engine.cache, self._growth
        places = self._queues.num_held + 1 - self._queues.max_running
        pages = growth.first_pages(room.request, room.claim) - num_found
        pages += growth.num_promised + growth.promised(room) - cache.num_available
        windows = growth.missing_windows(room)
        if places <= 0 and pages <= 0 and windows <= 0 and self._has_staging(room, num_found, ()):
            return None  # what it lacks is nothing that others hold
        leaving = LeavingOwners(cache)
        over = [other for other in self._queues if other.is_over]
        for other in over:
            places -= 1
            windows -= len(other.request.windows)
            leaving.leave(other.request.pages)
        pages -= cache.num_held  # they come back when they are copied
        reason = Reason.URGENT_PLACE if places > 0 else Reason.URGENT_PAGES
        victims: list[DecodeRoom] = []
        for other in self._less_urgent(room):
            if places <= 0 and pages <= leaving.num_back and windows <= 0:
                break
            victims.append(other)
            places -= 1
            pages -= growth.promised(other)
            windows -= len(other.request.windows)
            windows -= growth.promised_windows(other, is_local=other.computes_prompt)
            leaving.leave(other.request.pages)
        is_enough = places <= 0 and pages <= leaving.num_back and windows <= 0
        if not is_enough or not self._has_staging(room, num_found, over + victims):
            return None
        return Way(victims=victims, reason=reason)

    def _less_urgent(self, room: DecodeRoom) -> list[DecodeRoom]:
        """The rooms that may make way for `room`, the first one first."""
        found = [
            other
            for other in self._queues
            if other.priority > room.priority and not other.is_over and is_beyond_grant(other)
        ]
        return sorted(found, key=lambda each: (each.priority, each.arrived))[
            ::-1
        ]  # of equal ones the last first
