"""The scheduler of a sandbox pool: assigns jobs to worker processes and handles slow and dying workers. Pure.

    lanes     short jobs and long jobs have one worker each, which does its jobs in order. It is sent up to
              MAX_AHEAD of them, since waking a process costs more than a job
    slow      a worker at one job for SLOW_S is set aside with it: it runs at the lowest priority and ends
              after its answer. The jobs behind go to a new worker. At most `max_aside` workers are set aside.
              When one more is slow, the oldest is killed if it had HURRIED_S
    dead      the first job of a worker that died after `costly_s` was too costly. Before that, it gets one
              more try. The jobs behind go to a new worker
    starting  a worker has START_S to report ready

The caller passes the monotonic time in seconds and carries out the returned effects in their order.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

SLOW_S = 0.1
HURRIED_S = 0.5
LATEST_S = 3.0  # within this time the kernel has ended a worker that got any processor time
COSTLY_S = 1.8  # the worker's own deadline is 2 s, measured by another clock
START_S = 15.0
MAX_ASIDE = 4
MAX_DEATHS = 2
MAX_AHEAD = 16


@dataclass(eq=False, slots=True)
class SandboxJob:
    """A job's bytes for a worker. The owner sets `is_dropped` when the answer is no longer needed."""

    data: bytes
    is_long: bool = False
    is_dropped: bool = False
    num_deaths: int = 0


class Reason(Enum):
    """The reason of a missing answer."""

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
    job: SandboxJob


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

    job: SandboxJob


@dataclass(frozen=True)
class JobFailed:
    """The job gets no answer."""

    job: SandboxJob
    reason: Reason


Effect: TypeAlias = Fork | Assign | SetAside | End | Answered | JobFailed


@dataclass(eq=False)
class _Worker:
    key: int
    is_long: bool  # the kind of its jobs
    since: float  # time of its start, its readiness or the begin of its first job
    is_ready: bool = False
    jobs: deque[SandboxJob] = field(default_factory=deque)


class PoolScheduler:
    """All jobs and workers of one pool."""

    def __init__(self, max_aside: int = MAX_ASIDE, costly_s: float = COSTLY_S) -> None:
        self._max_aside, self._costly_s = max_aside, costly_s
        self._num_made = 0
        self._waiting: dict[bool, deque[SandboxJob]] = {False: deque(), True: deque()}  # by is_long
        self._workers: dict[int, _Worker] = {}  # by key; at most one of each kind
        self._aside: dict[int, _Worker] = {}

    def __repr__(self) -> str:
        return (
            f"PoolScheduler({self.num_open} jobs, {len(self._workers)} workers, {len(self._aside)} set aside)"
        )

    @property
    def num_open(self) -> int:
        """Jobs without an answer."""
        workers = (*self._workers.values(), *self._aside.values())
        return sum(map(len, self._waiting.values())) + sum(len(worker.jobs) for worker in workers)

    def submit(self, job: SandboxJob, now: float) -> list[Effect]:
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
            return [Answered(self._aside.pop(key).jobs[0]), End(key, must_kill=True)]
        worker = self._workers.get(key)
        if worker is None:
            return []  # the worker was killed meanwhile
        if not worker.jobs:  # an answer without a job
            del self._workers[key]
            return [End(key, must_kill=True), *self._assign(now)]
        done: list[Effect] = [Answered(worker.jobs.popleft())]
        worker.since = now
        if is_last:
            self._return(self._workers.pop(key).jobs)
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
        return self._not_started(worker, now)

    def tick(self, now: float) -> list[Effect]:
        """Handles the time limits. To be called every SLOW_S / 2 while jobs are open."""
        done: list[Effect] = []
        for worker in [one for one in self._aside.values() if now - one.since >= LATEST_S]:
            done += self._kill_aside(worker)  # stopped, or starved
        for worker in list(self._workers.values()):
            if worker.jobs and now - worker.since >= SLOW_S:
                done += self._set_aside(worker, now)
            elif not worker.is_ready and now - worker.since >= START_S:
                del self._workers[worker.key]
                done += [End(worker.key, must_kill=True), *self._not_started(worker, now)]
        return done + self._assign(now)

    def _assign(self, now: float) -> list[Effect]:
        """Sends waiting jobs to the workers of their kind, or starts one."""
        done: list[Effect] = []
        for is_long, waiting in self._waiting.items():
            while waiting and waiting[0].is_dropped:
                waiting.popleft()
            if not waiting:
                continue
            worker = next((one for one in self._workers.values() if one.is_long == is_long), None)
            if worker is None:
                self._num_made += 1
                self._workers[self._num_made] = _Worker(self._num_made, is_long, now)
                done.append(Fork(self._num_made))
            elif worker.is_ready:
                done += _send(worker, waiting, now)
        return done

    def _set_aside(self, worker: _Worker, now: float) -> list[Effect]:
        done: list[Effect] = []
        if len(self._aside) >= self._max_aside:
            oldest = min(self._aside.values(), key=lambda one: one.since)
            if now - oldest.since < HURRIED_S:
                return []
            done += self._kill_aside(oldest)
        self._aside[worker.key] = self._workers.pop(worker.key)
        first = worker.jobs.popleft()
        self._return(worker.jobs)
        worker.jobs = deque([first])
        return [*done, SetAside(worker.key)]

    def _return(self, jobs: deque[SandboxJob]) -> None:
        """Puts jobs of a worker back to the head of their queue."""
        for job in reversed(jobs):
            self._waiting[job.is_long].appendleft(job)

    def _kill_aside(self, worker: _Worker) -> list[Effect]:
        del self._aside[worker.key]
        return [JobFailed(worker.jobs[0], Reason.COSTLY), End(worker.key, must_kill=True)]

    def _blame(self, worker: _Worker, now: float) -> list[Effect]:
        """The first job of a dead worker fails or is tried once more; the others wait again."""
        if not worker.jobs:
            return []
        first = worker.jobs.popleft()
        self._return(worker.jobs)
        if now - worker.since >= self._costly_s:
            return [JobFailed(first, Reason.COSTLY)]
        return self._try_again(first, Reason.LOST)

    def _not_started(self, worker: _Worker, now: float) -> list[Effect]:
        """A worker could not be started."""
        waiting = self._waiting[worker.is_long]
        failed = self._try_again(waiting.popleft(), Reason.NO_WORKER) if waiting else []
        return failed + self._assign(now)

    def _try_again(self, job: SandboxJob, reason: Reason) -> list[Effect]:
        job.num_deaths += 1
        if job.num_deaths >= MAX_DEATHS:
            return [JobFailed(job, reason)]
        self._waiting[job.is_long].appendleft(job)
        return []


def _send(worker: _Worker, waiting: deque[SandboxJob], now: float) -> list[Effect]:
    done: list[Effect] = []
    while waiting and len(worker.jobs) < MAX_AHEAD:
        job = waiting.popleft()
        if job.is_dropped:
            continue
        if not worker.jobs:
            worker.since = now
        worker.jobs.append(job)
        done.append(Assign(worker.key, job))
    return done
