"""The proxy of the network faults against plain pyzmq sockets: messages are treated as the rules say."""

import random
import time

import msgpack
import pytest
import zmq
from baton.tests.faults.zmtp_proxy import Proxies
from baton.tests.faults.zmtp_rules import (
    anything,
    change,
    cut,
    drop,
    duplicate,
    flip,
    hold,
    late,
    nth,
    overtaken,
    share,
    truncate,
    verb,
)
from baton.tests.faults.zmtp_wire import Message, Parser

DEADLINE_MS = 30_000
BIG = bytes(range(256)) * 4096  # 1 MiB


def named(name, **more):
    return msgpack.packb({"type": name, **more})


class Ends:
    """A ROUTER behind the proxy and a DEALER before it."""

    def __init__(self, proxies, front, target, heartbeat_ms=0):
        self.context = zmq.Context()
        self.server, self.client = self.context.socket(zmq.ROUTER), self.context.socket(zmq.DEALER)
        for one in (self.server, self.client):
            one.linger = 0
            one.rcvtimeo = one.sndtimeo = DEADLINE_MS
            one.reconnect_ivl = 20
            if heartbeat_ms:
                one.heartbeat_ivl, one.heartbeat_timeout = heartbeat_ms, 3 * heartbeat_ms
        self.server.bind(target)
        self.proxy = proxies.add(front, self.server.getsockopt_string(zmq.LAST_ENDPOINT))
        self.client.connect(self.proxy.endpoint)
        self.identity = b""

    def up(self, *frames):
        self.client.send_multipart(frames)

    def got_up(self):
        self.identity, *frames = self.server.recv_multipart()
        return frames

    def down(self, *frames):
        self.server.send_multipart([self.identity, *frames])

    def got_down(self):
        return self.client.recv_multipart()

    def greet(self):
        self.up(b"hello")
        assert self.got_up() == [b"hello"]

    def close(self):
        self.client.close()
        self.server.close()
        self.context.term()


@pytest.fixture
def proxies():
    with Proxies() as running:
        yield running


@pytest.fixture
def new_ends(proxies, tmp_path):
    made = []

    def make(scheme="ipc", **options):
        front, target = (f"ipc://{tmp_path}/front", f"ipc://{tmp_path}/server")
        if scheme == "tcp":
            front = target = "tcp://127.0.0.1:0"
        made.append(Ends(proxies, front, target, **options))
        made[-1].greet()
        return made[-1]

    yield make
    for ends in made:
        ends.close()


@pytest.fixture
def ends(new_ends):
    return new_ends()


@pytest.mark.parametrize("size", [1, 7, 64, 100, 1 << 20])
def test_framing_is_the_same_however_the_bytes_are_cut(size):
    messages = [
        Message((b"\x05READY",), is_command=True),
        Message((b"a", b"", BIG[:300])),
        Message((BIG[:255],)),
    ]
    wire = b"g" * 64 + b"".join(message.wire() for message in messages)
    parser, found = Parser(), []
    for start in range(0, len(wire), size):
        found += parser.feed(wire[start : start + size])
    assert b"".join(item for item in found if isinstance(item, bytes)) == b"g" * 64
    assert [item for item in found if isinstance(item, Message)] == messages
    assert not parser.is_mid_message


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_without_rules_every_frame_passes_unchanged_both_ways(new_ends, scheme):
    ends = new_ends(scheme)
    frames = [b"", b"x", BIG, b"y" * 255, b"z" * 256]
    ends.up(*frames)
    assert ends.got_up() == frames
    ends.down(*frames[::-1])
    assert ends.got_down() == frames[::-1]
    assert (ends.proxy.up.num_messages, ends.proxy.down.num_messages) == (2, 1)


def test_a_rule_acts_only_on_the_named_messages_and_only_so_often(ends):
    rule = ends.proxy.up.rule(verb("Block", block=2), drop, times=1)
    seen = ends.proxy.up.watch(verb("Block"))
    sent = [named("Block", block=i) for i in (1, 2, 3, 2)]
    for one in [named("Pull", block=2), *sent]:
        ends.up(one)
    assert [ends.got_up()[0] for _ in range(4)] == [named("Pull", block=2), sent[0], sent[2], sent[3]]
    assert (rule.num_done, seen.num_done) == (1, 4)


def test_messages_are_doubled_swapped_and_overtaken(ends):
    ends.proxy.up.rule(nth(1, anything), duplicate())
    ends.proxy.up.rule(nth(1, anything), overtaken)  # numbers what the rule before left
    ends.proxy.up.rule(lambda message: message.frames[0] == b"4", late(0.2))
    for i in range(6):
        ends.up(str(i).encode())
    assert [ends.got_up()[0] for _ in range(7)] == [b"0", b"1", b"1", b"3", b"2", b"5", b"4"]


