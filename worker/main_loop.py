"""The main loop of a worker process: receive, expire, step, beat, until the worker has drained.

The computing thread also sends the heartbeat: between two steps, and through `beat` between the layers of a
long forward. To the router, a hanging forward thus looks like a hanging worker, and a long forward like a
live one.
"""

import logging
import time
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from ..cluster.net.control_link import level_of_loss
from ..cluster.process.log import fields
from ..cluster.process.process import EXIT_CRASHED, EXIT_OK, Shutdown
from ..cluster.process.sd_notify import Notifier
from ..cluster.protocol.messages import (
    ControlUp,
    Goodbye,
    Heartbeat,
    HeldPrefixes,
    ResourceUsage,
    Welcome,
    WorkerStats,
)
from .commands import Command, LinkEvent, LinkFailed
from .room_owners import RouterLost

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05  # longest sleep of an idle loop between two checks for shutdown
SOON_S = 0.02  # shortest time between two heartbeats
FAREWELL_S = 0.3  # least time from Goodbye to the end, so that orders under way are refused and not lost


class HeldRooms(Protocol):
    """The rooms of a worker."""

    def names(self) -> set[str]:
        """Their ids."""


class LoopWorker(Protocol):
    """A role's worker as the loop drives it; `RoleWorker` is the base of both. The loop owns no room."""

    instance: str

    def handle(self, event: LinkEvent, now: float) -> None:
        """Take in one message or transport event, at `now` in monotonic seconds."""

    def drop_rooms(self, rooms: Collection[str], reason: str) -> None:
        """Give up these rooms: their router is gone."""

    def expire(self, now: float) -> None:
        """Fail the rooms past their deadline."""

    def step(self) -> bool:
        """One forward's worth of work; False when there was none."""

    def start_draining(self) -> None:
        """Refuse new rooms from here on."""

    def hand_back(self) -> None:
        """Fail every room that is left so that the router continues it elsewhere: this worker leaves now."""

    @property
    def queues(self) -> HeldRooms:
        """The rooms that hold anything here."""

    wants_beat: bool  # routers should hear of its condition now; the loop resets it

    @property
    def num_rooms(self) -> int:
        """Their number."""

    def stats(self) -> WorkerStats:
        """The worker's condition for the heartbeat."""


class LoopNews(Protocol):
    """What follows heartbeats."""

    def asked(self) -> None:
        """A router has just joined, or has missed something: all is to be told anew."""

    def take(self) -> HeldPrefixes | None:
        """The next message; None: there is nothing to tell."""


class SchedulerLink(Protocol):
    """The scheduler's end of a `WorkerLink`."""

    heartbeat_s: float  # the shortest interval that a router asks for

    def post(self, command: Command | ControlUp) -> None:
        """Queue a command or a message for routers; never blocks."""

    def receive(self, timeout: float) -> list[LinkEvent]:
        """All events that have arrived; waits up to `timeout` seconds for the first one."""

    def retain(self, rooms: Collection[str]) -> None:
        """Forget all rooms but `rooms`, the ids that the worker still holds."""

    def close(self) -> None:
        """Perform the queued commands and end the connections. Idempotent."""


