"""One-time tickets. A peer receives a ticket over an authenticated link and opens one connection to another
socket with it.

The ticket crosses that connection in the clear, so it is void after its first use. An eavesdropper that is
faster than the owner gains a connection that carries only sealed blocks.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

TICKET_BYTES = 16
TICKET_S = 30.0
MAX_TICKETS = 4096
MAX_PER_USER = 4  # beyond it a user's new ticket displaces its oldest


class Tickets:
    """The unused tickets, bounded in number and age. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # ticket -> user, end; the oldest first
        self._unused: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def __repr__(self) -> str:
        return f"Tickets(unused={len(self._unused)})"

    def issue(self, user: str) -> str:
        """A new ticket of `user`, in hex."""
        ticket = secrets.token_hex(TICKET_BYTES)
        with self._lock:
            self._sweep()
            own = [known for known, (owner, _) in self._unused.items() if owner == user]
            for known in own[: max(0, len(own) - MAX_PER_USER + 1)]:
                del self._unused[known]
            while len(self._unused) >= MAX_TICKETS:
                self._unused.popitem(last=False)
            self._unused[ticket] = (user, self._clock() + TICKET_S)
        return ticket

    def redeem(self, ticket: str) -> str:
        """Redeems a ticket and returns its user; "" for an unknown, used or expired ticket."""
        with self._lock:
            self._sweep()
            return self._unused.pop(ticket, ("", 0.0))[0]

    def _sweep(self) -> None:
        now = self._clock()
        while self._unused and next(iter(self._unused.values()))[1] <= now:
            self._unused.popitem(last=False)
