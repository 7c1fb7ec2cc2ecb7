"""The simulated cluster of `test_rank_sim`: workers of several ranks, each with an endpoint and a pool.

The network between them is faulty, channels within a worker are late, and ranks die. Prefill's pages are
overwritten on every rank as soon as they are free; decode's are compared byte for byte with the slices of the
logical KV as they land.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import torch
from baton.cluster.errors import LocalProtocolError
from baton.kvtransfer.protocol.layout import KVLayout
from baton.kvtransfer.protocol.rank_pairs import Shard
from baton.kvtransfer.ranks.agent import RankAgent
from baton.kvtransfer.ranks.channel import RankLost
from baton.kvtransfer.ranks.ranked_transport import RankedTransport
from baton.kvtransfer.transport import (
    Complete,
    Dropped,
    Freed,
    Landed,
    Lost,
    Offer,
    Planes,
    PullRequest,
    Released,
)
from baton.kvtransfer.transports.fake import FakeReceiver, FakeSender, Packet
from baton.tests.sim.draws import flipped, hex_id
from baton.tests.sim.packet_world import PacketWorld
from baton.tests.sim.rank_pages import feature_bytes, layout_of_ranks, logical_pages, rank_pages

NUM_PAGES = 32
STEPS = 100
KINDS = {"TransferTimeout", "DigestMismatch", "PeerLost", "HandoffAborted"}


class QuietSender(FakeSender):
    """Delivers packets when the world says so."""

    def poll(self, timeout):
        return self.turn()


class QuietReceiver(FakeReceiver):
    """Delivers packets when the world says so."""

    def poll(self, timeout):
        return self.turn()


class LateChannel:
    """One end of a channel whose messages arrive a few at a time."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.inbox, self.is_lost = rng, deque(), False
        self.other: LateChannel = self
        self.fds, self.is_full = (), False

    def send(self, message: bytes) -> None:
        if self.other.is_lost:
            raise RankLost("its process has ended")
        self.other.inbox.append(message)

    def receive(self) -> list[bytes]:
        messages = [self.inbox.popleft() for _ in range(self.rng.randint(0, len(self.inbox)))]
        if self.other.is_lost and not self.inbox and not messages:
            raise RankLost("its process has ended")
        return messages

    def close(self) -> None:
        self.is_lost = True


def channels(rng: random.Random) -> tuple[LateChannel, LateChannel]:
    one, other = LateChannel(rng), LateChannel(rng)
    one.other, other.other = other, one
    return one, other


@dataclass(frozen=True)
class RankFaults:
    """Probabilities per packet, and per step where it says so."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    flip: float = 0.0
    cut: float = 0.0  # per step
    restart: float = 0.0  # per step: a whole worker
    kill: float = 0.0  # per step: one rank of a worker
    cancel: float = 0.0  # per step
    silence: float = 0.0  # per step: one pair of ranks hears nothing of each other for good


@dataclass
class RankWorker:
    """A worker: rank 0's transport, the agents of the others, and the bookkeeping of an owner."""

    name: str
    instance: str
    num_ranks: int
    is_decode: bool
    transport: RankedTransport = None
    agents: dict[int, RankAgent] = field(default_factory=dict)
    ends: list = field(default_factory=list)  # endpoints of all ranks
    pools: list[torch.Tensor] = field(default_factory=list)
    untouched: list[torch.Tensor] = field(default_factory=list)
    features: torch.Tensor = None
    free: list[int] = field(default_factory=lambda: list(range(1, NUM_PAGES)))
    rooms: dict = field(default_factory=dict)
    leaving: dict = field(default_factory=dict)  # cancelled rooms whose pages are not free yet

    def endpoint(self, rank: int) -> str:
        return f"{self.name}r{rank}"


@dataclass
class RankRoom:
    name: str
    epoch: int
    num_tokens: int
    have: int
    first_token: int
    prefill: RankWorker
    decode: RankWorker
    source_pages: list[int]
    target_pages: list[int]
    features: torch.Tensor
    logical: torch.Tensor
    content: torch.Tensor  # features
    ready: int = 0


