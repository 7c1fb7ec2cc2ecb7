"""A peer that sends faster than it is read loses its connection, and no other peer does."""

import contextlib
import os
import socket
import time

import pytest
import zmq
from baton.cluster.net import flood_guard
from baton.cluster.net.flood_guard import (
    CALM_MESSAGES,
    MAX_BYTES,
    MAX_MESSAGES,
    WINDOW_S,
    FloodGuard,
    close_connection,
)
from baton.cluster.net.sockets import bind, connect, make_socket, recv_parts

WAIT_S = 30.0


class Sender:
    """Stands in for the first frame of a message."""

    def __init__(self, name, fd=-1):
        self.bytes = name
        self._fd = fd

    def get(self, name):
        return str(self._fd)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def connection():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def is_open(end):
    end.setblocking(False)
    try:
        return end.recv(1) != b""
    except BlockingIOError:
        return True


def num_until_refused(guard, sender, num_bytes=1, most=10**6):
    return next((number for number in range(most) if guard.refuses(sender, num_bytes)), most)


def test_a_peer_that_keeps_the_queue_filled_is_cut_and_its_backlog_dropped(connection):
    guard, (ours, theirs) = FloodGuard(Clock()), connection
    flooding, other = Sender(b"flood", ours.fileno()), Sender(b"other")
    assert num_until_refused(guard, flooding) == CALM_MESSAGES + MAX_MESSAGES
    assert not is_open(theirs)
    assert guard.refuses(flooding, 1), "what it left in the queue"
    assert not guard.refuses(other, 1)
    assert guard.num_cut == 1


def test_bytes_count_as_messages_do(connection):
    guard, (ours, theirs) = FloodGuard(Clock()), connection
    num = num_until_refused(guard, Sender(b"flood", ours.fileno()), 1 << 20)
    assert num * (1 << 20) <= 2 * MAX_BYTES
    assert not is_open(theirs)


def test_a_backlog_of_many_honest_peers_is_read(connection):
    guard, (ours, theirs) = FloodGuard(Clock()), connection
    peers = [Sender(bytes([number]), ours.fileno()) for number in range(100)]
    assert not any(guard.refuses(peer, 100) for _ in range(4096) for peer in peers)
    assert is_open(theirs)


@pytest.mark.parametrize("relief", ["the queue was empty", "it took long"])
def test_only_a_flood_at_a_stretch_counts(connection, relief):
    clock = Clock()
    guard, (ours, theirs) = FloodGuard(clock), connection
    peer = Sender(b"busy", ours.fileno())
    for _ in range(4):
        assert num_until_refused(guard, peer, most=MAX_MESSAGES) == MAX_MESSAGES
        if relief == "the queue was empty":
            guard.caught_up()
        else:
            clock.now += WINDOW_S
    assert is_open(theirs)


def test_another_connection_with_the_same_descriptor_stays(connection):
    ours, theirs = connection
    close_connection(ours.fileno(), os.fstat(theirs.fileno()).st_ino)
    assert is_open(theirs)
    close_connection(ours.fileno(), os.fstat(ours.fileno()).st_ino)
    assert not is_open(theirs)


def test_a_flood_over_zeromq_ends_while_another_peer_is_served(monkeypatch):
    monkeypatch.setattr(flood_guard, "MAX_MESSAGES", 2000)
    with zmq.Context() as context:
        guard = FloodGuard()
        with (
            make_socket(context, zmq.ROUTER, linger_ms=0) as router,
            make_socket(context, zmq.DEALER, linger_ms=0, high_water=0) as hostile,
            make_socket(context, zmq.DEALER, linger_ms=0) as honest,
        ):
            hostile.setsockopt(zmq.RECONNECT_IVL, -1)
            endpoint = bind(router, "tcp://127.0.0.1:0")
            for dealer in (hostile, honest):
                connect(dealer, endpoint)
                assert dealer.poll(int(WAIT_S * 1000), zmq.POLLOUT)
            watch = hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            with watch:
                heard = flood(router, guard, hostile, honest, watch)
        assert guard.num_cut == 1
        assert heard == [b"honest"] * 3


def flood(router, guard, hostile, honest, watch):
    """Floods until the connection ends. Returns what else was heard."""
    heard, until = [], time.monotonic() + WAIT_S
    while not watch.poll(0):
        assert time.monotonic() < until, guard
        for _ in range(1000):
            with contextlib.suppress(zmq.Again):  # it is cut
                hostile.send(b"x", zmq.NOBLOCK)
        read = [recv_parts(router, 2, 1 << 20, guard) for _ in range(100)]  # never to the end
        heard += [parts[1].bytes for parts in read if parts and parts[1].bytes != b"x"]
    hostile.close(0)
    for _ in range(3):
        honest.send(b"honest")
    while len(heard) < 3:
        assert time.monotonic() < until, heard
        parts = recv_parts(router, 2, 1 << 20, guard)
        heard += [parts[1].bytes] if parts and parts[1].bytes != b"x" else []
    return heard
