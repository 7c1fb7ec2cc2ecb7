"""A request that finds no pair takes the places of less urgent ones, in its turn and as many as there are."""

import pytest
from baton.cluster.protocol.messages import Failed, Prefill, Reserve, Reserved, Sampling, TokenItem, Tokens
from baton.cluster.telemetry.metrics import FULL_POOL, PREEMPTED, ClassLoad
from baton.router.endpoints.status import metrics_of, status_of
from baton.router.errors import ApiError
from baton.router.scheduling.inbox import Inbox
from baton.router.scheduling.request_state import Job
from baton.tests.unit.router.scheduling.test_dispatcher import D, World

GROWS = {"grows": True, "preempts": True, "pages_total": 400, "max_running": 2}


class Classes(World):
    def __init__(self, **decode):
        super().__init__()
        self.join(**{**GROWS, **decode})
        self.rooms = {}

    def ask(self, name, priority=0, *, prompt=16, max_new=800):
        job = Job(
            prompt_ids=[5] * prompt,
            sampling=Sampling(max_new_tokens=max_new),
            arrived=self.now,
            tokenize_s=0.0,
            priority=priority,
        )
        [entry] = self.dispatcher.submit([job], Inbox(lambda: self.now))
        self.rooms[entry.room.room] = name
        return entry

    @property
    def placed(self):
        """Names of the rooms in the order of decode's orders."""
        return [self.rooms[order.room] for order in self.of(b"d", Reserve)]

    def on(self, entry, of, **fields):
        one = {"room": entry.room.room, "epoch": entry.room.epoch}
        self.dispatcher.on_message(b"d", of(instance=D, **one, **fields))

    def retract(self, entry, *, is_preempted=True):
        self.on(entry, Failed, kind="Retracted", message="", retryable=True, is_preempted=is_preempted)

    def stream(self, entry, count):
        """The room has got `count` tokens in this attempt, the first one with the others."""
        if not entry.room._attempt.is_reserved:
            self.on(entry, Reserved)
        attempt = entry.room._attempt
        attempt.first = None
        attempt.pair = type(attempt.pair)(prefill=D, decode=D, prefill_endpoint="")
        item = TokenItem(
            room=entry.room.room, epoch=entry.room.epoch, seq=attempt.num_output, ids=[7] * count
        )
        self.dispatcher.on_message(b"d", Tokens(instance=D, items=[item]))


def test_an_urgent_request_is_placed_on_a_full_worker():
    world = Classes()
    world.ask("a", 1), world.ask("b", 1)
    world.ask("c", 1)
    world.ask("urgent")
    assert world.placed == ["a", "b", "urgent"]
    order = world.of(b"d", Reserve)[-1]
    assert (order.priority, world.of(b"p", Prefill)[-1].priority) == (0, 0)


def test_no_more_are_placed_than_there_are_places_to_take():
    world = Classes()
    low = world.ask("low", 1)
    world.ask("normal")
    world.ask("first", -1)
    world.ask("second", -1)
    world.ask("third", -1)
    assert world.placed == ["low", "normal", "first", "second"]
    world.retract(low)
    assert world.placed[4:] == [], "the place that came back was counted on"
    [worker] = [worker for worker in world.dispatcher.registry if worker.role == "decode"]
    assert worker.num_taken == 3


@pytest.mark.parametrize("decode", [{"preempts": False}, {"grows": False}])
def test_nothing_is_taken_on_workers_that_take_nothing_back(decode):
    world = Classes(**decode)
    world.ask("a", 1), world.ask("b", 1)
    world.ask("urgent")
    assert world.placed == ["a", "b"]


def test_equal_classes_take_nothing_from_each_other():
    world = Classes()
    for name in "abc":
        world.ask(name, 3)
    assert world.placed == ["a", "b"]