def test_bits_lengths_and_contents_change_only_where_the_rule_names(ends):
    ends.proxy.down.rule(nth(0, anything), flip(1, 9))
    ends.proxy.down.rule(nth(0, anything), flip(0, -1))
    ends.proxy.down.rule(nth(0, anything), truncate(1, 300))
    ends.proxy.down.rule(nth(0, anything), change(lambda m: [m.with_fields(epoch=9), m]))
    for _ in range(4):
        ends.down(named("Block"), BIG)
    flipped = ends.got_down()
    assert flipped == [named("Block"), BIG[:1] + bytes([BIG[1] ^ 2]) + BIG[2:]]
    head = named("Block")
    assert ends.got_down() == [head[:-1] + bytes([head[-1] ^ 128]), BIG]
    assert ends.got_down() == [head, BIG[:300]]
    assert ends.got_down() == [named("Block", epoch=9), BIG]
    assert ends.got_down() == [head, BIG]


def test_held_and_injected_messages_arrive_on_command(ends):
    rule = ends.proxy.up.rule(anything, hold, times=2)
    for one in (b"a", b"b", b"c"):
        ends.up(one)
    rule.wait(2)
    assert ends.got_up() == [b"c"]
    ends.proxy.up.inject(Message((b"from", b"nowhere")))
    assert ends.got_up() == [b"from", b"nowhere"]
    assert ends.proxy.up.release() == 2
    assert [ends.got_up(), ends.got_up()] == [[b"a"], [b"b"]]


def test_a_freeze_of_one_way_holds_its_bytes_and_the_other_way_goes_on(ends):
    ends.proxy.up.freeze()
    ends.up(b"late")
    ends.down(b"on time")
    assert ends.got_down() == [b"on time"]
    assert not ends.server.poll(100)
    ends.proxy.up.thaw()
    assert ends.got_up() == [b"late"]


def test_a_partition_is_seen_by_heartbeats_and_heals_with_a_new_connection(new_ends):
    ends = new_ends(heartbeat_ms=50)
    watch = ends.client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    ends.proxy.freeze()
    is_seen = watch.poll(DEADLINE_MS)
    ends.client.disable_monitor()
    watch.close(0)
    assert is_seen, "no heartbeat came, so the client gives the connection up"
    ends.proxy.thaw()
    ends.greet()
    assert ends.proxy.num_connections >= 2


def test_a_cut_inside_a_message_loses_it_and_the_client_reconnects(ends):
    ends.proxy.up.rule(anything, cut(1000), times=1)
    ends.up(BIG)
    end = time.monotonic() + DEADLINE_MS / 1000
    while ends.proxy.num_connections < 2:
        assert time.monotonic() < end
        time.sleep(0.005)
    ends.greet()
    ends.proxy.cut()
    while ends.proxy.num_connections < 3:
        assert time.monotonic() < end
        time.sleep(0.005)
    ends.greet()


def test_garbage_closes_the_connection_that_receives_it(ends):
    ends.proxy.up.inject(b"\xff" * 64)
    end = time.monotonic() + DEADLINE_MS / 1000
    while ends.proxy.num_connections < 2:
        assert time.monotonic() < end
        time.sleep(0.005)
    ends.greet()


def test_delay_keeps_the_order_and_a_rate_is_not_passed(ends):
    ends.proxy.up.delay_s, ends.proxy.up.jitter_s = 0.05, 0.05
    began = time.monotonic()
    for i in range(20):
        ends.up(str(i).encode())
    assert [ends.got_up()[0] for _ in range(20)] == [str(i).encode() for i in range(20)]
    assert time.monotonic() - began >= 0.05
    ends.proxy.heal()
    ends.proxy.up.bytes_per_s = 10 * len(BIG)
    began = time.monotonic()
    for _ in range(3):
        ends.up(BIG)
    assert [ends.got_up() for _ in range(3)] == [[BIG]] * 3
    assert time.monotonic() - began >= 0.2


def test_a_share_of_the_messages_is_lost_and_the_same_seed_loses_the_same(ends):
    arrived = []
    for _ in range(2):
        rule = ends.proxy.up.rule(
            share(0.3, random.Random(4), lambda message: message.frames[0] != b"end"), drop
        )
        for i in range(100):
            ends.up(str(i).encode())
        ends.up(b"end")
        arrived.append(list(iter(lambda: ends.got_up()[0], b"end")))
        assert rule.num_done == 100 - len(arrived[-1])
        ends.proxy.up.clear()
    assert arrived[0] == arrived[1]
    assert 50 < len(arrived[0]) < 90


def test_a_rule_that_raises_fails_the_test(proxies, tmp_path):
    ends = Ends(proxies, f"ipc://{tmp_path}/front", f"ipc://{tmp_path}/server")
    ends.proxy.up.rule(anything, flip(7, 0))
    ends.up(b"hello")
    assert ends.got_up() == [b"hello"]
    assert "IndexError" in ends.proxy.up.faults[0]
    ends.proxy.up.faults.clear()
    ends.close()
