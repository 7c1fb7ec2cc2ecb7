"""Blocks between a GPU and the host: byte for byte, beside the forwards, and never before what was launched."""

import os

import pytest
import torch
from baton.cluster.messages import Layout
from baton.engine.kv_pool import launched
from baton.kvtransfer.layout import KVLayout, digest_seed
from baton.kvtransfer.memory import BlockReader, BlockWriter
from baton.kvtransfer.seal import KEY_BYTES, TAG_BYTES, BlockName, Opener, Sealer
from baton.kvtransfer.transport import Planes, PullRequest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROOM = "ab" * 16
LAYOUT = KVLayout(
    Layout(
        fingerprint="f", dtype="bfloat16", page_size=16, num_layers=2, num_kv_heads=2, head_dim=64,
        feature_ids=[0], feature_width=96, block_bytes=20000, digest="crc32c",
    )
)  # fmt: skip
PAGES, TOKENS = 12, 75
LONG = 1_000_000_000  # cycles: half a second


def planes(seed: int, device: str) -> Planes:
    noise = torch.Generator().manual_seed(seed)
    made = [
        torch.randint(0, 256, (PAGES, size), dtype=torch.uint8, generator=noise).to(device)
        for size in (LAYOUT.kv_page_bytes, LAYOUT.feature_page_bytes)
    ]
    return Planes(kv=made[0], features=made[1])


def pull(where: Planes, after: torch.cuda.Event | None) -> PullRequest:
    pages = tuple(range(PAGES - 1, PAGES - 1 - LAYOUT.stream(TOKENS, 0).num_pages, -1))
    assert where.features is not None
    return PullRequest(
        room=ROOM, epoch=0, num_tokens=TOKENS, have=0, pages=pages, features=where.features[: len(pages)],
        endpoint="", peer_instance="", after=after,
    )  # fmt: skip


def move(source: Planes, target: Planes, way: str, after: torch.cuda.Event | None = None) -> None:
    """Every block of a room, as messages, sealed messages, or through foreign memory."""
    stream, reader, writer = LAYOUT.stream(TOKENS, 0), BlockReader(LAYOUT, source), BlockWriter(LAYOUT, target)
    request, pages = pull(target, after), list(range(stream.num_pages))
    key = os.urandom(KEY_BYTES)
    sealer, opener = Sealer(key), Opener(key)
    for block in range(stream.num_blocks):
        segments, size = stream.segments(block), stream.block_size(block)
        if way == "slab":
            slot = torch.empty(LAYOUT.wire.block_bytes, dtype=torch.uint8).numpy()
            seed = digest_seed(ROOM, 0, block, size)
            digest = reader.read_into(slot, segments, pages, size, seed)
            assert writer.copy(slot[:size], segments, request, seed=seed, digest=digest)
            assert not writer.copy(slot[:size], segments, request, seed=seed, digest=digest ^ 1)
            continue
        payload = reader.read(segments, pages, size)
        if way == "sealed":
            name = BlockName(ROOM, 0, block, size, "f")
            sealed, attempt = reader.seal(payload, sealer, name)
            assert sealed.data.nbytes == size + TAG_BYTES

            def fill(plain: memoryview, name: BlockName = name, attempt: int = attempt, data: memoryview = sealed.data):
                opener.open(name, attempt, data, plain)

            writer.open(fill, size, segments, request)
        else:
            writer.write(payload.data, segments, request)


@pytest.mark.parametrize("way", ["message", "sealed", "slab"])
@pytest.mark.parametrize(("here", "there"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_a_room_arrives_byte_for_byte_from_and_to_a_gpu(way: str, here: str, there: str) -> None:
    source, target, expected = planes(1, here), planes(2, there), planes(2, "cpu")
    torch.cuda.synchronize()
    move(source, target, way)
    move(planes(1, "cpu"), expected, way)
    for got, wanted in ((target.kv, expected.kv), (target.features, expected.features)):
        assert got is not None
        assert wanted is not None
        assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("way", ["message", "sealed", "slab"])
def test_blocks_move_while_a_forward_runs(way: str) -> None:
    source, target = planes(1, "cuda"), planes(2, "cuda")
    move(source, target, way)  # whatever is made or loaded at first
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    forward = launched(torch.device("cuda"))
    assert forward is not None
    move(source, target, way)
    assert not forward.query(), "the blocks waited for the forward"
    torch.cuda.synchronize()


@pytest.mark.parametrize("way", ["message", "sealed", "slab"])
def test_no_block_is_written_before_what_still_uses_its_pages(way: str) -> None:
    source, target, expected = planes(1, "cuda"), planes(2, "cuda"), planes(2, "cpu")
    move(planes(1, "cpu"), expected, way)
    move(source, target, way)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    target.kv.fill_(7)  # the last write of the pages' owner before
    before = launched(torch.device("cuda"))
    move(source, target, way, after=before)
    torch.cuda.synchronize()
    used = list(pull(target, None).pages)
    assert torch.equal(target.kv.cpu()[used], expected.kv[used])
