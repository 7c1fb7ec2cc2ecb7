"""Blocks through device memory on a fake wire: runs, fallbacks, checks of what landed, and the end of slabs.

Shared memory of the host stands for that of a device: see `HostDevice`.
"""

import ctypes
from dataclasses import replace

import msgspec
import pytest
import torch
from baton.cluster.protocol import messages as m
from baton.cluster.protocol.codec import encode
from baton.cluster.protocol.kv_messages import Pull
from baton.cluster.protocol.slab_messages import (
    SlabBlock,
    SlabDenied,
    SlabGrant,
    SlabRequest,
    SlabUnusable,
    SlotFree,
)
from baton.engine.kv.page_order import PageOrder
from baton.kvtransfer.memory.host_device import HostDevice, HostMove
from baton.kvtransfer.memory.slab import SlabError
from baton.kvtransfer.memory.span_cutter import SenderPages
from baton.kvtransfer.protocol.layout import KVLayout
from baton.kvtransfer.transport import Complete, Dropped, Lost, Offer, Planes, PullRequest
from baton.kvtransfer.transports import cuda_slab, shm
from baton.kvtransfer.transports.fake import FakeReceiver, FakeSender
from baton.tests.unit.kvtransfer.transports import test_shm
from baton.tests.unit.kvtransfer.transports.test_shm import Wire, noise, outcome

P, D, ROOM = "1" * 32, "2" * 32, "a" * 32
ALL = ("cuda_slab", "shm", "zmq_blocks")
LAYOUT = m.Layout(
    fingerprint="f", dtype="bfloat16", page_size=4, num_layers=2, num_kv_heads=1, head_dim=160,
    feature_ids=[0, 3], feature_width=128, block_bytes=4096,
)  # pages of 5120 and 1024 bytes; ten of them have 15 blocks, in four runs  # fmt: skip
NUM_PAGES, NUM_TOKENS, NUM_BLOCKS, NUM_RUNS = 12, 40, 15, 4
SLOT_BYTES = 4 * 4096


class Pair(test_shm.Pair):
    """Both workers, each with a device whose moves are done at the `polls`-th poll."""

    def __init__(
        self,
        *,
        sender: tuple = ALL,
        receiver: tuple = ALL,
        layout: m.Layout = LAYOUT,
        wanted: m.Layout | None = None,
        polls: int = 2,
        device_bytes: int = 1 << 40,
        **options,
    ) -> None:
        self.now, self.wire = 0.0, Wire()
        sizes = KVLayout(layout)
        self.orders = [PageOrder(NUM_PAGES), PageOrder(NUM_PAGES)]
        self.source = Planes(
            kv=noise(NUM_PAGES, sizes.kv_page_bytes, 1),
            features=noise(NUM_PAGES, sizes.feature_page_bytes, 2),
            order=self.orders[0],
        )
        self.target = Planes(kv=noise(NUM_PAGES, sizes.kv_page_bytes, 3), features=None, order=self.orders[1])
        self.devices = [HostDevice(order, polls=polls, max_bytes=device_bytes) for order in self.orders]
        self.sender = FakeSender(
            self.wire, "p", P, layout, self.source, transports=sender, clock=lambda: self.now,
            device=self.devices[0], **options,
        )  # fmt: skip
        self.receiver = FakeReceiver(
            self.wire, D, wanted or layout, self.target, transports=receiver, window=4,
            clock=lambda: self.now, device=self.devices[1], slot_bytes=SLOT_BYTES,
        )  # fmt: skip

    def open(self, room: str = ROOM, epoch: int = 0, wanted: m.Layout = LAYOUT) -> torch.Tensor:
        """Offers and pulls a whole prompt; returns where its features land."""
        features = torch.zeros(10, KVLayout(wanted).feature_page_bytes, dtype=torch.uint8)
        self.sender.offer(Offer(room=room, epoch=epoch, num_tokens=NUM_TOKENS, pages=tuple(range(10))))
        self.sender.advance(room, epoch, NUM_TOKENS, 42)
        self.receiver.pull(
            PullRequest(
                room=room, epoch=epoch, num_tokens=NUM_TOKENS, have=0, pages=tuple(range(11, 1, -1)),
                features=features, endpoint="p", peer_instance=P,
            )
        )  # fmt: skip
        return features

    def run(self, seconds: float = 0.0) -> list[object]:
        """Lets everything arrive and every move end; with `seconds`, time goes on in steps."""
        events: list[object] = []
        for _ in range(max(1, int(seconds / 0.25))):
            for _ in range(40):
                events += [*self.receiver.poll(0), *self.sender.poll(0)]
            self.now += 0.25 if seconds else 0.0
        return events

    def slots(self) -> str:
        return repr(self.sender._device_slabs)

    @property
    def device_bytes(self) -> tuple[int, int]:
        return self.devices[0].num_bytes, self.devices[1].num_bytes


