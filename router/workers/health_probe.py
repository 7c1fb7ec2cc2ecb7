"""Health probes, called canaries in flags and metrics: tiny requests of the router that show whether a pair
serves.

A pair is probed when no client's request has passed it for half of `window_s`. A probe has four prompt tokens
and two of output. It takes one page on either side and exercises token 1 of prefill, the hand-off, and a
token of decode. It has a room apart from those of clients, and appears in no queue, history or request count.
A probe starts only when the queue is empty and the workers keep a free place. Its salt is unique, so no
prefix cache can answer in place of prefill.

A failed probe counts against its pair and not against one worker, since a hand-off involves both. A probe
that passes on an avoided worker closes its breaker, so no client's request has to try it first.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from ...cluster.process.log import fields
from ...cluster.protocol.messages import CANARY_SALT, Cancel, FirstToken, Reserved, Sampling, TokenItem
from ..rooms.attempt import DEADLINE_EXCEEDED, RoomEvent
from ..rooms.effects import (
    Closed,
    Effect,
    Ended,
    Failure,
    Freed,
    Outcome,
    Pair,
    Requeued,
    SendOrder,
    Timeouts,
)
from ..rooms.room import Room
from .eligibility import Need, able_pairs, is_ready, live_pairs
from .outbox import Outbox
from .pair_health import PairHealth, PairNames
from .registry import Load, Registry, Worker

logger = logging.getLogger(__name__)

NUM_PROMPT, NUM_NEW = 4, 2
NEED = Need(NUM_PROMPT, NUM_NEW)
SAMPLING = Sampling(temperature=0.0, max_new_tokens=NUM_NEW, ignore_eos=True)
MAX_AT_ONCE = 4
MAX_HELD = 64  # pairs whose results are kept valid while they are busy; one is enough to be ready
MAX_PER_TURN = 16  # pairs probed within a quarter of the window, new ones not counted
PASSED, FAILED, UNDECIDED = "passed", "failed", "undecided"


@dataclass(eq=False)
class HealthProbe:
    """One probe under way."""

    room: Room
    names: PairNames
    is_decided: bool = False
    heard: set[type] = field(default_factory=set)

    @property
    def waits_for(self) -> str:
        """A description of the missing message."""
        if Reserved not in self.heard:
            return "decode reserved nothing"
        if FirstToken not in self.heard and self.names[0] != self.names[1]:
            return "prefill gave no token"
        return "decode gave no token" if TokenItem not in self.heard else "decode did not finish"


class HealthProbes:
    """The probes of one router, driven by the dispatcher's tick.

    `pair_health` holds the results, clients' included.
    """

    def __init__(self, registry: Registry, outbox: Outbox, mint: Callable[[], str], window_s: float) -> None:
        self.pair_health = PairHealth(window_s)
        self.outcomes: Counter[str] = Counter()
        self._registry, self._outbox, self._mint = registry, outbox, mint
        self._window_s = window_s
        self._patience_s = window_s / 2
        # these never pass, since the probe's deadline is earlier
        self._timeouts = Timeouts(reserve_s=window_s, first_token_s=window_s, token_s=window_s)
        self._probes: dict[str, HealthProbe] = {}  # by room
        self._next_at = 0.0
        self._ticked_at: float | None = None

    def __repr__(self) -> str:
        return f"HealthProbes({len(self._probes)} under way, {self.pair_health})"

    @property
    def is_on(self) -> bool:
        return self._window_s > 0.0

    def is_ready(self, now: float) -> bool:
        """Whether some pair serves and has passed a request."""
        return is_ready(self._registry) and (not self.is_on or self.pair_health.is_ready(now))

    def tick(self, now: float, *, may_ask: bool) -> None:
        """Ends overdue probes. Starts due ones if `may_ask`."""
        if not self.is_on:
            return
        self.pair_health.see(live_pairs(self._registry))
        for probe in list(self._probes.values()):
            self._perform(probe, probe.room.tick(now), now)
        urgent, due = self.pair_health.urgent(), self.pair_health.due(now)
        elapsed = 0.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        if urgent or due:
            live = {(p.instance, d.instance): (p, d) for p, d in live_pairs(self._registry)}
            self._hold([live[names] for names in due[-MAX_HELD:]], elapsed, may_ask=may_ask)
            if may_ask and sum(not probe.is_decided for probe in self._probes.values()) < MAX_AT_ONCE:
                self._ask_next(urgent + (due if now >= self._next_at else []), live, now)

    def excuse(self, seconds: float) -> None:
        """The router did not run for so long: no probe is late, and no result has aged."""
        self.pair_health.excuse(seconds)
        for probe in self._probes.values():
            if probe.room.deadline is not None:
                probe.room.deadline += seconds

    def on(self, worker: Worker, room: str, event: RoomEvent, now: float) -> bool:
        """Handles a worker's message about a room; False if the room is no probe's."""
        probe = self._probes.get(room)
        if probe is None:
            return False
        probe.heard.add(type(event))
        self._perform(probe, probe.room.on(event, worker.instance, now), now)
        return True

    def lost(self, instance: str, now: float) -> None:
        """Handles a worker that is gone or has dropped all its rooms."""
        for probe in self._on_worker(instance):
            self._perform(probe, probe.room.worker_lost(instance, now, is_dead=False), now)

    def missed(self, instance: str, now: float) -> None:
        """Resends the order that a worker missed."""
        for probe in self._on_worker(instance):
            self._perform(probe, probe.room.resend_orders(instance, now), now)

    def _on_worker(self, instance: str) -> list[HealthProbe]:
        return [one for one in self._probes.values() if instance in one.room.instances]

    # --- choice of the next pair ----------------------------------------------------------------------------

    @property
    def _asked(self) -> set[PairNames]:
        """Pairs with a probe under way."""
        return {probe.names for probe in self._probes.values()}

    def _hold(self, due: list[tuple[Worker, Worker]], seconds: float, *, may_ask: bool) -> None:
        """Keeps the result of a pair valid while the pair is too busy to be probed."""
        asked = self._asked
        for prefill, decode in due:
            names = prefill.instance, decode.instance
            if names not in asked and not (may_ask and self._is_free(prefill, decode)):
                self.pair_health.hold(*names, seconds)

    def _ask_next(
        self, names: list[PairNames], live: dict[PairNames, tuple[Worker, Worker]], now: float
    ) -> None:
        asked = self._asked
        for one in names:
            if one not in asked and self._is_free(*live[one]):
                self._next_at = now + self._window_s / 4 / min(len(self.pair_health), MAX_PER_TURN)
                self._begin(*live[one], now)
                return

    def _is_free(self, prefill: Worker, decode: Worker) -> bool:
        """Whether a probe delays no request: prefill has an empty queue, and decode keeps a free place."""
        is_reachable = prefill.unreachable_since is None and decode.unreachable_since is None
        limit = decode.hello.max_running
        has_spare = limit == 0 or decode.num_taken == 0 or decode.num_taken + 1 < limit
        is_idle = prefill is decode or prefill.num_tokens == 0
        return is_reachable and has_spare and is_idle and bool(able_pairs([(prefill, decode)], NEED))

    def _begin(self, prefill: Worker, decode: Worker, now: float) -> None:
        vocab = decode.hello.vocab_size or NUM_PROMPT + 1
        prompt = [i % vocab for i in range(1, NUM_PROMPT + 1)]
        room = Room(
            self._mint(),
            prompt,
            SAMPLING,
            now,
            self._timeouts,
            max_attempts=1,
            deadline=now + self._patience_s,
        )
        pair = Pair(
            prefill=prefill.instance, decode=decode.instance, prefill_endpoint=prefill.hello.kv_endpoint
        )
        probe = self._probes[room.room] = HealthProbe(room, (prefill.instance, decode.instance))
        effects = room.place(pair, now)
        load = Load(pages=decode.pages_for(NEED.total), tokens=0)
        self._registry.reserve(decode.instance, room.room, room.epoch, load)
        if not pair.is_local:
            load = Load(pages=0, tokens=NUM_PROMPT, prompts=1)
            self._registry.reserve(prefill.instance, room.room, room.epoch, load)
        self.pair_health.asked(*probe.names, now)
        self._perform(probe, effects, now)

    # --- results ------------------------------------------------------------------------------------------

    def _perform(self, probe: HealthProbe, effects: list[Effect], now: float) -> None:
        room = probe.room
        for effect in effects:
            if isinstance(effect, SendOrder):
                self._send(room, effect, now)
            elif isinstance(effect, Freed):
                self._registry.release(effect.instance, room.room, effect.epoch)
            elif isinstance(effect, Outcome) and effect.is_good:
                self._registry.judge(effect.instance, room.room, effect.epoch, True, now)
            elif isinstance(effect, (Ended, Failure)):
                self._decide(probe, effect, now)
            elif isinstance(effect, Requeued):  # refused, or the worker drains: no result
                self._note(probe, UNDECIDED)
                self._perform(probe, room.cancel(now), now)
            elif isinstance(effect, Closed):
                self._probes.pop(room.room, None)

    def _send(self, room: Room, effect: SendOrder, now: float) -> None:
        worker, message = self._registry.get(effect.instance), effect.message
        if worker is not None:
            order = (
                message if isinstance(message, Cancel) else replace(message, salt=f"{CANARY_SALT}{room.room}")
            )
            self._outbox.post(worker, order, now)

    def _decide(self, probe: HealthProbe, effect: Ended | Failure, now: float) -> None:
        if isinstance(effect, Ended):
            self._note(probe, PASSED)
            if probe.names in self.pair_health.failing:
                logger.info("a canary passed", extra=_fields(probe))
            return self.pair_health.passed(*probe.names, now)
        kind, message = effect.kind, effect.message
        if kind == DEADLINE_EXCEEDED:
            message = f"{probe.waits_for} within {self._patience_s:g} s"
            if self._is_crowded(probe):
                return self._note(probe, UNDECIDED)
        self._note(probe, FAILED)
        logger.warning("a canary failed", extra=_fields(probe, kind=kind, reason=message))
        return self.pair_health.failed(*probe.names, kind, message, now)

    def _is_crowded(self, probe: HealthProbe) -> bool:
        """Whether the workers served other requests meanwhile, which may explain the delay."""
        workers = [self._registry.get(instance) for instance in probe.names]
        return any(worker is not None and worker.num_taken > 1 for worker in workers)

    def _note(self, probe: HealthProbe, outcome: str) -> None:
        if not probe.is_decided:
            probe.is_decided = True
            self.outcomes[outcome] += 1


def _fields(probe: HealthProbe, **more: object) -> dict[str, object]:
    prefill, decode = probe.names
    return fields(prefill=prefill, decode=decode, room=probe.room.room, **more)
