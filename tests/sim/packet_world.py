"""The common part of the worlds in which hand-offs are simulated: dice, clock, network and outcomes."""

import hashlib
import random

import torch
from baton.kvtransfer.protocol.sender import EARLY_S
from baton.kvtransfer.transports.fake import FakeNetwork


class PacketWorld:
    """A world has `fault`, `turn` and `compute`, and workers in `prefills` with `rooms`."""

    def __init__(self, seed, faults):
        self.rng = random.Random(seed)
        self.noise = torch.Generator().manual_seed(seed)
        self.faults = faults
        self.now = 100.0
        self.trace = hashlib.sha256()
        self.outcomes: dict[str, int] = {}
        self.num_rooms = 0
        self.network = FakeNetwork(self.fault)

    def clock(self) -> float:
        return self.now

    def deliver_some(self, limit: int) -> None:
        for _ in range(min(limit, len(self.network.packets))):
            if not self.network.packets:  # a packet may have cut others
                return
            is_late = self.rng.random() < self.faults.reorder
            self.network.deliver(self.rng.randrange(len(self.network.packets)) if is_late else 0)

    def note(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.trace.update(f"{outcome} {self.now:.3f}".encode())

    def settle(self, leases: int) -> None:
        """The faults stop, prefill computes to the end, and time passes until everything must be over: the
        time in which an Attach waits for its offer, and `leases` times 5 s."""
        self.faults = type(self.faults)()
        for _ in range(50):
            for prefill in self.prefills:
                for room in list(prefill.rooms.values()):
                    if room.ready < room.num_tokens:
                        self.compute(room, room.num_tokens)
            self.network.deliver_all()
            self.turn()
            self.now += 0.2
        self.now += EARLY_S
        for _ in range(leases):
            self.turn()
            self.network.deliver_all()
            self.now += 5.0