@pytest.fixture
def start(monkeypatch):
    """Makes pairs whose slots hold few blocks, with more of them than a server has."""
    monkeypatch.setattr("baton.kvtransfer.transports.shm.EARLY_SLOTS", 8)
    monkeypatch.setattr("baton.kvtransfer.transports.cuda_slab.WHOLE_SLOTS", 6)
    monkeypatch.setattr("baton.kvtransfer.transports.cuda_slab.FIRST_SLOTS", 2)
    pairs: list[Pair] = []

    def start(**options) -> Pair:
        pairs.append(Pair(**options))
        return pairs[-1]

    yield start
    for pair in pairs:
        pair.receiver.close()
        pair.sender.close()
        assert pair.device_bytes == (0, 0), "device memory is left"


@pytest.mark.parametrize("polls", [1, 5])
def test_every_byte_comes_through_device_memory_in_runs(start, polls):
    pair = start(polls=polls)
    pair.open()
    assert outcome(pair.run()) == ["Complete", "Released"]
    features = pair.open("b" * 32)
    pulled = pair.wire.count(Pull)
    events = pair.run()
    assert outcome(events) == ["Complete", "Released"]
    pair.check_landed(features)
    (done,) = [event for event in events if isinstance(event, Complete)]
    assert (done.num_device_blocks, done.num_shm_blocks, done.num_blocks) == (NUM_BLOCKS, 0, NUM_BLOCKS)
    assert pair.wire.count(Pull) - pulled == NUM_RUNS
    assert pair.wire.count(SlabRequest) == 1
    assert pair.slots() == "DeviceLanes(SlabSlots(0/4 held))"
    for end in (pair.sender, pair.receiver):
        assert (end.counters["device_slabs"], end.counters["shm_fallbacks"]) == (1, 0)
        assert end.counters["device_blocks"] >= NUM_BLOCKS
        assert end.counters["slabs"] == end.counters["shm_blocks"] == 0


def test_a_prompt_that_grows_by_chunks_is_pulled_as_it_grows(start):
    pair = start()
    pair.open()
    pair.run()
    pair.sender.offer(Offer(room="b" * 32, epoch=0, num_tokens=NUM_TOKENS, pages=tuple(range(10))))
    features = torch.zeros(10, 1024, dtype=torch.uint8)
    pair.receiver.pull(
        PullRequest(
            room="b" * 32, epoch=0, num_tokens=NUM_TOKENS, have=8, pages=tuple(range(11, 3, -1)),
            features=features[:8], endpoint="p", peer_instance=P,
        )
    )  # fmt: skip
    for ready in (12, 20, 21, 36):
        pair.sender.advance("b" * 32, 0, ready)
        pair.run()
    pair.sender.advance("b" * 32, 0, NUM_TOKENS, 42)
    assert outcome(pair.run()) == ["Complete", "Released"]
    assert torch.equal(pair.target.kv[list(range(11, 3, -1))], pair.source.kv[2:10])
    assert torch.equal(features[:8], pair.source.features[2:10])


@pytest.mark.parametrize("taken", [[3], [3, 0], [0]])
def test_decode_gets_the_feature_layers_that_it_wants(start, taken):
    wanted = msgspec.structs.replace(LAYOUT, feature_ids=taken, feature_width=64 * len(taken))
    pair = start(wanted=wanted)
    pair.open(wanted=wanted)
    pair.run()
    features = pair.open("b" * 32, wanted=wanted)
    (done,) = [event for event in pair.run() if isinstance(event, Complete)]
    assert done.num_device_blocks == done.num_blocks
    assert torch.equal(pair.target.kv[list(range(11, 1, -1))], pair.source.kv[:10])
    rows = pair.source.features[:10].view(10, 4, 2, 128)
    expected = torch.cat([rows[:, :, LAYOUT.feature_ids.index(layer)] for layer in taken], dim=2)
    assert torch.equal(features.view(10, 4, -1), expected)


