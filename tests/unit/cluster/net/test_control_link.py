"""The worker's end of the control plane: joining, losing and changing routers."""

import itertools
import time

import pytest
import zmq
from baton.cluster.errors import StartupError
from baton.cluster.net.control_link import (
    LEFT,
    LONGEST_BACKOFF_S,
    LOST_AFTER_S,
    OUTBOX_LIMIT,
    QUIET_S,
    REJECTED_BACKOFF_S,
    SILENT_S,
    ControlLink,
    LinkMachine,
)
from baton.cluster.net.sockets import bind, make_socket
from baton.cluster.protocol.codec import control_up_decoder, encode
from baton.cluster.protocol.messages import (
    Cancel,
    Gone,
    Goodbye,
    Heartbeat,
    Hello,
    Rejected,
    RouterGoodbye,
    Tokens,
    Welcome,
    WorkerStats,
)
from baton.tests.patience import patient_with_peers
from msgspec.structs import replace

ME, OTHER = "aa" * 16, "bb" * 16
R1, R2 = "01" * 16, "02" * 16
ROOM = "cc" * 16
HELLO = Hello(
    role="decode", instance=ME, protocol=1, fingerprint="f", model="m",
    pages_total=4, page_size=16, max_context=64, max_running=2,
)  # fmt: skip


def welcome(router=R1, instance=ME, generation=None):
    return Welcome(instance=instance, router=router, generation=generation)


# --- decisions, without a socket ----------------------------------------------------------------------------


def advance(machine, now):
    """`advance` with every due Hello sent, as the socket would."""
    is_due, lost = machine.advance(now)
    if is_due:
        machine.asked(now, was_sent=True)
    return is_due, lost


def joined(now=0.0):
    machine = LinkMachine(HELLO, now)
    advance(machine, now)
    machine.hear(welcome())
    advance(machine, now)
    return machine


def hello_times(machine, until, step=0.05):
    times, now = [], 0.0
    while now < until:
        if advance(machine, now)[0]:
            times.append(now)
        now += step
    return times


def test_a_router_that_says_goodbye_is_left_without_a_fault():
    machine = joined()
    assert not machine.hear(RouterGoodbye(instance=ME))
    assert not machine.connected
    machine.broke()  # its connection ends a moment later
    assert advance(machine, 1.0) == (True, LEFT)
    assert machine.hello.generation == 1, "its Hello tells the router that it has heard"
    assert advance(machine, 1.0 + LOST_AFTER_S + 1.0)[1] == "", "and nothing more is lost"
    machine.hear(welcome(R2, generation=1))
    assert machine.connected


def test_hello_is_repeated_with_growing_pauses_until_welcome():
    times = hello_times(LinkMachine(HELLO, 0.0), 20.0)
    pauses = [round(b - a, 2) for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert pauses[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8], abs=0.06)
    assert all(a <= b + 0.06 for a, b in itertools.pairwise(pauses))
    assert max(pauses) <= LONGEST_BACKOFF_S + 0.06


@pytest.mark.parametrize("was_sent", [True, False], ids=["nobody reads", "nobody listens"])
def test_a_silence_is_told_at_growing_intervals_until_an_answer(was_sent: bool):
    machine, told = LinkMachine(HELLO, 0.0), []
    for now in (step / 10 for step in range(400)):
        if machine.advance(now)[0]:
            machine.asked(now, was_sent=was_sent)
        if machine.new_silence(now):
            told.append(now)
    assert told == pytest.approx([SILENT_S, 2 * SILENT_S, 4 * SILENT_S], abs=0.11)
    machine.hear(welcome())
    machine.advance(40.0)
    assert not machine.new_silence(40.0 + SILENT_S)


def test_welcome_connects_and_only_the_first_is_passed_on():
    machine = LinkMachine(HELLO, 0.0)
    assert not machine.connected
    assert machine.hear(welcome())
    assert machine.connected
    assert not machine.hear(welcome())
    assert advance(machine, 0.0) == (False, "")


def test_a_message_for_another_instance_is_dropped_and_counted():
    machine = LinkMachine(HELLO, 0.0)
    assert not machine.hear(welcome(instance=OTHER))
    assert not machine.hear(Cancel(room=ROOM, epoch=0, instance=OTHER))
    assert machine.num_stale == 2
    assert not machine.connected


