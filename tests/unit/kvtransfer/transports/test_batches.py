"""Several small messages share one frame: its permitted content, and no effect but the number of frames."""

from dataclasses import replace

import msgpack
import msgspec
import pytest
import torch
from baton.cluster.errors import RemoteProtocolError
from baton.cluster.protocol import messages as m
from baton.cluster.protocol.codec import (
    KV_MAX_BYTES,
    MAX_BATCH,
    encode,
    encode_batch,
    kv_down_frames,
    kv_up_frames,
)
from baton.cluster.protocol.slab_messages import SlabBlock, SlotFree
from baton.kvtransfer.transport import Complete, Lost, Offer, Planes, PullRequest, Released
from baton.kvtransfer.transports.fake import FakeNetwork, FakeReceiver, FakeSender, Packet
from baton.kvtransfer.transports.sender_endpoint import SLOTS_PER_FRAME

P, D, ROOM = "1" * 32, "2" * 32, "a" * 32
LAYOUT = m.Layout(
    fingerprint="f", dtype="bfloat16", page_size=4, num_layers=2, num_kv_heads=1, head_dim=160,
    block_bytes=5000
)  # pages of 5120 bytes: most blocks have two segments  # fmt: skip
NAME = {"room": ROOM, "epoch": 0, "instance": D}
PULL = m.Pull(**NAME, block=1)
FREE = SlotFree(**NAME, block=1, slab=P, slot=3)
LARGEST = SlabBlock(
    room=ROOM, epoch=2**48, instance=P, block=2**48, size=2**48, digest=2**32 - 1, slab=P, slot=2**31 - 1,
    lease_ms=2**48
)  # fmt: skip


def test_a_frame_holds_small_block_messages_and_one_alone_is_unchanged():
    assert kv_up_frames().decode(encode_batch([PULL, FREE, PULL])) == (PULL, FREE, PULL)
    assert kv_up_frames().decode(encode_batch([PULL])) == kv_up_frames().decode(encode(PULL)) == PULL
    largest = encode_batch([LARGEST] * MAX_BATCH)
    assert len(largest) <= KV_MAX_BYTES
    assert kv_down_frames().decode(largest) == (LARGEST,) * MAX_BATCH


@pytest.mark.parametrize(
    ("decoder", "messages"),
    [
        (kv_up_frames, []),
        (kv_up_frames, [PULL] * (MAX_BATCH + 1)),
        (kv_up_frames, [PULL, m.Release(**NAME)]),
        (kv_up_frames, [[PULL]]),
        (kv_up_frames, [PULL, None]),
        (kv_up_frames, [LARGEST]),
        (kv_down_frames, [LARGEST] * (MAX_BATCH + 1)),
        (kv_down_frames, [PULL]),
        (kv_down_frames, [m.Block(**NAME, block=0, size=1, digest=0)]),
    ],
)
def test_a_frame_of_anything_else_is_refused_as_a_whole(decoder, messages):
    with pytest.raises(RemoteProtocolError):
        decoder().decode(msgspec.msgpack.encode(messages))


@pytest.mark.parametrize("num", [2, 15, 16])
def test_no_flipped_bit_changes_a_frame_of_several(num):
    messages = (PULL,) * (num - 1) + (FREE,)
    frame = encode_batch(messages)
    assert kv_up_frames().decode(frame) == messages
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert kv_up_frames().decode(damaged) == messages, (
                "only the word that there is a checksum may be lost"
            )
        except RemoteProtocolError:
            continue


class Frames(FakeNetwork):
    """Remembers what each frame held; `lose` says which frames do not arrive."""

    def __init__(self) -> None:
        super().__init__(self.pass_on)
        self.frames: list[list[object]] = []
        self.lose = lambda messages: False

    def pass_on(self, packet: Packet) -> list[Packet]:
        held = (kv_up_frames() if packet.is_up else kv_down_frames()).decode(packet.frames[0])
        self.frames.append(list(held) if isinstance(held, tuple) else [held])
        return [] if self.lose(self.frames[-1]) else [packet]

    def sizes(self, kind: type) -> list[int]:
        """How many messages were in each frame that begins with one of this kind."""
        return [len(frame) for frame in self.frames if isinstance(frame[0], kind)]


class BatchingSender(FakeSender):
    max_batch = MAX_BATCH


class BatchingReceiver(FakeReceiver):
    max_batch = MAX_BATCH