@pytest.mark.parametrize("old", ["sender", "receiver"])
def test_a_pair_of_which_one_has_no_device_shares_memory_of_the_host(start, old):
    pair = start(**{old: ("shm", "zmq_blocks")})
    features = pair.open()
    (done,) = [event for event in pair.run() if isinstance(event, Complete)]
    pair.check_landed(features)
    assert (done.num_device_blocks, done.num_shm_blocks) == (0, done.num_blocks)
    assert {message.count for message in pair.wire.said if isinstance(message, Pull)} == {1}


def test_workers_of_other_hosts_are_never_asked_for_device_memory(start, monkeypatch):
    pair = start()
    pair.sender.session._host = "another boot"
    pair.open()
    (done,) = [event for event in pair.run() if isinstance(event, Complete)]
    assert (done.num_device_blocks, done.num_shm_blocks) == (0, done.num_blocks)
    requests = [message.transport for message in pair.wire.said if isinstance(message, SlabRequest)]
    assert requests == ["shm"]


def test_a_layout_that_is_not_aligned_is_not_cut_into_spans():
    assert cuda_slab.is_aligned(KVLayout(LAYOUT))
    for change in ({"block_bytes": 5000}, {"feature_width": 120}, {"head_dim": 1, "page_size": 1}):
        assert not cuda_slab.is_aligned(KVLayout(msgspec.structs.replace(LAYOUT, **change)))


def test_the_path_that_was_taken_is_counted_with_its_rate_and_said_once(start, caplog):
    pair = start()
    with caplog.at_level("INFO"):
        for number in range(3):
            pair.open(f"{number}" * 32)
            for _ in range(12):
                pair.now += 0.001
                pair.receiver.poll(0)
                pair.sender.poll(0)
    counters = pair.receiver.counters
    assert counters["path_bytes_cuda_slab"] == 3 * 61440
    assert 0 < counters["path_s_cuda_slab"] < 0.1
    said = [record for record in caplog.records if "first hand-off" in record.getMessage()]
    assert len(said) == 1
    assert said[0].fields["transport"] == "cuda_slab"
    assert said[0].fields["gb_per_s"] > 0


# --- fallbacks ----------------------------------------------------------------------------------------------


def refuse(*_: object) -> None:
    raise SlabError("invalid device context")


@pytest.mark.parametrize("refusal", ["allocate", "export", "open"])
def test_a_refused_device_falls_back_to_shared_memory_and_says_so_once(start, refusal, monkeypatch, caplog):
    pair = start()
    monkeypatch.setattr(HostDevice, refusal, refuse)
    for number in range(3):
        features = pair.open(f"{number}" * 32)
        events = pair.run()
        assert outcome(events) == ["Complete", "Released"]
        pair.check_landed(features)
    (done,) = [event for event in events if isinstance(event, Complete)]
    assert (done.num_device_blocks, done.num_shm_blocks) == (0, done.num_blocks)
    assert pair.wire.count(SlabRequest) == 2
    assert pair.wire.count(SlabDenied) + pair.wire.count(SlabUnusable) == 1
    said = [record for record in caplog.records if record.name.endswith("transports.shm")]
    assert sum("another way" in record.getMessage() for record in said) == 1
    pair.now += 1.0
    pair.run()
    assert pair.device_bytes == (0, 0), "what was allocated is free again"


def test_a_run_behind_blocks_for_shared_memory_waits_until_it_is_split(start, monkeypatch):
    """A pair that lost its slab may have one of the host while runs for the other still wait."""
    pair = start()
    monkeypatch.setattr(HostDevice, "allocate", refuse)
    pair.open()
    pair.run()
    sender, seen = pair.sender, list[tuple]()
    fill = sender._fill_slots

    def fill_slots(waiting):
        run = replace(waiting[0], block=2, count=3, size=waiting[0].stream.block_size(2, 3))
        seen.append((waiting[0].block, fill([waiting[0], run, waiting[0]])))
        return []

    for limit in ("_slots_per_frame", "max_batch"):
        monkeypatch.setattr(sender, limit, 8)
    monkeypatch.setattr(sender, "_fill_slots", fill_slots)
    pair.open("b" * 32)
    pair.run()
    assert len(seen) > 1, "later ones find no free slot"
    assert all([block.block for block, _ in filled] == [first] for first, filled in seen[:2])