class WorkerLoop:
    """Runs a worker until its shutdown is complete.

    `feed` resets the watchdog. `tell` receives the worker's condition at every heartbeat. `lost_spans` counts
    the dropped trace spans, `usage` measures the process, `news` has messages that follow heartbeats.
    `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        worker: LoopWorker,
        link: SchedulerLink,
        shutdown: Shutdown,
        *,
        drain_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        feed: Callable[[float], None] | None = None,
        tell: Callable[[WorkerStats], None] | None = None,
        notifier: Notifier | None = None,
        lost_spans: Callable[[], int] = int,
        usage: Callable[[], ResourceUsage | None] = lambda: None,
        news: LoopNews | None = None,
    ) -> None:
        self.worker = worker
        self.link = link
        self.shutdown = shutdown
        self.drain_timeout_s = drain_timeout_s
        self.may_leave: Callable[[], bool] = lambda: True  # a worker without rooms
        self.on_leave: Callable[[], None] = lambda: None  # it steps no more
        self.returns_as = ""  # the role in which the process starts again after the drain; "": it ends
        self._clock = clock
        self._feed = feed or (lambda now: None)
        self._tell = tell or (lambda stats: None)
        self._notifier = notifier or Notifier()
        self._lost_spans = lost_spans
        self._usage = usage
        self._news = news
        self._drain_until: float | None = None
        self._next_beat = 0.0
        self._soon_beat = 0.0  # the earliest time of a beat that the worker wants
        self._is_busy = False  # the last step had work

    def run(self) -> int:
        """Serve, then drain; returns the exit code.

        The drain ends when all rooms have ended, its time is over, or a second signal comes.
        """
        code = EXIT_OK
        while code == EXIT_OK and not self.is_over():
            code = self.turn()
        self.on_leave()
        if not self.returns_as:
            self._notifier.stopping("leaving")
        self.worker.hand_back()
        self.link.close()
        return code

    def turn(self) -> int:
        """One turn: receive, expire, step, beat. Returns EXIT_OK unless the worker cannot go on."""
        code = EXIT_OK
        for event in self.link.receive(0.0 if self._is_busy else IDLE_WAIT_S):
            code = max(code, self._handle(event))
        self.worker.expire(self._clock())
        self._is_busy = self.worker.step()
        self.beat()
        return code

    def _handle(self, event: LinkEvent) -> int:
        match event:
            case LinkFailed(error=error):
                logger.error("the link thread failed", exc_info=error)
                return EXIT_CRASHED
            case RouterLost(reason=reason, rooms=rooms):
                if rooms:
                    extra = fields(reason=reason, rooms=len(rooms))
                    logger.log(level_of_loss(reason), "rooms of a lost router are dropped", extra=extra)
                self.worker.drop_rooms(rooms, reason)
            case Welcome():
                self._next_beat = 0.0  # the router sends no order before the first heartbeat
                if self._news is not None:
                    self._news.asked()
                self._notifier.ready("serving")
            case _:
                self.worker.handle(event, self._clock())
        return EXIT_OK

    def is_over(self) -> bool:
        """Whether the worker may leave. Starts the drain once a signal has asked for it."""
        now = self._clock()
        if self.shutdown.stop.is_set():
            return True
        if not self.shutdown.drain.is_set():
            return False
        if self._drain_until is None:
            self._drain_until = self._begin_drain(now)
        if now >= self._drain_until:
            logger.warning("drain time is over", extra=fields(rooms=self.worker.num_rooms))
            return True
        has_said_goodbye = now >= self._drain_until - self.drain_timeout_s + FAREWELL_S
        return self.worker.num_rooms == 0 and has_said_goodbye and self.may_leave()

    def _begin_drain(self, now: float) -> float:
        """Start the drain; returns its end in monotonic seconds."""
        self.worker.start_draining()
        self.link.post(Goodbye(instance=self.worker.instance))
        self._next_beat = 0.0
        if self.returns_as:
            self._notifier.returning(f"drains, and returns as {self.returns_as}")
        else:
            self._notifier.stopping("draining")
        logger.info("draining", extra=fields(rooms=self.worker.num_rooms))
        return now + self.drain_timeout_s

    def beat(self) -> None:
        """Reset the watchdog and send a due heartbeat, or Goodbye when a drain begins.

        A long forward calls it between its layers, so the router does not wait for the forward's end.
        """
        now = self._clock()
        self._feed(now)
        self._notifier.wait(now, "waiting for a router")
        if self._drain_until is None and self.shutdown.drain.is_set():
            self._drain_until = self._begin_drain(now)
        if now >= self._next_beat or (self.worker.wants_beat and now >= self._soon_beat):
            self._next_beat, self._soon_beat = now + self.link.heartbeat_s, now + SOON_S
            self.worker.wants_beat = False
            self.link.retain(self.worker.queues.names())
            stats = msgspec.structs.replace(self.worker.stats(), usage=self._usage())
            if num_lost := self._lost_spans():
                stats = msgspec.structs.replace(stats, counters=stats.counters | {"spans_dropped": num_lost})
            self._tell(stats)
            self.link.post(Heartbeat(instance=self.worker.instance, stats=stats))
            if self._news is not None and (news := self._news.take()) is not None:
                self.link.post(news)
