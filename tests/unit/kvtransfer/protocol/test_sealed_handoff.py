"""The hand-off of sealed blocks over a network of frames: what is not authentic never counts as landed."""

import msgspec
import pytest
import torch
from baton.cluster.protocol.codec import encode, kv_down_decoder
from baton.cluster.protocol.messages import Announce, Block, KVWelcome, Layout
from baton.cluster.security.ciphers import AES_128_GCM, CRC32C
from baton.kvtransfer.memory import blocks
from baton.kvtransfer.protocol.layout import KVLayout
from baton.kvtransfer.protocol.seal import TAG_BYTES
from baton.kvtransfer.transport import Complete, Landed, Lost, Offer, Planes, PullRequest
from baton.kvtransfer.transports.fake import FakeNetwork, FakeReceiver, FakeSender, Packet

P, D = "1" * 32, "2" * 32
LAYOUT = Layout(
    fingerprint="f",
    dtype="float32",
    page_size=4,
    num_layers=1,
    num_kv_heads=1,
    head_dim=128,
    block_bytes=4096,
)  # a page is 4096 bytes, so a block is a page, opened in place
CUT = msgspec.structs.replace(
    LAYOUT, block_bytes=5000, feature_ids=[0], feature_width=64
)  # blocks cross pages and planes