def test_a_pair_without_any_slab_gets_messages(start, monkeypatch):
    pair = start()
    monkeypatch.setattr(HostDevice, "open", refuse)
    monkeypatch.setattr(shm, "Slab", refuse)
    features = pair.open()
    (done,) = [event for event in pair.run() if isinstance(event, Complete)]
    pair.check_landed(features)
    assert (done.num_device_blocks, done.num_shm_blocks) == (0, 0)
    assert pair.wire.count(m.Block) == NUM_BLOCKS


def test_a_limit_on_device_memory_denies_the_pair_that_is_too_many(start, caplog):
    pair = start(device_slab_bytes=SLOT_BYTES)
    pair.open()
    assert outcome(pair.run()) == ["Complete", "Released"]
    assert "--device-slab-mb" in str([record.__dict__ for record in caplog.records])
    assert pair.receiver.counters["slabs"] == 1


def test_slots_that_are_not_aligned_are_denied(start):
    pair = start()
    pair.wire.on_message = lambda message: [
        msgspec.structs.replace(message, slot_bytes=SLOT_BYTES - 8)
        if isinstance(message, SlabRequest) and message.transport == "cuda_slab"
        else message
    ]
    pair.open()
    assert outcome(pair.run()) == ["Complete", "Released"]
    (denial,) = [message for message in pair.wire.said if isinstance(message, SlabDenied)]
    assert "not aligned" in denial.reason


def test_a_denied_pair_asks_for_device_memory_again_with_a_later_room(start, monkeypatch):
    pair = start(receiver=("cuda_slab", "zmq_blocks"))
    with monkeypatch.context() as patch:
        patch.setattr(HostDevice, "allocate", refuse)
        pair.open()
        pair.run()
    pair.open("b" * 32)
    pair.run()
    assert pair.wire.count(SlabRequest) == 1
    pair.now += shm.ASK_AGAIN_S
    pair.open("c" * 32)
    pair.run()
    assert pair.wire.count(SlabRequest) == 2
    assert pair.receiver.counters["device_slabs"] == 1


def test_a_full_slab_sends_the_blocks_of_a_run_as_messages(start):
    pair = start()
    pair.open()
    pair.run()
    features = pair.open("b" * 32)
    slots = pair.sender._device_slabs._lanes["00000001"].slots
    taken = [slots.take(("c" * 32, 0, number), pair.now + 5.0) for number in range(3)]
    assert None not in taken
    (done,) = [event for event in pair.run() if isinstance(event, Complete)]
    pair.check_landed(features)
    assert done.num_device_blocks + pair.wire.count(m.Block) >= NUM_BLOCKS
    assert 0 < done.num_device_blocks < NUM_BLOCKS
    assert pair.sender.counters["shm_full"] > 0


