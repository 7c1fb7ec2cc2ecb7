"""Hand-offs between workers with window pages: all pages of a prompt, and window pages of its tail alone."""

from collections.abc import Sequence

import msgspec
import pytest
import torch
from baton.cluster.net.transport_names import CUDA_SLAB, SHM, TRANSPORTS, ZMQ_BLOCKS
from baton.cluster.protocol.messages import Layout
from baton.engine.kv.page_order import PageOrder
from baton.kvtransfer.memory.host_device import HostDevice
from baton.kvtransfer.protocol.layout import KVLayout, agree
from baton.kvtransfer.protocol.rank_pairs import Shard
from baton.kvtransfer.transport import Complete, Lost, Offer, Planes, PullRequest
from baton.kvtransfer.transports.fake import FakeNetwork, FakeReceiver, FakeSender
from baton.tests.sim.rank_pages import feature_bytes, layout_of_ranks, logical_pages, rank_pages

pytestmark = pytest.mark.usefixtures("one_thread")

ROOM, P, D = "a" * 32, "b" * 32, "c" * 32
NUM_PAGES, NUM_WINDOW_PAGES, WINDOW, FULL_LAYERS, WINDOW_LAYERS = 12, 9, 7, 2, 3
SOURCES, TARGETS = (3, 1, 7, 5, 9, 2, 11, 4), (8, 2, 6, 1, 10, 3, 5, 7)
WINDOW_SOURCES, WINDOW_TARGETS = (4, 2, 8, 1, 5, 3, 7, 6), (2, 7, 5, 3, 8, 6, 1, 4)


def windowed_layout(*, has_full: bool, margin: int, **changes: object) -> Layout:
    layers = WINDOW_LAYERS + FULL_LAYERS * has_full
    return msgspec.structs.replace(
        layout_of_ranks(**changes),
        num_layers=layers,
        window_layers=WINDOW_LAYERS,
        window=WINDOW,
        window_margin=margin,
    )


def memory_of(layout: Layout, shard: Shard, kv: torch.Tensor, window: torch.Tensor) -> Planes:
    """The pages of a rank, with the layers of each kind."""
    count = layout.num_layers - layout.window_layers
    parts = [
        rank_pages(layout, logical[:, :layers], shard).view(len(logical), -1)
        if layers
        else torch.zeros((len(logical), 0), dtype=torch.uint8)
        for logical, layers in ((kv, count), (window, layout.window_layers))
    ]
    return Planes(kv=parts[0], features=None, window=parts[1])


def device_of(transports: Sequence[str]) -> HostDevice | None:
    return HostDevice(PageOrder(NUM_PAGES + NUM_WINDOW_PAGES)) if CUDA_SLAB in transports else None


