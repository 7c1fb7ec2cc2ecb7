"""Blocks read through NIXL, with agents of this process in the place of the wheel's, on a fake wire."""

import ctypes
import select
import threading
import time

import msgspec
import pytest
import torch
from baton.cluster.errors import ConfigError
from baton.cluster.net import transport_names
from baton.cluster.net.transport_names import common_transports, transports_fault, transports_of
from baton.cluster.protocol.messages import PROTOCOL_MAJOR, Announce, KVHello
from baton.cluster.protocol.slab_messages import SlabBlock, SlabDenied, SlabGrant, SlabRequest, SlabUnusable
from baton.engine.kv.page_order import PageOrder
from baton.kvtransfer.memory.slab import SlabError
from baton.kvtransfer.protocol.layout import KVLayout
from baton.kvtransfer.protocol.sender import SenderSession
from baton.kvtransfer.transport import Complete, Landed, Lost, Offer, Planes, PullRequest
from baton.kvtransfer.transports import nixl_thread
from baton.kvtransfer.transports.fake import FakeReceiver, FakeSender
from baton.kvtransfer.transports.nixl import STUCK_S
from baton.kvtransfer.transports.nixl_agent import open_nixl
from baton.kvtransfer.transports.nixl_thread import (
    PIECE_BYTES,
    Connect,
    Connected,
    NixlThread,
    Read,
    ReadEnded,
    Slots,
    address_of,
)
from baton.kvtransfer.transports.shm import ASK_AGAIN_S
from baton.tests.unit.kvtransfer.transports.test_shm import LAYOUT, NUM_PAGES, NUM_TOKENS, Wire, noise

P, D, D2 = "1" * 32, "2" * 32, "3" * 32
NIXL = ("nixl", "zmq_blocks")
NUM_BLOCKS = 13


class Fabric:
    """What the agents of one test share. A test makes reads wait, fail or change bytes."""

    def __init__(self) -> None:
        self.agents: dict[str, FakeAgent] = {}
        self.is_held = False  # reads that begin now do not end
        self.change = lambda data: None  # of a read, after its bytes have arrived
        self.refuses: set[str] = set()  # names of agents that cannot be opened
        self.calls: list[str] = []

    def open(self, name: str) -> "FakeAgent":
        if name in self.refuses:
            raise SlabError("no NIXL agent: no memory")
        self.agents[name] = FakeAgent(self, name)
        return self.agents[name]


class FakeRead:
    def __init__(self, moves: list, is_held: bool) -> None:
        self.moves, self.is_held = moves, is_held
        self.is_done = self.is_released = False


class FakeAgent:
    """As `NixlAgent`. Regions are copied as they are when a read ends."""

    def __init__(self, fabric: Fabric, name: str) -> None:
        self.fabric, self.name = fabric, name
        self.registered: dict[bytes, tuple[int, int]] = {}
        self.contents: list[bytes] = []  # of regions when they were registered
        self.known: dict[str, set[bytes]] = {}
        self.reads: list[FakeRead] = []
        self.is_lost = False

    def register(self, region):
        key = f"{self.name}:{region[0]}".encode()
        self.contents.append(bytes((ctypes.c_uint8 * region[1]).from_address(region[0])))
        self.registered[key] = region
        return key

    def deregister(self, registered):
        del self.registered[registered]

    def metadata(self, registered):
        return b"agent:" + registered

    def add_remote(self, metadata):
        if not metadata.startswith(b"agent:"):
            raise SlabError("NIXL: nixlMismatchError")
        key = metadata.removeprefix(b"agent:")
        name = key.split(b":")[0].decode()
        self.known.setdefault(name, set()).add(key)
        return name

    def remove_remote(self, name):
        del self.known[name]

    def prepare(self, name, pieces):
        self.fabric.calls.append(f"prepare {'ours' if name == '' else 'theirs'}")
        keys = self.registered.keys() if name == "" else self.known[name]
        owner = self if name == "" else self.fabric.agents[name]
        regions = [owner.registered[key] for key in keys if key in owner.registered]
        for address, size in pieces:
            assert any(base <= address and address + size <= base + most for base, most in regions)
        return list(pieces)

    def release_list(self, prepared):
        self.fabric.calls.append("release list")

    def read(self, local, remote, into, of):
        if self.is_lost:
            raise SlabError("NIXL: nixlRemoteDisconnectError")
        assert len(into) == len(of) > 0
        read = FakeRead([(local[i], remote[j]) for i, j in zip(into, of, strict=True)], self.fabric.is_held)
        self.reads.append(read)
        return read

    def is_done(self, read):
        if self.is_lost:
            raise SlabError("NIXL: nixlRemoteDisconnectError")
        if read.is_held:
            return False
        for (target, size), (source, _) in read.moves:
            ctypes.memmove(target, source, size)
            self.fabric.change((ctypes.c_uint8 * size).from_address(target))
        read.is_done = True
        return True

    def release(self, read):
        assert read.is_done or self.is_lost, "a read under way cannot be released"
        read.is_released = True

    def progress(self):
        pass


