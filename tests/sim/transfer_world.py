"""The simulated cluster of `test_transfer_sim`: real endpoints, a faulty network and a virtual clock.

Prefill's pages are overwritten as soon as they are free, decode's are compared byte for byte as they land.
"""

from dataclasses import dataclass, field

import torch
from baton.cluster.net.transport_names import TRANSPORTS, ZMQ_BLOCKS
from baton.cluster.protocol.messages import Layout
from baton.engine.kv.page_order import PageOrder
from baton.kvtransfer.memory.host_device import HostDevice
from baton.kvtransfer.protocol.layout import KVLayout
from baton.kvtransfer.transport import Complete, Dropped, Landed, Lost, Offer, Planes, PullRequest, Released
from baton.kvtransfer.transports.fake import FakeReceiver, FakeSender, Packet
from baton.tests.sim.draws import flipped, hex_id
from baton.tests.sim.packet_world import PacketWorld

NUM_PAGES = 40
STEPS = 160
KINDS = {"TransferTimeout", "DigestMismatch", "PeerLost", "HandoffAborted"}


@dataclass
class Faults:
    """Probabilities per packet, and per step where it says so; drawn anew for each seed."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    flip: float = 0.0
    garbage: float = 0.0
    cut: float = 0.0  # per step
    restart: float = 0.0  # per step
    cancel: float = 0.0  # per step
    plant: float = 0.0  # per step: a byte of a slab changes


@dataclass
class Prefill:
    endpoint: str
    instance: str
    sender: FakeSender
    planes: Planes
    device: HostDevice | None = None
    free: list[int] = field(default_factory=lambda: list(range(1, NUM_PAGES)))
    rooms: dict[tuple[str, int], "Room"] = field(default_factory=dict)


@dataclass
class Decode:
    receiver: FakeReceiver
    planes: Planes
    device: HostDevice | None = None
    free: list[int] = field(default_factory=lambda: list(range(1, NUM_PAGES)))
    rooms: dict[tuple[str, int], "Room"] = field(default_factory=dict)
    untouched: torch.Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass
class Room:
    name: str
    epoch: int
    num_tokens: int
    have: int
    first_token: int
    prefill: Prefill
    decode: Decode
    source_pages: list[int]
    target_pages: list[int]
    features: torch.Tensor
    content: tuple[torch.Tensor, torch.Tensor]  # what the pages held when prefill finished them
    ready: int = 0
    is_underway: bool = False  # the last forward was launched, and is not announced


class World(PacketWorld):
    """Two prefill and two decode workers, with the owner's bookkeeping that a transport must keep right.

    With `has_devices`, blocks take slabs of device memory, for which shared memory of the host stands.
    """

    def __init__(self, seed: int, faults: Faults, *, has_devices: bool = False) -> None:
        super().__init__(seed, faults)
        self.has_devices = has_devices
        ids = self.rng.choice([[], [0, 3]])
        self.layout = Layout(
            fingerprint="sim",
            dtype="bfloat16",
            page_size=4,
            num_layers=2,
            num_kv_heads=1,
            head_dim=self.rng.choice([8, 64, 160]),
            feature_ids=ids,
            feature_width=len(ids) * (64 if has_devices else 60),
            block_bytes=self.rng.choice([4096, 4112 if has_devices else 5000]),
        )
        self.prefills = [self.new_prefill(f"p{i}") for i in range(2)]
        self.decodes = [self.new_decode() for _ in range(2)]

    def random_bytes(self, rows: int, width: int) -> torch.Tensor:
        return torch.randint(0, 256, (rows, width), dtype=torch.uint8, generator=self.noise)

    def random_planes(self) -> Planes:
        layout = KVLayout(self.layout)
        features = self.random_bytes(NUM_PAGES, layout.feature_page_bytes) if layout.has_features else None
        return Planes(kv=self.random_bytes(NUM_PAGES, layout.kv_page_bytes), features=features)

    def new_prefill(self, endpoint: str) -> Prefill:
        instance, planes = hex_id(self.rng), self.random_planes()
        device = self.new_device()
        sender = FakeSender(
            self.network, endpoint, instance, self.layout, planes, clock=self.clock, device=device,
            transports=self.transports,
        )  # fmt: skip
        return Prefill(endpoint, instance, sender, planes, device)

    def new_decode(self) -> Decode:
        planes = Planes(kv=self.random_planes().kv, features=None)
        device, slot_bytes = self.new_device(), 3 * self.layout.block_bytes
        receiver = FakeReceiver(
            self.network, hex_id(self.rng), self.layout, planes, clock=self.clock, device=device,
            transports=self.transports, slot_bytes=slot_bytes,
        )  # fmt: skip
        return Decode(receiver, planes, device, untouched=planes.kv.clone())

    @property
    def transports(self) -> tuple[str, ...]:
        return TRANSPORTS if self.has_devices else (ZMQ_BLOCKS,)

    def new_device(self) -> HostDevice | None:
        """A device whose moves are late by as many polls as the seed says."""
        if not self.has_devices:
            return None
        return HostDevice(PageOrder(NUM_PAGES), polls=self.rng.randint(1, 4))

    # --- the network ----------------------------------------------------------------------------------------

    def fault(self, packet: Packet) -> list[Packet]:
        if self.rng.random() < self.faults.loss:
            return []
        packets = [packet]
        if self.rng.random() < self.faults.duplicate:
            packets.append(packet)
        return [self.spoil(p) for p in packets]

    def spoil(self, packet: Packet) -> Packet:
        frames = list(packet.frames)
        if self.rng.random() < self.faults.garbage:
            frames[0] = self.rng.randbytes(self.rng.randint(0, 40))
        elif len(frames) == 2 and self.rng.random() < self.faults.flip:
            which = self.rng.randrange(2)
            frames[which] = flipped(frames[which], self.rng)
        return Packet(packet.link, packet.is_up, tuple(frames))

    # --- what the workers do --------------------------------------------------------------------------------

    def open_room(self, name: str | None = None, epoch: int = 0) -> None:
        prefill, decode = self.rng.choice(self.prefills), self.rng.choice(self.decodes)
        size = self.layout.page_size
        num_tokens = self.rng.randint(1, 8 * size)
        have = self.rng.randint(0, num_tokens // size) * size
        num_pages = -(-num_tokens // size)
        num_targets = num_pages - have // size
        if len(prefill.free) < num_pages or len(decode.free) < num_targets:
            return
        layout = KVLayout(self.layout)
        room = Room(
            name=name or hex_id(self.rng),
            epoch=epoch,
            num_tokens=num_tokens,
            have=have,
            first_token=self.rng.randrange(1000),
            prefill=prefill,
            decode=decode,
            source_pages=[prefill.free.pop() for _ in range(num_pages)],
            target_pages=[decode.free.pop() for _ in range(num_targets)],
            features=torch.zeros(num_targets, layout.feature_page_bytes, dtype=torch.uint8),
            content=(
                self.random_bytes(num_pages, layout.kv_page_bytes),
                self.random_bytes(num_pages, layout.feature_page_bytes),
            ),
        )
        key = (room.name, epoch)
        prefill.rooms[key] = decode.rooms[key] = room
        self.num_rooms += 1
        parts = [lambda: self.offer(room), lambda: self.pull(room)]
        self.rng.shuffle(parts)  # the Attach may come before the offer
        for part in parts:
            part()
            self.deliver_some(self.rng.randint(0, 3))

    def offer(self, room: Room) -> None:
        offer = Offer(
            room=room.name, epoch=room.epoch, num_tokens=room.num_tokens, pages=tuple(room.source_pages)
        )
        room.prefill.sender.offer(offer)

    def pull(self, room: Room) -> None:
        room.decode.receiver.pull(
            PullRequest(
                room=room.name,
                epoch=room.epoch,
                num_tokens=room.num_tokens,
                have=room.have,
                pages=tuple(room.target_pages),
                features=room.features if self.layout.feature_width else None,
                endpoint=room.prefill.endpoint,
                peer_instance=room.prefill.instance,
            )
        )

    def compute(self, room: Room, tokens: int) -> None:
        """Prefill finishes some tokens: their pages get their content, and it is announced.

        With devices, the last forward of a prompt may be announced later than it is launched.
        """
        size = self.layout.page_size
        ready = room.num_tokens if room.is_underway else min(room.num_tokens, room.ready + tokens)
        last_page = -(-ready // size)
        for page in range(room.ready // size, last_page):
            room.prefill.planes.kv[room.source_pages[page]] = room.content[0][page]
            if room.prefill.planes.features is not None:
                room.prefill.planes.features[room.source_pages[page]] = room.content[1][page]
        if self.has_devices and ready == room.num_tokens and not room.is_underway and self.rng.random() < 0.6:
            room.is_underway = True
            room.prefill.sender.launched(room.name, room.epoch, room.ready, ready)
            return
        room.ready = ready
        first_token = room.first_token if ready == room.num_tokens else None
        room.prefill.sender.advance(room.name, room.epoch, ready, first_token)

    def free_source(self, room: Room) -> None:
        """Prefill's pages are free and get other content at once."""
        del room.prefill.rooms[(room.name, room.epoch)]
        for page in room.source_pages:
            room.prefill.planes.kv[page] ^= 0x5A
        room.prefill.free += room.source_pages

    def free_target(self, room: Room) -> None:
        self.check_untouched(room.decode)
        del room.decode.rooms[(room.name, room.epoch)]
        room.decode.free += room.target_pages
        room.decode.untouched[room.target_pages] = room.decode.planes.kv[room.target_pages]

    def cancel(self) -> None:
        side = self.rng.choice([*self.prefills, *self.decodes])
        if not side.rooms:
            return
        room = self.rng.choice(list(side.rooms.values()))
        if isinstance(side, Prefill):
            side.sender.release(room.name, room.epoch, "cancel")
            self.free_source(room)
        else:
            side.receiver.release(room.name, room.epoch, "cancel")
            self.free_target(room)

    def restart(self) -> None:
        if self.rng.random() < 0.5:
            i = self.rng.randrange(2)
            self.network.unlisten(self.prefills[i].endpoint)
            self.bury(self.prefills[i].device, self.prefills[i].sender)
            self.prefills[i] = self.new_prefill(self.prefills[i].endpoint)
        else:
            i = self.rng.randrange(2)
            self.network.drop_receiver(self.decodes[i].receiver)
            self.bury(self.decodes[i].device, self.decodes[i].receiver)
            self.decodes[i] = self.new_decode()

    def bury(self, device: HostDevice | None, end: FakeSender | FakeReceiver) -> None:
        """What the kernel does for a killed process: its connections and its memory end, its moves do not."""
        if device is None:
            return
        device._queue.clear()
        if isinstance(end, FakeSender):
            assert end._device_slabs is not None
            slabs = [lane.slab for lane in end._device_slabs._lanes.values()] + end._device_slabs._ended
            end._slabs.close()  # shared memory
        else:
            slabs = [asked.slab for asked in end._slabs._asked.values() if asked.slab is not None]
            if end._slabs._door is not None:
                end._slabs._door.close()
        for slab in slabs:
            slab.connection.close()
        device.die()

    def plant(self) -> None:
        """Changes a byte of device memory that prefill shares."""
        device = self.rng.choice(self.prefills).device
        assert device is not None
        if device._owned:
            memory = self.rng.choice(list(device._owned.values()))
            memory.map[self.rng.randrange(len(memory.map))] ^= 1 << self.rng.randrange(8)

    # --- what the owner sees --------------------------------------------------------------------------------

    def turn(self) -> None:
        for decode in self.decodes:  # first: a Release must find its Complete
            for event in decode.receiver.turn():
                self.decode_event(decode, event)
        for prefill in self.prefills:
            for event in prefill.sender.turn():
                assert isinstance(event, Released | Dropped)
                room = prefill.rooms[(event.room, event.epoch)]
                if isinstance(event, Released):
                    is_open = (event.room, event.epoch) in room.decode.rooms
                    has_died = (
                        room.decode not in self.decodes
                    )  # behind its Release, before its owner was told
                    assert has_died or not is_open, "released before decode had everything"
                self.note("prefill " + type(event).__name__)
                self.free_source(room)

    def decode_event(self, decode: Decode, event: object) -> None:
        assert isinstance(event, Landed | Complete | Lost)
        room = decode.rooms[(event.room, event.epoch)]
        if isinstance(event, Landed):
            self.check_landed(room, event.tokens)
            return
        if isinstance(event, Complete):
            assert event.first_token == room.first_token
            self.check_landed(room, room.num_tokens)
            if event.num_device_blocks:
                self.note("by device memory")
        else:
            assert event.kind in KINDS, event
        self.note("decode " + (event.kind if isinstance(event, Lost) else "Complete"))
        self.free_target(room)

    def check_landed(self, room: Room, tokens: int) -> None:
        size = self.layout.page_size
        skipped = room.have // size
        landed = -(-tokens // size) - skipped
        got = room.decode.planes.kv[room.target_pages[:landed]]
        assert torch.equal(got, room.content[0][skipped : skipped + landed])
        if self.layout.feature_width:
            assert torch.equal(room.features[:landed], room.content[1][skipped : skipped + landed])

    def check_untouched(self, decode: Decode) -> None:
        """Pages of no open room never change."""
        free = torch.ones(NUM_PAGES, dtype=torch.bool)
        for room in decode.rooms.values():
            free[room.target_pages] = False
        assert torch.equal(decode.planes.kv[free], decode.untouched[free])

    # --- a run ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        dice = self.rng.random()
        if dice < 0.15:
            self.open_room()
        elif dice < 0.45:
            unfinished = [r for p in self.prefills for r in p.rooms.values() if r.ready < r.num_tokens]
            if unfinished:
                self.compute(self.rng.choice(unfinished), self.rng.randint(1, 12))
        elif dice < 0.85:
            self.deliver_some(self.rng.randint(1, 20))
        else:
            self.now += self.rng.choice([0.01, 0.05, 0.2])
        if self.rng.random() < self.faults.cancel:
            self.cancel()
        if self.rng.random() < self.faults.cut:
            self.network.cut(self.rng.choice(self.prefills).endpoint)
        if self.rng.random() < self.faults.restart:
            self.restart()
        if self.rng.random() < self.faults.plant:
            self.plant()
        self.turn()

    def check_nothing_is_left(self) -> None:
        for side in (*self.prefills, *self.decodes):
            assert side.device is None or side.device.num_bytes == 0, f"{side.device} holds memory"
        for prefill in self.prefills:
            assert not prefill.rooms
            assert prefill.sender.session.num_rooms == 0
            assert sorted(prefill.free) == list(range(1, NUM_PAGES))
            assert "early=0" in repr(prefill.sender.session)
        for decode in self.decodes:
            self.check_untouched(decode)
            assert not decode.rooms
            assert decode.receiver.session.num_rooms == 0
            assert sorted(decode.free) == list(range(1, NUM_PAGES))


def run(seed: int, faults: Faults, *, has_devices: bool = False) -> World:
    world = World(seed, faults, has_devices=has_devices)
    for _ in range(STEPS):
        world.step()
    world.settle(leases=4)
    world.check_nothing_is_left()
    for decode in world.decodes:
        decode.receiver.close()
    for prefill in world.prefills:
        prefill.sender.close()
    return world
