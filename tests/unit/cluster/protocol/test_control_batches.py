"""Orders and answers due together share a frame towards a peer that takes batches; nothing else changes."""

import asyncio
from collections import deque
from contextlib import contextmanager

import msgpack
import pytest
import zmq
from baton.cluster.errors import DamagedMessage, RemoteProtocolError
from baton.cluster.net.control_link import OUTBOX_LIMIT, LinkQueues
from baton.cluster.protocol.codec import (
    BATCH_BYTES,
    MAX_BATCH,
    control_down_decoder,
    control_up_decoder,
    encode,
    first_batch,
    framed,
    pack,
)
from baton.cluster.protocol.messages import Cancel, Gone, Welcome
from baton.router.workers.control import ControlSocket
from baton.router.workers.outbox import Outbox
from baton.router.workers.registry import Worker
from baton.tests.unit.cluster.net.test_control_link import HELLO, ME, R1
from msgspec.structs import replace


def gone(number):
    return Gone(room=f"{number:032x}", epoch=0, instance=ME)


def cancel(number):
    return Cancel(room=f"{number:032x}", epoch=0, instance=ME)


class Wire(LinkQueues):
    """A worker's link; its sent frames, each as a list of messages. `takes`: frames that it takes."""

    def __init__(self, **welcome):
        super().__init__(HELLO, 0.0)
        self.inbox, self.frames, self.takes = deque(), [], float("inf")
        self.tick(0.0)
        self.hear(Welcome(instance=ME, router=R1, **welcome))
        self.tick(0.0)
        self.frames.clear()

    def hear(self, *messages):
        self.inbox.append([framed([pack(message) for message in messages])])
        return self.receive()

    def _transmit(self, frame):
        if len(self.frames) >= self.takes:
            return False
        self.frames.append(heard(control_up_decoder().decode(frame)))
        return True

    def _next_message(self):
        return self.inbox.popleft() if self.inbox else None


class Post:
    """A postbox with one worker; the frames that left, likewise."""

    def __init__(self, **hello):
        self.worker = Worker(replace(HELLO, **hello), b"d", 0.0)
        self.frames, self.takes, self.due = [], float("inf"), []
        self.outbox = Outbox(self._transmit, lambda: 0.0, self.due.append)

    def post(self, *messages):
        for message in messages:
            self.outbox.post(self.worker, message, 0.0)
        for work in self.due:
            work()
        self.due.clear()

    def _transmit(self, identity, frame):
        if len(self.frames) >= self.takes:
            return False
        self.frames.append(heard(control_down_decoder().decode(frame)))
        return True


def heard(decoded):
    return list(decoded) if isinstance(decoded, tuple) else [decoded]


def test_messages_between_two_ticks_leave_in_as_few_frames_as_possible():
    wire = Wire(takes_batches=True)
    said = [gone(number) for number in range(MAX_BATCH - 1)]
    for message in said:
        wire.send(message)
    assert wire.frames == [], "more may come in this turn"
    wire.tick(0.1)
    assert wire.frames == [said]


