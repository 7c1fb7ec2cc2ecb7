"""Keys with shared memory: blocks use the slab, else they are sealed; no socket carries them in the clear."""

import contextlib
import itertools

import pytest
import torch
from baton.cluster.net.transport_names import SHM, ZMQ_BLOCKS
from baton.cluster.security.ciphers import AES_128_GCM, CRC32C
from baton.cluster.security.keyring import split_key, with_key
from baton.kvtransfer.transport import Complete
from baton.tests.cluster.keyed_peers import Hosts
from baton.tests.cluster.relay import Relay
from baton.tests.cluster.test_keyed_kv import Pair

SOURCE, TARGET = [3, 9, 4, 20, 7], [11, 2, 17, 5, 23]
NUM_BLOCKS = 4
PIECE = 24  # bytes; random ones, so that they are nowhere by accident


class TappedPair:
    """A pair that shares a host, each of whose connections passes a relay."""

    def __init__(self, hosts, stack, *, ciphers=(), transports=(SHM, ZMQ_BLOCKS)):
        # one block at a time, so that a test can act between two
        self.pair = Pair(
            "tcp://127.0.0.1:0", hosts.prefill, hosts.decode, ciphers=ciphers, window=1, transports=transports
        )
        stack.callback(self.pair.close)
        address, key = split_key(self.pair.sender.endpoint)
        bulk = self.pair.sender._bulk
        self.relays = [Relay(int(address.rpartition(":")[2])), Relay(bulk.port)]
        for relay in self.relays:
            stack.callback(relay.close)
        bulk.port = self.relays[1].port
        self.endpoint = with_key(f"tcp://127.0.0.1:{self.relays[0].port}", key)

    def hand_off(self):
        self.pair.target.kv.zero_()
        done = self.pair.hand_off(self.endpoint)
        assert isinstance(done, Complete), done
        assert torch.equal(self.pair.target.kv[TARGET], self.pair.source.kv[SOURCE])
        return done

    def on_block(self, act):
        """Calls `act` before each block that decode copies out of the slab."""
        read = self.pair.receiver._slabs.read

        def reading(peer, block):
            act(peer, block)
            return read(peer, block)

        self.pair.receiver._slabs.read = reading

    def num_readable(self):
        """Pieces of the pages' bytes that crossed a socket as they are."""
        said = [bytes(data) for relay in self.relays for data in (relay.heard, relay.told)]
        assert sum(map(len, said)) > 2000, "both connections pass the relays"
        width = self.pair.source.kv.shape[1]
        pieces = [
            bytes(self.pair.source.kv[p, at : at + PIECE].numpy())
            for p in SOURCE
            for at in range(0, width, 8192)
        ]
        return sum(piece in data for piece in pieces for data in said)

    @property
    def counters(self):
        return self.pair.receiver.counters


@pytest.fixture
def tapped(tmp_path):
    with contextlib.ExitStack() as stack:
        hosts = Hosts(tmp_path / "hosts")
        yield lambda **options: TappedPair(hosts, stack, **options)


def settle(tapped):
    """A first room, after which the slab stands and the bulk connection too."""
    tapped.hand_off()
    tapped.pair.turn(lambda _: [True] if tapped.counters["slabs"] else [])
    tapped.pair.turn(
        lambda _: [True] if [link for _, link in tapped.pair.receiver._bulk.items() if link.is_joined] else []
    )


def test_keyed_workers_of_one_host_share_memory_and_send_no_plaintext(tapped):
    workers = tapped()
    settle(workers)
    sealed_before = len(workers.relays[1].heard)
    assert workers.hand_off().num_shm_blocks == NUM_BLOCKS
    assert len(workers.relays[1].heard) - sealed_before < 1000, "no block came over the other connection"
    assert workers.num_readable() == 0


def lose_the_slab_on_decode(workers):
    def act(peer, block):
        workers.pair.receiver._slabs.unusable(peer, block)

    return act


def lose_the_slab_on_prefill(workers):
    def act(peer, block):
        for lane in list(workers.pair.sender._slabs._lanes):
            workers.pair.sender._slabs.drop(lane)

    return act


@pytest.mark.parametrize(
    "lose", [lose_the_slab_on_decode, lose_the_slab_on_prefill], ids=["decode", "prefill"]
)
def test_after_a_slab_is_lost_in_a_hand_off_the_rest_is_sealed(tapped, lose):
    workers = tapped()
    settle(workers)
    act = lose(workers)
    workers.on_block(lambda peer, block: act(peer, block) if block.block == 2 else None)
    sealed_before = len(workers.relays[1].heard)
    assert 2 <= workers.hand_off().num_shm_blocks < NUM_BLOCKS
    assert len(workers.relays[1].heard) - sealed_before > 50_000, "the rest came over the other connection"
    assert workers.counters["digest_mismatches"] == 0
    assert workers.num_readable() == 0


@pytest.mark.parametrize(
    ("ciphers", "is_readable"), [((), False), ((CRC32C,), True)], ids=["auto", "trusted"]
)
def test_pages_cross_sockets_in_the_clear_only_on_trusted_links(tapped, ciphers, is_readable):
    workers = tapped(ciphers=ciphers, transports=(ZMQ_BLOCKS,))
    assert workers.hand_off().num_shm_blocks == 0
    assert bool(workers.num_readable()) == is_readable


def test_blocks_that_find_no_slot_are_sealed(tapped):
    workers = tapped()
    settle(workers)
    fill = workers.pair.sender._slabs.fill

    def fill_even(items, reader, now):
        even = list(itertools.takewhile(lambda item: item.block % 2 == 0, items))
        return fill(even, reader, now) if even else []

    workers.pair.sender._slabs.fill = fill_even
    assert workers.hand_off().num_shm_blocks == NUM_BLOCKS // 2
    (known,) = (workers.pair.receiver.session.link_of(peer) for peer in workers.pair.receiver._links)
    assert known.cipher == AES_128_GCM
    assert workers.num_readable() == 0