class Pair:
    """Both workers, with a clock that the test moves."""

    def __init__(
        self, *, sender=NIXL, receiver=NIXL, layout=LAYOUT, fabric=None, device="cpu", **options
    ) -> None:
        self.now, self.wire, self.fabric = 0.0, Wire(), fabric or Fabric()
        self.layout, sizes = layout, KVLayout(layout)
        self.device, order = device, PageOrder(NUM_PAGES, device)
        self.source = Planes(
            kv=noise(NUM_PAGES, sizes.kv_page_bytes, 1).to(device),
            features=noise(NUM_PAGES, sizes.feature_page_bytes, 2).to(device),
            order=order,
        )
        self.sender = FakeSender(
            self.wire, "p", P, layout, self.source, transports=sender, clock=self.clock,
            open_agent=self.fabric.open, **options,
        )  # fmt: skip
        target = noise(NUM_PAGES, sizes.kv_page_bytes, 3).to(device)
        self.target = Planes(kv=target, features=None, order=PageOrder(NUM_PAGES, device))
        self.receiver = self.decode(D, receiver, self.target)
        self.num_rooms = 0

    def clock(self) -> float:
        return self.now

    def decode(self, instance: str, transports: tuple, target: Planes) -> FakeReceiver:
        return FakeReceiver(
            self.wire, instance, self.layout, target, transports=transports, window=4, clock=self.clock,
            open_agent=self.fabric.open,
        )  # fmt: skip

    def open(self, receiver: FakeReceiver | None = None) -> str:
        """Offers and pulls a whole prompt; returns its room."""
        self.num_rooms += 1
        room = f"{self.num_rooms:032x}"
        sizes = KVLayout(self.layout)
        self.features = torch.zeros(10, sizes.feature_page_bytes, dtype=torch.uint8, device=self.device)
        self.sender.offer(Offer(room=room, epoch=0, num_tokens=NUM_TOKENS, pages=tuple(range(10))))
        self.sender.advance(room, 0, NUM_TOKENS, 42)
        (receiver or self.receiver).pull(
            PullRequest(
                room=room, epoch=0, num_tokens=NUM_TOKENS, have=0, pages=tuple(range(11, 1, -1)),
                features=self.features, endpoint="p", peer_instance=P,
            )
        )  # fmt: skip
        return room

    def run(self, receiver: FakeReceiver | None = None) -> list[object]:
        decode = receiver or self.receiver
        return [*decode.poll(0), *self.sender.poll(0), *decode.poll(0)]

    def until(self, condition, receiver: FakeReceiver | None = None) -> list[object]:
        """Lets everything happen, threads too, until `condition(events)`."""
        events, end = [], time.monotonic() + 20.0
        while not condition(events):
            assert time.monotonic() < end, events
            events += self.run(receiver)
            time.sleep(0.001)
        return events

    def hand_over(self, receiver: FakeReceiver | None = None) -> Complete | Lost:
        self.open(receiver)
        events = self.until(lambda events: any(isinstance(e, Complete | Lost) for e in events), receiver)
        return next(event for event in events if isinstance(event, Complete | Lost))

    def connect(self, receiver: FakeReceiver | None = None) -> None:
        """A pair whose next blocks are read through NIXL: reads begin once decode is connected."""
        held, self.fabric.is_held = self.fabric.is_held, False
        before = (receiver or self.receiver).counters["nixl_blocks"]
        for _ in range(1000):
            self.hand_over(receiver)
            if (receiver or self.receiver).counters["nixl_blocks"] >= before + NUM_BLOCKS:
                break
            time.sleep(0.005)
        self.fabric.is_held = held

    def check_landed(self) -> None:
        assert torch.equal(self.target.kv[list(range(11, 1, -1))], self.source.kv[:10])
        assert torch.equal(self.features, self.source.features[:10])

    def agent(self) -> FakeAgent:
        return self.fabric.agents[D]


