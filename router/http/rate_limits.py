"""Callers and their limits: priority, requests and tokens per minute, requests at once. Pure.

A request is charged with its prompt and all the output that it may get, when it is accepted. At its end,
however it ended, the tokens that were not used are given back. Headers `x-ratelimit-*` tell a caller what is
left, in the form of OpenAI's. Each router counts for itself: where clients are spread over several routers,
each enforces its part of the limits (`parts` of a caller).
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from ..errors import ApiError, rate_limited

MINUTE_S = 60.0
REQUESTS, TOKENS = "requests", "tokens"
MAX_CALLERS = 4096  # callers whose use is remembered


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The owner of an API key and its limits. 0 means no limit."""

    id: str = ""  # id of the key
    name: str = ""
    salt: str = ""  # prefix caches are shared only under an equal salt
    priority: int = 0  # lower is served first
    best_priority: int = -100  # the best priority that it may ask for
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_requests: int = 0
    is_operator: bool = False
    is_observer: bool = False
    may_record: bool = True  # workers may record its tokens for training
    parts: int = 1  # routers among which the limits of the key were divided; those here are one part

    @property
    def has_rates(self) -> bool:
        """Whether requests or tokens per minute are limited."""
        return bool(self.requests_per_minute or self.tokens_per_minute)

    @property
    def sees_all(self) -> bool:
        """Whether the caller may see the cluster and the requests of all callers."""
        return not self.id or self.is_operator or self.is_observer

    def may_see(self, caller_id: str) -> bool:
        """Whether the caller may see the requests of the caller `caller_id`."""
        return self.sees_all or caller_id == self.id

    def priority_of(self, asked: int | None) -> int:
        """The priority of a request, from the one it asked for (None: the caller's default)."""
        return self.priority if asked is None else max(asked, self.best_priority)


ANYONE = Caller()  # the caller of every request without keys


@dataclass(eq=False)
class Bucket:
    """A token bucket of one minute's capacity. It may go below zero, so that one large request passes."""

    per_minute: int
    level: float
    filled_at: float

    def wait(self, now: float) -> float:
        """Seconds until the bucket is above zero."""
        self.level = min(
            float(self.per_minute), self.level + (now - self.filled_at) * self.per_minute / MINUTE_S
        )
        self.filled_at = now
        return 0.0 if self.level >= 1.0 else (1.0 - self.level) * MINUTE_S / self.per_minute

    def take(self, amount: int) -> None:
        self.level -= amount

    def give_back(self, amount: int) -> None:
        """Undoes a part of an earlier `take`."""
        self.level = min(float(self.per_minute), self.level + amount)


@dataclass(eq=False)
class _Use:
    num_reading: int = 0
    num_running: int = 0
    buckets: dict[str, Bucket] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        return not self.num_running and not self.num_reading


