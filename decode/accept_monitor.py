"""The accept length of drafts: a gauge for heartbeats, and a warning when drafts are no longer accepted.

Rejected drafts change no output, so no other signal would show them.
"""

import logging
from collections import deque

logger = logging.getLogger(__name__)

RECENT_VERIFIES = 256  # window of the accept length that heartbeats report
WINDOW = 64  # verifies that the canary's average is over
MIN_ACCEPT_LENGTH = 1.05  # 1.0: no draft was accepted
COOL_DOWN_S = 300.0


class AcceptCanary:
    """Watches the accept lengths of verifies with drafts.

    Logs a warning when their average over `window` verifies is below `minimum`, at most once per
    `cool_down_s`.
    """

    def __init__(
        self, *, window: int = WINDOW, minimum: float = MIN_ACCEPT_LENGTH, cool_down_s: float = COOL_DOWN_S
    ) -> None:
        self.minimum = minimum
        self.cool_down_s = cool_down_s
        self._recent: deque[int] = deque(maxlen=window)
        self._quiet_until = float("-inf")

    @property
    def accept_length(self) -> float | None:
        """Average over the window; None while it is not full."""
        return sum(self._recent) / len(self._recent) if len(self._recent) == self._recent.maxlen else None

    def observe(self, tokens: int, now: float) -> None:
        """One verify committed `tokens` tokens at `now` (monotonic seconds)."""
        self._recent.append(tokens)
        length = self.accept_length
        if length is not None and length < self.minimum and now >= self._quiet_until:
            self._quiet_until = now + self.cool_down_s
            logger.warning(
                "drafts are not accepted: accept length %.2f over the last %d verifies; the head may not fit "
                "this model "
                "or this kind of text",
                length,
                len(self._recent),
            )

    def __repr__(self) -> str:
        return f"<AcceptCanary {self.accept_length} over {len(self._recent)}>"


class AcceptMonitor:
    """The accept length of recent verifies, watched by a canary."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=RECENT_VERIFIES)
        self._canary = AcceptCanary()

    def __repr__(self) -> str:
        return f"<AcceptMonitor {self.accept_length} over {len(self._recent)}>"

    @property
    def accept_length(self) -> float | None:
        """Tokens committed per verify, over the last RECENT_VERIFIES; None before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    def observe(self, tokens: int, now: float) -> None:
        """One verify with drafts committed `tokens` tokens at `now` (monotonic seconds)."""
        self._recent.append(tokens)
        self._canary.observe(tokens, now)
