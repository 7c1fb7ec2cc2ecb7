"""The life of one request in the router: a pure state machine with events in and effects out, without clock
or socket.

A room is one request. An attempt is one try of it on a (prefill, decode) pair; its epoch is its number, from
0.

    QUEUED      waits for a pair                     place() -> PREFILLING
    PREFILLING  sent to both workers, no token yet   token 1 and Reserved -> STREAMING; failed -> QUEUED or
                CLOSING
    STREAMING   the client has tokens of the attempt Finished -> CLOSED; failed -> QUEUED or CLOSING;
                cancelled -> CLOSING
    CLOSING     the client has its end; Cancel went to all workers that may hold something, their Gone is
                awaited
    CLOSED      no worker holds anything of the room

Token 1 is withheld until decode has sent Reserved, so a refusal never follows a delivered token. The prompt
of a new attempt is the client's prompt and all tokens delivered so far. Sampling depends on the absolute
position only, so the client's stream continues without a seam. A room gets `max_attempts` attempts; refusals
are not counted. Deaths of its workers can end it sooner, see `quarantine`. A room with a deadline ends with
an error when the deadline passes, in every state. A stop string ends a room in the router while decode still
works. Decode's account of the cost comes with its Gone, and the room counts as settled after at most
`accounts_s`. Messages of other attempts and of other workers are dropped and counted.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from ...cluster.protocol.messages import (
    DecodeTimeline,
    Failed,
    Finished,
    FirstToken,
    Gone,
    OfferPrefix,
    Prefill,
    PrefillTimeline,
    PromptLogprobs,
    Refused,
    Reserve,
    Reserved,
    RoutedExperts,
    Sampling,
    TokenItem,
)
from .attempt import (
    DEADLINE_EXCEEDED,
    DRAINING,
    PEER_LOST,
    RETRACTED,
    UNSHARED,
    Attempt,
    RoomEvent,
)
from .effects import (
    Closed,
    Deliver,
    Effect,
    Ended,
    Failure,
    Freed,
    Outcome,
    Pair,
    Requeued,
    SendOrder,
    Settled,
    Timeouts,
)
from .pending_cancels import PendingCancels
from .quarantine import MAX_DEATHS, QUARANTINED, DeathRecord
from .retries import MAX_ATTEMPTS

MAX_RETRACTIONS = 32  # a worker that retracts a room more often is at fault

T = TypeVar("T", PrefillTimeline, DecodeTimeline)


class RoomPhase(Enum):
    """The states of a room; the table in the module docstring has their transitions."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    STREAMING = "streaming"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass
class Stamps:
    """Times of a room's events in monotonic seconds; None before the event."""

    created: float
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None


