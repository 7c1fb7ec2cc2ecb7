"""Tiers of the KV cache on a device: exact copies behind the forwards, and the tokens without tiers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.kv.host_registration import register, unregister
from baton.engine.kv.page_order import PageOrder
from baton.engine.kv.tiers.cuda_page_copies import CudaPageCopies
from baton.engine.kv.tiers.host_slab import HostSlab
from baton.engine.kv.tiers.jobs import PageMove
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.sim.tiered_decode import chats, decode_worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_PAGES, KV_BYTES, DRAFT_BYTES = 40, 2 << 20, 3 << 14
KEYS = [bytes([number]) * 32 for number in range(8)]


@pytest.fixture
def planes() -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [
        torch.randint(0, 256, (NUM_PAGES, size), dtype=torch.uint8, device="cuda", generator=generator)
        for size in (KV_BYTES, DRAFT_BYTES)
    ]


@pytest.fixture
def order() -> PageOrder:
    return PageOrder(NUM_PAGES, "cuda")


@pytest.fixture
def copies(planes: list[torch.Tensor], order: PageOrder) -> CudaPageCopies:
    slab = HostSlab(12, KV_BYTES + DRAFT_BYTES, torch.device("cuda"))
    assert slab.is_pinned
    return CudaPageCopies(planes, slab, order)


def test_pages_come_back_as_they_went(planes: list[torch.Tensor], copies: CudaPageCopies) -> None:
    before = [plane.clone() for plane in planes]
    moves = [PageMove(key=key, slot=3 + place, page=2 * place + 1) for place, key in enumerate(KEYS)]
    torch.cuda.synchronize()  # nothing here stamps pages, so copies wait for no work on them
    digests = copies.save(moves)
    for plane in planes:
        plane.zero_()
    torch.cuda.synchronize()
    back = [PageMove(key=move.key, slot=move.slot, page=move.page + 1) for move in moves]
    assert copies.load(back) == digests
    for plane, was in zip(planes, before, strict=True):
        for move in moves:
            assert torch.equal(plane[move.page + 1], was[move.page])
            assert not plane[move.page].any()
    copies.slab.page(5)[77] ^= 1
    changed = [a != b for a, b in zip(copies.load(back), digests, strict=True)]
    assert changed == [place == 2 for place in range(len(KEYS))]


def test_a_copy_comes_behind_the_work_that_uses_its_page(
    planes: list[torch.Tensor], copies: CudaPageCopies, order: PageOrder
) -> None:
    torch.cuda._sleep(200_000_000)  # some 0.1 s
    planes[0][1].fill_(7)
    order.stamp([1])  # as an allocator does
    copies.save([PageMove(key=KEYS[0], slot=0, page=1)])
    assert (copies.slab.page(0)[:KV_BYTES] == 7).all()
    torch.cuda._sleep(200_000_000)
    planes[0][2].fill_(9)
    order.stamp([2])
    copies.load([PageMove(key=KEYS[0], slot=0, page=2)])
    torch.cuda.synchronize()
    assert (planes[0][2] == 7).all()


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("drafts", [False, True])
def test_restored_prefixes_give_the_tokens_without_tiers(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, drafts: bool, overlap: str
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    target = toy_checkpoint("llama", num_hidden_layers=4)
    head = write_head(tmp_path / "head", head_config(2, (0, 1, 3)), head_tensors()) if drafts else None
    expected = [said for said, _ in chats(decode_worker(target, head, "cuda", pages=80, overlap=overlap))]
    worker = decode_worker(
        target, head, "cuda", pages=14, tiers=(4 << 20, tmp_path / "disk", 64 << 20), overlap=overlap
    )
    told = chats(worker)
    assert [said for said, _ in told] == expected
    assert min(cached for _, cached in told[6:]) >= 64, told
    assert worker.tiers.counters["host_hit_tokens"] > 200, worker.tiers.counters
    worker.tiers.close()


def test_a_slab_ends_its_registration_and_a_refused_one_leaves_no_error() -> None:
    first = HostSlab(12, KV_BYTES, torch.device("cuda"))
    assert first.is_pinned
    address = first.slots.__array_interface__["data"][0]
    assert register(address, first.slots.nbytes, torch.device("cuda")) != 0, "it is registered"
    assert torch.zeros(3, device="cuda").sum().item() == 0  # a kept error would be raised here
    slots = first.slots  # the memory stays, its registration does not
    del first
    assert register(address, slots.nbytes, torch.device("cuda")) == 0
    unregister(address, torch.device("cuda"))
