"""Block copies between GPU and host: byte-exact, beside forwards, after those that use their pages."""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
from baton.cluster.protocol.messages import Layout
from baton.engine.kv.page_order import PageOrder, launched
from baton.engine.kv.pool import PageAllocator
from baton.kvtransfer.memory.blocks import (
    Arrival,
    BlockReader,
    BlockWriter,
    Filling,
)
from baton.kvtransfer.memory.slab import MappedSlab, Slab, SlabDoor
from baton.kvtransfer.protocol.layout import KVLayout, digest_seed
from baton.kvtransfer.protocol.seal import KEY_BYTES, TAG_BYTES, BlockName, Opener, Sealer
from baton.kvtransfer.transport import Planes, PullRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOM = "ab" * 16
LAYOUT = KVLayout(
    Layout(
        fingerprint="f", dtype="bfloat16", page_size=16, num_layers=2, num_kv_heads=2, head_dim=64,
        feature_ids=[0], feature_width=96, block_bytes=20000, digest="crc32c",
    )
)  # fmt: skip
PAGES, TOKENS = 12, 75
WAYS = ("message", "sealed", "slab", "pinned slab")
LONG = 1_000_000_000  # cycles: half a second


def planes(seed: int, device: str) -> Planes:
    noise = torch.Generator().manual_seed(seed)
    made = [
        torch.randint(0, 256, (PAGES, size), dtype=torch.uint8, generator=noise).to(device)
        for size in (LAYOUT.kv_page_bytes, LAYOUT.feature_page_bytes)
    ]
    return Planes(kv=made[0], features=made[1], order=PageOrder(PAGES, device))


def pull(where: Planes) -> PullRequest:
    pages = tuple(range(PAGES - 1, PAGES - 1 - LAYOUT.stream(TOKENS, 0).num_pages, -1))
    assert where.features is not None
    return PullRequest(
        room=ROOM, epoch=0, num_tokens=TOKENS, have=0, pages=pages, features=where.features[: len(pages)],
        endpoint="", peer_instance="",
    )  # fmt: skip


class PinnedSlab:
    """A slab as both ends see it, which the GPUs of both may touch. A context manager."""

    def __init__(self, here: str, there: str) -> None:
        self.slab, door = Slab(1, 1 << 20), SlabDoor()
        connection = self.slab.hand_over(door.address, ROOM)
        arrived = door.take(ROOM, lambda token: True)
        assert arrived is not None
        self.mapped = MappedSlab(self.slab.id, 1, 1 << 20, *arrived)
        self.slab.pin(BlockReader(LAYOUT, planes(1, here)).pin)
        self.mapped.pin(BlockWriter(LAYOUT, planes(2, there)).pin)
        assert (self.slab.is_pinned, self.mapped.is_pinned) == (here == "cuda", there == "cuda")
        connection.close()
        door.close()

    def __enter__(self) -> "PinnedSlab":
        return self

    def __exit__(self, *_: object) -> None:
        self.slab.close()
        self.mapped.close()


def through_slab(
    reader: BlockReader, writer: BlockWriter, request: PullRequest, pages: list[int], pinned: PinnedSlab
) -> None:
    """Every block through one slot, which a GPU writes or reads by itself where there is one."""
    stream, slab, mapped = LAYOUT.stream(TOKENS, 0), pinned.slab, pinned.mapped
    for block in range(stream.num_blocks):
        segments, size = stream.segments(block), stream.block_size(block)
        seed = digest_seed(ROOM, 0, block, size)
        filling = Filling(slab.slot(0), segments, pages, size, seed)
        (digest,) = reader.fill([filling], is_pinned=slab.is_pinned)
        assert reader.fill([filling] * 3, is_pinned=slab.is_pinned) == [digest] * 3
        data = mapped.block(0, size)
        assert data is not None
        arrival = Arrival(data, segments, request, seed, digest)
        wrong = replace(arrival, digest=digest ^ 1)
        assert writer.land([wrong, arrival, wrong], is_pinned=mapped.is_pinned) == [False, True, False]
        slab.slot(0)[size - 1] ^= 1  # what comes there later is not what was digested
        assert writer.land([arrival], is_pinned=mapped.is_pinned) == [False]
        slab.slot(0)[size - 1] ^= 1
        assert writer.land([arrival], is_pinned=mapped.is_pinned) == [True]


