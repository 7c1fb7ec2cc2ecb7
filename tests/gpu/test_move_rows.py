"""KV heads cut out of pages on a device: the kernel against indexing, through a slab into narrower pages."""

import pytest
import torch
from baton.cluster.protocol.messages import Layout
from baton.engine.kv.page_order import PageOrder
from baton.kernels.move_spans import MODULUS, mixed
from baton.kvtransfer.memory.cuda_device import CudaDevice
from baton.kvtransfer.memory.span_cutter import PlaneBase, SpanCutter
from baton.kvtransfer.protocol.layout import KVLayout
from baton.kvtransfer.protocol.rank_pairs import Shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYERS, PAGE, HEADS, DIM, NUM_PAGES = 80, 16, 8, 128, 24  # Llama-70B


def layout() -> Layout:
    return Layout(
        fingerprint="f",
        dtype="bfloat16",
        page_size=PAGE,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        block_bytes=4 << 20,
    )


def pool(shape: tuple[int, ...]) -> torch.Tensor:
    noise = torch.Generator("cuda").manual_seed(3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=noise, device="cuda")


@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (2, 4), (4, 2), (2, 1)])
def test_heads_cross_a_slab_between_pools_of_unequal_ranks(senders: int, receivers: int) -> None:
    sender, receiver = Shard(senders - 1, senders), Shard(receivers - 1, receivers)
    pair = KVLayout(layout(), sender, receiver)
    heads = [HEADS // senders, HEADS // receivers]
    source, target = (pool((NUM_PAGES, LAYERS * 2 * PAGE, n, 2 * DIM)) for n in heads)
    before = target.clone()
    stream = pair.stream((NUM_PAGES - 4) * PAGE - 3, 0)
    device = CudaDevice(source.device, PageOrder(NUM_PAGES, source.device))
    slab = device.allocate(stream.total_bytes)
    sources, targets = list(range(1, NUM_PAGES - 3)), list(range(NUM_PAGES - 1, 3, -1))
    gather, scatter = (
        SpanCutter(pair, rows)
        .places(stream, {"kv": (PlaneBase.of(pages.view(NUM_PAGES, -1)), ids)}, is_write=is_write)
        .spans(0, stream.total_bytes, slab)
        for rows, pages, ids, is_write in (
            (pair.sender_rows, source, sources, False),
            (pair.receiver_rows, target, targets, True),
        )
    )
    torch.cuda.synchronize()
    (gathered,) = device.move([gather], [], is_write=False).wait()
    (landed,) = device.move([scatter], [], is_write=True).wait()
    shared = min(heads)
    part = source[sources][:, :, heads[0] - shared :]
    assert gathered == landed == mixed(part.reshape(-1).cpu().view(torch.int32), 0) % MODULUS
    assert torch.equal(target[targets][:, :, heads[1] - shared :], part)
    target[targets, :, heads[1] - shared :] = before[targets, :, heads[1] - shared :]
    assert torch.equal(target, before), "bytes of other heads and pages"
    device.free(slab)