@pytest.fixture
def start():
    pairs: list[Pair] = []

    def start(**options) -> Pair:
        pairs.append(Pair(**options))
        return pairs[-1]

    yield start
    for pair in pairs:
        for agent in pair.fabric.agents.values():
            for read in agent.reads:
                read.is_held = False
        pair.receiver.close()
        pair.sender.close()


def test_every_byte_is_read_through_one_prepared_list_per_pair(start):
    pair = start()
    pair.connect()
    for _ in range(3):
        pair.target.kv.zero_()
        done = pair.hand_over()
        assert done.num_nixl_blocks == done.num_blocks == NUM_BLOCKS
        assert done.num_shm_blocks == done.num_device_blocks == 0
        pair.check_landed()
    pair.until(lambda _: pair.sender.slots[0] == 0)
    assert pair.fabric.calls == ["prepare ours", "prepare theirs"]
    assert all(read.is_released for read in pair.agent().reads)
    assert pair.receiver.counters["nixl_slabs"] == pair.sender.counters["nixl_slabs"] == 1
    assert set(pair.receiver.counters) >= {"path_bytes_nixl", "path_s_nixl"}


def test_before_the_pair_is_connected_blocks_are_messages(start):
    pair = start()
    done = pair.hand_over()
    assert done.num_nixl_blocks < done.num_blocks
    pair.check_landed()


def test_blocks_in_a_slab_follow_its_grant(start):
    pair, may_open = start(), threading.Event()
    open_agent = pair.fabric.open

    def open_late(name):
        assert name != P or may_open.wait(20.0)
        return open_agent(name)

    def fill_queue(message):
        pair.sender.is_full = pair.sender.is_full or isinstance(message, Announce)
        return [message]

    pair.sender._nixl.thread._open_agent = open_late
    pair.hand_over()
    pair.until(lambda _: pair.wire.count(SlabRequest) == 1)
    pair.wire.on_message = fill_queue
    pair.open()
    pair.run()  # blocks wait for a place in the connection's queue
    may_open.set()
    pair.until(lambda _: pair.sender.counters["nixl_slabs"] == 1)
    pair.wire.on_message = lambda message: [message]
    pair.sender.is_full = False
    pair.now += 0.1  # the next try to send
    pair.until(lambda events: any(isinstance(event, Complete) for event in events))
    pair.check_landed()
    pair.connect()
    said = [type(message) for message in pair.wire.said]
    assert said.index(SlabGrant) < said.index(SlabBlock)
    assert pair.wire.count(SlabUnusable) == 0
    assert pair.hand_over().num_nixl_blocks == NUM_BLOCKS


class SecondLook(FakeAgent):
    """Reads end at the second look at the earliest, as over a fabric."""

    def is_done(self, read):
        read.is_held, was_held = False, read.is_held
        return not was_held and super().is_done(read)


def test_no_wait_of_the_thread_outlasts_its_limit(monkeypatch):
    """Limits that are over before the wait begins, as for a thread that loses its core."""
    monkeypatch.setattr(nixl_thread, "BUSY_S", 1e-9)
    fabric = Fabric()
    fabric.is_held = True
    memory = torch.zeros(2, 64, dtype=torch.uint8).numpy()
    slots = [Slots(address_of(row), 1, 64) for row in memory]
    fabric.agents[P] = FakeAgent(fabric, P)
    metadata = fabric.agents[P].metadata(fabric.agents[P].register(slots[1].region))
    thread = NixlThread(lambda name: SecondLook(fabric, name), D)
    try:
        thread.order(Connect("lane", P, metadata, slots[1], memory[0]))
        assert outcome_of(thread) == Connected("lane")
        for _ in range(30_000):
            thread.order(Read("lane", 0, 0, 64))
            assert outcome_of(thread) == ReadEnded("lane", 0)
    finally:
        thread.close()


