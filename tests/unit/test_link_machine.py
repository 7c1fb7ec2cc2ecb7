"""The end of a connection, and the pace of a router, as a worker's link takes them in."""

from baton.cluster.codec import control_up_decoder, encode
from baton.cluster.control_link import LinkMachine, LinkQueues
from baton.cluster.messages import Gone, Heartbeat, Hello, Welcome, WorkerStats
from baton.tests.unit.test_control_link import HELLO, ME, R1, ROOM, advance, joined


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


def test_no_backlog_holds_a_heartbeat_back():
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