def test_a_quiet_router_is_probed_and_kept_after_an_answer():
    machine = joined()
    assert advance(machine, QUIET_S - 0.01) == (False, "")
    assert advance(machine, QUIET_S) == (True, "")
    machine.hear(welcome())
    assert advance(machine, QUIET_S + 0.1) == (False, "")
    assert advance(machine, 2 * QUIET_S + 0.1) == (True, "")


def test_a_router_that_answers_nothing_is_lost_once():
    machine = joined()
    losses = [(now / 10, lost) for now in range(1, 100) if (lost := advance(machine, now / 10)[1])]
    assert len(losses) == 1
    assert QUIET_S + LOST_AFTER_S - 0.01 <= losses[0][0] <= 2.0
    assert not machine.connected


def test_a_pause_of_this_process_is_not_counted_as_the_routers_silence():
    machine = joined()
    assert advance(machine, 1000.0) == (True, "")  # nothing was asked in between, so nothing went unanswered
    machine.hear(welcome())
    assert advance(machine, 2000.0)[1] == ""


def test_another_routers_welcome_reports_the_loss_of_the_first():
    machine = joined()
    assert machine.hear(welcome(R2))
    _, lost = advance(machine, 0.1)
    assert R1[:8] in lost
    assert R2[:8] in lost
    assert machine.connected
    assert machine.router == R2
    assert advance(machine, 0.2)[1] == ""


def test_after_a_loss_the_same_router_is_joined_anew():
    machine = joined()
    for now in range(1, 10):
        advance(machine, float(now))
    assert not machine.connected
    assert machine.hear(welcome())
    assert advance(machine, 10.0) == (False, "")
    assert machine.connected


def test_a_rejected_worker_tries_again_later_and_warns_once_per_reason(caplog):
    machine = LinkMachine(HELLO, 0.0)
    advance(machine, 0.0)
    for _ in range(3):
        assert not machine.hear(Rejected(instance=ME, reason="other fingerprint"))
    assert advance(machine, 1.0) == (False, "")
    assert advance(machine, 1.0 + REJECTED_BACKOFF_S - 0.01) == (False, "")
    assert advance(machine, 1.0 + REJECTED_BACKOFF_S) == (True, "")
    assert len(caplog.records) == 1


def test_cancels_do_not_put_off_the_hello_of_a_rejected_worker():
    machine = LinkMachine(HELLO, 0.0)
    advance(machine, 0.0)
    machine.hear(Rejected(instance=ME, reason="a message was damaged"))
    assert advance(machine, 1.0) == (False, "")
    for now in (2.0, 3.0, 5.0):
        machine.hear(Cancel(room=ROOM, epoch=0, instance=ME))
        assert advance(machine, now) == (False, "")
    assert advance(machine, 1.0 + REJECTED_BACKOFF_S) == (True, "")


def test_a_rejection_of_a_joined_worker_is_a_loss():
    machine = joined()
    machine.hear(Rejected(instance=ME, reason="other fingerprint"))
    assert "other fingerprint" in advance(machine, 0.1)[1]
    assert not machine.connected


def test_a_hello_without_a_listener_is_repeated_soon():
    machine = LinkMachine(HELLO, 0.0)
    for now in (0.0, 0.11, 0.22, 0.33):
        assert machine.advance(now)[0]
        machine.asked(now, was_sent=False)
        assert not machine.advance(now + 0.05)[0]
    assert machine.num_hellos == 0


def test_after_a_failed_send_nothing_is_sent_before_a_new_welcome():
    machine = joined()
    machine.doubt()
    assert not machine.can_send
    assert advance(machine, 0.1)[0]
    machine.hear(Cancel(room=ROOM, epoch=0, instance=ME))  # from the old connection
    assert not machine.can_send
    assert not machine.hear(welcome())
    assert machine.can_send


def test_repeated_cancels_do_not_keep_a_rejected_worker_from_greeting():
    machine, now = joined(), 1.0
    machine.hear(Rejected(instance=ME, reason="no"))
    assert advance(machine, now)[0]
    machine.hear(Rejected(instance=ME, reason="no"))
    greeted = []
    while now < 1.0 + 3 * REJECTED_BACKOFF_S:
        now += 0.5
        machine.hear(Cancel(room=ROOM, epoch=0, instance=ME))
        greeted += [now] if advance(machine, now)[0] else []
    assert greeted[0] <= 1.5 + REJECTED_BACKOFF_S
    assert len(greeted) >= 2