@pytest.mark.parametrize("polls", [1, 3])
@pytest.mark.parametrize("end", ["complete", "sender", "receiver"])
def test_no_pull_of_many_rooms_finds_the_slab_full(start, end, polls):
    """Decode has as many runs in flight as there are slots, also while rooms end before their time."""
    pair = start(polls=polls)
    pair.open()
    pair.run()
    rooms = [f"{number}" * 32 for number in range(8)]
    for room in rooms:
        pair.open(room)
    events = []
    for turn in range(120):
        events += [*pair.receiver.poll(0), *pair.sender.poll(0)]
        if end != "complete" and turn % 5 == 4 and turn < 20:
            getattr(pair, end).release(rooms[turn // 5], 0, "cancelled")
    counters = pair.sender.counters
    assert (counters["shm_full"], counters["shm_fallbacks"], pair.wire.count(m.Block)) == (0, 0, 0)
    assert outcome(events).count("Complete") >= 4
    assert pair.slots() == "DeviceLanes(SlabSlots(0/4 held))"


def test_after_a_slab_is_lost_in_a_hand_off_the_rest_takes_another_way(start):
    pair, lost = start(), []

    def lose(message: object) -> list[object]:
        if isinstance(message, SlabBlock) and message.count > 1 and not lost:
            lost.append(1)
            pair.sender._device_slabs.drop("00000001")
        return [message]

    pair.open()
    pair.run()
    pair.wire.on_message = lose
    features = pair.open("b" * 32)
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    pair.run(1.0)
    pair.open("c" * 32)
    (done,) = [event for event in pair.run() if isinstance(event, Complete)]
    assert done.num_device_blocks > 0, "decode asked for a new slab"


# --- what lands is what was offered -------------------------------------------------------------------------


def flip(address: int) -> None:
    """Changes a byte of shared memory as a stray write of another process would."""
    (ctypes.c_uint8 * 1).from_address(address)[0] ^= 1


@pytest.mark.parametrize("at", [0, 5, 4096, SLOT_BYTES - 1])
def test_a_byte_that_changes_in_the_slot_is_never_taken_for_a_block(start, at):
    pair, planted = start(), []
    pair.open()
    pair.run()

    def plant(message: object) -> list[object]:
        if isinstance(message, SlabBlock) and message.block == 4 and len(planted) < 2:
            planted.append(message)
            slot = pair.receiver._slabs.slot("p", message)
            flip(slot + at)
        return [message]

    pair.wire.on_message = plant
    features = pair.open("b" * 32)
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert pair.receiver.counters["digest_mismatches"] == pair.receiver.counters["repulls"] >= 1


def test_a_run_with_the_bytes_of_another_one_is_never_taken_for_it(start):
    pair, changed = start(), []
    pair.open()
    pair.run()

    def exchange(message: object) -> list[object]:
        if isinstance(message, SlabBlock) and message.block == 4 and not changed:
            changed.append(message)
            return [msgspec.structs.replace(message, block=8)]
        return [message]

    pair.wire.on_message = exchange
    features = pair.open("b" * 32)
    assert outcome(pair.run(3.0)) == ["Complete", "Released"]
    pair.check_landed(features)
    assert pair.receiver.counters["digest_mismatches"] == 1


def test_a_reader_that_is_late_for_the_lease_pulls_again(start):
    pair = start()
    pair.open()
    pair.run()
    pair.wire.on_message = lambda message: [
        msgspec.structs.replace(message, lease_ms=0)
        if isinstance(message, SlabBlock)
        and message.room == "b" * 32
        and message.block == 4
        and not late
        and not late.append(1)
        else message
    ]
    late: list[int] = []
    features = pair.open("b" * 32)
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert pair.receiver.counters["repulls"] == 1


@pytest.mark.parametrize("change", [{"slot": 14}, {"slot": 2**31 - 1}, {"slab": "f" * 32}])
def test_a_descriptor_outside_decodes_own_table_is_not_read(start, change):
    pair = start()
    pair.open()
    pair.run()
    before = pair.receiver.counters["device_blocks"]
    pair.wire.on_message = lambda message: [
        msgspec.structs.replace(message, **change) if isinstance(message, SlabBlock) else message
    ]
    pair.open("b" * 32)
    pair.run(7.0)
    assert pair.receiver.counters["device_blocks"] == before
    assert pair.receiver.counters["unexpected"] > 0
    assert pair.wire.count(SlabUnusable) >= 1


@pytest.mark.parametrize(
    "change",
    [{"size": 16}, {"block": 99}, {"epoch": 3}, {"room": "c" * 32}, {"instance": "e" * 32}, {"count": 2}],
)
def test_a_descriptor_that_fits_no_pull_is_dropped_and_frees_its_slot(start, change):
    pair, done = start(), []
    pair.open()
    pair.run()
    pair.wire.on_message = lambda message: (
        [msgspec.structs.replace(message, **change), message]
        if isinstance(message, SlabBlock) and not done.append(1)
        else [message]
    )
    features = pair.open("b" * 32)
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)


def test_a_repeated_descriptor_is_moved_once(start):
    """A second move of a run could end behind its room, and read a slot that holds another run by then."""
    pair = start(polls=8)
    pair.open()
    pair.run()
    pair.wire.on_message = lambda message: [message] * (3 if isinstance(message, SlabBlock) else 1)
    moved = []
    move = pair.devices[1].move
    pair.devices[1].move = lambda *args, **kw: (moved.append(len(args[0])), move(*args, **kw))[1]
    features = pair.open("b" * 32)
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert sum(moved) == NUM_RUNS
    assert pair.receiver.counters["duplicate_blocks"] == 2 * NUM_RUNS


def test_a_block_that_a_move_writes_is_taken_from_no_message(start):
    """The message would end the room, and the move could then write another room's bytes into its pages."""
    pair = start(polls=1000)
    pair.open()
    while not pair.receiver._landings:
        pair.receiver.poll(0)
        for filling in pair.sender._device_slabs._fillings:
            filling.move.wait()
        pair.sender.poll(0)
    pull = Pull(room=ROOM, epoch=0, instance=D, block=0)
    (block,) = pair.sender.session.receive("00000001", pull, pair.now)
    header, payload = pair.sender._prepared.get(block)
    before = pair.receiver.counters["blocks"]
    pair.receiver.arrive("p", [memoryview(encode(header)), payload.data])
    assert pair.receiver.counters["blocks"] == before
    assert pair.receiver.counters["duplicate_blocks"] == 1


@pytest.mark.parametrize("transport", ["shm", "cuda_slab"])
def test_a_welcome_to_slabs_that_decode_has_not_asks_for_none(start, transport):
    pair = start(receiver=("zmq_blocks",))
    pair.wire.on_message = lambda message: [
        msgspec.structs.replace(message, transport=transport) if isinstance(message, m.KVWelcome) else message
    ]
    pair.open()
    assert outcome(pair.run()) == ["Complete", "Released"]
    assert pair.wire.count(SlabRequest) == 0


def test_slot_messages_of_unknown_peers_free_nothing(start):
    pair = start()
    pair.open()
    pair.run()
    pair.wire.on_message = lambda message: [] if isinstance(message, SlabBlock | SlotFree) else [message]
    pair.open("b" * 32)
    pair.run()
    assert pair.slots() == "DeviceLanes(SlabSlots(4/4 held))"
    (lane,) = pair.sender._device_slabs._lanes.values()
    (held,) = [slot for holder, slot in lane.slots._held.items() if holder[2] == 0]
    right = {
        "room": "b" * 32, "epoch": 0, "instance": D, "block": 0, "slab": lane.slab.id, "slot": held.index
    }  # fmt: skip
    for change in (
        {"instance": "e" * 32},
        {"slab": "e" * 32},
        {"block": 1},
        {"slot": 0 if held.index else 1},
    ):
        pair.sender.arrive("00000001", [memoryview(encode(SlotFree(**(right | change))))])
        assert pair.slots() == "DeviceLanes(SlabSlots(4/4 held))", change
    pair.sender.arrive("00000001", [memoryview(encode(SlotFree(**right)))])
    assert pair.slots() == "DeviceLanes(SlabSlots(3/4 held))"


def test_a_stranger_gets_no_slab_and_no_handle(start):
    pair = start()
    request = SlabRequest(
        instance=D, address="a" * 32, token="b" * 32, num_slots=4, slot_bytes=4096, transport="cuda_slab"
    )
    pair.sender.arrive("00000001", [memoryview(encode(request))])
    assert pair.sender.counters["unexpected"] == 1
    assert pair.devices[0].num_bytes == 0


def test_the_handle_of_a_slab_is_in_no_text():
    grant = SlabGrant(
        instance=P, token="b" * 32, slab="c" * 32, num_slots=2, slot_bytes=4096, handle=b"secret" * 10
    )
    assert "secret" not in repr(grant)


@pytest.mark.parametrize("change", [{"num_slots": 15}, {"slot_bytes": 8192}, {"handle": b"x" * 64}])
def test_a_grant_of_what_was_not_asked_for_is_refused_and_freed(start, change):
    pair = start()
    pair.wire.on_message = lambda message: [
        msgspec.structs.replace(message, **change)
        if isinstance(message, SlabGrant) and message.handle
        else message
    ]
    pair.open()
    assert outcome(pair.run(2.0)) == ["Complete", "Released"]
    assert pair.receiver.counters["device_slabs"] == 0
    assert pair.receiver.counters["slabs"] == 1
    assert pair.device_bytes == (0, 0)


# --- pages and memory at the end of rooms and peers ---------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_end_of_a_room_waits_for_the_moves_of_its_pages(start, side):
    """Behind the end of a room its pages have another owner."""
    pair = start(polls=1000)
    pair.open()
    pair.sender.release(ROOM, 0, "cancel")
    pair.receiver.release(ROOM, 0, "cancel")
    for _ in range(20):
        pair.receiver.poll(0)
        pair.sender.poll(0)
    room = "b" * 32
    pair.open(room)
    device = pair.devices[0 if side == "prefill" else 1]
    pair.devices[0].polls = 1000 if side == "prefill" else 1
    for _ in range(50):
        if device._queue:
            break
        pair.receiver.poll(0)
        pair.sender.poll(0)
    assert device._queue, "a move is under way"
    (pair.sender if side == "prefill" else pair.receiver).release(room, 0, "cancel")
    assert not device._queue
    owner = pair.source.kv if side == "prefill" else pair.target.kv
    owner.fill_(7)
    pair.run()
    assert bool((owner == 7).all())


def hold_a_move(pair, end):
    """A second room of `pair`, with a move under way that does not end on the device of `end`, which is
    returned (0: prefill, 1: decode)."""
    device = pair.devices[end]
    pair.open()
    pair.run()
    device.polls = 1000
    pair.open("b" * 32)
    for _ in range(50):
        if device._queue:
            break
        pair.receiver.poll(0)
        pair.sender.poll(0)
    assert device._queue
    return device


def test_a_room_that_is_lost_waits_for_the_moves_of_its_pages(start):
    pair = start(polls=1)
    held = hold_a_move(pair, 1)
    pair.now += 6.0
    events = pair.receiver.turn()
    assert any(isinstance(event, Lost) for event in events)
    assert not held._queue


def test_moves_wait_for_the_forwards_that_use_their_pages(start):
    """`check_uses` asserts on every page that a move touches too early."""
    pair = start()
    for order in pair.orders:
        order.check_uses()
        order.use(reads=range(NUM_PAGES), writes=range(NUM_PAGES))
        order.stamp(range(NUM_PAGES))
    features = pair.open()
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)


