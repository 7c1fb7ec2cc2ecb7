"""The loop of a worker process: receive, expire, step, beat, until it is drained.

The heartbeat is made by the thread that computes: between two steps, and by `beat` between the layers of a long forward.
A forward that hangs is thus seen by the router as a worker that hangs, and one that is merely long is not.
"""

import logging
import time
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from ..cluster.process.log import fields
from ..cluster.process.process import EXIT_CRASHED, EXIT_OK, Shutdown
from ..cluster.process.sd_notify import Notifier
from ..cluster.protocol.messages import ControlUp, Goodbye, Heartbeat, Welcome, WorkerStats
from .link import Command, LinkEvent, LinkFailed
from .owners import RouterLost

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05  # how long an idle loop may sleep before it looks at the shutdown events
FAREWELL_S = (
    0.3  # from Goodbye to the end at least: what the router sent before it heard is refused, not lost
)


class Rooms(Protocol):
    """The rooms of a worker."""

    def names(self) -> set[str]:
        """Their ids."""


class Worker(Protocol):
    """What a role does; the loop owns no room."""

    instance: str

    def handle(self, event: LinkEvent, now: float) -> None:
        """Take one message or transport event in."""

    def drop_rooms(self, rooms: Collection[str], reason: str) -> None:
        """Their router is gone: cancel these rooms."""

    def expire(self, now: float) -> None:
        """End what is past its deadline."""

    def step(self) -> bool:
        """One forward's worth of work; False when there was none."""

    def start_draining(self) -> None:
        """Take no new room from here on."""

    def hand_back(self) -> None:
        """This worker leaves now: the router shall go on elsewhere with every room that is left."""

    @property
    def queues(self) -> Rooms:
        """The rooms that hold anything here."""

    @property
    def num_rooms(self) -> int:
        """How many these are."""

    def stats(self) -> WorkerStats:
        """The worker's condition."""


class SchedulerLink(Protocol):
    """The scheduler's end of a `WorkerLink`."""

    heartbeat_s: float  # as the routers want it

    def post(self, command: Command | ControlUp) -> None:
        """Hand a command or a message for the router over; never blocks."""

    def receive(self, timeout: float) -> list[LinkEvent]:
        """All events so far; waits up to `timeout` seconds for the first."""

    def retain(self, rooms: Collection[str]) -> None:
        """These are all rooms of the worker, and all events that were received have been handled."""

    def close(self) -> None:
        """Perform what was posted and end the connections. Idempotent."""


class WorkerLoop:
    """Runs a worker until its shutdown is complete; `run` returns the exit code."""

    def __init__(
        self,
        worker: Worker,
        link: SchedulerLink,
        shutdown: Shutdown,
        *,
        drain_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        feed: Callable[[float], None] | None = None,
        tell: Callable[[WorkerStats], None] | None = None,
        notifier: Notifier | None = None,
        lost_spans: Callable[[], int] = int,
    ) -> None:
        self.worker = worker
        self.link = link
        self.shutdown = shutdown
        self.drain_timeout_s = drain_timeout_s
        self._clock = clock
        self._feed = feed or (lambda now: None)  # the watchdog's
        self._tell = tell or (lambda stats: None)  # of whoever else shows the worker's condition
        self._notifier = notifier or Notifier()
        self._lost_spans = lost_spans  # of its traces, so far
        self._drain_until: float | None = None
        self._next_beat = 0.0
        self._is_busy = False  # the last step had work

    def run(self) -> int:
        """Serve, then drain: stay until every room ended, the drain time is over, or a second signal came."""
        code = EXIT_OK
        while code == EXIT_OK and not self.is_over():
            code = self.turn()
        self._notifier.stopping("leaving")
        self.worker.hand_back()
        self.link.close()
        return code

    def turn(self) -> int:
        """Receive, expire, step, beat, once; EXIT_OK unless the worker cannot go on."""
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
                logger.warning(
                    "rooms of a lost router are dropped", extra=fields(reason=reason, rooms=len(rooms))
                )
                self.worker.drop_rooms(rooms, reason)
            case Welcome():
                self._next_beat = 0.0  # the router lets nobody serve before its first heartbeat
                self._notifier.ready("serving")
            case _:
                self.worker.handle(event, self._clock())
        return EXIT_OK

    def is_over(self) -> bool:
        """Whether the worker may leave; starts its drain when the operator wants that."""
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
        return self.worker.num_rooms == 0 and now >= self._drain_until - self.drain_timeout_s + FAREWELL_S

    def _begin_drain(self, now: float) -> float:
        """When it ends."""
        self.worker.start_draining()
        self.link.post(Goodbye(instance=self.worker.instance))
        self._next_beat = 0.0
        self._notifier.stopping("draining")
        logger.info("draining", extra=fields(rooms=self.worker.num_rooms))
        return now + self.drain_timeout_s

    def beat(self) -> None:
        """Tell the watchdog that the loop moves, and send what is due: a heartbeat, or word that this worker drains.

        Also called between the layers of a long forward: the router shall not wait for its end.
        """
        now = self._clock()
        self._feed(now)
        self._notifier.wait(now, "waiting for a router")
        if self._drain_until is None and self.shutdown.drain.is_set():
            self._drain_until = self._begin_drain(now)
        if now >= self._next_beat:
            self._next_beat = now + self.link.heartbeat_s
            self.link.retain(self.worker.queues.names())
            stats = self.worker.stats()
            if num_lost := self._lost_spans():
                stats = msgspec.structs.replace(stats, counters=stats.counters | {"spans_dropped": num_lost})
            self._tell(stats)
            self.link.post(Heartbeat(instance=self.worker.instance, stats=stats))
