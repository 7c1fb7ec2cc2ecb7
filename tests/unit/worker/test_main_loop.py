"""The loop of a worker on a clock that the test moves: how it leaves, and what feeds the watchdog."""

import logging

import pytest
from baton.cluster.net.control_link import LEFT
from baton.cluster.process.process import Shutdown
from baton.cluster.protocol.messages import Goodbye, Heartbeat, WorkerStats
from baton.worker.main_loop import FAREWELL_S, SOON_S, WorkerLoop
from baton.worker.room_owners import RouterLost


class FakeLink:
    heartbeat_s = 0.3

    def __init__(self):
        self.posted = []
        self.is_closed = False

    def post(self, item):
        self.posted.append(item)

    def receive(self, timeout):
        return []

    def retain(self, rooms):
        self.retained = rooms

    def close(self):
        self.is_closed = True


class FakeQueues:
    def names(self):
        return {"a room"}


class FakeWorker:
    instance = "1" * 32
    num_rooms = 0
    wants_beat = False
    queues = FakeQueues()

    def __init__(self, clock):
        self.clock = clock
        self.calls = []

    def expire(self, now):
        self.clock[0] += 0.1

    def step(self):
        return False

    def drop_rooms(self, rooms, reason):
        self.calls.append(("drop", rooms, reason))

    def start_draining(self):
        self.calls.append("drain")

    def hand_back(self):
        self.calls.append("hand back")

    def stats(self):
        return WorkerStats()


def loop_of(num_rooms, drain_timeout_s=5.0):
    clock = [100.0]
    worker = FakeWorker(clock)
    worker.num_rooms = num_rooms
    fed = []
    shutdown = Shutdown()
    loop = WorkerLoop(
        worker, FakeLink(), shutdown, drain_timeout_s=drain_timeout_s, clock=lambda: clock[0], feed=fed.append
    )
    return loop, shutdown, clock, fed


def test_an_idle_leaving_worker_stays_to_refuse_orders_under_way():
    loop, shutdown, clock, _ = loop_of(0)
    shutdown.drain.set()
    assert loop.run() == 0
    assert FAREWELL_S <= clock[0] - 100.0 < FAREWELL_S + 0.3
    assert [type(item) for item in loop.link.posted[:1]] == [Goodbye]
    assert loop.link.is_closed


def test_a_worker_that_routers_wait_for_tells_at_once_but_not_always():
    loop, _, clock, _ = loop_of(1)
    loop.beat()
    for wants, later, beats in ((True, 0.001, 1), (True, SOON_S, 2), (False, SOON_S, 2), (True, 0.001, 3)):
        loop.worker.wants_beat = wants
        clock[0] += later
        loop.beat()
        assert sum(isinstance(item, Heartbeat) for item in loop.link.posted) == beats
        assert loop.worker.wants_beat == (wants and later < SOON_S and beats == 1)


def test_rooms_left_at_the_end_of_the_drain_time_are_handed_back():
    loop, shutdown, clock, _ = loop_of(2)
    shutdown.drain.set()
    loop.run()
    assert loop.worker.calls == ["drain", "hand back"]
    assert 5.0 <= clock[0] - 100.0 < 5.3


def test_a_second_signal_hands_everything_back_at_once():
    loop, shutdown, clock, _ = loop_of(2)
    shutdown.drain.set()
    shutdown.stop.set()
    loop.run()
    assert (loop.worker.calls, clock[0]) == (["hand back"], 100.0)


def test_a_worker_that_others_need_stays_until_its_drain_time_ends():
    loop, shutdown, clock, _ = loop_of(0)
    left = []
    loop.may_leave, loop.on_leave = (lambda: False), (lambda: left.append(list(loop.worker.calls)))
    shutdown.drain.set()
    loop.run()
    assert 5.0 <= clock[0] - 100.0 < 5.3
    assert left == [["drain"]], "it says that it leaves before it hands back"


def test_a_worker_announces_its_drain_during_a_long_step():
    loop, shutdown, _, _ = loop_of(1)
    posted = []

    def long_step():
        shutdown.drain.set()
        loop.beat()  # as between two layers
        posted.extend(loop.link.posted)
        return True

    loop.worker.step = long_step
    loop.turn()
    assert [type(item) for item in posted] == [Goodbye, Heartbeat]
    assert not loop.is_over()
    assert [type(item) for item in loop.link.posted].count(Goodbye) == 1
    assert loop.worker.calls == ["drain"]


def test_each_turn_feeds_the_watchdog_and_heartbeats_keep_the_routers_pace():
    loop, _, _, fed = loop_of(0)
    for _ in range(10):
        loop.turn()
    assert len(fed) == 10
    assert fed == sorted(fed)
    assert sum(isinstance(item, Heartbeat) for item in loop.link.posted) in (3, 4)


@pytest.mark.parametrize(
    ("reason", "rooms", "level"),
    [("it broke", {"a"}, logging.WARNING), (LEFT, {"a"}, logging.INFO), ("it broke", set(), None)],
)
def test_only_rooms_of_a_router_that_was_lost_are_a_warning(caplog, reason, rooms, level):
    caplog.set_level(logging.INFO)
    loop, *_ = loop_of(0)
    loop._handle(RouterLost(router=0, reason=reason, rooms=frozenset(rooms)))
    assert loop.worker.calls == [("drop", rooms, reason)]
    assert [record.levelno for record in caplog.records] == [level] * (level is not None)