@pytest.mark.parametrize("end", ["release", "abort", "lease"])
def test_slots_of_a_room_that_ended_are_free_at_once(start, end):
    pair = start()
    pair.open()
    pair.run()
    pair.wire.on_message = lambda message: [] if isinstance(message, SlabBlock | SlotFree) else [message]
    pair.open("b" * 32)
    pair.run()
    assert pair.slots() == "DeviceLanes(SlabSlots(4/4 held))"
    if end == "release":
        pair.sender.release("b" * 32, 0, "cancel")
    elif end == "abort":
        pair.receiver.release("b" * 32, 0, "cancel")
        pair.run()
    else:
        pair.run(7.0)
    assert pair.slots() == "DeviceLanes(SlabSlots(0/4 held))"


def test_lost_slot_messages_cost_slots_only_until_the_lease_ends(start):
    pair = start()
    pair.open()
    pair.run()
    pair.wire.on_message = lambda message: [] if isinstance(message, SlotFree) else [message]
    pair.sender.offer(Offer(room="b" * 32, epoch=0, num_tokens=NUM_TOKENS, pages=tuple(range(10))))
    pair.sender.advance("b" * 32, 0, 36)
    pair.receiver.pull(
        PullRequest(
            room="b" * 32, epoch=0, num_tokens=NUM_TOKENS, have=0, pages=tuple(range(11, 1, -1)),
            features=torch.zeros(10, 1024, dtype=torch.uint8), endpoint="p", peer_instance=P,
        )
    )  # fmt: skip
    pair.run()
    assert pair.slots() == "DeviceLanes(SlabSlots(4/4 held))"
    pair.run(7.0)
    assert pair.slots() == "DeviceLanes(SlabSlots(0/4 held))"


