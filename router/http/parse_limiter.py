"""Bounds the requests that are being prepared: schema compiled, template rendered, text tokenised. Pure.

The number of tokens is not known before that work, so it has bounds of its own. Limits that need no token
count are checked first: a caller over its limits, or a request that a full queue would refuse, costs no work.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import overloaded
from .rate_limits import Caller, Gate

MAX_READING = 1024  # requests
MAX_READING_BYTES = 256 << 20  # bytes of their bodies together


class ParseLimiter:
    """Counts requests in preparation and the bytes of their bodies."""

    def __init__(self, gate: Gate) -> None:
        self.num_requests = 0
        self.num_bytes = 0
        self._gate = gate

    def __repr__(self) -> str:
        return f"ParseLimiter({self.num_requests} requests, {self.num_bytes} bytes)"

    @contextmanager
    def reading(self, caller: Caller, num_bytes: int, now: float) -> Iterator[None]:
        """Holds a place for a request with a body of `num_bytes`.

        Raises ApiError (429) when a limit is reached.
        """
        if self.num_requests >= MAX_READING or self.num_bytes + num_bytes > MAX_READING_BYTES:
            raise overloaded("Too many requests are being read. Try again later.")
        self._gate.begin(caller, now)
        self.num_requests += 1
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_requests -= 1
            self.num_bytes -= num_bytes
            self._gate.finish(caller)
