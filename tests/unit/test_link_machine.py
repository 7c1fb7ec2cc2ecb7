"""The end of a connection, and the pace of a router, as a worker's link takes them in."""

from baton.cluster.control_link import LinkMachine
from baton.cluster.messages import Welcome
from baton.tests.unit.test_control_link import HELLO, ME, R1, advance, joined


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
