"""What a decode worker counts of its steps, for heartbeats and for each room's account."""

from collections import deque
from collections.abc import Sequence

from ..engine.speculative.canary import AcceptCanary
from ..engine.speculative.step.result import StepResult
from .queues import Room

RECENT_VERIFIES = 256  # window of the accept length that heartbeats report
NAMES = (
    "requests", "finished", "failed", "cancelled", "refused", "tokens", "steps", "verify_steps", "drafted_tokens",
    "accepted_tokens", "handoff_bytes", "handoff_blocks", "have_tokens", "local_prefills", "local_prefill_tokens",
    "handoffs_aborted",
)  # fmt: skip


class Accounts:
    """Counters by name, and how the drafter fares."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = dict.fromkeys(NAMES, 0)
        self._recent: deque[int] = deque(maxlen=RECENT_VERIFIES)
        self._canary = AcceptCanary()

    def __repr__(self) -> str:
        return f"<Accounts {self.counters['steps']:g} steps, {self.counters['tokens']:g} tokens>"

    @property
    def accept_length(self) -> float | None:
        """Tokens committed per verify, of late; None before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    def step(self, batch: Sequence[Room], result: StepResult, now: float) -> None:
        """One decode step of `batch` at `now` (monotonic seconds)."""
        counters = self.counters
        counters["steps"] += 1
        for room, tokens, drafted in zip(batch, result.tokens, result.drafted, strict=True):
            counters["tokens"] += len(tokens)
            if drafted and tokens:
                room.verify_steps += 1
                room.drafted += drafted
                room.accepted += len(tokens) - 1
                self._recent.append(len(tokens))
                self._canary.observe(len(tokens), now)
                counters["verify_steps"] += 1
                counters["drafted_tokens"] += drafted
                counters["accepted_tokens"] += len(tokens) - 1
