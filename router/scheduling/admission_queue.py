"""Decides whether a request is accepted by its size, its caller's limits, and the length of the queue. Pure.

    never    it fits no pair, however idle                              400
    not now  no pair serves, or none that knows all its fields          503 with Retry-After
    caller   the caller's own limits                                    429 with Retry-After
    memory   prompt embeddings of other requests fill the memory        429 with Retry-After
    queue    more than `max_queue` rooms wait; refuses the last in line  429 with Retry-After

Retry-After is the time to empty the queue at the recent rate of placements. While requests wait for a stalled
worker, it is at least the time for which that worker has been silent: nobody knows more about the rest.
"""

import math
from collections.abc import Sequence

from ...cluster.protocol.request_rank import rank
from ..errors import ApiError, overloaded
from ..http.parse_limiter import ParseLimiter
from ..http.rate_limits import Gate
from ..workers.eligibility import known_limits, known_pairs
from ..workers.registry import Registry
from ..workers.stalls import Stalls
from .request_limits import check_fits, check_obeyed, no_workers
from .request_state import ClientRequest, Entry, Job
from .waiting_list import WaitingList, rank_of

OVERLOADED = "Overloaded"  # kind of a Failure
LONGEST_RETRY_AFTER_S = 30
MAX_EMBEDS_BYTES = 256 << 20  # prompt embeddings of all requests, each counted once per choice
RATE_WINDOW_S = 10.0


class PlacementRate:
    """Rooms placed per second, averaged over about the last `RATE_WINDOW_S`."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._at = 0.0

    def __repr__(self) -> str:
        return f"PlacementRate({self._weight / RATE_WINDOW_S:.1f}/s)"

    def note(self, now: float) -> None:
        """One room was placed."""
        self._weight = self._decayed(now) + 1.0
        self._at = now

    def seconds_for(self, num_rooms: int, now: float) -> int:
        """Seconds until `num_rooms` more are placed: 1 to `LONGEST_RETRY_AFTER_S`, and 1 without a known
        rate."""
        per_second = self._decayed(now) / RATE_WINDOW_S
        if per_second <= 0.0:
            return 1
        return max(1, min(LONGEST_RETRY_AFTER_S, math.ceil(num_rooms / per_second)))

    def _decayed(self, now: float) -> float:
        return self._weight * math.exp(-max(0.0, now - self._at) / RATE_WINDOW_S)


class AdmissionQueue:
    """The bounds on the requests that one router accepts."""

    def __init__(self, registry: Registry, waiting: WaitingList, max_queue: int, stalls: Stalls) -> None:
        self.gate = Gate()
        self.parse_limiter = ParseLimiter(self.gate)
        self.placement_rate = PlacementRate()
        self._registry = registry
        self._waiting = waiting
        self._max_queue = max_queue
        self._stalls = stalls
        self._embeds_bytes = 0  # of the requests that run

    def __repr__(self) -> str:
        return f"AdmissionQueue({self._waiting}, {self.gate}, {self.placement_rate})"

    def check(self, jobs: Sequence[Job], now: float) -> None:
        """Accepts the jobs of one request. Raises ApiError and then accepts none.

        The caller of `check` calls `leave` at the end of the request.
        """
        live = known_limits(self._registry)
        if live is None:
            raise no_workers()
        num_tokens = embeds_bytes = 0
        for job in jobs:
            check_obeyed(job.need, known_pairs(self._registry))
            check_fits(job.need, self._registry, live)
            num_tokens += job.need.total
            embeds_bytes += job.embeds_bytes
        # a single request is always taken: its own bound is the setting
        if embeds_bytes and self._embeds_bytes and self._embeds_bytes + embeds_bytes > MAX_EMBEDS_BYTES:
            raise overloaded("Prompt embeddings of other requests fill the memory for them. Try again later.")
        if jobs:
            self.gate.enter(jobs[0].caller, num_tokens, now)
        self._embeds_bytes += embeds_bytes

    def leave(self, request: ClientRequest) -> None:
        """A request that `check` accepted has ended."""
        self.gate.leave(request.caller, sum(entry.unused_tokens for entry in request.entries))
        self._embeds_bytes -= sum(entry.job.embeds_bytes for entry in request.entries)

    def check_queue(self, priority: int, now: float) -> None:
        """Before the body is parsed: raises ApiError (429) if a full queue would turn away a request of this
        priority."""
        if not self._max_queue or len(self._waiting) < self._max_queue:
            return
        last = self._waiting.last()
        if last is None or rank_of(last) <= rank(now, priority):
            raise self.full(now)

    def surplus(self, request: ClientRequest) -> Entry | None:
        """The entry to be turned away now that `request` is in the queue; None while the queue is within its
        bound.

        A new request is turned away with all its choices, so one of its entries stands for all.
        """
        if len(self._waiting) <= self._max_queue:
            return None
        last = self._waiting.last()
        return last if last is not None else request.entries[0]

    def full(self, now: float) -> ApiError:
        """The error for requests that are turned away."""
        why = self._stalls.why(now)
        wait = f"{self._max_queue} requests wait for a worker" + (f", and {why}" if why else "")
        message = f"The queue is full: {wait}. Try again later."
        return overloaded(message, self.retry_after_s(now))

    def retry_after_s(self, now: float) -> int:
        """Seconds to empty the queue, at most `LONGEST_RETRY_AFTER_S`."""
        stalled_s = min(LONGEST_RETRY_AFTER_S, math.ceil(self._stalls.longest(now)))
        return max(stalled_s, self.placement_rate.seconds_for(len(self._waiting), now))
