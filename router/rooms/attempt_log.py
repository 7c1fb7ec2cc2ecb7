"""The log of a room's attempts, written from the messages that the room received and the effects that it
returned. Pure."""

from dataclasses import dataclass, field

from msgspec import Struct

from ...cluster.protocol.messages import (
    Cancel,
    DecodeTimeline,
    Failed,
    Finished,
    FirstToken,
    Gone,
    OfferPrefix,
    Prefill,
    PrefillTimeline,
    Refused,
    Reserve,
    Reserved,
)
from .attempt import RoomEvent
from .effects import Closed, Ended, Failure, Requeued, Settled

RUNNING, OK, REFUSED, FAILED, CANCELLED = "running", "ok", "refused", "failed", "cancelled"


class AttemptLog(Struct, frozen=True, kw_only=True):
    """One attempt in JSON answers. Times are milliseconds since the request was read; null: never."""

    epoch: int
    prefill_instance: str
    decode_instance: str
    placed_ms: float
    reserved_ms: float | None
    """The time when decode reserved its pages."""
    prefilled_ms: float | None
    """The time when token 1 arrived from prefill; null if decode computes the prompt."""
    first_token_ms: float | None
    """The time when its first token went to the client."""
    ended_ms: float | None
    tokens: int
    """Tokens sent to the client."""
    outcome: str
    """running, ok, refused, failed or cancelled."""
    reason: str
    """The kind of its failure or refusal."""


@dataclass(eq=False)
class AttemptNote:
    """One attempt; times are monotonic seconds."""

    epoch: int
    prefill: str
    decode: str
    placed: float
    reserved: float | None = None
    prefilled: float | None = None
    first_token: float | None = None
    next_tokens: float | None = None  # the tokens after the first delivery were delivered
    ended: float | None = None
    prefill_report: PrefillTimeline | None = None
    decode_report: DecodeTimeline | None = None
    num_tokens: int = 0
    outcome: str = RUNNING
    reason: str = ""
    failure_kind: str = ""  # kind of a worker's refusal or failure

    def end(self, outcome: str, reason: str, now: float) -> None:
        """Notes the outcome. The reason of a cancelled attempt may follow later."""
        if self.outcome in (RUNNING, CANCELLED):
            self.ended = now if self.ended is None else self.ended
            self.outcome, self.reason = outcome, reason

    def take_report(self, event: RoomEvent) -> None:
        """Keeps the times that a worker reports with its message."""
        if isinstance(event, FirstToken):
            self.prefill_report = event.timeline
        elif isinstance(event, Finished):
            self.decode_report = event.timeline
            self.prefill_report = event.prefill or self.prefill_report
        elif isinstance(event, Gone) and event.timeline is not None:
            self.decode_report = event.timeline

    def log(self, arrived: float) -> AttemptLog:
        """The attempt with times since `arrived` (monotonic seconds)."""

        def since(moment: float | None) -> float | None:
            return None if moment is None else round((moment - arrived) * 1000, 3)

        return AttemptLog(
            epoch=self.epoch,
            prefill_instance=self.prefill,
            decode_instance=self.decode,
            placed_ms=round((self.placed - arrived) * 1000, 3),
            reserved_ms=since(self.reserved),
            prefilled_ms=since(self.prefilled),
            first_token_ms=since(self.first_token),
            ended_ms=since(self.ended),
            tokens=self.num_tokens,
            outcome=self.outcome,
            reason=self.reason,
        )


@dataclass(eq=False)
class AttemptTrace:
    """All attempts of one room, in order."""

    attempts: list[AttemptNote] = field(default_factory=list)

    @property
    def last(self) -> AttemptNote | None:
        return self.attempts[-1] if self.attempts else None

    def heard(self, event: RoomEvent, now: float) -> None:
        """A message of a worker, before the room handles it. Messages of older attempts are ignored."""
        note = self.last
        if note is None or event.epoch != note.epoch:
            return
        note.take_report(event)
        if isinstance(event, Reserved):
            note.reserved = now
        elif isinstance(event, FirstToken):
            note.prefilled = now
        elif isinstance(event, (Refused, Failed)):
            note.failure_kind = event.kind if isinstance(event, Failed) else "Refused"

    def delivered(self, num_tokens: int, now: float) -> None:
        """Tokens were delivered to the client."""
        if self.attempts:
            note = self.attempts[-1]
            note.num_tokens += num_tokens
            if note.first_token is None:
                note.first_token = now
            elif note.next_tokens is None:
                note.next_tokens = now

    def sent(self, message: Reserve | Prefill | OfferPrefix | Cancel, now: float) -> None:
        """A message was sent to a worker."""
        if isinstance(message, Reserve):
            prefill = message.prefill_instance or message.instance
            self.attempts.append(AttemptNote(message.epoch, prefill, message.instance, now))
        elif isinstance(message, Cancel) and self.last is not None and message.epoch == self.last.epoch:
            self.last.end(CANCELLED, "", now)

    def did(self, effect: Ended | Settled | Failure | Requeued | Closed, now: float) -> None:
        """Any other effect of the room."""
        note = self.last
        if note is None:
            return
        if isinstance(effect, (Ended, Settled)):
            note.end(OK, "", now)
        elif isinstance(effect, Failure):
            note.end(FAILED, effect.kind, now)
        elif isinstance(effect, Requeued):
            failure = effect.failure
            note.end(FAILED if failure else REFUSED, failure.kind if failure else note.failure_kind, now)
