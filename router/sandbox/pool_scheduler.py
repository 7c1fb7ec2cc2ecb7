"""Which template worker renders which chat, and what becomes of a worker that is slow or dies. Pure.

    lane      short chats and long ones do not wait for each other: each kind has one worker, which has several chats ahead
              of it and answers them in their order
    slow      a worker that is at one chat for SLOW_S is set aside with it; those behind go to a new worker. At most
              MAX_ASIDE; when one more is slow, the oldest is cut if it had HURRIED_S
    dead      its first chat is blamed. After the deadline it was too costly; before, it is tried once more
    new       time counts from when a worker says that it is ready, for which it has START_S

A driver calls with the time and does what it gets back, in that order.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

SLOW_S = 0.1
HURRIED_S = 0.5
MAX_ASIDE = 4
LATEST_S = 3.0  # by when the kernel has ended a worker that runs
COSTLY_S = 1.8  # who dies later died of the worker's deadline, which is 2 s by another clock
START_S = 15.0
MAX_AHEAD = 64
MAX_AHEAD_BYTES = 1 << 20


@dataclass(eq=False, slots=True)
class Rendering:
    """A chat to be rendered. Its owner may lose interest by setting `is_dropped`."""

    data: bytes
    is_long: bool = False
    is_dropped: bool = False
    num_deaths: int = 0


@dataclass(frozen=True)
class Fork:
    """Make a worker; when that fails, say that it ended. `key` names it from here on."""

    key: int


@dataclass(frozen=True)
class Send:
    """To a worker."""

    key: int
    rendering: Rendering


@dataclass(frozen=True)
class SetAside:
    """A worker shall disturb nobody."""

    key: int


@dataclass(frozen=True)
class End:
    """A worker is no longer needed; kill it unless it is idle."""

    key: int
    is_idle: bool


@dataclass(frozen=True)
class Answered:
    """A worker's answer belongs to this chat."""

    rendering: Rendering


@dataclass(frozen=True)
class Failed:
    """There will be no answer; `is_costly`: for want of time."""

    rendering: Rendering
    is_costly: bool


Effect: TypeAlias = Fork | Send | SetAside | End | Answered | Failed


@dataclass(eq=False)
class _Worker:
    key: int
    since: float  # when its first chat became that, or the worker was made
    is_ready: bool = False
    sent: deque[Rendering] = field(default_factory=deque)

    def has_room(self, rendering: Rendering) -> bool:
        if not self.sent:
            return True
        return (
            len(self.sent) < MAX_AHEAD
            and sum(len(r.data) for r in self.sent) + len(rendering.data) <= MAX_AHEAD_BYTES
        )