class Pair:
    """A room of 13 blocks between two workers, over `transports`."""

    def __init__(self, *transports: str) -> None:
        self.now, self.wire = 0.0, Frames()
        self.source, self.target = (
            torch.randint(
                0, 256, (12, 5120), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
            )
            for seed in (1, 2)
        )
        planes = {
            "source": Planes(kv=self.source, features=None),
            "target": Planes(kv=self.target, features=None),
        }
        self.sender = BatchingSender(
            self.wire, "p", P, LAYOUT, planes["source"], transports=transports, clock=lambda: self.now
        )
        self.receiver = BatchingReceiver(
            self.wire, D, LAYOUT, planes["target"], transports=transports, window=6, clock=lambda: self.now
        )
        self.sender.offer(Offer(room=ROOM, epoch=0, num_tokens=48, pages=tuple(range(12))))
        self.sender.advance(ROOM, 0, 48, 42)
        pages = tuple(range(11, -1, -1))
        self.receiver.pull(
            PullRequest(
                room=ROOM,
                epoch=0,
                num_tokens=48,
                have=0,
                pages=pages,
                features=None,
                endpoint="p",
                peer_instance=P,
            )
        )

    def run(self, seconds: float = 0.0) -> list[object]:
        """Lets everything arrive, for so long."""
        events, end = [], self.now + seconds
        while True:
            events += [*self.receiver.poll(0), *self.sender.poll(0), *self.receiver.poll(0)]
            if self.now >= end:
                return [event for event in events if isinstance(event, Complete | Lost | Released)]
            self.now += 0.25

    def check(self, events: list[object]) -> None:
        """Every block is in place and was counted once, and no slot is in use."""
        assert sorted(type(event).__name__ for event in events) == ["Complete", "Released"]
        assert torch.equal(self.target.flip(0), self.source)
        assert self.receiver.session.counters.blocks == 13
        assert self.sender.slots[0] == 0
        self.receiver.close()
        self.sender.close()


def test_slot_blocks_are_announced_in_batches_and_answered_in_one_frame():
    pair = Pair("shm", "zmq_blocks")
    pair.check(pair.run())
    assert sum(pair.wire.sizes(SlabBlock)) == 13 == pair.sender.counters["shm_blocks"]
    assert max(pair.wire.sizes(SlabBlock)) == SLOTS_PER_FRAME
    ups = pair.wire.sizes(m.Pull) + pair.wire.sizes(SlotFree)
    assert sum(ups) == 26
    assert len(ups) <= 9  # the first window in one, then one for each frame of blocks
    assert pair.sender.session.counters.blocks == 13


def test_blocks_sent_as_messages_go_one_by_one_for_a_batched_pull():
    pair = Pair("zmq_blocks")
    pair.check(pair.run())
    assert pair.wire.sizes(m.Block) == [1] * 13
    assert max(pair.wire.sizes(m.Pull)) == 6


def test_a_block_named_twice_lands_once_and_a_wrong_one_is_pulled_again():
    pair = Pair("shm", "zmq_blocks")
    passed = pair.wire.pass_on
    damaged = []

    def twice(packet: Packet) -> list[Packet]:
        held = None if packet.is_up else kv_down_frames().decode(packet.frames[0])
        if not isinstance(held, tuple):
            return passed(packet)
        wrong = msgspec.structs.replace(held[0], digest=held[0].digest ^ 1)
        sent = (held[1], wrong, held[1]) if not damaged else (held[0], held[1], held[0])
        damaged.append(wrong.block)
        return passed(replace(packet, frames=(encode_batch(sent),)))

    pair.wire.fault = twice
    pair.check(pair.run())
    assert len(damaged) > 2
    assert pair.receiver.session.counters.digest_mismatches == 1
    counters = pair.receiver.session.counters
    assert counters.duplicate_blocks + counters.unknown_room == len(
        damaged
    )  # the last one came when all was complete


@pytest.mark.parametrize("kind", [m.Pull, SlabBlock, SlotFree])
def test_a_frame_that_gets_lost_costs_time_only(kind):
    pair = Pair("shm", "zmq_blocks")
    lost = []
    pair.wire.lose = lambda held: (
        len(held) > 1 and isinstance(held[0], kind) and not lost and not lost.append(held)
    )
    pair.check(pair.run(4.0))
    assert len(lost[0]) > 1


def test_a_message_of_unknown_type_costs_no_block_of_its_frame():
    pair = Pair("shm", "zmq_blocks")
    passed = pair.wire.pass_on
    num = {True: 0, False: 0}

    def newer(packet: Packet) -> list[Packet]:
        found = msgpack.unpackb(packet.frames[0])
        if isinstance(found, list) and len(found) < MAX_BATCH:
            num[packet.is_up] += 1
            found.insert(1, {"type": "Pull2", "room": ROOM, "blocks": [1, 2]})
            del found[-1]["crc"]
            assert passed(packet)
            packet = replace(packet, frames=(msgpack.packb(found),))
            return [packet]
        return passed(packet)

    pair.wire.fault = newer
    pair.check(pair.run())
    assert min(num.values()) > 0
    assert pair.sender.session.counters.malformed == num[True]
    assert pair.receiver.session.counters.malformed == num[False]


def test_messages_for_a_full_peer_are_sent_later_and_counted_once():
    pair = Pair("shm", "zmq_blocks")
    for _ in range(8):  # up to the first pulls, which wait at prefill
        pair.sender.is_full = any(isinstance(frame[0], m.Announce) for frame in pair.wire.frames)
        while pair.wire.packets and not pair.sender.is_full:
            pair.wire.deliver()
            pair.sender.is_full = any(isinstance(frame[0], m.Announce) for frame in pair.wire.frames)
        pair.wire.deliver_all()
    assert pair.sender.counters["shm_blocks"] == SLOTS_PER_FRAME  # filled, and not said
    assert pair.sender.session.counters.blocks == 0
    pair.sender.is_full = False
    pair.check(pair.run(0.5))
    assert pair.sender.session.counters.blocks == pair.sender.counters["shm_blocks"] == 13
