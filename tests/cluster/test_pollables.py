"""Transports are waited for by file descriptors, and no message is slept over."""

import select
import socket
import threading
import time

import pytest
import zmq
from baton.cluster.errors import ConfigError
from baton.cluster.net.transport_names import SHM, TRANSPORTS, ZMQ_BLOCKS
from baton.kvtransfer.transport import Complete, Offer, PullRequest
from baton.kvtransfer.transports.registry import (
    ReceiverSetup,
    SenderSetup,
    Transport,
    open_receiver,
    open_sender,
    registered,
)
from baton.tests.cluster.test_zmq_blocks import LAYOUT, planes_of

P, D = "1" * 32, "2" * 32
PATIENCE_S = 20.0


@pytest.fixture
def context():
    made = zmq.Context()
    yield made
    made.destroy(0)


@pytest.fixture
def ends(context, tmp_path):
    sender = open_sender(
        [ZMQ_BLOCKS],
        SenderSetup(
            bind=f"ipc://{tmp_path}/kv",
            instance=P,
            layout=LAYOUT,
            planes=planes_of(LAYOUT, 8),
            context=context,
        ),
    )
    receiver = open_receiver(
        [ZMQ_BLOCKS],
        ReceiverSetup(
            instance=D, layout=LAYOUT, planes=planes_of(LAYOUT, 8, with_features=False), context=context
        ),
    )
    yield sender, receiver
    receiver.close()
    sender.close()


def readable(fds, seconds):
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def test_pollable_descriptors_become_readable_with_a_message(context, ends):
    sender, _ = ends
    assert all(isinstance(fd, int) for fd in sender.pollables())
    sender.poll(0.0)
    while sender.next_deadline(0.0) == 0.0:
        sender.poll(0.0)
    assert not readable(sender.pollables(), 0.0), "a question about the sockets clears their descriptors"
    dealer = context.socket(zmq.DEALER)
    dealer.connect(sender.endpoint)
    dealer.send(b"no message")
    assert readable(sender.pollables(), PATIENCE_S)
    dealer.close(0)


def test_a_message_whose_edge_was_consumed_is_due_at_once(context, ends):
    sender, _ = ends
    dealer = context.socket(zmq.DEALER)
    dealer.connect(sender.endpoint)
    dealer.send(b"no message")
    until = time.monotonic() + PATIENCE_S
    while not sender.has_unread():  # this looks at the socket: its descriptor tells of the message no more
        assert time.monotonic() < until
        time.sleep(0.001)
    assert not readable(sender.pollables(), 0.0)
    assert sender.next_deadline(7.0) == 7.0
    before = sender.counters["malformed"]
    sender.poll(0.0)
    assert sender.counters["malformed"] == before + 1
    assert not sender.has_unread()
    dealer.close(0)


def test_a_flood_is_read_to_its_end_without_a_timer(context, ends):
    sender, _ = ends
    dealer = context.socket(zmq.DEALER)
    dealer.connect(sender.endpoint)
    for _ in range(60):  # all of them in one turn, or in several: a turn reads a few milliseconds only
        dealer.send(b"no message")
    sender._clock = iter(range(10**9)).__next__  # here one message
    while not readable(sender.pollables(), PATIENCE_S):
        pass
    while sender.counters["malformed"] < 60:
        wait = 0.0 if sender.next_deadline(0.0) == 0.0 else PATIENCE_S
        assert readable(sender.pollables(), wait) or not wait, "slept over a message"
        sender.poll(0.0)
    dealer.close(0)


def serve(transport, events, stopping, waits):
    """An owner's loop: it sleeps until a descriptor is readable or the deadline comes, and not otherwise."""
    while not stopping.is_set():
        now = time.monotonic()
        deadline = transport.next_deadline(now)
        wait = PATIENCE_S if deadline is None else max(0.0, deadline - now)
        waits.append(wait)
        readable([*transport.pollables(), stopping.fd], wait)
        events += transport.poll(0.0)


class Stop(threading.Event):
    def __init__(self):
        super().__init__()
        self._there, self._here = socket.socketpair()
        self.fd = self._here.fileno()

    def set(self):
        super().set()
        self._there.send(b"\0")

    def close(self):
        self._there.close()
        self._here.close()


def test_hand_offs_over_descriptors_alone_lose_no_wake_up(ends):
    sender, receiver = ends
    events, stopping, waits = [], Stop(), []
    thread = threading.Thread(target=serve, args=(sender, [], stopping, waits))
    thread.start()
    took = []
    try:
        for number in range(30):
            room, size = f"{number:032x}", LAYOUT.page_size
            features = planes_of(LAYOUT, 2).features[:2].clone()
            started = time.monotonic()
            receiver.pull(
                PullRequest(
                    room=room, epoch=0, num_tokens=2 * size, have=0, pages=(1, 2), features=features,
                    endpoint=sender.endpoint, peer_instance=P,
                )
            )  # fmt: skip
            sender_commands(sender, thread, room, 2 * size, stopping, waits)
            thread = threading.Thread(target=serve, args=(sender, [], stopping, waits))
            thread.start()
            while not any(isinstance(event, Complete) and event.room == room for event in events):
                now = time.monotonic()
                assert now < started + PATIENCE_S, events
                deadline = receiver.next_deadline(now)
                readable(receiver.pollables(), max(0.0, (deadline or now + 1) - now))
                events += receiver.poll(0.0)
            took.append(time.monotonic() - started)
    finally:
        stopping.set()
        thread.join()
        stopping.close()
    assert sorted(took)[len(took) // 2] < 0.3, "most need no timer: a pull is asked again after a second"


def sender_commands(sender, thread, room, num_tokens, stopping, waits):
    """A socket belongs to one thread at a time: the loop ends, the offer is made, the loop goes on."""
    stopping.set()
    thread.join()
    while select.select([stopping.fd], [], [], 0)[0]:
        stopping._here.recv(64)
    stopping.clear()
    sender.offer(Offer(room=room, epoch=0, num_tokens=num_tokens, pages=(3, 4)))
    sender.advance(room, 0, num_tokens, 7)


def test_the_registry_has_every_transport_of_the_settings_in_their_order():
    assert tuple(transport.name for transport in registered()) == TRANSPORTS
    for transport in registered():
        assert transport.serves[0] == transport.name
        assert transport.serves[-1] == ZMQ_BLOCKS, "every other way falls back to it"


def test_the_best_listed_transport_is_opened_and_fallback_keeps_order(context):
    new = Transport("new", ("new", SHM, ZMQ_BLOCKS), End, End)
    common = {"instance": P, "layout": LAYOUT, "planes": planes_of(LAYOUT, 1), "context": context}
    setup = SenderSetup(bind="tcp://127.0.0.1:0", reach=print, **common)
    end = open_sender([ZMQ_BLOCKS, "new"], setup, (new, *registered()))
    assert (end.setup, end.names, end.reach) == (setup, ("new", ZMQ_BLOCKS), print)
    end = open_receiver(["new", SHM, ZMQ_BLOCKS], ReceiverSetup(**common), (new, *registered()))
    assert end.names == ("new", SHM, ZMQ_BLOCKS)
    with pytest.raises(ConfigError, match="teleport"):
        open_sender(["teleport"], setup)


class End:
    def __init__(self, setup, names):
        self.setup, self.names = setup, names
