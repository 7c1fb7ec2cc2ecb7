"""Rooms that make way for a more urgent one which finds no place or no pages.

The urgent room waits in state ADMITTING and holds nothing. At the next border between two steps the newest
rooms of the least urgent classes give up what they hold, as in a full pool (`page_growth`), and the urgent
one is admitted when their last writer is done. A room gives nothing up within its grant, so nobody is
retracted twice without progress, and urgent requests cannot starve others: with each retraction the grant
doubles. Only rooms of a less urgent class make way, and only if enough of them may.
"""

from dataclasses import dataclass

from ..engine.loader import Engine
from ..worker.retractions import Reason
from .page_growth import PageGrowth, is_beyond_grant
from .queues import DecodeQueues, DecodeRoom, DecodeState


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a room gets in: `victims` give up what they hold, and it waits for what comes back.

    `reason`: what it lacks.
    """

    victims: list[DecodeRoom]
    reason: Reason


class Preemption:
    """Finds the rooms that make way."""

    def __init__(self, engine: Engine, queues: DecodeQueues, growth: PageGrowth) -> None:
        self._engine = engine
        self._queues = queues
        self._growth = growth

    def __repr__(self) -> str:
        return f"<Preemption {self._queues.count(DecodeState.ADMITTING)} waiting>"

    @property
    def waiting(self) -> list[DecodeRoom]:
        """The rooms that are to be admitted, the most urgent first, older ones before newer ones."""
        return sorted(self._queues.of(DecodeState.ADMITTING), key=lambda each: (each.priority, each.arrived))

    def way_for(self, room: DecodeRoom) -> Way | None:
        """How `room`, which was not admitted, gets in; None if others do not help."""
        over = [other for other in self._queues if other.is_over]
        places = self._queues.num_held - len(over) + 1 - self._queues.max_running
        growth = self._growth
        pages = (
            growth.first_pages(room.request, room.claim)
            + growth.num_promised
            + growth.promised(room)
            - self._engine.cache.num_available
            - sum(len(other.request.pages) for other in over)
        )
        windows = growth.missing_windows(room) - sum(len(other.request.windows) for other in over)
        reason = Reason.URGENT_PLACE if places > 0 else Reason.URGENT_PAGES
        if places <= 0 and pages <= 0 and windows <= 0:
            return Way(victims=[], reason=reason) if over or self._engine.cache.num_held else None
        victims: list[DecodeRoom] = []
        for other in self._less_urgent(room):
            victims.append(other)
            places -= 1
            pages -= len(other.request.pages) + growth.promised(other)
            windows -= len(other.request.windows)
            windows -= growth.promised_windows(other, is_local=other.computes_prompt)
            if places <= 0 and pages <= 0 and windows <= 0:
                return Way(victims=victims, reason=reason)
        return None

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
