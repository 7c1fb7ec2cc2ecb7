"""The life of one request in the router, as a pure state machine: events in, effects out, no clock and no socket.

A room is one request; an attempt is one try of it on a (prefill, decode) pair and has an epoch of its own.

    QUEUED      waits for a pair                     place() -> PREFILLING
    PREFILLING  sent to both workers, no token yet   token 1 and Reserved -> STREAMING; failed -> QUEUED or CLOSING
    STREAMING   the client has tokens                Finished -> CLOSED; failed, cancelled -> CLOSING
    CLOSING     the client has its end; Cancel went to the workers that may hold something, their Gone is awaited
    CLOSED      nothing of the room is left anywhere

Token 1 is withheld until decode has said Reserved, so that a refusal never comes after a token reached the client. An
attempt that fails before that is repeated once. A room with a deadline ends with an error when it is over, in every state.
A stop string ends a room here, while decode still works: what decode spent on it comes with its Gone, which is awaited for
`accounts_s` at most before the room counts as settled. Whatever comes from another attempt or another worker than the
attempt's own is dropped and counted.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..cluster.messages import (
    Cancel,
    DecodeTimeline,
    Failed,
    Finished,
    FirstToken,
    Gone,
    Prefill,
    PrefillTimeline,
    Refused,
    Reserve,
    Reserved,
    Sampling,
    TokenItem,
)
from .room_effects import Broken, Closed, Deliver, Effect, Ended, Freed, Pair, Requeued, Send, Settled, Timeouts
from .room_parts import Hold, Phase, RoomEvent, Stamps

MAX_EARLY_ITEMS = 256  # decode's items that wait for prefill's token 1
DEADLINE_EXCEEDED = "DeadlineExceeded"  # also the kind of a worker's Failed


@dataclass(eq=False)
class Room:
    """One request, from its arrival to the last Gone."""

    room: str
    prompt_ids: list[int]
    sampling: Sampling
    created: float
    timeouts: Timeouts = field(default_factory=Timeouts)
    max_retries: int = 1
    deadline: float | None = None  # monotonic seconds

    phase: Phase = Phase.QUEUED
    epoch: int = -1
    pair: Pair | None = None
    failed_on: set[str] = field(default_factory=set)
    num_output: int = 0
    num_stale: int = 0
    prefill_timeline: PrefillTimeline | None = None
    decode_timeline: DecodeTimeline | None = None

    def __post_init__(self) -> None:
        self.stamps = Stamps(self.created)
        self._retries = 0
        self._progress_at = self.created
        self._holds: list[Hold] = []
        self._settle_by: float | None = None  # until then decode's account of a stopped room is awaited
        self._reset_attempt()

    def __repr__(self) -> str:
        held = ",".join(hold.instance[:6] for hold in self._holds)
        return f"Room({self.room[:8]} {self.phase.value} epoch={self.epoch} out={self.num_output} held=[{held}])"

    def _reset_attempt(self) -> None:
        self._is_reserved = False
        self._early: dict[int, TokenItem] = {}
        self._first: FirstToken | None = None
        self._finished: Finished | None = None

    @property
    def is_live(self) -> bool:
        """Whether the client still waits for something."""
        return self.phase in (Phase.QUEUED, Phase.PREFILLING, Phase.STREAMING)

    @property
    def is_at_workers(self) -> bool:
        """Whether an attempt runs for a client that waits."""
        return self.phase in (Phase.PREFILLING, Phase.STREAMING)

    @property
    def is_settling(self) -> bool:
        """Whether decode's account of a stopped room is still awaited."""
        return self._settle_by is not None

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def instances(self) -> set[str]:
        """The workers that may hold something of this room."""
        return {hold.instance for hold in self._holds}

    # --- commands -----------------------------------------------------------------------------------------------------

    def place(self, pair: Pair, now: float) -> list[Effect]:
        """Starts the next attempt on `pair`."""
        assert self.phase is Phase.QUEUED, self
        self._reset_attempt()
        self.epoch += 1
        self.pair = pair
        self.phase = Phase.PREFILLING
        self._progress_at = now
        deadline_ms = 0 if self.deadline is None else max(1, int((self.deadline - now) * 1000))
        self._holds += [Hold(pair.prefill, self.epoch), Hold(pair.decode, self.epoch)]
        reserve = Reserve(
            room=self.room,
            epoch=self.epoch,
            instance=pair.decode,
            prompt_ids=self.prompt_ids,
            sampling=self.sampling,
            deadline_ms=deadline_ms,
            prefill_endpoint=pair.prefill_endpoint,
            prefill_instance=pair.prefill,
        )
        prefill = Prefill(
            room=self.room,
            epoch=self.epoch,
            instance=pair.prefill,
            prompt_ids=self.prompt_ids,
            sampling=self.sampling,
            deadline_ms=deadline_ms,
        )
        return [Send(pair.decode, reserve), Send(pair.prefill, prefill)]

    def cancel(self, now: float) -> list[Effect]:
        """The client left, or has all it wants. Legal in every state, idempotent."""
        return self._close(now) if self.is_live else []

    def stop(self, now: float) -> list[Effect]:
        """The router found the end itself, in a stop string. `Settled` follows, now or later."""
        if not self.is_live:
            return []
        pair = self.pair
        if pair is not None and any(h.instance == pair.decode and h.epoch == self.epoch for h in self._holds):
            self._settle_by = now + self.timeouts.accounts_s
            return self._close(now)
        closing = self._close(now)
        return [Settled(), *closing]

    def give_up(self, kind: str, message: str, now: float) -> list[Effect]:
        """Ends the request with an error."""
        return [Broken(kind, message), *self._close(now)] if self.is_live else []

    def worker_lost(self, instance: str, now: float) -> list[Effect]:
        """A worker's process went away, or fell silent."""
        lost = [hold for hold in self._holds if hold.instance == instance]
        effects: list[Effect] = [Freed(hold.instance, hold.epoch) for hold in lost]
        self._holds = [hold for hold in self._holds if hold.instance != instance]
        pair = self.pair
        if self.phase is Phase.CLOSING:
            settled = self._settle() if pair is not None and instance == pair.decode else []
            return effects + settled + self._maybe_closed()
        if pair is None or self.phase is Phase.QUEUED or not any(hold.epoch == self.epoch for hold in lost):
            return effects
        # With token 1 here, prefill has done its part as far as the router can see; decode tells if the hand-off fails.
        if instance == pair.decode or self._first is None:
            self.failed_on.add(instance)
            effects += self._attempt_failed("PeerLost", "a worker was lost", True, now)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Ends what has made no progress for too long."""
        effects: list[Effect] = []
        for hold in [h for h in self._holds if h.cancelled_at is not None]:
            if now - (hold.cancelled_at or 0.0) > self.timeouts.gone_s:  # the worker's own lease frees it
                self._holds.remove(hold)
                effects.append(Freed(hold.instance, hold.epoch))
        if self.phase is Phase.CLOSING:
            is_late = self._settle_by is not None and now >= self._settle_by
            return effects + (self._settle() if is_late else []) + self._maybe_closed()
        if self.is_live and self.deadline is not None and now >= self.deadline:
            return effects + self.give_up(DEADLINE_EXCEEDED, "the deadline passed", now)
        if self.is_at_workers and now - self._progress_at > self._patience:
            assert self.pair is not None
            waited_on = self.pair.prefill if self._is_reserved and self._first is None else self.pair.decode
            self.failed_on.add(waited_on)
            effects += self._attempt_failed("Timeout", "a worker made no progress", True, now)
        return effects

    @property
    def _patience(self) -> float:
        if self.phase is Phase.STREAMING:
            return self.timeouts.token_s
        return self.timeouts.first_token_s if self._is_reserved else self.timeouts.reserve_s

    # --- events from workers ------------------------------------------------------------------------------------------

    def on(self, message: RoomEvent, instance: str, now: float) -> list[Effect]:
        """One message of worker `instance` about this room."""
        if isinstance(message, Gone):
            return self._on_gone(message, instance)
        if not self._is_current(message, instance):
            self.num_stale += 1
            return []
        handler = _HANDLERS[type(message)]
        return handler(self, message, now)

    def _is_current(self, message: RoomEvent, instance: str) -> bool:
        if self.pair is None or not self.is_at_workers:
            return False
        if isinstance(message, (Reserved, TokenItem, Finished)):
            allowed = instance == self.pair.decode
        elif isinstance(message, FirstToken):
            allowed = instance == self.pair.prefill
        else:
            allowed = instance in (self.pair.prefill, self.pair.decode)
        return allowed and not isinstance(message, Gone) and message.epoch == self.epoch

    def _on_reserved(self, message: Reserved, now: float) -> list[Effect]:
        self._is_reserved = True
        self._progress_at = now
        return self._advance(now)

    def _on_refused(self, message: Refused, now: float) -> list[Effect]:
        effects = self._drop_hold(message.instance)
        if self.phase is Phase.STREAMING:  # decode reserved first: too late to refuse
            return effects + self._attempt_failed("Refused", message.reason, False, now)
        if message.retry_after_ms == 0:
            return [*effects, *self.give_up("Refused", message.reason, now)]
        return effects + self._requeue(now + message.retry_after_ms / 1000, now)

    def _on_first_token(self, message: FirstToken, now: float) -> list[Effect]:
        if self._first is not None:
            self.num_stale += 1
            return []
        assert self.pair is not None
        self._first = message
        self.prefill_timeline = message.timeline
        self._progress_at = now
        return self._advance(now)

    def _on_tokens(self, item: TokenItem, now: float) -> list[Effect]:
        self._progress_at = now
        if item.seq + len(item.ids) <= self.num_output or item.seq in self._early:
            self.num_stale += 1
            return []
        if self.phase is Phase.STREAMING and item.seq == self.num_output and not self._early:
            return self._deliver(item, now) + self._maybe_finished(now)  # the usual case
        if len(self._early) >= MAX_EARLY_ITEMS:
            return self._attempt_failed("RemoteProtocolError", "tokens arrived out of order", True, now)
        self._early[item.seq] = item
        return self._advance(now)

    def _on_finished(self, message: Finished, now: float) -> list[Effect]:
        self._progress_at = now
        self._finished = message
        self.decode_timeline = message.timeline
        return self._maybe_finished(now)

    def _on_failed(self, message: Failed, now: float) -> list[Effect]:
        self.failed_on.add(message.instance)
        effects = self._drop_hold(message.instance)
        is_retryable = message.retryable and message.kind != DEADLINE_EXCEEDED
        return effects + self._attempt_failed(message.kind, message.message, is_retryable, now)

    def _on_gone(self, message: Gone, instance: str) -> list[Effect]:
        gone = [hold for hold in self._holds if hold.instance == instance and hold.cancelled_at is not None]
        self._holds = [hold for hold in self._holds if hold not in gone]
        effects: list[Effect] = [Freed(hold.instance, hold.epoch) for hold in gone]
        if gone and self.pair is not None and instance == self.pair.decode:
            self.decode_timeline = self.decode_timeline or message.timeline
            effects += self._settle()
        return effects + (self._maybe_closed() if self.phase is Phase.CLOSING else [])

    # --- tokens to the client -----------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Effect]:
        """Delivers what has become contiguous."""
        if not self._is_reserved or self._first is None:
            return []
        effects: list[Effect] = []
        first = self._first
        if self.num_output == 0:
            assert self.pair is not None
            self.phase = Phase.STREAMING
            logprobs = [first.logprob] if first.logprob is not None else []
            head = TokenItem(room=self.room, epoch=self.epoch, seq=0, ids=[first.token], logprobs=logprobs)
            effects += [*self._deliver(head, now), *self._drop_prefill_load()]
            if first.finish:
                return [*effects, Ended(first.finish), *self._close(now)]
        while self._early:
            seq = min(self._early)
            if seq > self.num_output:
                break
            item = self._early.pop(seq)
            if seq + len(item.ids) > self.num_output:
                effects += self._deliver(item, now)
        return effects + self._maybe_finished(now)

    def _deliver(self, item: TokenItem, now: float) -> list[Effect]:
        skip = self.num_output - item.seq  # an item repeated in part
        self.num_output = item.seq + len(item.ids)
        self.stamps.first_token = self.stamps.first_token or now
        self.stamps.last_token = now
        return [Deliver(item.ids[skip:], item.logprobs[skip:])]

    def _drop_prefill_load(self) -> list[Effect]:
        """Prefill's queue no longer carries this room, though its pages wait for the hand-off."""
        assert self.pair is not None
        return [Freed(self.pair.prefill, self.epoch)]

    def _maybe_finished(self, now: float) -> list[Effect]:
        finished = self._finished
        if finished is None or self.phase is not Phase.STREAMING or self.num_output < finished.output_tokens:
            return []
        freed: list[Effect] = [Freed(hold.instance, hold.epoch) for hold in self._holds if hold.epoch == self.epoch]
        self._holds = [hold for hold in self._holds if hold.epoch != self.epoch]  # decode had released prefill before
        return [Ended(finished.reason), *freed, *self._close(now)]

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _attempt_failed(self, kind: str, message: str, retryable: bool, now: float) -> list[Effect]:
        if retryable and self.phase is Phase.PREFILLING and self._retries < self.max_retries:
            self._retries += 1
            return self._requeue(now, now)
        return self.give_up(kind, message, now)

    def _requeue(self, not_before: float, now: float) -> list[Effect]:
        effects = self._cancel_holds(now)
        self.phase = Phase.QUEUED
        self.pair = None
        self._reset_attempt()
        return [*effects, Requeued(not_before)]

    def _settle(self) -> list[Effect]:
        """Nothing more will be known of what the room cost."""
        if self._settle_by is None:
            return []
        self._settle_by = None
        return [Settled()]

    def _close(self, now: float) -> list[Effect]:
        self.stamps.ended = now
        self.phase = Phase.CLOSING
        return self._cancel_holds(now) + self._maybe_closed()

    def _cancel_holds(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for hold in self._holds:
            if hold.cancelled_at is None:
                hold.cancelled_at = now
                effects.append(Send(hold.instance, Cancel(room=self.room, instance=hold.instance)))
        return effects

    def _drop_hold(self, instance: str) -> list[Effect]:
        """The worker itself said that it holds nothing of the current attempt."""
        self._holds = [h for h in self._holds if not (h.instance == instance and h.epoch == self.epoch)]
        return [Freed(instance, self.epoch)]

    def _maybe_closed(self) -> list[Effect]:
        if self._holds:
            return []
        self.phase = Phase.CLOSED
        return [*self._settle(), Closed()]

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant of the table above does not hold."""
        assert (self.phase is Phase.CLOSED) <= (not self._holds), self
        assert self.is_at_workers <= (self.pair is not None), self
        assert (self.phase is Phase.STREAMING) == (self.num_output > 0) or not self.is_live, self
        assert self.is_settling <= (self.phase is Phase.CLOSING), self
        assert (self.phase is Phase.CLOSING) <= all(hold.cancelled_at is not None for hold in self._holds), self


_HANDLERS: dict[type, Callable[..., list[Effect]]] = {
    Reserved: Room._on_reserved,
    Refused: Room._on_refused,
    FirstToken: Room._on_first_token,
    TokenItem: Room._on_tokens,
    Finished: Room._on_finished,
    Failed: Room._on_failed,
}
