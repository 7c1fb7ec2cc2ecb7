"""The rate of tokens at the clients, measured so that a host that takes cores away does not change it."""

import statistics

from baton.tests.faults.traffic import Call

SLICE_S = 1.0


def pace(calls: list[Call], since: float, until: float) -> float:
    """Tokens per second of all `calls` between two moments: the median over slices of `SLICE_S`.

    A fault costs time in most slices. A host that gives the cores to others costs time in some.
    """
    counts = [0] * int((until - since) / SLICE_S)
    assert len(counts) >= 5, f"{until - since:.1f} s are too short to tell"
    for call in calls:
        before = 0
        for at, count in call.arrivals:
            number = int((at - since) // SLICE_S)
            if 0 <= number < len(counts):
                counts[number] += count - before
            before = count
    return statistics.median(counts) / SLICE_S


def busy_pace(calls: list[Call]) -> float:
    """The same while `calls` come, less the first moments: all places are taken until the last one begins."""
    begins = [call.started for call in calls]
    return pace(calls, min(begins) + 2 * SLICE_S, max(begins))
