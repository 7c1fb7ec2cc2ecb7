"""Copies of a block wait for the forwards that may still use its pages, and for no others."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from baton.cluster.errors import LocalProtocolError
from baton.cluster.protocol.messages import Layout
from baton.engine.kv.layouts import MHALayout
from baton.engine.kv.page_order import LateDevice, LateEvent, PageOrder
from baton.engine.kv.pool import KVPool, PageAllocator
from baton.engine.kv.prefix_cache import PrefixCache
from baton.kvtransfer.memory.blocks import (
    Arrival,
    BlockReader,
    BlockWriter,
    DeviceCopies,
    Filling,
    check_planes,
)
from baton.kvtransfer.protocol.layout import KVLayout
from baton.kvtransfer.transport import Planes, PullRequest
from baton.worker.identity import planes_of

LAYOUT = KVLayout(
    Layout(
        fingerprint="f", dtype="float32", page_size=4, num_layers=1, num_kv_heads=1, head_dim=8,
        block_bytes=400,
    )
)  # fmt: skip
ONE_HEAD = MHALayout(page_size=4, num_layers=1, num_kv_heads=1, head_dim=8, dtype=torch.float32)
PAGES, TOKENS = 6, 8
SEGMENTS = LAYOUT.stream(TOKENS, 0).segments(0)  # page 0 of the room and a part of page 1
SIZE = LAYOUT.stream(TOKENS, 0).block_size(0)


def order_of(pages=PAGES):
    order = PageOrder(pages)
    order.check_uses()
    return order


def planes_with(order):
    return Planes(kv=torch.zeros(PAGES, LAYOUT.kv_page_bytes, dtype=torch.uint8), features=None, order=order)


def pull(pages):
    return PullRequest(
        room="ab" * 16, epoch=0, num_tokens=TOKENS, have=0, pages=pages, features=None, endpoint="",
        peer_instance="",
    )  # fmt: skip


READS = {
    "read": lambda reader, pages: reader.read(SEGMENTS, pages, SIZE),
    "read of one run": lambda reader, pages: reader.read(SEGMENTS[1:], pages, SIZE),
    "fill": lambda reader, pages: reader.fill(
        [Filling(torch.empty(SIZE, dtype=torch.uint8).numpy(), SEGMENTS, pages, SIZE, 0)]
    ),
}
BYTES = memoryview(bytes(SIZE))
WRITES = {
    "write": lambda writer, pages: writer.write(BYTES, SEGMENTS, pull(pages)),
    "land": lambda writer, pages: writer.land(
        [Arrival(torch.empty(SIZE, dtype=torch.uint8).numpy(), SEGMENTS, pull(pages), 0, 0)]
    ),
    "open": lambda writer, pages: writer.open(lambda _: None, SIZE, SEGMENTS, pull(pages)),
    "open of one run": lambda writer, pages: writer.open(lambda _: None, SIZE, SEGMENTS[1:], pull(pages)),
}
COPIES = {name: (BlockReader, copy) for name, copy in READS.items()} | {
    name: (BlockWriter, copy) for name, copy in WRITES.items()
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_waits_for_the_stamps_of_its_pages(way):
    kind, copy = COPIES[way]
    order = order_of()
    end = kind(LAYOUT, planes_with(order))
    order.use(reads=[], writes=[2, 3])
    order.stamp([2, 3])
    copy(end, (2, 3))


@pytest.mark.parametrize("way", COPIES)
def test_an_unstamped_use_of_a_page_is_seen_when_it_is_copied(way):
    kind, copy = COPIES[way]
    order = order_of()
    end = kind(LAYOUT, planes_with(order))
    order.use(reads=[], writes=[2, 3])
    with pytest.raises(AssertionError, match="before launch 1 is done"):
        copy(end, (2, 3))
    copy(end, (4, 5))


def test_a_page_that_a_forward_reads_may_be_read_but_not_overwritten():
    order = order_of()
    order.use(reads=[2, 3], writes=[4])
    READS["read"](BlockReader(LAYOUT, planes_with(order)), (2, 3))
    with pytest.raises(AssertionError, match="page 2"):
        WRITES["write"](BlockWriter(LAYOUT, planes_with(order)), (2, 3))


def test_a_page_that_is_handed_out_waits_for_its_owner_before():
    order = order_of()
    allocator = PageAllocator(PAGES, order)
    writer = BlockWriter(LAYOUT, planes_with(order))
    old = allocator.alloc(2)
    order.use(reads=old, writes=old)  # launched, and not done when the request is gone
    allocator.release(old)
    new = allocator.alloc(2)
    assert set(new) == set(old)
    WRITES["write"](writer, tuple(new))


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_page_that_is_handed_out_waits_for_no_work_behind_its_owner(is_cached):
    order = order_of()
    allocator = PageAllocator(PAGES, order)
    cache = PrefixCache(allocator, 2)
    old = cache.alloc(PAGES - 1)
    order.use(reads=[], writes=old)
    if is_cached:
        cache.insert(list(range(2 * len(old))), old)
    allocator.release(old)
    order.use(reads=[], writes=[])  # a step of others
    new = cache.alloc(PAGES - 1)  # evicts
    assert set(new) == set(old)
    assert order.wait(new)
    assert not LateEvent(order._late).query(), "a copy into free pages waits for the step that runs"


def test_rows_beside_pages_wait_for_earlier_uses_of_their_memory():
    pool = KVPool(4, ONE_HEAD)
    pool.order.check_uses()
    pool.order.stamp([1, 2])
    pool.order.use(reads=[], writes=[3])  # any kernel: the caching allocator may hand its memory on
    rows = pool.landing_rows([1, 2], 6)
    assert rows.shape == (2, 4, 6)
    assert rows.dtype == torch.float32
    pool.order.wait([1])
    pool.order.touch(3, is_write=True)


class Stream:
    """A copy stream that notes what it waits for."""

    def __init__(self):
        self.events = []

    def wait_event(self, event):
        self.events.append(event)


def test_a_stream_waits_once_for_each_event_that_is_not_done():
    order, stream = order_of(), Stream()
    order.use(reads=[], writes=[1])
    order.stamp([1])
    order.wait([1])
    order.use(reads=[], writes=[2, 3])
    order.stamp([2, 3])
    order.wait([1, 2, 3, 4], stream)
    assert len(stream.events) == 1
    assert not stream.events[0].query()


def test_copies_of_a_device_wait_on_their_own_stream(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda given: nullcontext())
    order = order_of()
    copies = DeviceCopies(torch.device("cuda"), order)
    order.use(reads=[], writes=[1, 2])
    order.stamp([1, 2])
    target, source = torch.zeros(3), torch.ones(3)
    copies.begin([(target, source)], [2])
    assert len(stream.events) == 1
    assert torch.equal(target, source)


def test_a_pool_gives_its_page_order_to_block_copies():
    pool = KVPool(4, ONE_HEAD)
    assert planes_of(pool, None).order is pool.order


def test_a_late_event_is_done_when_a_later_one_was_waited_for():
    device = LateDevice()
    events = []
    for _ in range(3):
        device.num_launched += 1
        events.append(LateEvent(device))
    events[1].synchronize()
    assert [event.query() for event in events] == [True, True, False]
    events[0].synchronize()
    assert events[1].query(), "a wait for an older event takes nothing back"


def test_on_the_cpu_nothing_is_waited_for():
    order = PageOrder(PAGES)
    order.stamp([1, 2])
    order.wait([1, 2])
    order.touch(1, is_write=True)
    assert not order.is_checked
    with pytest.raises(AssertionError, match="debug run"):
        order.use(reads=[], writes=[1])


def test_planes_on_a_gpu_without_an_order_are_refused():
    kv = SimpleNamespace(is_cuda=True, dtype=torch.uint8)
    with pytest.raises(LocalProtocolError, match="PageOrder"):
        check_planes(LAYOUT, Planes(kv=kv, features=None))
