"""A worker's link: the end of a connection, early messages of a router, and the router's pace."""

import os
import signal
import socket
import threading
import time

import pytest
import zmq
from baton.cluster.net.control_link import LinkMachine, LinkQueues
from baton.cluster.protocol.codec import control_up_decoder, encode
from baton.cluster.protocol.messages import (
    Cancel,
    Gone,
    Heartbeat,
    Hello,
    Prefill,
    Rejected,
    Sampling,
    Welcome,
    WorkerStats,
)
from baton.tests.unit.cluster.net.test_control_link import HELLO, ME, R1, R2, ROOM, advance, joined, welcome
from baton.worker.commands import Advance
from baton.worker.link import LinkWork, WorkerLink
from baton.worker.room_owners import EVERY, ToRouter


def order(epoch=0):
    sampling = Sampling(max_new_tokens=1)
    return Prefill(room=ROOM, epoch=epoch, instance=ME, prompt_ids=[1], sampling=sampling, deadline_ms=0)


def test_a_broken_connection_loses_the_router_and_its_rooms_once():
    machine = joined()
    machine.broke()
    assert not machine.can_send
    is_due, lost = advance(machine, 0.1)
    assert is_due, "the next generation is told at once"
    assert "broke" in lost
    assert machine.hello.generation == 1
    machine.broke()
    assert advance(machine, 0.2)[1] == "", "nothing is left to lose"


