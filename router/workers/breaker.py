"""The circuit breaker of one worker: after several failures within a window, attempts avoid the worker for a
while. Pure."""

from collections import deque
from dataclasses import dataclass, field

BREAKER_FAILURES = 3  # failures within the window until the worker is avoided
BREAKER_WINDOW_S = 30.0
BREAKER_OPEN_S = 10.0  # after this time one attempt tests the worker
# concurrent attempts of a returning worker: at first, and from which it counts as closed
FIRST_RETURN, FULL_RETURN = (2, 16)


@dataclass(eq=False)
class Breaker:
    """The state of one worker's breaker.

    closed     attempts go there                        BREAKER_FAILURES failures within the window -> open
    open       avoided while others can serve           after BREAKER_OPEN_S -> half open
    half open  takes one attempt                        success -> returning; failure -> open; any other end
               -> half open
    returning  takes 2 attempts at once, each success   at FULL_RETURN attempts -> closed; one failure -> open
               allows one more

    Without another worker, attempts go to an avoided one too, and count in the same way. Failures that the
    request itself caused do not count.
    """

    opened_at: float | None = None
    probe: tuple[str, int] | None = None  # (room, epoch) of the attempt that tests the worker
    allowed: int = 0  # concurrent attempts while it returns; 0: not returning
    _held: set[tuple[str, int]] = field(default_factory=set)  # attempts on the worker while it returns
    _failures: deque[float] = field(default_factory=lambda: deque(maxlen=BREAKER_FAILURES))

    def state(self, now: float) -> str:
        if self.opened_at is None:
            return "returning" if self.allowed else "closed"
        return "open" if now - self.opened_at < BREAKER_OPEN_S else "half open"

    def is_avoided(self, now: float) -> bool:
        if self.opened_at is None and not self.allowed:  # the usual case
            return self.probe is not None
        is_full = self.allowed > 0 and len(self._held) >= self.allowed
        return self.state(now) == "open" or self.probe is not None or is_full

    def placed(self, room: str, epoch: int) -> None:
        """Counts an attempt that is placed on the worker."""
        if self.opened_at is not None and self.probe is None:
            self.probe = room, epoch
        if self.allowed:
            self._held.add((room, epoch))

    def judge(self, room: str, epoch: int, is_good: bool, now: float) -> bool:
        """Counts the worker's outcome in an attempt; True when this opens the breaker."""
        is_probe = self.probe == (room, epoch)
        if is_good:
            self._succeeded(room, epoch, is_probe)
            return False
        self._failures.append(now)
        is_full = len(self._failures) == BREAKER_FAILURES and now - self._failures[0] <= BREAKER_WINDOW_S
        is_relapse = (room, epoch) in self._held
        if not is_probe and not is_relapse and (self.opened_at is not None or not is_full):
            return False
        self.opened_at, self.probe = now, None
        self._end_return()
        return True

    def left(self, room: str, epoch: int) -> None:
        """Forgets an attempt that is over, however it ended."""
        self._held.discard((room, epoch))
        if self.probe == (room, epoch):
            self.probe = None

    def _succeeded(self, room: str, epoch: int, is_probe: bool) -> None:
        if is_probe:
            self.opened_at = self.probe = None
            self._failures.clear()
            self.allowed = FIRST_RETURN
        elif (room, epoch) in self._held:
            self.allowed += 1
            if self.allowed >= FULL_RETURN:
                self._end_return()

    def _end_return(self) -> None:
        self.allowed = 0
        self._held.clear()