@dataclass(eq=False)
class Room:
    """One request, from its arrival to the last Gone."""

    room: str
    prompt_ids: list[int]
    sampling: Sampling
    created: float
    timeouts: Timeouts = field(default_factory=Timeouts)
    max_attempts: int = MAX_ATTEMPTS
    deadline: float | None = None  # monotonic seconds

    phase: RoomPhase = RoomPhase.QUEUED
    epoch: int = -1
    output_ids: list[int] = field(default_factory=list)  # tokens delivered to the client by all attempts
    failed_on: set[str] = field(default_factory=set)
    num_stale: int = 0
    num_retractions: int = 0  # how often a worker gave its pages to another room
    num_unshared: int = 0  # how often the room whose prompt it should share had none
    cached_tokens: int = 0  # cached tokens of the client's prompt, as the first completed prefill reported
    prefill_timeline: PrefillTimeline | None = None  # sum over all attempts that reported, like decode's
    decode_timeline: DecodeTimeline | None = None

    def __post_init__(self) -> None:
        self.stamps = Stamps(self.created)
        self._num_failed = 0
        self.deaths = DeathRecord()
        self._progress_at = self.created
        self._pending = PendingCancels(self.room)
        self._retracted: set[int] = set()  # attempts whose pages a worker gave to another room
        self._settle_by: float | None = None  # end of the wait for decode's account of a stopped room
        self._attempt: Attempt | None = None
        self._last_failure: Failure | None = (
            None  # failure of the last attempt, while the fate of a silent worker is unknown
        )
        self._proof_by = math.inf

    def __repr__(self) -> str:
        return (
            f"Room({self.room[:8]} {self.phase.value} epoch={self.epoch} out={self.num_output} "
            f"held=[{self._pending}])"
        )

    @property
    def is_live(self) -> bool:
        """Whether the client still waits for output."""
        return self.phase in (RoomPhase.QUEUED, RoomPhase.PREFILLING, RoomPhase.STREAMING)

    @property
    def is_at_workers(self) -> bool:
        """Whether an attempt runs for a live client."""
        return self.phase in (RoomPhase.PREFILLING, RoomPhase.STREAMING)

    @property
    def is_settling(self) -> bool:
        """Whether decode's account of a stopped room is still awaited."""
        return self._settle_by is not None

    @property
    def is_on_probation(self) -> bool:
        """Whether the room has a record of deaths and its attempt has not yet given a token of decode."""
        attempt = self._attempt
        return bool(self.deaths) and attempt is not None and self.is_at_workers and attempt.num_output < 2

    @property
    def alone_on(self) -> tuple[str, ...]:
        """The workers reserved for this room: it is on probation there, and the next death may be proof.

        Else ().
        """
        attempt = self._attempt
        is_alone = attempt is not None and self.deaths.must_be_alone and self.is_on_probation
        return attempt.instances if attempt is not None and is_alone else ()

    @property
    def pair(self) -> Pair | None:
        """The pair of the current or last attempt; None while the room waits for a pair."""
        return self._attempt.pair if self._attempt is not None else None

    @property
    def has_whole_prompt(self) -> bool:
        """Whether decode has, or gets, the client's prompt and no output of earlier attempts behind it."""
        return self._attempt is not None and self.is_at_workers and not self._attempt.num_before

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.output_ids)

    @property
    def instances(self) -> set[str]:
        """The workers that may hold something of this room."""
        return self._pending.instances

    def needs(self, instance: str) -> bool:
        """Whether the attempt still needs the worker: prefill until token 1 is here, decode to the end."""
        attempt = self._attempt
        if attempt is None or not self.is_at_workers or instance not in attempt.instances:
            return False
        return instance == attempt.pair.decode or not attempt.has_first or attempt.aborted is not None

    # --- commands -------------------------------------------------------------------------------------------

    def place(self, pair: Pair, now: float) -> list[Effect]:
        """Starts the next attempt on `pair`. The room must be QUEUED."""
        assert self.phase is RoomPhase.QUEUED, self
        self.epoch += 1
        self._attempt = Attempt(pair=pair, epoch=self.epoch, placed_at=now, num_before=self.num_output)
        self.phase = RoomPhase.PREFILLING
        self._progress_at = now
        self._pending.add(pair.instances, self.epoch)
        return [SendOrder(order.instance, order) for order in self._orders(self._attempt, now)]

    def resend_orders(self, instance: str, now: float) -> list[Effect]:
        """Sends an unanswered order to `instance` again. The worker drops duplicates by (room, epoch)."""
        attempt = self._attempt
        if attempt is None or self.phase is not RoomPhase.PREFILLING or not attempt.is_answer_due(instance):
            return []
        return [
            SendOrder(instance, order) for order in self._orders(attempt, now) if order.instance == instance
        ]

    def cancel(self, now: float) -> list[Effect]:
        """Ends the room when the client has left or needs no more output.

        Legal in every state, idempotent.
        """
        return self._close(now) if self.is_live else []

    def stop(self, now: float) -> list[Effect]:
        """Ends the room at a stop string that the router found.

        `Settled` follows, in these effects or in later ones.
        """
        if not self.is_live:
            return []
        attempt = self._attempt
        if attempt is not None and self._pending.has(attempt.pair.decode, self.epoch):
            self._settle_by = now + self.timeouts.accounts_s
            return self._close(now)
        return [Settled(), *self._close(now)]

    def give_up(self, kind: str, message: str, now: float, retry_after_s: int = 0) -> list[Effect]:
        """Ends a live room with an error. `retry_after_s` of 0 means unknown."""
        return [Failure(kind, message, retry_after_s), *self._close(now)] if self.is_live else []

    def worker_lost(
        self, instance: str, now: float, *, is_dead: bool = True, unreachable_since: float | None = None
    ) -> list[Effect]:
        """A worker is gone, or has dropped its rooms.

        `is_dead` holds the loss against the request. It is false for a worker that lives and has dropped its
        rooms, and for a death that another request caused. A worker unreachable since before the attempt
        never received the request, so its death does not count either.
        """
        effects, epochs = self._pending.lose(instance)
        attempt = self._attempt
        if is_dead:
            self.deaths.lost(instance, unreachable_since)
        else:
            self.deaths.cleared(instance)
        if self.phase is RoomPhase.CLOSING:
            settled = self._settle() if attempt is not None and instance == attempt.pair.decode else []
            return effects + settled + self._maybe_closed()
        if attempt is None or self.epoch not in epochs:
            return effects + (self._quarantine(now) if self.phase is RoomPhase.QUEUED else [])
        # Once token 1 is here, the loss of prefill is no failure: decode reports it if the hand-off breaks.
        if self.needs(instance):
            self.failed_on.add(instance)
            if is_dead:
                self.deaths.lost(instance, unreachable_since, attempt.placed_at)
            effects += self._attempt_failed("PeerLost", "a worker was lost", True, now)
        return effects

    @property
    def quiet_until(self) -> float:
        """Until this time `tick` has nothing to do if only tokens arrive.

        The dispatcher skips the room until then.
        """
        attempt = self._attempt
        if (
            self.phase is not RoomPhase.STREAMING
            or attempt is None
            or attempt.aborted is not None
            or self.epoch > 0
        ):
            return 0.0  # a worker may still hold an earlier attempt
        late = self._progress_at + self.timeouts.token_s
        return late if self.deadline is None else min(late, self.deadline)

    def tick(self, now: float) -> list[Effect]:
        """Ends an attempt without progress, a room past its deadline, and a wait that has become
        pointless."""
        effects = self._pending.tick(now, self.timeouts.gone_s)
        if self.phase is RoomPhase.CLOSING:
            is_late = self._settle_by is not None and now >= self._settle_by
            return effects + (self._settle() if is_late else []) + self._maybe_closed()
        if self.is_live and self.deadline is not None and now >= self.deadline:
            return effects + self.give_up(DEADLINE_EXCEEDED, "the deadline passed", now)
        if (failure := self._last_failure) is not None and self.phase is RoomPhase.QUEUED:
            is_known = now >= self._proof_by or not self.deaths.awaits_proof
            return effects + (self.give_up(failure.kind, failure.message, now) if is_known else [])
        if self._attempt is not None and self.is_at_workers:
            if (word := self._attempt.overdue_word(now)) is not None:
                return effects + self._on_failed(self._attempt, word, now)
            if now - self._progress_at > self._attempt.patience(self.timeouts):
                effects += self._blame(self._attempt.waits_for)
                effects += self._attempt_failed("Timeout", "a worker made no progress", True, now)
        return effects

    def excuse(self, seconds: float) -> None:
        """A worker or the router stood still for so long, which is no lack of progress."""
        self._progress_at += seconds

    # --- events from workers --------------------------------------------------------------------------------

    def on(self, message: RoomEvent, instance: str, now: float) -> list[Effect]:
        """Handles one message about this room from worker `instance`."""
        if isinstance(message, Gone):
            return self._on_gone(message, instance)
        attempt = self._attempt
        if attempt is None or not self.is_at_workers or not attempt.accepts(message, instance):
            self.num_stale += 1
            return self._late_retraction(message, instance)
        return _HANDLERS[type(message)](self, attempt, message, now)

    def _late_retraction(self, message: RoomEvent, instance: str) -> list[Effect]:
        """An attempt that ended otherwise had lost its pages, too: the next ones must hold theirs.

        It counts after the worker's Gone, too, which may have overtaken it.
        """
        if not (self.is_live and isinstance(message, Failed) and message.kind == RETRACTED):
            return []
        if message.epoch > self.epoch or message.epoch in self._retracted:
            return []
        self._retracted.add(message.epoch)
        self.num_retractions = min(MAX_RETRACTIONS, self.num_retractions + 1)
        if not self._pending.has(instance, message.epoch):
            return []
        return self._pending.drop(instance, message.epoch)

    def _on_reserved(self, attempt: Attempt, message: Reserved, now: float) -> list[Effect]:
        attempt.is_reserved = True
        self._progress_at = now
        if attempt.pair.is_local and self.prefill_timeline is None and not self.num_output:
            self.cached_tokens = min(message.have, self.num_prompt)
        return self._advance(attempt, now)

    def _on_refused(self, attempt: Attempt, message: Refused, now: float) -> list[Effect]:
        effects = self._pending.drop(message.instance, self.epoch)
        if self.phase is RoomPhase.STREAMING:  # decode has already reserved: too late to refuse
            return effects + self._attempt_failed("Refused", message.reason, False, now)
        if message.retry_after_ms == 0:
            return [*effects, *self.give_up("Refused", message.reason, now)]
        return effects + self._requeue(Requeued(now + message.retry_after_ms / 1000), now)

    def _on_prompt_logprobs(self, attempt: Attempt, message: PromptLogprobs, now: float) -> list[Effect]:
        attempt.keep_scores(message)
        return []

    def _on_routed_experts(self, attempt: Attempt, message: RoutedExperts, now: float) -> list[Effect]:
        attempt.keep_experts(message)
        return []

    def _on_first_token(self, attempt: Attempt, message: FirstToken, now: float) -> list[Effect]:
        if attempt.first is not None:
            self.num_stale += 1
            return []
        attempt.first = message
        if self.prefill_timeline is None:
            self.cached_tokens = min(message.timeline.cached_tokens, self.num_prompt)
        self.prefill_timeline = summed(self.prefill_timeline, message.timeline)
        self._progress_at = now
        return self._advance(attempt, now)

    def _on_tokens(self, attempt: Attempt, item: TokenItem, now: float) -> list[Effect]:
        self._progress_at = now
        if attempt.is_next(item):
            return self._deliver(attempt, item, now) + self._maybe_finished(attempt, now)
        if not attempt.keep(item):
            self.num_stale += 1
            return []
        if attempt.is_flooded:
            blamed = self._blame(attempt.pair.decode)
            return blamed + self._attempt_failed(
                "RemoteProtocolError", "tokens arrived out of order", True, now
            )
        return self._advance(attempt, now)

    def _on_finished(self, attempt: Attempt, message: Finished, now: float) -> list[Effect]:
        self._progress_at = now
        if message.output_tokens == 0:
            return [
                Ended(message.reason),
                *self._pending.drop(message.instance, self.epoch),
                *self._close(now),
            ]
        if attempt.finished is not None:
            self.num_stale += 1
            return []
        attempt.finished = message
        self.decode_timeline = summed(self.decode_timeline, message.timeline)
        if message.prefill is not None:
            if attempt.pair.is_local and not attempt.num_before:  # perhaps more than when decode reserved
                found = max(self.cached_tokens, message.prefill.cached_tokens)
                self.cached_tokens = min(found, self.num_prompt)
            self.prefill_timeline = summed(self.prefill_timeline, message.prefill)
        return self._maybe_finished(attempt, now)

    def _on_failed(self, attempt: Attempt, message: Failed, now: float) -> list[Effect]:
        if attempt.defers(message, now + self.timeouts.word_s):
            dropped = self._pending.drop(message.instance, self.epoch)
            if self._pending.has(attempt.pair.prefill, self.epoch):
                return dropped
            # the worker's earlier message already said that it had dropped all its rooms
            self.failed_on.add(attempt.pair.prefill)
            return dropped + self._attempt_failed("PeerLost", "a worker was lost", True, now)
        is_retracted = message.kind == RETRACTED and self.num_retractions < MAX_RETRACTIONS
        if (is_retracted or message.kind == DRAINING) and self.num_output < self.sampling.max_new_tokens:
            if is_retracted:
                self.num_retractions += 1
                self._retracted.add(self.epoch)
            is_preempted = is_retracted and message.is_preempted
            again = Requeued(now, is_retracted=is_retracted, is_preempted=is_preempted)
            return self._pending.drop(message.instance, self.epoch) + self._requeue(again, now)
        if message.kind == UNSHARED and attempt.pair.shares:
            self.num_unshared += 1
            again = Requeued(now, is_unshared=True)
            return self._pending.drop(message.instance, self.epoch) + self._requeue(again, now)
        self.failed_on.update(attempt.unable(message))
        effects = self._blame(*attempt.at_fault(message))
        if message.kind == PEER_LOST:
            self.deaths.suspect(attempt.at_fault(message), attempt.placed_at)
        effects += self._pending.drop(message.instance, self.epoch)
        is_retryable = message.retryable and message.kind != DEADLINE_EXCEEDED
        return effects + self._attempt_failed(message.kind, message.message, is_retryable, now)

    def _on_gone(self, message: Gone, instance: str) -> list[Effect]:
        gone = self._pending.gone(instance, message.epoch)
        self.deaths.cleared(instance)
        effects = list(gone)
        if gone and message.timeline is not None:
            self.decode_timeline = summed(self.decode_timeline, message.timeline)
        if gone and self._attempt is not None and instance == self._attempt.pair.decode:
            effects += self._settle()
        return effects + (self._maybe_closed() if self.phase is RoomPhase.CLOSING else [])

    def _orders(self, attempt: Attempt, now: float) -> list[Reserve | Prefill | OfferPrefix]:
        deadline_ms = 0 if self.deadline is None else max(1, int((self.deadline - now) * 1000))
        return attempt.orders(self.room, self.prompt_ids, self.output_ids, self.sampling, deadline_ms)

    # --- tokens to the client -------------------------------------------------------------------------------

    def _advance(self, attempt: Attempt, now: float) -> list[Effect]:
        """Delivers all tokens that are contiguous now."""
        first = attempt.first
        if not attempt.is_reserved or not attempt.has_first:
            return []
        effects: list[Effect] = []
        if attempt.num_output == 0 and first is not None:
            self.phase = RoomPhase.STREAMING
            # Prefill's queue no longer carries this room, though its pages wait for the hand-off.
            done: list[Effect] = [
                Outcome(attempt.pair.prefill, self.epoch, True),
                Freed(attempt.pair.prefill, self.epoch),
            ]
            effects += [*self._deliver(attempt, attempt.head(), now), *done]
            if first.finish:
                return [*effects, Ended(first.finish), *self._close(now)]
        while (item := attempt.next_item()) is not None:
            self.phase = RoomPhase.STREAMING
            effects += self._deliver(attempt, item, now)
        return effects + self._maybe_finished(attempt, now)

    def _deliver(self, attempt: Attempt, item: TokenItem, now: float) -> list[Effect]:
        skip = attempt.num_output - item.seq  # tokens of the item that were already delivered
        ids = item.ids[skip:]
        attempt.num_output += len(ids)
        self.output_ids += ids
        self.stamps.first_token = self.stamps.first_token or now
        self.stamps.last_token = now
        experts = attempt.take_experts(item, skip)
        return [Deliver(ids, item.logprobs[skip:], attempt.take_scores(), experts)]

    def _maybe_finished(self, attempt: Attempt, now: float) -> list[Effect]:
        finished = attempt.finished
        if finished is None or self.phase is not RoomPhase.STREAMING or not attempt.is_complete:
            return []
        freed = self._pending.finish(self.epoch)  # decode has already released prefill
        done = Outcome(attempt.pair.decode, self.epoch, True)
        return [Ended(finished.reason), done, *freed, *self._close(now)]

    # --- ends -----------------------------------------------------------------------------------------------

    def _blame(self, *instances: str) -> list[Effect]:
        self.failed_on.update(instances)
        return [Outcome(instance, self.epoch, False) for instance in instances]

    def _attempt_failed(self, kind: str, message: str, retryable: bool, now: float) -> list[Effect]:
        self._num_failed += 1
        # all tokens are here; only decode's confirmation is missing
        if self.num_output >= self.sampling.max_new_tokens:
            is_stop = self.output_ids[-1] in self.sampling.stop_token_ids
            return [Ended("stop" if is_stop else "length"), *self._close(now)]
        if quarantined := self._quarantine(now):
            return quarantined
        if retryable and self._num_failed >= self.max_attempts and self.deaths.awaits_proof:
            self._last_failure, self._proof_by = Failure(kind, message), now + self.timeouts.suspect_s
            return self._requeue(Requeued(math.inf, self._last_failure), now)
        if retryable and self._num_failed < self.max_attempts:
            not_before = now + self.timeouts.suspect_s if self.deaths.is_open else now
            return self._requeue(Requeued(not_before, Failure(kind, message)), now)
        return self.give_up(kind, message, now)

    def _quarantine(self, now: float) -> list[Effect]:
        message = f"{MAX_DEATHS} workers were lost while they served it"
        return self.give_up(QUARANTINED, message, now) if self.deaths.is_proven else []

    def _requeue(self, effect: Requeued, now: float) -> list[Effect]:
        effects = self._pending.cancel(now)
        self.phase = RoomPhase.QUEUED
        self._attempt = None
        return [*effects, effect]

    def _settle(self) -> list[Effect]:
        """Marks the cost of the room as final."""
        was_due, self._settle_by = self._settle_by, None
        return [] if was_due is None else [Settled()]

    def _close(self, now: float) -> list[Effect]:
        self.stamps.ended = now
        self.phase = RoomPhase.CLOSING
        return self._pending.cancel(now) + self._maybe_closed()

    def _maybe_closed(self) -> list[Effect]:
        if self._pending:
            return []
        self.phase = RoomPhase.CLOSED
        return [*self._settle(), Closed()]

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant of the state table does not hold."""
        attempt = self._attempt
        assert (self.phase is RoomPhase.CLOSED) <= (not self._pending), self
        assert (attempt is not None) == self.is_at_workers or not self.is_live, self
        has_tokens = attempt is not None and attempt.num_output > 0
        assert (self.phase is RoomPhase.STREAMING) == has_tokens or not self.is_live, self
        assert attempt is None or self.num_output == attempt.num_before + attempt.num_output, self
        assert self.is_settling <= (self.phase is RoomPhase.CLOSING), self
        assert (self.phase is RoomPhase.CLOSING) <= self._pending.are_cancelled, self


_HANDLERS: dict[type, Callable[..., list[Effect]]] = {
    Reserved: Room._on_reserved,
    Refused: Room._on_refused,
    PromptLogprobs: Room._on_prompt_logprobs,
    RoutedExperts: Room._on_routed_experts,
    FirstToken: Room._on_first_token,
    TokenItem: Room._on_tokens,
    Finished: Room._on_finished,
    Failed: Room._on_failed,
}


def summed(total: T | None, part: T) -> T:
    """The sum of two timelines of the same kind; `part` if there is no `total` yet."""
    if total is None:
        return part
    return type(part)(**{name: getattr(total, name) + getattr(part, name) for name in part.__struct_fields__})
