"""A pace that is asserted is one that the cluster makes, and not the host."""

import pytest
from baton.tests.faults.rates import busy_pace, pace
from baton.tests.faults.traffic import Ask, Call

STEP_S = 0.03


def stream(began=0.0, seconds=10.0, stalls=(), step_s=STEP_S):
    """A token a step, and none while the machine stands still."""
    arrivals, now = [], began
    while now < began + seconds:
        now += step_s
        now = max([now, *(until for since, until in stalls if since <= now < until)])
        arrivals.append((now, len(arrivals) + 1))
    return Call(Ask(prompt=(1,)), began, arrivals=arrivals)


def test_a_brief_stall_leaves_the_measured_rate_and_slow_steps_lower_it():
    steady = pace([stream()] * 4, 1.0, 9.0)
    assert steady == pytest.approx(4 / STEP_S, rel=0.03)
    assert pace([stream(stalls=((2.1, 3.4), (6.5, 6.9)))] * 4, 1.0, 9.0) == pytest.approx(steady, rel=0.03)
    assert pace([stream(step_s=1.1 * STEP_S)] * 4, 1.0, 9.0) < 0.95 * steady
    with pytest.raises(AssertionError, match="too short"):
        pace([stream()], 1.0, 5.0)


def test_the_rate_excludes_the_start_and_the_end_of_a_load():
    crowd = [stream(began=number / 2, seconds=1.0) for number in range(20)]
    assert busy_pace(crowd) == pytest.approx(2 / STEP_S, rel=0.05)
