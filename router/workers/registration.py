"""Registers and deregisters workers.

A worker that returns after its loss gets Cancels for the rooms it must drop.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...cluster.process.log import fields
from ...cluster.protocol.messages import Cancel, Hello, Rejected
from ..rooms.attempt import RoomEvent
from ..rooms.effects import Outcome
from .outbox import Outbox
from .registry import Registry, Worker
from .stale_rooms import Orphans, StaleRooms

logger = logging.getLogger(__name__)

DAMAGED = "a message of this worker arrived damaged; it may come back at once"


@dataclass(frozen=True)
class Greeted:
    """A worker that lost something of its rooms: all of them, or else orders that it did not receive."""

    worker: Worker
    has_dropped_all: bool


class Registration:
    """Registration between the registry and the connections. It knows rooms by name only."""

    def __init__(self, registry: Registry, outbox: Outbox, events: Counter[str]) -> None:
        self._registry = registry
        self._outbox = outbox
        self._events = events
        self._stale_rooms = StaleRooms()
        self._orphans = Orphans()

    def __repr__(self) -> str:
        return f"Registration({self._registry}, {self._stale_rooms})"

    def hello(self, identity: bytes, message: Hello, now: float) -> Greeted | None:
        """Registers or rejects a worker. None when that changes nothing for any room."""
        known = self._registry.get(message.instance)
        # was in transit on an older connection
        if known is not None and message.generation < known.hello.generation:
            self._events["stale_hello"] += 1
            return None
        has_dropped_all = known is not None and message.generation > known.hello.generation
        has_missed = known is not None and message.missed > known.hello.missed
        answer = self._registry.hello(identity, message, now)
        worker = self._registry.get(message.instance)
        if worker is None:
            reason = getattr(answer, "reason", "")
            logger.warning(
                "worker rejected", extra=fields(role=message.role, instance=message.instance, reason=reason)
            )
            self._outbox.answer(identity, answer)
            return None
        if known is None:
            logger.info(
                "worker registered", extra=fields(role=worker.role, instance=worker.instance, pid=message.pid)
            )
        if has_dropped_all:
            worker.forget_rooms()
        if worker.has_hole:  # the worker does not know that it must drop its rooms
            answer = Rejected(instance=worker.instance, reason=DAMAGED)
        self._outbox.greet(worker, answer, now)
        for room, epoch in self._stale_rooms.take(message.instance, message.generation):
            self._outbox.post(worker, Cancel(room=room, epoch=epoch, instance=worker.instance), now)
        if has_dropped_all:
            logger.warning(
                "worker dropped its rooms", extra=fields(role=worker.role, instance=worker.instance)
            )
            self._events["worker_dropped_rooms"] += 1
            return Greeted(worker, has_dropped_all=True)
        self._outbox.flush(worker, now)
        if not has_missed:
            return None
        self._events["damaged_order"] += 1
        return Greeted(worker, has_dropped_all=False)

    def deregister(
        self, worker: Worker, rooms: Sequence[tuple[str, int]], now: float, *, is_needed: bool
    ) -> None:
        """Forgets a worker and cancels `rooms` (name and newest epoch) there. `is_needed`: some of them still
        needed it.

        A worker that is only slow then stops working on them.
        """
        reason = "silent" if worker.unreachable_since is None else "unreachable"
        if worker.is_draining and not is_needed:
            logger.info("worker left", extra=fields(role=worker.role, instance=worker.instance))
        else:
            logger.warning(
                "worker lost", extra=fields(role=worker.role, instance=worker.instance, reason=reason)
            )
            self._events["worker_lost"] += 1
        for room, epoch in rooms:
            self._outbox.post(worker, Cancel(room=room, epoch=epoch, instance=worker.instance), now)
        self._stale_rooms.keep(worker.instance, worker.hello.generation, rooms)  # the Cancels may be lost
        self._registry.remove(worker.instance)

    def judge(self, room: str, verdict: Outcome, now: float) -> None:
        """Notes that a worker did its part of an attempt, or failed it."""
        if self._registry.judge(verdict.instance, room, verdict.epoch, verdict.is_good, now):
            self._events["breaker_opened"] += 1
            logger.warning(
                "worker fails too often: avoided for a while", extra=fields(instance=verdict.instance)
            )

    def damaged(self, identity: bytes, now: float) -> None:
        """Handles a lost message of a worker: it must drop its rooms, since a stream may have a gap."""
        for worker in self._registry:
            if worker.identity == identity:
                self._events["damaged_message"] += 1
                worker.has_hole = True
                self._outbox.post(worker, Rejected(instance=worker.instance, reason=DAMAGED), now)

    def orphan(self, worker: Worker, room: str, event: RoomEvent, now: float) -> None:
        """Handles a worker's message about a room that is over."""
        self._events["orphan_message"] += 1
        cancel = self._orphans.answer(room, worker.instance, event)
        if cancel is not None:
            self._outbox.post(worker, cancel, now)

    def probe(self, now: float) -> None:
        """Finds unreachable workers by sending a Welcome to every worker, which has no effect on a connected
        one.

        The send fails for the unreachable one.
        """
        for worker in self._registry:
            if worker.outbox:  # what waits asks as well, and a stalled worker must not collect Welcomes
                self._outbox.flush(worker, now)
            else:
                self._outbox.post(worker, self._registry.welcome(worker.instance), now)