class Lanes:
    """All workers of one kind of work. Who dies after `costly_s` at a piece of it died of that."""

    def __init__(self, max_aside: int = MAX_ASIDE, costly_s: float = COSTLY_S) -> None:
        self._max_aside, self._costly_s = max_aside, costly_s
        self._num_made = 0
        self._waiting: dict[bool, deque[Rendering]] = {False: deque(), True: deque()}  # by is_long
        self._lanes: dict[bool, _Worker | None] = {False: None, True: None}
        self._aside: dict[int, _Worker] = {}

    def __repr__(self) -> str:
        return f"Lanes({self.num_open} chats, {len(self._aside)} workers set aside)"

    @property
    def num_open(self) -> int:
        """Chats without an answer."""
        workers = [worker for worker in (*self._lanes.values(), *self._aside.values()) if worker is not None]
        return sum(map(len, self._waiting.values())) + sum(len(worker.sent) for worker in workers)

    def submit(self, rendering: Rendering, now: float) -> list[Effect]:
        self._waiting[rendering.is_long].append(rendering)
        return self._pump(rendering.is_long, now)

    def ready(self, key: int, now: float) -> None:
        """A worker lives."""
        for worker in self._lanes.values():
            if worker is not None and worker.key == key:
                worker.is_ready, worker.since = True, now

    def answered(self, key: int, now: float, *, is_last: bool = False) -> list[Effect]:
        """A worker has answered the first of its chats; `is_last`: and leaves."""
        if key in self._aside:
            return [
                Answered(self._aside.pop(key).sent.popleft()),
                End(key, is_idle=False),
            ]  # it goes on with the next
        is_long = self._lane_of(key)
        worker = None if is_long is None else self._lanes[is_long]
        if is_long is None or worker is None:
            return []  # cut meanwhile
        first = worker.sent.popleft()
        worker.since = now
        if not is_last:
            return [Answered(first), *self._pump(is_long, now)]
        self._waiting[is_long].extendleft(reversed(worker.sent))
        self._lanes[is_long] = None
        return [Answered(first), End(key, is_idle=True), *self._pump(is_long, now)]

    def ended(self, key: int, now: float) -> list[Effect]:
        """A worker died, or could not be made."""
        if key in self._aside:
            return [*self._blame(self._aside.pop(key), now), *self._pump(False, now), *self._pump(True, now)]
        is_long = self._lane_of(key)
        if is_long is None:
            return []
        return self._lose(is_long, now)

    def tick(self, now: float) -> list[Effect]:
        """What time alone brings; to be called every SLOW_S / 2 while there are chats."""
        done: list[Effect] = []
        for aside in list(self._aside.values()):
            if now - aside.since >= LATEST_S:  # stopped, or starved
                done += self._cut(aside)
        for is_long, worker in self._lanes.items():
            if worker is None or not worker.sent:
                continue
            if worker.is_ready and now - worker.since >= SLOW_S:
                done += self._set_aside(is_long, worker, now)
            elif not worker.is_ready and now - worker.since >= START_S:
                done += [End(worker.key, is_idle=False), *self._lose(is_long, now)]
        return done

    def _lane_of(self, key: int) -> bool | None:
        """Whose worker it is, by is_long."""
        return next(
            (is_long for is_long, one in self._lanes.items() if one is not None and one.key == key), None
        )

    def _lose(self, is_long: bool, now: float) -> list[Effect]:
        """A lane is without its worker."""
        worker, self._lanes[is_long] = self._lanes[is_long], None
        assert worker is not None
        return [*self._blame(worker, now), *self._pump(is_long, now)]

    def _set_aside(self, is_long: bool, worker: _Worker, now: float) -> list[Effect]:
        done: list[Effect] = []
        if len(self._aside) >= self._max_aside:
            oldest = min(self._aside.values(), key=lambda one: one.since)
            if now - oldest.since < HURRIED_S:
                return []
            done += self._cut(oldest)
        self._return(worker)
        self._lanes[is_long] = None
        self._aside[worker.key] = worker
        return [*done, SetAside(worker.key), *self._pump(is_long, now)]

    def _return(self, worker: _Worker) -> None:
        """All of its chats but the first wait again."""
        while len(worker.sent) > 1:
            behind = worker.sent.pop()
            self._waiting[behind.is_long].appendleft(behind)

    def _cut(self, worker: _Worker) -> list[Effect]:
        del self._aside[worker.key]
        return [Failed(worker.sent.popleft(), is_costly=True), End(worker.key, is_idle=False)]

    def _blame(self, worker: _Worker, now: float) -> list[Effect]:
        """What becomes of the chats of a dead worker."""
        self._return(worker)
        if not worker.sent:
            return []
        first = worker.sent.popleft()
        is_costly = worker.is_ready and now - worker.since >= self._costly_s
        first.num_deaths += 1
        if is_costly or first.num_deaths > 1:
            return [Failed(first, is_costly=is_costly)]
        self._waiting[first.is_long].appendleft(first)
        return []

    def _pump(self, is_long: bool, now: float) -> list[Effect]:
        """Hands on what waits, as far as the lane's worker has room."""
        done: list[Effect] = []
        waiting = self._waiting[is_long]
        while waiting:
            if waiting[0].is_dropped:
                waiting.popleft()
                continue
            worker = self._lanes[is_long]
            if worker is None:
                self._num_made += 1
                worker = self._lanes[is_long] = _Worker(self._num_made, now)
                done.append(Fork(worker.key))
            if not worker.has_room(waiting[0]):
                break
            if not worker.sent and worker.is_ready:
                worker.since = now
            worker.sent.append(waiting.popleft())
            done.append(Send(worker.key, worker.sent[-1]))
        return done