class Gate:
    """Counts each caller's requests and enforces its limits."""

    def __init__(self) -> None:
        self._uses: OrderedDict[str, _Use] = OrderedDict()  # by id, the latest caller at the end

    def __repr__(self) -> str:
        return (
            f"Gate({len(self._uses)} callers, {sum(use.num_running for use in self._uses.values())} requests)"
        )

    def num_running(self, caller: Caller) -> int:
        use = self._uses.get(caller.id)
        return use.num_running if use is not None else 0

    def enter(self, caller: Caller, num_tokens: int, now: float) -> None:
        """Counts one more running request of `num_tokens` (prompt and output).

        Raises ApiError (429) without counting it.
        """
        use = self._use_of(caller)
        self._check(use, caller, use.num_running, now)
        self._charge(use, caller, num_tokens, now)
        use.num_running += 1

    def charge(self, caller: Caller, num_tokens: int, now: float) -> None:
        """Charges one request of `num_tokens` to the rates."""
        self._charge(self._use_of(caller), caller, num_tokens, now)

    def begin(self, caller: Caller, now: float) -> None:
        """Counts one more request in preparation, whose tokens are not known yet. Raises as `enter`."""
        use = self._use_of(caller)
        self._check(use, caller, use.num_running + use.num_reading, now)
        use.num_reading += 1

    def finish(self, caller: Caller) -> None:
        """A request that had begun is prepared, or was given up."""
        use = self._uses.get(caller.id)
        assert use is not None, caller
        assert use.num_reading > 0, caller
        use.num_reading -= 1

    def leave(self, caller: Caller, unused_tokens: int = 0) -> None:
        """A running request has ended; `unused_tokens` of those that it was charged with were not used."""
        use = self._uses.get(caller.id)
        assert use is not None, caller
        assert use.num_running > 0, caller
        use.num_running -= 1
        if unused_tokens and (bucket := use.buckets.get(TOKENS)) is not None:
            bucket.give_back(unused_tokens)

    def headers(self, caller: Caller, now: float) -> list[tuple[bytes, bytes]]:
        """The header fields that tell `caller` its limits per minute and what is left of them."""
        use, told = self._use_of(caller), []
        for what, per_minute, _ in _limits_of(caller, 0):
            bucket = self._bucket(use, what, per_minute, now)
            bucket.wait(now)
            until_full = (per_minute - bucket.level) * MINUTE_S / per_minute
            values = (str(per_minute), str(max(0, int(bucket.level))), duration(until_full))
            told += [
                (f"x-ratelimit-{name}-{what}".encode(), value.encode())
                for name, value in zip(("limit", "remaining", "reset"), values, strict=True)
            ]
        return told

    def _check(self, use: _Use, caller: Caller, num_requests: int, now: float) -> None:
        if caller.max_requests and num_requests >= caller.max_requests:
            raise _too_many(caller, f"{caller.max_requests} requests at once", 1.0)
        for what, per_minute, _ in _limits_of(caller, 0):
            wait = self._bucket(use, what, per_minute, now).wait(now)
            if wait:
                raise _too_many(caller, f"{per_minute} {what} per minute", wait)

    def _charge(self, use: _Use, caller: Caller, num_tokens: int, now: float) -> None:
        for what, per_minute, amount in _limits_of(caller, num_tokens):
            self._bucket(use, what, per_minute, now).take(amount)

    def _use_of(self, caller: Caller) -> _Use:
        use = self._uses.setdefault(caller.id, _Use())
        self._uses.move_to_end(caller.id)
        if len(self._uses) > MAX_CALLERS:
            idle = next(
                (key for key, known in self._uses.items() if known is not use and known.is_idle), None
            )
            if idle is not None:
                del self._uses[idle]
        return use

    @staticmethod
    def _bucket(use: _Use, what: str, per_minute: int, now: float) -> Bucket:
        bucket = use.buckets.get(what)
        if bucket is None or bucket.per_minute != per_minute:  # the key's entry has changed
            bucket = use.buckets[what] = Bucket(per_minute, float(per_minute), now)
        return bucket


def _limits_of(caller: Caller, num_tokens: int) -> list[tuple[str, int, int]]:
    """Triples (name of the limit, capacity per minute, cost of the request)."""
    asked = ((REQUESTS, caller.requests_per_minute, 1), (TOKENS, caller.tokens_per_minute, num_tokens))
    return [limit for limit in asked if limit[1]]


def _too_many(caller: Caller, limit: str, wait_s: float) -> ApiError:
    at = f" at each of {caller.parts} routers" if caller.parts > 1 else ""
    return rate_limited(f"The key {caller.name!r} is limited to {limit}{at}. Try again later.", wait_s)


def duration(seconds: float) -> str:
    """A time in the form of OpenAI's headers: 120ms, 6s, 1m30s.

    Rounded up to milliseconds, or to seconds from one second on.
    """
    if seconds < 1.0:
        return f"{math.ceil(max(0.0, seconds) * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
