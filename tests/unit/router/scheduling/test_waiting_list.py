"""The admission queue: its order and its bounds."""

from baton.cluster.protocol.messages import Sampling
from baton.cluster.protocol.request_rank import PRIORITY_S
from baton.router.rooms.room import Room
from baton.router.scheduling.inbox import Inbox
from baton.router.scheduling.request_state import ClientRequest, Entry, Job
from baton.router.scheduling.waiting_list import WaitingList
from hypothesis import given
from hypothesis import strategies as st

ARRIVALS = st.lists(st.tuples(st.floats(0, 100), st.integers(-3, 3), st.booleans()), max_size=30)


def entry(arrived, priority=0, output=()):
    job = Job(prompt_ids=[1], sampling=Sampling(), arrived=arrived, tokenize_s=0.0, priority=priority)
    room = Room("a" * 32, [1], job.sampling, arrived)
    room.output_ids += output
    request = ClientRequest(arrived=arrived, waiting_since=arrived, priority=priority)
    return Entry(room, job, request, Inbox(lambda: 0.0), 0, queued_at=arrived)


def arrivals(waiting):
    return [one.request.arrived for one in waiting]


def test_urgent_requests_overtake_recent_ones_but_not_long_waiting_ones():
    waiting = WaitingList()
    for arrived, priority in ((0.0, 0), (PRIORITY_S - 1, -1), (PRIORITY_S + 1, -1), (2.0, 1), (3.0, 0)):
        waiting.join(entry(arrived, priority))
    assert arrivals(waiting) == [PRIORITY_S - 1, 0.0, PRIORITY_S + 1, 3.0, 2.0]


def test_a_returning_request_gets_its_old_place():
    waiting, (old, young) = WaitingList(), (entry(0.0), entry(0.0))
    waiting.join(old)
    waiting.join(young)
    waiting.leave(old)
    waiting.leave(old)
    waiting.join(old)
    assert list(waiting) == [old, young]


@given(ARRIVALS)
def test_the_list_is_sorted_and_holds_every_waiting_request(steps):
    waiting, inside = WaitingList(), []
    for arrived, priority, leaves in steps:
        made = entry(arrived, priority)
        waiting.join(made)
        inside.append(made)
        if leaves:
            gone = inside.pop(len(inside) // 2)
            waiting.leave(gone)
        ranks = [one.request.arrived + PRIORITY_S * one.request.priority for one in waiting]
        assert ranks == sorted(ranks)
        assert {id(one) for one in waiting} == {id(one) for one in inside}


def test_the_last_entry_is_the_last_request_without_output():
    waiting = WaitingList()
    assert waiting.last() is None
    first, begun = entry(0.0), entry(1.0, output=[5])
    waiting.join(first)
    waiting.join(begun)
    assert waiting.last() is first
