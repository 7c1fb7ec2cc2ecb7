"""The scheduler of a sandbox pool: which worker process does which job, and what a slow or dying worker costs. Pure.

A worker does one job at a time, so a job that hangs, grows or crashes the worker takes no other job with it.

    idle      a worker that reported ready, or has answered, gets the next job. Short jobs go first; neither short nor
              long jobs take the last worker of the pool from the other kind
    slow      a worker busy with one job for SLOW_S is set aside: it runs at the lowest priority, no longer counts as a
              worker of the pool, and ends after its answer. At most `max_aside` workers are set aside. When one more
              is slow, the oldest is killed if it had HURRIED_S
    dead      the job of a worker that died after `costly_s` was too costly. Before that, the job gets one more try
    starting  a worker has START_S to report ready. One worker starts at a time

The caller passes the monotonic time in seconds and carries out the returned effects in their order.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

SLOW_S = 0.1
HURRIED_S = 0.5
LATEST_S = 3.0  # by this time the kernel has ended a worker that got any processor time
COSTLY_S = 1.8  # the worker's own deadline is 2 s, measured by another clock
START_S = 15.0
NUM_WORKERS = 3
MAX_ASIDE = 3
MAX_DEATHS = 2


@dataclass(eq=False, slots=True)
class Job:
    """Bytes for a worker. The owner sets `is_dropped` when nobody waits for the answer any more."""

    data: bytes
    is_long: bool = False
    is_dropped: bool = False
    num_deaths: int = 0


class Reason(Enum):
    """Why a job has no answer."""

    COSTLY = "it took too much time"
    LOST = "workers died of it"
    NO_WORKER = "no worker could be started"


@dataclass(frozen=True)
class Fork:
    """Start a worker named `key`. When that fails, report `ended(key)`."""

    key: int


@dataclass(frozen=True)
class Assign:
    """Send the job to the worker."""

    key: int
    job: Job


@dataclass(frozen=True)
class SetAside:
    """Lower the worker's priority."""

    key: int


@dataclass(frozen=True)
class End:
    """Close the worker's connection; kill the worker unless it ends by itself."""

    key: int
    must_kill: bool


@dataclass(frozen=True)
class Answered:
    """The worker's answer belongs to this job."""

    job: Job


@dataclass(frozen=True)
class Failed:
    """The job gets no answer."""

    job: Job
    reason: Reason


Effect: TypeAlias = Fork | Assign | SetAside | End | Answered | Failed


@dataclass(eq=False)
class _Worker:
    key: int
    since: float  # when it was started, became ready or got its job
    is_ready: bool = False
    job: Job | None = None

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.job is None