class Pair:
    """Both ends; `fault` changes what decode receives."""

    def __init__(self, layout=LAYOUT, fault=None, decode_ciphers=(AES_128_GCM,)):
        noise = torch.Generator().manual_seed(0)
        sizes = KVLayout(layout)

        def plane(width):
            return torch.randint(0, 256, (12, width), dtype=torch.uint8, generator=noise)

        self.layout, self.width = layout, sizes.feature_page_bytes
        self.source = Planes(
            kv=plane(sizes.kv_page_bytes), features=plane(self.width) if self.width else None
        )
        self.target = Planes(kv=plane(sizes.kv_page_bytes), features=None)
        self.sent, self.now, self.fault = [], 0.0, fault
        self.network = FakeNetwork(self._deliver)
        clock = lambda: self.now  # noqa: E731
        self.sender = FakeSender(
            self.network, "p", P, layout, self.source, ciphers=(AES_128_GCM,), clock=clock
        )
        self.receiver = FakeReceiver(
            self.network, D, layout, self.target, ciphers=decode_ciphers, clock=clock
        )

    def _deliver(self, packet):
        message = None if packet.is_up else kv_down_decoder().decode(packet.frames[0])
        self.sent.append((message, packet))
        arrived = packet if self.fault is None or message is None else self.fault(message, packet)
        return [] if arrived is None else [arrived]

    def blocks(self):
        return [(message, packet) for message, packet in self.sent if isinstance(message, Block)]

    def keys_told(self):
        return {message.key for message, _ in self.sent if isinstance(message, Announce) and message.key}

    def hand_off(self, room="a" * 32, epoch=0, have=0):
        """Decode's events; pages 1, 2, 3 go to 7, 8, 9."""
        pages = (7, 8, 9)[have // 4 :]
        features = torch.zeros(len(pages), self.width, dtype=torch.uint8) if self.width else None
        self.sender.offer(Offer(room=room, epoch=epoch, num_tokens=12, pages=(1, 2, 3)))
        self.receiver.pull(
            PullRequest(
                room=room, epoch=epoch, num_tokens=12, have=have, pages=pages, features=features,
                endpoint="p", peer_instance=P,
            )
        )  # fmt: skip
        self.sender.advance(room, epoch, 12, 42)
        events = []
        for _ in range(20):
            events += self.receiver.poll(0)
            self.sender.poll(0)
        self.features = features
        return events


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.parametrize("layout", [LAYOUT, CUT], ids=["in place", "staged"])
def test_sealed_blocks_land_and_nothing_of_them_is_readable_on_the_wire(layout):
    pair = Pair(layout)
    assert of(Complete, pair.hand_off())
    assert torch.equal(pair.target.kv[7:10], pair.source.kv[1:4])
    if pair.features is not None:
        assert torch.equal(pair.features, pair.source.features[1:4])
    wire = b"".join(frame for message, packet in pair.blocks() for frame in packet.frames)
    clear = [
        bytes(pair.source.kv[page, at : at + 16].numpy()) for page in (1, 2, 3) for at in range(0, 4096, 16)
    ]
    assert not any(piece in wire for piece in clear)
    assert all(message.digest == 0 for message, _ in pair.blocks()), (
        "a digest of the bytes would tell something of them"
    )


def flip(packet, at):
    data = bytearray(packet.frames[1])
    data[at] ^= 1
    return Packet(packet.link, False, (packet.frames[0], bytes(data)))


FORGERIES = {
    "first bit": lambda message, packet: flip(packet, 0),
    "tag": lambda message, packet: flip(packet, -1),
    "attempt": lambda message, packet: renamed(packet, message, attempt=message.attempt + 1),
    "open, with the right digest": lambda message, packet: Packet(
        packet.link, False, (packet.frames[0], bytes(len(packet.frames[1])))
    ),
}


def renamed(packet, message, **change):
    return Packet(packet.link, False, (encode(msgspec.structs.replace(message, **change)), packet.frames[1]))


@pytest.mark.parametrize("layout", [LAYOUT, CUT], ids=["in place", "staged"])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_block_is_pulled_again_twice_and_never_counts_as_landed(layout, forgery):
    def fault(message, packet):
        is_victim = isinstance(message, Block) and message.block == 1
        return FORGERIES[forgery](message, packet) if is_victim else packet

    pair = Pair(layout, fault)
    events = pair.hand_off()
    (lost,) = of(Lost, events)
    assert lost.kind == "DigestMismatch"
    before_the_victim = KVLayout(layout).stream(12, 0).landed_tokens(1)
    assert max((event.tokens for event in of(Landed, events)), default=0) <= before_the_victim
    counted = pair.receiver.counters
    assert (counted["digest_mismatches"], counted["repulls"]) == (3, 2)


def test_a_forged_block_costs_one_pull_and_the_next_has_another_nonce():
    flipped = []

    def fault(message, packet):
        if isinstance(message, Block) and message.block == 1 and not flipped:
            flipped.append(packet.frames[1])
            return flip(packet, 5)
        return packet

    pair = Pair(fault=fault)
    assert of(Complete, pair.hand_off())
    assert torch.equal(pair.target.kv[7:10], pair.source.kv[1:4])
    assert [(m.block, m.attempt) for m, _ in pair.blocks() if m.block == 1] == [(1, 0), (1, 1)]
    again = next(packet for message, packet in pair.blocks() if message.attempt == 1)
    assert again.frames[1] != flipped[0]


@pytest.mark.parametrize("what", ["room", "epoch"])
def test_a_block_of_another_room_or_attempt_is_refused(what):
    first = {"room": "a" * 32, "epoch": 0}
    second = {**first, what: "b" * 32 if what == "room" else 1}
    pair = Pair()
    assert of(Complete, pair.hand_off(**first))
    recorded = {message.block: packet.frames[1] for message, packet in pair.blocks()}

    def replay(message, packet):
        if isinstance(message, Block):
            return Packet(packet.link, False, (packet.frames[0], recorded[message.block]))
        return packet

    pair.fault = replay
    (lost,) = of(Lost, pair.hand_off(**second))
    assert lost.kind == "DigestMismatch"


def test_every_transfer_has_its_own_key_even_for_the_same_room():
    pair = Pair()
    for room, epoch, have in (("a" * 32, 0, 0), ("a" * 32, 1, 0), ("b" * 32, 0, 0), ("b" * 32, 0, 4)):
        num_keys = len(pair.keys_told())
        assert of(Complete, pair.hand_off(room, epoch, have))
        assert len(pair.keys_told()) == num_keys + 1
    assert {len(key) for key in pair.keys_told()} == {16}


@pytest.mark.parametrize("key", [b"", b"short", bytes(32)])
def test_an_announcement_with_a_wrong_key_ends_the_room_before_any_block(key):
    def fault(message, packet):
        if not isinstance(message, Announce):
            return packet
        return Packet(packet.link, False, (encode(msgspec.structs.replace(message, key=key)),))

    pair = Pair(fault=fault)
    events = pair.hand_off()
    assert [event.kind for event in of(Lost, events)] == ["RemoteProtocolError"]
    assert pair.blocks() == []


def test_prefill_that_chooses_what_decode_did_not_offer_is_refused():
    def fault(message, packet):
        if not isinstance(message, KVWelcome):
            return packet
        return Packet(packet.link, False, (encode(msgspec.structs.replace(message, cipher=CRC32C)),))

    pair = Pair(fault=fault)
    (lost,) = of(Lost, pair.hand_off())
    assert lost.kind == "HandshakeRefused"
    assert CRC32C in lost.reason


def test_prefill_refuses_decode_that_takes_blocks_in_the_clear_only():
    pair = Pair(decode_ciphers=(CRC32C,))
    (lost,) = of(Lost, pair.hand_off())
    assert lost.kind == "HandshakeRefused"
    assert (AES_128_GCM in lost.reason, CRC32C in lost.reason) == (True, True)


def test_a_sealed_block_without_payload_or_below_a_tag_is_dropped():
    for size in (0, TAG_BYTES - 1, TAG_BYTES):

        def fault(message, packet, size=size):
            if not isinstance(message, Block):
                return packet
            return Packet(packet.link, False, (packet.frames[0], packet.frames[1][:size]))

        pair = Pair(fault=fault)
        events = pair.hand_off()
        assert of(Landed, events) == []
        assert pair.receiver.counters["unexpected"] == 3


class Full:
    """In place of a sender's `_transmit`: takes no block for a while."""

    def __init__(self, sender):
        self.num_asked, self.is_full = 0, True
        self._transmit, sender._transmit = sender._transmit, self.transmit

    def transmit(self, peer, header, payload):
        if payload is None or not self.is_full:
            return self._transmit(peer, header, payload)
        self.num_asked += 1
        return None


def test_a_block_that_waits_for_its_peer_is_sealed_only_once():
    pair = Pair()
    full = Full(pair.sender)
    assert not of(Landed, pair.hand_off())
    for _ in range(50):
        pair.now += 0.02
        pair.sender.poll(0)
    assert full.num_asked > 10
    full.is_full = False
    pair.now += 0.1
    events = [event for _ in range(20) for event in (*pair.sender.poll(0), *pair.receiver.poll(0))]
    assert of(Complete, events)
    assert torch.equal(pair.target.kv[7:10], pair.source.kv[1:4])
    assert {(message.block, message.attempt) for message, _ in pair.blocks()} == {(0, 0), (1, 0), (2, 0)}


class CountedPool(blocks.StagingPool):
    """Counts the buffers that are out."""

    num_out = 0

    def take(self):
        CountedPool.num_out += 1
        return super().take()

    def give(self, buffer):
        CountedPool.num_out -= 1
        super().give(buffer)


def test_the_buffer_of_a_block_never_taken_is_freed_with_its_room(monkeypatch):
    monkeypatch.setattr(blocks, "StagingPool", CountedPool)
    monkeypatch.setattr(CountedPool, "num_out", 0)
    pair = Pair()
    Full(pair.sender)
    pair.hand_off()
    assert CountedPool.num_out == 1, "one block waits sealed, those behind it as they are"
    pair.sender.release("a" * 32, 0, "cancelled")
    pair.now += 1.0
    pair.sender.poll(0)
    assert CountedPool.num_out == 0
