"""Both ends of a transport in one process, joined by a list of frames that a test can watch, lose or change.

Sessions, codec, digests and memory are the real ones. Only the wire is replaced. The caller supplies the
clock, and messages move only in `poll` and `FakeNetwork.deliver`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...cluster.errors import PeerLost
from ...cluster.net.transport_names import ZMQ_BLOCKS
from ...cluster.protocol.messages import Layout
from ...cluster.security.ciphers import CRC32C
from ..memory.blocks import Payload
from ..memory.device import Device
from ..protocol.rank_pairs import WHOLE, Shard
from ..protocol.session import LEASE_S, WINDOW, Peer
from ..transport import Planes, TransportEvent
from .cuda_slab import DEVICE_SLAB_BYTES, SLOT_BYTES
from .endpoint import Clock, Delivered, Delivery
from .nixl_agent import OpenAgent, open_nixl
from .receiver_endpoint import ReceiverEndpoint
from .sender_endpoint import SenderEndpoint
from .shm import SLAB_BYTES


@dataclass(frozen=True)
class Packet:
    """One message under way on connection `link`; `is_up`: from decode to prefill."""

    link: str
    is_up: bool
    frames: tuple[bytes, ...]


Fault = Callable[[Packet], Sequence[Packet]]


class FakeNetwork:
    """The messages under way, in order. `fault` maps each delivered packet to the packets that arrive."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.packets: list[Packet] = []
        self.fault = fault
        self._senders: dict[str, FakeSender] = {}  # by endpoint
        self._links: dict[str, tuple[str, FakeReceiver]] = {}  # link -> endpoint, decode's end
        self._num_links = 0

    def __repr__(self) -> str:
        num_senders, num_links = len(self._senders), len(self._links)
        return f"FakeNetwork(senders={num_senders}, links={num_links}, packets={len(self.packets)})"

    def listen(self, endpoint: str, sender: "FakeSender") -> None:
        """Registers prefill's end at `endpoint`."""
        self._senders[endpoint] = sender

    def unlisten(self, endpoint: str) -> None:
        """Removes prefill's end and its connections."""
        self._senders.pop(endpoint, None)
        self.cut(endpoint)

    def cut(self, endpoint: str) -> None:
        """Breaks the connections to an endpoint and drops their packets.

        Decode reconnects with its next message.
        """
        gone = {link for link, (to, _) in self._links.items() if to == endpoint}
        for link in gone:
            del self._links[link]
        self.packets = [packet for packet in self.packets if packet.link not in gone]

    def connect(self, endpoint: str, receiver: "FakeReceiver") -> str | None:
        """The link between the two; None if no sender listens at the endpoint."""
        for link, (to, owner) in self._links.items():
            if to == endpoint and owner is receiver:
                return link
        if endpoint not in self._senders:
            return None
        self._num_links += 1
        link = f"{self._num_links:08x}"
        self._links[link] = (endpoint, receiver)
        return link

    def has_link(self, link: str) -> bool:
        """Whether the connection exists."""
        return link in self._links

    def drop_receiver(self, receiver: "FakeReceiver") -> None:
        """Removes decode's end and drops the packets sent to it."""
        gone = {link for link, (_, owner) in self._links.items() if owner is receiver}
        for link in gone:
            del self._links[link]
        self.packets = [p for p in self.packets if p.link not in gone or p.is_up]

    def deliver(self, index: int = 0) -> None:
        """Delivers the packet at `index`."""
        packet = self.packets.pop(index)
        for arrived in self.fault(packet) if self.fault is not None else (packet,):
            self._arrive(arrived)

    def deliver_all(self) -> None:
        """Delivers packets until none is under way."""
        while self.packets:
            self.deliver()

    def _arrive(self, packet: Packet) -> None:
        if packet.link not in self._links:
            return
        endpoint, receiver = self._links[packet.link]
        frames = [memoryview(frame) for frame in packet.frames]
        if packet.is_up:
            self._senders[endpoint].arrive(packet.link, frames)
        else:
            receiver.arrive(endpoint, frames)