def test_a_run_is_gathered_once_and_its_descriptor_repeated(start):
    pair, lost = start(), []
    pair.open()
    pair.run()

    def lose_first(message: object) -> list[object]:
        if isinstance(message, SlabBlock) and not lost:
            lost.append(message)
            return []
        return [message]

    pair.wire.on_message = lose_first
    before = pair.sender.counters["device_blocks"]
    features = pair.open("b" * 32)
    assert outcome(pair.run(3.0)) == ["Complete", "Released"]
    pair.check_landed(features)
    again = [s for s in pair.wire.said if isinstance(s, SlabBlock) and s == lost[0]]
    assert len(again) == 2
    assert pair.sender.counters["device_blocks"] - before == NUM_BLOCKS


def test_every_gather_of_a_turn_is_launched_before_one_is_waited_for(start, monkeypatch):
    """Then the header of each goes before the next one is waited for."""
    pair, steps = start(), []
    pair.open()
    pair.run()
    move, wait = pair.devices[0].move, HostMove.wait
    headers = pair.sender._send_headers
    pair.sender._send_headers = lambda waiting: (steps.append("header"), headers(waiting))[1]
    pair.devices[0].move = lambda *args, **kw: (steps.append("move"), move(*args, **kw))[1]
    monkeypatch.setattr(HostMove, "is_held", False)
    monkeypatch.setattr(HostMove, "poll", lambda self: self.digests if self.is_done else None)
    monkeypatch.setattr(HostMove, "wait", lambda self: (steps.append("wait"), wait(self))[1])
    features = pair.open("b" * 32)
    pair.receiver._settle_landings = lambda: None
    pair.run()
    assert steps == ["move"] * NUM_RUNS + ["wait", "header"] * NUM_RUNS
    del pair.receiver._settle_landings
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)