def outcome_of(thread):
    """Waits for the only outcome."""
    (fd,) = thread.wake_fds
    assert select.select([fd], [], [], 20.0)[0], "the thread sleeps, with a read under way"
    (outcome,) = thread.outcomes()
    return outcome


def test_a_short_block_reads_only_its_descriptors_and_slots_never_overlap():
    slots = Slots(base=1 << 20, num_slots=3, slot_bytes=2 * PIECE_BYTES + 100)
    assert len(slots.pieces) == 9
    assert [size for _, size in slots.pieces[:3]] == [PIECE_BYTES, PIECE_BYTES, 100]
    ends = [address + size for address, size in slots.pieces]
    assert ends[:-1] == [address for address, _ in slots.pieces[1:]]
    assert slots.indexes(1, 1) == range(3, 4)
    assert slots.indexes(2, PIECE_BYTES + 1) == range(6, 8)
    assert slots.indexes(2, slots.slot_bytes) == range(6, 9)


def test_metadata_travels_only_in_a_grant_and_no_line_shows_it(start):
    pair = start()
    pair.connect()
    grants = {message for message in pair.wire.said if isinstance(message, SlabGrant)}
    (grant,) = grants  # repeated to a quiet peer, but the same
    assert grant.metadata
    assert grant.agent == P
    assert "metadata" not in repr(grant)


@pytest.mark.parametrize("ended_by", ["cancel", "abort"])
def test_a_cancelled_room_leaves_its_reads_their_slots_until_they_end(start, ended_by):
    pair = start()
    pair.connect()
    pair.fabric.is_held = True
    room = pair.open()
    pair.until(lambda _: sum(read.is_held for read in pair.agent().reads) == 4)
    if ended_by == "cancel":
        pair.receiver.release(room, 0, "cancelled")
    else:
        pair.sender.release(room, 0, "cancelled")
    pair.until(lambda _: pair.receiver.session.num_rooms == 0)
    pages = pair.target.kv.clone()
    held = [read for read in pair.agent().reads if read.is_held]
    assert not any(read.is_released for read in held)
    pair.fabric.is_held = False
    targets = {target for read in held for (target, _), _ in read.moves}
    pair.target.kv.copy_(pages)
    done = pair.hand_over()  # beside the held reads: other landing slots
    assert isinstance(done, Complete)
    pair.check_landed()
    fresh = [read for read in pair.agent().reads if read.is_done and not read.is_held][-NUM_BLOCKS:]
    assert targets.isdisjoint(target for read in fresh for (target, _), _ in read.moves)
    after = pair.target.kv.clone()
    for read in held:
        read.is_held = False
    pair.until(lambda _: all(read.is_released for read in held))
    assert torch.equal(pair.target.kv, after), "a late read touched a page"


def test_a_fabric_that_swallows_reads_costs_no_room(start):
    pair = start()
    pair.connect()
    pair.fabric.is_held = True
    pair.open()
    pair.until(lambda _: any(read.is_held for read in pair.agent().reads))
    held = [read for read in pair.agent().reads if read.is_held]
    events = []
    for _ in range(40):
        pair.now += STUCK_S / 10
        events += pair.run()
        time.sleep(0.002)
    (done,) = [event for event in events if isinstance(event, Complete | Lost)]
    assert isinstance(done, Complete)
    assert done.num_nixl_blocks == 0
    pair.check_landed()
    assert pair.wire.count(SlabUnusable) == 1
    assert pair.receiver.counters["shm_fallbacks"] == 1
    assert not any(read.is_released for read in held)
    assert "release list" not in pair.fabric.calls, "reads still use the lists"
    for read in held:
        read.is_held = False
    pair.until(lambda _: pair.fabric.calls.count("release list") == 2)
    assert pair.agent().registered == {}


