"""Slabs in device memory: the kernel against its reference, and two processes on one card and on two."""

import ctypes
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
from baton.engine.kv.page_order import PageOrder, launched
from baton.kernels.move_spans import MODULUS, mixed
from baton.kvtransfer.memory.cuda_device import MIN_TABLES, NUM_TABLES, CudaDevice
from baton.kvtransfer.memory.slab import SlabError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_PAGES, PAGE_BYTES = 40, 96 << 10
SLAB_BYTES = 8 << 20
LONG = 1_000_000_000  # cycles: half a second


def pages(seed: int, device: str = "cuda") -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (NUM_PAGES, PAGE_BYTES), dtype=torch.uint8, generator=noise).to(device)


def device_of(pool: torch.Tensor) -> CudaDevice:
    return CudaDevice(pool.device, PageOrder(NUM_PAGES, pool.device))


def spans(pool: torch.Tensor, slab: int, ids: list[int], *, is_gather: bool) -> np.ndarray:
    """Whole pages at the places 0, 1, ... of the slab."""
    rows = []
    for place, page in enumerate(ids):
        ends = (pool[page].data_ptr(), slab + place * PAGE_BYTES)
        rows.append((*(ends if is_gather else ends[::-1]), PAGE_BYTES // 4, place * PAGE_BYTES // 4))
    return np.array(rows, dtype=np.int64)


def digest(pool: torch.Tensor, ids: list[int]) -> int:
    return mixed(pool.cpu()[ids].view(torch.int32).reshape(-1), 0)


def test_pages_cross_a_slab_byte_for_byte_and_both_digests_are_right():
    source, target = pages(1), pages(2)
    device = device_of(source)
    slab = device.allocate(SLAB_BYTES)
    ids, places = [7, 3, 39, 12], [1, 30, 2, 8]
    torch.cuda.synchronize()
    expected = digest(source, ids)
    assert device.move([spans(source, slab, ids, is_gather=True)], ids, is_write=False).wait() == [expected]
    assert device.move([spans(target, slab, places, is_gather=False)], places, is_write=True).wait() == [
        expected
    ]
    assert torch.equal(target[places].cpu(), source[ids].cpu())
    others = [page for page in range(NUM_PAGES) if page not in places]
    assert torch.equal(target[others].cpu(), pages(2, "cpu")[others])
    device.free(slab)


def test_every_run_of_a_move_has_its_own_digest():
    source = pages(3)
    device = device_of(source)
    slab = device.allocate(SLAB_BYTES)
    cuts = [[5], [1, 2, 3], list(range(10, 30))]
    torch.cuda.synchronize()
    moved = device.move([spans(source, slab, ids, is_gather=True) for ids in cuts[:1]], [], is_write=False)
    assert moved.wait() == [digest(source, cuts[0])]
    runs = [spans(source, slab + (n << 21), ids, is_gather=True) for n, ids in enumerate(cuts)]
    assert device.move(runs, [], is_write=False).wait() == [digest(source, ids) for ids in cuts]
    device.free(slab)


def test_prepared_moves_start_in_any_order_and_leave_tables_to_others():
    source = pages(8)
    device = device_of(source)
    slab = device.allocate(SLAB_BYTES)
    torch.cuda.synchronize()
    cuts = [[page, page + 1] for page in range(0, 2 * NUM_TABLES, 2)]
    prepared = []
    for number, ids in enumerate(cuts):
        run = spans(source, slab + number * 2 * PAGE_BYTES, ids, is_gather=True)
        prepared.append(device.prepare(run, longest=PAGE_BYTES // 4))
    num_ready = NUM_TABLES - MIN_TABLES
    assert [one is not None for one in prepared] == [number < num_ready for number in range(len(cuts))]
    first, *others = prepared[:num_ready]
    found = [one.start([]).wait() for one in reversed(others)]
    assert found == [[digest(source, ids)] for ids in reversed(cuts[1:num_ready])]
    first.discard()
    run = spans(source, slab, cuts[-1], is_gather=True)
    again = device.prepare(run, longest=PAGE_BYTES // 4)
    assert again.start([]).wait() == [digest(source, cuts[-1])]
    assert len(device._tables) == NUM_TABLES, "all are back"
    device.free(slab)


def test_a_byte_flipped_in_the_slab_changes_the_digest_of_what_landed():
    source, target = pages(4), pages(5)
    device = device_of(source)
    slab = device.allocate(SLAB_BYTES)
    ids = list(range(8))
    torch.cuda.synchronize()
    (right,) = device.move([spans(source, slab, ids, is_gather=True)], [], is_write=False).wait()
    for at in (0, 1, PAGE_BYTES, 8 * PAGE_BYTES - 1, 123_457):
        wrong = source[ids].clone()
        wrong.view(-1)[at] ^= 16
        torch.cuda.synchronize()
        flipped = spans(wrong, slab, ids, is_gather=True)
        device.move([flipped], [], is_write=False).wait()
        assert device.move([spans(target, slab, ids, is_gather=False)], [], is_write=True).wait() != [
            right
        ], at
    device.free(slab)


def test_a_move_waits_for_the_stamped_work_and_for_no_other():
    source = pages(6)
    order = PageOrder(NUM_PAGES, "cuda")
    device, other = CudaDevice(source.device, order), device_of(source)
    slab = device.allocate(SLAB_BYTES)
    for one in (device, other):
        one.move([spans(source, slab, [5], is_gather=True)], [5], is_write=False).wait()
    source.fill_(8)  # the first launch of a kernel loads it, which waits for the device
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    source.fill_(9)
    order.stamp([1, 2])
    free = other.move([spans(source, slab, [5], is_gather=True)], [5], is_write=False)
    stamped = device.move([spans(source, slab + (1 << 20), [1, 2], is_gather=True)], [1, 2], is_write=False)
    free.wait()
    forward = launched(torch.device("cuda"))
    assert forward is not None
    assert not forward.query(), "the move of page 5 waited for the forward"
    assert stamped.poll() is None
    assert stamped.wait() == [digest(torch.full_like(source, 9), [1, 2])]
    device.free(slab)


@pytest.fixture
def patience() -> Iterator[int]:
    """Cycles of a forward: a busy host needs longer ones to see what happens meanwhile."""
    return iter([LONG, 4 * LONG, 16 * LONG])


def test_an_early_move_ends_with_its_forward_and_delays_no_other(patience):
    source = pages(6)
    order = PageOrder(NUM_PAGES, "cuda")
    device = CudaDevice(source.device, order)
    slab = device.allocate(SLAB_BYTES)
    runs = [[spans(source, slab + (n << 21), [page], is_gather=True)] for n, page in enumerate((1, 5))]
    before, after = digest(torch.full_like(source, 8), [5]), digest(torch.full_like(source, 9), [1])
    for is_early in (True, False):
        device.move(runs[0], [5], is_write=False, is_early=is_early).wait()
    has_seen = False
    while not has_seen:
        source.fill_(8)
        torch.cuda.synchronize()
        torch.cuda._sleep(next(patience))
        source[1].fill_(9)
        order.stamp([1])
        forward = launched(torch.device("cuda"))
        assert forward is not None
        early = device.move(runs[0], [1], is_write=False, is_early=True)
        other = device.move(runs[1], [5], is_write=False)
        assert other.wait() == [before]
        is_early_done = early.poll() is not None
        has_seen = not forward.query()
        assert not (has_seen and is_early_done), "the forward runs"
        assert early.wait() == [after]
    device.free(slab)


def test_moves_are_launched_past_tritons_dispatch():
    assert device_of(pages(1))._launcher is not None, "the log says why"


def test_a_slab_is_made_and_cleared_while_a_forward_runs():
    pool = pages(8)
    device = device_of(pool)
    device.free(device.allocate(SLAB_BYTES))
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    slab = device.allocate(SLAB_BYTES)
    forward = launched(torch.device("cuda"))
    assert forward is not None
    assert not forward.query(), "the slab waited for the forward"
    (found,) = device.move([spans(pool, slab, [3], is_gather=False)], [3], is_write=True).wait()
    assert found == mixed(torch.zeros(PAGE_BYTES // 4, dtype=torch.int32), 0)
    device.free(slab)


def test_refused_calls_raise_and_leave_torch_in_order():
    pool = pages(7)
    device = device_of(pool)
    slab = device.allocate(SLAB_BYTES)
    handle = device.export(slab)
    for call in (
        lambda: device.open(handle, SLAB_BYTES),  # a process cannot open its own
        lambda: device.open(bytes(64), SLAB_BYTES),
        lambda: device.open(b"short", SLAB_BYTES),
        lambda: device.allocate(1 << 50),
    ):
        with pytest.raises(SlabError):
            call()
    assert int(torch.ones(8, device="cuda").sum()) == 8
    device.free(slab)


# --- two processes ------------------------------------------------------------------------------------------


def exporter(pipe: Connection, card: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = card
    pool = pages(11)
    device = device_of(pool)
    slab = device.allocate(SLAB_BYTES)
    torch.cuda.synchronize()
    ids = list(range(20))
    (found,) = device.move([spans(pool, slab, ids, is_gather=True)], ids, is_write=False).wait()
    pipe.send((device.export(slab), found))
    while pipe.recv() is not None:
        pipe.send("still here")
    device.free(slab)


def importer(pipe: Connection, card: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = card
    pool = pages(12)
    device = device_of(pool)
    handle = pipe.recv()
    try:
        slab = device.open(handle, SLAB_BYTES)
        assert device.open(handle, SLAB_BYTES) == slab, "one mapping, counted"
        ids = list(range(39, 19, -1))
        (found,) = device.move([spans(pool, slab, ids, is_gather=False)], ids, is_write=True).wait()
        device.close(handle)
        assert device.move([spans(pool, slab, ids, is_gather=False)], ids, is_write=True).wait() == [found]
        was_mapped = is_mapped(slab)
        device.close(handle)
        pipe.send((found, torch.equal(pool.cpu()[ids], pages(11, "cpu")[:20]), was_mapped, is_mapped(slab)))
        pipe.recv()
        pipe.send("still in order" if int(torch.ones(8, device="cuda").sum()) == 8 else "broken")
    except Exception as error:
        pipe.send(error)


def is_mapped(address: int) -> bool:
    """Whether the driver knows the address as memory of a device."""
    attributes = (ctypes.c_int * 64)()  # begins with the kind of memory; 0: none that is registered
    library = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '0').partition('.')[0]}")
    assert library.cudaPointerGetAttributes(attributes, ctypes.c_void_p(address)) == 0
    return attributes[0] != 0


def start(role: Callable, card: str) -> tuple[Connection, multiprocessing.process.BaseProcess]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=role, args=(there, card), daemon=True)
    process.start()
    return here, process


def hear(pipe: Connection) -> object:
    assert pipe.poll(60), "the other process says nothing"
    said = pipe.recv()
    if isinstance(said, Exception):
        raise said
    return said


def cards() -> list[str]:
    """The names that a child may put into CUDA_VISIBLE_DEVICES."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return seen.split(",") if seen else [str(number) for number in range(torch.cuda.device_count())]


@pytest.mark.parametrize("is_killed", [False, True], ids=["lives", "is_killed"])
@pytest.mark.parametrize("num_cards", [1, 2])
def test_another_process_reads_an_exported_slab(num_cards: int, is_killed: bool):
    if len(cards()) < num_cards:
        pytest.skip("needs two cards")
    prefill, exporting = start(exporter, cards()[0])
    decode, importing = start(importer, cards()[num_cards - 1])
    handle, wanted = hear(prefill)
    if is_killed:  # its memory stays while it is mapped; here nobody maps it yet
        exporting.kill()
        exporting.join()
        decode.send(handle)
        with pytest.raises(SlabError):
            hear(decode)
        return
    decode.send(handle)
    assert hear(decode) == (wanted, True, True, False), "a closed mapping holds no memory"
    prefill.send(None)
    exporting.join(30)
    assert exporting.exitcode == 0
    decode.send("the slab is freed")
    assert hear(decode) == "still in order"
    importing.join(30)
    assert 0 <= wanted < MODULUS