@pytest.mark.parametrize("has_full", [True, False], ids=["some layers", "every layer"])
@pytest.mark.parametrize(("num_senders", "num_receivers"), [(1, 1), (1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize(
    "transports", [(ZMQ_BLOCKS,), (SHM, ZMQ_BLOCKS), TRANSPORTS], ids=["messages", "shm", "device"]
)
def test_decode_gets_every_page_and_the_window_pages_of_the_tail(
    num_senders: int, num_receivers: int, transports: tuple[str, ...], has_full: bool
) -> None:
    for num_tokens, have, has_features, block_bytes in (
        (30, 0, True, 4096), (31, 8, False, 4096), (32, 28, True, 8192), (9, 0, False, 4096),
    ):  # fmt: skip
        offered = windowed_layout(has_full=has_full, margin=5, has_features=has_features)
        wanted = msgspec.structs.replace(offered, window_margin=1, block_bytes=block_bytes)
        first = KVLayout(agree(offered, wanted)).tail_of(num_tokens)
        count, skipped = -(-num_tokens // 4), have // 4
        noise, network, now = torch.Generator().manual_seed(7), FakeNetwork(), [0.0]
        kv = logical_pages(offered, NUM_PAGES, noise)
        window = logical_pages(offered, NUM_WINDOW_PAGES, noise)
        features = torch.randint(
            0, 256, (NUM_PAGES, feature_bytes(offered)), dtype=torch.uint8, generator=noise
        )
        ends = {"transports": transports, "clock": lambda now=now: now[0]}
        senders, receivers, pools = [], [], []
        for rank in range(num_senders):
            shard = Shard(rank, num_senders)
            planes = memory_of(offered, shard, kv, window)
            if rank == 0 and has_features:
                planes = Planes(kv=planes.kv, window=planes.window, features=features)
            sender = FakeSender(
                network, f"p{rank}", P, offered, planes, shard=shard, device=device_of(transports), **ends
            )
            sender.session.rank_endpoints = tuple(f"p{r}" for r in range(num_senders))
            senders.append(sender)
            own = KVLayout.of_rank(offered, shard).tail_of(num_tokens)
            parts = tuple(NUM_PAGES + page for page in WINDOW_SOURCES[own:count])
            sender.offer(Offer(room=ROOM, epoch=0, num_tokens=num_tokens, pages=(*SOURCES[:count], *parts)))
        for rank in range(num_receivers):
            shard = Shard(rank, num_receivers)
            pool = memory_of(wanted, shard, torch.zeros_like(kv), torch.zeros_like(window))
            pools.append(pool)
            receiver = FakeReceiver(
                network, D, wanted, pool, shard=shard, device=device_of(transports),
                slot_bytes=3 * offered.block_bytes, **ends,
            )  # fmt: skip
            receivers.append(receiver)
            parts = tuple(NUM_PAGES + page for page in WINDOW_TARGETS[max(first, skipped) : count])
            landed = torch.zeros((count - skipped, feature_bytes(wanted)), dtype=torch.uint8)
            receiver.pull(
                PullRequest(
                    room=ROOM, epoch=0, num_tokens=num_tokens, have=have,
                    pages=(*TARGETS[skipped:count], *parts),
                    features=landed if has_features and rank == 0 else None,
                    endpoint="p0", peer_instance=P,
                )
            )  # fmt: skip
            if rank == 0:
                landed_features = landed
        for sender in senders:
            sender.advance(ROOM, 0, min(9, num_tokens), None)
            sender.advance(ROOM, 0, num_tokens, 17)
        heard = []
        for _ in range(80):
            now[0] += 0.001
            for end in (*senders, *receivers):
                heard += end.poll(0.0)
        assert not [event for event in heard if isinstance(event, Lost)]
        assert sum(isinstance(event, Complete) for event in heard) == num_receivers
        for rank, pool in enumerate(pools):
            right = memory_of(wanted, Shard(rank, num_receivers), kv, window)
            targets, parts = list(TARGETS[skipped:count]), list(WINDOW_TARGETS[max(first, skipped) : count])
            assert torch.equal(pool.kv[targets], right.kv[list(SOURCES[skipped:count])])
            assert torch.equal(
                pool.window[parts], right.window[list(WINDOW_SOURCES[max(first, skipped) : count])]
            )
            others = [page for page in range(NUM_WINDOW_PAGES) if page not in parts]
            assert not bool(pool.window[others].any()), "no other window page was written"
        if has_features:
            assert torch.equal(landed_features, features[list(SOURCES[skipped:count])])
        for end in (*receivers, *senders):
            end.close()


def test_layouts_with_other_windows_do_not_agree() -> None:
    layout = windowed_layout(has_full=True, margin=4)
    for change in ({"window": WINDOW + 1}, {"window_layers": 2}, {"window_margin": 5}):
        with pytest.raises(Exception, match="KV layouts differ"):
            agree(layout, msgspec.structs.replace(layout, **change))
    assert agree(layout, msgspec.structs.replace(layout, window_margin=1)).window_margin == 1


def test_a_room_with_another_number_of_window_pages_is_refused() -> None:
    layout = windowed_layout(has_full=True, margin=1, has_features=False)
    noise = torch.Generator().manual_seed(1)
    kv, window = logical_pages(layout, NUM_PAGES, noise), logical_pages(layout, NUM_WINDOW_PAGES, noise)
    sender = FakeSender(FakeNetwork(), "p0", P, layout, memory_of(layout, Shard(), kv, window))
    with pytest.raises(Exception, match="30 tokens lie in 11 pages, not in 8"):
        sender.offer(Offer(room=ROOM, epoch=0, num_tokens=30, pages=SOURCES))
