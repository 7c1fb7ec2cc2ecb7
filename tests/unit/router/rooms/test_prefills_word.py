"""Decode reports that prefill gave up a hand-off; prefill's own report decides on the cause and the cost."""

import pytest
from baton.cluster.protocol.messages import Cancel, Failed, Prefill, Rejected, Reserved
from baton.router.rooms.effects import Failure, Timeouts
from baton.router.rooms.retries import BUDGET_FLOOR
from baton.tests.unit.router.scheduling.test_dispatcher import D, P, World, begin, events
from baton.tests.unit.router.workers.test_registry import hello

WORD_S = Timeouts().word_s
NUM_ROOMS = BUDGET_FLOOR + 5


@pytest.fixture
def world():
    return World(max_queue=100).join(max_running=64, pages_total=1000)


def given_up(world, entry, instance=D, kind="HandoffAborted"):
    room = {"room": entry.room.room, "epoch": entry.room.epoch}
    failed = Failed(instance=instance, kind=kind, message="the router is gone", retryable=True, **room)
    world.dispatcher.on_message(b"d" if instance == D else b"p", failed)


def submitted(world, num_begun):
    """Rooms at their workers, of which some have their first token."""
    entries = [world.submit(16)[0][0] for _ in range(NUM_ROOMS)]
    for entry in entries[:num_begun]:
        begin(world, entry)
    return entries


def pass_time(world, seconds):
    world.now += seconds
    world.dispatcher.tick()


@pytest.mark.parametrize("num_begun", [0, NUM_ROOMS])
def test_rooms_dropped_by_prefill_cost_no_budget_and_no_blame_of_decode(world, num_begun):
    entries = submitted(world, num_begun)
    for entry in entries:
        given_up(world, entry)
    assert world.dispatcher.events["requeued"] == 0, "its word is awaited"
    world.dispatcher.on_message(b"p", hello(instance=P, role="prefill", generation=1))
    assert all(entry.room.is_live for entry in entries)
    assert [entry.room.epoch for entry in entries] == [1] * NUM_ROOMS
    assert world.dispatcher.events["retry_denied"] == 0
    assert not any(
        world.dispatcher.registry.get(instance).breaker.is_avoided(world.now) for instance in (P, D)
    )


def test_decodes_report_after_prefills_ends_the_attempt_at_no_cost(world):
    entries = submitted(world, NUM_ROOMS)
    world.dispatcher.on_message(b"p", hello(instance=P, role="prefill", generation=1))
    assert [entry.room.epoch for entry in entries] == [0] * NUM_ROOMS, (
        "with token 1 here, decode may have all it needs"
    )
    for entry in entries:
        given_up(world, entry)
    assert [entry.room.epoch for entry in entries] == [1] * NUM_ROOMS
    assert world.dispatcher.events["retry_denied"] == 0
    assert not any(
        world.dispatcher.registry.get(instance).breaker.is_avoided(world.now) for instance in (P, D)
    )


def test_prefills_own_report_counts_in_either_order(world):
    (entry, *_) = submitted(world, 0)
    given_up(world, entry)
    given_up(world, entry, P, "BadLogits")
    assert entry.room.failed_on == {P}
    assert entry.room.epoch == 1
    given_up(world, entry, P, "Draining")
    assert entry.room.failed_on == {P}, "nobody is at fault"
    assert len([order for order in world.of(b"p", Prefill) if order.room == entry.room.room]) == 3


@pytest.mark.parametrize("num_begun", [0, NUM_ROOMS])
def test_without_prefills_report_decodes_counts_and_uses_the_budget(world, num_begun):
    entries = submitted(world, num_begun)
    world.dispatcher.tick()  # streams that go on are not looked at again
    for entry in entries:
        given_up(world, entry)
        given_up(world, entry)  # the network may say it twice
    pass_time(world, WORD_S - 0.01)
    assert world.dispatcher.events["requeued"] == 0
    pass_time(world, 0.02)
    assert (world.dispatcher.events["requeued"], world.dispatcher.events["retry_denied"]) == (BUDGET_FLOOR, 5)
    broken = [event for entry in entries if not entry.room.is_live for event in events(entry.inbox)]
    assert {event.kind for event in broken if isinstance(event, Failure)} == {"HandoffAborted"}
    assert entries[0].room.failed_on == {P, D}


def test_a_client_leaving_while_prefills_report_is_awaited_leaks_nothing(world):
    (entry, *_) = submitted(world, 1)
    given_up(world, entry)
    world.dispatcher.client_left(entry)
    assert [message.room for message in world.of(b"p", Cancel)] == [entry.room.room]
    assert world.of(b"d", Cancel) == [], "decode has said that it holds nothing"
    assert world.of(b"d", Rejected) == []


def test_prefills_report_is_awaited_only_for_hand_offs(world):
    (entry, *_) = submitted(world, 0)
    world.dispatcher.on_message(b"d", Reserved(instance=D, room=entry.room.room, epoch=0))
    given_up(world, entry, kind="TransferTimeout")
    assert entry.room.epoch == 1
