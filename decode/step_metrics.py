"""Counters of a decode worker and of its rooms, advanced by every decode step."""

from collections.abc import Sequence

from ..engine.speculative.step.result import StepResult
from ..worker.retractions import RETRACTION_COUNTERS
from ..worker.role_worker import FIRST_TOKEN_COUNTERS
from .accept_monitor import AcceptMonitor
from .queues import DecodeRoom

DECODE_COUNTERS = (
    "requests", "finished", "failed", "cancelled", "refused", "tokens", "steps", "verify_steps",
    "drafted_tokens", "accepted_tokens", "handoff_bytes", "handoff_blocks", "have_tokens", "local_prefills",
    "local_prefill_tokens", "shared_prompts", "shared_tokens", "unshared", "handoffs_aborted",
    "embedded_tokens", *RETRACTION_COUNTERS, *FIRST_TOKEN_COUNTERS,
)  # fmt: skip


class StepMetrics:
    """Totals by name since the start, and the accept length of late."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = dict.fromkeys(DECODE_COUNTERS, 0)
        self.accepts = AcceptMonitor()

    def __repr__(self) -> str:
        return f"<StepMetrics {self.counters['steps']:g} steps, {self.counters['tokens']:g} tokens>"

    def step(self, batch: Sequence[DecodeRoom], result: StepResult, now: float) -> None:
        """Count one decode step of `batch` at `now` (monotonic seconds).

        Rows without drafts do not count as verifies.
        """
        counters = self.counters
        counters["steps"] += 1
        for room, tokens, drafted in zip(batch, result.tokens, result.drafted, strict=True):
            counters["tokens"] += len(tokens)
            if drafted and tokens:
                room.verify_steps += 1
                room.drafted += drafted
                room.accepted += len(tokens) - 1
                self.accepts.observe(len(tokens), now)
                counters["verify_steps"] += 1
                counters["drafted_tokens"] += drafted
                counters["accepted_tokens"] += len(tokens) - 1
