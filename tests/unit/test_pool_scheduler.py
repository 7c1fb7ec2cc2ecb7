"""S19: a slow or dying job costs other jobs nothing, and only the one at fault fails."""

import pytest
from baton.router.sandbox.pool_scheduler import (
    COSTLY_S,
    HURRIED_S,
    LATEST_S,
    MAX_ASIDE,
    NUM_WORKERS,
    SLOW_S,
    START_S,
    Answered,
    Assign,
    End,
    Failed,
    Fork,
    Job,
    PoolScheduler,
    Reason,
    SetAside,
)


def jobs(count, **more):
    return [Job(b"{}", **more) for _ in range(count)]


def started(job):
    """A scheduler whose worker 1 has been busy with `job` since 0.0."""
    scheduler = PoolScheduler()
    assert scheduler.submit(job, 0.0) == [Fork(1)]
    assert scheduler.ready(1, 0.0) == [Assign(1, job)]
    return scheduler


def test_a_worker_does_one_job_after_the_other_in_order():
    first, second, third = jobs(3)
    scheduler = started(first)
    assert scheduler.submit(second, 0.0) == [Fork(2)]
    assert scheduler.submit(third, 0.0) == [], "one worker starts at a time"
    assert scheduler.answered(1, 0.01) == [Answered(first), Assign(1, second)]
    assert scheduler.answered(1, 0.02) == [Answered(second), Assign(1, third)]
    assert scheduler.answered(1, 0.03) == [Answered(third)]
    assert scheduler.num_open == 0
    assert scheduler.submit(first, 9.0) == [Assign(1, first)], "the worker stays"


@pytest.mark.parametrize("is_long", [False, True])
def test_neither_kind_of_job_takes_the_last_worker_from_the_other(is_long):
    many, (other,) = jobs(NUM_WORKERS + 2, is_long=is_long), jobs(1, is_long=not is_long)
    scheduler, key = PoolScheduler(), 0
    for job in many:
        for effect in scheduler.submit(job, 0.0):
            scheduler.ready(key := effect.key, 0.0)
    assert key == NUM_WORKERS - 1
    assert scheduler.submit(other, 0.0) == [Fork(NUM_WORKERS)]
    assert scheduler.ready(NUM_WORKERS, 0.0) == [Assign(NUM_WORKERS, other)]
    assert scheduler.answered(1, 0.01) == [Answered(many[0]), Assign(1, many[NUM_WORKERS - 1])]


def test_a_slow_job_is_set_aside_and_another_worker_takes_its_place():
    slow, *behind = jobs(3)
    scheduler = started(slow)
    scheduler.submit(behind[0], 0.0)
    assert scheduler.tick(SLOW_S * 0.9) == []
    assert scheduler.tick(SLOW_S) == [SetAside(1)]
    assert scheduler.ready(2, SLOW_S) == [Assign(2, behind[0])]
    assert scheduler.submit(behind[1], SLOW_S) == [Fork(3)]
    assert scheduler.answered(1, 0.5) == [Answered(slow), End(1, must_kill=True)], "it is not asked again"


def test_a_worker_that_does_not_start_in_time_is_replaced_once():
    scheduler, (job,) = PoolScheduler(), jobs(1)
    assert scheduler.submit(job, 0.0) == [Fork(1)]
    assert scheduler.tick(START_S - 0.1) == []
    assert scheduler.tick(START_S) == [End(1, must_kill=True), Fork(2)]
    assert scheduler.ended(2, START_S) == [Failed(job, Reason.NO_WORKER)]
    assert scheduler.num_open == 0


def test_where_no_further_worker_starts_jobs_wait_for_those_that_live():
    first, second = jobs(2)
    scheduler = started(first)
    assert scheduler.submit(second, 0.0) == [Fork(2)]
    assert scheduler.ended(2, 0.01) == []
    assert scheduler.answered(1, 0.02) == [Answered(first), Assign(1, second)]


@pytest.mark.parametrize("is_costly", [True, False])
def test_only_the_job_of_a_dead_worker_is_blamed(is_costly):
    first, second = jobs(2)
    scheduler = started(first)
    scheduler.submit(second, 0.0)
    scheduler.ready(2, 0.0)
    if is_costly:
        assert scheduler.ended(1, COSTLY_S) == [Failed(first, Reason.COSTLY)]
    else:
        assert scheduler.ended(1, 0.05) == [Fork(3)], "it is tried once more"
        assert scheduler.ready(3, 0.1) == [Assign(3, first)]
        assert scheduler.ended(3, 0.2) == [Failed(first, Reason.LOST)]
    assert second.num_deaths == 0
    assert scheduler.answered(2, 0.2) == [Answered(second)]


def test_a_worker_that_ends_with_its_answer_is_blamed_on_no_job():
    first, second = jobs(2)
    scheduler = started(first)
    scheduler.submit(second, 0.0)
    done = scheduler.answered(1, 0.1, is_last=True)
    assert done == [Answered(first), End(1, must_kill=False)]
    assert scheduler.ready(2, 0.1) == [Assign(2, second)]
    assert scheduler.ended(1, 0.2) == []
    assert second.num_deaths == 0


def test_an_answer_to_nothing_ends_its_worker_alone():
    first, second = jobs(2)
    scheduler = started(first)
    scheduler.answered(1, 0.1)
    assert scheduler.answered(1, 0.1) == [End(1, must_kill=True)]
    assert scheduler.submit(second, 0.1) == [Fork(2)]


def test_many_slow_jobs_kill_the_oldest_but_none_that_is_young():
    scheduler = PoolScheduler()
    slow = jobs(MAX_ASIDE + 2)
    for number, job in enumerate(slow):
        now = 1.1 * SLOW_S * number
        scheduler.tick(now)
        assert scheduler.submit(job, now) == [Fork(number + 1)]
        assert scheduler.ready(number + 1, now) == [Assign(number + 1, job)]
    assert scheduler.tick(HURRIED_S - 0.01) == [], "all are young"
    done = scheduler.tick(HURRIED_S + SLOW_S)
    killed = [Failed(slow[0], Reason.COSTLY), End(1, must_kill=True), SetAside(MAX_ASIDE + 1)]
    assert done[:3] == killed
    assert sum(isinstance(effect, SetAside) for effect in done) <= 2


def test_a_worker_that_the_kernel_does_not_end_is_killed():
    (job,) = jobs(1)
    scheduler = started(job)
    scheduler.tick(SLOW_S)
    assert scheduler.tick(LATEST_S - 0.01) == []
    assert scheduler.tick(LATEST_S) == [Failed(job, Reason.COSTLY), End(1, must_kill=True)]
    assert scheduler.num_open == 0


def test_no_worker_gets_a_job_whose_client_has_left():
    first, left, last = jobs(3)
    scheduler = started(first)
    scheduler.submit(left, 0.0)
    scheduler.submit(last, 0.0)
    left.is_dropped = True
    assert scheduler.answered(1, 0.05) == [Answered(first), Assign(1, last)]
    assert scheduler.answered(1, 0.06) == [Answered(last)]
    assert scheduler.num_open == 0