LOSSES = {
    "the connection broke": lambda machine: machine.broke(),
    "rejected": lambda machine: machine.hear(Rejected(instance=ME, reason="damaged")),
    "another router": lambda machine: machine.hear(welcome(R2, generation=0)),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_after_a_loss_orders_are_refused_until_the_router_knows_of_it(
    lose,
):
    machine = joined()
    assert machine.hear(order())
    lose(machine)
    assert not machine.hear(order()), "the router was slow to hear of the loss"
    advance(machine, 0.1)
    assert machine.hello.generation == 1
    assert not machine.hear(order())
    assert not machine.hear(welcome(machine.router, generation=0)), "an answer to what it heard before"
    assert not machine.hear(order())
    assert machine.num_early == 3
    assert machine.hear(Cancel(room=ROOM, epoch=0, instance=ME)), "which does no harm"
    machine.hear(welcome(machine.router, generation=1))
    assert machine.hear(order(epoch=1))
    assert advance(machine, 0.2)[1] == ""


def test_a_welcome_without_a_generation_reopens_the_link():
    machine = joined()
    machine.broke()
    advance(machine, 0.1)
    assert not machine.hear(order())
    assert machine.hear(welcome())
    assert machine.hear(order(epoch=1))


def test_the_routers_pace_of_heartbeats_is_shown():
    machine = LinkMachine(HELLO, 0.0)
    machine.hear(Welcome(instance=ME, router=R1, heartbeat_ms=125))
    assert machine.heartbeat_s == 0.125


class CrawlingLink(LinkQueues):
    """A connection that takes one message between two greetings."""

    def __init__(self):
        super().__init__(HELLO, 0.0)
        self.sent, self.inbox, self.is_open = [], [], True

    def _transmit(self, frame):
        message = control_up_decoder().decode(frame)
        if isinstance(message, Hello):
            self.inbox.append([encode(Welcome(instance=ME, router=R1, heartbeat_ms=250))])
            self.is_open = True
        elif not self.is_open:
            return False
        else:
            self.is_open = False
            self.sent.append(message)
        return True

    def _next_message(self):
        return self.inbox.pop(0) if self.inbox else None


def test_a_backlog_delays_no_heartbeat():
    link, now = CrawlingLink(), 0.0
    for _ in range(100):
        link.send(Gone(room=ROOM, epoch=0, instance=ME))
    for beat in range(8):
        link.send(Heartbeat(instance=ME, stats=WorkerStats(running=beat)))
        for _ in range(10):
            now += 0.025
            link.tick(now)
            link.receive()
    beats = [message.stats.running for message in link.sent if isinstance(message, Heartbeat)]
    assert beats, "the backlog was not sent in that time"
    assert len(link.sent) < 100
    assert beats[-1] >= 6


class NotingTransport:
    """A hand-off that notes what the router has been sent when it begins."""

    def __init__(self, link):
        self.link, self.sent_before = link, []

    def advance(self, room, epoch, tokens_ready, first_token, ready_at):
        self.sent_before = list(self.link.sent)


def test_a_message_leaves_before_the_hand_off_that_was_ordered_behind_it():
    link = CrawlingLink()
    link.tick(0.0)
    link.receive()
    transport = NotingTransport(link)
    work = LinkWork({0: link}, transport, lambda event: None)
    work.perform(ToRouter(router=EVERY, message=Gone(room=ROOM, epoch=0, instance=ME)))
    assert not link.sent, "messages wait for others"
    work.perform(Advance(room=ROOM, epoch=0, tokens_ready=1, first_token=5))
    assert transport.sent_before == [Gone(room=ROOM, epoch=0, instance=ME)]


def test_one_byte_wakes_the_link_for_all_commands_that_it_has_not_seen():
    link = WorkerLink(lambda context: pytest.fail("the thread does not run"))
    for epoch in range(3):
        link.post(Advance(room=ROOM, epoch=epoch, tokens_ready=1))
    assert link._wake_r.recv(16, socket.MSG_PEEK) == b"\0"
    link._drain_wake()
    link.post(Advance(room=ROOM, epoch=3, tokens_ready=1))
    assert link._wake_r.recv(16) == b"\0", "a command behind the look at the others"
    assert link._commands.qsize() == 4
    link.close()


def test_a_hand_over_ends_when_all_is_sent_or_its_time_is_over(monkeypatch):
    link = WorkerLink(lambda context: pytest.fail("the thread does not run"))
    waits = []
    monkeypatch.setattr("baton.worker.link.time.sleep", waits.append)
    link.hand_over()
    assert waits == [], "nothing was posted"
    link.post(Advance(room=ROOM, epoch=0, tokens_ready=1))
    link.hand_over()
    assert waits, "the thread does not take it, and the wait ended"
    link.close()


class QuietTransport:
    """A transport without work that notes its turns."""

    def __init__(self, notes, descriptors=()):
        self.notes, self.descriptors = notes, list(descriptors)

        self.due_at = None
        self.frees_later, self.counters = False, {}

    def poll(self, timeout):
        self.notes.append("transport")
        return []

    def pollables(self):
        return self.descriptors

    def next_deadline(self, now):
        return self.due_at


class OneLink:
    """The control links of one router."""

    def __init__(self, link):
        link.socket = None  # nobody polls it
        self.links = {0: link}

    def refresh(self):
        pass


def test_only_an_idle_computing_thread_goes_on_before_the_rest_of_a_turn(monkeypatch):
    control, notes = CrawlingLink(), []
    control.tick(0.0)
    control.receive()
    transport = QuietTransport(notes)
    work = LinkWork({0: control}, transport, lambda event: notes.append("order"))
    link = WorkerLink(lambda context: pytest.fail("the thread does not run"))
    monkeypatch.setattr(link, "_let_on", lambda transport: notes.append("let on"))
    monkeypatch.setattr(link, "_poller_for", lambda pollables: zmq.Poller())
    monkeypatch.setattr("baton.worker.link.IDLE_WAIT_S", 0.0)
    for epoch, (is_idle, has_order, expected) in enumerate(
        (
            (True, False, ["transport"]),
            (True, True, ["order", "let on", "transport"]),
            (False, True, ["order", "transport"]),
        )
    ):
        notes.clear()
        link._is_idle = is_idle
        control.inbox += [[encode(order(epoch=epoch))]] if has_order else []
        link._turn(work, OneLink(control), transport)
        assert notes == expected, (is_idle, has_order)
    link.close()


def test_only_a_waiting_computing_thread_is_idle():
    link = WorkerLink(lambda context: pytest.fail("the thread does not run"))
    assert not link._is_idle
    waiter = threading.Thread(target=link.receive, args=(5.0,))
    waiter.start()
    while not link._is_idle:
        time.sleep(0.001)
    link.nudge()
    waiter.join(5.0)
    assert not link._is_idle
    assert link.receive(0.0) == []
    assert not link._is_idle
    link.close()


def test_a_command_or_a_block_ends_the_time_of_the_computing_thread(monkeypatch):
    monkeypatch.setattr("baton.worker.link.LET_ON_S", 60.0)
    link = WorkerLink(lambda context: pytest.fail("the thread does not run"))
    read, write = os.pipe()
    began = time.monotonic()
    try:
        os.write(write, b"a block")
        link._let_on(QuietTransport([], [read]))
        os.read(read, 7)
        link.post(Advance(room=ROOM, epoch=0, tokens_ready=1))
        link._let_on(QuietTransport([], [read]))
        assert time.monotonic() < began + 30
    finally:
        os.close(read)
        os.close(write)
    link.close()


@pytest.mark.parametrize("due_s", [-1.0, 0.0, 0.01])
def test_due_work_of_the_transport_ends_the_time_of_the_computing_thread(monkeypatch, due_s):
    monkeypatch.setattr("baton.worker.link.LET_ON_S", 60.0)
    link = WorkerLink(lambda context: pytest.fail("the thread does not run"))
    transport = QuietTransport([])
    began = time.monotonic()
    transport.due_at = link.clock() + due_s
    link._let_on(transport)
    assert time.monotonic() < began + 30
    link.close()


def test_a_signal_does_not_make_the_wait_of_the_scheduler_longer():
    """One whose handler, or the stop of the process before it, ends after the wait's limit."""
    link = WorkerLink(lambda context: pytest.fail("no planes are opened"))
    old = signal.signal(signal.SIGALRM, lambda number, frame: time.sleep(0.1))
    late = threading.Timer(10.0, link.nudge)
    late.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        began = time.monotonic()
        assert link.receive(0.05) == []
        assert time.monotonic() - began < 9.0, "the scheduler slept until the next event"
    finally:
        late.cancel()
        signal.signal(signal.SIGALRM, old)
        link.close()
