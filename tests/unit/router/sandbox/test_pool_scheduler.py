"""S19: a slow or dying job costs other jobs nothing, and only the one at fault fails."""

import pytest
from baton.router.sandbox.pool_scheduler import (
    COSTLY_S,
    HURRIED_S,
    LATEST_S,
    MAX_AHEAD,
    MAX_ASIDE,
    SLOW_S,
    START_S,
    Answered,
    Assign,
    End,
    Fork,
    JobFailed,
    PoolScheduler,
    Reason,
    SandboxJob,
    SetAside,
)


def jobs(count, **more):
    return [SandboxJob(b"{}", **more) for _ in range(count)]


def started(job):
    """A scheduler whose worker 1 has been busy with `job` since 0.0."""
    scheduler = PoolScheduler()
    assert scheduler.submit(job, 0.0) == [Fork(1)]
    assert scheduler.ready(1, 0.0) == [Assign(1, job)]
    return scheduler


def test_answers_belong_to_jobs_in_their_order_and_the_worker_stays():
    first, second = jobs(2)
    scheduler = started(first)
    assert scheduler.submit(second, 0.0) == [Assign(1, second)]
    assert scheduler.answered(1, 0.01) == [Answered(first)]
    assert scheduler.answered(1, 0.02) == [Answered(second)]
    assert scheduler.num_open == 0
    assert scheduler.submit(first, 9.0) == [Assign(1, first)]


def test_long_jobs_and_short_jobs_never_share_a_worker():
    (short,), (long,) = jobs(1), jobs(1, is_long=True)
    scheduler = started(short)
    assert scheduler.submit(long, 0.0) == [Fork(2)]
    assert scheduler.ready(2, 0.0) == [Assign(2, long)]


def test_a_worker_is_sent_no_more_jobs_ahead_than_the_bound():
    first, *behind = jobs(MAX_AHEAD + 1)
    scheduler = started(first)
    assigned = [effect for job in behind for effect in scheduler.submit(job, 0.0)]
    assert assigned == [Assign(1, job) for job in behind[:-1]]
    assert scheduler.answered(1, 0.01) == [Answered(first), Assign(1, behind[-1])]


def test_jobs_behind_a_slow_one_go_to_another_worker():
    slow, *behind = jobs(3)
    scheduler = started(slow)
    for job in behind:
        scheduler.submit(job, 0.0)
    assert scheduler.tick(SLOW_S * 0.9) == []
    assert scheduler.tick(SLOW_S) == [SetAside(1), Fork(2)]
    assert scheduler.ready(2, SLOW_S) == [Assign(2, job) for job in behind]
    assert scheduler.answered(1, 0.5) == [Answered(slow), End(1, must_kill=True)], "it is not asked again"


def test_a_worker_that_does_not_start_in_time_is_replaced_once():
    scheduler, (job,) = PoolScheduler(), jobs(1)
    assert scheduler.submit(job, 0.0) == [Fork(1)]
    assert scheduler.tick(START_S - 0.1) == []
    assert scheduler.tick(START_S) == [End(1, must_kill=True), Fork(2)]
    assert scheduler.ended(2, START_S) == [JobFailed(job, Reason.NO_WORKER)]
    assert scheduler.num_open == 0


@pytest.mark.parametrize("is_costly", [True, False])
def test_only_the_first_job_of_a_dead_worker_is_blamed(is_costly):
    first, second = jobs(2)
    scheduler = started(first)
    scheduler.submit(second, 0.0)
    if is_costly:
        assert scheduler.ended(1, COSTLY_S) == [JobFailed(first, Reason.COSTLY), Fork(2)]
        assert scheduler.ready(2, COSTLY_S) == [Assign(2, second)]
    else:
        assert scheduler.ended(1, 0.05) == [Fork(2)], "it is tried once more"
        assert scheduler.ready(2, 0.1) == [Assign(2, first), Assign(2, second)]
        assert scheduler.ended(2, 0.2) == [JobFailed(first, Reason.LOST), Fork(3)]
    assert second.num_deaths == 0


def test_a_worker_that_ends_with_its_answer_is_blamed_on_no_job():
    first, second = jobs(2)
    scheduler = started(first)
    scheduler.submit(second, 0.0)
    done = scheduler.answered(1, 0.1, is_last=True)
    assert done == [Answered(first), End(1, must_kill=False), Fork(2)]
    assert scheduler.ready(2, 0.1) == [Assign(2, second)]
    assert scheduler.ended(1, 0.2) == []
    assert second.num_deaths == 0


def test_an_unrequested_answer_ends_only_its_worker():
    first, second = jobs(2)
    scheduler = started(first)
    scheduler.answered(1, 0.1)
    assert scheduler.answered(1, 0.1) == [End(1, must_kill=True)]
    assert scheduler.submit(second, 0.1) == [Fork(2)]


def test_many_slow_jobs_kill_the_oldest_but_none_that_is_young():
    scheduler, slow = PoolScheduler(), []
    for number in range(MAX_ASIDE + 1):
        now = 1.1 * SLOW_S * (number // 2)
        scheduler.tick(now)
        slow += jobs(1, is_long=bool(number % 2))
        assert scheduler.submit(slow[-1], now) == [Fork(number + 1)]
        assert scheduler.ready(number + 1, now) == [Assign(number + 1, slow[-1])]
    assert scheduler.tick(HURRIED_S - 0.01) == [], "all are young"
    killed = [JobFailed(slow[0], Reason.COSTLY), End(1, must_kill=True), SetAside(MAX_ASIDE + 1)]
    assert scheduler.tick(HURRIED_S) == killed


def test_a_worker_that_the_kernel_does_not_end_is_killed():
    (job,) = jobs(1)
    scheduler = started(job)
    scheduler.tick(SLOW_S)
    assert scheduler.tick(LATEST_S - 0.01) == []
    assert scheduler.tick(LATEST_S) == [JobFailed(job, Reason.COSTLY), End(1, must_kill=True)]
    assert scheduler.num_open == 0


def test_no_worker_gets_a_job_whose_client_has_left():
    first, left, last = jobs(3)
    scheduler = started(first)
    for job in (*jobs(MAX_AHEAD - 1), left, last):
        scheduler.submit(job, 0.0)
    left.is_dropped = True
    assert scheduler.answered(1, 0.05) == [Answered(first), Assign(1, last)]
    for _ in range(MAX_AHEAD):
        assert len(scheduler.answered(1, 0.06)) == 1
    assert scheduler.num_open == 0