def test_pages_are_taken_as_well_as_places():
    world = Classes(max_running=64, pages_total=60)
    for i in range(6):
        world.ask(f"low {i}", 1, prompt=100, max_new=100)
    before = list(world.placed)
    assert len(before) < 6
    world.ask("urgent", prompt=300, max_new=100)
    assert world.placed == [*before, "urgent"]
    world.ask("too large", prompt=800, max_new=100)
    assert world.placed == [*before, "urgent"]


def test_a_retracted_request_comes_back_with_a_grant_and_is_left_alone():
    world = Classes(max_running=1)
    low = world.ask("low", 1)
    urgent = world.ask("urgent")
    world.retract(low)
    assert world.placed == ["low", "urgent"]
    world.dispatcher.cancel(urgent)
    world.dispatcher.registry.release(D, urgent.room.room, urgent.room.epoch)
    world.dispatcher.tick()
    assert world.placed == ["low", "urgent", "low"]
    order = world.of(b"d", Reserve)[-1]
    assert order.granted_output > 0
    assert world.of(b"p", Prefill)[-1].keeps_pages
    world.ask("later")
    assert world.placed == ["low", "urgent", "low"], "within its grant"
    world.stream(low, order.granted_output + 40)
    world.dispatcher.tick()
    assert world.placed == ["low", "urgent", "low", "later"]


def test_a_long_waiting_request_is_not_passed_by():
    world = Classes(max_running=1)
    running = world.ask("running", 2)
    world.stream(running, 1)
    waiting = world.ask("waiting", 2)
    world.now = 25.0
    world.ask("urgent", 0)
    assert world.placed == ["running"], "it comes after the one that has waited for so long"
    world.dispatcher.cancel(waiting)
    world.dispatcher.tick()
    assert world.placed == ["running", "urgent"]


def test_preempted_requests_count_by_class_and_teach_the_estimates_nothing():
    world = Classes(max_running=1)
    low = world.ask("low", 1)
    world.ask("urgent")
    margin = world.dispatcher._estimates.margin
    world.retract(low)
    assert world.dispatcher._estimates.margin == margin
    assert world.dispatcher.registry.get(D).foreign_pages == 0, "the worker is not full"
    assert world.dispatcher.retractions == {("low", PREEMPTED): 1}
    assert world.dispatcher.events["preempted"] == 1
    other = Classes(max_running=1)
    room = other.ask("a")
    other.retract(room, is_preempted=False)
    assert other.dispatcher._estimates.margin > margin
    assert other.dispatcher.retractions == {("normal", FULL_POOL): 1}


def test_status_and_metrics_show_each_class():
    world = Classes(max_running=1)
    low = world.ask("low", 1)
    world.now = 2.0
    world.ask("urgent", -5)
    world.ask("normal")
    world.retract(low)
    world.now = 9.0
    classes = status_of(world.dispatcher, "m", 0.0, world.now).router.classes
    assert classes == [
        ClassLoad(priority="high", running=1),
        ClassLoad(priority="normal", queued=1, oldest_wait_s=7.0),
        ClassLoad(priority="low", queued=1, oldest_wait_s=9.0, retracted={PREEMPTED: 1}),
    ]
    text = metrics_of(world.dispatcher).decode()
    for line in (
        'baton_retractions_total{model_name="m",priority="low",reason="preempted"} 1.0',
        'baton_retractions_total{model_name="m",priority="high",reason="full pool"} 0.0',
        'baton_class_requests{model_name="m",priority="normal",state="queued"} 1.0',
        'baton_class_oldest_wait_seconds{model_name="m",priority="low"} 9.0',
    ):
        assert line in text


def test_a_retracted_request_without_a_token_is_not_turned_away():
    world = Classes(max_running=1)
    low = world.ask("low", 1)
    world.ask("urgent")
    world.retract(low)
    world.now = 200.0
    world.dispatcher.registry.get(D).last_seen = world.now
    world.dispatcher.tick()
    assert low.room.is_live
    for i in range(6):
        world.ask(f"more {i}", 1)
    with pytest.raises(ApiError):
        world.ask("too many", 1)
    assert low.room.is_live, "those that came later were turned away"