def test_prefixes_are_told_to_a_router_that_is_there_and_knows_them():
    machine = LinkMachine(HELLO, 0.0)
    assert not machine.tells_prefixes
    machine.hear(welcome())
    assert not machine.tells_prefixes, "a router of an older release"
    machine.hear(replace(welcome(), takes_prefixes=True))
    assert machine.tells_prefixes
    machine.broke()
    assert not machine.tells_prefixes


@pytest.mark.parametrize("cause", ["silence", "replaced", "rejected"])
def test_a_loss_starts_a_generation_that_is_announced_first(cause):
    machine = joined()
    now = 0.1
    if cause == "silence":
        while not machine.advance(now)[1]:  # Hellos are due and nobody takes them
            machine.asked(now, was_sent=False)
            now += 0.5
        machine.hear(welcome())  # an answer to an older Hello
    else:
        machine.hear(welcome(R2) if cause == "replaced" else Rejected(instance=ME, reason="x"))
        is_due, lost = machine.advance(now)
        assert is_due
        assert lost
        machine.hear(welcome(R2))
    assert machine.hello.generation == 1
    assert not machine.can_send
    assert machine.advance(now + 0.1)[0]
    machine.asked(now + 0.1, was_sent=True)
    assert machine.can_send
    assert advance(machine, now + 0.2)[1] == ""
    assert machine.hello.generation == 1


# --- the DEALER around it -----------------------------------------------------------------------------------


class FakeRouter:
    """A ROUTER on loopback that is driven by hand."""

    def __init__(self, context, endpoint):
        self.socket = make_socket(context, zmq.ROUTER, linger_ms=0)
        self.endpoint = self._bind(endpoint)
        self.peer = b""
        self._decoder = control_up_decoder()

    def _bind(self, endpoint):
        """A closed socket leaves its port a moment later."""
        deadline = time.monotonic() + 30
        while True:
            try:
                return bind(self.socket, endpoint)
            except StartupError:
                if time.monotonic() > deadline:
                    self.socket.close()
                    raise

    def next(self):
        assert self.socket.poll(30_000), "nothing came"
        self.peer, frame = self.socket.recv_multipart()
        return self._decoder.decode(frame)

    def next_of(self, kind):
        while not isinstance(message := self.next(), kind):
            pass
        return message

    def send(self, message):
        self.socket.send_multipart([self.peer, message if isinstance(message, bytes) else encode(message)])


@pytest.fixture
def context():
    with patient_with_peers(), zmq.Context() as context:
        yield context


@pytest.fixture
def new_router(context):
    routers = []

    def start(endpoint="tcp://127.0.0.1:0"):
        routers.append(FakeRouter(context, endpoint))
        return routers[-1]

    yield start
    for router in routers:
        router.socket.close()


@pytest.fixture
def router(new_router):
    return new_router()


@pytest.fixture
def link(context, router):
    link = ControlLink(context, router.endpoint, HELLO, time.monotonic())
    yield link
    link.close()


def turn(link, is_done, seconds=30.0):
    """The worker's loop until `is_done(messages so far, losses so far)`."""
    messages, losses, deadline = [], [], time.monotonic() + seconds
    while not is_done(messages, losses):
        assert time.monotonic() < deadline, (messages, losses, link)
        link.socket.poll(10)
        messages += link.receive()
        losses += [lost] if (lost := link.tick(time.monotonic())) else []
    return messages, losses


def join(link, router, router_id=R1):
    turn(link, lambda *_: router.socket.poll(0))
    assert router.next() == HELLO
    router.send(welcome(router_id))
    return turn(link, lambda *_: link.router == router_id and link.connected)


def test_a_worker_joins_and_messages_flow_both_ways(link, router):
    messages, _ = join(link, router)
    assert messages == [welcome()]
    link.send(Goodbye(instance=ME))
    link.tick(time.monotonic())
    assert router.next_of(Goodbye).instance == ME
    router.send(Cancel(room=ROOM, epoch=0, instance=ME))
    messages, losses = turn(link, lambda messages, _: messages)
    assert messages == [Cancel(room=ROOM, epoch=0, instance=ME)]
    assert losses == []


