"""A control message that arrives damaged is lost, and a lost one would leave a hole in a stream: the worker drops its
rooms, and the router places them again at once.
"""

from collections import deque

from baton.cluster.codec import control_up_decoder, encode
from baton.cluster.control_link import LinkQueues
from baton.cluster.messages import Cancel, Goodbye, Hello, Rejected, Reserve, Welcome
from baton.tests.unit.test_dispatch import D, World, begin
from baton.tests.unit.test_registry import hello

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


def test_a_damaged_message_of_the_router_is_a_loss_of_which_it_hears_before_anything_else():
    wire = joined()
    wire.sent.clear()
    messages, lost = wire.hear(0.2, flipped(Cancel(room="e" * 32, epoch=0, instance=D)))
    assert messages == []
    assert "damaged" in lost
    assert [(type(message), message.generation) for message in wire.sent] == [(Hello, 1)]
    wire.send(Goodbye(instance=D))
    assert wire.hear(0.3)[1] == "", "it is reported once"
    assert wire.counters.malformed == 1


def test_a_damaged_message_before_the_welcome_is_dropped_and_no_more():
    wire = Wire()
    wire.tick(0.0)
    assert wire.hear(0.1, flipped(WELCOME)) == ([], "")
    assert wire.hear(0.2, encode(WELCOME)) == ([WELCOME], "")
    assert {message.generation for message in wire.sent} == {0}


def test_a_worker_whose_message_came_damaged_begins_anew_and_its_rooms_are_placed_again():
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


def test_damaged_messages_of_no_worker_change_nothing():
    world = World().join()
    (entry,), _ = world.submit(16)
    world.dispatcher.on_damaged(b"stranger")
    assert world.of(b"d", Rejected) == world.of(b"p", Rejected) == []
    assert world.dispatcher.events["damaged_message"] == 0
    assert entry.room.is_at_workers
