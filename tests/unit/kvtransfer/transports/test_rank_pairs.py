"""Hand-offs between workers of unequal numbers of ranks: decode's ranks get their slices of the logical KV.

Each rank has an endpoint and a pool of its own; the network is `FakeNetwork`, the memory real.
"""

import itertools
from dataclasses import dataclass

import pytest
import torch
from baton.cluster.net.transport_names import CUDA_SLAB, SHM, TRANSPORTS, ZMQ_BLOCKS
from baton.cluster.protocol.messages import Layout
from baton.engine.kv.page_order import PageOrder
from baton.kvtransfer.memory.host_device import HostDevice
from baton.kvtransfer.protocol.layout import KVLayout
from baton.kvtransfer.protocol.rank_pairs import Shard
from baton.kvtransfer.transport import Attached, Complete, Dropped, Lost, Offer, Planes, PullRequest, Released
from baton.kvtransfer.transports.fake import FakeNetwork, FakeReceiver, FakeSender
from baton.tests.sim.rank_pages import feature_bytes, layout_of_ranks, logical_pages, rank_pages

pytestmark = pytest.mark.usefixtures("one_thread")

ROOM, P, D = "a" * 32, "b" * 32, "c" * 32
NUM_PAGES, NUM_TOKENS = 12, 30
SOURCES, TARGETS = (3, 1, 7, 5, 9, 2, 11, 4), (8, 2, 6, 1, 10, 3, 5, 7)
PAIRS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2), (4, 4)]


