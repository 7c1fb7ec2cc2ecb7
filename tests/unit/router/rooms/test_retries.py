"""The retry budget and the breaker on numbers alone."""

import hypothesis.strategies as st
from baton.router.rooms.retries import (
    BUDGET_FLOOR,
    BUDGET_SHARE,
    BUDGET_STEP_S,
    BUDGET_WINDOW_S,
    RetryBudget,
)
from baton.router.workers.breaker import (
    BREAKER_FAILURES,
    BREAKER_OPEN_S,
    BREAKER_WINDOW_S,
    FIRST_RETURN,
    Breaker,
)
from hypothesis import given


def test_a_few_retries_are_always_allowed_and_more_only_with_traffic():
    budget = RetryBudget()
    assert [budget.take(1, 0.0) for _ in range(BUDGET_FLOOR + 2)] == [True] * BUDGET_FLOOR + [False] * 2


def test_the_budget_is_a_fifth_of_recent_rooms_or_of_live_ones():
    budget = RetryBudget()
    budget.came(100, 0.0)
    assert sum(budget.take(5, 1.0) for _ in range(200)) == 20
    alive = RetryBudget()
    assert sum(alive.take(300, 1.0) for _ in range(200)) == 60


def test_the_window_slides():
    budget = RetryBudget()
    for _ in range(BUDGET_FLOOR):
        assert budget.take(0, 0.0)
    assert not budget.take(0, BUDGET_WINDOW_S - 0.1)
    assert budget.take(0, BUDGET_WINDOW_S + 0.1)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 30), st.integers(0, 10)), max_size=60))
def test_within_any_window_repeats_stay_below_the_share_or_the_floor(steps):
    budget, now, taken, came = RetryBudget(), 0.0, [], []
    for pause, num_rooms, num_wanted in steps:
        now += pause
        budget.came(num_rooms, now)
        came.append((now, num_rooms))
        for _ in range(num_wanted):
            if budget.take(0, now):
                taken.append(now)
                rooms = sum(count for at, count in came if now - at < BUDGET_WINDOW_S)
                repeats = sum(now - at < BUDGET_WINDOW_S - BUDGET_STEP_S for at in taken)
                assert repeats <= max(BUDGET_FLOOR, BUDGET_SHARE * rooms)


def failing(times, breaker=None):
    breaker = breaker or Breaker()
    return breaker, [breaker.judge(f"room{i}", 0, False, now) for i, now in enumerate(times)]


def test_three_failures_within_the_window_open_the_breaker():
    breaker, opened = failing([0.0, 1.0, 2.0])
    assert opened == [False, False, True]
    assert breaker.is_avoided(2.0)
    assert breaker.state(2.0) == "open"
    breaker, opened = failing([0.0, BREAKER_WINDOW_S / 2, BREAKER_WINDOW_S + 1])
    assert not any(opened)
    assert not breaker.is_avoided(BREAKER_WINDOW_S + 1)
    assert BREAKER_FAILURES == 3


def test_after_a_pause_one_probe_attempt_may_close_the_breaker():
    breaker, _ = failing([0.0, 0.0, 0.0])
    now = BREAKER_OPEN_S + 1
    assert (breaker.state(now), breaker.is_avoided(now)) == ("half open", False)
    breaker.placed("probe", 1)
    assert breaker.is_avoided(now)
    assert not breaker.judge("older", 0, True, now)
    assert breaker.is_avoided(now), "a success from before the failures shows nothing"
    breaker.judge("probe", 1, True, now)
    assert (breaker.state(now), breaker.is_avoided(now)) == ("returning", False)
    assert [breaker.judge(name, 0, False, now) for name in "ab"] == [False, False], "it begins anew"


def test_a_failed_probe_reopens_the_breaker_and_a_cancelled_one_frees_it():
    breaker, _ = failing([0.0, 0.0, 0.0])
    now = BREAKER_OPEN_S + 1
    breaker.placed("probe", 0)
    assert breaker.judge("probe", 0, False, now)
    assert breaker.state(now + BREAKER_OPEN_S - 1) == "open"
    later = now + BREAKER_OPEN_S + 1
    breaker.placed("probe", 1)
    breaker.left("probe", 1)
    assert not breaker.is_avoided(later)


def test_stragglers_do_not_prolong_an_open_breaker():
    breaker, _ = failing([0.0, 0.0, 0.0])
    assert not breaker.judge("straggler", 0, False, 5.0)
    assert breaker.state(BREAKER_OPEN_S + 1) == "half open"


def returning():
    breaker, _ = failing([0.0, 0.0, 0.0])
    breaker.placed("probe", 0)
    breaker.judge("probe", 0, True, BREAKER_OPEN_S)
    breaker.left("probe", 0)
    return breaker


def test_a_recovering_worker_gets_more_attempts_with_every_success():
    breaker, now, most = returning(), BREAKER_OPEN_S, []
    for i in range(40):
        num = 0
        while not breaker.is_avoided(now) and num < 30:
            breaker.placed(f"room{i}.{num}", 0)
            num += 1
        most.append(num)
        breaker.judge(f"room{i}.0", 0, True, now)
        for left in range(num):
            breaker.left(f"room{i}.{left}", 0)
    assert most[:3] == [FIRST_RETURN, FIRST_RETURN + 1, FIRST_RETURN + 2]
    assert most[-1] == 30
    assert breaker.state(now) == "closed"


def test_one_failure_of_a_returning_worker_opens_it_again():
    breaker = returning()
    breaker.placed("room", 0)
    assert breaker.judge("room", 0, False, BREAKER_OPEN_S + 1)
    assert breaker.state(BREAKER_OPEN_S + 2) == "open"
    breaker.placed("other", 0)
    breaker.left("other", 0)
    assert breaker.state(2 * BREAKER_OPEN_S + 2) == "half open"
