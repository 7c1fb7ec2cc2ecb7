"""A silent worker whose connection stands: requests wait for it where nobody else can serve them."""

import pytest
from baton.cluster.protocol.messages import Cancel, Heartbeat, Reserve, Reserved, WorkerStats
from baton.router.endpoints.status import status_of, why_not_ready
from baton.router.errors import ApiError
from baton.router.rooms.effects import Failure
from baton.router.scheduling.dispatcher import SETTLE_S
from baton.router.workers.eligibility import is_ready
from baton.router.workers.registry import REDIAL_S, UNREACHABLE_S
from baton.tests.unit.router.scheduling.test_dispatcher import D, P, World, events
from baton.tests.unit.router.workers.test_registry import hello

D2 = "3" * 32
TIMEOUT_S, STALL_S = 1.8, 60.0


class Stalling(World):
    """A world with ticks and heartbeats while time passes."""

    def __init__(self, **settings):
        super().__init__(**{"stall_s": STALL_S, "queue_timeout_s": 5.0} | settings)
        self.sent[b"e"] = []
        self.registry = self.dispatcher.registry
        self.registry._timeout_s = TIMEOUT_S

    def beat(self, identity, instance):
        stats = WorkerStats(pages_total=100, pages_free=100)
        self.dispatcher.on_message(identity, Heartbeat(instance=instance, stats=stats))

    def join_another_decode(self):
        self.dispatcher.on_message(b"e", hello(instance=D2, role="decode"))
        self.beat(b"e", D2)

    def run(self, seconds, *living):
        """Lets time pass; only `living` (identity, instance) send heartbeats."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.1
            for one in living:
                self.beat(*one)
            self.dispatcher.tick()

    def states(self):
        return [worker.state for worker in self.registry]


PREFILL, DECODE = (b"p", P), (b"d", D)


def test_requests_wait_for_the_only_worker_and_go_on_with_it():
    world = Stalling().join()
    (stream,), inbox = world.submit(16)
    room = stream.room.room
    world.dispatcher.on_message(b"d", Reserved(room=room, epoch=0, instance=D))
    world.run(TIMEOUT_S + 0.1, PREFILL)
    assert world.states() == ["serving", "stalled"]
    assert not is_ready(world.registry)
    (later,), _ = world.submit(16)
    world.run(30.0, PREFILL)
    assert world.dispatcher.num_queued == 1, "longer than the queue's limit"
    assert (stream.room.epoch, len(world.of(b"d", Reserve))) == (0, 1), "the room stays where it is"
    world.beat(*DECODE)
    assert world.states() == ["serving", "serving"]
    assert [order.room for order in world.of(b"d", Reserve)] == [room, later.room.room]
    world.finish(room)
    world.finish(later.room.room)
    assert type(events(inbox)[-1]).__name__ == "Ended"
    assert world.dispatcher.num_open == 0
    assert world.dispatcher.events["worker_stalled"] == 1


def test_status_and_retry_after_tell_of_the_wait():
    world = Stalling(max_queue=1).join()
    world.run(12.0, PREFILL)
    (worker,) = status_of(world.dispatcher, "m", 0.0, world.now).router.stalled
    assert (worker.role, worker.instance, worker.silent_s) == ("decode", D, 12.0)
    assert worker.lost_in_s == STALL_S - 12.0
    told = "the decode worker has not answered for 12 s, though the connection stands"
    assert why_not_ready(world.dispatcher, world.now) == f"{told}; requests wait for it"
    world.submit(16)
    with pytest.raises(ApiError) as caught:
        world.submit(16)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 12)
    assert told in str(caught.value)


def test_a_worker_that_another_can_replace_is_lost_as_before():
    world = Stalling().join()
    world.join_another_decode()
    (entry,), _ = world.submit(16)
    other, identity = ((b"e", D2), b"d") if entry.room.pair.decode == D else (DECODE, b"e")
    world.run(TIMEOUT_S + 0.1, PREFILL, other)
    assert world.states() == ["serving", "serving"]
    assert entry.room.pair.decode == other[1]
    assert len(world.of(identity, Cancel)) >= 1


def test_a_stalled_worker_is_lost_when_another_comes():
    world = Stalling().join()
    (entry,), _ = world.submit(16)
    world.run(5.0, PREFILL)
    assert world.states() == ["serving", "stalled"]
    world.join_another_decode()
    world.run(0.1, PREFILL, (b"e", D2))
    assert (entry.room.epoch, entry.room.pair.decode) == (1, D2)


def test_a_dead_worker_is_lost_at_once_even_while_it_is_stalled():
    world = Stalling().join()
    (entry,), inbox = world.submit(16)
    world.run(5.0, PREFILL)
    world.lost.add(b"d")
    world.dispatcher.probe()
    world.run(UNREACHABLE_S + 0.2, PREFILL)
    assert world.states() == ["serving"]
    assert [type(event) for event in events(inbox)] == [Failure], "a request without output hears of it"
    with pytest.raises(ApiError) as caught:
        world.submit(16)
    assert caught.value.status == 503
    assert not entry.room.is_live


@pytest.mark.parametrize(("setting", "seconds"), [(STALL_S, STALL_S), (0.0, TIMEOUT_S)])
def test_the_wait_is_bounded(setting, seconds):
    world = Stalling(stall_s=setting).join()
    world.run(seconds - 0.2, PREFILL)
    assert len(world.registry) == 2
    world.run(0.4, PREFILL)
    assert world.states() == ["serving"]


def test_a_stalled_worker_collects_no_messages():
    world = Stalling().join()
    world.run(5.0, PREFILL)
    world.refusing.add(b"d")
    for _ in range(50):
        world.dispatcher.probe()
    assert len(world.registry.get(D).outbox) == 1


def test_after_a_pause_of_the_router_nobody_is_late():
    world = Stalling(request_timeout_s=100.0).join()
    (stream,), inbox = world.submit(16)
    for _ in range(40):  # more than fit
        world.submit(16) if world.dispatcher.num_queued < 8 else None
    num_queued, num_orders = world.dispatcher.num_queued, len(world.of(b"d", Reserve))
    world.now += 40.0
    world.dispatcher.paused(40.0)
    world.dispatcher.tick()
    assert world.states() == ["serving", "serving"]
    assert (world.dispatcher.num_queued, stream.room.is_at_workers) == (num_queued, True)
    assert inbox.unread_since is None
    world.finish(stream.room.room)
    assert len(world.of(b"d", Reserve)) == num_orders, "what the workers said meanwhile is read first"
    world.run(SETTLE_S + 0.1, PREFILL, DECODE)
    assert len(world.of(b"d", Reserve)) > num_orders


def test_after_a_pause_of_the_router_workers_have_time_to_come_back():
    world = Stalling(request_timeout_s=100.0).join()
    (stream,), inbox = world.submit(16)
    world.now += 40.0
    world.dispatcher.paused(40.0)
    world.lost.add(b"d")  # it gave this router up, and dials again
    world.dispatcher.probe()
    world.run(REDIAL_S - 0.2, PREFILL)
    assert world.states() == ["serving", "serving"]
    (late,), later = world.submit(16)
    assert [answer.unread_since for answer in (inbox, later)] == [None, None], "nobody hears of a failure"
    world.lost.discard(b"d")
    world.dispatcher.on_message(b"d", hello(instance=D, role="decode", generation=1))
    world.run(1.0, PREFILL, DECODE)
    assert not world.dispatcher.events["worker_lost"]
    assert [entry.room.is_at_workers for entry in (stream, late)] == [True, True]


def test_who_does_not_come_back_after_a_pause_is_lost():
    world = Stalling(request_timeout_s=100.0).join()
    _, inbox = world.submit(16)
    world.now += 40.0
    world.dispatcher.paused(40.0)
    world.lost.add(b"d")
    world.dispatcher.probe()
    world.run(REDIAL_S + 0.2, PREFILL)
    assert world.states() == ["serving"]
    assert [type(event) for event in events(inbox)] == [Failure]


def test_a_deadline_counts_the_pause():
    world = Stalling(request_timeout_s=20.0).join()
    _, inbox = world.submit(16)
    world.now += 40.0
    world.dispatcher.paused(40.0)
    world.dispatcher.tick()
    assert [event.kind for event in events(inbox)] == ["DeadlineExceeded"]