@dataclass
class Cluster:
    """Ranks of one prefill and one decode worker."""

    layout: Layout
    logical: torch.Tensor
    features: torch.Tensor
    network: FakeNetwork
    senders: list[FakeSender]
    receivers: list[FakeReceiver]
    pools: list[torch.Tensor]  # of decode's ranks
    landed: list[torch.Tensor]  # features of decode's ranks
    now: float = 0.0

    def offer(self) -> None:
        for sender in self.senders:
            sender.offer(Offer(room=ROOM, epoch=0, num_tokens=NUM_TOKENS, pages=SOURCES))

    def advance(self, tokens: int, first_token: int | None = None) -> None:
        for sender in self.senders:
            sender.advance(ROOM, 0, tokens, first_token)

    def pull(self, have: int = 0) -> None:
        for receiver, landed in zip(self.receivers, self.landed, strict=True):
            pages = TARGETS[have // self.layout.page_size :]
            request = PullRequest(
                room=ROOM,
                epoch=0,
                num_tokens=NUM_TOKENS,
                have=have,
                pages=pages,
                features=landed[: len(pages)] if receiver.session.layout.has_features else None,
                endpoint="p0",
                peer_instance=P,
            )
            receiver.pull(request)

    def turn(self, rounds: int = 60) -> tuple[list[list[object]], list[list[object]]]:
        """The events of prefill's and of decode's ranks."""
        events = [[] for _ in self.senders], [[] for _ in self.receivers]
        for _ in range(rounds):
            self.now += 0.001
            for ends, heard in zip((self.senders, self.receivers), events, strict=True):
                for end, into in zip(ends, heard, strict=True):
                    into += end.poll(0.0)
        return events

    def wrong_ranks(self, have: int = 0) -> list[int]:
        """The ranks of decode that have other bytes than their slice of the logical KV."""
        first = have // self.layout.page_size
        wrong = []
        for rank, (pool, landed) in enumerate(zip(self.pools, self.landed, strict=True)):
            wanted = rank_pages(self.layout, self.logical, Shard(rank, len(self.pools)))
            is_right = torch.equal(pool[list(TARGETS[first:])], wanted[list(SOURCES[first:])])
            if self.layout.feature_width and rank == 0:
                got = landed[: len(TARGETS) - first]
                is_right = is_right and torch.equal(got, self.features[list(SOURCES[first:])])
            if not is_right:
                wrong.append(rank)
        return wrong


def cluster(
    num_senders: int, num_receivers: int, layout: Layout, transports: tuple[str, ...] = (ZMQ_BLOCKS,)
) -> Cluster:
    noise, network = torch.Generator().manual_seed(7), FakeNetwork()
    logical = logical_pages(layout, NUM_PAGES, noise)
    shape = (NUM_PAGES, feature_bytes(layout))
    features = torch.randint(0, 256, shape, dtype=torch.uint8, generator=noise)
    made = Cluster(layout, logical, features, network, [], [], [], [])
    for rank in range(num_senders):
        shard = Shard(rank, num_senders)
        has_features = rank == 0 and bool(layout.feature_width)
        planes = Planes(kv=rank_pages(layout, logical, shard), features=features if has_features else None)
        sender = FakeSender(
            network, f"p{rank}", P, layout, planes, transports=transports, shard=shard,
            device=device_of(transports), clock=lambda: made.now,
        )  # fmt: skip
        sender.session.rank_endpoints = tuple(f"p{r}" for r in range(num_senders))
        made.senders.append(sender)
    for rank in range(num_receivers):
        shard = Shard(rank, num_receivers)
        pool = torch.zeros(NUM_PAGES, KVLayout.of_rank(layout, shard).kv_page_bytes, dtype=torch.uint8)
        made.pools.append(pool)
        made.landed.append(torch.zeros(len(TARGETS), feature_bytes(layout), dtype=torch.uint8))
        planes = Planes(kv=pool, features=None)
        made.receivers.append(
            FakeReceiver(
                network,
                D,
                layout,
                planes,
                transports=transports,
                shard=shard,
                device=device_of(transports),
                slot_bytes=3 * layout.block_bytes,
                clock=lambda: made.now,
            )
        )
    return made


def device_of(transports: tuple[str, ...]) -> HostDevice | None:
    """Shared memory in the place of a GPU's."""
    return HostDevice(PageOrder(NUM_PAGES)) if CUDA_SLAB in transports else None


@pytest.mark.parametrize(("num_senders", "num_receivers"), PAIRS)
@pytest.mark.parametrize(
    "transports", [(ZMQ_BLOCKS,), (SHM, ZMQ_BLOCKS), TRANSPORTS], ids=["messages", "shm", "device"]
)
def test_every_rank_gets_its_slice_of_the_logical_pages(
    num_senders: int, num_receivers: int, transports: tuple[str, ...]
) -> None:
    for heads, has_features, have in ((4, True, 0), (2, False, 8)):
        layout = layout_of_ranks(num_kv_heads=heads, has_features=has_features)
        ranks = cluster(num_senders, num_receivers, layout, transports)
        ranks.offer()
        ranks.pull(have)
        ranks.advance(9)
        up, down = ranks.turn()
        assert not any(isinstance(event, Complete) for heard in down for event in heard)
        ranks.advance(NUM_TOKENS, 17)
        later_up, later_down = ranks.turn()
        done = [event for heard in later_down for event in heard if isinstance(event, Complete)]
        assert [event.first_token for event in done] == [17] * num_receivers
        assert ranks.wrong_ranks(have) == []
        pulled = [event for heard in [*up, *later_up] for event in heard]
        idle = max(0, num_senders - max(heads, num_receivers))  # copies of a head that nobody needs
        assert sum(isinstance(event, Released) for event in pulled) == num_senders - idle
        assert not any(isinstance(event, Dropped) for event in pulled)
        if transports[0] == SHM:
            assert sum(event.num_shm_blocks for event in done) > 0
        if transports[0] == CUDA_SLAB:
            assert sum(event.num_device_blocks for event in done) > 0
        for end in (*ranks.receivers, *ranks.senders):
            end.close()


def test_prefill_ranks_learn_how_many_ranks_decode_has() -> None:
    ranks = cluster(2, 4, layout_of_ranks())
    ranks.offer()
    ranks.pull()
    up, _ = ranks.turn()
    attached = Attached(room=ROOM, epoch=0, num_ranks=4)
    assert [[event for event in heard if isinstance(event, Attached)] for heard in up] == [[attached]] * 2


@pytest.mark.parametrize(("num_senders", "num_receivers"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_a_bad_digest_of_one_pair_ends_the_room_of_both_ranks(num_senders: int, num_receivers: int) -> None:
    ranks = cluster(num_senders, num_receivers, layout_of_ranks())
    victim = ranks.senders[-1]
    victim.use_crc(lambda data, seed: 99)
    ranks.offer()
    ranks.pull()
    ranks.advance(NUM_TOKENS, 17)
    up, down = ranks.turn()
    lost = [event for heard in down for event in heard if isinstance(event, Lost)]
    assert lost
    assert {event.kind for event in lost} <= {"DigestMismatch", "HandoffAborted"}
    assert any(isinstance(event, Dropped) for event in up[-1])
    last = ranks.receivers[-1]
    assert last.session.num_rooms == 0
    assert not any(isinstance(event, Complete) for event in down[-1])


def test_intact_blocks_of_another_pair_are_refused() -> None:
    """Both ranks of prefill answer with rank 0's bytes and digests."""
    ranks = cluster(2, 1, layout_of_ranks(has_features=False))
    first, second = (sender._prepared for sender in ranks.senders)
    answered = {}

    def steal(item, get=first.get):
        header, payload = answered[item.block] = get(item)
        return header, payload

    first.get = steal
    second_get = second.get
    second.get = lambda item: answered.get(item.block) or second_get(item)
    ranks.offer()
    ranks.pull()
    ranks.advance(NUM_TOKENS, 17)
    _, (heard,) = ranks.turn()
    assert not any(isinstance(event, Complete) for event in heard)
    assert ranks.receivers[0].session.counters.digest_mismatches > 0


def test_a_peer_that_knows_no_ranks_is_refused_with_a_remedy() -> None:
    for num_senders, num_receivers in ((2, 1), (1, 2)):
        ranks = cluster(num_senders, num_receivers, layout_of_ranks())
        for sender in ranks.senders:
            if num_senders == 1:
                sender._admit = lambda peer, welcome: _without_ranks(welcome)
        if num_receivers == 1:
            ranks.receivers[0].session._hello = _without_ranks(ranks.receivers[0].session._hello)
        ranks.pull()
        _, down = ranks.turn()
        (lost,) = [event for event in down[0] if isinstance(event, Lost)]
        assert lost.kind == "HandshakeRefused"
        assert "2 tensor-parallel ranks" in lost.reason
        assert "run the same release on every host" in lost.reason


def test_ranks_that_cannot_share_the_heads_are_refused() -> None:
    ranks = cluster(1, 2, layout_of_ranks(num_kv_heads=4))
    for receiver in ranks.receivers:
        receiver.session._hello = _with_ranks(receiver.session._hello, 3)
    ranks.pull()
    _, down = ranks.turn()
    assert [event.kind for heard in down for event in heard if isinstance(event, Lost)] == [
        "HandshakeRefused"
    ] * 2
    (lost,) = [event for event in down[0] if isinstance(event, Lost)]
    assert "4 KV heads cannot be dealt to 3 ranks" in lost.reason


def _without_ranks(message):
    return type(message)(**{**_fields(message), "num_ranks": 0})


def _with_ranks(message, number):
    return type(message)(**{**_fields(message), "num_ranks": number})


def _fields(message):
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_all_pairs_are_tested() -> None:
    assert set(itertools.product((1, 2, 4), repeat=2)) == set(PAIRS)