def test_only_hello_precedes_welcome_and_only_the_newest_heartbeat_follows(link, router):
    for running in range(3):
        link.send(Heartbeat(instance=ME, stats=WorkerStats(running=running)))
    link.send(Gone(room=ROOM, epoch=0, instance=ME))
    join(link, router)
    rest = []
    while not rest or not isinstance(rest[-1], Gone):
        rest.append(router.next())
    assert [m for m in rest if not isinstance(m, Hello)] == [
        Heartbeat(instance=ME, stats=WorkerStats(running=2)),
        Gone(room=ROOM, epoch=0, instance=ME),
    ]


def test_garbage_and_stale_messages_are_counted_and_dropped(link, router):
    join(link, router)
    router.send(b"\xc1 not a message")
    router.send(encode(Goodbye(instance=ME)))  # a worker's message is no router's message
    router.send(Cancel(room=ROOM, epoch=0, instance=OTHER))
    router.send(Cancel(room=ROOM, epoch=0, instance=ME))
    messages, _ = turn(link, lambda messages, _: messages)
    assert messages == [Cancel(room=ROOM, epoch=0, instance=ME)]
    assert (link.counters.malformed, link.counters.stale) == (2, 1)


def test_a_full_outbox_loses_the_router_instead_of_a_message_in_the_middle(link, router):
    join(link, router)
    link._machine.doubt()  # nothing leaves any more
    for room in range(OUTBOX_LIMIT):
        link.send(Gone(room=f"{room:032x}", epoch=0, instance=ME))
    assert link.tick(time.monotonic()) == ""
    assert link.connected
    link.send(Gone(room=ROOM, epoch=0, instance=ME))
    assert not link.connected
    assert f"{OUTBOX_LIMIT} wait" in link.tick(time.monotonic())
    assert link.counters.overflowed == OUTBOX_LIMIT + 1
    assert "0 waiting" in repr(link)
    assert router.next_of(Hello) == HELLO
    while (hello := router.next_of(Hello)).generation == 0:
        pass
    assert hello.generation == 1
    router.send(welcome())
    _, losses = turn(link, lambda messages, _: messages == [welcome()])
    assert losses == []


def test_a_restarted_router_is_joined_after_its_loss_was_reported(new_router, link, router):
    join(link, router)
    endpoint = router.endpoint
    router.socket.close()
    successor = new_router(endpoint)
    messages, losses = turn(link, lambda *_: successor.socket.poll(0))
    assert (messages, len(losses)) == ([], 1)
    assert "broke" in losses[0]
    assert successor.next_of(Hello).generation == 1
    successor.send(welcome(R2))
    successor.send(Cancel(room=ROOM, epoch=0, instance=ME))
    messages, losses = turn(link, lambda messages, _: len(messages) == 2)
    assert messages == [welcome(R2), Cancel(room=ROOM, epoch=0, instance=ME)]
    assert losses == []


def test_a_replaced_routers_loss_precedes_its_successors_messages(link, router):
    join(link, router)
    router.send(welcome(R2))
    router.send(Cancel(room=ROOM, epoch=0, instance=ME))
    events, deadline = [], time.monotonic() + 10
    while len(events) < 3:
        assert time.monotonic() < deadline, events
        link.socket.poll(10)
        events += link.receive()
        events += [lost] if (lost := link.tick(time.monotonic())) else []
    assert "replaced" in events[0]
    assert events[1:] == [welcome(R2), Cancel(room=ROOM, epoch=0, instance=ME)]


def test_messages_for_a_lost_router_are_not_sent_to_its_successor(new_router, link, router):
    join(link, router)
    endpoint = router.endpoint
    router.socket.close()
    link.send(Tokens(instance=ME, items=[]))
    turn(link, lambda _, losses: losses)
    successor = new_router(endpoint)
    turn(link, lambda *_: successor.socket.poll(0))
    successor.next_of(Hello)
    successor.send(welcome(R2))
    turn(link, lambda *_: link.router == R2)
    link.send(Goodbye(instance=ME))
    link.tick(time.monotonic())
    heard = [successor.next()]
    while not isinstance(heard[-1], Goodbye):
        heard.append(successor.next())
    assert not any(isinstance(message, Tokens) for message in heard)


def test_a_link_without_a_router_says_so_with_its_address(link, caplog):
    now = time.monotonic()
    link.tick(now)
    assert not caplog.messages
    link.tick(now + SILENT_S)
    assert [
        (each.getMessage(), each.fields["endpoint"], each.fields["for_s"]) for each in caplog.records
    ] == [("no router answers yet; start it, or correct --router", link.endpoint, SILENT_S)]


def test_closing_twice_is_harmless(link):
    link.close()
    link.close()