class RankWorld(PacketWorld):
    """Two prefill and two decode workers with numbers of ranks of their own."""

    def __init__(self, seed: int, faults: RankFaults, ranks: tuple[int, ...] = (1, 2, 4)) -> None:
        super().__init__(seed, faults)
        self.mute: set[tuple[str, bool]] = set()
        self.layout = layout_of_ranks(
            num_kv_heads=self.rng.choice([1, 2, 4]),
            head_dim=self.rng.choice([8, 160]),
            has_features=self.rng.random() < 0.5,
            block_bytes=self.rng.choice([4096, 5000]),
        )
        self.prefills = [self.new_worker(f"p{i}", self.rng.choice(ranks), False) for i in range(2)]
        self.decodes = [self.new_worker(f"d{i}", self.rng.choice(ranks), True) for i in range(2)]

    # --- workers --------------------------------------------------------------------------------------------

    def new_worker(self, name: str, num_ranks: int, is_decode: bool) -> RankWorker:
        worker = RankWorker(name, hex_id(self.rng), num_ranks, is_decode)
        if self.layout.feature_width and not is_decode:
            worker.features = self.random_features(NUM_PAGES)
        links = {}
        for rank in range(num_ranks):
            shard = Shard(rank, num_ranks)
            shape = NUM_PAGES, KVLayout.of_rank(self.layout, shard).kv_page_bytes
            worker.pools.append(torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.noise))
            worker.ends.append(self.new_end(worker, shard))
        worker.untouched = [pool.clone() for pool in worker.pools]
        for rank in range(1, num_ranks):
            links[rank], theirs = channels(self.rng)
            endpoint = "" if is_decode else worker.endpoint(rank)
            worker.agents[rank] = RankAgent(
                rank, worker.ends[rank], theirs, endpoint=endpoint, clock=self.clock
            )

        def told(endpoints):
            worker.ends[0].session.rank_endpoints = (worker.endpoint(0), *endpoints)

        worker.transport = RankedTransport(
            worker.ends[0], links, num_heads=self.layout.num_kv_heads, is_decode=is_decode, clock=self.clock,
            on_endpoints=(lambda endpoints: None) if is_decode else told,
        )  # fmt: skip
        while not worker.transport.is_ready:
            worker.transport.poll(0.0)
        return worker

    def new_end(self, worker: RankWorker, shard: Shard) -> FakeSender | FakeReceiver:
        features = worker.features if shard.rank == 0 else None
        planes = Planes(kv=worker.pools[shard.rank], features=features)
        given = {"clock": self.clock, "shard": shard}
        if worker.is_decode:
            return QuietReceiver(self.network, worker.instance, self.layout, planes, **given)
        endpoint = worker.endpoint(shard.rank)
        return QuietSender(self.network, endpoint, worker.instance, self.layout, planes, **given)

    def random_features(self, rows: int) -> torch.Tensor:
        shape = rows, feature_bytes(self.layout)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.noise)

    def kill_rank(self, worker: RankWorker, rank: int) -> None:
        """The process of a rank ends."""
        end = worker.ends[rank]
        if worker.is_decode:
            self.network.drop_receiver(end)
        else:
            self.network.unlisten(worker.endpoint(rank))
        if rank in worker.agents:
            worker.agents.pop(rank)._channel.close()

    def restart(self, worker: RankWorker) -> None:
        """The worker ends, with all ranks, and another one takes its place."""
        for rank in range(worker.num_ranks):
            self.kill_rank(worker, rank)
        group = self.decodes if worker.is_decode else self.prefills
        group[group.index(worker)] = self.new_worker(worker.name, worker.num_ranks, worker.is_decode)

    # --- the network ----------------------------------------------------------------------------------------

    def fault(self, packet: Packet) -> list[Packet]:
        if packet.link in self.mute or self.rng.random() < self.faults.loss:
            return []
        packets = [packet]
        if self.rng.random() < self.faults.duplicate:
            packets.append(packet)
        return [self.spoil(p) for p in packets]

    def spoil(self, packet: Packet) -> Packet:
        frames = list(packet.frames)
        if len(frames) == 2 and self.rng.random() < self.faults.flip:
            which = self.rng.randrange(2)
            frames[which] = flipped(frames[which], self.rng)
        return Packet(packet.link, packet.is_up, tuple(frames))

    # --- what the workers do --------------------------------------------------------------------------------

    def open_room(self) -> None:
        prefill, decode = self.rng.choice(self.prefills), self.rng.choice(self.decodes)
        size = self.layout.page_size
        num_tokens = self.rng.randint(1, 6 * size)
        have = self.rng.randint(0, num_tokens // size) * size
        num_pages = -(-num_tokens // size)
        num_targets = num_pages - have // size
        if len(prefill.free) < num_pages or len(decode.free) < num_targets:
            return
        room = RankRoom(
            name=hex_id(self.rng),
            epoch=self.rng.randrange(3),
            num_tokens=num_tokens,
            have=have,
            first_token=self.rng.randrange(1000),
            prefill=prefill,
            decode=decode,
            source_pages=[prefill.free.pop() for _ in range(num_pages)],
            target_pages=[decode.free.pop() for _ in range(num_targets)],
            features=torch.zeros(num_targets, feature_bytes(self.layout), dtype=torch.uint8),
            logical=logical_pages(self.layout, num_pages, self.noise),
            content=self.random_features(num_pages),
        )
        key = (room.name, room.epoch)
        prefill.rooms[key] = decode.rooms[key] = room
        self.num_rooms += 1
        parts = [lambda: self.offer(room), lambda: self.pull(room)]
        self.rng.shuffle(parts)
        for part in parts:
            part()
            self.deliver_some(self.rng.randint(0, 3))

    def offer(self, room: RankRoom) -> None:
        pages = tuple(room.source_pages)
        offer = Offer(room=room.name, epoch=room.epoch, num_tokens=room.num_tokens, pages=pages)
        try:
            room.prefill.transport.offer(offer)
        except LocalProtocolError:
            self.free_source(room)

    def pull(self, room: RankRoom) -> None:
        request = PullRequest(
            room=room.name,
            epoch=room.epoch,
            num_tokens=room.num_tokens,
            have=room.have,
            pages=tuple(room.target_pages),
            features=room.features if self.layout.feature_width else None,
            endpoint=room.prefill.endpoint(0),
            peer_instance=room.prefill.instance,
        )
        try:
            room.decode.transport.pull(request)
        except LocalProtocolError:
            self.free_target(room)

    def compute(self, room: RankRoom, tokens: int) -> None:
        """All ranks finish some tokens; their pages get their slices."""
        size = self.layout.page_size
        ready = min(room.num_tokens, room.ready + tokens)
        prefill, which = room.prefill, range(room.ready // size, -(-ready // size))
        for rank, pool in enumerate(prefill.pools):
            mine = rank_pages(self.layout, room.logical, Shard(rank, prefill.num_ranks))
            for page in which:
                pool[room.source_pages[page]] = mine[page]
        for page in which if prefill.features is not None else ():
            prefill.features[room.source_pages[page]] = room.content[page]
        room.ready = ready
        first_token = room.first_token if ready == room.num_tokens else None
        prefill.transport.advance(room.name, room.epoch, ready, first_token)

    def free_source(self, room: RankRoom) -> None:
        """Prefill's pages are free and get other content at once, on all ranks."""
        prefill = room.prefill
        prefill.rooms.pop((room.name, room.epoch), None)
        for pool in prefill.pools:
            pool[room.source_pages] ^= 0x5A
        prefill.free += room.source_pages

    def free_target(self, room: RankRoom) -> None:
        decode = room.decode
        self.check_untouched(decode)
        decode.rooms.pop((room.name, room.epoch), None)
        decode.free += room.target_pages
        for pool, untouched in zip(decode.pools, decode.untouched, strict=True):
            untouched[room.target_pages] = pool[room.target_pages]

    def cancel(self) -> None:
        worker = self.rng.choice([*self.prefills, *self.decodes])
        if worker.rooms:
            key = self.rng.choice(list(worker.rooms))
            worker.leaving[key] = worker.rooms.pop(key)
            worker.transport.release(*key, "cancel")

    # --- what the owner sees --------------------------------------------------------------------------------

    def turn(self) -> None:
        for worker in (*self.decodes, *self.prefills):
            for agent in list(worker.agents.values()):
                agent.turn()
            for event in worker.transport.poll(0.0):
                self.heard(worker, event)

    def heard(self, worker: RankWorker, event: object) -> None:
        key = (event.room, event.epoch)
        self.note(
            f"{'decode' if worker.is_decode else 'prefill'} {getattr(event, 'kind', type(event).__name__)}"
        )
        if isinstance(event, Freed):
            (self.free_target if worker.is_decode else self.free_source)(worker.leaving[key])
            del worker.leaving[key]
            return
        room = worker.rooms[key]
        if isinstance(event, Landed):
            self.check_landed(room, event.tokens)
        elif isinstance(event, Complete):
            assert event.first_token == room.first_token
            self.check_landed(room, room.num_tokens)
            self.free_target(room)
        elif isinstance(event, Lost):
            assert event.kind in KINDS, event
            self.free_target(room)
        else:
            assert isinstance(event, Released | Dropped), event
            if isinstance(event, Released) and key in room.decode.rooms and room.decode in self.decodes:
                self.check_landed(room, room.num_tokens)  # on all ranks, whether or not rank 0 knows
            self.free_source(room)

    def check_landed(self, room: RankRoom, tokens: int) -> None:
        size = self.layout.page_size
        skipped = room.have // size
        landed = -(-tokens // size) - skipped
        decode = room.decode
        for rank, pool in enumerate(decode.pools):
            wanted = rank_pages(self.layout, room.logical, Shard(rank, decode.num_ranks))
            got = pool[room.target_pages[:landed]]
            assert torch.equal(got, wanted[skipped : skipped + landed]), f"rank {rank} has other bytes"
        if self.layout.feature_width:
            assert torch.equal(room.features[:landed], room.content[skipped : skipped + landed])

    def check_untouched(self, decode: RankWorker) -> None:
        """Pages of no open room never change, on any rank."""
        free = torch.ones(NUM_PAGES, dtype=torch.bool)
        for room in (*decode.rooms.values(), *decode.leaving.values()):
            free[room.target_pages] = False
        for rank, (pool, untouched) in enumerate(zip(decode.pools, decode.untouched, strict=True)):
            assert torch.equal(pool[free], untouched[free]), f"rank {rank} wrote into pages of nobody"

    # --- a run ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        dice, faults = self.rng.random(), self.faults
        if dice < 0.15:
            self.open_room()
        elif dice < 0.45:
            unfinished = [r for p in self.prefills for r in p.rooms.values() if r.ready < r.num_tokens]
            if unfinished:
                self.compute(self.rng.choice(unfinished), self.rng.randint(1, 12))
        elif dice < 0.85:
            self.deliver_some(self.rng.randint(10, 60))
        else:
            self.now += self.rng.choice([0.01, 0.05, 0.2])
        workers = [*self.prefills, *self.decodes]
        if self.rng.random() < faults.cancel:
            self.cancel()
        if self.rng.random() < faults.cut:
            worker = self.rng.choice(self.prefills)
            self.network.cut(worker.endpoint(self.rng.randrange(worker.num_ranks)))
        if self.rng.random() < faults.silence and self.network._links:
            self.mute.add(self.rng.choice(sorted(self.network._links)))
        if self.rng.random() < faults.kill:
            worker = self.rng.choice(workers)
            if worker.num_ranks > 1:
                self.kill_rank(worker, self.rng.randrange(1, worker.num_ranks))
                self.note("killed")
        for worker in workers:  # its supervisor takes a worker down that lacks a rank
            lacks = len(worker.agents) < worker.num_ranks - 1
            if self.rng.random() < max(faults.restart, 0.1 * lacks):
                self.restart(worker)
        self.turn()

    def settle(self) -> None:
        self.mute.clear()
        super().settle(leases=12)

    def check_nothing_is_left(self) -> None:
        for worker in (*self.prefills, *self.decodes):
            assert not worker.rooms, worker.transport
            assert not worker.leaving
            assert worker.transport.join.num_rooms == 0
            alive = [0, *worker.agents]
            assert [worker.ends[rank].session.num_rooms for rank in alive] == [0] * len(alive)
            assert sorted(worker.free) == list(range(1, NUM_PAGES))
            if worker.is_decode:
                self.check_untouched(worker)


def run(seed: int, faults: RankFaults, ranks: tuple[int, ...] = (1, 2, 4)) -> RankWorld:
    world = RankWorld(seed, faults, ranks)
    for _ in range(STEPS):
        world.step()
    world.settle()
    world.check_nothing_is_left()
    return world