class FakeSender(SenderEndpoint):
    """Prefill's end on a FakeNetwork. `is_full`: peers take no message, as with a full queue."""

    is_full = False

    def __init__(
        self,
        network: FakeNetwork,
        endpoint: str,
        instance: str,
        layout: Layout,
        planes: Planes,
        *,
        lease_s: float = LEASE_S,
        ciphers: Sequence[str] = (CRC32C,),
        transports: Sequence[str] = (ZMQ_BLOCKS,),
        slab_bytes: int = SLAB_BYTES,
        device_slab_bytes: int = DEVICE_SLAB_BYTES,
        device: Device | None = None,
        open_agent: OpenAgent = open_nixl,
        clock: Clock = time.monotonic,
        shard: Shard = WHOLE,
    ) -> None:
        super().__init__(
            instance,
            layout,
            planes,
            lease_s=lease_s,
            ciphers=ciphers,
            transports=transports,
            slab_bytes=slab_bytes,
            device_slab_bytes=device_slab_bytes,
            device=device,
            open_agent=open_agent,
            clock=clock,
            shard=shard,
        )
        self.endpoint = endpoint
        self._network = network
        network.listen(endpoint, self)

    def arrive(self, link: str, frames: Sequence[memoryview]) -> None:
        """Handles a message of the network."""
        self._receive_frames(link, frames)

    def poll(self, timeout: float) -> list[TransportEvent]:
        """Delivers packets under way and does the work that is due, without waiting; returns the events."""
        self._network.deliver_all()
        return self.turn()

    def turn(self) -> list[TransportEvent]:
        """As `poll`, but delivers no packets."""
        self._work()
        return self._take_events()

    def close(self) -> None:
        """As `KVTransport.close`."""
        self._perform(self.session.close(self._clock()))
        self._close_slabs()

    def _transmit(self, peer: Peer, header: bytes, payload: Payload | None) -> Delivery | None:
        if not self._network.has_link(peer):
            raise PeerLost("the peer is not connected")
        if self.is_full:
            return None
        frames = (header,) if payload is None else (header, bytes(payload.data))
        self._network.packets.append(Packet(peer, False, frames))
        return Delivered()


class FakeReceiver(ReceiverEndpoint):
    """Decode's end on a FakeNetwork."""

    def __init__(
        self,
        network: FakeNetwork,
        instance: str,
        layout: Layout,
        planes: Planes,
        *,
        window: int = WINDOW,
        lease_s: float = LEASE_S,
        ciphers: Sequence[str] = (CRC32C,),
        transports: Sequence[str] = (ZMQ_BLOCKS,),
        device: Device | None = None,
        slot_bytes: int = SLOT_BYTES,
        open_agent: OpenAgent = open_nixl,
        clock: Clock = time.monotonic,
        shard: Shard = WHOLE,
    ) -> None:
        super().__init__(
            instance,
            layout,
            planes,
            window=window,
            lease_s=lease_s,
            ciphers=ciphers,
            transports=transports,
            device=device,
            slot_bytes=slot_bytes,
            open_agent=open_agent,
            clock=clock,
            shard=shard,
        )
        self._network = network

    def arrive(self, endpoint: str, frames: Sequence[memoryview]) -> None:
        """Handles a message of the network."""
        self._receive_frames(endpoint, frames)

    def lose(self, endpoint: str) -> None:
        """Learns that the connection to `endpoint` has ended."""
        self._close_link(endpoint)
        self._perform(self.session.link_lost(endpoint, self._clock()))

    def poll(self, timeout: float) -> list[TransportEvent]:
        """Delivers packets under way and does the work that is due, without waiting; returns the events."""
        self._network.deliver_all()
        return self.turn()

    def turn(self) -> list[TransportEvent]:
        """As `poll`, but delivers no packets."""
        self._work()
        return self._take_events()

    def close(self) -> None:
        """As `KVTransport.close`."""
        self._perform(self.session.close(self._clock()))
        self._close_slabs()

    def _transmit(self, peer: Peer, header: bytes, payload: Payload | None) -> Delivery | None:
        link = self._network.connect(peer, self)
        if link is None:
            return None
        self._network.packets.append(Packet(link, True, (header,)))
        return Delivered()