def test_a_peer_that_is_lost_mid_read_gives_messages_and_is_said_once(start, caplog):
    pair = start()
    pair.connect()
    pair.fabric.is_held = True
    pair.open()
    pair.until(lambda _: any(read.is_held for read in pair.agent().reads))
    pair.agent().is_lost = True
    events = []
    for _ in range(30):
        pair.now += 0.1
        events += pair.run()
        time.sleep(0.002)
    (done,) = [event for event in events if isinstance(event, Complete | Lost)]
    assert isinstance(done, Complete)
    pair.check_landed()
    said = [record for record in caplog.records if record.message == "blocks take another way"]
    assert len(said) == 1


def test_a_changed_byte_is_read_again_and_never_announced(start):
    pair, times = start(), [1]

    def flip(data) -> None:
        if times[0] > 0:
            times[0] -= 1
            data[7] ^= 1

    pair.connect()
    pair.target.kv.zero_()
    pair.fabric.change = flip
    done = pair.hand_over()
    assert isinstance(done, Complete)
    pair.check_landed()
    assert pair.receiver.counters["digest_mismatches"] == 1


def test_bytes_that_are_wrong_every_time_end_the_room(start):
    pair = start()
    pair.connect()

    def flip(data) -> None:
        data[0] ^= 1

    pair.fabric.change = flip
    pair.open()
    events = pair.until(lambda events: any(isinstance(event, Complete | Lost) for event in events))
    (lost,) = [event for event in events if isinstance(event, Complete | Lost)]
    assert isinstance(lost, Lost)
    assert lost.kind == "DigestMismatch"
    assert not any(isinstance(event, Landed) for event in events)


@pytest.mark.parametrize("refused", [P, D])
def test_an_agent_that_cannot_be_opened_means_messages(start, refused, caplog):
    pair = start()
    pair.fabric.refuses = {refused}
    for _ in range(3):
        done = pair.hand_over()
        assert isinstance(done, Complete)
        assert done.num_nixl_blocks == 0
        pair.check_landed()
    pair.until(lambda _: pair.receiver.counters["shm_fallbacks"] == 1)
    assert pair.wire.count(SlabDenied) == (refused == P)
    assert pair.wire.count(SlabRequest) == (refused == P)
    assert any("no memory" in str(getattr(record, "fields", record.__dict__)) for record in caplog.records)


def test_a_peer_without_nixl_gets_messages(start):
    for options in ({"sender": ("zmq_blocks",)}, {"receiver": ("zmq_blocks",)}):
        pair = start(**options)
        assert pair.hand_over().num_nixl_blocks == 0
        pair.check_landed()
        assert pair.wire.count(SlabRequest) == 0
        assert pair.fabric.agents == {}, "no agent is opened, so no port either"


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": b"garbage"},
        {"metadata": b""},
        {"agent": "9" * 32},
        {"num_slots": 4096},
        {"slot_bytes": 8192},
    ],
)
def test_a_grant_that_is_malformed_is_refused_and_blocks_are_messages(start, change):
    pair = start()

    pair.wire.on_message = lambda message: [
        msgspec.structs.replace(message, **change) if isinstance(message, SlabGrant) else message
    ]
    pair.hand_over()
    pair.until(lambda _: pair.wire.count(SlabUnusable) == 1)
    done = pair.hand_over()
    assert isinstance(done, Complete)
    assert done.num_nixl_blocks == 0
    pair.check_landed()
    assert pair.receiver.counters["nixl_slabs"] == 0


def test_more_metadata_than_a_message_holds_is_denied(start):
    pair = start()
    pair.hand_over()
    pair.until(lambda _: P in pair.fabric.agents)
    pair.fabric.agents[P].metadata = lambda registered: b"x" * 7000
    second = pair.decode(D2, NIXL, pair.target)
    pair.until(lambda _: pair.wire.count(SlabGrant) >= 1)
    pair.hand_over(second)
    pair.until(lambda _: pair.wire.count(SlabDenied) == 1, second)
    second.close()


def test_prefill_out_of_slab_memory_denies_and_says_which_flag(start):
    pair = start(slab_bytes=6 * LAYOUT.block_bytes)  # for one pair
    pair.connect()
    second = pair.decode(D2, NIXL, pair.target)
    pair.hand_over(second)
    pair.until(lambda _: pair.wire.count(SlabDenied) == 1, second)
    (denied,) = [message for message in pair.wire.said if isinstance(message, SlabDenied)]
    assert "--slab-mb" in denied.reason
    assert pair.hand_over(second).num_nixl_blocks == 0
    second.close()


