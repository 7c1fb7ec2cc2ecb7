"""Blocks through shared memory on a fake wire: slots, fallbacks, and checks of what was copied."""

import msgspec
import numpy as np
import pytest
import torch
from baton.cluster.protocol import messages as m
from baton.cluster.protocol.codec import encode, kv_down_decoder, kv_up_decoder
from baton.cluster.protocol.slab_messages import (
    SlabBlock,
    SlabDenied,
    SlabGrant,
    SlabRequest,
    SlabUnusable,
    SlotFree,
)
from baton.kvtransfer.memory.slab import Slab, SlabError
from baton.kvtransfer.protocol.layout import KVLayout
from baton.kvtransfer.transport import Complete, Lost, Offer, Planes, PullRequest, Released
from baton.kvtransfer.transports import shm
from baton.kvtransfer.transports.fake import FakeNetwork, FakeReceiver, FakeSender, Packet

P, D, ROOM = "1" * 32, "2" * 32, "a" * 32
BOTH = ("shm", "zmq_blocks")
LAYOUT = m.Layout(
    fingerprint="f", dtype="bfloat16", page_size=4, num_layers=2, num_kv_heads=1, head_dim=160,
    feature_ids=[0, 3], feature_width=120, block_bytes=5000,
)  # pages of 5120 and 960 bytes: most blocks have several segments  # fmt: skip
NUM_PAGES, NUM_TOKENS = 12, 40


