"""Hand-offs between workers of 1, 2 and 4 ranks over real sockets, all ranks in one process."""

import itertools
import socket
import time

import pytest
import torch
import zmq
from baton.cluster.net.transport_names import SHM, ZMQ_BLOCKS
from baton.kvtransfer.protocol.layout import KVLayout
from baton.kvtransfer.protocol.rank_pairs import Shard
from baton.kvtransfer.ranks.agent import RankAgent
from baton.kvtransfer.ranks.channel import RankLost, SocketChannel
from baton.kvtransfer.ranks.ranked_transport import RankedTransport
from baton.kvtransfer.transport import Complete, Freed, Lost, Offer, Planes, PullRequest, Released
from baton.kvtransfer.transports.registry import ReceiverSetup, SenderSetup, open_receiver, open_sender
from baton.tests.sim.rank_pages import feature_bytes, layout_of_ranks, logical_pages, rank_pages

ROOM, P, D = "a" * 32, "b" * 32, "c" * 32
NUM_PAGES, NUM_TOKENS = 12, 30
SOURCES, TARGETS = (3, 1, 7, 5, 9, 2, 11, 4), (8, 2, 6, 1, 10, 3, 5, 7)
LAYOUT = layout_of_ranks(num_kv_heads=4, head_dim=64)


class Worker:
    """All ranks of one worker, polled by one thread."""

    def __init__(self, context, num_ranks, transports, pools, features=None):
        self.pools, self.events, self.agents = pools, [], {}
        is_decode, channels = features is None, {}
        self.ends = [
            self.end(context, Shard(rank, num_ranks), transports, pools[rank], features)
            for rank in range(num_ranks)
        ]
        for rank in range(1, num_ranks):
            ours, theirs = map(SocketChannel, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            endpoint = "" if is_decode else self.ends[rank].endpoint
            channels[rank] = ours
            self.agents[rank] = RankAgent(rank, self.ends[rank], theirs, endpoint=endpoint)

        def name(endpoints):
            if not is_decode:
                self.ends[0].name_ranks([self.ends[0].endpoint, *endpoints])

        self.transport = RankedTransport(
            self.ends[0], channels, num_heads=LAYOUT.num_kv_heads, is_decode=is_decode, on_endpoints=name
        )
        while not self.transport.is_ready:
            self.transport.poll(0.0)

    def end(self, context, shard, transports, pool, features):
        is_first = shard.rank == 0
        planes = Planes(kv=pool, features=features if is_first else None)
        given = {"layout": LAYOUT, "planes": planes, "context": context, "shard": shard}
        if features is None:
            return open_receiver(transports, ReceiverSetup(instance=D, **given))
        return open_sender(transports, SenderSetup(instance=P, bind="tcp://127.0.0.1:0", **given))

    def turn(self):
        for agent in list(self.agents.values()):
            agent.turn()
        self.events += self.transport.poll(0.002)

    def lose(self, rank):
        """The rank's process ends."""
        self.agents.pop(rank).close()

    def close(self):
        self.transport.close()
        for agent in self.agents.values():
            with pytest.raises(RankLost):
                agent.turn()
            agent.close()


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


def workers(context, num_senders, num_receivers, transports):
    noise = torch.Generator().manual_seed(5)
    logical = logical_pages(LAYOUT, NUM_PAGES, noise)
    shape = NUM_PAGES, feature_bytes(LAYOUT)
    features = torch.randint(0, 256, shape, dtype=torch.uint8, generator=noise)
    pools = [rank_pages(LAYOUT, logical, Shard(rank, num_senders)) for rank in range(num_senders)]
    prefill = Worker(context, num_senders, transports, pools, features)
    sizes = [KVLayout.of_rank(LAYOUT, Shard(r, num_receivers)).kv_page_bytes for r in range(num_receivers)]
    empty = [torch.zeros(NUM_PAGES, size, dtype=torch.uint8) for size in sizes]
    return prefill, Worker(context, num_receivers, transports, empty), logical, features


def pull(prefill, landed):
    return PullRequest(
        room=ROOM, epoch=0, num_tokens=NUM_TOKENS, have=0, pages=TARGETS, features=landed,
        endpoint=prefill.ends[0].endpoint, peer_instance=P,
    )  # fmt: skip


def until(condition, *turned, limit_s=20.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, [worker.events for worker in turned]
        for worker in turned:
            worker.turn()


@pytest.mark.parametrize("transports", [(ZMQ_BLOCKS,), (SHM, ZMQ_BLOCKS)], ids=["zmq", "shm"])
@pytest.mark.parametrize(
    ("num_senders", "num_receivers"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1)]
)
def test_every_rank_gets_its_heads_and_the_room_ends_once(context, num_senders, num_receivers, transports):
    prefill, decode, logical, features = workers(context, num_senders, num_receivers, transports)
    landed = torch.zeros(len(TARGETS), feature_bytes(LAYOUT), dtype=torch.uint8)
    prefill.transport.offer(Offer(room=ROOM, epoch=0, num_tokens=NUM_TOKENS, pages=SOURCES))
    decode.transport.pull(pull(prefill, landed))
    prefill.transport.advance(ROOM, 0, 9)
    prefill.transport.advance(ROOM, 0, NUM_TOKENS, 17)
    until(lambda: prefill.events, prefill, decode)
    assert prefill.events == [Released(room=ROOM, epoch=0)]
    (done,) = [event for event in decode.events if isinstance(event, Complete)]
    assert done.first_token == 17
    assert bool(done.num_shm_blocks) == (SHM in transports)
    assert torch.equal(landed, features[list(SOURCES)])
    for rank, pool in enumerate(decode.pools):
        wanted = rank_pages(LAYOUT, logical, Shard(rank, num_receivers))
        assert torch.equal(pool[list(TARGETS)], wanted[list(SOURCES)])
    decode.close()
    prefill.close()


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_rank_lost_in_a_hand_off_ends_the_room_on_all_ranks(context, victim):
    prefill, decode, *_ = workers(context, 2, 2, (ZMQ_BLOCKS,))
    landed = torch.zeros(len(TARGETS), feature_bytes(LAYOUT), dtype=torch.uint8)
    prefill.transport.offer(Offer(room=ROOM, epoch=0, num_tokens=NUM_TOKENS, pages=SOURCES))
    decode.transport.pull(pull(prefill, landed))
    prefill.transport.advance(ROOM, 0, 9)
    until(lambda: prefill.ends[1].session.is_attached(ROOM, 0), prefill, decode)
    {"prefill": prefill, "decode": decode}[victim].lose(1)
    until(lambda: prefill.events and any(isinstance(event, Lost) for event in decode.events), prefill, decode)
    ends = list(itertools.chain(prefill.ends, decode.ends))
    assert not any(end.session.num_rooms for end in ends)
    decode.close()
    prefill.close()


def test_a_released_room_is_free_when_the_last_rank_has_let_go(context):
    prefill, decode, *_ = workers(context, 4, 1, (ZMQ_BLOCKS,))
    prefill.transport.offer(Offer(room=ROOM, epoch=0, num_tokens=NUM_TOKENS, pages=SOURCES))
    prefill.transport.release(ROOM, 0, "cancel")
    assert prefill.transport.poll(0.0) == []
    until(lambda: prefill.events, prefill)
    assert prefill.events == [Freed(room=ROOM, epoch=0)]
    decode.close()
    prefill.close()
