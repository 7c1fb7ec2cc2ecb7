"""Notices when drafts are no longer accepted. That changes no output, so nothing else would tell."""

import logging
from collections import deque

logger = logging.getLogger(__name__)

WINDOW = 64  # verifies that the average is over
MIN_ACCEPT_LENGTH = 1.05  # 1.0: not one draft was kept
COOL_DOWN_S = 300.0


class AcceptCanary:
    """Watches the accept lengths of verifies that had drafts; warns at most once per cool-down."""

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
                "drafts are not accepted: accept length %.2f over the last %d verifies; the head may not fit this model "
                "or this kind of text",
                length,
                len(self._recent),
            )

    def __repr__(self) -> str:
        return f"<AcceptCanary {self.accept_length} over {len(self._recent)}>"
