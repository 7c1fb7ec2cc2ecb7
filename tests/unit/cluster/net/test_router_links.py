"""Routers found by DNS: each address is one router, new ones are dialled, removed ones keep their streams."""

import threading
import time

import pytest
import zmq
from baton.cluster.net.control_link import ControlLink
from baton.cluster.net.dns_discovery import RouterDiscovery, addresses_of
from baton.cluster.net.endpoints import endpoints_fault
from baton.cluster.net.router_links import RouterLinks
from baton.cluster.protocol.messages import Goodbye
from baton.kvtransfer.transports.fake import FakeNetwork
from baton.tests.unit.cluster.net.test_control_link import HELLO
from baton.worker.link import LinkWork, WorkerLink
from baton.worker.room_owners import EVERY, ToRouter

NAME = "dns+tcp://routers:7100"


class Name:
    """A resolver's only name; an exception in place of addresses is its failure."""

    def __init__(self, *addresses):
        self.addresses = list(addresses)
        self.asked = []

    def __call__(self, name, port):
        self.asked.append((name, port))
        if isinstance(self.addresses, Exception):
            raise self.addresses
        return self.addresses


class Names(RouterDiscovery):
    """Asks when the test says so."""

    def start(self):
        pass


class FakeLink:
    def __init__(self, endpoint):
        self.endpoint = endpoint
        self.connected = self.is_lost = self.is_closed = False
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    def close(self):
        self.is_closed = True


def routers(resolve, *endpoints):
    names = Names(endpoints or [NAME], resolve=resolve)
    return names, RouterLinks(names, FakeLink)


def refreshed(names, links):
    names.ask()
    links.refresh()
    return {number: link.endpoint for number, link in links.links.items()}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (NAME, ""),
        ("tcp://a:1,dns+tcp://b:2", ""),
        ("dns+tcp://b", "is not an endpoint"),
        ("dns+tcp://b:port", "has no valid port"),
        ("dns+ipc:///x", "is not an endpoint"),
        (f"{NAME},{NAME}", "twice"),
    ],
)
def test_a_router_list_takes_dns_names_and_refuses_wrong_ones(text, fault):
    assert fault in endpoints_fault(text)
    assert bool(endpoints_fault(text)) == bool(fault)


def test_every_address_of_the_name_is_a_router():
    resolve = Name("10.0.0.1", "fd00::2")
    names, links = routers(resolve)
    assert links.links == {}
    assert refreshed(names, links) == {0: "tcp://10.0.0.1:7100", 1: "tcp://[fd00::2]:7100"}
    assert resolve.asked == [("routers", 7100)]


def test_fixed_routers_are_known_at_once_and_never_removed():
    names, links = routers(Name("10.0.0.1"), "tcp://a:1", NAME)
    assert [link.endpoint for link in links.links.values()] == ["tcp://a:1"]
    assert refreshed(names, links) == {0: "tcp://a:1", 1: "tcp://10.0.0.1:7100"}
    assert refreshed(names, links) == {0: "tcp://a:1", 1: "tcp://10.0.0.1:7100"}


def test_a_router_gone_from_dns_stays_while_it_answers_and_ids_are_new():
    resolve = Name("10.0.0.1")
    names, links = routers(resolve)
    refreshed(names, links)
    first = links.links[0]
    first.connected = True
    resolve.addresses = ["10.0.0.2"]
    assert refreshed(names, links) == {0: "tcp://10.0.0.1:7100", 1: "tcp://10.0.0.2:7100"}
    first.connected, first.is_lost = False, True
    assert 0 in refreshed(names, links), "its loss is not told yet"
    first.is_lost = False
    assert refreshed(names, links) == {1: "tcp://10.0.0.2:7100"}
    assert first.is_closed
    resolve.addresses = ["10.0.0.2", "10.0.0.1"]
    assert refreshed(names, links) == {1: "tcp://10.0.0.2:7100", 2: "tcp://10.0.0.1:7100"}


def test_a_resolver_that_fails_takes_no_router_away(caplog):
    resolve = Name("10.0.0.1")
    names, links = routers(resolve)
    before = refreshed(names, links)
    resolve.addresses = OSError("no answer")
    assert refreshed(names, links) == refreshed(names, links) == before
    assert len([record for record in caplog.records if "no addresses" in record.message]) == 1


def test_closing_ends_every_link_and_the_dns_queries():
    names = RouterDiscovery([NAME], resolve=Name("10.0.0.1"), ask_s=0.001)
    links = RouterLinks(names, FakeLink)
    wait_for(lambda: links.refresh() or links.links)
    opened = list(links.links.values())
    links.close()
    wait_for(lambda: not any(thread.name == "router names" for thread in threading.enumerate()))
    assert all(link.is_closed for link in opened)


def test_an_address_of_one_family_is_enough_for_a_host_that_has_both():
    assert addresses_of("localhost", 7100) == ["127.0.0.1"]


def test_a_message_to_every_router_reaches_all_and_one_to_a_gone_one_none():
    links = {3: FakeLink("a"), 7: FakeLink("b")}
    work = LinkWork(links, FakeNetwork(), lambda event: None)
    gone = Goodbye(instance="aa" * 16)
    work.perform(ToRouter(router=EVERY, message=gone))
    assert links[3].sent == links[7].sent == [gone]
    del links[3]
    work.perform(ToRouter(router=3, message=gone))
    assert links[7].sent == [gone]


# --- over sockets -------------------------------------------------------------------------------------------


def wait_for(holds, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


class NoTransport:
    def __init__(self):
        self.counters = {}

    def pollables(self):
        return []

    def next_deadline(self, now):
        return None

    def poll(self, timeout):
        return []

    def close(self):
        pass


def test_a_worker_greets_a_router_that_joins_the_name_later():
    context = zmq.Context()
    first, second = (context.socket(zmq.ROUTER) for _ in range(2))
    port = first.bind_to_random_port("tcp://127.0.0.1")
    resolve = Name("127.0.0.1")

    def open_planes(own):
        names = RouterDiscovery([f"dns+tcp://routers:{port}"], resolve=resolve, ask_s=0.01)
        return RouterLinks(
            names, lambda endpoint: ControlLink(own, endpoint, HELLO, time.monotonic())
        ), NoTransport()

    link = WorkerLink(open_planes)
    try:
        link.start()
        assert first.poll(20_000)
        second.bind(f"tcp://127.0.0.2:{port}")
        resolve.addresses = ["127.0.0.1", "127.0.0.2"]
        assert second.poll(20_000)
    finally:
        link.close()
        context.destroy(linger=0)