class PoolScheduler:
    """All jobs and workers of one pool."""

    def __init__(
        self, num_workers: int = NUM_WORKERS, max_aside: int = MAX_ASIDE, costly_s: float = COSTLY_S
    ) -> None:
        self._max_workers, self._max_aside, self._costly_s = num_workers, max_aside, costly_s
        self._num_made = 0
        self._waiting: dict[bool, deque[Job]] = {False: deque(), True: deque()}  # by is_long
        self._workers: dict[int, _Worker] = {}
        self._aside: dict[int, _Worker] = {}

    def __repr__(self) -> str:
        return (
            f"PoolScheduler({self.num_open} jobs, {len(self._workers)} workers, {len(self._aside)} set aside)"
        )

    @property
    def num_open(self) -> int:
        """Jobs without an answer."""
        num_busy = sum(worker.job is not None for worker in self._workers.values())
        return sum(map(len, self._waiting.values())) + num_busy + len(self._aside)

    def submit(self, job: Job, now: float) -> list[Effect]:
        """A new job."""
        self._waiting[job.is_long].append(job)
        return self._assign(now)

    def ready(self, key: int, now: float) -> list[Effect]:
        """A worker has started."""
        worker = self._workers.get(key)
        if worker is None or worker.is_ready:
            return []
        worker.is_ready, worker.since = True, now
        return self._assign(now)

    def answered(self, key: int, now: float, *, is_last: bool = False) -> list[Effect]:
        """A worker has answered its job. With `is_last` the worker ends by itself."""
        if key in self._aside:
            return [Answered(_job_of(self._aside.pop(key))), End(key, must_kill=True)]
        worker = self._workers.get(key)
        if worker is None:
            return []  # killed meanwhile
        if worker.job is None:  # an answer to nothing
            del self._workers[key]
            return [End(key, must_kill=True), *self._assign(now)]
        done: list[Effect] = [Answered(worker.job)]
        worker.job = None
        if is_last:
            del self._workers[key]
            done.append(End(key, must_kill=False))
        return done + self._assign(now)

    def ended(self, key: int, now: float) -> list[Effect]:
        """A worker died, or could not be started."""
        if key in self._aside:
            return self._blame(self._aside.pop(key), now) + self._assign(now)
        worker = self._workers.pop(key, None)
        if worker is None:
            return []
        if worker.is_ready:
            return self._blame(worker, now) + self._assign(now)
        return self._not_started(now)

    def tick(self, now: float) -> list[Effect]:
        """What time alone brings; to be called every SLOW_S / 2 while jobs are open."""
        done: list[Effect] = []
        for worker in [one for one in self._aside.values() if now - one.since >= LATEST_S]:
            done += self._kill_aside(worker)  # stopped, or starved
        for worker in list(self._workers.values()):
            if worker.job is not None and now - worker.since >= SLOW_S:
                done += self._set_aside(worker, now)
            elif not worker.is_ready and now - worker.since >= START_S:
                del self._workers[worker.key]
                done += [End(worker.key, must_kill=True), *self._not_started(now)]
        return done + self._assign(now)

    def _assign(self, now: float) -> list[Effect]:
        """Gives waiting jobs to idle workers, and starts a worker when jobs are left."""
        done: list[Effect] = []
        idle = [worker for worker in self._workers.values() if worker.is_idle]
        while (waiting := self._next()) is not None:
            if not idle:
                is_starting = any(not worker.is_ready for worker in self._workers.values())
                if not is_starting and len(self._workers) < self._max_workers:
                    done.append(self._fork(now))
                break
            worker = idle.pop(0)
            worker.job, worker.since = waiting.popleft(), now
            done.append(Assign(worker.key, worker.job))
        return done

    def _next(self) -> deque[Job] | None:
        """The queue whose first job may run now."""
        for is_long, waiting in self._waiting.items():
            while waiting and waiting[0].is_dropped:
                waiting.popleft()
            num_busy = sum(
                worker.job is not None and worker.job.is_long == is_long for worker in self._workers.values()
            )
            if waiting and num_busy < self._max_workers - 1:
                return waiting
        return None

    def _fork(self, now: float) -> Fork:
        self._num_made += 1
        self._workers[self._num_made] = _Worker(self._num_made, now)
        return Fork(self._num_made)

    def _set_aside(self, worker: _Worker, now: float) -> list[Effect]:
        done: list[Effect] = []
        if len(self._aside) >= self._max_aside:
            oldest = min(self._aside.values(), key=lambda one: one.since)
            if now - oldest.since < HURRIED_S:
                return []
            done += self._kill_aside(oldest)
        self._aside[worker.key] = self._workers.pop(worker.key)
        return [*done, SetAside(worker.key)]

    def _kill_aside(self, worker: _Worker) -> list[Effect]:
        del self._aside[worker.key]
        return [Failed(_job_of(worker), Reason.COSTLY), End(worker.key, must_kill=True)]

    def _blame(self, worker: _Worker, now: float) -> list[Effect]:
        """The job of a worker that died fails, or goes back to the head of its queue."""
        job = worker.job
        if job is None:
            return []
        if now - worker.since >= self._costly_s:
            return [Failed(job, Reason.COSTLY)]
        return self._try_again(job, Reason.LOST)

    def _not_started(self, now: float) -> list[Effect]:
        """A worker could not be started. While others live, the jobs wait for them."""
        if any(worker.is_ready for worker in self._workers.values()):
            return []
        waiting = self._next()
        failed = [] if waiting is None else self._try_again(waiting.popleft(), Reason.NO_WORKER)
        return failed + self._assign(now)

    def _try_again(self, job: Job, reason: Reason) -> list[Effect]:
        job.num_deaths += 1
        if job.num_deaths >= MAX_DEATHS:
            return [Failed(job, reason)]
        self._waiting[job.is_long].appendleft(job)
        return []


def _job_of(worker: _Worker) -> Job:
    assert worker.job is not None, worker
    return worker.job