def test_memory_of_a_pair_that_ended_is_zeroed_and_serves_the_next_pair(start):
    pair = start(slab_bytes=6 * LAYOUT.block_bytes)
    pair.connect()
    regions = set(pair.fabric.agents[P].registered.values())
    pair.receiver.close()
    pair.wire.drop_receiver(pair.receiver)
    pair.now += 10.0
    pair.until(
        lambda _: pair.sender.counters["nixl_slabs"] == 0, second := pair.decode(D2, NIXL, pair.target)
    )
    pair.connect(second)  # its request may wait for the memory
    assert set(pair.fabric.agents[P].registered.values()) == regions, "no late reader meets freed memory"
    assert pair.fabric.agents[P].contents == [bytes(6 * LAYOUT.block_bytes)] * 2
    second.close()


def test_a_short_slab_that_ended_serves_again_beside_a_long_one(start):
    pair = start(slab_bytes=9 * LAYOUT.block_bytes)  # 6 slots, then 3
    for instances in ((D, D2), ("4" * 32, "5" * 32)):
        both = [pair.decode(instance, NIXL, pair.target) for instance in instances]
        for receiver in both:
            pair.connect(receiver)
        assert pair.sender.counters["nixl_slabs"] == 2
        for receiver in both:
            receiver.close()
            pair.wire.drop_receiver(receiver)
        pair.now += 10.0
        pair.until(lambda _: not pair.fabric.agents[P].registered)
    assert pair.wire.count(SlabDenied) == 0


def test_memory_without_metadata_is_not_left_registered(start, monkeypatch):
    def fail(agent, registered):
        raise SlabError("NIXL: nixlBackendError")

    monkeypatch.setattr(FakeAgent, "metadata", fail)
    pair = start()
    pair.hand_over()
    pair.until(lambda _: pair.wire.count(SlabDenied) == 1)
    assert pair.fabric.agents[P].registered == {}


def test_memory_of_a_lane_that_never_connected_is_unpinned(start, monkeypatch):
    def fail(agent, metadata):
        raise SlabError("NIXL: nixlMismatchError")

    monkeypatch.setattr(FakeAgent, "add_remote", fail)
    pair, pinned = start(), []

    def pin(memory):
        pinned.append(memory)
        return pinned.clear

    pair.receiver._nixl._pin = pin
    pair.hand_over()
    pair.until(lambda _: pair.wire.count(SlabUnusable) == 1)
    assert pinned == []


def test_reads_that_never_end_bind_the_memory_of_two_lanes_at_most(start):
    pair = start()
    pair.connect()
    pair.fabric.is_held = True
    pairs = pair.receiver._nixl._pairs
    for number in range(4):
        pair.open()  # asks for a lane
        if number < 2:
            pair.until(lambda _: any(one.lane and one.lane.is_connected for one in pairs.values()))
        pair.open()  # is stuck in it
        for _ in range(40):
            pair.now += STUCK_S / 10
            pair.run()
            time.sleep(0.002)
        pair.now += ASK_AGAIN_S
    assert pair.wire.count(SlabRequest) == 2
    assert len(pair.agent().registered) == 2


def test_no_slot_free_sends_the_block_as_a_message(start):
    pair = start()
    pair.connect()
    pair.fabric.is_held = True
    rooms = [pair.open() for _ in range(2)]
    pair.until(lambda _: sum(read.is_held for read in pair.agent().reads) >= 4)
    for room in rooms:
        pair.receiver.release(room, 0, "cancelled")
    pair.fabric.is_held = False
    done = [pair.hand_over() for _ in range(4)]
    assert all(isinstance(one, Complete) for one in done)
    pair.check_landed()


def test_a_block_of_a_slot_that_does_not_exist_ends_the_lane(start):
    pair = start()
    pair.connect()
    pair.wire.on_message = lambda message: [
        msgspec.structs.replace(message, slot=9999) if isinstance(message, SlabBlock) else message
    ]
    pair.open()
    events = []
    for _ in range(30):
        pair.now += 0.1
        events += pair.run()
        time.sleep(0.001)
    (done,) = [event for event in events if isinstance(event, Complete | Lost)]
    assert isinstance(done, Complete)
    pair.check_landed()


