"""Every reader gets every plan in order, nothing unread is overwritten, and a torn record is no plan."""

import os
import random

import pytest
from baton.worker.plan_ring import BrokenRecord, PlanReader, PlanRing, PlanWriter, RingFull, record_size

CAPACITY = 256


class Clock:
    """Time that passes by sleeping; `on_sleep` is what others do meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_sleep = lambda: None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ends(clock: Clock, num_readers: int = 2) -> tuple[PlanWriter, list[PlanReader], PlanRing]:
    ring = PlanRing.create(num_readers, CAPACITY)
    wakes = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(num_readers)]
    writer = PlanWriter(ring, wakes, limit_s=1.0, clock=clock, sleep=clock.sleep)
    readers = [PlanReader(PlanRing.attach(ring.fd, num_readers), i) for i in range(num_readers)]
    return writer, readers, ring


def test_readers_get_all_records_in_order_however_they_interleave(clock: Clock):
    rng = random.Random(3)
    writer, readers, _ = ends(clock)
    sent, got = [], [[], []]

    def read() -> None:
        reader = rng.randrange(2)
        data = readers[reader].take()
        if data is not None:
            got[reader].append(data)
            readers[reader].done()

    clock.on_sleep = read
    for i in range(500):
        payload = bytes([i % 251]) * rng.randrange(0, CAPACITY - record_size(0))
        writer.send(payload)
        sent.append(payload)
        for _ in range(rng.randrange(3)):
            read()
    while got != [sent, sent]:
        read()
    assert writer.num_issued == readers[0].num_taken == writer.ring.num_done(1) == 500


def test_a_reader_that_makes_no_room_is_named_and_loses_nothing(clock: Clock):
    writer, readers, ring = ends(clock)
    for payload in (b"a" * 80, b"b" * 80):
        writer.send(payload)
        readers[0].take()
    with pytest.raises(RingFull, match="reader 1 has left the ring of plans full for 1") as caught:
        writer.send(b"c" * 80)
    assert caught.value.reader == 1
    assert (readers[1].take(), readers[1].take(), readers[1].take()) == (b"a" * 80, b"b" * 80, None)
    assert ring.num_done(1) == 0


def test_a_plan_larger_than_the_ring_is_refused(clock: Clock):
    with pytest.raises(ValueError, match=r"a plan of 300 bytes does not fit a ring of 256"):
        ends(clock)[0].send(bytes(300))


@pytest.mark.parametrize("at", [0, 12, 20])  # number, checksum, payload
def test_a_changed_byte_is_no_plan(clock: Clock, at: int):
    writer, readers, ring = ends(clock)
    writer.send(b"plan of some bytes")
    ring.put(at, bytes([ring.get(at, 1)[0] ^ 1]))
    with pytest.raises(BrokenRecord):
        readers[0].take()


def test_other_memory_is_no_ring():
    fd = os.memfd_create("other")
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="is no ring of plans"):
        PlanRing.attach(fd, 1)


def test_a_send_wakes_every_reader(clock: Clock):
    writer, _, _ = ends(clock)
    writer.send(b"")
    assert [os.eventfd_read(wake) for wake in writer._wakes] == [1, 1]