def noise(rows: int, width: int, seed: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (rows, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


class Wire(FakeNetwork):
    """Remembers every message; `on_message` says what arrives in its place."""

    def __init__(self) -> None:
        super().__init__(self.pass_on)
        self.said: list[object] = []
        self.on_message = lambda message: [message]

    def pass_on(self, packet: Packet) -> list[Packet]:
        message = (kv_up_decoder() if packet.is_up else kv_down_decoder()).decode(packet.frames[0])
        self.said.append(message)
        return [with_message(packet, changed) for changed in self.on_message(message)]

    def count(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.said)


def with_message(packet: Packet, message: m.KVUp | m.KVDown) -> Packet:
    return Packet(packet.link, packet.is_up, (encode(message), *packet.frames[1:]))


class Pair:
    """Both workers, with a clock that the test moves."""

    def __init__(
        self, *, sender: tuple = BOTH, receiver: tuple = BOTH, layout: m.Layout = LAYOUT, **options
    ) -> None:
        self.now, self.wire = 0.0, Wire()
        sizes = KVLayout(layout)
        self.source = Planes(
            kv=noise(NUM_PAGES, sizes.kv_page_bytes, 1),
            features=noise(NUM_PAGES, sizes.feature_page_bytes, 2),
        )
        self.target = Planes(kv=noise(NUM_PAGES, sizes.kv_page_bytes, 3), features=None)
        self.sender = FakeSender(
            self.wire, "p", P, layout, self.source, transports=sender, clock=lambda: self.now, **options
        )
        self.receiver = FakeReceiver(
            self.wire, D, layout, self.target, transports=receiver, window=4, clock=lambda: self.now
        )

    def open(self, room: str = ROOM) -> torch.Tensor:
        """Offers and pulls a whole prompt; returns where its features land."""
        features = torch.zeros(10, KVLayout(LAYOUT).feature_page_bytes, dtype=torch.uint8)
        self.sender.offer(Offer(room=room, epoch=0, num_tokens=NUM_TOKENS, pages=tuple(range(10))))
        self.sender.advance(room, 0, NUM_TOKENS, 42)
        self.receiver.pull(
            PullRequest(
                room=room, epoch=0, num_tokens=NUM_TOKENS, have=0, pages=tuple(range(11, 1, -1)),
                features=features, endpoint="p", peer_instance=P,
            )
        )  # fmt: skip
        return features

    def run(self, seconds: float = 0.0) -> list[object]:
        """Lets everything arrive; with `seconds`, time goes on in steps."""
        events = []
        for _ in range(1 + int(seconds / 0.25)):
            events += [*self.receiver.poll(0), *self.sender.poll(0), *self.receiver.poll(0)]
            self.now += 0.25 if seconds else 0.0
        return events

    def check_landed(self, features: torch.Tensor) -> None:
        assert torch.equal(self.target.kv[list(range(11, 1, -1))], self.source.kv[:10])
        assert torch.equal(features, self.source.features[:10])


@pytest.fixture
def start():
    pairs: list[Pair] = []

    def start(**options) -> Pair:
        pairs.append(Pair(**options))
        return pairs[-1]

    yield start
    for pair in pairs:
        pair.receiver.close()
        pair.sender.close()


def outcome(events: list[object]) -> list[str]:
    return sorted(type(event).__name__ for event in events if isinstance(event, Complete | Lost | Released))


def test_blocks_in_a_slab_follow_its_grant(start):
    """Of a request that comes while blocks wait for a place in the connection's queue."""
    pair = start()
    requests = []

    def hold(message):
        pair.sender.is_full = pair.sender.is_full or isinstance(message, m.Announce)
        requests.extend([message] if isinstance(message, SlabRequest) else [])
        return [] if isinstance(message, SlabRequest) else [message]

    pair.wire.on_message = hold
    features = pair.open()
    pair.run()
    pair.sender.arrive("00000001", [memoryview(encode(requests[0]))])
    pair.wire.on_message = lambda message: [message]
    pair.sender.is_full = False
    assert "Complete" in outcome(pair.run(5.0))
    pair.check_landed(features)
    assert pair.wire.count(SlabUnusable) == 0
    kinds = [type(message) for message in pair.wire.said]
    assert SlabBlock not in kinds[: kinds.index(SlabGrant)]


def test_every_byte_comes_through_the_slab_and_every_slot_comes_back(start):
    pair = start()
    features = pair.open()
    events = pair.run()
    assert outcome(events) == ["Complete", "Released"]
    pair.check_landed(features)
    (done,) = [event for event in events if isinstance(event, Complete)]
    assert done.num_shm_blocks == done.num_blocks == pair.wire.count(SlabBlock) == 13
    assert pair.wire.count(m.Block) == 0
    assert pair.sender.slots == (0, 6)
    for end in (pair.sender, pair.receiver):
        assert (end.counters["slabs"], end.counters["shm_blocks"], end.counters["shm_fallbacks"]) == (
            1,
            13,
            0,
        )
        assert end.counters["shm_bytes"] == 60_800


@pytest.mark.parametrize("old", ["sender", "receiver"])
def test_a_pair_with_one_side_without_shared_memory_uses_messages(start, old):
    pair = start(**{old: ("zmq_blocks",)})
    features = pair.open()
    (done,) = [event for event in pair.run() if isinstance(event, Complete)]
    pair.check_landed(features)
    assert (done.num_shm_blocks, pair.wire.count(SlabRequest), pair.wire.count(m.Block)) == (0, 0, 13)


def test_prefill_without_memory_falls_back_and_says_so(start, monkeypatch, caplog):
    def full(*_):
        raise SlabError("no 6 MiB of shared memory: No space left on device")

    pair = start()
    monkeypatch.setattr(shm, "Slab", full)
    features = pair.open()
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert pair.wire.count(SlabDenied) == 1
    assert [end.counters["shm_fallbacks"] for end in (pair.sender, pair.receiver)] == [1, 1]
    assert sum("No space left" in str(record.__dict__) for record in caplog.records) == 2


def test_a_limit_on_shared_memory_denies_the_pair_beyond_it(start, caplog):
    pair = start(slab_bytes=8000)
    features = pair.open()
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert "--slab-mb" in str([record.__dict__ for record in caplog.records])


def test_a_denied_pair_asks_again_with_a_later_room(start, monkeypatch):
    pair = start()
    with monkeypatch.context() as patch:
        patch.setattr(shm, "Slab", lambda *_: (_ for _ in ()).throw(SlabError("not now")))
        pair.open()
        pair.run()
    pair.open("b" * 32)
    pair.run()
    assert pair.wire.count(SlabRequest) == 1
    pair.now += shm.ASK_AGAIN_S
    pair.open("c" * 32)
    pair.run()
    assert pair.wire.count(SlabRequest) == 2
    assert pair.receiver.counters["slabs"] == 1


def test_a_descriptor_that_does_not_arrive_makes_decode_take_messages(start, monkeypatch):
    pair = start()
    monkeypatch.setattr(shm.SlabDoor, "take", lambda *_: None)
    features = pair.open()
    assert outcome(pair.run(6.0)) == ["Complete", "Released"]
    pair.check_landed(features)
    assert pair.wire.count(SlabUnusable) == 1
    assert pair.sender.slots == (0, 0)
    assert pair.sender.counters["shm_fallbacks"] == 1


def test_a_full_slab_sends_the_block_as_a_message_and_the_room_goes_on(start):
    pair = start(slab_bytes=2 * 5000)
    features = pair.open()
    (done,) = [event for event in pair.run() if isinstance(event, Complete)]
    pair.check_landed(features)
    assert 0 < done.num_shm_blocks < done.num_blocks
    assert (
        pair.sender.counters["shm_full"] == pair.wire.count(m.Block) == done.num_blocks - done.num_shm_blocks
    )


def test_lost_slot_messages_cost_slots_only_until_the_lease_ends(start):
    pair = start()
    pair.wire.on_message = lambda message: [] if isinstance(message, SlotFree) else [message]
    pair.sender.offer(Offer(room=ROOM, epoch=0, num_tokens=NUM_TOKENS, pages=tuple(range(10))))
    pair.sender.advance(ROOM, 0, 36)  # the room stays open
    pair.receiver.pull(
        PullRequest(
            room=ROOM, epoch=0, num_tokens=NUM_TOKENS, have=0, pages=tuple(range(11, 1, -1)),
            features=torch.zeros(10, 960, dtype=torch.uint8), endpoint="p", peer_instance=P,
        )
    )  # fmt: skip
    pair.run()
    assert pair.sender.slots == (6, 6)
    pair.run(6.0)
    assert pair.sender.slots == (0, 6)


@pytest.mark.parametrize("end", ["release", "abort", "lease"])
def test_slots_of_a_room_that_ended_are_free_at_once(start, end):
    pair = start()
    pair.wire.on_message = lambda message: (
        [] if isinstance(message, SlabBlock | m.Block | SlotFree) else [message]
    )
    pair.open()
    pair.run()
    assert pair.sender.slots == (4, 6)
    if end == "release":
        pair.sender.release(ROOM, 0, "cancel")
    elif end == "abort":
        pair.receiver.release(ROOM, 0, "cancel")
        pair.run()
    else:
        pair.run(6.0)
    assert pair.sender.slots == (0, 6)


def test_bytes_that_change_during_a_read_are_never_accepted(start, monkeypatch):
    """What the copy read is checked: a slot that is right before and after the copy does not help."""
    pair = start()
    seen = []

    def evil(self, peer, block):
        right = read(self, peer, block)
        if block.block == 5 and len(seen) < 2:
            seen.append(block)
            wrong = np.array(right)
            wrong[7] ^= 1
            return wrong
        return right

    read = shm.ReceiverSlabs.read
    monkeypatch.setattr(shm.ReceiverSlabs, "read", evil)
    features = pair.open()
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert pair.receiver.counters["digest_mismatches"] == pair.receiver.counters["repulls"] == 2


def test_a_reader_that_is_late_for_the_lease_pulls_again(start):
    pair = start()
    pair.wire.on_message = lambda message: [
        msgspec.structs.replace(message, lease_ms=0)
        if isinstance(message, SlabBlock) and pair.wire.count(SlabBlock) == 3
        else message
    ]
    features = pair.open()
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert pair.receiver.counters["repulls"] == 1


@pytest.mark.parametrize("change", [{"slot": 6}, {"slot": 2**31 - 1}, {"slab": "f" * 32}])
def test_a_descriptor_outside_decodes_own_table_is_not_read(start, change):
    pair = start()
    pair.wire.on_message = lambda message: [
        msgspec.structs.replace(message, **change) if isinstance(message, SlabBlock) else message
    ]
    pair.open()
    pair.run(7.0)
    assert pair.receiver.counters["shm_blocks"] == 0
    assert pair.receiver.counters["unexpected"] > 0
    assert pair.wire.count(SlabUnusable) >= 1
    if "slot" in change:
        assert pair.sender.counters["slabs"] == 0, "the pair fell back"


@pytest.mark.parametrize(
    "change", [{"size": 4999}, {"block": 99}, {"epoch": 3}, {"room": "b" * 32}, {"instance": "e" * 32}]
)
def test_a_descriptor_that_fits_no_pull_is_dropped_and_frees_its_slot(start, change):
    pair = start()
    done = []
    pair.wire.on_message = lambda message: (
        [message, msgspec.structs.replace(message, **change)]
        if isinstance(message, SlabBlock) and not done.append(1)
        else [message]
    )
    features = pair.open()
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert pair.receiver.counters["shm_blocks"] == 13


def test_slot_messages_of_unknown_peers_free_nothing(start):
    pair = start()
    pair.wire.on_message = lambda message: [] if isinstance(message, SlabBlock | SlotFree) else [message]
    pair.open()
    pair.run()
    (slab,) = {message.slab for message in pair.wire.said if isinstance(message, SlabBlock)}
    right = {"room": ROOM, "epoch": 0, "instance": D, "block": 0, "slab": slab, "slot": 5}
    for change in (
        {"instance": "e" * 32},
        {"slab": "e" * 32},
        {"block": 1},
        {"slot": 0},
        {"epoch": 1},
        {"room": "b" * 32},
    ):
        pair.sender.arrive("00000001", [memoryview(encode(SlotFree(**(right | change))))])
        assert pair.sender.slots == (4, 6), change
    pair.sender.arrive("00000009", [memoryview(encode(SlotFree(**right)))])
    assert pair.sender.slots == (4, 6)
    pair.sender.arrive("00000001", [memoryview(encode(SlotFree(**right)))])
    assert pair.sender.slots == (3, 6)


def test_an_unknown_peer_gets_no_slab(start):
    pair = start()
    request = SlabRequest(instance=D, address="a" * 32, token="b" * 32, num_slots=4, slot_bytes=5000)
    pair.sender.arrive("00000001", [memoryview(encode(request))])
    assert pair.sender.counters["unexpected"] == 1
    assert pair.sender.slots == (0, 0)


def test_a_request_for_larger_slots_than_blocks_is_denied(start):
    pair = start()
    pair.wire.on_message = lambda message: [
        msgspec.structs.replace(message, slot_bytes=64 << 20) if isinstance(message, SlabRequest) else message
    ]
    pair.open()
    assert outcome(pair.run()) == ["Complete", "Released"]
    assert pair.wire.count(SlabDenied) == 1


@pytest.mark.parametrize("change", [{"num_slots": 7}, {"slot_bytes": 8192}])
def test_an_unrequested_grant_is_refused(start, change):
    pair = start()
    pair.wire.on_message = lambda message: [
        msgspec.structs.replace(message, **change) if isinstance(message, SlabGrant) else message
    ]
    pair.open()
    assert outcome(pair.run(6.0)) == ["Complete", "Released"]
    assert pair.receiver.counters["slabs"] == 0


def test_a_slab_ends_with_the_peer_on_either_side(start):
    pair = start()
    pair.open()
    pair.run()
    pair.wire.unlisten("p")
    pair.sender.close()
    pair.now += 1.0
    pair.receiver.turn()
    assert pair.receiver.counters["slabs"] == 0
    other = start()
    other.open()
    other.run()
    other.wire.drop_receiver(other.receiver)
    other.receiver.close()
    other.now += 1.0
    other.sender.turn()
    assert other.sender.slots == (0, 0)


def test_a_new_connection_of_the_same_process_replaces_the_slab(start):
    pair = start()
    pair.open()
    pair.run()
    pair.wire.cut("p")
    pair.receiver.lose("p")
    features = pair.open("b" * 32)
    events = pair.run(2.0)
    assert outcome(events) == ["Complete", "Released"]
    pair.check_landed(features)
    assert [end.counters["slabs"] for end in (pair.sender, pair.receiver)] == [1, 1]
    assert pair.receiver.counters["shm_blocks"] == 26


def test_a_slab_repeats_its_descriptor_when_a_block_is_pulled_again(start):
    pair, lost = start(), []

    def lose_first(message: object) -> list[object]:
        if isinstance(message, SlabBlock) and not lost:
            lost.append(message)
            return []
        return [message]

    pair.wire.on_message = lose_first
    features = pair.open()
    assert outcome(pair.run(2.0)) == ["Complete", "Released"]
    pair.check_landed(features)
    again = [s for s in pair.wire.said if isinstance(s, SlabBlock) and s.block == lost[0].block]
    assert again == [lost[0], lost[0]]
    assert pair.sender.counters["shm_blocks"] == 13, "it was copied once"


def test_slabs_have_a_bounded_size_and_a_repr():
    slab = Slab(2, 4096)
    assert repr(slab) == f"Slab({slab.id[:8]}, 2 x 4096)"
    slab.close()
    slab.close()