@pytest.mark.parametrize("end", ["complete", "release"])
def test_the_memory_of_a_room_is_looked_up_once_and_forgotten_with_it(start, monkeypatch, end):
    pair, looked_up = start(), []
    places = SenderPages.places
    monkeypatch.setattr(SenderPages, "places", lambda *args: (looked_up.append(args), places(*args))[1])
    pair.open()
    pair.run()
    for room in ("b" * 32, "c" * 32):
        looked_up.clear()
        features = pair.open(room)
        if end == "release":
            while not looked_up:
                pair.sender.poll(0)
                pair.receiver.poll(0)
            pair.sender.release(room, 0, "cancelled")
        pair.run()
        assert len(looked_up) == 1
        assert not pair.sender._device_slabs._places
        if end == "complete":
            pair.check_landed(features)


def test_memory_that_decode_may_have_mapped_is_freed_only_after_it_closed(start):
    """To free it earlier is undefined behaviour by CUDA's documentation."""
    pair = start()
    pair.open()
    pair.run()
    pair.sender._device_slabs.drop("00000001")
    for _ in range(3):
        pair.now += 1.0
        pair.sender.turn()
        assert pair.devices[0].num_bytes == 12 * SLOT_BYTES
        assert pair.sender.counters["device_slabs"] == 1
    pair.receiver.turn()
    assert pair.devices[1].num_bytes == 0, "decode heard that the slab is given up"
    pair.now += 1.0
    pair.sender.turn()
    assert pair.device_bytes == (0, 0)


def test_memory_of_a_dead_peer_is_given_back_within_the_lease(start):
    pair = start()
    pair.open()
    pair.run()
    pair.wire.unlisten("p")
    pair.sender.close()
    assert pair.devices[1].num_bytes == 12 * SLOT_BYTES
    pair.now += 1.0
    pair.receiver.turn()
    assert pair.devices[1].num_bytes == 0
    other = start()
    other.open()
    other.run()
    other.wire.drop_receiver(other.receiver)
    other.receiver.close()
    other.now += 1.0
    other.sender.turn()
    assert other.device_bytes == (0, 0)
    assert other.slots() == "DeviceLanes()"


def test_a_new_connection_of_the_same_process_replaces_the_slab(start):
    pair = start()
    pair.open()
    pair.run()
    pair.wire.cut("p")
    pair.receiver._close_link("p")
    pair.receiver._perform(pair.receiver.session.link_lost("p", pair.now))
    features = pair.open("b" * 32)
    assert outcome(pair.run(2.0)) == ["Complete", "Released"]
    pair.check_landed(features)
    assert [end.counters["device_slabs"] for end in (pair.sender, pair.receiver)] == [1, 1]
    assert pair.devices[0].num_bytes == 12 * SLOT_BYTES


def test_a_new_connection_gets_the_memory_of_the_slab_that_it_lost(start):
    pair = start(device_slab_bytes=6 * SLOT_BYTES)
    pair.open()
    pair.run()
    pair.wire.cut("p")
    pair.receiver.lose("p")
    pair.open("b" * 32)
    (done,) = [event for event in pair.run() if isinstance(event, Complete)]
    assert done.num_device_blocks == done.num_blocks
    assert pair.sender.counters["shm_fallbacks"] == 0


def test_a_dropped_room_frees_its_pages_after_its_gather(start):
    pair = start(polls=1)
    held = hold_a_move(pair, 0)
    pair.now += 6.0
    events = pair.sender.turn()
    assert any(isinstance(event, Dropped) for event in events)
    assert not held._queue


def test_blocks_that_no_device_could_move_come_as_messages(start):
    """A prefill worker without slabs may have blocks of any size."""
    odd = msgspec.structs.replace(LAYOUT, block_bytes=5000)
    pair = start(layout=odd, wanted=msgspec.structs.replace(LAYOUT, block_bytes=8192), sender=("zmq_blocks",))
    pair.open()
    assert outcome(pair.run()) == ["Complete", "Released"]
    features = pair.open("b" * 32)
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
