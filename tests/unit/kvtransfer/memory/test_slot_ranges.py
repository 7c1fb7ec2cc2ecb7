"""Ranges of slots: every slot has one holder, and a run gets neighbours or fewer slots than it asked for."""

import random

import pytest
from baton.kvtransfer.memory.slot_ranges import SlotRanges


def holder(number: int) -> tuple[str, int, int]:
    return (f"{number:032x}", 0, 0)


def test_a_run_gets_its_neighbours_or_the_longest_gap():
    ranges = SlotRanges(8, first=6)
    first, second = ranges.take(holder(1), 5, 1.0), ranges.take(holder(2), 2, 1.0)
    assert (first.index, first.count, second.index, second.count) == (6, 5, 11, 2)
    assert ranges.take(holder(1), 3, 1.0) is first
    short = ranges.take(holder(3), 4, 1.0)
    assert (short.index, short.count) == (13, 1)
    assert ranges.take(holder(4), 1, 1.0) is None
    assert not ranges.free(holder(1), 7)
    assert ranges.free(holder(1), 6)
    assert not ranges.free(holder(1), 6)
    fitting = ranges.take(holder(5), 5, 9.0)
    assert (fitting.index, fitting.count) == (6, 5)
    ranges.free_where(lambda _, ends_at: ends_at < 5.0)
    assert repr(ranges) == "SlotRanges(5/8 held)"
    ranges.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_every_slot_has_one_holder_at_any_time(seed):
    rng, ranges, held = random.Random(seed), SlotRanges(9, first=4), {}
    for number in range(400):
        if held and rng.random() < 0.5:
            one = rng.choice(list(held))
            assert ranges.free(one, held.pop(one).index)
        else:
            most = rng.randint(1, 6)
            taken = ranges.take(holder(number), most, 0.0)
            assert (taken is None) == (sum(one.count for one in held.values()) == 9)
            if taken is not None:
                assert 1 <= taken.count <= most
                held[holder(number)] = taken
        slots = [slot for one in held.values() for slot in range(one.index, one.index + one.count)]
        assert len(slots) == len(set(slots))
        assert not slots or (min(slots) >= 4 and max(slots) < 13)
        ranges.check_integrity()


def test_no_slots_hold_nothing():
    ranges = SlotRanges(0, first=6)
    assert ranges.take(holder(1), 3, 1.0) is None
    ranges.check_integrity()
