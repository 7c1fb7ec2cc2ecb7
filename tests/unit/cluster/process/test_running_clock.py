"""Time in which a process did not run counts for no silence of others."""

from baton.cluster.process.running_clock import LONGEST_STEP_S, PauseMeter, RunningClock


def test_the_clock_follows_the_time_while_its_loop_runs():
    time = [100.0]
    clock = RunningClock(lambda: time[0])
    for step in (0.0, 0.2, LONGEST_STEP_S, 0.01):
        time[0] += step
        assert clock() == time[0]


def test_a_pause_counts_as_one_step_and_time_never_goes_back():
    time = [100.0]
    clock = RunningClock(lambda: time[0])
    time[0] += 30.0
    assert clock() == 100.0 + LONGEST_STEP_S
    assert clock() == 100.0 + LONGEST_STEP_S
    time[0] += 0.1
    assert clock() == 100.0 + LONGEST_STEP_S + 0.1


def test_a_pause_is_measured_once():
    meter = PauseMeter(1.0)
    assert [meter.turn(now) for now in (5.0, 5.1, 35.1, 35.2)] == [0.0, 0.0, 30.0, 0.0]