def test_a_quiet_lane_of_a_decode_worker_that_has_gone_is_dropped(start):
    pair = start()
    pair.connect()
    pair.wire.drop_receiver(pair.receiver)
    for _ in range(20):
        pair.now += 0.5
        pair.sender.turn()
    assert pair.sender.counters["nixl_slabs"] == 0


# --- the choice of the transport ----------------------------------------------------------------------------

ALL = ("cuda_slab", "shm", "nixl", "zmq_blocks")


def test_hosts_that_differ_use_nixl_and_one_host_never_does_by_choice():
    assert common_transports(ALL, ALL, is_near=False, is_clear=True) == NIXL
    assert common_transports(ALL, ALL, is_near=True, is_clear=True) == ("cuda_slab", "shm", "zmq_blocks")
    assert common_transports(ALL, NIXL, is_near=True, is_clear=True) == NIXL, "asked for by settings"
    assert common_transports(ALL, ("shm", "zmq_blocks"), is_near=False, is_clear=True)[-1] == "zmq_blocks"


def test_blocks_that_must_be_encrypted_never_take_nixl():
    for is_near in (False, True):
        assert "nixl" not in common_transports(ALL, ALL, is_near=is_near, is_clear=False)
    assert common_transports(NIXL, NIXL, is_near=False, is_clear=False) == ("zmq_blocks",)


@pytest.mark.parametrize(
    ("ciphers", "host", "chosen"),
    [
        (("crc32c",), "there", "nixl"),
        (("crc32c",), "here", "nixl"),  # neither names a local transport
        (("aes-128-gcm", "curve"), "there", "zmq_blocks"),
        (("curve",), "there", "zmq_blocks"),
    ],
)
def test_prefill_chooses_nixl_for_blocks_in_the_clear_only(ciphers, host, chosen):
    session = SenderSession(P, LAYOUT, ciphers=ciphers, transports=NIXL, host="here")
    hello = KVHello(
        instance=D, protocol=PROTOCOL_MAJOR, layout=LAYOUT, ciphers=ciphers, transports=NIXL, host=host
    )
    (welcome,) = session.receive("d", hello, 0.0)
    assert welcome.message.transport == chosen
    assert session.speaks("d", D, "nixl") == (chosen == "nixl")


def test_auto_takes_nixl_where_it_is_installed_with_rdma_and_clear_blocks(monkeypatch):
    monkeypatch.setattr(transport_names, "has_nixl", lambda: True)
    monkeypatch.setattr(transport_names, "rdma_devices", lambda: ["mlx5_0"])
    assert "nixl" in transports_of("auto", has_gpu=False, may_be_open=True)
    assert "nixl" not in transports_of("auto", has_gpu=False)
    with pytest.raises(ConfigError, match=r"encrypts nothing.*--trusted-network \(and --kv-cipher crc32c"):
        transports_of("nixl,zmq_blocks", has_gpu=False)
    monkeypatch.setattr(transport_names, "rdma_devices", lambda: [])
    assert "nixl" not in transports_of("auto", has_gpu=False, may_be_open=True), "over tcp it is slower"
    assert transports_of("nixl,zmq_blocks", has_gpu=False, may_be_open=True) == NIXL


def test_ports_are_open_only_where_the_operator_trusts_network_and_blocks():
    sealed, clear = ("aes-128-gcm", "curve"), ("crc32c",)
    assert transport_names.may_be_open(clear, trusted_network=True)
    assert not transport_names.may_be_open(clear, trusted_network=False)
    assert not transport_names.may_be_open(sealed, trusted_network=True)


def test_naming_nixl_without_its_wheel_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(transport_names, "has_nixl", lambda: False)
    assert "pip install 'baton-serve[nixl]', or write zmq_blocks" in transports_fault("nixl,zmq_blocks")
    monkeypatch.setattr(transport_names, "nixl_modules", lambda cuda: ("no_such_module",))
    assert not transport_names.has_nixl()


def test_an_agent_without_a_wheel_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr("baton.kvtransfer.transports.nixl_agent.nixl_modules", lambda cuda: ())
    with pytest.raises(SlabError, match=r"pip install 'baton-serve\[nixl\]'"):
        open_nixl("a" * 32)
