"""The inbox of an answer: events of all rooms of one request, read in batches by the task that answers the
client."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ..rooms.effects import Deliver, Ended, Failure, Settled


@dataclass(frozen=True)
class Disconnected:
    """The client closed its connection."""


MAX_UNREAD = 1 << 16  # tokens that may wait for a slow client; with more it is cut off
MANY = 256  # tokens that wake a patient reader, so that its work comes in small parts
LOGPROB_COST = 2  # a log-probability counts as this many tokens: it takes some 120 bytes, a token 36

InboxEvent = Deliver | Ended | Settled | Failure | Disconnected


class Inbox:
    """The events of one request. The dispatcher puts them in, one task of the same event loop takes them out.

    A patient reader needs nothing before the end: only events other than tokens, or `MANY` tokens, wake it.
    """

    __slots__ = (
        "_clock",
        "_events",
        "_is_patient",
        "_num_unread",
        "_owner",
        "_waiter",
        "is_cut",
        "unread_since",
    )

    def __init__(self, clock: Callable[[], float], *, is_patient: bool = False) -> None:
        self._clock = clock
        self._is_patient = is_patient
        self._events: list[tuple[int, InboxEvent]] = []
        # future of the reader while there is nothing to read
        self._waiter: asyncio.Future[None] | None = None
        self._num_unread = 0  # tokens; a log probability counts as tokens, too
        self.unread_since: float | None = None  # the time at which the reader was woken and has not read yet
        self._owner: asyncio.Task[object] | None = None
        self.is_cut = False

    def __repr__(self) -> str:
        return f"Inbox({len(self._events)} unread{', cut' if self.is_cut else ''})"

    def put(self, index: int, event: InboxEvent) -> None:
        """Adds an event of choice `index`."""
        self._events.append((index, event))
        if isinstance(event, Deliver):
            self._num_unread += len(event.ids)
            if event.logprobs:
                self._num_unread += LOGPROB_COST * sum(1 + len(told.top) for told in event.logprobs)
            if self._is_patient and self._num_unread < MANY:
                return
        if self.unread_since is None:
            self.unread_since = self._clock()
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    async def take(self) -> list[tuple[int, InboxEvent]]:
        """Waits for events; all that are there, in order."""
        if self.unread_since is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        self.unread_since = None
        self._num_unread = 0
        return events

    def own(self) -> None:
        """Makes the current task the reader, which `cut` may cancel."""
        self._owner = asyncio.current_task()

    def unread_for(self, now: float) -> float:
        """Seconds since the reader last took events while some are waiting: its client does not read."""
        return 0.0 if self.unread_since is None else now - self.unread_since

    def excuse(self, seconds: float) -> None:
        """The router did not run for so long, so nobody could read."""
        if self.unread_since is not None:
            self.unread_since += seconds

    @property
    def is_full(self) -> bool:
        """Whether too many tokens wait for the reader."""
        return self._num_unread > MAX_UNREAD

    def has_stalled(self, now: float, longest_s: float) -> bool:
        """Whether events have waited for longer than the limit, or too many of them."""
        return self.is_full or self.unread_for(now) > longest_s

    def cut(self) -> None:
        """Cancels a reader that is stuck in a write."""
        if self._owner is not None and not self.is_cut:
            self.is_cut = True
            self._owner.cancel()