def test_a_burst_leaves_before_the_tick_and_does_not_fill_the_outbox():
    wire = Wire(takes_batches=True)
    said = [gone(number) for number in range(2 * OUTBOX_LIMIT)]
    for message in said:
        wire.send(message)
    assert wire.connected
    assert wire.counters.overflowed == 0
    assert [len(frame) for frame in wire.frames] == [MAX_BATCH] * (2 * OUTBOX_LIMIT // MAX_BATCH)
    assert [message for frame in wire.frames for message in frame] == said


def test_a_router_s_orders_of_one_turn_leave_in_one_frame():
    post = Post(takes_batches=True)
    said = [cancel(number) for number in range(MAX_BATCH + 2)]
    post.post(*said)
    assert post.frames == [said[:MAX_BATCH], said[MAX_BATCH:]]


def test_a_peer_that_does_not_announce_batches_gets_one_message_per_frame():
    wire, post = Wire(), Post()
    for number in range(3):
        wire.send(gone(number))
    wire.tick(0.1)
    assert wire.frames == [[gone(0)], [gone(1)], [gone(2)]]
    post.post(cancel(0), cancel(1))
    assert post.frames == [[cancel(0)], [cancel(1)]]


def test_a_link_obeys_the_last_welcome():
    wire = Wire(takes_batches=True)
    wire.hear(Welcome(instance=ME, router=R1))
    wire.send(gone(0))
    wire.send(gone(1))
    wire.tick(0.1)
    assert wire.frames == [[gone(0)], [gone(1)]]


def test_messages_for_a_full_peer_are_sent_later_once_and_in_order():
    wire, post = Wire(takes_batches=True), Post(takes_batches=True)
    wire.takes = 0
    for number in range(3):
        wire.send(gone(number))
    wire.tick(0.1)
    wire.send(gone(3))
    assert (wire.frames, wire.num_waiting) == ([], 4)
    wire.takes = 9
    wire.hear(Welcome(instance=ME, router=R1, takes_batches=True))
    wire.tick(0.2)
    assert wire.frames[-1] == [gone(number) for number in range(4)]
    post.takes = 1
    post.post(*(cancel(number) for number in range(MAX_BATCH + 1)))
    post.takes = 2
    post.post(cancel(99))
    assert post.frames == [[cancel(number) for number in range(MAX_BATCH)], [cancel(MAX_BATCH), cancel(99)]]


def test_messages_of_a_frame_are_read_in_order_despite_a_stale_one():
    wire = Wire()
    stale = replace(cancel(1), instance="ee" * 16)
    assert wire.hear(cancel(0), stale, cancel(2)) == [cancel(0), cancel(2)]
    assert wire.counters.stale == 1


def test_a_batch_frame_is_bounded_in_bytes_and_a_long_message_goes_alone():
    long, short = b"x" * BATCH_BYTES, b"y"
    assert first_batch([long, short], takes_several=True) == [long]
    assert first_batch([short, long, short], takes_several=True) == [short]
    assert first_batch([short] * 99, takes_several=True) == [short] * MAX_BATCH


def test_no_flipped_bit_changes_a_frame_of_orders():
    messages = (cancel(0), cancel(1))
    frame = framed([pack(message) for message in messages])
    assert control_down_decoder().decode(frame) == messages
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert control_down_decoder().decode(damaged) == messages, (
                "only the word of a checksum may be lost"
            )
        except RemoteProtocolError:
            continue


@pytest.mark.parametrize("decoder", [control_up_decoder, control_down_decoder])
def test_an_empty_overfull_or_misdirected_frame_is_refused_as_a_whole(decoder):
    mine, other = (gone, cancel) if decoder is control_up_decoder else (cancel, gone)
    parts = [pack(mine(number)) for number in range(MAX_BATCH + 1)]
    for frame in (b"\x90", b"\xdc\x00\x11" + b"".join(parts), b"\x92" + parts[0] + pack(other(1))):
        with pytest.raises(RemoteProtocolError):
            decoder().decode(frame)
    assert decoder().decode(encode(mine(0))) == mine(0)


@pytest.mark.parametrize("at", [(0,), (1,), (3,), (0, 2, 4)])
@pytest.mark.parametrize("decoder", [control_up_decoder, control_down_decoder])
def test_a_message_of_unknown_type_costs_no_other_message_of_its_frame(decoder, at):
    said = [(gone if decoder is control_up_decoder else cancel)(number) for number in range(3)]
    assert decoder().messages(newer(said, at)) == (tuple(said), len(at))
    with pytest.raises(RemoteProtocolError, match="unknown message type"):
        decoder().messages(newer([], (0,)))


@pytest.mark.parametrize("decoder", [control_up_decoder, control_down_decoder])
def test_any_fault_but_an_unknown_type_refuses_the_whole_frame(decoder):
    mine, other = (gone, cancel) if decoder is control_up_decoder else (cancel, gone)
    good, new = pack(mine(0)), msgpack.packb(MIGRATE)
    for bad in (
        pack(other(1)), b"\xc0", b"\x90", b"\xc1", msgpack.packb({"room": "a" * 32}),
        msgpack.packb(MIGRATE | {"type": 7}),
        msgpack.packb({"type": type(mine(0)).__name__}), msgpack.packb(MIGRATE | {"type": b"Migrate"}),
        new[:-1],
    ):  # fmt: skip
        for parts in ([good, new, bad], [bad, new, good], [new, bad]):
            with pytest.raises(RemoteProtocolError):
                decoder().messages(bytes([0x90 + len(parts)]) + b"".join(parts))
    with pytest.raises(RemoteProtocolError):
        decoder().messages(b"\xdc\x00\x11" + new + good * MAX_BATCH)
    with pytest.raises(DamagedMessage):
        decoder().messages(newer([mine(0)], (0,))[:-1] + b"?")


def test_a_worker_counts_an_unknown_order_and_obeys_those_beside_it():
    wire = Wire()
    wire.inbox.append([newer([cancel(0), cancel(1)], (1, 1))])
    assert wire.receive() == [cancel(0), cancel(1)]
    assert wire.counters.malformed == 2


def test_a_router_counts_an_unknown_message_and_reads_those_beside_it():
    said = [gone(number) for number in range(3)]
    taken = []
    with control_socket(lambda identity, message: taken.append(message)) as control:
        control._on_parts([zmq.Frame(b"p"), zmq.Frame(newer(said, (0, 2)))])
        assert (taken, control.drops["control_malformed"]) == (said, 2)


MIGRATE = {"type": "Migrate", "room": "a" * 32, "why": [None, {"x": 1.5}]}


def newer(messages, at):
    """A frame of a later release: unknown messages precede those at the indices `at`."""
    parts = [pack(message) for message in messages]
    for index in reversed(at):
        parts.insert(index, msgpack.packb(MIGRATE))
    return framed(parts)


@contextmanager
def control_socket(take):
    control = ControlSocket("tcp://127.0.0.1:*", trusted_network=False)
    control._on_message = take
    try:
        yield control
    finally:
        control.close()


def test_timer_messages_after_the_socket_closed_are_dropped():
    async def main():
        with control_socket(None) as control:
            control.open(lambda *_: None)
        assert not control.transmit(b"a worker", b"a frame")

    asyncio.run(main())


def test_a_message_that_cannot_be_handled_costs_no_other_of_its_frame():
    said = [gone(number) for number in range(4)]
    taken = []

    def take(identity, message):
        taken.append((identity, message))
        if message == said[1]:
            raise LookupError("a bug")

    with control_socket(take) as control:
        with pytest.raises(LookupError):
            control._on_parts([zmq.Frame(b"p"), zmq.Frame(framed([pack(message) for message in said]))])
    assert taken == [(b"p", message) for message in said]