def move(
    source: Planes,
    target: Planes,
    way: str,
    pinned: PinnedSlab | None = None,
) -> None:
    """Every block of a room, as messages, sealed messages, or through foreign memory, pinned or not."""
    stream, reader, writer = (
        LAYOUT.stream(TOKENS, 0),
        BlockReader(LAYOUT, source),
        BlockWriter(LAYOUT, target),
    )
    request, pages = pull(target), list(range(stream.num_pages))
    if pinned is not None:
        return through_slab(reader, writer, request, pages, pinned)
    key = os.urandom(KEY_BYTES)
    sealer, opener = Sealer(key), Opener(key)
    for block in range(stream.num_blocks):
        segments, size = stream.segments(block), stream.block_size(block)
        if way == "slab":
            slot = torch.empty(LAYOUT.wire.block_bytes, dtype=torch.uint8).numpy()
            seed = digest_seed(ROOM, 0, block, size)
            (digest,) = reader.fill([Filling(slot, segments, pages, size, seed)])
            arrival = Arrival(slot[:size], segments, request, seed, digest)
            assert writer.land([arrival, replace(arrival, digest=digest ^ 1)]) == [True, False]
            continue
        payload = reader.read(segments, pages, size)
        if way == "sealed":
            name = BlockName(ROOM, 0, block, size, "f")
            sealed, attempt = reader.seal(payload, sealer, name)
            assert sealed.data.nbytes == size + TAG_BYTES

            def fill(
                plain: memoryview,
                name: BlockName = name,
                attempt: int = attempt,
                data: memoryview = sealed.data,
            ):
                opener.open(name, attempt, data, plain)

            writer.open(fill, size, segments, request)
        else:
            writer.write(payload.data, segments, request)


def slab_of(way: str, here: str, there: str) -> "AbstractContextManager[PinnedSlab | None]":
    return PinnedSlab(here, there) if way == "pinned slab" else nullcontext()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("here", "there"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_a_room_arrives_byte_for_byte_from_and_to_a_gpu(way: str, here: str, there: str) -> None:
    source, target, expected = planes(1, here), planes(2, there), planes(2, "cpu")
    torch.cuda.synchronize()
    with slab_of(way, here, there) as pinned:
        move(source, target, way, pinned=pinned)
    move(planes(1, "cpu"), expected, "message")
    for got, wanted in ((target.kv, expected.kv), (target.features, expected.features)):
        assert got is not None
        assert wanted is not None
        assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_blocks_move_while_a_forward_runs(way: str) -> None:
    source, target = planes(1, "cuda"), planes(2, "cuda")
    with slab_of(way, "cuda", "cuda") as pinned:  # the driver pins memory when the device has nothing to do
        move(source, target, way, pinned=pinned)  # whatever is made or loaded at first
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        forward = launched(torch.device("cuda"))
        assert forward is not None
        move(source, target, way, pinned=pinned)
        assert not forward.query(), "the blocks waited for the forward"
        torch.cuda.synchronize()


@pytest.mark.parametrize("way", WAYS)
def test_no_block_is_written_before_the_last_use_of_its_pages(way: str) -> None:
    source, target, expected = planes(1, "cuda"), planes(2, "cuda"), planes(2, "cpu")
    move(planes(1, "cpu"), expected, "message")
    allocator = PageAllocator(PAGES, target.order)
    with slab_of(way, "cuda", "cuda") as pinned:
        move(source, target, way, pinned=pinned)
        torch.cuda.synchronize()
        pages = allocator.alloc(PAGES - 1)
        torch.cuda._sleep(LONG)
        target.kv.fill_(7)  # the last write of the pages' owner before
        allocator.release(pages)
        torch.cuda._sleep(LONG)  # a forward of others, for which nobody waits
        others = launched(torch.device("cuda"))
        assert others is not None
        allocator.alloc(PAGES - 1)
        move(source, target, way, pinned=pinned)
        assert not others.query(), "the blocks waited for work that does not use their pages"
        torch.cuda.synchronize()
    used = list(pull(target).pages)
    assert torch.equal(target.kv.cpu()[used], expected.kv[used])


@pytest.mark.parametrize("way", WAYS)
def test_no_block_is_read_before_the_forward_that_writes_its_pages(way: str) -> None:
    source, target, expected, final = (planes(seed, "cuda") for seed in (1, 2, 2, 3))
    with slab_of(way, "cuda", "cuda") as pinned:
        move(source, target, way, pinned=pinned)
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        source.kv.copy_(final.kv)  # the forward
        assert source.order is not None
        source.order.stamp(range(PAGES))
        move(source, target, way, pinned=pinned)
        torch.cuda.synchronize()
    move(replace(source, kv=final.kv), expected, "message")
    used = list(pull(target).pages)
    assert torch.equal(target.kv[used], expected.kv[used])
