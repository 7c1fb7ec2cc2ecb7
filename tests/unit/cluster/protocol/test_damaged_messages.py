"""A control message that arrives damaged is lost.

The router resends an order. A lost message of a worker would leave a hole in a stream: so the worker drops
its rooms, and the router places them again at once.
"""

from collections import deque

from baton.cluster.net.control_link import REJECTED_BACKOFF_S, LinkQueues
from baton.cluster.protocol.codec import control_up_decoder, encode
from baton.cluster.protocol.messages import (
    Cancel,
    FirstToken,
    Hello,
    Prefill,
    Rejected,
    Reserve,
    Reserved,
    Welcome,
)
from baton.tests.unit.router.scheduling.test_dispatcher import D, P, World, begin
from baton.tests.unit.router.workers.test_registry import hello

ROUTER = "a" * 32
WELCOME = Welcome(instance=D, router=ROUTER, heartbeat_ms=300)


def flipped(message, bit=100):
    data = bytearray(encode(message))
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


class Wire(LinkQueues):
    """A worker's control link whose frames a test carries."""

    def __init__(self):
        super().__init__(hello(instance=D, role="decode"), 0.0)
        self.sent, self.arrived = [], deque()
        self._up = control_up_decoder()

    def _transmit(self, frame):
        self.sent.append(self._up.decode(frame))
        return True

    def _next_message(self):
        return [self.arrived.popleft()] if self.arrived else None

    def hear(self, now, *frames):
        self.arrived += frames
        return self.receive(), self.tick(now)


def joined():
    wire = Wire()
    wire.tick(0.0)
    assert wire.hear(0.1, encode(WELCOME)) == ([WELCOME], "")
    return wire


def cancel():
    return Cancel(room="e" * 32, epoch=0, instance=D)


def test_a_damaged_router_message_is_reported_at_once_and_ends_no_room():
    wire = joined()
    wire.sent.clear()
    assert wire.hear(0.25, flipped(cancel()), encode(cancel())) == ([cancel()], "")
    assert [(type(message), message.generation, message.missed) for message in wire.sent] == [(Hello, 0, 1)]
    assert wire.hear(0.3) == ([], "")
    assert len(wire.sent) == 1, "it is told once"
    assert wire.counters.malformed == 1


def test_a_router_sending_only_damage_is_probed_slowly_and_then_lost():
    wire = joined()
    wire.sent.clear()
    lost = [told for i in range(300) if (told := wire.hear(0.2 + i / 100, flipped(cancel()))[1])]
    assert len(lost) == 1
    assert "did not answer" in lost[0]
    assert len(wire.sent) < 40
    assert wire.sent[-1].generation == 1


def test_unanswered_orders_are_resent_to_a_worker_that_missed_one():
    world = World().join()
    (answered,), _ = world.submit(16)
    (waiting,), _ = world.submit(16)
    room = answered.room.room
    world.dispatcher.on_message(b"d", Reserved(instance=D, room=room, epoch=0))
    world.dispatcher.on_message(b"p", FirstToken(instance=P, room=room, epoch=0, token=9))
    before = world.sent[b"d"][-1], world.sent[b"p"][-1]
    for identity, instance, role in ((b"d", D, "decode"), (b"p", P, "prefill")):
        world.dispatcher.on_message(identity, hello(instance=instance, role=role, missed=1))
        world.dispatcher.on_message(
            identity, hello(instance=instance, role=role, missed=1)
        )  # a question, and no more
    kinds = ((b"d", Reserve), (b"p", Prefill))
    for (identity, kind), first in zip(kinds, before, strict=True):
        mine = [order for order in world.of(identity, kind) if order.room == waiting.room.room]
        assert mine == [first, first]
        assert len(world.of(identity, kind)) == 3, "what was answered is not said again"
    assert world.dispatcher.events["damaged_order"] == 2
    assert world.dispatcher.events["requeued"] == 0


def test_the_order_to_drop_rooms_is_repeated_until_it_is_obeyed():
    world = World().join()
    (entry,), _ = world.submit(16)
    begin(world, entry)
    world.dispatcher.on_damaged(b"d")
    world.dispatcher.on_message(b"d", hello(instance=D, role="decode", missed=1))
    assert len(world.of(b"d", Rejected)) == 2
    world.dispatcher.on_message(b"d", hello(instance=D, role="decode", missed=1, generation=1))
    assert isinstance(world.of(b"d", (Rejected, Welcome))[-1], Welcome)
    assert [order.epoch for order in world.of(b"d", Reserve)] == [0, 1]


def test_a_damaged_message_before_the_welcome_is_dropped_and_no_more():
    wire = Wire()
    wire.tick(0.0)
    assert wire.hear(0.1, flipped(WELCOME)) == ([], "")
    assert wire.hear(0.2, encode(WELCOME)) == ([WELCOME], "")
    assert {message.generation for message in wire.sent} == {0}


def test_a_worker_rejected_while_it_greets_is_welcomed_in_the_end():
    """The router knows its Hello, and a later one arrives damaged before it hears the Welcome."""
    world, wire = World().join(), Wire()
    wire.tick(0.0)
    world.dispatcher.on_damaged(b"d")
    (rejection,) = world.of(b"d", Rejected)
    assert wire.hear(0.1, encode(rejection)) == ([], "")
    assert wire.hear(0.1 + REJECTED_BACKOFF_S) == ([], ""), "there is nothing that it could lose"
    world.dispatcher.on_message(b"d", wire.sent[-1])
    answer = world.of(b"d", (Rejected, Welcome))[-1]
    assert isinstance(answer, Welcome)
    assert wire.hear(0.2 + REJECTED_BACKOFF_S, encode(answer)) == ([answer], "")


def test_rooms_of_a_worker_with_a_damaged_message_are_placed_again():
    world, wire = World().join(), joined()
    (entry,), _ = world.submit(16)
    begin(world, entry)
    world.dispatcher.on_damaged(b"d")
    (rejection,) = world.of(b"d", Rejected)
    assert "damaged" in rejection.reason
    assert world.of(b"p", Rejected) == []
    assert "damaged" in wire.hear(0.2, encode(rejection))[1]
    world.dispatcher.on_message(b"d", wire.sent[-1])
    assert [order.epoch for order in world.of(b"d", Reserve)] == [0, 1]
    assert world.dispatcher.events["damaged_message"] == 1
    assert wire.hear(0.3, encode(WELCOME)) == ([WELCOME], "")


def test_damaged_messages_of_unknown_senders_change_nothing():
    world = World().join()
    (entry,), _ = world.submit(16)
    world.dispatcher.on_damaged(b"stranger")
    assert world.of(b"d", Rejected) == world.of(b"p", Rejected) == []
    assert world.dispatcher.events["damaged_message"] == 0
    assert entry.room.is_at_workers
